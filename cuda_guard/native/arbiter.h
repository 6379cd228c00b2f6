/* Arbiter: the daemon's half of the compute quota. It assigns shares of a device and turns on it.
 *
 * A share is a slope in the job's policy page (bucket.h). Time of idle jobs is lent to jobs whose limit allows it, and taken back at
 * the first step after its owner works again; for memory see lender.h. When several jobs want a device they take turns, so that each
 * one's events measure its own kernels. The next turn goes to the job with the least time for its share (start-time fair queueing:
 * Goyal, Vin and Cheng, SIGCOMM 1996), so that on an oversubscribed device all jobs get the same part of their shares.
 *
 * The turns of a gang, a job on several devices, begin and end together, since its ranks wait for each other on their devices. It is
 * given its devices one after another in the order of their numbers, as resources are to exclude a deadlock (Havender, 1968), and goes
 * once it has all. While it waits for one, those that it has are charged to it and bounded like a turn, and a gang that may not go on
 * one of its devices is given none. */
#ifndef MESH_GUARD_ARBITER_H
#define MESH_GUARD_ARBITER_H

#include <stdbool.h>

#include "page.h"

#define ARBITER_CONTENDERS 32 /* on one device */
#define ALL_MEMORY INT64_MAX
#define MEMORY_MOST (INT64_C(1) << 56) /* bytes; larger figures are clamped to this */

/* A job on one device. */
struct contender {
  struct guard_policy *policy;
  struct guard_job *job;
  int file;                      /* of the job page */
  uint32_t place;                /* of the device in both pages */
  uint32_t share_ppm, limit_ppm; /* guaranteed; maximum while others are idle */
  uint32_t lent_ppm;             /* the slope in force */
  int64_t active_ns;             /* when it last worked or wanted to */
  uint64_t seen_ns;              /* GPU time it reports as used */
  int64_t virtual_ns;            /* its device time divided by its share: the lowest is next */
  int64_t turn_ns;               /* start of its turn; 0: no turn */
  int64_t looked_ns;             /* when `seen_ns` was, and the time it may still be told to have used before */
  int64_t credible_ns;
  int64_t memory, memory_most; /* bytes guaranteed, ALL_MEMORY without a quota; maximum while no guarantee needs them */
  int64_t is_away;             /* the driver moved its memory to the host */
  int64_t sweep_ns;            /* next sweep for dead processes */
};

/* One device. */
struct arbiter {
  uint32_t count;
  int32_t holder;   /* job with the turn; -1: none */
  int32_t draining; /* job whose turn is over with work in flight */
  uint32_t cap_ppm; /* bound of what is guaranteed and lent, of time and of memory */
  int64_t turn_ns, idle_ns, drain_ns; /* length of a turn; idle time that ends it; limit for its work in flight */
  int64_t began_ns; /* start of the turn, or of the draining */
  int64_t memory, memory_foreign; /* bytes of the device, 0 if unknown; bytes used outside of its jobs */
  struct contender contenders[ARBITER_CONTENDERS];
  struct arbiter *devices; /* of all devices of the machine; this is number `number`. NULL: there is no other */
  uint32_t number;
};

/* Reads the jobs' pages and writes their policies: slopes and turns. Returns the time of the next step, ns of CLOCK_MONOTONIC. */
int64_t arbiter_step(struct arbiter *arbiter, int64_t now_ns);

/* Changes of a policy page in use, by its only writer. */
void policy_set_gate(struct guard_policy *policy, bool closed);
void policy_set_rate(struct guard_policy *policy, uint32_t place, uint32_t share_ppm, int64_t burst_ns, int64_t now_ns);
void policy_set_turn(struct guard_policy *policy, uint32_t place, uint32_t turn);

#endif
