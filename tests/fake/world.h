/* The machine that has the GPUs: one file in shared memory, mapped by every process that uses one of them and by the test that
 * made it. What cannot be seen from outside a process (handles, contexts, graphs) is not in it.
 *
 *   lane     a stream as its device sees it: a queue of items, in order
 *   item     a piece of a lane's work, known by its number in the lane, its mark: it is done once `retired` has come to that
 *   process  whoever has called cuInit. Lanes of one process run side by side; processes take turns of `slice_ns`
 *
 * No device runs by itself. Whoever looks, under the lock, first runs all of them up to the present time: see timeline.c. */
#ifndef FAKE_WORLD_H
#define FAKE_WORLD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
  WORLD_DEVICES = 16,
  WORLD_PROCESSES = 512,
  WORLD_LANES = 512,
  WORLD_ITEMS = 8192,
  WORLD_STAMPS = 8192,
  WORLD_SAMPLES = 1024,
  WORLD_CALLS = 1024,
  WORLD_NAME = 96,
  WORLD_GANGS = 64,
  WORLD_RANKS = 16,
  WORLD_WHOLE = 1000000, /* parts of a device are in ppm */
};

#define WORLD_NEVER INT64_MAX

enum item_kind {
  ITEM_WORK,   /* `left_ns` of the device's time; 0 for a marker */
  ITEM_RECORD, /* stamps the time, after `left_ns` */
  ITEM_WAIT,   /* for another lane's mark */
  ITEM_HOST,   /* for a function or a value on the host: the process turns it into ITEM_WORK once that has returned or is there */
  ITEM_IN,     /* a copy to the device, of `left_ns` if it had the link for itself */
  ITEM_OUT,    /* the same from it */
  ITEM_GANG,   /* a collective: round `mark` of gang `lane`. It spins until all ranks run theirs */
};

enum lane_kind { LANE_UNUSED, LANE_LEGACY, LANE_BLOCKING, LANE_NON_BLOCKING };

enum process_state { PROCESS_RUNNING, PROCESS_LOCKED, PROCESS_CHECKPOINTED, PROCESS_FAILED }; /* numbers of CUprocessState */

struct item {
  int64_t left_ns;
  uint64_t seq; /* of submission in its process */
  union {
    uint64_t mark; /* ITEM_WAIT: of `lane` */
    uint64_t call; /* ITEM_HOST: the process's own */
  };
  uint32_t next;
  uint32_t width_ppm; /* the part of the device that it fills; 0: it slows nothing down */
  uint16_t stamp, lane;
  enum item_kind kind;
};

struct lane {
  enum lane_kind kind;
  uint32_t context; /* the legacy lane of a context and its blocking ones wait for each other */
  int device;
  uint32_t part_ppm; /* of the device that its context may use */
  uint32_t head, tail;
  _Atomic uint64_t submitted, retired; /* counts; read without the lock too */
};

struct stamp {
  int64_t ns;
  uint64_t seq; /* of the record that it is from */
};

/* Time as NVML's sampling sees it: slots in which anything ran. */
struct slots {
  int64_t next; /* the first that has not been counted */
  uint32_t count, coming; /* coming: per cent of the last window, told after the next one */
};

struct process {
  int pid;
  uint32_t alive;
  _Atomic uint32_t state; /* enum process_state; futex word */
  _Atomic uint32_t bell;  /* futex word: changes when a waiting thread should look again before its time */
  uint64_t begun, seq; /* begun: in ticks, of the machine */
  uint64_t draws;      /* of chance */
  uint64_t memory[WORLD_DEVICES], put_away[WORLD_DEVICES]; /* the second while checkpointed */
  int64_t executed_ns[WORLD_DEVICES], sampled_ns[WORLD_DEVICES], last_ns[WORLD_DEVICES]; /* last: when it ended */
  struct slots slots[WORLD_DEVICES];
  uint64_t busy[WORLD_LANES / 64]; /* lanes with items */
  uint32_t spare, fresh, items;    /* free items: a list, those never used, how many are in lanes */
  struct lane lanes[WORLD_LANES];
  struct stamp stamps[WORLD_STAMPS];
  struct item pool[WORLD_ITEMS]; /* pool[0] is nobody's: 0 ends a list */
};

struct sample {
  int64_t ns;
  int pid; /* filled in for whoever asks */
  uint32_t process, percent;
};

struct device {
  char name[WORLD_NAME];
  unsigned char uuid[16];
  uint64_t memory, used;
  int current; /* the process whose turn it is or was last */
  int64_t slice_end_ns, busy_ns, sampled_ns, copied_ns;
  struct slots slots;
  uint32_t clock_ppm, locked_ppm; /* of the highest clock; 0: it is not locked */
  uint32_t percent; /* busy, in the last whole sample period */
  uint64_t samples; /* ever taken */
  struct sample ring[WORLD_SAMPLES];
};

