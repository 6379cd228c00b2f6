"""Adverts: each node's description of what it lends, in integers only, so that every node ranks it alike.

An advert travels as a signed lane-2 section. Its `version` grows with each change, and every decision names it.
"""

from bisect import bisect_left
from functools import cached_property
from typing import Annotated, Literal

import msgspec

from membership.lengths import Text
from membership.malformed import MALFORMED
from placement.bounds import MAX_SLOTS
from placement.rendezvous import lane

MAX_WEIGHT = 64
MAX_DRIVER_PARTS = 4
MAX_GPUS = 64  # of a node
MAX_NUMBER = 1 << 53  # each is below: every reader can show it, as a time too
MAX_IMAGES = 256  # of each kind; a section holds 16 KiB
MAX_LINE = 300  # characters of a line on system checkpoints (own choice)
HORIZONS_S = tuple(900 << doubling for doubling in range(7))  # 15 min to 16 h: the run time of most jobs (own choice)
WHOLE = 100  # per cent of a GPU's time

HeldBy = Literal["", "owner", "hours"]

Count = Annotated[int, msgspec.Meta(ge=0)]
Percent = Annotated[int, msgspec.Meta(ge=0, le=WHOLE)]
Mebibytes = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


HOUR = 2  # index of one hour in HORIZONS_S, the period of an advert's `weight`


def horizon_of(seconds: float) -> int:
    """Return the index in `HORIZONS_S` of the shortest horizon that is long enough, or of the longest."""
    return min(bisect_left(HORIZONS_S, seconds), len(HORIZONS_S) - 1)


LOAD_BITS = 20


class AdvertError(ValueError):
    """Bytes that are not a valid advert."""


class Gpu(msgspec.Struct, frozen=True):
    uuid: str
    model: str
    vram_mib: Mebibytes
    capability: tuple[int, int] = (0, 0)


class Portion(msgspec.Struct, frozen=True, array_like=True):
    """A part of one GPU: free in an advert, or allocated to a job. `share`: guaranteed per cent of its time."""

    uuid: Text
    share: Percent
    vram_mib: Mebibytes


class SystemCheckpoints(msgspec.Struct, frozen=True):
    """A node's support for system checkpoints (CRIU), the memory of a whole container.

    CRIU restores registers, memory and descriptors as they were, so a checkpoint can only be restored on an equal platform.
    `platform`: one line that describes it; empty if the node makes no such checkpoints, and then `problem` says why.
    `gpu_platform` and `gpu_problem`: the same for jobs with GPUs.
    """

    platform: str = ""
    problem: str = "it does not offer them"
    gpu_platform: str = ""
    gpu_problem: str = "it does not offer them"

    @property
    def valid(self) -> bool:
        lines = (self.platform, self.problem, self.gpu_platform, self.gpu_problem)
        return all(len(line) <= MAX_LINE and line.isprintable() for line in lines)

    def refusal(self, gpus: bool, platform: str) -> str | None:
        """Return why a job saved by system checkpoints cannot run here; None if it can.

        `platform`: of the node that made the job's last checkpoint; empty if it has none.
        """
        own, problem = (self.gpu_platform, self.gpu_problem) if gpus else (self.platform, self.problem)
        if not own:
            return f"makes no system checkpoints{' of jobs with GPUs' if gpus else ''}: {problem}"
        if platform and own != platform:
            return f"cannot restore a system checkpoint made on {platform}; this node is {own}"
        return None


