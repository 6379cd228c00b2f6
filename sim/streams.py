"""Random streams, one for each (node, purpose): drawing more in one place never shifts another's luck."""

from hashlib import blake2b
from random import Random


class Streams:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._streams: dict[tuple[str, str], Random] = {}

    def get(self, node: str, purpose: str) -> Random:
        stream = self._streams.get((node, purpose))
        if stream is None:
            key = f"{self._seed}/{node}/{purpose}".encode()
            stream = Random(int.from_bytes(blake2b(key, digest_size=16).digest(), "big"))
            self._streams[node, purpose] = stream
        return stream
