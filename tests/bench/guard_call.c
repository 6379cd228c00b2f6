/* What a launch costs on its way through the guard, beside the same call made directly. The driver behind both does nothing: the
 * double of the tests takes 200 ns for a launch, which would hide a few.
 *
 *   guard_call DRIVER GUARD ROUNDS   prints, round after round, "direct all fast": ns per call directly; through the guard, with
 *                                    everything that it does from time to time; and when it has nothing to do but gate and token */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "abi.h"

#ifdef DRIVER

CUresult cuInit(unsigned int flags) { return (void)flags, CUDA_SUCCESS; }
CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) { return *out = 512, (void)bytes, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *out) { return *out = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *out) { return *out = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device) {
  *out = (CUuuid){.bytes = {[15] = 1}};
  return (void)device, CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent *out, unsigned int flags) { return *out = (CUevent)1, (void)flags, CUDA_SUCCESS; }
unsigned records; /* of events: how often the guard did more than let a launch pass */
CUresult cuEventRecord(CUevent event, CUstream stream) { return records++, (void)event, (void)stream, CUDA_SUCCESS; }
CUresult cuEventQuery(CUevent event) { /* now and then not yet: a device that is kept busy */
  static unsigned calls;
  return (void)event, calls++ % 4 == 0 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}
CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
  static int calls;
  *ms = (float)(calls++ % 2) * 0.02f; /* asked for a batch's start, then its end: 20 us */
  return (void)start, (void)end, CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
                        unsigned int bz, unsigned int shared, CUstream stream, void **params, void **extra) {
  (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)params, (void)extra;
  return function == NULL;
}

#else

enum { CALLS = 1 << 20, FEW = 32, CHUNKS = 1 << 14 };

typedef CUresult launch(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
                        unsigned int bz, unsigned int shared, CUstream stream, void **params, void **extra);

static void *find(const char *path, const char *name) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void *found = library == NULL ? NULL : dlsym(library, name);
  if (found == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return found;
}

static double now_ns(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static double span(launch *call, int count) {
  static uint64_t functions[4]; /* as a program has several */
  double begun = now_ns();
  for (int i = 0; i < count; i++)
    if (call((CUfunction)&functions[i & 3], 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != CUDA_SUCCESS) exit(2);
  return now_ns() - begun;
}

static int compare(const void *a, const void *b) {
  double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

/* Of few calls at a time, and only those times at which the guard had none of its rarer work to do. */
static double median_of_few(launch *call, const unsigned *records) {
  static double some[CHUNKS], clock[CHUNKS];
  int count = 0;
  for (int i = 0; i < CHUNKS; i++) {
    unsigned before = *records;
    double taken = span(call, FEW);
    if (*records == before) some[count++] = taken;
    clock[i] = span(call, 0);
  }
  qsort(some, (size_t)count, sizeof *some, compare);
  qsort(clock, CHUNKS, sizeof *clock, compare);
  return (some[count / 2] - clock[CHUNKS / 2]) / FEW;
}

int main(int count, char **words) {
  if (count != 4) return 3;
  launch *direct = (launch *)find(words[1], "cuLaunchKernel"), *guarded = (launch *)find(words[2], "cuLaunchKernel");
  const unsigned *records = find(words[1], "records");
  (void)span(direct, CALLS);
  (void)span(guarded, CALLS);
  for (int round = atoi(words[3]); round > 0; round--) {
    double plain = span(direct, CALLS) / CALLS;
    printf("%f %f %f\n", plain, span(guarded, CALLS) / CALLS, median_of_few(guarded, records));
  }
  return 0;
}

#endif
