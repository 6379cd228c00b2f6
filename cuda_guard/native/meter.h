/* The quick way of a launch: a program makes a million of them, and all but a few have nothing to wait for. It is inline, so that a
 * hook is a few tests and a jump to the driver; whatever one of the tests does not allow goes the long way, by meter_enter. */
#ifndef MESH_GUARD_METER_H
#define MESH_GUARD_METER_H

#include "guard.h"
#include "predict.h"

#define METER_OPEN 4 /* streams that a thread has batches on at once */

/* A batch that a thread adds to. Others close it, under its context's lock; what they miss of it then is a launch at most. */
struct open_batch {
  _Atomic(CUstream) stream; /* NULL: there is none */
  _Atomic int64_t predicted_ns;
  _Atomic uint32_t launches;
  struct batch *batch;
};

struct thread {
  const _Atomic uint32_t *turn; /* NULL: which context is current is to be asked */
  int64_t credit_ns;            /* granted, and not yet used by a launch */
  struct open_batch open[METER_OPEN]; /* the one used last comes first */
  struct context *context;
  struct thread *next; /* in its context */
};

extern __thread struct thread meter_thread;
extern _Atomic int meter_captures; /* under way in this process */

static inline void use_credit(struct thread *thread, struct open_batch *open, int64_t cost_ns) {
  int64_t predicted = atomic_load_explicit(&open->predicted_ns, memory_order_relaxed);
  uint32_t launches = atomic_load_explicit(&open->launches, memory_order_relaxed);
  thread->credit_ns -= cost_ns;
  atomic_store_explicit(&open->predicted_ns, predicted + cost_ns, memory_order_relaxed);
  atomic_store_explicit(&open->launches, launches + 1, memory_order_relaxed);
}

/* Lets a launch pass at once, if nothing is in its way and its stream is the one that the thread used last. */
static inline __attribute__((always_inline)) bool meter_pass(CUstream stream, const void *key, uint64_t blocks) {
  struct thread *thread = &meter_thread;
  struct open_batch *open = &thread->open[0];
  struct prediction *prediction = predict_at_once(key, blocks);
  if (prediction == NULL || atomic_load_explicit(&open->stream, memory_order_relaxed) != stream || thread->turn == NULL) return false;
  if (gate_is_closed() || atomic_load_explicit(&meter_captures, memory_order_relaxed) != 0) return false;
  if ((atomic_load_explicit(thread->turn, memory_order_acquire) & GUARD_TURN_MASK) == GUARD_TURN_WAIT) return false;
  int64_t cost = atomic_load_explicit(&prediction->ns, memory_order_relaxed);
  int32_t left = atomic_load_explicit(&prediction->left, memory_order_relaxed) - 1;
  if (left < 0 || thread->credit_ns < cost) return false;
  atomic_store_explicit(&prediction->left, left, memory_order_relaxed);
  use_credit(thread, open, cost);
  return true;
}

#endif
