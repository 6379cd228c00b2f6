"""What may stand behind the `?` of a read; like the orders, strict: unknown names and wrong values are refused."""

from typing import Annotated

import msgspec

from mesh.provider.usage import By


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Neither a body nor a query."""


class JobsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fits`: a job's id, the beginning of one, a name, or an array; empty for all. `over`: those too that are. `since_s`: of
    those, also those put away that were not over so many seconds ago."""

    fits: str = ""
    over: bool = True
    since_s: Annotated[float, msgspec.Meta(gt=0, lt=1e10)] | None = None


class JobQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`job`: of this one only."""

    job: str = ""


class EventsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`job`: of this one, by all who have a part in it; else what this node has seen `after` the event of that id; `audit`: of
    that what is about the node itself: orders, refusals, its owner."""

    job: str = ""
    after: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    audit: bool = False


class WhyQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`would`: also the nearest changes that would let it start."""

    would: bool = False


class FilesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`path`: in `work/`, `ckpt/` or `out/`; without one of these in the working directory."""

    path: str = ""


class LogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`follow`: until the job is over; `attempt`: of that one only."""

    follow: bool = False
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`since_s`: so many seconds back; `here`: by this node's own receipts, nobody is asked."""

    since_s: Annotated[float, msgspec.Meta(gt=0, lt=1e10)] = 30 * 86_400.0
    by: By = "user"
    here: bool = False
