/* GPU time: what a job's work takes is measured by events, and charged as the union of the measured stretches.
 *
 * A mark is an event in a stream. A stretch is the time between two of its marks that follow each other; one that begins after the
 * stream was idle is preceded by a fresh mark. A thread is admitted to launch a portion of predicted time without a lock, then marks
 * what it has launched and waits for its turn, its allowance and room in the window. A mark is charged as predicted when it is made,
 * and corrected to what its stretch took once it is reached. A thread of the guard, the reaper, sees that, and marks what a program
 * has launched and does not wait for. */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "bucket.h"
#include "meter.h"
#include "timeline.h"

#define GUESS_NS 500000         /* of a launch that is not measured yet */
#define LOOK_LEAST_NS 50000     /* between two looks of the reaper: as exact as a timer of Linux, and a small part of a hand-over */
#define LOOK_MOST_NS 500000     /* a part of the shortest window, so that a mark is made before the stream runs dry */
#define REST_NS 1000000000      /* without work: then the reaper ends. Its thread would keep a process whose main thread has ended */
#define STALL_NS 2000000        /* overdue work, for instance work that waits for the host, fills half of its part of the window after each */
#define SPARSE 64               /* launches measured one by one after the stream was seen to run dry */
#define DRY_WORTH 4             /* of these launches, for each before which it was dry again: one in five keeps it so */
#define ORIGIN_NS 2000000000    /* event times are floats of milliseconds: exact to 0.2 us for so long */
#define TURNS_STALE_NS 1000000000 /* whoever hands out turns has not been seen for so long: there are none */
#define RANK_NS 10000000        /* for which the ranks of a stopped gang end what they have begun together (own choice) */
#define RANK_LOOK_NS 500000
#define ENDING_NS 200000000     /* wait of a process that ends for a driver's call of the reaper */

struct mark {
  struct mark *next;
  CUevent event;
  int64_t predicted_ns; /* of what was launched since the mark before */
  uint64_t launches;
  int64_t made_ns;
  int64_t from_ns; /* its work has not begun earlier */
  bool fresh;
  struct prediction *sample;
};

struct context {
  struct context *next;
  CUcontext handle;
  int device;
  pthread_mutex_t mutex; /* of everything below, and of its lanes */
  struct lane *lanes;
  struct mark *spare;
  CUevent origin; /* an event that happened at `origin_ns` */
  int64_t origin_ns;
  _Atomic bool gone;
};

enum reaper { REAPER_NONE, REAPER_RUNS, REAPER_ENDED };

__thread struct thread meter_thread;
static __thread bool known; /* to the key that ends it */
static pthread_key_t self_key;
static bool has_key; /* a program may have used them all up */
static pthread_once_t key_once = PTHREAD_ONCE_INIT, exit_once = PTHREAD_ONCE_INIT;
static struct context *_Atomic contexts;
static pthread_mutex_t contexts_mutex = PTHREAD_MUTEX_INITIALIZER;
_Atomic int meter_captures;
static pthread_mutex_t waiting_mutex = PTHREAD_MUTEX_INITIALIZER;
static int waiting[GUARD_DEVICES]; /* threads that would launch if they might */
static pthread_mutex_t reaper_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int reaper;
static _Atomic uint32_t reaper_sleeps, progress; /* futex words */

/* --- what is told to the job page */

static struct guard_use *use_of(int device) { return &guard_job->uses[device]; }

static _Atomic int64_t *under_way(int device) {
  static _Atomic int64_t nowhere[GUARD_DEVICES];
  int slot = guard_slot();
  return slot < 0 ? &nowhere[device] : &guard_job->table[slot].under_way[device];
}

static void spend(int device, int64_t ns) {
  struct guard_rate rate = rate_of(&guard_policy->allowances[device]);
  bucket_spend(&rate, &use_of(device)->spent_ns, ns, now_ns());
}

static void count(int device, int64_t busy_ns, uint64_t launches) {
  atomic_fetch_add(&use_of(device)->busy_ns, (uint64_t)busy_ns);
  atomic_fetch_add(&use_of(device)->launches, launches);
  atomic_store(&use_of(device)->last_launch_ns, now_ns());
}

