/* Allowed and spent GPU time of a job. The allowance is a line through (t0, v0) whose slope is the job's share. When the share changes
 * the daemon starts a new line at the current point of the old one, so a debt is paid off at the new rate. Pure. */
#ifndef MESH_GUARD_BUCKET_H
#define MESH_GUARD_BUCKET_H

#include "page.h"

/* Returns the total ns allowed by `now_ns`. */
static inline int64_t rate_allowed(const struct guard_rate *rate, int64_t now_ns) {
  return rate->v0_ns + (int64_t)((__int128)(now_ns - rate->t0_ns) * rate->share_ppm / GUARD_PPM);
}

/* Reads the line in force. The daemon writes the other one, then flips the index; if it did so twice meanwhile, this reads again. */
static inline struct guard_rate rate_of(const struct guard_allowance *allowance) {
  for (;;) {
    uint32_t before = atomic_load_explicit(&allowance->rate_index, memory_order_acquire);
    struct guard_rate rate = allowance->rates[before & 1];
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&allowance->rate_index, memory_order_relaxed) == before) return rate;
  }
}

/* Returns the ns until a job that has spent this much may continue; 0: now, INT64_MAX: never at this rate. */
static inline int64_t bucket_wait(const struct guard_rate *rate, int64_t spent_ns, int64_t now_ns) {
  __int128 debt = (__int128)spent_ns - rate_allowed(rate, now_ns); /* the job can write anything there */
  if (debt <= 0) return 0;
  if (rate->share_ppm == 0) return INT64_MAX;
  __int128 wait = debt * GUARD_PPM / rate->share_ppm + 1;
  return wait > INT64_MAX ? INT64_MAX : (int64_t)wait;
}

/* Spends `ns` (negative: returns unused time). Time saved beyond the burst is forfeited first. */
static inline void bucket_spend(const struct guard_rate *rate, _Atomic int64_t *spent, int64_t ns, int64_t now_ns) {
  int64_t least = rate_allowed(rate, now_ns) - rate->burst_ns, old = atomic_load(spent), sum;
  do {
    int64_t from = ns > 0 && old < least ? least : old;
    if (__builtin_add_overflow(from, ns, &sum)) sum = ns > 0 ? INT64_MAX : INT64_MIN;
  } while (!atomic_compare_exchange_weak(spent, &old, sum));
}

#endif
