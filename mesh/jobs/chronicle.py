"""Keeps what nodes say happened to jobs: this node's own words, and on witnesses those of all who have a part in the job."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from membership.envelope import EnvelopeError, open_envelope, seal
from membership.identity import Identity, NodeId
from membership.trust import TrustStore
from mesh.jobs.events import (
    MAX_EVENT_BYTES,
    MAX_TOLD,
    REASON_CHARS,
    Event,
    EventError,
    Kind,
    decode_event,
    encode_event,
    hash_of,
)
from mesh.jobs.journal import Journal
from mesh.jobs.messages import Told

AGAIN_S = 30.0  # between two events of one state of a job; ours


class Chronicle:
    def __init__(self, identity: Identity, trust: TrustStore, journal: Journal) -> None:
        self._identity, self._trust, self._journal = identity, trust, journal
        self._last: dict[bytes | None, tuple[int, bytes]] = {}  # number and hash of what was last said of each job
        self._untold: dict[bytes, list[bytes]] = {}
        self.said: Counter[Kind] = Counter()  # events, since this daemon started

    def say(self, job: bytes | None, kind: Kind, reason: str = "", **fields: Any) -> Event:
        """This happened. It is written soon, and told to the job's witnesses with the next `untold`."""
        unix_ms = time.time_ns() // 1_000_000
        seq, previous = self._last.get(job, (0, b""))
        # A clock and a count in one: it goes on where a former life of this node, which nobody remembers, left off.
        event = Event(job, max(seq + 1, unix_ms), unix_ms, kind, previous, reason=reason[:REASON_CHARS], **fields)
        sealed = seal(self._identity, self._trust.mesh_id, "event", encode_event(event))
        self.said[kind] += 1
        self._last[job] = (event.seq, hash_of(sealed))
        self._journal.record(self._identity.node_id, event, sealed)
        if job is not None:
            self._untold.setdefault(job, []).append(sealed)
        return event

    def forget(self, job: bytes) -> None:
        """This node has no part in it any more, or it is over."""
        self._last.pop(job, None)

    def untold(self) -> list[tuple[bytes, Told]]:
        """What the witnesses of each job have not been told yet."""
        told = []
        for job, events in self._untold.items():
            told += [
                (job, Told(job=job, events=tuple(events[start : start + MAX_TOLD])))
                for start in range(0, len(events), MAX_TOLD)
            ]
        self._untold = {}
        return told

    def take(self, message: Told) -> int:
        """Keep what somebody says of a job that this node is a witness of; how many of its events are none."""
        refused = max(0, len(message.events) - MAX_TOLD)
        for sealed in message.events[:MAX_TOLD]:
            try:
                actor, event = self.open(sealed)
            except EventError:
                refused += 1
                continue
            if event.job != message.job or self._trust.standing(actor, time.time()) is None:
                refused += 1
                continue
            self._journal.record(actor, event, sealed)
        return refused

    def open(self, sealed: bytes) -> tuple[NodeId, Event]:
        """Who said it, and what; EventError if nobody of this mesh did."""
        if len(sealed) > MAX_EVENT_BYTES:
            raise EventError("too long for an event")
        try:
            actor, payload = open_envelope(sealed, self._trust.mesh_id, "event")
        except EnvelopeError as error:
            raise EventError(str(error)) from error
        return actor, decode_event(payload)

    def merge(self, tellings: Sequence[Sequence[bytes]]) -> list[tuple[NodeId, Event, bool]]:
        """What several nodes have kept of one job, each event once, in the order of their clocks; the last says whether the
        event before it, by the same node, is missing."""
        known: dict[tuple[NodeId, int], tuple[Event, bytes]] = {}
        for sealed in {sealed for telling in tellings for sealed in telling}:
            try:
                actor, event = self.open(sealed)
            except EventError:
                continue
            known[actor, event.seq] = (event, hash_of(sealed))
        hashes = {own for _, own in known.values()}
        rows = [
            (actor, event, bool(event.previous) and event.previous not in hashes)
            for (actor, _), (event, _) in known.items()
        ]
        return sorted(rows, key=lambda row: (row[1].unix_ms, row[1].seq, row[0]))


class Waits:
    """Jobs that wait for ever changing reasons: one of these is news now and then."""

    def __init__(self) -> None:
        self._told: dict[bytes, float] = {}

    def is_news(self, job: bytes, old: str, new: str, now: float) -> bool:
        if old == new == "pending" and now - self._told.get(job, -AGAIN_S) < AGAIN_S:
            return False
        self._told[job] = now
        return True

    def forget(self, job: bytes) -> None:
        self._told.pop(job, None)
