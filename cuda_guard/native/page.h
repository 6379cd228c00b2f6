/* The two pages that a guarded job shares with its node's daemon. Everything in them is in the machine's own byte order; cuda_guard/page.py
 * has the same layouts, and the daemon refuses a library whose `guard_page_layout` differs from them.
 *
 *   policy page   the daemon writes it, the job maps it read-only: where the driver is, what the job may use, the gate
 *   job page      the job's processes write it: what they use. The daemon reads it, and takes nothing in it on trust
 *                 where NVML knows better
 *
 * Times are nanoseconds of CLOCK_MONOTONIC. Memory is counted in units of 512 bytes, a driver's own smallest piece. */
#ifndef MESH_GUARD_PAGE_H
#define MESH_GUARD_PAGE_H

#include <stdatomic.h>
#include <stdint.h>

#define GUARD_MAGIC 0x6472617567736d31u /* "1msguard" */
#define GUARD_LAYOUT 2u
#define GUARD_DEVICES 16
#define GUARD_HOST GUARD_DEVICES /* the place of the machine's own memory, as far as it is pinned for devices */
#define GUARD_PLACES (GUARD_DEVICES + 1)
#define GUARD_SLOTS 256 /* processes of one job that use a GPU at once; slot 0 is the daemon's */
#define GUARD_UNIT 512u
#define GUARD_NO_LIMIT (UINT64_C(1) << 63) /* bytes, where there is none */
#define GUARD_PATH 256
#define GUARD_AUDITS 32
#define GUARD_NAME 64
#define GUARD_PPM 1000000

/* Bits of `gate`. It is a futex word: what is added above the low byte makes every change wake the waiters. */
enum { GUARD_GATE_OPEN = 0, GUARD_GATE_CLOSED = 1 };

/* Low bits of `turn`. FREE: nobody else wants this device, so there is nothing to take turns in. */
enum { GUARD_TURN_FREE = 0, GUARD_TURN_WAIT = 1, GUARD_TURN_GO = 2, GUARD_TURN_MASK = 3 };

/* A job may have spent, by the time t, v0 + (t - t0) * share of GPU time; it saves up no more than `burst_ns`. */
struct guard_rate {
  int64_t t0_ns, v0_ns;
  uint32_t share_ppm, reserved;
  int64_t burst_ns;
};

/* What a job may use of one device. */
struct guard_allowance {
  unsigned char uuid[16];
  _Atomic uint64_t memory_limit;  /* bytes, with what its contexts take themselves and what is lent to it now */
  _Atomic uint64_t context_bytes; /* what a context is taken to need until NVML has told */
  _Atomic int64_t window_ns;      /* GPU time that may be under way at once: how late a closed gate takes effect */
  _Atomic uint32_t turn;          /* futex word */
  _Atomic uint32_t rate_index;    /* counts up with each change; its lowest bit says which of `rates` is in force */
  struct guard_rate rates[2];
  unsigned char reserved[16];
};

struct guard_policy {
  uint64_t magic;
  uint32_t layout, devices;
  _Atomic uint32_t gate; /* futex word */
  uint32_t reserved;
  _Atomic int64_t heartbeat_ns; /* of whoever hands out turns: once it is old, there are none */
  _Atomic uint64_t host_limit;  /* bytes of the machine's memory that may be pinned */
  unsigned char spare[24];
  char driver[GUARD_PATH]; /* the real libcuda.so.1, an absolute path */
  char nvml[GUARD_PATH];   /* the real libnvidia-ml.so.1 */
  unsigned char pad[64];
  struct guard_allowance allowances[GUARD_DEVICES];
  unsigned char rest[1408];
};

/* What the job has used of one device, or pinned of the machine's memory, all its processes together. */
struct guard_use {
  _Atomic uint64_t memory;        /* units in use, and who changed them last: see ledger.h */
  _Atomic int64_t spent_ns;       /* against `guard_rate`; jumps forward over what was not saved up */
  _Atomic uint64_t busy_ns;       /* GPU time measured, only ever more */
  _Atomic uint64_t launches;      /* kernels and graphs, counted in batches */
  uint32_t reserved;
  _Atomic uint32_t refused;       /* allocations that the limit forbade */
  _Atomic int64_t last_launch_ns; /* of the last batch begun */
  _Atomic uint64_t peak;          /* units, the most at any time */
  _Atomic uint64_t borrowed;      /* memory of others opened here: counted, charged to whoever made it */
};

/* One process of the job. Whoever holds the lock on the slot's byte of the page's file (fcntl, from GUARD_LOCKS on) lives; the kernel
 * lets go of it with the process, and tells its pid to whoever asks. */
struct guard_slot {
  _Atomic uint32_t pid; /* as the process sees itself; 0: the slot is free */
  _Atomic uint32_t generation;
  uint64_t seq;                /* of the owner's last change to a `memory` word */
  _Atomic uint64_t done;       /* the highest of them that others have seen and written over */
  _Atomic uint64_t pending;    /* the change under way, or 0; see ledger.c */
  _Atomic int64_t pending_used;
  _Atomic uint8_t waiting[GUARD_DEVICES]; /* not 0: threads of it would launch if they might */
  _Atomic int64_t used[GUARD_PLACES];       /* units that this process holds */
  _Atomic int64_t under_way[GUARD_DEVICES]; /* ns of GPU time it has launched and not yet seen the end of */
};

#define GUARD_LOCKS (1 << 20) /* offset of slot 0's lock; the byte before it is the janitor's */

struct guard_job {
  uint64_t magic;
  uint32_t layout, slots;
  _Atomic uint32_t audits; /* names below */
  unsigned char reserved[44];
  struct guard_use uses[GUARD_PLACES];
  char audit[GUARD_AUDITS][GUARD_NAME]; /* calls that look like memory or work and that the guard does not know */
  unsigned char rest[896];
  struct guard_slot table[GUARD_SLOTS];
};

_Static_assert(sizeof(struct guard_rate) == 32, "layout 2");
_Static_assert(sizeof(struct guard_allowance) == 128, "layout 2");
_Static_assert(sizeof(struct guard_policy) == 4096, "layout 2");
_Static_assert(sizeof(struct guard_use) == 64, "layout 2");
_Static_assert(sizeof(struct guard_slot) == 320, "layout 2");
_Static_assert(sizeof(struct guard_job) == 4096 + GUARD_SLOTS * 320, "layout 2");

#endif
