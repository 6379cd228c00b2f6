#include "predict.h"

#define PROBES 8
#define WEIGHT 16 /* of the mean so far, against a new measurement: forgets in about as many (own choice) */

struct prediction predictions[PREDICTIONS];

struct prediction *predict(uint64_t key) {
  uint64_t at = predict_place(key);
  for (uint64_t i = 0; i < PROBES; i++) {
    struct prediction *place = &predictions[(at + i) & (PREDICTIONS - 1)];
    uint64_t there = atomic_load_explicit(&place->key, memory_order_relaxed);
    if (there == key) return place;
    if (there == 0 && atomic_compare_exchange_strong(&place->key, &there, key)) return place;
    if (there == key) return place;
  }
  struct prediction *place = &predictions[at]; /* full: replaces an entry */
  atomic_store(&place->ns, 0);
  atomic_store(&place->measured, 0);
  atomic_store(&place->key, key);
  return place;
}

/* The first one never counts: it includes loading the code. */
void predict_learn(struct prediction *prediction, int64_t ns) {
  uint32_t measured = atomic_fetch_add(&prediction->measured, 1);
  if (measured == 0) return;
  int64_t known = atomic_load(&prediction->ns);
  known += (ns - known) / (measured < WEIGHT ? measured : WEIGHT);
  atomic_store(&prediction->ns, known > 0 ? known : 1);
}
