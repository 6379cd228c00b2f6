"""What one attempt of a job needs of a node."""

import msgspec


class Request(msgspec.Struct, frozen=True):
    """`exclude` are nodes that failed this job; `avoid` are ranked last, not refused: the one it has just left.
    `prefer` is ranked first, if it can take it: where its owner wants it."""

    job: bytes
    attempt: int
    user: str
    gpus: int = 0
    vram_mib: int = 0
    capability: tuple[int, int] = (0, 0)
    engine: str | None = None
    image: str | None = None
    zone: str | None = None
    memory_mib: int | None = None
    exclude: tuple[bytes, ...] = ()
    avoid: tuple[bytes, ...] = ()
    prefer: bytes | None = None

    @property
    def key(self) -> bytes:
        """What rendezvous hashes: a new attempt draws new luck."""
        return self.job + self.attempt.to_bytes(4, "big")