class Advert(msgspec.Struct, frozen=True, dict=True):
    """A node's description of what it lends.

    `weight`: the node's own estimate of its survival for an hour, 1 to 64; `weights`: for each of `HORIZONS_S`, empty if unknown.
    `driver`: version of the GPUs' driver, as `(550, 54, 14)`. `free_portions` (of GPUs that are not fully used) and `slots_free`:
    what no job uses. A job without GPUs takes a slot.
    `guards`: the node can limit a job to its share of a GPU; `gpu_sharing`: its owner allows shares; `gpu_pauses`: its driver can
    free a guest's GPU memory while the guest stays alive, so an owner's short visit is no departure.
    `held_by`: why the node is paused if nobody paused it: its `owner` is present, or it is lent at other `hours`, until
    `back_unix` if that is known.
    `images`: names that may be requested by name alone; if the mesh has a list (`image_list`), those that the owner allows.
    `image_ids`: hash prefixes of the images that the node has and may run; `image_fetches`: of those that it can fetch;
    `image_denials`: names and hexadecimal hash prefixes that the owner denies.
    `interactive`: the owner allows users to enter their guests (exec, forward, Jupyter).
    `data_ids`: prefixes of the ids of data sets that the node has whole; `data_paths`: names of directories that it offers;
    `fetch_mib_s`: the speed at which data sets came to it of late, 0 if unknown.
    `network`: hosts that jobs may reach by a proxy, `name:port`; `proxies`: engines that can leave a job with that alone.
    `uv` and `conda`: the node can make such environments.
    `accepts`: users whose jobs are accepted, `*` for all; `own_only`: engines that run only the owner's own jobs.
    """

    version: int
    node: bytes
    nick: str
    user: str
    zone: str
    weight: int
    up_since_unix: int
    lending: bool
    paused: bool
    gpus: tuple[Gpu, ...]
    free_portions: tuple[Portion, ...]
    guards: bool
    gpu_sharing: bool
    slots: int
    slots_free: int
    cpus: int
    memory_mib: int
    engines: tuple[str, ...]
    own_only: tuple[str, ...]
    images: tuple[str, ...]
    accepts: tuple[str, ...]
    store_free_mib: int
    held_by: HeldBy = ""
    back_unix: int = 0
    gpu_pauses: bool = False
    interactive: bool = True
    image_list: bool = False
    image_ids: tuple[bytes, ...] = ()
    image_fetches: tuple[bytes, ...] = ()
    image_denials: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    driver: tuple[int, ...] = ()
    system: SystemCheckpoints = SystemCheckpoints()
    user_key: bytes = b""
    data_ids: tuple[bytes, ...] = ()
    data_paths: tuple[str, ...] = ()
    fetch_mib_s: int = 0
    network: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    uv: bool = True  # nodes of 0.1 do not say it
    conda: bool = False

    @cached_property
    def lane(self) -> bytes:
        return lane(self.node)

    @cached_property
    def load(self) -> int:
        """Return the part of the slots that is taken with one more job, in units of 2**-20; 0 if no slot is taken."""
        taken = self.slots - self.slots_free
        return (taken + 1 << LOAD_BITS) // self.slots if taken > 0 else 0

    @cached_property
    def grades(self) -> dict[bytes, int]:
        """Grades that `ranking` has computed for this advert, by shape of request."""
        return {}

    def weight_for(self, horizon: int) -> int:
        """Return the weight for a horizon, given by its index in `HORIZONS_S`."""
        return self.weights[horizon] if self.weights else self.weight

    @cached_property
    def whole_gpus_free(self) -> int:
        return sum(left.share == WHOLE for left in self.free_portions)


_decoder = msgspec.msgpack.Decoder(Advert)


def encode_advert(advert: Advert) -> bytes:
    return msgspec.msgpack.encode(advert)


def decode_advert(node: bytes, data: bytes) -> Advert:
    """Decode and check an advert of this node."""
    try:
        advert = _decoder.decode(data)
    except MALFORMED as error:
        raise AdvertError(f"not an advert: {error}") from error
    if advert.node != node:
        raise AdvertError("an advert must be about its own author")
    if not 1 <= advert.weight <= MAX_WEIGHT:
        raise AdvertError(f"weight must be 1 to {MAX_WEIGHT}")
    if advert.weights and len(advert.weights) != len(HORIZONS_S):
        raise AdvertError(f"an advert has {len(HORIZONS_S)} weights, or none")
    if any(not 1 <= weight <= MAX_WEIGHT for weight in advert.weights):
        raise AdvertError(f"weights must be 1 to {MAX_WEIGHT}")
    if len(advert.driver) > MAX_DRIVER_PARTS or any(part < 0 for part in advert.driver):
        raise AdvertError("a driver version has up to four numbers, 0 or more")
    numbers = (advert.version, advert.cpus, advert.memory_mib, advert.store_free_mib, advert.fetch_mib_s)
    times = (advert.up_since_unix, advert.back_unix)
    named = (advert.images, advert.image_ids, advert.image_fetches, advert.image_denials)
    most = max(len(advert.data_ids), len(advert.data_paths), len(advert.network), *map(len, named))
    if not all(0 <= number < MAX_NUMBER for number in (*numbers, *times)):
        raise AdvertError("an advert's numbers are out of range")
    if not 0 <= advert.slots_free <= advert.slots <= MAX_SLOTS or len(advert.gpus) > MAX_GPUS or most > MAX_IMAGES:
        raise AdvertError("an advert offers more than a node can have")
    if not advert.system.valid:
        raise AdvertError("an advert's text on system checkpoints is not one printable line")
    _check_portions(advert)
    return advert


def _check_portions(advert: Advert) -> None:
    sizes = {gpu.uuid: gpu.vram_mib for gpu in advert.gpus}
    offered = {left.uuid for left in advert.free_portions}
    if len(sizes) < len(advert.gpus) or len(offered) < len(advert.free_portions) or not offered <= sizes.keys():
        raise AdvertError("an advert offers a GPU that it does not have, or one twice")
    for left in advert.free_portions:
        untouched, all_memory = left.share == WHOLE, left.vram_mib == sizes[left.uuid]
        if untouched != all_memory or left.vram_mib > sizes[left.uuid] or not (left.share or left.vram_mib):
            raise AdvertError("an advert's free portion is impossible: a job that uses time of a GPU uses memory of it")
