/* Prediction of the run time of a kernel or graph, learnt from launches that were measured by themselves. Lookups take no lock: a lost
 * update costs one measurement. */
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
  uint64_t unused;      /* padding to a power of two */
};

#define PREDICTIONS 4096 /* 2^12, see predict_place */

extern struct prediction predictions[PREDICTIONS];

static inline uint64_t predict_key(const void *function, uint64_t blocks) {
  uint64_t size = (uint64_t)(64 - __builtin_clzll(blocks | 1));
  return ((uint64_t)(uintptr_t)function ^ size << 56) | 1; /* functions are aligned, and 0 means no entry */
}

static inline uint64_t predict_place(uint64_t key) { return key * UINT64_C(0x9E3779B97F4A7C15) >> 52; }

/* Returns the prediction for a function (or graph) with this grid size. */
struct prediction *predict(const void *function, uint64_t blocks);

/* The same, if it is at its first position; else NULL. */
static inline struct prediction *predict_at_once(const void *function, uint64_t blocks) {
  uint64_t key = predict_key(function, blocks);
  struct prediction *place = &predictions[predict_place(key)];
  return atomic_load_explicit(&place->key, memory_order_relaxed) == key ? place : NULL;
}

/* Counts a launch; true if it should be measured by itself. */
static inline bool predict_is_due(struct prediction *prediction) {
  int32_t left = atomic_load_explicit(&prediction->left, memory_order_relaxed) - 1;
  atomic_store_explicit(&prediction->left, left, memory_order_relaxed);
  return left < 0;
}

/* True if it was launched before and is not measured yet, so it may run for any time. */
static inline bool predict_is_awaited(const struct prediction *prediction) {
  return atomic_load_explicit(&prediction->left, memory_order_relaxed) < -1;
}

/* Records that a launch by itself took `ns`. `queued`: behind other work, so the figure includes no idle time. */
void predict_learn(struct prediction *prediction, int64_t ns, bool queued);

#endif
