/* What a guest of a container sees of its GPU, by way of the dynamic loader alone. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

typedef int call();

int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == NULL) return puts(dlerror()), 1;
  void *context = NULL;
  uint64_t address, left, total;
  int trouble = ((call *)dlsym(driver, "cuInit"))(0);
  if (trouble == 0) trouble = ((call *)dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0);
  if (trouble == 0) trouble = ((call *)dlsym(driver, "cuCtxSetCurrent"))(context);
  if (trouble == 0) trouble = ((call *)dlsym(driver, "cuMemGetInfo_v2"))(&left, &total);
  if (trouble != 0) return printf("error %d\n", trouble), 1;
  call *allocate = (call *)dlsym(driver, "cuMemAlloc_v2");
  int half = allocate(&address, (uint64_t)512 << 20), more = allocate(&address, (uint64_t)1 << 30);
  printf("total %lu, half %d, more %d\n", (unsigned long)total, half, more);
  fflush(stdout);
  return (int)sleep(60);
}
