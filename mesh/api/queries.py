"""Query parameters of reads; strict like the orders: unknown names and wrong values are refused."""

from typing import Annotated

import msgspec

from mesh.model.bounds import MAX_NODES
from mesh.provider.usage import By


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Neither a body nor a query."""


class JobsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fits`: a job's id, the beginning of one, a name, or an array; empty for all. `over`: include jobs that are over.
    `since_s`: also archived jobs, and only those that ended within so many seconds."""

    fits: str = ""
    over: bool = True
    since_s: Annotated[float, msgspec.Meta(gt=0, lt=1e10)] | None = None


class JobQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`job`: only this job's entries."""

    job: str = ""


class EventsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`job`: of this one, by all who have a part in it; else what this node has seen `after` the event of that id; `audit`: of
    that what is about the node itself: orders, refusals, its owner."""

    job: str = ""
    after: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    audit: bool = False


class WhyQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`would`: also find the nearest changes that would let the job start."""

    would: bool = False


class FilesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`path`: in `work/`, `ckpt/` or `out/`; without one of these in the working directory."""

    path: str = ""


class LogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`follow`: until the job is over; `attempt`: only this attempt; `rank`: of this node of a gang; `since_unix_ms`: only lines
    from this time on; `timestamps`: put its time before each line."""

    follow: bool = False
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_NODES)] = 0
    since_unix_ms: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] | None = None
    timestamps: bool = False


class DataQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`name`: of a data set; `path`: of a directory in it."""

    name: str
    path: str = ""


class GroupQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`name`: only the group `NAME` of this node's user, or `USER/NAME`; empty for all."""

    name: str = ""


class WorkQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kind` and `name`: as the answer to the order had them."""

    kind: str
    name: str


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`since_s`: so many seconds back; `here`: by this node's own receipts, without asking others."""

    since_s: Annotated[float, msgspec.Meta(gt=0, lt=1e10)] = 30 * 86_400.0
    by: By = "user"
    here: bool = False
