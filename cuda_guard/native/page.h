/* The two pages that a guarded job shares with its node's daemon, in the machine's byte order. cuda_guard/page.py has the same layouts, and
 * the daemon refuses a library whose `guard_page_layout` differs from them.
 *
 *   policy page   written by the daemon, mapped read-only by the job: path of the driver, quotas, the gate
 *   job page      written by the job's processes: what they use. The daemon reads it, and trusts NVML where
 *                 the two differ
 *
 * Times are nanoseconds of CLOCK_MONOTONIC. Memory is counted in units of 512 bytes, the driver's granularity. */
#ifndef MESH_GUARD_PAGE_H
#define MESH_GUARD_PAGE_H

#include <stdatomic.h>
#include <stdint.h>

#define GUARD_MAGIC 0x6472617567736d31u /* "1msguard" */
#define GUARD_LAYOUT 3u
#define GUARD_DEVICES 16
#define GUARD_HOST GUARD_DEVICES /* place of pinned host memory */
#define GUARD_PLACES (GUARD_DEVICES + 1)
#define GUARD_SLOTS 256 /* concurrent GPU processes of one job; slot 0 is the daemon's */
#define GUARD_UNIT 512u
#define GUARD_NO_LIMIT (UINT64_C(1) << 63) /* bytes */
#define GUARD_PATH 256
#define GUARD_AUDITS 32
#define GUARD_NAME 64
#define GUARD_TIMELINE 1024 /* words of a device's timeline: 268 ms */
#define GUARD_PPM 1000000

/* Bits of `gate`, a futex word: a counter above the low byte makes every change wake the waiters. */
enum { GUARD_GATE_OPEN = 0, GUARD_GATE_CLOSED = 1 };

/* Low bits of `turn`. FREE: no other job wants this device, so there are no turns. */
enum { GUARD_TURN_FREE = 0, GUARD_TURN_WAIT = 1, GUARD_TURN_GO = 2, GUARD_TURN_MASK = 3 };

/* By time t a job may have spent v0 + (t - t0) * share of GPU time; it saves up at most `burst_ns`. */
struct guard_rate {
  int64_t t0_ns, v0_ns;
  uint32_t share_ppm, reserved;
  int64_t burst_ns;
};

/* A job's quota of one device. */
struct guard_allowance {
  unsigned char uuid[16];
  _Atomic uint64_t memory_limit;  /* bytes, including its contexts and what is lent to it now */
  _Atomic uint64_t context_bytes; /* assumed size of a context until NVML has measured it */
  _Atomic int64_t window_ns;      /* GPU time in flight at once: the delay of a closed gate */
  _Atomic uint32_t turn;          /* futex word */
  _Atomic uint32_t rate_index;    /* incremented by each change; its lowest bit selects the one of `rates` in force */
  struct guard_rate rates[2];
  unsigned char reserved[16];
};

struct guard_policy {
  uint64_t magic;
  uint32_t layout, devices;
  _Atomic uint32_t gate; /* futex word */
  uint32_t reserved;
  _Atomic int64_t heartbeat_ns; /* of the arbiter: once it is old, turns are ignored */
  _Atomic uint64_t host_limit;  /* bytes of host memory that may be pinned */
  unsigned char spare[24];
  char driver[GUARD_PATH]; /* the real libcuda.so.1, an absolute path */
  char nvml[GUARD_PATH];   /* the real libnvidia-ml.so.1 */
  unsigned char pad[64];
  struct guard_allowance allowances[GUARD_DEVICES];
  unsigned char rest[1408];
};

/* The job's use of one device, or its pinned host memory, by all its processes. */
struct guard_use {
  _Atomic uint64_t memory;        /* units in use, and the slot that changed them last: see ledger.h */
  _Atomic int64_t spent_ns;       /* against `guard_rate`; jumps over forfeited time */
  _Atomic uint64_t busy_ns;       /* charged GPU time, only increases */
  _Atomic uint64_t launches;      /* kernels and graphs, counted in batches */
  uint32_t reserved;
  _Atomic uint32_t refused;       /* allocations refused by the limit */
  _Atomic int64_t last_launch_ns; /* when work was last launched or seen to end */
  _Atomic uint64_t peak;          /* units */
  _Atomic uint64_t borrowed;      /* memory of other jobs opened here: counted, charged to its owner */
};

/* One process of the job. A process holds the lock on its slot's byte of the page's file (fcntl, from GUARD_LOCKS on) while it lives; the
 * kernel releases it with the process, and reports the holder's pid. */
struct guard_slot {
  _Atomic uint32_t pid; /* in the process's own namespace; 0: the slot is free */
  _Atomic uint32_t generation;
  uint64_t seq;                /* number of the owner's last change to a `memory` word */
  _Atomic uint64_t done;       /* highest of these numbers that others have overwritten */
  _Atomic uint64_t pending;    /* the change in progress, or 0; see ledger.c */
  _Atomic int64_t pending_used;
  _Atomic uint8_t waiting[GUARD_DEVICES]; /* not 0: its threads wait to launch */
  _Atomic int64_t used[GUARD_PLACES];       /* units that this process holds */
  _Atomic int64_t under_way[GUARD_DEVICES]; /* ns of GPU time it has launched and not yet seen end */
};

#define GUARD_LOCKS (1 << 20) /* offset of slot 0's lock; the byte before it is the sweeper's */

struct guard_job {
  uint64_t magic;
  uint32_t layout, slots;
  _Atomic uint32_t audits; /* names below */
  unsigned char reserved[44];
  struct guard_use uses[GUARD_PLACES];
  char audit[GUARD_AUDITS][GUARD_NAME]; /* calls unknown to the guard that may allocate memory or launch work */
  unsigned char rest[896];
  struct guard_slot table[GUARD_SLOTS];
  _Atomic uint64_t timelines[GUARD_DEVICES][GUARD_TIMELINE]; /* when the job used each device: see timeline.h */
};

_Static_assert(sizeof(struct guard_rate) == 32, "layout 3");
_Static_assert(sizeof(struct guard_allowance) == 128, "layout 3");
_Static_assert(sizeof(struct guard_policy) == 4096, "layout 3");
_Static_assert(sizeof(struct guard_use) == 64, "layout 3");
_Static_assert(sizeof(struct guard_slot) == 320, "layout 3");
_Static_assert(sizeof(struct guard_job) == 4096 + GUARD_SLOTS * 320 + GUARD_DEVICES * GUARD_TIMELINE * 8, "layout 3");

#endif