/* --- contexts are held while their lanes and marks are looked at */

/* Beside a capture that minds it, a thread may ask about events only in the relaxed mode (CUDA Driver API,
 * cuThreadExchangeStreamCaptureMode). Returns the mode to go back to. */
static CUstreamCaptureMode hold(struct context *context) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  (void)pthread_mutex_lock(&context->mutex);
  if (atomic_load(&meter_captures) > 0 && DRIVER(cuThreadExchangeStreamCaptureMode)(&mode) != CUDA_SUCCESS)
    mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  return mode;
}

static void let_go(struct context *context, CUstreamCaptureMode mode) {
  if (mode != CU_STREAM_CAPTURE_MODE_RELAXED) (void)DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
  (void)pthread_mutex_unlock(&context->mutex);
}

/* --- marks; the context's mutex is held, and it is current */

static bool is_unmarked(const struct lane *lane) { return atomic_load_explicit(&lane->launched_ns, memory_order_relaxed) != lane->marked_ns; }

static struct mark *mark_make(struct context *context) {
  struct mark *mark = context->spare;
  if (mark != NULL)
    context->spare = mark->next;
  else if ((mark = calloc(1, sizeof *mark)) == NULL)
    return NULL;
  CUevent event = mark->event;
  if (event == NULL && DRIVER(cuEventCreate)(&event, CU_EVENT_DEFAULT) != CUDA_SUCCESS) event = NULL;
  *mark = (struct mark){.event = event, .made_ns = now_ns()};
  return mark;
}

static void mark_spare(struct context *context, struct mark *mark) {
  mark->next = context->spare;
  context->spare = mark;
}

static struct mark take_unmarked(struct lane *lane) {
  struct mark part = {.predicted_ns = atomic_load_explicit(&lane->launched_ns, memory_order_relaxed) - lane->marked_ns,
                      .launches = atomic_load_explicit(&lane->launches, memory_order_relaxed) - lane->marked};
  lane->marked_ns += part.predicted_ns;
  lane->marked += part.launches;
  return part;
}

/* What was launched since the last mark is charged as predicted: its end cannot be marked. */
static void give_up(struct lane *lane) {
  struct mark part = take_unmarked(lane);
  atomic_store_explicit(&lane->open, NULL, memory_order_relaxed);
  spend(lane->context->device, part.predicted_ns);
  count(lane->context->device, part.predicted_ns, part.launches);
}

static void reaper_wake(void);

/* Marks the end of what was launched on a lane; `fresh`: the beginning of what will be. */
static bool mark_lane(struct lane *lane, bool fresh, struct prediction *sample) {
  struct context *context = lane->context;
  struct mark *mark = mark_make(context);
  if (mark == NULL || mark->event == NULL || DRIVER(cuEventRecord)(mark->event, lane->stream) != CUDA_SUCCESS) {
    if (mark != NULL && mark->event != NULL) (void)DRIVER(cuEventDestroy_v2)(mark->event); /* it may fail in every stream */
    free(mark);
    give_up(lane);
    return false;
  }
  struct mark part = take_unmarked(lane);
  mark->predicted_ns = part.predicted_ns;
  mark->launches = part.launches;
  mark->fresh = fresh;
  mark->sample = sample;
  mark->from_ns = atomic_load(&lane->begun_ns);
  *lane->end = mark;
  lane->end = &mark->next;
  atomic_fetch_add(under_way(context->device), mark->predicted_ns);
  spend(context->device, mark->predicted_ns);
  atomic_store(&use_of(context->device)->last_launch_ns, mark->made_ns);
  reaper_wake();
  return true;
}

/* The moment of a reached mark on the clock of the host. An event happens after it is recorded and before it is seen, which keeps the two
 * clocks together. Now and then an event becomes the new origin. */
static CUresult moment(struct context *context, struct mark *mark, int64_t now, int64_t *ns) {
  float ms = 0;
  CUresult result = context->origin == NULL ? CUDA_SUCCESS : DRIVER(cuEventElapsedTime)(&ms, context->origin, mark->event);
  if (result != CUDA_SUCCESS) return result;
  int64_t after = (int64_t)((double)ms * 1e6), at = context->origin_ns + after;
  at = at > now || context->origin == NULL ? now : at < mark->made_ns ? mark->made_ns : at;
  context->origin_ns = at - after;
  *ns = at;
  if (context->origin != NULL && after < ORIGIN_NS) return CUDA_SUCCESS;
  CUevent before = context->origin;
  context->origin_ns = at;
  context->origin = mark->event;
  mark->event = before;
  return CUDA_SUCCESS;
}

