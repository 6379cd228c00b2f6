"""The replicated value of a job: its last committed checkpoint, its attempts and its outcome.

A witness group agrees on one `Ledger` at a time, under (config, term): single-decree Paxos on a value that only grows,
with leases (Gray and Cheriton 1989) on the right to change it, and joint majorities while the group changes (Raft,
Ongaro 2014, section 4.3). `version` orders ledgers within a term; `term` orders them across terms.
"""

from collections.abc import Set
from typing import Literal

import msgspec

OutcomeKind = Literal["done", "failed", "cancelled"]

MAX_ATTEMPTS_KEPT = 64  # the newest; bounds the message that carries a ledger


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One committed checkpoint: `manifest` is its id in the checkpoint store, `holders` the peers that have it on disk."""

    seq: int
    term: int
    manifest: bytes
    parent: bytes | None
    holders: tuple[bytes, ...]
    step: int | None
    created_unix_ms: int


class Attempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stay of the job on one node. `reason` says why it ended, empty while it lasts."""

    number: int
    node: bytes
    nick: str
    term: int
    started_unix_ms: int
    running_unix_ms: int = 0
    ended_unix_ms: int = 0
    seen_unix_ms: int = 0
    reason: str = ""
    exit_code: int | None = None
    resumed_step: int | None = None
    last_step: int | None = None

    @property
    def ran_s(self) -> float:
        """How long its guest has run, as far as it is known."""
        until = self.ended_unix_ms or self.seen_unix_ms
        return max(0, until - self.running_unix_ms) / 1000 if self.running_unix_ms else 0.0


def left_unwillingly(attempts: tuple[Attempt, ...]) -> tuple[bytes, ...]:
    last = attempts[-1] if attempts else None
    return (last.node,) if last is not None and last.reason not in {"", "checkpointed"} else ()


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the job ended, for ever. `manifest` holds its log and published files."""

    kind: OutcomeKind
    detail: str
    exit_code: int | None
    manifest: bytes | None
    holders: tuple[bytes, ...]
    ended_unix_ms: int


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int = 0
    commit: Commit | None = None
    attempts: tuple[Attempt, ...] = ()
    outcome: Outcome | None = None
    errors: int = 0
    excluded: tuple[bytes, ...] = ()
    prefer: bytes | None = None  # where its owner wants the next attempt
    settled: int = 0  # the number of the last commit that a majority was known to hold when this was written

    def amended(self, **changes: object) -> "Ledger":
        """The next version with these fields replaced."""
        return msgspec.structs.replace(self, version=self.version + 1, **changes)

    def with_attempt(self, attempt: Attempt) -> "Ledger":
        """The next version in which `attempt` replaces the one of its number, or is appended."""
        others = tuple(known for known in self.attempts if known.number != attempt.number)
        return self.amended(attempts=(*others, attempt)[-MAX_ATTEMPTS_KEPT:])

    def written_off(self, reason: str, unix_ms: int) -> "Ledger":
        """With an attempt that never said goodbye ended, when it was last heard of."""
        attempt = self.open_attempt
        if attempt is None or self.outcome is not None:
            return self
        ended = attempt.seen_unix_ms or attempt.started_unix_ms
        return self.with_attempt(msgspec.structs.replace(attempt, reason=reason, ended_unix_ms=min(ended, unix_ms)))

    @property
    def open_attempt(self) -> Attempt | None:
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and not last.reason else None

    @property
    def avoided(self) -> tuple[bytes, ...]:
        """The node that the job has just had to leave, if that was not of its own will."""
        return left_unwillingly(self.attempts)

    @property
    def ran_s(self) -> float:
        """How long its guests have run, in the attempts that are over and still remembered."""
        return sum(attempt.ran_s for attempt in self.attempts if attempt.reason)

    @property
    def next_attempt(self) -> int:
        return self.attempts[-1].number + 1 if self.attempts else 0


class Seat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A witness is a node with one disk: whoever has lost its journal has lost its promises, and is another witness."""

    node: bytes
    disk: bytes


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A witness group. While `previous` is not empty, a quorum needs a majority of both groups."""

    number: int
    term: int
    members: tuple[Seat, ...]
    previous: tuple[Seat, ...] = ()

    @property
    def order(self) -> tuple[int, int, bool]:
        return (self.number, self.term, not self.previous)

    @property
    def everyone(self) -> tuple[Seat, ...]:
        return self.members + tuple(seat for seat in self.previous if seat not in self.members)

    @property
    def nodes(self) -> tuple[bytes, ...]:
        """Who sits in it, each once."""
        return tuple(dict.fromkeys(seat.node for seat in self.everyone))

    def quorum(self, acks: Set[Seat]) -> bool:
        """Whether these together decide for this group."""
        return _majority(self.members, acks) and (not self.previous or _majority(self.previous, acks))

    def joint(self, members: tuple[Seat, ...], term: int) -> "Config":
        """The change from this group to `members`, proposed under `term`."""
        return Config(number=self.number + 1, term=term, members=members, previous=self.members)

    def settled(self) -> "Config":
        return msgspec.structs.replace(self, previous=())


def _majority(members: tuple[Seat, ...], acks: Set[Seat]) -> bool:
    return 2 * sum(seat in acks for seat in members) > len(members)
