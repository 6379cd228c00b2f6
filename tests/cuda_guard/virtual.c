/* The guard's own code on the clock of a world whose time is virtual: where it would wait, time goes on. So what it does is the same
 * each time, and a minute takes the time of its calls.
 *
 *   virtual LIBWORLD SECONDS SEED KERNEL...   launches kernels at random from the list, which may name one several times, for so
 *                                             many seconds; prints what the device had done, in ns, after each. With VIRTUAL_MIX as
 *                                             "every times random" in the environment, one launch of so many, in turn or at random,
 *                                             gets this number as its parameter, and the others 1 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "guard.h"

CUresult cuInit(unsigned int flags);
CUresult cuModuleLoadData(void **out, const void *image);
CUresult cuModuleGetFunction(CUfunction *out, void *module, const char *name);

enum { STEP_NS = 20000, KERNELS = 16 };

static void *world;
static int64_t (*world_now)(void *);
static int64_t (*world_busy)(void *, int);
static int (*world_advance)(void *, int64_t);

int64_t now_ns(void) { return world_now(world); }

void futex_wait(const _Atomic uint32_t *word, uint32_t seen, int64_t deadline_ns) {
  int64_t left = deadline_ns - now_ns();
  if (atomic_load(word) == seen && left > 0) (void)world_advance(world, left < STEP_NS ? left : STEP_NS);
}

#define MUST(call) must(call, #call)
static void must(CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return;
  fprintf(stderr, "%s gave %d\n", what, result);
  exit(1);
}

int main(int count, char **words) {
  void *library = count < 5 || count > 4 + KERNELS ? NULL : dlopen(words[1], RTLD_NOW);
  if (library == NULL) return 2;
  void *(*open)(const char *) = (void *(*)(const char *))dlsym(library, "python_open");
  world_now = (int64_t (*)(void *))dlsym(library, "python_now_ns");
  world_busy = (int64_t (*)(void *, int))dlsym(library, "python_busy_ns");
  world_advance = (int (*)(void *, int64_t))dlsym(library, "python_advance");
  world = open(getenv("FAKE_GPU_WORLD"));
  int64_t seconds = atoi(words[2]), begun = now_ns();
  unsigned seed = (unsigned)atoi(words[3]);
  CUcontext context;
  CUfunction kernels[KERNELS];
  void *module;
  MUST(cuInit(0));
  MUST(cuDevicePrimaryCtxRetain(&context, 0));
  MUST(cuCtxSetCurrent(context));
  MUST(cuModuleLoadData(&module, "image"));
  for (int i = 4; i < count; i++) MUST(cuModuleGetFunction(&kernels[i - 4], module, words[i]));
  unsigned every = 1, times = 1, at_random = 0, launched = 0;
  if (getenv("VIRTUAL_MIX") != NULL && sscanf(getenv("VIRTUAL_MIX"), "%u %u %u", &every, &times, &at_random) != 3) return 3;
  for (int64_t second = 1; second <= seconds;) {
    unsigned number = (at_random ? (unsigned)rand_r(&seed) : ++launched) % every == 0 ? times : 1;
    void *params[] = {&number};
    MUST(cuLaunchKernel(kernels[rand_r(&seed) % (unsigned)(count - 4)], 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
    for (; second <= seconds && now_ns() - begun >= second * 1000000000; second++) printf("%lld\n", (long long)world_busy(world, 0));
  }
  return 0;
}
