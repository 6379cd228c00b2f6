/* Prediction of the run time of a launch, by what is launched and its shape, learnt from launches measured at random. It decides only
 * whether a launch is admitted now: what is charged is measured. Lookups take no lock: a lost update costs one measurement. */
#ifndef MESH_GUARD_PREDICT_H
#define MESH_GUARD_PREDICT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct prediction {
  _Atomic uint64_t key;
  _Atomic int64_t ns;        /* mean of the measurements; 0: not measured yet */
  _Atomic uint32_t measured; /* how often */
  uint32_t unused[3];        /* padding to a power of two */
};

#define PREDICTIONS 4096 /* 2^12, see predict_place */

extern struct prediction predictions[PREDICTIONS];

/* Multilinear hash of what is launched (a function, graph or call) and of its shape; 0 means no entry. */
static inline uint64_t predict_key(const void *what, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  return ((uint64_t)(uintptr_t)what * UINT64_C(0x9E3779B97F4A7C15) + a * UINT64_C(0xBF58476D1CE4E5B9) + b * UINT64_C(0x94D049BB133111EB) +
          c * UINT64_C(0xD6E8FEB86659FD93) + d * UINT64_C(0xA0761D6478BD642F)) |
         1;
}

static inline uint64_t predict_place(uint64_t key) { return key >> 52; }

/* Returns the prediction for a key. */
struct prediction *predict(uint64_t key);

/* The same, if it is at its first position; else NULL. */
static inline struct prediction *predict_at_once(uint64_t key) {
  struct prediction *place = &predictions[predict_place(key)];
  return atomic_load_explicit(&place->key, memory_order_relaxed) == key ? place : NULL;
}

/* Records that a launch by itself took `ns`. */
void predict_learn(struct prediction *prediction, int64_t ns);

#endif
