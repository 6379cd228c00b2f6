/* What the daemon calls: one thread that looks after every shared device of the machine, apart from the daemon's own loop, so that
 * shares and turns hold while that is busy. */
#ifndef MESH_GUARD_HOST_H
#define MESH_GUARD_HOST_H

#include "arbiter.h"

struct host;

/* Starts the thread; NULL if there is none to be had. */
struct host *host_start(void);

/* Ends it. The jobs' pages stay as they are: shares in force, and turns that nobody gives count for nothing after a second. */
void host_stop(struct host *host);

/* From now on the job is looked after on the `device` (the daemon's number of it, below GUARD_DEVICES), where its pages have it at
 * `place`; or its share of time and its bytes of memory are now these, each with what it may have at most while nobody else needs it.
 * Without a quota `memory` is GUARD_NO_LIMIT. One that comes may have no memory until there is room for all that it is guaranteed.
 * What its dead processes held is given back from time to time. False when there are too many jobs. The pages must stay mapped, and
 * the job page's file open, until host_leave. */
bool host_join(struct host *host, uint32_t device, struct guard_policy *policy, struct guard_job *job, int file, uint32_t place,
               uint32_t share_ppm, uint32_t limit_ppm, uint64_t memory, uint64_t memory_most);
void host_leave(struct host *host, const struct guard_policy *policy);

/* What the job's slope is multiplied by on a device. */
void host_trim(struct host *host, uint32_t device, const struct guard_policy *policy, uint32_t trim_ppm);

/* How large a device's memory is, and how much of it is in the hands of who is no job of ours. Of one that is not known nothing is
 * lent. */
void host_size(struct host *host, uint32_t device, uint64_t memory, uint64_t foreign);

/* What the job had on the device is on the host, or it is to come back: false if there is no room for that now, and it stays. */
bool host_away(struct host *host, uint32_t device, const struct guard_policy *policy, bool away);

/* How much of a device may be lent in all, and how long a turn is. */
void host_tune(struct host *host, uint32_t device, uint32_t cap_ppm, int64_t turn_ns);

/* Takes the daemon's slot of a job; false if somebody has it. From now on the page can be looked at whatever the job does to its
 * file, until host_forget. */
bool host_claim(struct guard_job *job, int file, uint32_t pid);
void host_forget(struct guard_job *job);

/* What the daemon charges a job with on a device beside what its processes do, from now on: units, below 0 if they charge too much. */
bool host_correct(struct guard_job *job, uint32_t place, int64_t units);

/* For a test of the arithmetic. */
int64_t host_allowed(const struct guard_policy *policy, uint32_t place, int64_t now_ns);
int64_t host_wait(const struct guard_policy *policy, const struct guard_job *job, uint32_t place, int64_t now_ns);
void host_spend(const struct guard_policy *policy, struct guard_job *job, uint32_t place, int64_t ns, int64_t now_ns);

#endif
