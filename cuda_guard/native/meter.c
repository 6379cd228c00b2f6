/* GPU time: work is let through in portions, and charged by what it was measured to take.
 *
 * A thread is granted a portion of predicted time at once and launches from it without a lock. When it is used up, the thread closes
 * its batches (an event before the first launch of each stream, one after the last) and waits for the next portion: for the job's
 * turn, for its allowance, and until no more than the window is under way. What a batch took is known when its last event has
 * happened; the difference from what was predicted is charged then. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "bucket.h"
#include "cover.h"
#include "meter.h"

#define GUESS_NS 500000          /* of a kernel that is launched for the first time */
#define WORTH_NS 100000          /* a batch that is shorter stays open over a wait: its events would cost too much */
#define NAP_LEAST_NS 20000
#define NAP_MOST_NS 500000
#define TURNS_STALE_NS 1000000000 /* whoever hands out turns has not been seen for so long: there are none */
#define ORIGIN_NS 20000000000    /* event times are floats of milliseconds: after so long they are told from a later origin */

struct batch {
  struct batch *next;
  CUstream stream;
  struct context *context;
  CUevent start, end;
  int64_t predicted_ns; /* these two are known once it is closed */
  uint32_t launches;
  bool queued, foreseen; /* began behind other work; how long it takes was known by measurement */
  struct prediction *sample; /* the only launch of it, by itself */
};

struct context {
  struct context *next;
  CUcontext handle;
  int device;
  pthread_mutex_t mutex; /* of everything below */
  struct batch *closed, **closed_end, *spare;
  struct thread *threads; /* that have open batches here */
  CUevent origin, next_origin;
  int64_t origin_ns, origin_made_ns;
  struct cover cover;
  _Atomic bool gone;
};

__thread struct thread meter_thread;
static __thread bool known; /* to the key that ends it */
static pthread_key_t self_key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static struct context *_Atomic contexts;
static pthread_mutex_t contexts_mutex = PTHREAD_MUTEX_INITIALIZER;
_Atomic int meter_captures;
static pthread_mutex_t waiting_mutex = PTHREAD_MUTEX_INITIALIZER;
static int waiting[GUARD_DEVICES]; /* threads that would launch if they might */

/* --- what is told to the job page */

static struct guard_use *use_of(const struct context *context) { return &guard_job->uses[context->device]; }

static _Atomic int64_t *under_way(const struct context *context) {
  static _Atomic int64_t nowhere[GUARD_DEVICES];
  int slot = guard_slot();
  return slot < 0 ? &nowhere[context->device] : &guard_job->table[slot].under_way[context->device];
}

static void spend(const struct context *context, int64_t ns) {
  struct guard_rate rate = rate_of(&guard_policy->allowances[context->device]);
  bucket_spend(&rate, &use_of(context)->spent_ns, ns, now_ns());
}

/* --- batches; the context's mutex is held */