static void charge(struct lane *lane, const struct mark *mark, int64_t at) {
  struct context *context = lane->context;
  int64_t from = mark->from_ns > lane->last_ns ? mark->from_ns : lane->last_ns;
  if (from > at) from = at;
  int64_t busy = mark->fresh ? 0 : timeline_add(guard_job->timelines[context->device], from, at);
  if (mark->sample != NULL) predict_learn(mark->sample, at - from);
  spend(context->device, busy - mark->predicted_ns);
  count(context->device, busy, mark->launches);
}

/* Charges what has ended. */
static void settle(struct lane *lane) {
  struct mark *mark;
  while ((mark = lane->first) != NULL) {
    struct context *context = lane->context;
    int64_t at = 0;
    CUresult state = REAL(cuEventQuery)(mark->event);
    int64_t now = now_ns();
    if (state == CUDA_SUCCESS) state = moment(context, mark, now, &at);
    if (state == CUDA_ERROR_NOT_READY) return;
    lane->first = mark->next;
    if (lane->first == NULL) lane->end = &lane->first;
    if (state == CUDA_SUCCESS) {
      charge(lane, mark, at);
      lane->last_ns = at;
    } else { /* an event that a capture or an error has spoilt */
      count(context->device, mark->predicted_ns, mark->launches);
    }
    lane->reached_ns = now;
    atomic_fetch_sub(under_way(context->device), mark->predicted_ns);
    mark_spare(context, mark);
    atomic_fetch_add(&progress, 1);
  }
}

static int64_t due_ns(const struct lane *lane) {
  int64_t since = lane->first->made_ns > lane->reached_ns ? lane->first->made_ns : lane->reached_ns;
  return since + lane->first->predicted_ns;
}

static bool is_mine(const struct lane *lane) { return lane->user == &meter_thread; }

/* A mark must not make streams wait for each other that would not. One in the legacy default stream makes all of a context's wait, unless
 * it is beside the work that it marks; and the name of a thread's default stream is good in that thread only. */
static bool can_be_marked(const struct lane *lane) {
  if (lane->stream == CU_STREAM_PER_THREAD) return is_mine(lane);
  if (lane->stream != CU_STREAM_LEGACY || lane == meter_thread.lane) return true;
  for (const struct lane *other = lane->context->lanes; other != NULL; other = other->next)
    if (other != lane && (other->first != NULL || is_unmarked(other))) return false;
  return true;
}

static void mark_end(struct lane *lane) {
  if (!is_unmarked(lane)) return;
  if (can_be_marked(lane))
    (void)mark_lane(lane, false, NULL);
  else
    give_up(lane);
}

/* --- threads and contexts */

static void lane_ends(struct lane *lane) {
  if (is_unmarked(lane)) give_up(lane);
  atomic_store_explicit(&lane->open, NULL, memory_order_relaxed);
  lane->stream = NULL;
  lane->user = NULL;
}

/* The driver may have ended with the thread already, so it is not called. */
static void thread_ends(void *ended) {
  const struct thread *thread = ended;
  known = false; /* should it launch once more, it ends once more */
  for (struct context *context = atomic_load(&contexts); context != NULL; context = context->next) {
    (void)pthread_mutex_lock(&context->mutex);
    for (struct lane *lane = context->lanes; lane != NULL; lane = lane->next)
      if (lane->user == thread && lane->stream == CU_STREAM_PER_THREAD) lane_ends(lane);
    (void)pthread_mutex_unlock(&context->mutex);
  }
  meter_thread = (struct thread){.turn = NULL};
}

static void make_key(void) { has_key = pthread_key_create(&self_key, thread_ends) == 0; }

