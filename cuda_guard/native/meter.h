/* The quick way of a launch: a program makes a million of them, and all but a few have nothing to wait for. It is inline, so that a
 * hook is a few tests and a jump to the driver; whatever one of the tests does not allow goes the long way, by meter_enter. */
#ifndef MESH_GUARD_METER_H
#define MESH_GUARD_METER_H

#include "guard.h"
#include "predict.h"

/* A stream as the meter sees it. Its counts only grow; another thread that launches on it at the same time may lose one. */
struct lane {
  _Atomic(CUstream) open;      /* NULL: the next launch has to begin a new stretch */
  _Atomic int64_t launched_ns; /* as predicted */
  _Atomic uint64_t launches;   /* of kernels and graphs */
  _Atomic int64_t begun_ns;    /* when the first launch of a stretch was made: its work has not begun earlier */
  struct lane *next; /* in its context, whose mutex is of all below */
  struct context *context;
  struct thread *user; /* that launched on it last */
  CUstream stream;     /* NULL: it has ended, and the lane can be used again */
  struct mark *first, **end; /* marks not known to be reached, in order */
  int64_t marked_ns;         /* parts of the counts that are before the last mark */
  uint64_t marked;
  int64_t seen_ns;   /* `launched_ns` at the reaper's last look */
  int64_t last_ns;   /* moment of the last mark that was reached */
  int64_t reached_ns; /* when that was seen */
  bool dry;          /* so it was at the reaper's last look, although something had been launched since its last mark */
  int sparse;        /* launches still to be measured one by one: the stream was seen to run dry between launches */
};

struct thread {
  const _Atomic uint32_t *turn; /* NULL: which context is current is to be asked */
  int64_t credit_ns;            /* may be launched before the next look at the allowance */
  int64_t sample_ns;            /* until a launch is measured by itself; drawn at random */
  struct lane *lane;            /* the one used last */
  struct context *context;
  struct prediction *sampled; /* the launch that is under way is measured by itself */
  uint32_t random;
};

extern __thread struct thread meter_thread;
extern _Atomic int meter_captures; /* under way in this process */

static inline void use_credit(struct thread *thread, struct lane *lane, int64_t cost_ns, bool copies) {
  int64_t ns = atomic_load_explicit(&lane->launched_ns, memory_order_relaxed);
  uint64_t launches = atomic_load_explicit(&lane->launches, memory_order_relaxed);
  thread->credit_ns -= cost_ns;
  thread->sample_ns -= cost_ns;
  atomic_store_explicit(&lane->launched_ns, ns + cost_ns, memory_order_relaxed);
  atomic_store_explicit(&lane->launches, launches + !copies, memory_order_relaxed);
}

/* Lets a launch pass at once, if nothing is in its way and its stream is the one that the thread used last. */
static inline __attribute__((always_inline)) bool meter_pass(CUstream stream, uint64_t key, bool copies) {
  struct thread *thread = &meter_thread;
  struct prediction *prediction = predict_at_once(key);
  if (prediction == NULL || thread->turn == NULL || thread->lane == NULL) return false;
  if (atomic_load_explicit(&thread->lane->open, memory_order_relaxed) != stream) return false;
  if (gate_is_closed() || atomic_load_explicit(&meter_captures, memory_order_relaxed) != 0) return false;
  if ((atomic_load_explicit(thread->turn, memory_order_acquire) & GUARD_TURN_MASK) == GUARD_TURN_WAIT) return false;
  int64_t cost = atomic_load_explicit(&prediction->ns, memory_order_relaxed);
  if (cost == 0 || thread->credit_ns < cost || thread->sample_ns < cost) return false;
  use_credit(thread, thread->lane, cost, copies);
  return true;
}

#endif
