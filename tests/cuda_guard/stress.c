/* Many threads do everything at once through the guard, which is compiled into this program so that a sanitizer sees all of it.
 *
 *   stress THREADS ROUNDS   prints how many kernels and graphs were launched; ends with 1 at the first call that fails in a way that
 *                           it may not */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "guard.h"

CUresult cuInit(unsigned int flags);
CUresult cuModuleLoadData(void **out, const void *image);
CUresult cuModuleGetFunction(CUfunction *out, void *module, const char *name);
CUresult cuStreamCreate(CUstream *out, unsigned int flags);
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream);

enum { KERNELS = 3, MIB = 1 << 20 };

static CUcontext context;
static CUfunction kernels[KERNELS];
static CUstream shared;
static int rounds;
static _Atomic long launched;

#define MUST(call) must(call, #call)
static void must(CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return;
  fprintf(stderr, "%s gave %d\n", what, result);
  exit(1);
}

/* May fail for want of memory. */
static bool fits(CUresult result) {
  if (result != CUDA_ERROR_OUT_OF_MEMORY) MUST(result);
  return result == CUDA_SUCCESS;
}

static void launch(CUfunction function, CUstream stream) {
  MUST(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
  atomic_fetch_add(&launched, 1);
}

static void use_memory(unsigned *seed, CUstream stream) {
  CUdeviceptr pointer;
  size_t bytes = (size_t)(1 + rand_r(seed) % 32) * MIB;
  CUDA_ARRAY_DESCRIPTOR shape = {.Width = bytes / MIB * 1024, .Height = 1024, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 1};
  CUarray array;
  void *host;
  if (fits(cuMemAllocHost_v2(&host, bytes / 32))) MUST(cuMemFreeHost(host));
  if (fits(cuMemAlloc_v2(&pointer, bytes))) MUST(cuMemFree_v2(pointer));
  if (fits(cuMemAllocAsync(&pointer, bytes, stream))) MUST(cuMemFreeAsync(pointer, stream));
  if (fits(cuArrayCreate_v2(&array, &shape))) MUST(cuArrayDestroy(array));
}

static void use_graph(CUstream stream) {
  CUgraph graph;
  CUgraphExec exec;
  MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  for (int i = 0; i < KERNELS; i++) MUST(cuLaunchKernel(kernels[i], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
  MUST(cuStreamEndCapture(stream, &graph));
  MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
  MUST(cuGraphLaunch(exec, stream));
  atomic_fetch_add(&launched, 1);
  MUST(cuStreamSynchronize(stream));
  MUST(cuGraphExecDestroy(exec));
  MUST(cuGraphDestroy(graph));
}

static void *work(void *number) {
  unsigned seed = (unsigned)(uintptr_t)number;
  CUstream stream;
  MUST(cuCtxSetCurrent(context));
  MUST(cuStreamCreate(&stream, 1));
  for (int round = 0; round < rounds; round++) {
    launch(kernels[rand_r(&seed) % KERNELS], stream);
    launch(kernels[rand_r(&seed) % KERNELS], shared);
    switch (rand_r(&seed) % 6) {
      case 0:
        MUST(cuStreamSynchronize(stream));
        break;
      case 1:
        MUST(cuStreamDestroy_v2(stream));
        MUST(cuStreamCreate(&stream, 1));
        break;
      case 2:
        if (seed % 4 == 0) use_graph(stream);
        break;
      case 3:
        MUST(cuLaunchKernel_ptsz(kernels[0], 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
        atomic_fetch_add(&launched, 1);
        break;
      default:
        use_memory(&seed, stream);
    }
  }
  MUST(cuStreamSynchronize(stream));
  MUST(cuStreamDestroy_v2(stream));
  return NULL;
}

int main(int count, char **words) {
  static const char *const names[KERNELS] = {"k_5us", "k_50us", "k_500us"};
  pthread_t threads[256];
  void *module;
  int many = count == 3 ? atoi(words[1]) : 0;
  if (many < 1 || many > 256) return 2;
  rounds = atoi(words[2]);
  MUST(cuInit(0));
  MUST(cuDevicePrimaryCtxRetain(&context, 0));
  MUST(cuCtxSetCurrent(context));
  MUST(cuModuleLoadData(&module, "image"));
  for (int i = 0; i < KERNELS; i++) MUST(cuModuleGetFunction(&kernels[i], module, names[i]));
  MUST(cuStreamCreate(&shared, 1));
  for (int i = 0; i < many; i++)
    if (pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1)) != 0) return 3;
  for (int i = 0; i < many; i++) (void)pthread_join(threads[i], NULL);
  MUST(cuCtxSynchronize());
  printf("%ld\n", atomic_load(&launched));
  fflush(stdout);
  for (char byte; fread(&byte, 1, 1, stdin) == 1;) { /* until it has been looked at */
  }
  return 0;
}
