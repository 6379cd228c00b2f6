/* What of a device nobody needs now, in parts to those who may have more. The memory that no guarantee covers is lent to jobs with a
 * soft limit; memory cannot be taken back from a program as time can, so no byte is lent that a guarantee may claim at once.
 *
 * In force (`memory_limit` of the policy) is what a job may have now. These hold, of what a job has as far as its limits allow it:
 *   - the larger of what a job has and what is in force, summed over a device's jobs, never rises above its memory;
 *   - of that beyond guarantees, never above the cap less what others have on it; it may be more only after a guarantee has come, or
 *     others have, and then it only falls;
 *   - what is in force is no less than the guarantee, once there has been room for that. A job that comes waits for it. */
#ifndef MESH_GUARD_LENDER_H
#define MESH_GUARD_LENDER_H

#include "arbiter.h"

/* Adds to `given` what there is, in proportion to `weights`, to nobody more than his `room`. */
void share_out(uint32_t count, const int64_t *weights, const int64_t *room, int64_t left, int64_t *given);

/* Looks at what the jobs hold, and sets what each may have. True if somebody has not yet all that he is guaranteed. */
bool lend_memory(struct arbiter *arbiter);

/* What this one had is on the host now, or is to come back: false if there is no room for it, and it stays away. */
bool lend_away(struct arbiter *arbiter, struct contender *contender, bool away);

#endif
