"""Preemption: the running job that makes way for one of higher priority.

The victim is the least important job that frees enough. A job is not preempted for a small difference in priority, soon after
its start, or if it has no checkpoints.
"""

from collections.abc import Iterable, Sequence

import msgspec

from placement.advert import Advert, Portion
from placement.allocation import release
from placement.filters import refusals
from placement.request import Request

MARGIN = 20  # points of priority between the two jobs: two steps of low, normal, high (own choice)
# Guests that leave a node, in so many seconds, for jobs of one user that do not come (own choice): priority is the user's word.
YIELDS, YIELDS_S = 4, 3600.0
MIN_STAY_S = 120  # a job runs at least this long before it can be preempted (own choice)


class RunningJob(msgspec.Struct, frozen=True):
    """A job that runs on a node. `saves`: it has checkpoints; `portions`: its part of the node's GPUs, empty if it has a slot;
    `leaves`: it has notice, or its guest has ended."""

    job: bytes
    node: bytes
    priority: int
    since_unix: int
    saves: bool
    portions: tuple[Portion, ...] = ()
    leaves: bool = False


def must_yield(priority: int, job: RunningJob, now_unix: float) -> bool:
    """Return True if this running job has to make way for a job of this priority."""
    stays = not job.saves or job.leaves or now_unix - job.since_unix < MIN_STAY_S
    return not stays and priority >= job.priority + MARGIN


def victim(
    request: Request, priority: int, adverts: Iterable[Advert], running: Sequence[RunningJob], now_unix: float
) -> RunningJob | None:
    """Return the job to preempt so that the request fits: the least important, then the youngest. None if no single job will
    do."""
    offers = {advert.node: advert for advert in adverts}
    fitting = [
        job
        for job in running
        if must_yield(priority, job, now_unix)
        and job.node in offers
        and not refusals(request, without_job(offers[job.node], job))
    ]
    return min(fitting, key=lambda job: (job.priority, -job.since_unix, job.job), default=None)


def without_job(advert: Advert, job: RunningJob) -> Advert:
    """Return the advert as it is without this job."""
    if not job.portions:
        return msgspec.structs.replace(advert, slots_free=min(advert.slots, advert.slots_free + 1))
    return msgspec.structs.replace(advert, free_portions=release(advert.gpus, advert.free_portions, job.portions))
