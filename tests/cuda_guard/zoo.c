/* A small CUDA program, which prints a checksum. With -DLOOKED_UP it finds its calls as a static cudart does, by
 * cuGetProcAddress_v2 of a driver that it opens; else it links the driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CALLS(_)                                                                                                 \
  _(cuInit, cuInit, 2000, (unsigned))                                                                            \
  _(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, (void **, int))                                    \
  _(cuCtxSetCurrent, cuCtxSetCurrent, 4000, (void *))                                                            \
  _(cuModuleLoadData, cuModuleLoadData, 2000, (void **, const void *))                                           \
  _(cuModuleGetFunction, cuModuleGetFunction, 2000, (void **, void *, const char *))                             \
  _(cuMemAlloc, cuMemAlloc_v2, 3020, (uint64_t *, size_t))                                                       \
  _(cuMemFree, cuMemFree_v2, 3020, (uint64_t))                                                                   \
  _(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020, (uint64_t, const void *, size_t))                                       \
  _(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020, (void *, uint64_t, size_t))                                             \
  _(cuMemsetD32, cuMemsetD32_v2, 3020, (uint64_t, unsigned, size_t))                                             \
  _(cuLaunchKernel, cuLaunchKernel, 4000,                                                                        \
    (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))    \
  _(cuCtxSynchronize, cuCtxSynchronize, 2000, (void))

#ifdef LOOKED_UP
#define DECLARE(name, symbol, since, parameters) static int(*call_##name) parameters;
#else
#define DECLARE(name, symbol, since, parameters) \
  int symbol parameters;                         \
  static int(*const call_##name) parameters = symbol;
#endif
CALLS(DECLARE)

static void must(int code, const char *what) {
  if (code == 0) return;
  fprintf(stderr, "%s gave %d\n", what, code);
  exit(1);
}
#define MUST(call) must(call, #call)

enum { WORDS = 1024, LAUNCHES = 300 };

int main(void) {
#ifdef LOOKED_UP
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  int (*look_up)(const char *, void **, int, uint64_t, int *) =
      driver == NULL ? NULL : (int (*)(const char *, void **, int, uint64_t, int *))dlsym(driver, "cuGetProcAddress_v2");
  if (look_up == NULL) return 2;
#define LOOK_UP(name, symbol, since, parameters) MUST(look_up(#name, (void **)&call_##name, since, 0, NULL));
  CALLS(LOOK_UP)
#endif
  uint32_t words[WORDS], sum = 0;
  uint64_t memory;
  void *context, *module, *kernel;
  for (uint32_t i = 0; i < WORDS; i++) words[i] = i * 2654435761u;
  MUST(call_cuInit(0));
  MUST(call_cuDevicePrimaryCtxRetain(&context, 0));
  MUST(call_cuCtxSetCurrent(context));
  MUST(call_cuModuleLoadData(&module, "image"));
  MUST(call_cuModuleGetFunction(&kernel, module, "k_50us"));
  MUST(call_cuMemAlloc(&memory, sizeof words));
  MUST(call_cuMemcpyHtoD(memory, words, sizeof words));
  for (int i = 0; i < LAUNCHES; i++) MUST(call_cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
  MUST(call_cuMemsetD32(memory, 7, WORDS / 2));
  MUST(call_cuCtxSynchronize());
  MUST(call_cuMemcpyDtoH(words, memory, sizeof words));
  MUST(call_cuMemFree(memory));
  for (uint32_t i = 0; i < WORDS; i++) sum = sum * 31 + words[i];
  printf("%u\n", sum);
  return 0;
}