/* What makes a device less convenient: profiles.py says what each means, and where its value is from. */
struct world_traits {
  uint64_t seed;
  int64_t load_least_ns, load_most_ns, record_ns, call_ns, clock_ns, slot_ns, copy_ns, link_bps, memory_bps;
  uint32_t spread_ppm, slow_one_in, slow_times, width_least_ppm, clock_least_ppm, aliases;
};

struct world_config {
  struct world_traits traits;
  uint64_t memory, granule, pool_chunk, context_bytes;
  int64_t slice_ns, tick_ns, sample_ns, virtual_ns; /* tick: of event times; virtual_ns: 0 for real time, or where it begins */
  uint32_t devices, driver_version, capability, queue_depth; /* capability: 90 for 9.0; depth: items that a lane takes */
  char name[WORLD_NAME];
  unsigned char uuids[WORLD_DEVICES][16];
};

/* Ranks on any devices and of any processes that run collectives together. */
struct gang {
  uint32_t key, ranks, running; /* running: ranks whose kernels run at this moment */
  uint64_t round;               /* rounds that all have done */
  int64_t left_ns;              /* of the present round; 0: it has not begun */
  struct {
    uint32_t process, device;
    uint64_t launched;
  } rank[WORLD_RANKS];
  uint32_t known; /* ranks seen */
};

struct world {
  uint64_t magic;
  struct world_config config;
  pthread_mutex_t lock;
  int64_t now_ns, next_sample_ns, next_clock_ns; /* the devices have run up to `now_ns` */
  int64_t reaped_ns;              /* of the real clock */
  uint64_t retired;
  uint32_t aside; /* items in lanes that need no turn: copies, and records that take time */
  uint32_t gang_count;
  struct gang gangs[WORLD_GANGS];
  _Atomic int64_t virtual_ns;
  uint64_t busy[WORLD_PROCESSES / 64]; /* processes with busy lanes */
  uint32_t joined;                     /* slots ever used */
  _Atomic uint64_t calls[WORLD_CALLS];
  struct device devices[WORLD_DEVICES];
  struct process processes[WORLD_PROCESSES];
};

/* Making and entering a world. */
int world_create(const char *path, const struct world_config *config);
struct world *world_open(const char *path); /* the same for the same path; NULL with errno */
void world_close(struct world *world); /* which must not be used any more */
struct process *world_join(struct world *world);

/* What follows is under the lock, where nothing else is said. Whoever takes it runs the devices up to the present first. */
void world_lock(struct world *world);
void world_unlock(struct world *world);
int64_t world_now(const struct world *world); /* needs no lock */
int64_t world_clock(void);                    /* the real one; nor this */
struct process *world_find(struct world *world, int pid);
int world_pid(const struct world *world, const struct process *process); /* as the caller sees it, from outside of its namespace */
void world_reap(struct world *world); /* what the dead had */

/* Memory, in bytes; only whole granules are taken. */
bool world_take(struct world *world, struct process *process, int device, uint64_t bytes);
void world_give(struct world *world, struct process *process, int device, uint64_t bytes);
uint64_t world_granules(const struct world *world, uint64_t bytes);

/* Work. Submission waits for room, and whoever waits lets go of the lock meanwhile. */
uint32_t world_open_lane(struct process *process, int device, uint32_t context, enum lane_kind kind); /* WORLD_LANES: none */
bool world_gather(struct world *world, struct process *process, int device, uint32_t key, uint32_t ranks, struct item *item);
uint64_t world_submit(struct world *world, struct process *process, uint32_t lane, struct item item); /* its mark */
void world_await(struct world *world, struct process *process, uint32_t lane, uint64_t mark);
int64_t world_due(const struct process *process, uint32_t lane, uint64_t mark); /* ns until the mark, at the least */
void world_drop(struct world *world, struct process *process);                  /* all its work */

/* Functions on the host: whether one is at the head of the lane, and due; and that it has returned. */
bool world_reached(const struct process *process, uint32_t lane);
void world_returned(struct world *world, struct process *process, uint32_t lane);

/* Chance: see chance.c. */
int64_t world_chance(struct world *world, struct process *process, int64_t ns); /* how long a launch takes this time */
int64_t world_load_ns(const struct world *world, const char *name);             /* the first launch of this kernel */
uint32_t world_width_ppm(const struct world *world, const char *name);          /* the part of a device that it fills */
uint32_t world_clock_ppm(const struct world *world, int device, int64_t period);
void world_spend(struct world *world, int64_t ns); /* lets the calling thread take so long; without the lock */

/* Returns the ns from then until something ends or changes turns. */
int64_t world_advance(struct world *world, int64_t to_ns);

/* Futexes, which need no lock: sleep until `word` is no longer `seen`, or the time comes (WORLD_NEVER: it does not); wake all
 * who sleep, after a change. */
void world_sleep(_Atomic uint32_t *word, uint32_t seen, int64_t until_ns);
void world_wake(_Atomic uint32_t *word);

#endif