static struct batch *batch_make(struct context *context) {
  struct batch *batch = context->spare;
  if (batch != NULL) {
    context->spare = batch->next;
  } else {
    batch = calloc(1, sizeof *batch);
    if (batch == NULL) return NULL;
    if (DRIVER(cuEventCreate)(&batch->start, CU_EVENT_DEFAULT) != CUDA_SUCCESS ||
        DRIVER(cuEventCreate)(&batch->end, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
      free(batch); /* a context in error: nothing can be measured in it any more */
      return NULL;
    }
  }
  CUevent start = batch->start, end = batch->end;
  *batch = (struct batch){.context = context, .start = start, .end = end};
  return batch;
}

static void batch_spare(struct batch *batch) {
  batch->next = batch->context->spare;
  batch->context->spare = batch;
}

/* What it took is told; it was paid for when it was launched, as predicted. */
static void count(const struct batch *batch, int64_t busy_ns) {
  struct guard_use *use = use_of(batch->context);
  spend(batch->context, busy_ns - batch->predicted_ns);
  atomic_fetch_add(&use->busy_ns, (uint64_t)(busy_ns > 0 ? busy_ns : 0));
  atomic_fetch_add(&use->launches, batch->launches);
}

/* Its end is marked; what it took will be known later. */
static void close_open(struct open_batch *open) {
  if (atomic_load_explicit(&open->stream, memory_order_relaxed) == NULL) return;
  struct batch *batch = open->batch;
  struct context *context = batch->context;
  atomic_store_explicit(&open->stream, NULL, memory_order_relaxed);
  batch->predicted_ns = atomic_load_explicit(&open->predicted_ns, memory_order_relaxed);
  batch->launches = atomic_load_explicit(&open->launches, memory_order_relaxed);
  if (batch->launches == 0 || DRIVER(cuEventRecord)(batch->end, batch->stream) != CUDA_SUCCESS) {
    count(batch, batch->predicted_ns);
    batch_spare(batch);
    return;
  }
  atomic_fetch_add(under_way(context), batch->predicted_ns);
  batch->next = NULL;
  *context->closed_end = batch;
  context->closed_end = &batch->next;
}

static void close_stream(struct thread *thread, CUstream stream) {
  for (unsigned i = 0; i < METER_OPEN; i++)
    if (atomic_load_explicit(&thread->open[i].stream, memory_order_relaxed) == stream) close_open(&thread->open[i]);
}

static void close_all(struct thread *thread) {
  for (unsigned i = 0; i < METER_OPEN; i++) close_open(&thread->open[i]);
}

/* The moment of an event on the context's time line: CUDA_ERROR_NOT_READY while that is not known yet. */
static CUresult moment(const struct context *context, CUevent event, int64_t *ns) {
  float ms = 0;
  CUresult result = DRIVER(cuEventElapsedTime)(&ms, context->origin, event);
  *ns = context->origin_ns + (int64_t)((double)ms * 1e6);
  return result;
}

static void move_origin(struct context *context) {
  int64_t ns;
  if (context->next_origin == NULL || DRIVER(cuEventQuery)(context->next_origin) != CUDA_SUCCESS) return;
  if (moment(context, context->next_origin, &ns) != CUDA_SUCCESS) return;
  (void)DRIVER(cuEventDestroy_v2)(context->origin);
  context->origin = context->next_origin;
  context->origin_ns = ns;
  context->next_origin = NULL;
}

static void mark_origin(struct context *context, CUstream stream) {
  int64_t now = now_ns();
  CUevent *event = context->origin == NULL ? &context->origin : &context->next_origin;
  if (*event != NULL || (context->origin != NULL && now - context->origin_made_ns < ORIGIN_NS)) return;
  if (DRIVER(cuEventCreate)(event, CU_EVENT_DEFAULT) != CUDA_SUCCESS) return;
  (void)DRIVER(cuEventRecord)(*event, stream);
  context->origin_made_ns = now;
}

static void charge(struct batch *batch, int64_t start_ns, int64_t end_ns) {
  struct context *context = batch->context;
  int64_t span = end_ns - start_ns, busy = cover_add(&context->cover, start_ns, end_ns);
  if (batch->sample != NULL) predict_learn(batch->sample, span, batch->queued);
  bool trusted = batch->sample == NULL || (batch->foreseen && !batch->queued);
  if (trusted && span > batch->predicted_ns + batch->predicted_ns / 8 && busy > batch->predicted_ns)
    busy = batch->predicted_ns; /* the device ran dry between the events and the launches */
  count(batch, busy);
}

/* Charges the batches that have ended. */
static void settle(struct context *context) {
  if (atomic_load(&meter_captures) > 0) return; /* to ask about an event would spoil a capture */
  move_origin(context);
  for (struct batch **at = &context->closed; *at != NULL;) {
    struct batch *batch = *at;
    int64_t start = 0, end = 0;
    CUresult state = DRIVER(cuEventQuery)(batch->end);
    if (state == CUDA_SUCCESS) state = moment(context, batch->start, &start);
    if (state == CUDA_SUCCESS) state = moment(context, batch->end, &end);
    if (state == CUDA_ERROR_NOT_READY) {
      at = &batch->next;
      continue;
    }
    *at = batch->next;
    if (batch->next == NULL) context->closed_end = at;
    if (state == CUDA_SUCCESS)
      charge(batch, start, end);
    else
      count(batch, batch->predicted_ns); /* an event that a capture or an error has spoilt */
    atomic_fetch_sub(under_way(context), batch->predicted_ns);
    batch_spare(batch);
  }
}

/* --- threads and contexts */

static void leave_context(struct thread *thread) {
  struct context *context = thread->context;
  if (context == NULL) return;
  (void)pthread_mutex_lock(&context->mutex);
  close_all(thread);
  spend(context, -thread->credit_ns);
  for (struct thread **at = &context->threads; *at != NULL; at = &(*at)->next)
    if (*at == thread) {
      *at = thread->next;
      break;
    }
  (void)pthread_mutex_unlock(&context->mutex);
  thread->context = NULL;
  thread->turn = NULL;
  thread->credit_ns = 0;
}

static void thread_ends(void *thread) {
  known = false; /* should it launch once more, it ends once more */
  leave_context(thread);
}

static void make_key(void) { (void)pthread_key_create(&self_key, thread_ends); }

static struct thread *this_thread(void) {
  if (!known) {
    (void)pthread_once(&key_once, make_key);
    known = pthread_setspecific(self_key, &meter_thread) == 0;
  }
  return known ? &meter_thread : NULL;
}

static struct context *context_of(CUcontext handle) {
  (void)pthread_mutex_lock(&contexts_mutex);
  struct context *context = atomic_load(&contexts);
  while (context != NULL && (context->handle != handle || context->gone)) context = context->next;
  int device;
  if (context == NULL && guard_current(&device) == CUDA_SUCCESS && (context = calloc(1, sizeof *context)) != NULL) {
    context->handle = handle;
    context->device = device;
    context->closed_end = &context->closed;
    (void)pthread_mutex_init(&context->mutex, NULL);
    context->next = atomic_load(&contexts);
    atomic_store(&contexts, context);
  }
  (void)pthread_mutex_unlock(&contexts_mutex);
  return context;
}

/* The thread with its current context looked up; NULL if there is nothing to keep it to. */
static struct thread *arrive(void) {
  CUcontext handle;
  struct thread *thread = this_thread();
  if (thread == NULL || guard_policy == NULL || DRIVER(cuCtxGetCurrent)(&handle) != CUDA_SUCCESS || handle == NULL) return NULL;
  if (thread->context != NULL && (thread->context->handle != handle || thread->context->gone)) leave_context(thread);
  if (thread->context == NULL) {
    struct context *context = context_of(handle);
    if (context == NULL) return NULL;
    thread->context = context;
    (void)pthread_mutex_lock(&context->mutex);
    thread->next = context->threads;
    context->threads = thread;
    (void)pthread_mutex_unlock(&context->mutex);
  }
  thread->turn = &guard_policy->allowances[thread->context->device].turn;
  return thread;
}

void meter_moved(void) { meter_thread.turn = NULL; }

/* --- portions */

static bool is_turn(uint32_t turn) { return (turn & GUARD_TURN_MASK) != GUARD_TURN_WAIT; }

/* When to look again while waiting for something else: the sooner what is under way is seen to have ended, the sooner others get
 * their turn. */
static int64_t next_look(int64_t busy_ns, int64_t now) {
  int64_t look = busy_ns / 4;
  if (busy_ns <= 0) return INT64_MAX;
  return now + (look < NAP_LEAST_NS ? NAP_LEAST_NS : look > NAP_MOST_NS ? NAP_MOST_NS : look);
}

/* Sleeps on a word of the policy, and lets the daemon know that there is somebody who does. */
static void wait_visibly(const struct context *context, const _Atomic uint32_t *word, uint32_t seen, int64_t until) {
  int slot = guard_slot();
  _Atomic uint8_t nowhere, *told = slot < 0 ? &nowhere : &guard_job->table[slot].waiting[context->device];
  (void)pthread_mutex_lock(&waiting_mutex);
  atomic_store(told, ++waiting[context->device] > 0);
  (void)pthread_mutex_unlock(&waiting_mutex);
  futex_wait(word, seen, until);
  (void)pthread_mutex_lock(&waiting_mutex);
  atomic_store(told, --waiting[context->device] > 0);
  (void)pthread_mutex_unlock(&waiting_mutex);
}

/* Waits for the job's turn or for its allowance, once; true if there was nothing to wait for. */
static bool may_go_on(const struct context *context) {
  const struct guard_allowance *allowance = &guard_policy->allowances[context->device];
  int64_t now = now_ns(), busy = atomic_load(under_way(context));
  uint32_t seen = atomic_load_explicit(&allowance->turn, memory_order_acquire);
  if (!is_turn(seen) && now - atomic_load(&guard_policy->heartbeat_ns) < TURNS_STALE_NS) {
    wait_visibly(context, &allowance->turn, seen, next_look(busy, now));
    return false;
  }
  seen = atomic_load(&allowance->rate_index);
  struct guard_rate rate = rate_of(allowance);
  int64_t wait = rate.share_ppm >= GUARD_PPM ? 0 : bucket_wait(&rate, atomic_load(&use_of(context)->spent_ns), now);
  if (wait > 0) {
    int64_t until = wait > INT64_MAX - now ? INT64_MAX : now + wait, look = next_look(busy, now);
    wait_visibly(context, &allowance->rate_index, seen, look < until ? look : until);
    return false;
  }
  return true;
}

/* The same until no more than the window would be under way. */
static bool has_room(const struct context *context, int64_t cost_ns) {
  static const _Atomic uint32_t nothing;
  int64_t busy = atomic_load(under_way(context));
  if (busy <= 0 || busy + cost_ns <= atomic_load(&guard_policy->allowances[context->device].window_ns)) return true;
  futex_wait(&nothing, 0, next_look(busy, now_ns()));
  return false;
}

/* Gives the thread time for one launch at least. */
static void grant(struct thread *thread, int64_t cost_ns) {
  struct context *context = thread->context;
  const struct guard_allowance *allowance = &guard_policy->allowances[context->device];
  (void)pthread_mutex_lock(&context->mutex);
  close_all(thread);
  for (;;) {
    settle(context);
    if (thread->credit_ns >= cost_ns && !gate_is_closed()) break;
    int64_t portion = atomic_load(&allowance->window_ns) / 2;
    if (portion < cost_ns - thread->credit_ns) portion = cost_ns - thread->credit_ns;
    (void)pthread_mutex_unlock(&context->mutex);
    guard_wait();
    if (may_go_on(context) && has_room(context, portion)) {
      spend(context, portion);
      atomic_store(&use_of(context)->last_launch_ns, now_ns());
      thread->credit_ns += portion;
    }
    (void)pthread_mutex_lock(&context->mutex);
  }
  (void)pthread_mutex_unlock(&context->mutex);
}

static bool begin(struct thread *thread, CUstream stream, struct open_batch *open) {
  struct context *context = thread->context;
  struct batch *batch = batch_make(context);
  if (batch == NULL) return false;
  batch->stream = stream;
  batch->queued = context->closed != NULL;
  mark_origin(context, stream);
  *open = (struct open_batch){.stream = stream, .batch = batch};
  if (DRIVER(cuEventRecord)(batch->start, stream) == CUDA_SUCCESS) return true;
  batch_spare(batch);
  return false;
}

/* The thread's batch on a stream, begun now if there is none, and made its first; NULL if it cannot be measured. */
static struct open_batch *open_batch(struct thread *thread, CUstream stream) {
  struct open_batch *open = thread->open, found;
  if (atomic_load_explicit(&open->stream, memory_order_relaxed) == stream) return open;
  (void)pthread_mutex_lock(&thread->context->mutex);
  unsigned i = 1;
  while (i < METER_OPEN - 1 && atomic_load_explicit(&open[i].stream, memory_order_relaxed) != stream) i++;
  bool there = atomic_load_explicit(&open[i].stream, memory_order_relaxed) == stream;
  if (there)
    found = open[i];
  else
    close_open(&open[i]);
  if (there || begin(thread, stream, &found)) {
    memmove(&open[1], &open[0], i * sizeof *open);
    open[0] = found;
  } else {
    open = NULL;
  }
  (void)pthread_mutex_unlock(&thread->context->mutex);
  return open;
}

static void count_unmeasured(const struct context *context, int64_t cost_ns) {
  atomic_fetch_add(&use_of(context)->busy_ns, (uint64_t)cost_ns);
  atomic_fetch_add(&use_of(context)->launches, 1);
  atomic_store(&use_of(context)->last_launch_ns, now_ns());
}

/* Beside a capture no event may be asked about, so what is under way is not known: a launch is charged by what was predicted. */
static void go_unmeasured(const struct context *context, int64_t cost_ns) {
  do guard_wait();
  while (!may_go_on(context) || gate_is_closed());
  spend(context, cost_ns);
  count_unmeasured(context, cost_ns);
}

/* The long way: a portion is used up, or this launch is to be measured, or something is in the way. */
bool meter_enter(CUstream stream, const void *key, uint64_t blocks) {
  guard_load();
  if (meter_is_captured(stream)) return false;
  struct thread *thread = arrive();
  if (thread == NULL) {
    guard_wait();
    return false;
  }
  struct prediction *prediction = predict(key, blocks);
  if (atomic_load(&meter_captures) > 0) {
    int64_t known = atomic_load(&prediction->ns);
    go_unmeasured(thread->context, known > 0 ? known : GUESS_NS);
    return false;
  }
  bool due = predict_is_due(prediction);
  int64_t cost = atomic_load(&prediction->ns);
  bool foreseen = cost > 0;
  if (!foreseen)
    cost = predict_is_awaited(prediction) ? atomic_load(&guard_policy->allowances[thread->context->device].window_ns) / 2 : GUESS_NS;
  if (thread->credit_ns < cost || gate_is_closed() || !is_turn(atomic_load(thread->turn))) grant(thread, cost);
  if (due) meter_leave(stream); /* what came before is not in it */
  struct open_batch *open = open_batch(thread, stream);
  if (open == NULL) { /* no events are to be had there */
    cost = foreseen ? cost : GUESS_NS;
    thread->credit_ns -= cost;
    count_unmeasured(thread->context, cost);
    return false;
  }
  use_credit(thread, open, cost);
  if (due) {
    open->batch->sample = prediction;
    open->batch->foreseen = foreseen;
  }
  return due;
}

void meter_leave(CUstream stream) {
  struct thread *thread = &meter_thread;
  if (thread->context == NULL) return;
  (void)pthread_mutex_lock(&thread->context->mutex);
  close_stream(thread, stream);
  (void)pthread_mutex_unlock(&thread->context->mutex);
}

/* --- ends */

/* Closes what is open on a stream, whichever thread's it is; by the name that each thread has for its own, only this one's. */
static void end_stream(struct context *context, CUstream stream) {
  (void)pthread_mutex_lock(&context->mutex);
  for (struct thread *thread = context->threads; thread != NULL; thread = thread->next)
    if (stream != CU_STREAM_PER_THREAD || thread == &meter_thread) close_stream(thread, stream);
  (void)pthread_mutex_unlock(&context->mutex);
}

void meter_stream_ends(CUstream stream) {
  for (struct context *context = atomic_load(&contexts); context != NULL; context = context->next)
    if (!context->gone) end_stream(context, stream);
}

void meter_context_ends(CUcontext handle) {
  for (struct context *context = atomic_load(&contexts); context != NULL; context = context->next) {
    if (context->handle != handle || context->gone) continue;
    (void)pthread_mutex_lock(&context->mutex);
    settle(context);
    for (struct batch *batch = context->closed; batch != NULL; batch = batch->next)
      atomic_fetch_sub(under_way(context), batch->predicted_ns);
    for (struct thread *thread = context->threads; thread != NULL; thread = thread->next)
      for (unsigned i = 0; i < METER_OPEN; i++) atomic_store_explicit(&thread->open[i].stream, NULL, memory_order_relaxed);
    context->gone = true; /* the driver ends its events with it; ours of them are few, and kept for whoever still looks at them */
    (void)pthread_mutex_unlock(&context->mutex);
  }
}

void meter_settle(bool all) {
  struct thread *thread = &meter_thread;
  if (atomic_load(&meter_captures) > 0) return;
  for (struct context *context = atomic_load(&contexts); context != NULL; context = context->next) {
    if (context != thread->context && !all) continue;
    (void)pthread_mutex_lock(&context->mutex);
    for (unsigned i = 0; i < METER_OPEN && context == thread->context && !context->gone; i++)
      if (all || atomic_load_explicit(&thread->open[i].predicted_ns, memory_order_relaxed) >= WORTH_NS) close_open(&thread->open[i]);
    if (!context->gone) settle(context);
    (void)pthread_mutex_unlock(&context->mutex);
  }
}

/* --- capture */

void meter_capture_begins(CUstream stream) {
  atomic_fetch_add(&meter_captures, 1);
  meter_stream_ends(stream); /* whoever asks about events now has done so when this has had every context's lock */
}

void meter_capture_ended(void) { atomic_fetch_sub(&meter_captures, 1); }

bool meter_is_captured(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (atomic_load(&meter_captures) == 0) return false;
  return DRIVER(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void meter_forked(void) {
  meter_thread = (struct thread){.turn = NULL}; /* of the parent's context, which is not to be left */
  atomic_store(&contexts, NULL);
  atomic_store(&meter_captures, 0);
  memset(waiting, 0, sizeof waiting);
  (void)pthread_mutex_init(&contexts_mutex, NULL);
  (void)pthread_mutex_init(&waiting_mutex, NULL);
}
