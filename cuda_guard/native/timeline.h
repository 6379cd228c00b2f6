/* The time during which a job used a device, as bits of a ring in its page: what runs side by side, in any of its streams, contexts and
 * processes, uses the device once. Adding takes no lock, and stretches may come in any order. Pure. */
#ifndef MESH_GUARD_TIMELINE_H
#define MESH_GUARD_TIMELINE_H

#include "page.h"

#define TICK_BITS 13 /* 8.192 us: finer than the clocks of two contexts agree, and rounding to it is unbiased */
#define WORD_TICKS 32 /* of a word; its upper half says which round of the ring they are of */

/* Marks ticks `from` to `to` of a word of the ring; returns how many were not marked before. */
static inline int64_t timeline_mark(_Atomic uint64_t *ring, int64_t number, int from, int to) {
  _Atomic uint64_t *word = &ring[number % GUARD_TIMELINE];
  uint64_t round = (uint64_t)(number / GUARD_TIMELINE), old = atomic_load(word);
  uint32_t bits = (uint32_t)(((UINT64_C(1) << (to - from)) - 1) << from), had;
  do {
    int32_t ahead = (int32_t)((uint32_t)(old >> WORD_TICKS) - (uint32_t)round);
    if (ahead > 0) return 0; /* so late that the place is in use again */
    had = ahead == 0 ? (uint32_t)old : 0;
  } while (!atomic_compare_exchange_weak(word, &old, round << WORD_TICKS | had | bits));
  return __builtin_popcount(bits & ~had);
}

/* Adds [start, end), in ns of CLOCK_MONOTONIC; returns the ns of it that were not there before. What is older than the ring is long is
 * taken for new. */
static inline int64_t timeline_add(_Atomic uint64_t *ring, int64_t start_ns, int64_t end_ns) {
  int64_t start = start_ns >> TICK_BITS, end = end_ns >> TICK_BITS, most = (GUARD_TIMELINE - 1) * WORD_TICKS, fresh = 0;
  if (start < 0 || end <= start) return 0;
  if (end - start > most) {
    fresh = end - start - most;
    start = end - most;
  }
  while (start < end) {
    int64_t number = start / WORD_TICKS, next = (number + 1) * WORD_TICKS, until = next < end ? next : end;
    fresh += timeline_mark(ring, number, (int)(start % WORD_TICKS), (int)(until - number * WORD_TICKS));
    start = until;
  }
  return fresh << TICK_BITS;
}

#endif
