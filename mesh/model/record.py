"""Job record: the replicated value of a job, with its last committed checkpoint, its attempts and its outcome.

A witness group agrees on one `JobRecord` at a time, under (config, term): Paxos on a value that only grows, with leases (Gray
and Cheriton 1989) on the right to change it, and joint majorities while the group changes (Raft: Ongaro 2014, section 4.3).
`version` orders records within a term; `term` orders them across terms.
"""

from collections.abc import Sequence, Set
from typing import Annotated, Literal

import msgspec

from membership.lengths import MOST_LISTED, Id, Ids, Line, Text, shortened
from mesh.model.bounds import MAX_NODES

OutcomeKind = Literal["done", "failed", "cancelled"]

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # from peers: the next one, too, fits into 64 bits
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=2.0**53)]  # from peers: neither NaN nor infinite
Needed = Annotated[tuple[Number, ...], msgspec.Meta(max_length=2)]

FIRST_TERM = 1  # of every job; it belongs to the submitter, so nobody has to win it
MOST_VOTERS = 16  # of a group from a peer, who would have this node write to all of them; groups have five at most
MAX_ATTEMPTS_KEPT = 64  # the newest
# Of all attempts but the last: a message has room for the record and the job's description. 64 of the largest gang have 185 KiB.
MAX_ATTEMPTS_BYTES = 256 * 1024
AHEAD_MS = 86_400_000  # of this node's clock, that an end may be: a wrong time zone, but no year (own choice)
Gang = Annotated[tuple[tuple[Id, Line], ...], msgspec.Meta(max_length=MAX_NODES)]


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A committed checkpoint: `manifest` is its id in the checkpoint store, `holders` the peers that have it on disk, of
    `wanted` that its user asked for. `platform`, of a system checkpoint: the nodes that can resume it.
    """

    seq: Number
    term: Number
    manifest: Id
    parent: Id | None
    holders: Ids
    step: Number | None
    created_unix_ms: Number
    platform: Line = ""
    wanted: Number = 0

    @property
    def at_risk(self) -> bool:
        """Tell whether fewer nodes have it than its user asked for."""
        return len(self.holders) < self.wanted


class Attempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One stay of the job on one node. `reason` tells why it ended, and is empty while it lasts. `fault`: the job failed
    there, and may succeed elsewhere.
    """

    number: Number
    node: Id
    nick: Line
    term: Number
    started_unix_ms: Number
    running_unix_ms: Number = 0
    ended_unix_ms: Number = 0
    seen_unix_ms: Number = 0
    reason: Text = ""
    exit_code: int | None = None
    resumed_step: Number | None = None
    last_step: Number | None = None
    fault: bool = False
    gang: Gang = ()  # the other nodes of a gang with their nicks, by rank from 1

    def node_of(self, rank: int) -> bytes | None:
        """Return the node of a rank; None if the attempt has, or had, no such rank."""
        nodes = (self.node, *(node for node, _ in self.gang))
        return nodes[rank] if rank < len(nodes) else None

    @property
    def ran_s(self) -> float:
        """Return how long the guest has run by its own node's clock, as far as it is known."""
        until = self.seen_unix_ms or self.ended_unix_ms  # another node may have set the end, by its clock
        return max(0, until - self.running_unix_ms) / 1000 if self.running_unix_ms else 0.0


SHUNNED_S, SHUNNED_MAX_S = 60.0, 3600.0  # after a failure on a node, doubled with each further one (own choice)


def shunned(attempts: Sequence[Attempt], unix_ms: int) -> tuple[bytes, ...]:
    """Return the nodes where the job failed so recently that it does not try them yet."""
    return tuple(node for node, until_ms in shunned_until(attempts).items() if unix_ms < until_ms)


def shunned_until(attempts: Sequence[Attempt]) -> dict[bytes, float]:
    """Return until when (Unix milliseconds) each node is avoided after failures."""
    times: dict[bytes, int] = {}
    until: dict[bytes, float] = {}
    for attempt in attempts:
        if attempt.fault:
            count = times[attempt.node] = times.get(attempt.node, 0) + 1
            until[attempt.node] = attempt.ended_unix_ms + 1000 * min(SHUNNED_MAX_S, SHUNNED_S * 2 ** (count - 1))
    return until


