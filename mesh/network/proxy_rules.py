"""What the proxies of a node's jobs share: the hosts that its owner allows, and the bytes that each job has used."""

from collections.abc import Awaitable, Callable, Iterable

from mesh.network.addresses import PublicAddresses
from mesh.util.byte_text import amount

JOBS_KNOWN = 4096  # whose bytes are counted; the oldest is forgotten (own choice)

Resolve = Callable[[str], Awaitable[list[str]]]


class Refusal(Exception):
    """A request that is not served. `where`: its destination, if it has one."""

    def __init__(self, status: int, text: str, where: str = "") -> None:
        super().__init__(text)
        self.status, self.where = status, where


class ProxyRules:
    """Those of one node. `allowed`: by its owner; `most_bytes`: of one job, both ways, while the daemon runs."""

    def __init__(self, allowed: Iterable[str], most_bytes: int, resolve: Resolve | None = None) -> None:
        self.allowed, self._most = frozenset(allowed), most_bytes
        self.resolve = resolve or PublicAddresses()
        self._used: dict[bytes, int] = {}

    def spend(self, job: bytes, size: int) -> None:
        """Count bytes of a job. Refusal once it has used all of its own."""
        used = self._used.pop(job, 0)
        self._used[job] = used + size
        while len(self._used) > JOBS_KNOWN:
            del self._used[next(iter(self._used))]
        if used + size > self._most:
            raise Refusal(429, f"the job has used its {amount(self._most)} of the network here (network_gib)")
