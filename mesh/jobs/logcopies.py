"""Copies of what running attempts print, on the disks of their jobs' witnesses: a host that dies takes no log with it.

Every few seconds the runner's node sends what is new; a witness answers how far it has come, and keeps the end of it
(`JobLogs.append_copy`). A copy that misses something says so when it is read.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from membership.identity import NodeId, short_id
from mesh.api.peer import PeerClient, PeerError

EVERY_S = 2.0  # what a killed host's last words may lack; ours
PIECE_BYTES = 64 * 1024  # of one attempt, each time; a job that prints more loses its middle in the copy
SEND_WITHIN_S = 3.0

log = logging.getLogger(__name__)


class LogCopies:
    def __init__(self, peers: PeerClient) -> None:
        self._peers = peers
        self._sent: dict[tuple[bytes, int, NodeId], int] = {}

    async def ship(self, attempts: Mapping[tuple[bytes, int], tuple[Path, Iterable[NodeId]]]) -> None:
        """Send what each attempt (job, number) has printed since the last time to each of these nodes."""
        wanted = {(*attempt, node) for attempt, (_, nodes) in attempts.items() for node in nodes}
        self._sent = {key: end for key, end in self._sent.items() if key in wanted}
        sends = [
            self._send(job, number, node, path) for (job, number), (path, nodes) in attempts.items() for node in nodes
        ]
        await asyncio.gather(*sends)

    async def _send(self, job: bytes, number: int, node: NodeId, path: Path) -> None:
        key = (job, number, node)
        offset, data = await asyncio.to_thread(_news, path, self._sent.get(key, 0))
        if not data:
            return
        try:
            answer = await self._peers.call(
                node, "PUT", f"/v1/jobs/{job.hex()}/log/{number}?offset={offset}", data, SEND_WITHIN_S
            )
            self._sent[key] = int(answer)
        except (PeerError, ValueError) as error:
            log.debug("a log was not copied to %s: %s", short_id(node), error)


def _news(path: Path, sent: int) -> tuple[int, bytes]:
    """What is new, and where it begins: not all of it, if it is much."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            offset = max(sent, size - PIECE_BYTES)
            file.seek(offset)
            return offset, file.read(PIECE_BYTES)
    except FileNotFoundError:
        return sent, b""
