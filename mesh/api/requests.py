"""Bodies of orders to the local API; unknown fields and wrong types are refused."""

from typing import Annotated, Any, Literal

import msgspec

from mesh.model.bounds import MAX_CPUS
from mesh.model.spec import MAX_BATCH, CommitMode, Every, OnPartition
from placement.advert import WHOLE
from placement.queue import DEFAULT_PRIORITY

Role = Literal["provider", "user"]
# Absolute, since the daemon has another working directory than its caller. PATH_MAX of Linux.
AbsolutePath = Annotated[str, msgspec.Meta(pattern=r"^/[^\x00]*$", max_length=4096)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ANY_END = "any:"  # before a job in `after`: however that ends
LONGEST_PAUSE_S = 366 * 86_400.0  # of a pause that ends by itself (own choice)


class SubmitOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The order of `mesh submit`. Names of nodes may be nicks, ids or prefixes of ids; `after` names jobs or arrays; `array`
    has the indices of the jobs to make of this one order, of which `array_limit` (0: all) may be under way at a time; each
    job runs `array_batch` of the indices, one after another. `out` is where published files are brought to, for an array in a
    directory for each job. `home` names a node, or is `first` or `none`; without it, home is the user's own node that had to
    send the job away. Without a `gpu_share_limit` a job is held to its share. An `interactive` one runs only where its user
    may go in. `secrets`: NAME, NAME=VARIABLE or NAME:/run/secrets/FILE; `secret_nodes`: `mine`, `trusted` or names of nodes,
    the only ones that may open them. `data`: data sets, as `NAME[:/data/x]`; `caches`: names of caches of this node's user.
    `uv`: the job's Python environment is that of the lock in `workdir`, or of the script's own; `conda`: that of this list of
    conda packages there. `network`: hosts that it reaches, `name:port` or groups, and no others. `on` and `not_on`: nodes on
    which it may run, or may not, named as in `secret_nodes`."""

    argv: list[str]
    name: str = ""
    env: dict[str, str] = {}
    workdir: AbsolutePath | None = None
    image: str | None = None
    engine: str | None = None
    gpus: int = 0
    gpu_share: int = WHOLE
    gpu_share_limit: int | None = None
    vram_mib: int = 0
    gpu_model: str = ""
    capability: tuple[int, int] = (0, 0)
    driver: tuple[int, ...] = ()
    vram_limit_mib: int = 0
    memory_mib: Number | None = None
    cpus: Annotated[float, msgspec.Meta(gt=0, le=MAX_CPUS)] | None = None
    zone: str | None = None
    least_nodes: int = 1
    most_nodes: int = 1
    ckpt: str | None = None
    ckpt_mode: CommitMode = "stable"
    ckpt_to: list[str] = []
    ckpt_every: Every = None
    replicas: int = 2
    keep: int = 2
    grace_s: float | None = None
    retries: int = 0
    on_exit_0: Literal["resume", "done"] = "resume"
    on_partition: OnPartition = "freeze"
    max_time_s: float | None = None
    priority: int = DEFAULT_PRIORITY
    after: list[str] = []
    retry_on: list[int] = []
    deadline_unix: Annotated[float, msgspec.Meta(ge=0, lt=2**43)] | None = None  # in milliseconds it fits a double
    array: list[Number] = []
    array_limit: Number = 0
    array_batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)] = 1
    out: AbsolutePath | None = None
    home: str | None = None
    interactive: bool = False
    secrets: list[str] = []
    secret_nodes: list[str] = []
    data: list[str] = []
    caches: list[str] = []
    uv: bool = False
    conda: str = ""
    network: list[str] = []
    on: list[str] = []
    not_on: list[str] = []

    def gpu_terms(self) -> dict[str, Any]:
        """Return the GPU fields of a spec."""
        return {
            "gpus": self.gpus,
            "gpu_share": self.gpu_share,
            "gpu_share_limit": self.gpu_share if self.gpu_share_limit is None else self.gpu_share_limit,
            "vram_mib": self.vram_mib,
            "vram_limit_mib": self.vram_limit_mib,
            "gpu_model": self.gpu_model,
            "capability": self.capability,
            "driver": self.driver,
        }


GraceS = Annotated[float, msgspec.Meta(ge=0, le=30 * 86_400)]


class DownOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    grace_s: GraceS | None = None
    now: bool = False


class ReclaimOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`gpu`: only this one, by number or UUID prefix. `dry_run`: only report the cost."""

    grace_s: GraceS | None = None
    now: bool = False
    gpu: str | None = None
    dry_run: bool = False


class LendOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that are None stay as they are."""

    on: bool | None = None
    hours: list[str] | None = None


class ShareOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job's new share of each of its GPUs; fields that are None stay as they are."""

    share: Annotated[int, msgspec.Meta(ge=1, lt=WHOLE)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=WHOLE)] | None = None
    vram_mib: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    vram_limit_mib: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None


class GpuPauseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pause or resume one job on this node's GPUs."""

    paused: bool


class PauseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`gpu`: only this one; `for_s`: seconds until a pause of the machine ends by itself."""

    paused: bool
    gpu: str | None = None
    for_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_PAUSE_S)] | None = None


class InviteOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`roles`: empty for all. `user`: the name of the new user; `mine`: the machine is one more of this node's user.

    With neither, a newcomer with the invite waits for an approval. `ssh_key`: the newcomer proves this SSH public key, a line
    as in `id_ed25519.pub`.
    """

    ttl_s: float = 86_400.0
    roles: list[Role] = []
    user: str = ""
    mine: bool = False
    uses: int = 1
    ssh_key: str = ""


class ApproveOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Admit the waiting node with this nick or key prefix; `nick` and `user` replace the names that it asked for.

    `existing`: as a machine of the user who has the name already.
    """

    node: str
    nick: str = ""
    user: str = ""
    roles: list[Role] = []
    admit: bool = False
    existing: bool = False


class PromoteOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str


class RevokeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    reason: str = ""


class MigrateOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`to`: a node by nick, id or prefix; empty for the best other one. `force`: even if it has to start over."""

    to: str = ""
    force: bool = False


class RecoverOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`go`: recover the job; otherwise only report what would be lost."""

    go: bool = False


class PullCheckpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`seq`: the number of a checkpoint; None for the last committed one."""

    job: str
    destination: AbsolutePath
    seq: int | None = None


class RemoveCheckpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ids`: prefixes of checkpoint ids; `force`: even if a job may need one."""

    ids: list[str]
    force: bool = False


class CollectOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min_age_s: Annotated[float, msgspec.Meta(ge=0)] = 900.0


class AddData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Add `path` as the data set `name` of this node's user. `readers`: users besides the owner, and groups as `group:NAME`
    or `group:USER/NAME`; `rehash`: read every file."""

    name: str
    path: AbsolutePath
    readers: list[str] = []
    everybody: bool = False
    rehash: bool = False


class SetGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Have exactly these users in the group `name` of this node's user. Without members the group is removed."""

    name: str
    members: list[str] = []


class NameData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`name`: `NAME` of this node's user, or `USER/NAME`."""

    name: str


class RemoveData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`here`: only from this node; `force`: even if no other node has it."""

    name: str
    here: bool = False
    force: bool = False


class StopData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kind` and `name`: as the answer to the order had them."""

    kind: str
    name: str


class PinData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`off`: do not keep it any longer."""

    name: str
    off: bool = False


class AllowImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Put the image that is called `source` on this node's engine (else what is called as the alias), or that of this `id`
    (`sha256:...`), on the mesh's list; `here`: allow it on this node alone. The alias `*` is every image."""

    alias: str
    source: str = ""
    id: str = ""
    here: bool = False


class DenyImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Refuse an image on this node; `mesh`: take it from the mesh's list."""

    alias: str
    mesh: bool = False


class PullImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alias: str


class PruneImages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`unused_s`: None for the owner's limits; `dry_run`: only list what would be removed."""

    unused_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    dry_run: bool = False


class PushImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask nodes to fetch an image of the list; without nodes, push an image of this node's engine into its registry. `look`:
    only report the nodes' progress."""

    alias: str
    nodes: list[str]
    look: bool = False


class SetSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`value` is bytes, so that no log of orders shows it."""

    name: str
    value: bytes


class RemoveSecrets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: list[str]


class PullOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    destination: AbsolutePath
