/* How long a kernel or graph runs, learnt from the times it was measured by itself. Lookups take no lock: a lost update costs one
 * measurement. */
#ifndef MESH_GUARD_PREDICT_H
#define MESH_GUARD_PREDICT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct prediction {
  _Atomic uint64_t key;
  _Atomic int64_t ns;   /* 0: not measured yet */
  _Atomic int32_t left; /* launches until it is measured again */
  uint64_t unused;      /* to a size that is quick to count in */
};

#define PREDICTIONS 4096 /* as many as the 12 bits of a place tell */

extern struct prediction predictions[PREDICTIONS];

static inline uint64_t predict_key(const void *function, uint64_t blocks) {
  uint64_t size = (uint64_t)(64 - __builtin_clzll(blocks | 1));
  return ((uint64_t)(uintptr_t)function ^ size << 56) | 1; /* functions are aligned, and 0 is nobody */
}

static inline uint64_t predict_place(uint64_t key) { return key * UINT64_C(0x9E3779B97F4A7C15) >> 52; }

/* The prediction for a function (or graph) at this size of grid. */
struct prediction *predict(const void *function, uint64_t blocks);

/* The same, if it is where it is looked for first; else NULL. */
static inline struct prediction *predict_at_once(const void *function, uint64_t blocks) {
  uint64_t key = predict_key(function, blocks);
  struct prediction *place = &predictions[predict_place(key)];
  return atomic_load_explicit(&place->key, memory_order_relaxed) == key ? place : NULL;
}

/* Counts a launch; true when this one should be measured by itself. */
static inline bool predict_is_due(struct prediction *prediction) {
  int32_t left = atomic_load_explicit(&prediction->left, memory_order_relaxed) - 1;
  atomic_store_explicit(&prediction->left, left, memory_order_relaxed);
  return left < 0;
}

/* Whether it was launched before, and is not measured yet: for all that is known it may run for ever. */
static inline bool predict_is_awaited(const struct prediction *prediction) {
  return atomic_load_explicit(&prediction->left, memory_order_relaxed) < -1;
}

/* A launch by itself took `ns`. `queued`: behind other work, so that no idle time before the kernel is in it. */
void predict_learn(struct prediction *prediction, int64_t ns, bool queued);

#endif
