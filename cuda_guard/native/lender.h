/* Lender: memory that no guarantee covers is lent to jobs with a higher maximum. Unlike time, memory cannot be taken back from a
 * program, so no byte is lent that a guarantee may claim at once.
 *
 * The limit in force (`memory_limit` of the policy) is what a job may have now. Invariants, for memory within the jobs' limits:
 *   - the larger of a job's memory and its limit in force, summed over a device's jobs, never rises above the device's memory;
 *   - the part of that sum beyond guarantees never rises above the cap less the memory used by others. It can be higher only after a new
 *     guarantee, or after others took memory, and then only falls;
 *   - the limit in force is at least the guarantee, once that was free. A new job waits for it. */
#ifndef MESH_GUARD_LENDER_H
#define MESH_GUARD_LENDER_H

#include "arbiter.h"

/* Distributes `left` to `given` in proportion to `weights`, to each at most its `room`. */
void share_out(uint32_t count, const int64_t *weights, const int64_t *room, int64_t left, int64_t *given);

/* Reads what the jobs hold, and sets their limits in force. True if a job does not have all of its guarantee yet. */
bool lend_memory(struct arbiter *arbiter);

/* Records that a job's memory moved to the host, or is to come back: false if there is no space for it, and it stays there. */
bool lend_away(struct arbiter *arbiter, struct contender *contender, bool away);

#endif
