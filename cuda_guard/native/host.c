#define _GNU_SOURCE
#include "host.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "bucket.h"
#include "clock.h"
#include "ledger.h"
#include "lender.h"
#include "timeline.h"

#define CAP_PPM 900000    /* GaiaGPU's value; the rest keeps a device responsive */
#define TURN_NS 10000000  /* long compared with the gap between turns, short compared with a second */
#define IDLE_NS 1000000
#define DRAIN_NS 100000000
#define SWEEP_NS 250000000 /* until then the work in flight of a dead process makes its job look busy */

#define SWEEP_FACTOR 100 /* sweeps of one job use at most a hundredth of a CPU */

struct host {
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  bool ends;
  struct arbiter devices[GUARD_DEVICES];
};

/* --- truncated pages
 *
 * A job can truncate the file of its page, and where nothing keeps it from the daemon's files that of its policy. An access to the missing
 * part raises SIGBUS, in the daemon too. The handler maps zeros there: a policy without a share. */

#define SHIELDED (GUARD_DEVICES * ARBITER_CONTENDERS)
static void *_Atomic shielded_jobs[SHIELDED], *_Atomic shielded_policies[SHIELDED];
static struct sigaction before_us;

/* Maps zeros over the page that has this address; false if it is none of these. */
static bool mend(void *_Atomic *pages, size_t size, uintptr_t at) {
  for (unsigned i = 0; i < SHIELDED; i++) {
    void *page = atomic_load(&pages[i]);
    if (page == NULL || at < (uintptr_t)page || at - (uintptr_t)page >= size) continue;
    if (mmap(page, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page) return true;
  }
  return false;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
  uintptr_t at = (uintptr_t)info->si_addr;
  if (mend(shielded_jobs, sizeof(struct guard_job), at) || mend(shielded_policies, sizeof(struct guard_policy), at)) return;
  if (before_us.sa_flags & SA_SIGINFO)
    before_us.sa_sigaction(number, info, context);
  else if (before_us.sa_handler != SIG_DFL && before_us.sa_handler != SIG_IGN)
    before_us.sa_handler(number);
  else
    (void)signal(number, SIG_DFL); /* the signal is raised again */
}

static void stand_by(void) {
  struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
  (void)sigaction(SIGBUS, &ours, &before_us);
}

static void shield(void *_Atomic *pages, void *from, void *to) {
  for (unsigned i = 0; i < SHIELDED; i++) {
    void *there = from;
    if (atomic_compare_exchange_strong(&pages[i], &there, to)) return;
  }
}

void host_forget(struct guard_policy *policy, struct guard_job *job) {
  shield(shielded_policies, policy, NULL);
  shield(shielded_jobs, job, NULL);
}

static int64_t worked_ns(void) {
  struct timespec spent;
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
  return (int64_t)spent.tv_sec * 1000000000 + spent.tv_nsec;
}

/* Thousands of locks on a page make a sweep slow; such a job is swept less often. */
static void sweep(struct host *host, int64_t now) {
  for (unsigned i = 0; i < GUARD_DEVICES; i++)
    for (uint32_t j = 0; j < host->devices[i].count; j++) {
      struct contender *contender = &host->devices[i].contenders[j];
      if (contender->place != 0 || now < contender->sweep_ns) continue; /* a page once, not for each device */
      int64_t begun = worked_ns();
      (void)ledger_sweep(contender->job, contender->file, 0);
      contender->sweep_ns = now + SWEEP_FACTOR * (worked_ns() - begun);
    }
}

static void *run(void *argument) {
  struct host *host = argument;
  int64_t swept = 0;
  (void)pthread_mutex_lock(&host->mutex);
  while (!host->ends) {
    int64_t next = INT64_MAX, now = now_ns();
    if (now - swept >= SWEEP_NS) {
      sweep(host, now);
      swept = now;
    }
    for (unsigned i = 0; i < GUARD_DEVICES; i++) {
      if (host->devices[i].count == 0) continue;
      int64_t soon = arbiter_step(&host->devices[i], now_ns());
      if (soon < next) next = soon;
    }
    struct timespec until = {.tv_sec = next / 1000000000, .tv_nsec = next % 1000000000};
    if (next == INT64_MAX)
      (void)pthread_cond_wait(&host->changed, &host->mutex);
    else
      (void)pthread_cond_timedwait(&host->changed, &host->mutex, &until);
  }
  (void)pthread_mutex_unlock(&host->mutex);
  return NULL;
}

struct host *host_start(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, stand_by);
  struct host *host = calloc(1, sizeof *host);
  if (host == NULL) return NULL;
  for (unsigned i = 0; i < GUARD_DEVICES; i++)
    host->devices[i] = (struct arbiter){
        .holder = -1, .draining = -1, .cap_ppm = CAP_PPM, .turn_ns = TURN_NS, .idle_ns = IDLE_NS, .drain_ns = DRAIN_NS,
        .devices = host->devices, .number = i};
  pthread_condattr_t clock;
  (void)pthread_condattr_init(&clock);
  (void)pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  (void)pthread_mutex_init(&host->mutex, NULL);
  (void)pthread_cond_init(&host->changed, &clock);
  (void)pthread_condattr_destroy(&clock);
  if (pthread_create(&host->thread, NULL, run, host) == 0) return host;
  free(host);
  return NULL;
}

