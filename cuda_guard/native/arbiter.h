/* The daemon's half of the compute quota: who may use how much of a device, and whose turn it is.
 *
 * A share is a slope in the job's policy page (bucket.h). What idle jobs leave is lent to those whose limit allows it, and taken back
 * at the first step after they are seen to work again; of its memory see lender.h. When several jobs want a device they take turns on it, so that each one's
 * events measure its own kernels: the next is whoever has had least for its share (start-time fair queueing: Goyal, Vin and Cheng,
 * SIGCOMM 1996), so that where the device cannot give all that was promised, all get the same part of it. */
#ifndef MESH_GUARD_ARBITER_H
#define MESH_GUARD_ARBITER_H

#include <stdbool.h>

#include "page.h"

#define ARBITER_CONTENDERS 32 /* on one device */
#define ALL_MEMORY INT64_MAX
#define MEMORY_MOST (INT64_C(1) << 56) /* bytes that are told of anything else */

/* A job on one device. */
struct contender {
  struct guard_policy *policy;
  struct guard_job *job;
  int file;                      /* of the job page */
  uint32_t place;                /* of the device in both pages */
  uint32_t share_ppm, limit_ppm; /* guaranteed; at most, while others leave it idle */
  uint32_t trim_ppm;             /* what the slope is multiplied by, for what NVML sees and the events do not */
  uint32_t lent_ppm;             /* the slope in force */
  int64_t active_ns;             /* when it was last seen to work or to want to */
  uint64_t seen_ns;              /* of GPU time it says it has used */
  int64_t virtual_ns;            /* what it had of the device divided by its share: whoever has least is the next */
  int64_t turn_ns;               /* when its turn began; 0: it has none */
  int64_t looked_ns;             /* when `seen_ns` was, and the time it may still be told to have used before */
  int64_t credible_ns;
  int64_t memory, memory_most; /* bytes guaranteed, ALL_MEMORY without a quota; at most, while no guarantee needs them */
  int64_t is_away;             /* the driver has brought to the host what it had */
  int64_t sweep_ns;            /* when to look for its dead next */
};

/* One device. */
struct arbiter {
  uint32_t count;
  int32_t holder;   /* whose turn it is; -1: nobody's */
  int32_t draining; /* whose turn is over, and whose work is not */
  uint32_t cap_ppm; /* of the device's time and of its memory, for what is guaranteed and lent */
  int64_t turn_ns, idle_ns, drain_ns; /* a turn's length; after how long without work it ends; how long its rest may take */
  int64_t began_ns; /* the turn, or the draining */
  int64_t memory, memory_foreign; /* bytes: of the device, 0 if that is not known; in the hands of who is no contender */
  struct contender contenders[ARBITER_CONTENDERS];
};

/* Looks at the jobs' pages and writes their policies: slopes and turns. Returns when to look again, ns of CLOCK_MONOTONIC. */
int64_t arbiter_step(struct arbiter *arbiter, int64_t now_ns);

/* Live changes of a policy page, by its only writer. */
void policy_set_gate(struct guard_policy *policy, bool closed);
void policy_set_rate(struct guard_policy *policy, uint32_t place, uint32_t share_ppm, int64_t burst_ns, int64_t now_ns);
void policy_set_turn(struct guard_policy *policy, uint32_t place, uint32_t turn);

#endif
