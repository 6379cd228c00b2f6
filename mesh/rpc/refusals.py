"""Refusals of messages that no honest peer sends: counted by reason, and reported at the first, tenth, hundredth time."""

import logging
from collections import Counter
from collections.abc import Callable

from membership.identity import NodeId, short_id

PEERS_KEPT = 4096

log = logging.getLogger(__name__)


class Refusals:
    """Counts refusals by peer and reason. `tell` reports to the node's owner."""

    def __init__(self, tell: Callable[[str], None] = log.warning) -> None:
        self.tell = tell
        self.counters: Counter[str] = Counter()
        self._by_peer: Counter[tuple[NodeId, str]] = Counter()

    def count(self, reason: str, peer: NodeId, what: str) -> None:
        """Count a refusal. `reason` is a short word for the counters, `what` a full text."""
        self.counters[f"refused_{reason}"] += 1
        if len(self._by_peer) >= PEERS_KEPT:
            self._by_peer.clear()
        self._by_peer[peer, reason] += 1
        times = self._by_peer[peer, reason]
        if str(times).strip("0") == "1":
            again = f" ({times} times)" if times > 1 else ""
            self.tell(f"node {short_id(peer)} was refused{again}: {what}")
