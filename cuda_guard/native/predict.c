#include "predict.h"

#define PROBES 8
#define RARELY 64      /* launches of a short kernel between two measurements, which then cost less than half a per cent */
#define SOON 3         /* while all measurements include idle time */
#define LONG_NS 400000 /* the cost of two events is negligible for a kernel this long */

struct prediction predictions[PREDICTIONS];

struct prediction *predict(const void *function, uint64_t blocks) {
  uint64_t key = predict_key(function, blocks), at = predict_place(key);
  for (int i = 0; i < PROBES; i++) {
    struct prediction *place = &predictions[(at + (uint64_t)i) & (PREDICTIONS - 1)];
    uint64_t there = atomic_load_explicit(&place->key, memory_order_relaxed);
    if (there == key) return place;
    if (there == 0 && atomic_compare_exchange_strong(&place->key, &there, key)) return place;
    if (there == key) return place;
  }
  struct prediction *place = &predictions[at & (PREDICTIONS - 1)]; /* full: replaces an entry */
  atomic_store(&place->ns, 0);
  atomic_store(&place->left, 0);
  atomic_store(&place->key, key);
  return place;
}

void predict_learn(struct prediction *prediction, int64_t ns, bool queued) {
  int64_t known = atomic_load(&prediction->ns);
  if (ns < 1) ns = 1;
  bool longer = known > 0 && ns > known;
  if (known == 0)
    known = ns;
  else if (longer && !queued && ns < 2 * known)
    known += (ns - known) / 16; /* probably idle time before it */
  else
    known += (ns - known) / (longer ? 4 : 2);
  atomic_store(&prediction->ns, known > 0 ? known : 1);
  atomic_store(&prediction->left, ns >= LONG_NS ? 0 : queued ? RARELY : SOON);
}
