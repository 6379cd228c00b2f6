"""Event log: signed events about jobs. A node keeps its own; a witness keeps those of every node that takes part in the job."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from membership.envelope import EnvelopeError, open_envelope, seal
from membership.identity import Identity, NodeId
from membership.lengths import shortened
from membership.trust import TrustStore
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.messages import EventReport
from mesh.jobs.authority import may_report
from mesh.journal import Journal
from mesh.model.events import (
    MAX_EVENT_BYTES,
    MAX_REPORTED,
    REASON_BYTES,
    REASON_CHARS,
    Event,
    EventError,
    Kind,
    decode_event,
    encode_event,
    hash_of,
)
from mesh.model.spec import JobSpec
from mesh.util.remembered import Remembered

REMEMBERED = 4096  # jobs with their last event; an older one begins a new chain, as after a restart (own choice)


class EventLog:
    """`counts`: events by kind since this daemon started."""

    def __init__(self, identity: Identity, trust: TrustStore, journal: Journal) -> None:
        self._identity, self._trust, self._journal = identity, trust, journal
        self._last = Remembered[bytes | None, tuple[int, bytes]](REMEMBERED)  # number and hash of a job's last event
        self._unreported: dict[bytes, list[bytes]] = {}
        self.counts: Counter[Kind] = Counter()

    def add(self, job: bytes | None, kind: Kind, reason: str = "", **fields: Any) -> Event:
        """Write an event of this node. It reaches the disk soon, and the job's witnesses with the next `unreported`."""
        unix_ms = time.time_ns() // 1_000_000
        seq, previous = self._last.get(job, (0, b""))
        # The number is at least the time, so that it grows over restarts, which forget the count.
        reason = shortened(reason, REASON_CHARS).encode()[:REASON_BYTES].decode(errors="ignore")
        event = Event(job, max(seq + 1, unix_ms), unix_ms, kind, previous, reason=reason, **fields)
        sealed = seal(self._identity, self._trust.mesh_id, "event", encode_event(event))
        self.counts[kind] += 1
        self._last.keep(job, (event.seq, hash_of(sealed)))
        self._journal.record_event(self._identity.node_id, event, sealed)
        if job is not None:
            self._unreported.setdefault(job, []).append(sealed)
        return event

    def unreported(self) -> list[tuple[bytes, EventReport]]:
        """Return the events that the witnesses of each job have not been sent yet, once."""
        pending, self._unreported = self._unreported, {}
        return [
            (job, EventReport(job=job, events=tuple(events[start : start + MAX_REPORTED])))
            for job, events in pending.items()
            for start in range(0, len(events), MAX_REPORTED)
        ]

    def on_report(self, sender: NodeId, message: EventReport, known: WitnessRecord, spec: JobSpec) -> int:
        """Keep the sender's own events of a job that this node witnesses; return how many are refused."""
        writer = self._trust.credentials(sender, time.time())
        if writer is None or not may_report(writer, known, spec):
            return len(message.events)
        refused = 0
        for sealed in message.events:
            try:
                actor, event = self.open(sealed)
            except EventError:
                refused += 1
                continue
            if event.job != message.job or actor != sender:
                refused += 1
                continue
            self._journal.record_event(actor, event, sealed)
        return refused

    def open(self, sealed: bytes) -> tuple[NodeId, Event]:
        """Return the node that signed an event, and the event; EventError if no node of this mesh did."""
        if len(sealed) > MAX_EVENT_BYTES:
            raise EventError("too long for an event")
        try:
            actor, payload = open_envelope(sealed, self._trust.mesh_id, "event")
        except EnvelopeError as error:
            raise EventError(str(error)) from error
        return actor, decode_event(payload)

    def merge(self, job: bytes, copies: Sequence[Sequence[bytes]]) -> list[tuple[NodeId, Event, bool]]:
        """Merge what several nodes have kept of a job: each event once, ordered by the clocks of the nodes that wrote them.

        The flag tells that the event before it, by the same node, is missing. Checks signatures: run it in a thread.
        """
        known: dict[tuple[NodeId, int], tuple[Event, bytes]] = {}
        for sealed in {sealed for copy in copies for sealed in copy}:
            try:
                actor, event = self.open(sealed)
            except EventError:
                continue
            if event.job == job:
                known[actor, event.seq] = (event, hash_of(sealed))
        hashes = {own for _, own in known.values()}
        rows = [
            (actor, event, bool(event.previous) and event.previous not in hashes)
            for (actor, _), (event, _) in known.items()
        ]
        return sorted(rows, key=lambda row: (row[1].unix_ms, row[1].seq, row[0]))