static struct thread *this_thread(void) {
  if (!known) {
    (void)pthread_once(&key_once, make_key);
    known = has_key && pthread_setspecific(self_key, &meter_thread) == 0;
    meter_thread.random = (uint32_t)(now_ns() >> 4) | 1;
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
  if (thread == NULL || guard_policy == NULL) return NULL;
  if (DRIVER(cuCtxGetCurrent)(&handle) != CUDA_SUCCESS || handle == NULL) return NULL;
  if (thread->context == NULL || thread->context->handle != handle || thread->context->gone) {
    thread->context = context_of(handle);
    thread->lane = NULL;
    thread->credit_ns = 0;
  }
  if (thread->context == NULL) return NULL;
  thread->turn = &guard_policy->allowances[thread->context->device].turn;
  return thread;
}

void meter_moved(void) { meter_thread.turn = NULL; }

/* Finds a stream's lane; NULL if there is no memory for it. The context's mutex is held. */
static struct lane *lane_of(struct thread *thread, CUstream stream) {
  struct context *context = thread->context;
  struct lane *lane = context->lanes, *unused = NULL;
  for (; lane != NULL; lane = lane->next) {
    if (lane->stream == stream && (stream != CU_STREAM_PER_THREAD || lane->user == thread)) break;
    if (lane->stream == NULL && lane->first == NULL) unused = lane;
  }
  if (lane == NULL && unused == NULL) {
    if ((unused = calloc(1, sizeof *unused)) == NULL) return NULL;
    *unused = (struct lane){.context = context, .next = context->lanes, .end = &unused->first};
    context->lanes = unused;
  }
  if (lane == NULL) lane = unused;
  if (thread->lane != NULL && thread->lane != lane && thread->lane->stream == CU_STREAM_LEGACY && is_unmarked(thread->lane))
    (void)mark_lane(thread->lane, false, NULL); /* while nothing has come after its work */
  lane->stream = stream;
  lane->user = thread;
  return thread->lane = lane;
}

/* --- the reaper */

/* Looks at a lane; returns when it is to be looked at again. */
static int64_t reap_lane(struct lane *lane, int64_t now) {
  const struct guard_allowance *allowance = &guard_policy->allowances[lane->context->device];
  settle(lane);
  int64_t launched_ns = atomic_load_explicit(&lane->launched_ns, memory_order_relaxed);
  bool quiet = launched_ns == lane->seen_ns;
  lane->seen_ns = launched_ns;
  if (is_unmarked(lane)) {
    bool metered = rate_of(allowance).share_ppm < GUARD_PPM; /* else exactness is not worth its cost */
    bool dry = metered && can_be_marked(lane) && REAL(cuStreamQuery)(lane->stream) == CUDA_SUCCESS;
    if (dry && lane->dry) { /* once may be between the count of a launch and the launch */
      lane->sparse = SPARSE;
      atomic_store_explicit(&lane->open, NULL, memory_order_relaxed);
    }
    lane->dry = dry;
    if (quiet) mark_end(lane);
  } else if (lane->first == NULL) {
    atomic_store_explicit(&lane->open, NULL, memory_order_relaxed);
    return INT64_MAX;
  }
  int64_t left = lane->first == NULL ? LOOK_MOST_NS : due_ns(lane) - now;
  if (left < 0) left = -left / 4; /* overdue: the longer, the less often */
  return now + (left < LOOK_LEAST_NS ? LOOK_LEAST_NS : left > LOOK_MOST_NS ? LOOK_MOST_NS : left);
}

/* Looks at all contexts; returns when to do so again. */
static int64_t reap(void) {
  int64_t next = INT64_MAX, now = now_ns();
  uint32_t before = atomic_load(&progress);
  for (struct context *context = atomic_load(&contexts); context != NULL; context = context->next) {
    if (context->gone) continue;
    CUstreamCaptureMode mode = hold(context);
    bool may = !context->gone && atomic_load(&reaper) == REAPER_RUNS, current = false;
    for (struct lane *lane = context->lanes; may && lane != NULL; lane = lane->next) {
      if (lane->first == NULL && (lane->stream == NULL || atomic_load(&lane->open) == NULL)) continue;
      if (!current) current = may = REAL(cuCtxSetCurrent)(context->handle) == CUDA_SUCCESS;
      int64_t soon = may ? reap_lane(lane, now) : INT64_MAX;
      if (soon < next) next = soon;
    }
    let_go(context, mode);
  }
  if (atomic_load(&progress) != before) (void)syscall(SYS_futex, &progress, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
  return next;
}

static void *reaper_run(void *nothing) {
  static const _Atomic uint32_t never;
  int64_t idle_since = now_ns();
  for (;;) {
    atomic_store(&reaper_sleeps, 1); /* before it looks, so that no mark is missed */
    int64_t next = reap(), now = now_ns();
    if (next != INT64_MAX) {
      atomic_store(&reaper_sleeps, 0);
      idle_since = now;
      futex_wait(&never, 0, next);
      continue;
    }
    futex_wait(&reaper_sleeps, 1, now + REST_NS);
    (void)pthread_mutex_lock(&reaper_mutex);
    bool ends = atomic_load(&reaper) != REAPER_RUNS || (atomic_load(&reaper_sleeps) != 0 && now - idle_since > REST_NS);
    if (ends && atomic_load(&reaper) == REAPER_RUNS) atomic_store(&reaper, REAPER_NONE);
    (void)pthread_mutex_unlock(&reaper_mutex);
    if (ends) return nothing;
  }
}

/* From now on the reaper calls the driver no more: the process ends, and the driver with it. Who still launches looks for themselves. */
static void at_exit(void) {
  atomic_store(&reaper, REAPER_ENDED);
  struct timespec until;
  (void)clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += ENDING_NS;
  until.tv_sec += until.tv_nsec / 1000000000;
  until.tv_nsec %= 1000000000;
  for (struct context *context = atomic_load(&contexts); context != NULL; context = context->next)
    if (pthread_mutex_timedlock(&context->mutex, &until) == 0) (void)pthread_mutex_unlock(&context->mutex);
}

static void at_exit_too(void) { (void)atexit(at_exit); }

/* It gets no signals of the program, ends when it has been idle for a while, and runs again when there is work. */
static void reaper_wake(void) {
  if (CLOCK_OF_A_TEST) return; /* a thread that waits looks itself */
  if (atomic_load(&reaper_sleeps) == 0 && atomic_load(&reaper) == REAPER_RUNS) return;
  pthread_t thread;
  sigset_t all, before;
  (void)pthread_once(&exit_once, at_exit_too); /* after the driver's own, so it is called before them */
  (void)pthread_mutex_lock(&reaper_mutex);
  atomic_store(&reaper_sleeps, 0);
  if (atomic_load(&reaper) == REAPER_NONE) {
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    atomic_store(&reaper, REAPER_RUNS);
    if (pthread_create(&thread, NULL, reaper_run, NULL) == 0)
      (void)pthread_detach(thread);
    else
      atomic_store(&reaper, REAPER_NONE);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  }
  (void)pthread_mutex_unlock(&reaper_mutex);
  (void)syscall(SYS_futex, &reaper_sleeps, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* --- portions */

static bool is_turn(uint32_t turn) { return (turn & GUARD_TURN_MASK) != GUARD_TURN_WAIT; }

/* Sleeps on a word of the policy, and lets the daemon know that there is somebody who does. */
static void wait_visibly(int device, const _Atomic uint32_t *word, uint32_t seen, int64_t until) {
  int slot = guard_slot();
  _Atomic uint8_t nowhere, *told = slot < 0 ? &nowhere : &guard_job->table[slot].waiting[device];
  (void)pthread_mutex_lock(&waiting_mutex);
  atomic_store(told, ++waiting[device] > 0);
  (void)pthread_mutex_unlock(&waiting_mutex);
  futex_wait(word, seen, until);
  (void)pthread_mutex_lock(&waiting_mutex);
  atomic_store(told, --waiting[device] > 0);
  (void)pthread_mutex_unlock(&waiting_mutex);
}

/* Waits for the job's turn or for its allowance, once; true if there was nothing to wait for. */
static bool may_go_on(int device) {
  const struct guard_allowance *allowance = &guard_policy->allowances[device];
  int64_t now = now_ns();
  uint32_t seen = atomic_load_explicit(&allowance->turn, memory_order_acquire);
  if (!is_turn(seen) && now - atomic_load(&guard_policy->heartbeat_ns) < TURNS_STALE_NS) {
    wait_visibly(device, &allowance->turn, seen, guard_policy->devices > 1 ? now + RANK_LOOK_NS : INT64_MAX);
    return false;
  }
  seen = atomic_load(&allowance->rate_index);
  struct guard_rate rate = rate_of(allowance);
  int64_t wait = rate.share_ppm >= GUARD_PPM ? 0 : bucket_wait(&rate, atomic_load(&use_of(device)->spent_ns), now);
  if (wait > 0) wait_visibly(device, &allowance->rate_index, seen, wait > INT64_MAX - now ? INT64_MAX : now + wait);
  return wait == 0;
}

/* The work under way, without what is long overdue: it may wait for something that the program does only after its next launches. The
 * context's mutex is held. */
static int64_t counted_under_way(struct context *context, int64_t now) {
  int64_t sum = atomic_load(under_way(context->device));
  for (struct lane *lane = context->lanes; lane != NULL; lane = lane->next) {
    int64_t of_lane = 0, stalls = lane->first == NULL ? 0 : (now - due_ns(lane)) / STALL_NS;
    for (const struct mark *mark = lane->first; mark != NULL; mark = mark->next) of_lane += mark->predicted_ns;
    if (stalls > 0) sum -= of_lane - (of_lane >> (stalls < 30 ? 2 * stalls : 60));
    sum += atomic_load_explicit(&lane->launched_ns, memory_order_relaxed) - lane->marked_ns;
  }
  return sum;
}

/* Marks all that can be marked, and charges what has ended. The context is current, and its mutex held. */
static void mark_and_settle(struct context *context) {
  for (struct lane *lane = context->lanes; lane != NULL; lane = lane->next) {
    if (is_unmarked(lane) && can_be_marked(lane)) (void)mark_lane(lane, false, NULL);
    settle(lane);
  }
}

static int64_t job_under_way(int device) {
  int64_t sum = 0;
  for (unsigned slot = 1; slot < GUARD_SLOTS; slot++)
    if (atomic_load(&guard_job->table[slot].pid) != 0) sum += atomic_load(&guard_job->table[slot].under_way[device]);
  return sum;
}

/* A job on several devices may be stopped, by its gate or the end of its turn, in the middle of a collective: some ranks have launched
 * it and wait on their devices, others have not. A rank whose device has nothing to do launches one more piece of work while another
 * device of the job has, for a limited time. So a collective is completed, and then nothing is under way. */
static bool completes_a_collective(const struct context *context) {
  static _Atomic int64_t stopped_ns;
  uint32_t turn = atomic_load(&guard_policy->allowances[context->device].turn);
  int64_t now = now_ns(), since = atomic_load(&stopped_ns), others = 0;
  if (guard_policy->devices < 2) return false;
  if (!gate_is_closed() && is_turn(turn)) {
    atomic_store(&stopped_ns, 0);
    return false;
  }
  if (since == 0) atomic_store(&stopped_ns, since = now);
  for (uint32_t device = 0; device < guard_policy->devices && device < GUARD_DEVICES; device++)
    if ((int)device != context->device) others += job_under_way((int)device);
  return now - since < RANK_NS && others > 0 && job_under_way(context->device) == 0;
}

/* Waits until the thread may launch a portion, of one launch at least. */
static void grant(struct thread *thread, int64_t cost_ns) {
  struct context *context = thread->context;
  const struct guard_allowance *allowance = &guard_policy->allowances[context->device];
  for (;;) {
    int64_t window = atomic_load(&allowance->window_ns), portion = window / 2 > cost_ns ? window / 2 : cost_ns;
    uint32_t seen = atomic_load(&progress);
    CUstreamCaptureMode mode = hold(context);
    if (!context->gone) mark_and_settle(context);
    int64_t now = now_ns(), busy = counted_under_way(context, now);
    let_go(context, mode);
    if (completes_a_collective(context)) {
      thread->credit_ns = cost_ns;
      return;
    }
    if (gate_is_closed() && guard_policy->devices > 1)
      futex_wait(guard_gate, atomic_load(guard_gate), now + RANK_LOOK_NS);
    else
      guard_wait();
    if (gate_is_closed() || !may_go_on(context->device)) continue;
    if (busy <= 0 || busy + portion <= window) {
      thread->credit_ns = portion;
      atomic_store(&use_of(context->device)->last_launch_ns, now_ns());
      return;
    }
    futex_wait(&progress, seen, now + LOOK_MOST_NS);
  }
}

/* --- launches */

/* Where no event is to be had, a launch is charged as predicted, and all the time since the last such one on the device at least: that
 * may have run so long. */
static void go_unmeasured(int device, int64_t cost_ns, bool copies) {
  static _Atomic int64_t last_ns[GUARD_DEVICES];
  int64_t last = atomic_load(&last_ns[device]), since = now_ns() - last;
  if (last != 0 && cost_ns < since) cost_ns = since;
  do guard_wait();
  while (!may_go_on(device) || gate_is_closed());
  atomic_store(&last_ns[device], now_ns());
  spend(device, cost_ns);
  count(device, cost_ns, !copies);
}

static int64_t draw(struct thread *thread, int64_t most) {
  thread->random ^= thread->random << 13;
  thread->random ^= thread->random >> 17;
  thread->random ^= thread->random << 5; /* xorshift: Marsaglia, 2003 */
  return (int64_t)((uint64_t)most * thread->random >> 32);
}

/* Prepares a lane for a launch, by itself or not; false if it cannot be measured. The context's mutex is held. */
static bool begin(struct lane *lane, CUstream stream, bool alone) {
  if (alone && is_unmarked(lane) && !mark_lane(lane, false, NULL)) return false;
  if (!is_unmarked(lane)) {
    settle(lane);
    bool dry = lane->first == NULL;
    if (dry && !mark_lane(lane, true, NULL)) return false;
    if (dry) atomic_store(&lane->begun_ns, 0);
    if (lane->sparse > 0) lane->sparse += !dry ? -1 : lane->sparse < SPARSE ? DRY_WORTH : 0;
  }
  atomic_store_explicit(&lane->open, lane->sparse > 0 ? NULL : stream, memory_order_relaxed);
  return true;
}

/* The stream's context is current. */
static bool enter(CUstream stream, uint64_t key, bool copies) {
  struct prediction *prediction = predict(key);
  int64_t known_ns = atomic_load(&prediction->ns), cost = known_ns > 0 ? known_ns : GUESS_NS;
  struct thread *thread = arrive();
  int device;
  if (thread == NULL && guard_current(&device) == CUDA_SUCCESS) go_unmeasured(device, cost, copies);
  if (thread == NULL) {
    guard_wait();
    return false;
  }
  struct context *context = thread->context;
  if (thread->credit_ns < cost || gate_is_closed() || !is_turn(atomic_load(thread->turn))) grant(thread, cost);
  bool sampled = known_ns == 0 || thread->sample_ns < cost;
  if (sampled) thread->sample_ns = cost + draw(thread, 2 * atomic_load(&guard_policy->allowances[context->device].window_ns));
  CUstreamCaptureMode mode = hold(context);
  struct lane *lane = lane_of(thread, stream);
  bool alone = sampled || (lane != NULL && lane->sparse > 0), measured = lane != NULL && begin(lane, stream, alone);
  let_go(context, mode);
  if (!measured) {
    go_unmeasured(context->device, cost, copies);
    return false;
  }
  if (!atomic_load(&lane->begun_ns)) atomic_store(&lane->begun_ns, now_ns()); /* after whatever delayed this thread meanwhile */
  use_credit(thread, lane, cost, copies);
  thread->sampled = sampled ? prediction : NULL;
  return alone;
}

/* The long way: a portion is used up, or this launch is to be measured by itself, or something is in the way. */
bool meter_enter(CUstream stream, uint64_t key, bool copies) {
  guard_load();
  if (meter_is_captured(stream)) return false;
  bool stepped = guard_step_into(stream), alone = enter(stream, key, copies);
  if (stepped) meter_moved();
  guard_step_out(stepped);
  return alone;
}

/* A first launch loads its code before it begins. */
void meter_leave(void) {
  struct thread *thread = &meter_thread;
  struct prediction *sampled = thread->sampled;
  if (thread->context == NULL || thread->lane == NULL) return;
  bool stepped = thread->turn == NULL && guard_step_into(thread->lane->stream);
  CUstreamCaptureMode mode = hold(thread->context);
  if (sampled != NULL && atomic_load(&sampled->measured) == 0) atomic_store(&thread->lane->begun_ns, now_ns());
  if (is_unmarked(thread->lane)) (void)mark_lane(thread->lane, false, sampled);
  let_go(thread->context, mode);
  guard_step_out(stepped);
}

/* --- waits */

void meter_look(void) {
  if (atomic_load(&contexts) == NULL) return;
  struct thread *thread = meter_thread.turn != NULL ? &meter_thread : arrive();
  if (thread == NULL) return;
  CUstreamCaptureMode mode = hold(thread->context);
  if (!thread->context->gone) mark_and_settle(thread->context);
  let_go(thread->context, mode);
}

/* --- ends */

/* Ends the stretches of a stream (NULL: of all), by the name that each thread has for its own only this one's. */
static void end_stretches(CUstream stream, bool for_good) {
  CUcontext current = NULL;
  bool stepped = stream != NULL && guard_step_into(stream);
  (void)DRIVER(cuCtxGetCurrent)(&current);
  for (struct context *context = atomic_load(&contexts); context != NULL; context = context->next) {
    CUstreamCaptureMode mode = hold(context);
    for (struct lane *lane = context->lanes; lane != NULL && !context->gone; lane = lane->next) {
      if (stream != NULL && (lane->stream != stream || (stream == CU_STREAM_PER_THREAD && !is_mine(lane)))) continue;
      if (context->handle == current) mark_end(lane);
      if (is_unmarked(lane)) give_up(lane);
      atomic_store_explicit(&lane->open, NULL, memory_order_relaxed);
      if (for_good) lane_ends(lane);
    }
    let_go(context, mode);
  }
  guard_step_out(stepped);
}

void meter_stream_ends(CUstream stream) {
  if (atomic_load(&contexts) != NULL) end_stretches(stream, true);
}

/* Beside a capture it may come to belong to that, as if the capture began with it. */
void meter_stream_waits(CUstream stream) {
  if (atomic_load(&contexts) != NULL) end_stretches(atomic_load(&meter_captures) > 0 ? NULL : stream, false);
}

/* The driver ends its events with it. Those who still look at it see that it is gone, so it is kept. */
void meter_context_ends(CUcontext handle) {
  for (struct context *context = atomic_load(&contexts); context != NULL; context = context->next) {
    if (context->handle != handle || context->gone) continue;
    CUstreamCaptureMode mode = hold(context);
    for (struct lane *lane = context->lanes; lane != NULL; lane = lane->next) {
      settle(lane);
      for (struct mark *mark = lane->first; mark != NULL; mark = mark->next) {
        atomic_fetch_sub(under_way(context->device), mark->predicted_ns);
        count(context->device, mark->predicted_ns, mark->launches);
      }
      lane_ends(lane);
      lane->first = NULL;
    }
    context->gone = true;
    let_go(context, mode);
  }
}

/* --- capture */

void meter_capture_begins(void) {
  atomic_fetch_add(&meter_captures, 1);
  end_stretches(NULL, false); /* once this has had every context's lock, each thread asks about events as one may beside it */
}

void meter_capture_ended(void) { atomic_fetch_sub(&meter_captures, 1); }

bool meter_is_captured(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (atomic_load(&meter_captures) == 0) return false;
  return DRIVER(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* The child has no reaper, and no context that could be used. */
void meter_forked(void) {
  meter_thread = (struct thread){.random = meter_thread.random};
  atomic_store(&contexts, NULL);
  atomic_store(&meter_captures, 0);
  atomic_store(&reaper, REAPER_NONE);
  atomic_store(&reaper_sleeps, 0);
  memset(waiting, 0, sizeof waiting);
  pthread_mutex_t *mutexes[] = {&contexts_mutex, &waiting_mutex, &reaper_mutex};
  for (unsigned i = 0; i < sizeof mutexes / sizeof *mutexes; i++) (void)pthread_mutex_init(mutexes[i], NULL);
}
