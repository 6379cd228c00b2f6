/* Interface for the daemon: one thread arbitrates every shared device of the machine, separate from the daemon's event loop, so that
 * shares and turns work while that is busy. */
#ifndef MESH_GUARD_HOST_H
#define MESH_GUARD_HOST_H

#include "arbiter.h"

struct host;

/* Starts the thread; NULL on failure. */
struct host *host_start(void);

/* Ends the thread. The jobs' pages stay unchanged: shares stay in force, and stale turns are ignored after a second. */
void host_stop(struct host *host);

/* Adds a job to `device` (the daemon's number, below GUARD_DEVICES), which is at `place` in its pages, or changes its quota. Share and
 * memory each have a guarantee and a maximum while nobody else needs more. Without a quota `memory` is GUARD_NO_LIMIT. A new job gets
 * no memory until all of its guarantee is free. Memory of its dead processes is released from time to time. False if there are too
 * many jobs. The pages must stay mapped, and the job page's file open, until host_leave. */
bool host_join(struct host *host, uint32_t device, struct guard_policy *policy, struct guard_job *job, int file, uint32_t place,
               uint32_t share_ppm, uint32_t limit_ppm, uint64_t memory, uint64_t memory_most);
void host_leave(struct host *host, const struct guard_policy *policy);

/* Sets the size of a device's memory, and the bytes used outside of jobs. Without a known size nothing is lent. */
void host_size(struct host *host, uint32_t device, uint64_t memory, uint64_t foreign);

/* Records that the job's memory moved to the host, or is to come back: false if there is no space for it, and it stays there. */
bool host_away(struct host *host, uint32_t device, const struct guard_policy *policy, bool away);

/* Claims the daemon's slot of a job; false if it is taken. From now on the pages can be read whatever happens to their files, until
 * host_forget. */
bool host_claim(struct guard_policy *policy, struct guard_job *job, int file, uint32_t pid);
void host_forget(struct guard_policy *policy, struct guard_job *job);

/* Sets the units that the daemon charges a job in addition to its processes; negative if they charge too much. */
bool host_correct(struct guard_job *job, uint32_t place, int64_t units);

/* For tests of the arithmetic. */
int64_t host_timeline(struct guard_job *job, uint32_t place, int64_t start_ns, int64_t end_ns);
int64_t host_allowed(const struct guard_policy *policy, uint32_t place, int64_t now_ns);
int64_t host_wait(const struct guard_policy *policy, const struct guard_job *job, uint32_t place, int64_t now_ns);
void host_spend(const struct guard_policy *policy, struct guard_job *job, uint32_t place, int64_t ns, int64_t now_ns);

#endif
