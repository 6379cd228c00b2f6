"""Job spec: the immutable, signed description of one job as submitted.

The job id is the BLAKE2b hash of the signed payload, so nodes cannot disagree about a job, and nobody can change it after
submission. Everything that changes later is in the job record (`record.py`).
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

import msgspec

from ckptstore.cipher import KEY_BYTES, NONCE_BYTES, TAG_BYTES
from membership.lengths import MOST_ID, SAID, Id
from membership.malformed import MALFORMED
from mesh.model.bounds import MAX_CPUS, MAX_GRACE_S, MAX_LEASE_S, MAX_NODES, MIN_LEASE_S
from mesh.model.destinations import DestinationError, destinations
from mesh.model.environment import (
    ONE_ENVIRONMENT,
    CondaList,
    Environment,
    EnvironmentRefused,
    UvProject,
    check_environment,
    is_inside,
)
from mesh.model.record import Attempt, Commit, Config, Voter, avoided, shunned
from mesh.model.secrets import Lock, SealedSecrets, SecretError, check_lock, check_secrets
from placement.advert import MAX_DRIVER_PARTS, WHOLE
from placement.queue import DEFAULT_PRIORITY, MAX_PRIORITY, Waiting
from placement.request import SHORT_ID, SHORT_S, Request, WantedData, expected_s

JOB_ID_BYTES = 16  # 128 bits: a collision needs ~2^64 jobs
NO_JOB = bytes(JOB_ID_BYTES)  # of a working directory, which is saved before its jobs
JOB_ID_LENGTH = 26  # in base32

CommitMode = Literal["rename", "marker", "stable", "system"]
OnPartition = Literal["freeze", "compute_uncommitted"]
Every = (
    Literal["auto"] | float | None
)  # how often a guest is told to save: as the mesh sees fit, every so many seconds, never


class SpecError(ValueError):
    """The description cannot be a job; the text names the field and the reason."""


class Checkpointing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rules by which a job shows that a checkpoint is complete, and by which replicas are placed.

    `directory` is relative to the working directory. `mode` is one of the commit modes of docs/reference/job-contract.md.
    `replicas` is the number of peers that are to have each checkpoint on disk, and `to` names peers that are. `keep` is how
    many of the directory's newest checkpoints are saved each time. With `every`, the guest gets a notice when it is to save.
    With mode `system` the whole container is saved then, and when it has to leave.
    """

    directory: str = "ckpts"
    mode: CommitMode = "stable"
    stable_s: float = 2.0
    keep: int = 2
    replicas: int = 2
    to: tuple[bytes, ...] = ()
    every: Every = None

    @property
    def copies(self) -> int:
        """Return the number of peers that are to have each checkpoint."""
        return max(self.replicas, len(self.to))


class ArrayPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job's place in an array of jobs submitted together.

    `index` tells the jobs apart, `place` of the `of` jobs come before it, and with a `limit` at most that many run at a time. A
    job with a `batch` runs so many indices, from `index` on, one after another; `count` is the number of the array's indices
    (0: one for each job).
    """

    array: Id
    index: int
    place: int
    of: int
    limit: int = 0
    batch: int = 1
    count: int = 0

    @property
    def last(self) -> int:
        return self.index + self.batch - 1

    def has(self, text: str) -> bool:
        """Tell whether the text is one of the job's indices, or a span, as `16-30`, that all of them are in."""
        span = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
        if span is None:
            return False
        if span[2] is None:
            return self.index <= int(span[1]) <= self.last
        return int(span[1]) <= self.index and self.last <= int(span[2])

    @property
    def label(self) -> str:
        """Return the job's indices in words: `7`, or `1-25`."""
        return str(self.index) if self.batch == 1 else f"{self.index}-{self.last}"


HomeRule = Literal["own", "first", "node", "none"]


class HomePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The choice of a job's home node, to which it returns.

    Rules: `node`, a given node; `first`, the node of the first attempt; `own`, its user's own node that had to send it away.
    Home must have been free for `settle_s`, and the job elsewhere for as long.
    """

    rule: HomeRule = "own"
    node: bytes | None = None
    settle_s: float = 60.0  # an owner's break is longer, and a move costs seconds (own choice)


# Where programs look for their cache, by the cache's name (huggingface_hub, torch.hub, pip and uv: their manuals).
PROGRAM_CACHES = {"huggingface": "HF_HOME", "torch": "TORCH_HOME", "pip": "PIP_CACHE_DIR", "uv": "UV_CACHE_DIR"}


class DataNeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A data set that the guest reads.

    `name` is `USER/NAME` with the `manifest` of one version, which has `mib` MiB; or the name of a directory that nodes offer,
    without a manifest. `path` is where a container sees it; empty for the default. `key`: of an encrypted one, encrypted with the
    key of the job's secrets. `cache`: the guest gets a copy of its own, empty without a manifest, and what it adds to that comes
    into the next version.
    """

    name: str
    manifest: bytes = b""
    mib: int = 0
    path: str = ""
    key: bytes = b""
    cache: bool = False

    @property
    def last(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def inside(self) -> str:
        """Return where a container sees it."""
        return self.path or f"/data/{self.last}"

    @property
    def variable(self) -> str:
        """Return the environment variable that tells the guest the path."""
        return ("MESH_CACHE_" if self.cache else "MESH_DATA_") + re.sub(r"[^A-Z0-9]", "_", self.last.upper())

    @property
    def variables(self) -> tuple[str, ...]:
        """Return all variables that tell the guest the path: of a cache also that of the program of this name."""
        return (self.variable, *([PROGRAM_CACHES[self.last]] if self.cache and self.last in PROGRAM_CACHES else []))


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One job as submitted. Node ids are 32-byte keys, memory is in MiB, durations are in seconds.

    Who: `chain` holds the submitter's certificates, for nodes that have never met the submitter. `user_key` is the user, `user`
    their name. `interactive`: the job runs
    only where its user may open sessions in it.

    Where: the job runs on `least_nodes` to `most_nodes` nodes at once, each with the GPUs and memory it asks for. `gpu_model`
    is a part of the GPU's name; `capability` and `driver` are minimum versions. `on` (empty: any node) and `not_on` name nodes.
    `image_id` is the SHA-256 of the image's configuration as in the mesh's list at submission, or None where an image goes by
    its name.

    GPUs: `gpu_share` is the guaranteed per cent of each GPU's time, `gpu_share_limit` what the job may use while others leave
    it idle. For a share, `vram_mib` is guaranteed and `vram_limit_mib` (0: no more than that) may be used while no other
    share needs it; without a share, each GPU must have `vram_mib`.

    When: `max_time_s` limits the running time over all attempts. `after` names jobs that must be done first; if one of them
    ends otherwise, this job fails. `after_any` names jobs that must be over first, however they end. A job that is not done at
    `deadline_unix_ms` fails. `error_budget` failures are retried, or only those with an exit code in `retry_codes`.
    `on_partition`: what the guest does while no majority of its witnesses answers.

    What it saves is encrypted with the key of `lock`. `secrets` are given to the guest (docs/explanation/secrets.md). It reads
    the data sets in `data`, and adds to those that are caches. `uv` or `conda` names its environment
    (docs/explanation/environments.md). `network`: the hosts that it reaches, by a proxy and nothing else, `name:port`
    (docs/explanation/egress.md).
    """

    submitter: bytes
    chain: bytes
    user: str
    user_key: bytes
    created_unix_ms: int
    nonce: bytes
    argv: tuple[str, ...]
    witnesses: tuple[Voter, ...]
    name: str = ""
    env: dict[str, str] = {}
    workdir: bytes | None = None
    workdir_holders: tuple[bytes, ...] = ()
    image: str | None = None
    image_id: bytes | None = None
    engine: str | None = None
    gpus: int = 0
    gpu_share: int = WHOLE
    gpu_share_limit: int = WHOLE
    vram_mib: int = 0
    vram_limit_mib: int = 0
    gpu_model: str = ""
    capability: tuple[int, int] = (0, 0)
    driver: tuple[int, ...] = ()
    memory_mib: int | None = None
    cpus: float | None = None
    zone: str | None = None
    least_nodes: int = 1
    most_nodes: int = 1
    checkpointing: Checkpointing | None = None
    grace_s: float = 30.0
    lease_s: float = 15.0
    error_budget: int = 0
    on_exit_0: Literal["resume", "done"] = "resume"
    on_partition: OnPartition = "freeze"
    max_time_s: float | None = None
    priority: int = DEFAULT_PRIORITY
    after: tuple[bytes, ...] = ()
    after_any: tuple[bytes, ...] = ()
    retry_codes: tuple[int, ...] = ()
    deadline_unix_ms: int | None = None
    array: ArrayPlace | None = None
    home: HomePolicy = HomePolicy()
    lock: Lock | None = None
    interactive: bool = False
    data: tuple[DataNeed, ...] = ()
    secrets: SealedSecrets | None = None
    uv: UvProject | None = None
    network: tuple[str, ...] = ()
    on: tuple[bytes, ...] = ()
    not_on: tuple[bytes, ...] = ()
    conda: CondaList | None = None

    @property
    def environment(self) -> Environment | None:
        """Return what describes the job's environment."""
        return self.uv or self.conda

    @property
    def first_group(self) -> Config:
        """Return the witness group that the job begins with."""
        return Config(number=0, term=0, members=self.witnesses)

    @property
    def author(self) -> bytes:
        """Return what is this job's and its submitter's alone."""
        return self.submitter + self.nonce

    def allows(self, node: bytes) -> bool:
        """Tell whether the job's user lets this node run it: by `on`, `not_on`, and who may read its secrets."""
        readers = self.secrets.nodes if self.secrets is not None else ()
        return node not in self.not_on and all(not named or node in named for named in (self.on, readers))

    @property
    def saves_from_outside(self) -> bool:
        """Tell whether the whole container is saved, and nothing by the guest itself."""
        return self.checkpointing is not None and self.checkpointing.mode == "system"


def job_id(payload: bytes) -> bytes:
    """Return the id of the job with this signed payload."""
    return blake2b(payload, digest_size=JOB_ID_BYTES, person=b"mesh-job").digest()


@lru_cache(4096)  # a search compares an id with all known jobs
def format_job(job: bytes) -> str:
    """Format a job id: 26 lower-case base32 characters; the command line takes any unique prefix."""
    from base64 import b32encode

    return b32encode(job).decode().rstrip("=").lower()


def parse_job(text: str) -> bytes:
    """Parse a whole job id; ValueError for anything but the one spelling that `format_job` gives it."""
    from base64 import b32decode

    job = b32decode(text.upper() + "=" * (-len(text) % 8))
    if len(job) != JOB_ID_BYTES or format_job(job) != text:
        raise ValueError("not a job id")
    return job


def placement_request(
    job: bytes,
    spec: JobSpec,
    attempt: int,
    exclude: tuple[bytes, ...] = (),
    avoid: tuple[bytes, ...] = (),
    prefer: bytes | None = None,
    near: tuple[bytes, ...] = (),
    remaining_s: int = SHORT_S,
    platform: str = "",
) -> Request:
    """Return what this attempt asks of a node: the one translation that leaders, admission and `mesh why` share."""
    return Request(
        job=job,
        attempt=attempt,
        user=spec.user,
        user_key=spec.user_key,
        gpus=spec.gpus,
        gpu_share=spec.gpu_share,
        vram_mib=spec.vram_mib,
        gpu_model=spec.gpu_model,
        capability=spec.capability,
        driver=spec.driver,
        engine=spec.engine,
        image=spec.image,
        image_id=spec.image_id,
        zone=spec.zone,
        interactive=spec.interactive,
        nodes=spec.least_nodes,
        memory_mib=spec.memory_mib,
        cpus=None if spec.cpus is None else math.ceil(spec.cpus),
        exclude=exclude,
        avoid=avoid,
        prefer=prefer,
        near=near,
        remaining_s=remaining_s,
        system=spec.saves_from_outside,
        platform=platform,
        only=() if spec.secrets is None else spec.secrets.nodes,
        on=spec.on,
        not_on=spec.not_on,
        data=tuple(
            WantedData(need.name, need.manifest[:SHORT_ID], need.mib)
            for need in spec.data
            if need.manifest or not need.cache
        ),
        network=spec.network,
        uv=spec.uv is not None,
        conda=spec.conda is not None,
    )


def attempt_request(
    job: bytes,
    spec: JobSpec,
    number: int,
    attempts: Sequence[Attempt],
    unix_ms: int,
    prefer: bytes | None = None,
    commit: Commit | None = None,
) -> Request:
    """Return the request of the attempt `number` after these attempts, with what they showed about nodes, from this
    checkpoint on.
    """
    ran_s = sum(attempt.ran_s for attempt in attempts if attempt.reason)
    most_s = math.inf if spec.max_time_s is None else spec.max_time_s - ran_s
    if spec.deadline_unix_ms is not None:
        most_s = min(most_s, (spec.deadline_unix_ms - unix_ms) / 1000)
    near, platform = ((), "") if commit is None else (commit.holders, commit.platform)
    shun, avoid = shunned(attempts, unix_ms), avoided(attempts)
    return placement_request(job, spec, number, shun, avoid, prefer, near, expected_s(ran_s, most_s), platform)


def waiting_place(spec: JobSpec, request: Request) -> Waiting:
    """Return the job's place in the queue while nobody runs it."""
    deadline = None if spec.deadline_unix_ms is None else spec.deadline_unix_ms // 1000
    return Waiting(request, spec.priority, spec.created_unix_ms // 1000, deadline)


def encode_spec(spec: JobSpec) -> bytes:
    check_spec(spec)
    return msgspec.msgpack.encode(spec)


def decode_spec(payload: bytes) -> JobSpec:
    """Decode and check a payload; SpecError if it cannot be a job."""
    try:
        spec = _decoder.decode(payload)
    except MALFORMED as error:
        raise SpecError(f"not a job description: {error}") from error
    check_spec(spec)
    return spec


_decoder = msgspec.msgpack.Decoder(JobSpec)

# Bounds that keep a job small enough for a single message (own choice).
MAX_ARGUMENTS = 4096
MAX_TEXT_BYTES = 256 * 1024
MAX_WITNESSES = 5
MAX_AFTER = 4096
MAX_ARRAY = 1000
MAX_BATCH = 100
MAX_NAMED = 256  # nodes that a job names for one purpose
MAX_MODEL = 100
MAX_CHAIN_BYTES = 16 * 1024
MAX_TIME_S = 365 * 86_400.0
MAX_DATA = 16
MAX_DATA_KEY = NONCE_BYTES + KEY_BYTES + TAG_BYTES
DATA_NAME = re.compile(r"(?:[A-Za-z0-9_.@+-]{1,64}/)?[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
DATA_PATH = re.compile(r"/data(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,63}){1,8}")


def check_spec(spec: JobSpec) -> None:
    """Raise SpecError naming the first field that no job can have."""
    if not spec.argv or not spec.argv[0]:
        raise SpecError("a job needs a command: mesh run [options] -- COMMAND [ARGUMENT ...]")
    texts = [*spec.argv, *spec.env, *spec.env.values(), spec.name, spec.user]
    if len(spec.argv) > MAX_ARGUMENTS or sum(len(text) for text in texts) > MAX_TEXT_BYTES:
        raise SpecError(f"command and environment together may hold {MAX_TEXT_BYTES} bytes; put data into files")
    if any("\0" in text for text in texts):
        raise SpecError("a NUL character cannot stand in a command, a variable or a name")
    if any("=" in key or not key for key in spec.env):
        raise SpecError("an environment variable's name cannot be empty or hold '='")
    for label, node in [("submitter", spec.submitter), *(("witness", voter.node) for voter in spec.witnesses)]:
        if len(node) != 32:
            raise SpecError(f"{label} is not a node id")
    nodes = {voter.node for voter in spec.witnesses}
    if not 1 <= len(spec.witnesses) <= MAX_WITNESSES or len(nodes) != len(spec.witnesses):
        raise SpecError(f"a job has 1 to {MAX_WITNESSES} different witnesses")
    if not MIN_LEASE_S <= spec.lease_s <= MAX_LEASE_S:
        raise SpecError(f"lease must be {MIN_LEASE_S:g} to {MAX_LEASE_S:g} seconds")
    if len(spec.user_key) != 32:
        raise SpecError("the user's key is not one")
    if len(spec.chain) > MAX_CHAIN_BYTES:
        raise SpecError(f"the submitter's certificate chain is over {MAX_CHAIN_BYTES} bytes")
    memory = [("memory", spec.memory_mib or 0), ("vram", spec.vram_mib), ("the limit of vram", spec.vram_limit_mib)]
    for label, number in [("gpus", spec.gpus), *memory, ("error budget", spec.error_budget)]:
        if not 0 <= number < 2**31:
            raise SpecError(f"{label} must be a number from 0")
    if spec.cpus is not None and not 0 < spec.cpus <= MAX_CPUS:  # nor NaN
        raise SpecError(f"cpus must be above 0, and at most {MAX_CPUS}")
    if not 0 <= spec.created_unix_ms < 2**53:
        raise SpecError("the time of submission is not one")
    _check_share(spec)
    named = (*spec.on, *spec.not_on)
    # A job that waits publishes them in one section.
    if len(named) > MAX_NAMED or any(len(node) != 32 for node in named):
        raise SpecError(f"a job names at most {MAX_NAMED} nodes to run on and not to run on, together")
    if not 1 <= spec.least_nodes <= spec.most_nodes <= MAX_NODES:
        raise SpecError(f"a job runs on 1 to {MAX_NODES} nodes, and on no fewer at most than at least")
    if spec.most_nodes > 1 and (spec.image is not None or spec.engine not in {None, "process"}):
        raise SpecError(
            "a job on several nodes runs as plain processes: containers of one job cannot reach each other between machines"
        )
    if any(name is not None and len(name) > SAID for name in (spec.name, spec.image, spec.engine, spec.zone)):
        raise SpecError(f"a job, an image, an engine or a zone has a name of at most {SAID} characters")
    ids = (spec.nonce, spec.workdir or b"", *spec.workdir_holders, *(voter.disk for voter in spec.witnesses))
    if len(spec.workdir_holders) > MAX_NAMED or any(len(one) > MOST_ID for one in ids):
        raise SpecError(f"an id has at most {MOST_ID} bytes, and a working directory at most {MAX_NAMED} holders")
    if spec.image_id is not None and (spec.image is None or len(spec.image_id) != 32):
        raise SpecError("an image is known by the 32 bytes of its hash, and has a name")
    first = (*spec.after, *spec.after_any)
    if len(first) > MAX_AFTER or any(len(job) != JOB_ID_BYTES for job in first):
        raise SpecError(f"a job comes after at most {MAX_AFTER} others")
    if not 0 <= spec.priority <= MAX_PRIORITY:
        raise SpecError(f"priority must be 0 to {MAX_PRIORITY}")
    if spec.max_time_s is not None and not 1 <= spec.max_time_s <= MAX_TIME_S:
        raise SpecError("max time must be 1 second to 1 year")
    if any(not 1 <= code <= 255 for code in spec.retry_codes) or len(spec.retry_codes) > 255:
        raise SpecError("an exit code to retry on is 1 to 255")
    if spec.deadline_unix_ms is not None and not spec.created_unix_ms < spec.deadline_unix_ms < 2**53:
        raise SpecError("the deadline must lie in the future")
    if spec.array is not None:
        check_array(spec.array)
        if spec.array.batch > 1 and (spec.checkpointing is not None or spec.most_nodes > 1):
            raise SpecError("a batch runs its indices afresh on one node: leave out --ckpt and --nodes, or --batch")
    try:
        if spec.lock is not None:
            check_lock(spec.lock, len(spec.witnesses))
        if spec.secrets is not None:
            check_secrets(spec.secrets, len(spec.witnesses), spec.author)
        if spec.environment is not None:
            check_environment(spec.environment)
    except (SecretError, EnvironmentRefused) as error:
        raise SpecError(str(error)) from error
    if spec.uv is not None and spec.conda is not None:
        raise SpecError(ONE_ENVIRONMENT)
    if spec.environment is not None and spec.saves_from_outside:
        option = "--uv" if spec.conda is None else "--conda"
        raise SpecError(f"a system checkpoint saves no environment: leave out {option}, or choose another --ckpt-mode")
    if not 0 <= spec.grace_s <= MAX_GRACE_S:
        raise SpecError(f"grace must be 0 to {MAX_GRACE_S} seconds")
    if spec.checkpointing is not None:
        _check_checkpointing(spec.checkpointing)
    if spec.saves_from_outside and (spec.image is None or spec.engine not in {None, "docker"}):
        raise SpecError("a system checkpoint is of a container: add --image NAME, or choose another --ckpt-mode")
    if spec.saves_from_outside and spec.secrets is not None and spec.secrets.uses:
        raise SpecError(
            "a system checkpoint would save the secrets too: leave out --secret, or choose another --ckpt-mode"
        )
    _check_home(spec)
    _check_data(spec)
    _check_network(spec)


def _check_data(spec: JobSpec) -> None:
    if len(spec.data) > MAX_DATA:
        raise SpecError(f"a job has at most {MAX_DATA} data sets and caches")
    if spec.secrets is not None and not (spec.secrets.uses or any(need.key for need in spec.data)):
        raise SpecError("the job's secrets are neither used nor keys of its data sets")
    for need in spec.data:
        if not DATA_NAME.fullmatch(need.name) or len(need.manifest) not in {0, 32} or not 0 <= need.mib < 2**31:
            raise SpecError(f"{need.name[:80]!r} does not name a data set: NAME or USER/NAME (`mesh data ls`)")
        if len(need.key) > MAX_DATA_KEY or (need.key and not (need.manifest and spec.secrets)):
            raise SpecError("the key of a data set comes with its version, encrypted with the key of the job's secrets")
        if need.cache:
            _check_cache(spec, need)
        if need.path and not DATA_PATH.fullmatch(need.path):
            raise SpecError(f"data sets are mounted at a plain path below /data, not at {need.path[:80]!r}")
        if need.path and spec.image is None:
            raise SpecError(
                f"--data {need.name}:{need.path} places the data in a container: add --image NAME, or leave out :{need.path} and "
                f"read ${need.variable}"
            )
    variables, inside = [n.variable for n in spec.data], [n.inside for n in spec.data if not n.cache]
    for label, texts in (("variable", variables), ("path", inside)):
        if len(set(texts)) < len(texts):
            raise SpecError(f"two data sets would have the same {label}: {max(texts, key=texts.count)}")
    for need in spec.data:
        taken = [name for name in need.variables if name in spec.env]
        if taken:
            option = "--cache" if need.cache else "--data"
            raise SpecError(f"the variable {taken[0]} is set by {option}: leave it out of --env")


def _check_cache(spec: JobSpec, need: DataNeed) -> None:
    if need.path or need.name != (f"{spec.user}/{need.last}" if need.manifest else need.last):
        raise SpecError(f"--cache {need.name}: a cache is one of the job's own user, by its NAME alone")
    if spec.most_nodes > 1:
        raise SpecError("a job on several nodes would fill several copies of a cache: leave out --cache, or --nodes")
    if spec.saves_from_outside:
        raise SpecError("a system checkpoint saves no cache: leave out --cache, or choose another --ckpt-mode")


def _check_network(spec: JobSpec) -> None:
    try:
        if spec.network != destinations(spec.network):
            raise SpecError("the hosts of --network are not in their one order and spelling")
    except DestinationError as error:
        raise SpecError(f"--network: {error}") from error
    if not spec.network:
        return
    if spec.most_nodes > 1:
        raise SpecError("a job on several nodes needs the network between them: leave out --network, or --nodes")
    if spec.saves_from_outside:
        raise SpecError(
            "a system checkpoint cannot hold connections: leave out --network, or choose another --ckpt-mode"
        )
    taken = [name for name in spec.env if name.upper() in {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}]
    if taken:
        raise SpecError(f"the variable {taken[0]} is set by --network: leave it out of --env")


def _check_share(spec: JobSpec) -> None:
    share, limit = spec.gpu_share, spec.gpu_share_limit
    for label, number in [("a share of a GPU", share), ("the limit of a GPU's share", limit)]:
        if not 1 <= number <= WHOLE:
            raise SpecError(f"{label} is 1 to {WHOLE} per cent, not {number}")
    if limit < share:
        raise SpecError(
            f"a job cannot be guaranteed {share} per cent of a GPU and be held to {limit}: "
            "choose a smaller --gpu-share, or a --gpu-share-limit that is not below it"
        )
    if share < WHOLE and not spec.gpus:
        raise SpecError("a share of no GPU: add --gpus 1, or leave out --gpu-share")
    if share < WHOLE and not spec.vram_mib:
        raise SpecError(
            "a job with a share of a GPU has others beside it, so it must say how much of the GPU's memory it needs: "
            "add --vram, as --vram 6g, or leave out --gpu-share to have the GPU alone"
        )
    if not spec.gpus and (spec.gpu_model or spec.driver or spec.capability != (0, 0)):
        raise SpecError("a kind of GPU for a job without any: add --gpus 1, or say no model, capability or driver")
    if len(spec.driver) > MAX_DRIVER_PARTS or any(not 0 <= part < 2**31 for part in (*spec.driver, *spec.capability)):
        raise SpecError("versions of a driver or of compute capability are a few numbers from 0, as 550.54 or 8.0")
    if len(spec.gpu_model) > MAX_MODEL:
        raise SpecError(f"a part of a GPU's name has up to {MAX_MODEL} characters")
    if spec.vram_limit_mib and share == WHOLE:
        raise SpecError(
            "a job that has its GPU alone has all of its memory: add --gpu-share, or leave out --vram-limit"
        )
    if spec.vram_limit_mib and spec.vram_limit_mib < spec.vram_mib:
        raise SpecError(
            f"a job cannot be guaranteed {spec.vram_mib} MiB of a GPU and be held to {spec.vram_limit_mib}: "
            "choose a smaller --vram, or a --vram-limit that is not below it"
        )


def _check_home(spec: JobSpec) -> None:
    home = spec.home
    if (home.rule == "node") != (home.node is not None) or (home.node is not None and len(home.node) != 32):
        raise SpecError("a home is one node, by its id, or found by a rule")
    if not 1 <= home.settle_s <= 3600:
        raise SpecError("a home must be free for 1 to 3600 seconds before a job goes back there")
    if home.rule in {"first", "node"} and spec.checkpointing is None:
        raise SpecError("a job without checkpoints (--ckpt) would start over at home: leave out --home")
    if home.rule in {"first", "node"} and spec.most_nodes > 1:
        raise SpecError("a job on several nodes has no home: leave out --home")


def check_array(array: ArrayPlace) -> None:
    """Raise SpecError for a place that no array has."""
    if len(array.array) != JOB_ID_BYTES or not 1 <= array.of <= MAX_ARRAY:
        raise SpecError(f"an array has 1 to {MAX_ARRAY} jobs")
    if not 0 <= array.index < 2**31 or not 0 <= array.place < array.of or not 0 <= array.limit <= MAX_ARRAY:
        raise SpecError("a job's place in its array is not one")
    if not 1 <= array.batch <= MAX_BATCH:
        raise SpecError(f"a batch has 1 to {MAX_BATCH} indices")
    if not 0 <= array.count <= MAX_ARRAY * MAX_BATCH:
        raise SpecError("an array's number of indices is not one")


def _check_checkpointing(checkpointing: Checkpointing) -> None:
    if not is_inside(checkpointing.directory):
        raise SpecError(
            f"checkpoint directory {checkpointing.directory[:80]!r} must be a plain path inside the working directory"
        )
    if not 0 <= checkpointing.replicas <= 16 or not 1 <= checkpointing.keep <= 1000:
        raise SpecError("replicas must be 0 to 16 and keep 1 to 1000")
    if not 0.1 <= checkpointing.stable_s <= 3600:
        raise SpecError("stable must be 0.1 to 3600 seconds")
    if isinstance(checkpointing.every, float) and not 1 <= checkpointing.every <= 7 * 86_400:
        raise SpecError("a checkpoint is asked for every second to every 7 days, or by the mesh's own rule (auto)")
    if len(checkpointing.to) > MAX_NAMED or any(len(node) != 32 for node in checkpointing.to):
        raise SpecError(f"a job names at most {MAX_NAMED} nodes as checkpoint destinations, each by its id")
