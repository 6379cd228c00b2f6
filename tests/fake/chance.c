/* What varies from launch to launch, drawn from the world's seed: the n-th draw of the n-th process is the same in every run. */
#include "world.h"

#include <math.h>

/* SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a number from a counter. */
static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

/* In (0, 1). */
static double uniform(uint64_t x) { return ((double)(mix(x) >> 11) + 0.5) / 9007199254740992.0; }

static uint64_t stream(const struct world *world, uint64_t who, uint64_t count) {
  return mix(world->config.traits.seed ^ mix(who)) + count;
}

int64_t world_chance(struct world *world, struct process *process, int64_t ns) {
  const struct world_traits *traits = &world->config.traits;
  uint64_t who = (uint64_t)(process - world->processes);
  double factor = 1;
  if (traits->spread_ppm > 0) { /* log-normal with mean 1, by Box and Muller */
    double sigma = traits->spread_ppm / 1e6, u = uniform(stream(world, who, process->draws++));
    double v = uniform(stream(world, who, process->draws++));
    factor = exp(sigma * sqrt(-2 * log(u)) * cos(6.283185307179586 * v) - sigma * sigma / 2);
  }
  if (traits->slow_one_in > 0 && uniform(stream(world, who, process->draws++)) * traits->slow_one_in < 1)
    factor *= traits->slow_times;
  return (int64_t)((double)ns * factor + 0.5);
}

static uint64_t number_of(const char *name) {
  uint64_t number = 0xcbf29ce484222325ull; /* FNV-1a */
  for (; *name != 0; name++) number = (number ^ (unsigned char)*name) * 0x100000001b3ull;
  return number;
}

int64_t world_load_ns(const struct world *world, const char *name) {
  const struct world_traits *traits = &world->config.traits;
  if (traits->load_most_ns == 0) return 0;
  double u = uniform(stream(world, number_of(name), 0));
  /* Squared, as most kernels are only loaded and few are compiled. */
  return (int64_t)((double)traits->load_least_ns * pow((double)traits->load_most_ns / (double)traits->load_least_ns, u * u));
}

uint32_t world_width_ppm(const struct world *world, const char *name) {
  uint32_t least = world->config.traits.width_least_ppm;
  return least == 0 ? 0 : least + (uint32_t)(uniform(stream(world, number_of(name), 1)) * (1000000 - least));
}

uint32_t world_clock_ppm(const struct world *world, int device, int64_t period) {
  uint32_t least = world->config.traits.clock_least_ppm;
  return least + (uint32_t)(uniform(stream(world, (uint64_t)device << 32, (uint64_t)period)) * (1000000 - least));
}