void host_stop(struct host *host) {
  (void)pthread_mutex_lock(&host->mutex);
  host->ends = true;
  (void)pthread_cond_signal(&host->changed);
  (void)pthread_mutex_unlock(&host->mutex);
  (void)pthread_join(host->thread, NULL);
  (void)pthread_cond_destroy(&host->changed);
  (void)pthread_mutex_destroy(&host->mutex);
  free(host);
}

static void lock(struct host *host) { (void)pthread_mutex_lock(&host->mutex); }

static void unlock(struct host *host) {
  (void)pthread_cond_signal(&host->changed);
  (void)pthread_mutex_unlock(&host->mutex);
}

static struct contender *find(struct arbiter *arbiter, const struct guard_policy *policy) {
  for (uint32_t i = 0; i < arbiter->count; i++)
    if (arbiter->contenders[i].policy == policy) return &arbiter->contenders[i];
  return NULL;
}

static int64_t bounded(uint64_t bytes) { return bytes < (uint64_t)MEMORY_MOST ? (int64_t)bytes : MEMORY_MOST; }

bool host_join(struct host *host, uint32_t device, struct guard_policy *policy, struct guard_job *job, int file, uint32_t place,
               uint32_t share_ppm, uint32_t limit_ppm, uint64_t memory, uint64_t memory_most) {
  if (device >= GUARD_DEVICES || place >= GUARD_DEVICES) return false;
  lock(host);
  struct arbiter *arbiter = &host->devices[device];
  struct contender *contender = find(arbiter, policy);
  bool room = contender != NULL || arbiter->count < ARBITER_CONTENDERS;
  if (contender == NULL && room) {
    contender = &arbiter->contenders[arbiter->count++];
    *contender = (struct contender){.policy = policy, .job = job, .file = file, .place = place};
    atomic_store(&policy->allowances[place].memory_limit, memory >= GUARD_NO_LIMIT ? GUARD_NO_LIMIT : 0);
  }
  if (contender != NULL) {
    contender->share_ppm = share_ppm;
    contender->limit_ppm = limit_ppm;
    contender->memory = memory >= GUARD_NO_LIMIT ? ALL_MEMORY : bounded(memory);
    contender->memory_most = memory >= GUARD_NO_LIMIT || bounded(memory_most) < contender->memory ? contender->memory : bounded(memory_most);
    (void)lend_memory(arbiter);
  }
  unlock(host);
  return room;
}

/* The others keep their order, and the job with the turn keeps it. */
static void leave(struct arbiter *arbiter, uint32_t which) {
  for (uint32_t i = which; i + 1 < arbiter->count; i++) arbiter->contenders[i] = arbiter->contenders[i + 1];
  arbiter->count--;
  int32_t *marks[] = {&arbiter->holder, &arbiter->draining};
  for (unsigned i = 0; i < 2; i++) {
    if (*marks[i] == (int32_t)which) *marks[i] = -1;
    if (*marks[i] > (int32_t)which) --*marks[i];
  }
}

void host_leave(struct host *host, const struct guard_policy *policy) {
  lock(host);
  for (unsigned i = 0; i < GUARD_DEVICES; i++) {
    struct contender *contender = find(&host->devices[i], policy);
    if (contender == NULL) continue;
    leave(&host->devices[i], (uint32_t)(contender - host->devices[i].contenders));
    (void)lend_memory(&host->devices[i]);
  }
  unlock(host);
}

void host_size(struct host *host, uint32_t device, uint64_t memory, uint64_t foreign) {
  lock(host);
  host->devices[device].memory = bounded(memory);
  host->devices[device].memory_foreign = bounded(foreign);
  (void)lend_memory(&host->devices[device]);
  unlock(host);
}

bool host_away(struct host *host, uint32_t device, const struct guard_policy *policy, bool away) {
  lock(host);
  struct arbiter *arbiter = &host->devices[device];
  struct contender *contender = find(arbiter, policy);
  bool fits = contender == NULL || lend_away(arbiter, contender, away);
  unlock(host);
  return fits;
}

bool host_claim(struct guard_policy *policy, struct guard_job *job, int file, uint32_t pid) {
  shield(shielded_policies, NULL, policy);
  shield(shielded_jobs, NULL, job);
  return ledger_claim_slot(job, file, 0, pid);
}

bool host_correct(struct guard_job *job, uint32_t place, int64_t units) {
  int64_t change;
  if (__builtin_sub_overflow(units, atomic_load(&job->table[0].used[place]), &change)) return false;
  return ledger_change(job, 0, place, change, UINT64_MAX);
}

int64_t host_timeline(struct guard_job *job, uint32_t place, int64_t start_ns, int64_t end_ns) {
  return timeline_add(job->timelines[place], start_ns, end_ns);
}

int64_t host_allowed(const struct guard_policy *policy, uint32_t place, int64_t now) {
  struct guard_rate rate = rate_of(&policy->allowances[place]);
  return rate_allowed(&rate, now);
}

int64_t host_wait(const struct guard_policy *policy, const struct guard_job *job, uint32_t place, int64_t now) {
  struct guard_rate rate = rate_of(&policy->allowances[place]);
  return bucket_wait(&rate, atomic_load(&job->uses[place].spent_ns), now);
}

void host_spend(const struct guard_policy *policy, struct guard_job *job, uint32_t place, int64_t ns, int64_t now) {
  struct guard_rate rate = rate_of(&policy->allowances[place]);
  bucket_spend(&rate, &job->uses[place].spent_ns, ns, now);
}
