"""Requests: what one attempt of a job needs of a node."""

from functools import cached_property
from math import inf
from typing import Annotated

import msgspec

from membership.lengths import MOST_LISTED, Id, Ids, Text, Texts
from placement.advert import HORIZONS_S, MAX_DRIVER_PARTS, WHOLE, Count, Mebibytes, horizon_of

SHORT_S = 3600  # expected run time of a job that has just begun: the mean of its first hours in GPU traces (own choice)


def expected_s(ran_s: float, most_s: float = inf) -> int:
    """Return the expected remaining run time, rounded up to a horizon.

    A job is expected to run as long again as it has run (run times have heavy tails: Lindy's law): at least an hour, at most
    `most_s`.
    """
    return HORIZONS_S[horizon_of(min(max(SHORT_S, ran_s), most_s))]


SHORT_ID = 8  # bytes of a data set's id in a request and in adverts


class WantedData(msgspec.Struct, frozen=True):
    """A data set that the job reads: a prefix of its id, and its size. Without an id only nodes that offer the name have it."""

    name: Text
    id: Id = b""
    mib: Mebibytes = 0


class Request(msgspec.Struct, frozen=True, dict=True):
    """The requirements and preferences of one attempt.

    `nodes` nodes of this kind are needed at once. `capability` and `driver`: least versions; `gpu_model`: part of the GPU's name.
    `gpu_share`: guaranteed per cent of each GPU's time; below 100, `vram_mib` is the memory that the job gets, else the least
    memory of the GPU. `remaining_s`: expected run time. `interactive`: the job is useless where its user may not enter it.
    `system`: it is saved by system checkpoints; `platform`: of the last one (`advert.SystemCheckpoints`).
    `only`: the nodes that may open its secrets; empty for all. `on`: the nodes on which it may run, likewise; `not_on`: those on
    which it may not. `network`: the hosts that it reaches by a proxy, `name:port`. `uv`, `conda`: it needs such an environment.
    Preferences: nodes in `exclude` failed this job and are refused; nodes in `avoid` are ranked last; `prefer` is ranked first;
    nodes in `near` have the last checkpoint.
    """

    job: Id
    attempt: Count
    user: Text
    gpus: Count = 0
    gpu_share: Annotated[int, msgspec.Meta(ge=1, le=WHOLE)] = WHOLE
    vram_mib: Mebibytes = 0
    capability: tuple[int, int] = (0, 0)
    gpu_model: Text = ""
    driver: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DRIVER_PARTS)] = ()
    engine: Text | None = None
    image: Text | None = None
    image_id: Id | None = None  # the SHA-256 of its configuration, as the mesh's list has it
    zone: Text | None = None
    interactive: bool = False
    nodes: Annotated[int, msgspec.Meta(ge=1)] = 1
    memory_mib: Mebibytes | None = None
    cpus: Count | None = None
    exclude: Ids = ()
    avoid: Ids = ()
    prefer: Id | None = None
    near: Ids = ()
    remaining_s: Count = SHORT_S
    system: bool = False
    platform: Text = ""
    user_key: Id = b""
    only: Ids = ()
    on: Ids = ()
    not_on: Ids = ()
    data: Annotated[tuple[WantedData, ...], msgspec.Meta(max_length=MOST_LISTED)] = ()
    network: Texts = ()
    uv: bool = False
    conda: bool = False

    @property
    def is_share(self) -> bool:
        """True if other jobs may share its GPUs."""
        return self.gpus > 0 and self.gpu_share < WHOLE

    @cached_property
    def shape(self) -> bytes:
        """The encoded requirements, equal for all jobs that need the same."""
        return msgspec.msgpack.encode(
            msgspec.structs.replace(
                self, job=b"", attempt=0, nodes=1, exclude=(), avoid=(), prefer=None, near=(), remaining_s=0
            )
        )

    @property
    def key(self) -> bytes:
        """The key for rendezvous hashing: a new attempt has new draws."""
        return self.job + (self.attempt % 2**32).to_bytes(4, "big")
