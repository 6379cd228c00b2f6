"""Hears what others tell of jobs (`herald.py`), and puts it on the board."""

from collections.abc import Callable

from membership.identity import NodeId
from membership.node import MembershipNode
from mesh.jobs.board import Board
from mesh.jobs.status import decode_status


class Hearing:
    """`news`: others may have waited for what was heard."""

    def __init__(self, me: NodeId, membership: MembershipNode, board: Board, news: Callable[[], None]) -> None:
        self._me, self._membership, self._board, self._news = me, membership, board, news
        self._sections: dict[tuple[NodeId, str], bytes] = {}  # of which job each speaks

    def section(self, node: NodeId, section: str) -> None:
        """It says something new of a job, or nothing any more."""
        record = self._membership.record(node, section)
        status = decode_status(record.body) if record is not None else None
        before = self._sections.pop((node, section), None)
        if before is not None and (status is None or status.job != before):
            self._board.tell(node, before, None)
        if status is None or node == self._me:
            return
        self._sections[node, section] = status.job
        if self._board.tell(node, status.job, status):
            self._news()

    def all(self) -> None:
        """Every section about jobs anew: at the start, and when news were missed."""
        tellers: dict[bytes, list[NodeId]] = {}
        for record in self._membership.records("jobs/"):
            self.section(record.node, record.section)
            job = self._sections.get((record.node, record.section))
            if job is not None:
                tellers.setdefault(job, []).append(record.node)
        self._board.keep_only(tellers)
