/* A program in C with a static cudart, which works as gpu.py's `work` does: for each line with a number of seconds it launches kernels
 * that fill the device, and prints how many in that time, after a moment that does not count. */
#include <chrono>
#include <cstdio>
#include <cstdlib>

enum { ITERATIONS = 20000, QUEUED = 200 };
#define LEAD_S 0.25

__global__ void spin(float *sink, int iterations) {
  float x = 0.5f;
  for (int i = 0; i < iterations; i++) x = fmaf(x, x, 0.25f);
  if (x == -2) *sink = x; /* never: it keeps the loop */
}

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/* Works so long; returns the seconds that it took. */
static double spend(double seconds, int blocks, float *sink, long *launched) {
  double begun = now();
  for (*launched = 0; now() - begun < seconds; *launched += QUEUED) {
    for (int i = 0; i < QUEUED; i++) spin<<<blocks, 1024>>>(sink, ITERATIONS);
    cudaDeviceSynchronize();
  }
  return now() - begun;
}

int main() {
  cudaDeviceProp device;
  float *sink;
  long before, launched;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || cudaMalloc(&sink, sizeof *sink) != cudaSuccess) {
    fprintf(stderr, "%s\n", cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
  int blocks = 2 * device.multiProcessorCount;
  spin<<<blocks, 1024>>>(sink, ITERATIONS);
  cudaDeviceSynchronize();
  puts("ready");
  fflush(stdout);
  for (char line[64]; fgets(line, sizeof line, stdin) != NULL;) {
    (void)spend(LEAD_S, blocks, sink, &before);
    double took = spend(atof(line), blocks, sink, &launched);
    printf("{\"units\": %ld, \"took\": %f, \"all_units\": %ld, \"rate\": %f, \"by\": \"cudart\"}\n", launched, took,
           before + launched, launched / took);
    fflush(stdout);
  }
  return cudaGetLastError() == cudaSuccess ? 0 : 1;
}
