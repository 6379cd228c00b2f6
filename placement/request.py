"""What one attempt of a job needs of a node."""

from functools import cached_property
from math import inf
from typing import Annotated

import msgspec

from placement.advert import HORIZONS_S, WHOLE, Count, Mebibytes, horizon_of

SHORT_S = 3600  # how long a job that has only begun is likely to go on: the mean of its first hours in GPU traces; ours


def expected_s(ran_s: float, most_s: float = inf) -> int:
    """How long it is likely to go on, rounded up to a horizon: as long as it has run (run times have heavy tails: Lindy's law),
    an hour at least, and no longer than it may."""
    return HORIZONS_S[horizon_of(min(max(SHORT_S, ran_s), most_s))]


class Request(msgspec.Struct, frozen=True, dict=True):
    """`exclude` are nodes that failed this job; `avoid` are ranked last, not refused: the one it has just left.
    `nodes` of that kind are needed at once. `prefer` is ranked first, if it can take it: where its owner wants it. `near` have
    its last checkpoint. `remaining_s`: how long it is likely to go on. `capability` and `driver` are the least that will do,
    `gpu_model` a part of the GPU's name.
    `gpu_share` is the per cent of each GPU's time that it is guaranteed; below 100, `vram_mib` is what it gets of the memory,
    else what the GPU must have. `interactive`: it is of no use where its user may not go into it. `system`: it is saved from
    outside, by system checkpoints; `like`: what the node must be, to go on from the last (`likeness.py`)."""

    job: bytes
    attempt: int
    user: str
    gpus: Count = 0
    gpu_share: Annotated[int, msgspec.Meta(ge=1, le=WHOLE)] = WHOLE
    vram_mib: Mebibytes = 0
    capability: tuple[int, int] = (0, 0)
    gpu_model: str = ""
    driver: tuple[int, ...] = ()
    engine: str | None = None
    image: str | None = None
    image_id: bytes | None = None  # the SHA-256 of its configuration, as the mesh's list has it
    zone: str | None = None
    interactive: bool = False
    nodes: int = 1
    memory_mib: int | None = None
    cpus: int | None = None
    exclude: tuple[bytes, ...] = ()
    avoid: tuple[bytes, ...] = ()
    prefer: bytes | None = None
    near: tuple[bytes, ...] = ()
    remaining_s: int = SHORT_S
    system: bool = False
    like: str = ""

    @property
    def is_share(self) -> bool:
        """Whether it leaves room on its GPUs for others."""
        return self.gpus > 0 and self.gpu_share < WHOLE

    @cached_property
    def shape(self) -> bytes:
        """What every job that asks for the same has in common, whichever job and attempt it is."""
        return msgspec.msgpack.encode(
            msgspec.structs.replace(
                self, job=b"", attempt=0, nodes=1, exclude=(), avoid=(), prefer=None, near=(), remaining_s=0
            )
        )

    @property
    def key(self) -> bytes:
        """What rendezvous hashes: a new attempt draws new luck."""
        return self.job + (self.attempt % 2**32).to_bytes(4, "big")
