"""The bodies of what the command line asks of its daemon; unknown fields and wrong types are refused."""

from typing import Literal

import msgspec

from mesh.jobs.spec import CommitMode, OnPartition
from placement.queue import DEFAULT_PRIORITY

Role = Literal["provider", "user"]


class SubmitOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `mesh submit` sends. Names of nodes may be nicks, ids or prefixes of ids; `after` names jobs."""

    argv: list[str]
    name: str = ""
    env: dict[str, str] = {}
    workdir: str | None = None
    image: str | None = None
    engine: str | None = None
    gpus: int = 0
    vram_mib: int = 0
    memory_mib: int | None = None
    cpus: float | None = None
    zone: str | None = None
    ckpt: str | None = None
    ckpt_mode: CommitMode = "stable"
    ckpt_to: list[str] = []
    replicas: int = 2
    keep: int = 2
    grace_s: float | None = None
    retries: int = 0
    on_exit_0: Literal["resume", "done"] = "resume"
    on_partition: OnPartition = "freeze"
    max_time_s: float | None = None
    priority: int = DEFAULT_PRIORITY
    after: list[str] = []


class ReclaimOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    grace_s: float | None = None
    now: bool = False


class PauseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    paused: bool


class InviteOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No roles: all. `user`: who joins can only be this one."""

    ttl_s: float = 86_400.0
    roles: list[Role] = []
    user: str = ""


class ApproveOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let in whoever waits under this nick or beginning of a key; `nick` and `user` overrule what it calls itself."""

    node: str
    nick: str = ""
    user: str = ""
    roles: list[Role] = []
    admit: bool = False


class RevokeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    reason: str = ""


class MigrateOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`to`: a node by nick, id or prefix; empty for the best other one. `force`: even if it has to start over."""

    to: str = ""
    force: bool = False


class RecoverOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`go`: do it, rather than say what would be lost."""

    go: bool = False


class PullOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    destination: str
