#define _GNU_SOURCE
#include "ledger.h"

#include <fcntl.h>
#include <pthread.h>

/* memory word: units (38 bits) | slot of the last change (8) | low bits of that change's number (18) */
#define SEQ_BITS 18
#define SLOT_BITS 8
#define SEQ_MASK ((UINT64_C(1) << SEQ_BITS) - 1)
#define UNITS_MAX ((UINT64_C(1) << 38) - 1)

/* Attempts on a word that is written without end, so that the daemon never blocks. 256 concurrent processes need fewer. */
#define TRIES 20000
#define FEW_TRIES 16

/* pending word: 1 | place (5) | 0 (10) | number of the change (48) */
#define PENDING (UINT64_C(1) << 63)
#define NUMBER_MASK ((UINT64_C(1) << 48) - 1)

static uint64_t word_of(uint64_t units, unsigned slot, uint64_t seq) {
  return units << (SLOT_BITS + SEQ_BITS) | (uint64_t)slot << SEQ_BITS | (seq & SEQ_MASK);
}

static uint64_t pending_of(unsigned place, uint64_t number) { return PENDING | (uint64_t)place << 58 | number; }

/* The job can write anything there. */
static unsigned pending_place(uint64_t pending) {
  unsigned place = (unsigned)(pending >> 58) & 31;
  return place < GUARD_PLACES ? place : 0;
}

static uint64_t word_units(uint64_t word) { return word >> (SLOT_BITS + SEQ_BITS); }
static unsigned word_slot(uint64_t word) { return (unsigned)(word >> SEQ_BITS) & (GUARD_SLOTS - 1); }

uint64_t ledger_used(const struct guard_job *job, unsigned place) { return word_units(atomic_load(&job->uses[place].memory)); }

/* Records the change shown by this word before it is overwritten: its process may be dead. */
static void note_done(struct guard_job *job, uint64_t word) {
  _Atomic uint64_t *done = &job->table[word_slot(word)].done;
  uint64_t known = atomic_load(done);
  for (int i = 0; i < FEW_TRIES; i++) {
    uint64_t ahead = (word - known) & SEQ_MASK;
    if (ahead == 0 || ahead > SEQ_MASK / 2) return; /* recorded already, or superseded */
    if (atomic_compare_exchange_weak(done, &known, known + ahead)) return;
  }
}

static bool took_place(const struct guard_job *job, unsigned slot, uint64_t pending) {
  uint64_t number = pending & NUMBER_MASK;
  uint64_t word = atomic_load(&job->uses[pending_place(pending)].memory);
  if (word_slot(word) == slot && ((word ^ number) & SEQ_MASK) == 0) return true;
  return atomic_load(&job->table[slot].done) >= number; /* read after the word: it is recorded before the word is overwritten */
}

bool ledger_change(struct guard_job *job, unsigned slot, unsigned place, int64_t units, uint64_t limit) {
  if (units == 0) return true;
  struct guard_slot *mine = &job->table[slot];
  struct guard_use *use = &job->uses[place];
  _Atomic int64_t *held = &mine->used[place];
  int64_t after;
  if (__builtin_add_overflow(atomic_load(held), units, &after)) after = units; /* the job has written an impossible value */
  uint64_t number = ++mine->seq & NUMBER_MASK;
  CRASH_POINT(1);
  atomic_store(&mine->pending_used, after);
  CRASH_POINT(2);
  atomic_store(&mine->pending, pending_of(place, number));
  CRASH_POINT(3);
  uint64_t word = atomic_load(&use->memory), sum;
  int tries = 0;
  do {
    uint64_t used = word_units(word);
    sum = units < 0 && -(uint64_t)units > used ? 0 : used + (uint64_t)units;
    if ((units > 0 && (sum > limit || sum > UNITS_MAX)) || tries++ == TRIES) {
      atomic_store(&mine->pending, 0);
      return false;
    }
    note_done(job, word);
    CRASH_POINT(4);
  } while (!atomic_compare_exchange_weak(&use->memory, &word, word_of(sum, slot, number)));
  CRASH_POINT(5);
  atomic_store(held, after);
  CRASH_POINT(6);
  atomic_store(&mine->pending, 0);
  CRASH_POINT(7);
  uint64_t peak = atomic_load(&use->peak);
  for (int i = 0; i < TRIES && sum > peak && !atomic_compare_exchange_weak(&use->peak, &peak, sum); i++) {
  }
  return true;
}

