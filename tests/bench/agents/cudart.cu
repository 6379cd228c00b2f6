/* A program in C with a static cudart, which works as gpu.py's `work` does: for each line with a number of seconds it launches kernels
 * that fill the device, and prints how many. */
#include <chrono>
#include <cstdio>
#include <cstdlib>

__global__ void spin(float *sink, int iterations) {
  float x = 0.5f;
  for (int i = 0; i < iterations; i++) x = fmaf(x, x, 0.25f);
  if (x == -2) *sink = x; /* never: it keeps the loop */
}

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main() {
  enum { ITERATIONS = 20000, QUEUED = 200 };
  cudaDeviceProp device;
  float *sink;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || cudaMalloc(&sink, sizeof *sink) != cudaSuccess) {
    fprintf(stderr, "%s\n", cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
  spin<<<2 * device.multiProcessorCount, 1024>>>(sink, ITERATIONS);
  cudaDeviceSynchronize();
  puts("ready");
  fflush(stdout);
  for (char line[64]; fgets(line, sizeof line, stdin) != NULL;) {
    double begun = now(), seconds = atof(line);
    long launched = 0;
    while (now() - begun < seconds) {
      for (int i = 0; i < QUEUED; i++, launched++) spin<<<2 * device.multiProcessorCount, 1024>>>(sink, ITERATIONS);
      cudaDeviceSynchronize();
    }
    double took = now() - begun;
    printf("{\"units\": %ld, \"took\": %f, \"rate\": %f, \"by\": \"cudart\"}\n", launched, took, launched / took);
    fflush(stdout);
  }
  return cudaGetLastError() == cudaSuccess ? 0 : 1;
}