def avoided(attempts: Sequence[Attempt]) -> tuple[bytes, ...]:
    """Return the nodes that are ranked last: those where the job failed, and the one it has just left."""
    last = attempts[-1] if attempts else None
    left = (last.node,) if last is not None and last.reason not in {"", "checkpointed"} else ()
    return tuple(dict.fromkeys([*(attempt.node for attempt in attempts if attempt.fault), *left]))


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The final end of a job. `manifest` holds its log and published files."""

    kind: OutcomeKind
    detail: Text
    exit_code: int | None
    manifest: Id | None
    holders: Ids
    ended_unix_ms: Number

    def is_ahead(self, unix_ms: float) -> bool:
        """Tell whether it is of a time that no clock shows yet: such a job would stay in memory and be told until then."""
        return self.ended_unix_ms > unix_ms + AHEAD_MS


Attempts = Annotated[tuple[Attempt, ...], msgspec.Meta(max_length=MAX_ATTEMPTS_KEPT)]


class JobRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The value that witnesses agree on.

    `settled` is the highest number of a commit that a majority was known to hold at this version. `predecessor` is the
    checkpoint to go back to if no node can give `commit`: the one before it, or an older one while that is kept by more nodes.
    `needed` are the numbers of the checkpoints that the last record known to a majority named. `abandoned` is the newest
    checkpoint that no node could give: the chain forks there. `unfetched_unix_ms`: since when no attempt could fetch `commit`.
    """

    version: Number = 0
    commit: Commit | None = None
    attempts: Attempts = ()
    outcome: Outcome | None = None
    errors: Number = 0
    prefer: Id | None = None  # the preferred node of the next attempt
    settled: Number = 0
    predecessor: Commit | None = None
    needed: Needed = ()
    abandoned: Commit | None = None
    unfetched_unix_ms: Number = 0

    def amended(self, **changes: object) -> "JobRecord":
        """Return the next version with these fields replaced."""
        return msgspec.structs.replace(self, version=self.version + 1, **changes)

    def with_commit(
        self,
        term: int,
        manifest: bytes,
        holders: tuple[bytes, ...],
        step: int | None,
        unix_ms: int,
        platform: str = "",
        wanted: int = 0,
    ) -> "JobRecord":
        """Return the next version, with this checkpoint as the last."""
        seq, parent = self.next_commit
        kept, platform = holders[:MOST_LISTED], shortened(platform)
        commit = Commit(seq, term, manifest, parent, kept, step, unix_ms, platform, wanted)
        return self.amended(commit=commit, predecessor=self._better_kept)

    @property
    def _better_kept(self) -> Commit | None:
        """Return the last checkpoint, or its predecessor if the last one is at risk and fewer nodes have it."""
        last, before = self.commit, self.predecessor
        if last is None or before is None or not last.at_risk:
            return last
        return before if len(before.holders) > len(last.holders) else last

    def without_commit(self) -> "JobRecord":
        """Return the next version, in which the last checkpoint is abandoned for its predecessor, else for the beginning."""
        return self.amended(commit=self.predecessor, predecessor=None, abandoned=self.commit, unfetched_unix_ms=0)

    @property
    def named(self) -> tuple[int, ...]:
        """Return the numbers of the checkpoints that this record names."""
        return tuple(kept.seq for kept in (self.predecessor, self.commit) if kept is not None)

    def with_attempt(self, attempt: Attempt) -> "JobRecord":
        """Return the next version, in which `attempt` replaces the one of its number or is appended.

        The oldest are dropped if they are too many or too large.
        """
        attempt = msgspec.structs.replace(attempt, nick=shortened(attempt.nick), reason=shortened(attempt.reason))
        others = [known for known in self.attempts if known.number != attempt.number][1 - MAX_ATTEMPTS_KEPT :]
        while others and len(msgspec.msgpack.encode(others)) > MAX_ATTEMPTS_BYTES:
            del others[0]
        return self.amended(attempts=(*others, attempt))

    def written_off(self, reason: str, unix_ms: int) -> "JobRecord":
        """Return the record in which an attempt without a report of its end has ended when it was last seen."""
        attempt = self.open_attempt
        if attempt is None:
            return self
        ended = attempt.seen_unix_ms or attempt.started_unix_ms
        return self.with_attempt(msgspec.structs.replace(attempt, reason=reason, ended_unix_ms=min(ended, unix_ms)))

    @property
    def open_attempt(self) -> Attempt | None:
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and not last.reason else None

    @property
    def ran_s(self) -> float:
        """Return how long guests have run in the attempts that are over and still in the record."""
        return sum(attempt.ran_s for attempt in self.attempts if attempt.reason)

    @property
    def next_commit(self) -> tuple[int, bytes | None]:
        """Return the number of the next checkpoint, and the manifest that it follows."""
        if self.commit is None:
            return self.settled + 1, None
        return max(self.settled, self.commit.seq) + 1, self.commit.manifest

    @property
    def next_attempt(self) -> int:
        return self.attempts[-1].number + 1 if self.attempts else 0


class Voter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node with one disk: a node that lost its journal has lost its promises, and is another voter."""

    node: Id
    disk: Id


Voters = Annotated[tuple[Voter, ...], msgspec.Meta(max_length=MOST_VOTERS)]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A witness group. While `previous` is not empty, a quorum needs a majority of both groups.

    `term` is the term under which it was last proposed: a group is a part of the value that a term decides, so a later term
    outranks any number of changes under an earlier one.
    """

    number: Number
    term: Number
    members: Voters
    previous: Voters = ()

    @property
    def order(self) -> tuple[int, int, bool]:
        return (self.term, self.number, not self.previous)

    @property
    def everyone(self) -> tuple[Voter, ...]:
        if not self.previous:
            return self.members
        return self.members + tuple(voter for voter in self.previous if voter not in self.members)

    @property
    def nodes(self) -> tuple[bytes, ...]:
        """Return the nodes of the group, each once."""
        return tuple(dict.fromkeys([voter.node for voter in self.everyone]))

    def count(self, votes: set[Voter], vote: Voter) -> None:
        """Add a vote to these if a voter of the group gave it: a node may answer with any number of invented disks."""
        if vote in self.everyone:
            votes.add(vote)

    def quorum(self, acks: Set[Voter]) -> bool:
        """Tell whether these voters decide for the group."""
        return majority(self.members, acks) and (not self.previous or majority(self.previous, acks))

    def joint(self, members: tuple[Voter, ...], term: int) -> "Config":
        """Return the transition from this group to `members`, proposed under `term`."""
        return Config(number=self.number + 1, term=term, members=members, previous=self.members)

    def settled(self) -> "Config":
        return msgspec.structs.replace(self, previous=())


def majority(members: tuple[Voter, ...], acks: Set[Voter]) -> bool:
    """Tell whether most of these members have acknowledged."""
    return 2 * sum(voter in acks for voter in members) > len(members)
