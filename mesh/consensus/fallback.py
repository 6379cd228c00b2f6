"""Fallback: when a job gives up its last checkpoint, because no node can give it, for the one before it. Pure.

A checkpoint that every node answers not to have is given up at once. While a node that may have it is away, the job waits for
as long as it would take to compute the lost work again. So it loses at most twice what it had to lose, whenever that node
comes back (the ski-rental rule: Karlin et al. 1988, "Competitive snoopy caching").
"""

from mesh.model.record import JobRecord

LEAST_LEASES = 4  # a minute with the default lease: a restarted node is back by then (own choice)
MOST_S = 3 * 86_400.0  # a machine that was switched off for a weekend is back by then (own choice)


def patience_s(record: JobRecord, predecessor_here: bool, lease_s: float) -> float:
    """Return for how long the job waits for nodes that may have its last checkpoint.

    The work to compute again is what the last checkpoint has more than its predecessor, if that could be fetched; else all.
    """
    last, before, redo_s = record.commit, record.predecessor, record.ran_s
    if predecessor_here and last is not None and before is not None:
        redo_s = min(redo_s, (last.created_unix_ms - before.created_unix_ms) / 1000)
    return min(MOST_S, max(redo_s, LEAST_LEASES * lease_s))