static struct flock byte_of(int slot, short type) {
  return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = GUARD_LOCKS + slot, .l_len = 1};
}

static bool take(int file, int slot) {
  struct flock lock = byte_of(slot, F_WRLCK);
  return fcntl(file, F_SETLK, &lock) == 0;
}

static void let_go(int file, int slot) {
  struct flock lock = byte_of(slot, F_UNLCK);
  (void)fcntl(file, F_SETLK, &lock);
}

static bool is_taken(int file, unsigned slot) {
  struct flock lock = byte_of((int)slot, F_WRLCK);
  return fcntl(file, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK; /* when in doubt, alive */
}

unsigned ledger_owner(int file, unsigned slot) {
  struct flock lock = byte_of((int)slot, F_WRLCK);
  if (fcntl(file, F_GETLK, &lock) != 0 || lock.l_type == F_UNLCK || lock.l_pid < 0) return 0;
  return (unsigned)lock.l_pid;
}

bool ledger_claim_slot(struct guard_job *job, int file, unsigned slot, unsigned pid) {
  if (!take(file, (int)slot)) return false;
  struct guard_slot *mine = &job->table[slot];
  if (slot != 0 && atomic_load(&mine->pid) != 0) { /* of a dead process: only a sweep frees it */
    let_go(file, (int)slot);
    return false;
  }
  atomic_fetch_add(&mine->generation, 1);
  atomic_store(&mine->pid, pid);
  return true;
}

int ledger_claim(struct guard_job *job, int file, unsigned pid) {
  for (int round = 0; round < 2; round++) {
    for (unsigned i = 0; i < GUARD_SLOTS - 1; i++) {
      unsigned slot = 1 + (pid + i) % (GUARD_SLOTS - 1);
      if (atomic_load(&job->table[slot].pid) == 0 && ledger_claim_slot(job, file, slot, pid)) return (int)slot;
    }
    if (round == 0 && ledger_sweep(job, file, -1) <= 0) break;
  }
  return -1;
}

/* The sweeper acts in the dead process's name, so if it dies too, the next one finds its change like any other. */
/* False if it cannot be done now. */
static bool bury(struct guard_job *job, unsigned slot) {
  struct guard_slot *dead = &job->table[slot];
  uint64_t pending = atomic_load(&dead->pending);
  if (pending != 0 && took_place(job, slot, pending))
    atomic_store(&dead->used[pending_place(pending)], atomic_load(&dead->pending_used));
  CRASH_POINT(8);
  atomic_store(&dead->pending, 0);
  for (unsigned place = 0; place < GUARD_PLACES; place++) {
    int64_t held = atomic_load(&dead->used[place]);
    if (!ledger_change(job, slot, place, held == INT64_MIN ? INT64_MAX : -held, UNITS_MAX) && held > 0) return false;
  }
  for (unsigned device = 0; device < GUARD_DEVICES; device++) {
    atomic_store(&dead->under_way[device], 0);
    atomic_store(&dead->waiting[device], 0);
  }
  CRASH_POINT(9);
  atomic_store(&dead->pid, 0);
  return true;
}

static pthread_mutex_t sweeping = PTHREAD_MUTEX_INITIALIZER; /* the file's lock is the process's: it keeps no thread out */

void ledger_forked(void) { (void)pthread_mutex_init(&sweeping, NULL); }

int ledger_sweep(struct guard_job *job, int file, int slot) {
  (void)pthread_mutex_lock(&sweeping);
  int count = take(file, -1) ? 0 : -1;
  for (unsigned i = 1; i < GUARD_SLOTS && count >= 0; i++) {
    if ((int)i == slot || atomic_load(&job->table[i].pid) == 0 || is_taken(file, i)) continue;
    if (!bury(job, i)) break;
    count++;
  }
  if (count >= 0) let_go(file, -1);
  (void)pthread_mutex_unlock(&sweeping);
  return count;
}
