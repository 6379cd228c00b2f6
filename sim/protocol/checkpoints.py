"""Checkpoints of a simulated node: saves to its own store, copies to peers by the production plan, fetches before a start.

Peers are called directly: a call needs both directions of the link, an open port and a process that answers, whatever gossip
knows. Some calls break off: what arrived whole is kept.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from hashlib import blake2b
from typing import Literal

import msgspec

from ckptstore.errors import MissingChunks, StoreError
from ckptstore.manifest import Kind
from ckptstore.replication import CopyTo, Replication, Settled
from membership.events import MemberView
from mesh.checkpoints.replica_policy import ReplicaPolicy, replica_policy_of
from mesh.checkpoints.writer import RETRY_EVERY_S, RETRY_FOR_S
from mesh.consensus.participant import Participant
from mesh.consensus.reports import GuestFailed
from mesh.model.record import JobRecord
from placement.zones import Hierarchy
from sim.protocol.fakes import USER_NAME
from sim.protocol.membership import MembershipNode
from sim.protocol.memory_store import MemoryStore, Saved

PART_BYTES = 1 << 20
TIMEOUT_S = 3.0  # of a call that nobody answers
ROOM_PARTS = 3  # at most, that still fit into a store with a small quota


def content(job: bytes, step: int) -> dict[bytes, int]:
    """Return the chunks of a job's state after this step: one that never changes, one for ten steps, and its own."""
    names = (b"%b" % job, b"%b/%d" % (job, step // 10), b"%b/%d/last" % (job, step))
    return {blake2b(name, digest_size=32).digest(): PART_BYTES for name in names}


def result(job: bytes) -> dict[bytes, int]:
    """Return the chunks of a job's result."""
    return {blake2b(b"%b/result" % job, digest_size=32).digest(): PART_BYTES}


class FetchProblem(msgspec.Struct, frozen=True):
    """Why a checkpoint is not here: `unsure` are the nodes that may have it all the same; the others answered that they lack it.
    `own`: this node's store could not take it.
    """

    unsure: Set[bytes] = frozenset()
    own: str = ""


class StoringNode(MembershipNode):
    """A node with a checkpoint store on its disk."""

    participant: Participant

    @property
    def store(self) -> MemoryStore:
        raise NotImplementedError

    @property
    def takes_calls(self) -> bool:
        raise NotImplementedError

    def hierarchy(self) -> Hierarchy:
        raise NotImplementedError

    def limit_store(self, full: bool, for_s: float) -> None:
        """Let the store have no room, or little, for a while."""
        store = self.store
        if full:
            store.full = True
        else:
            room = self.world.streams.get(self.name, "quota").randint(0, ROOM_PARTS)
            store.quota_bytes = store.stored_bytes() + room * PART_BYTES
        self.world.kernel.after(for_s, store.free)

    def replica_policy(self, job: bytes) -> ReplicaPolicy:
        members = [
            MemberView(member.node, "", USER_NAME, (), member.state, 0.0, member.draining)
            for member in self.core.swim.table.all()
        ]
        return replica_policy_of(job, self.id, self.participant.runners.get(job), members, self.hierarchy())

    # --- calls

    def peer(self, node: bytes) -> "StoringNode | None":
        """Return a peer that answers calls now, else None."""
        other = self.world.by_id.get(node)
        if not isinstance(other, StoringNode) or not other.up or other.stalled or not other.takes_calls:
            return None
        if node in self.core.trust.revoked or self.id in other.core.trust.revoked:
            return None
        return other if self.world.link(self, other) and self.world.link(other, self) else None

    def call(self, node: bytes, then: Callable[[bytes, "StoringNode | None"], None]) -> None:
        """Call a peer; `then` gets it, or None if nobody answers."""

        def over() -> None:
            then(node, self.peer(node))

        took_s = self.world.streams.get(self.name, "copy").uniform(0.02, 0.6)
        self.after(took_s if self.peer(node) else TIMEOUT_S, over)

    def _arriving(self, pieces: int) -> int:
        """Return how many of so many pieces arrive before the connection breaks; all of them if it does not."""
        share, rng = self.world.faults.broken_calls, self.world.streams.get(self.name, "broken calls")
        if not share or self.world.healed or rng.random() >= share:
            return pieces
        return rng.randint(0, pieces - 1)

    # --- copies

    def save(
        self,
        job: bytes,
        chunks: Mapping[bytes, int],
        seq: int,
        parent: bytes | None,
        policy: ReplicaPolicy,
        kind: Kind,
        step: int,
    ) -> Saved:
        """Save a state to this node's own store."""
        return self.store.save(
            chunks,
            job=job,
            config=policy.config,
            term=policy.term,
            seq=seq,
            parent=parent,
            kind=kind,
            step=step,
            maker=self.id,
            now_unix=self.unix(),
        )

    def replicate(
        self, saved: Saved, policy: ReplicaPolicy, able: Iterable[bytes], want: int, settled: Callable[[Settled], None]
    ) -> None:
        """Copy a checkpoint to `want` peers of those that are able; `settled` is called once."""
        plan = Replication((), tuple(able), want, policy.gone)

        def act(actions: Sequence[CopyTo | Settled]) -> None:
            for action in actions:
                if isinstance(action, Settled):
                    settled(action)
                    return
                self.call(action.peer, called)

        def called(peer: bytes, other: StoringNode | None) -> None:
            problem = "it does not answer" if other is None else self._copy(saved, other)
            act(plan.retry_elsewhere(peer, problem) if problem else plan.durable(peer))

        act(plan.start())

    def _copy(self, saved: Saved, other: "StoringNode") -> str:
        """Send what another store lacks, then the manifest; return what went wrong."""
        now = other.unix()
        try:
            lacking = other.store.missing(saved.chunks, now)
            pieces = len(lacking) + 2  # the chunks, the manifest, and the answer
            arriving = self._arriving(pieces)
            other.store.receive(self.store.sizes(lacking[:arriving]), now)
            if arriving > len(lacking):
                other.store.accept_manifest(saved, "raise")
        except StoreError as error:
            return str(error)
        return "" if arriving == pieces else "the connection broke"

    def replicate_or_retry(
        self, job: bytes, saved: Saved, want: int, copied: Callable[[tuple[bytes, ...], str], None]
    ) -> None:
        """Copy a checkpoint as the production writer does; `copied` gets the holders, and why it must not be committed."""
        give_up_s = self.boot() + RETRY_FOR_S

        def start() -> None:
            policy = self.replica_policy(job)

            def settled(copies: Settled) -> None:
                refusal = policy.refusal(copies.holders, want, copies.short)
                if refusal and self.boot() < give_up_s:
                    self.after(RETRY_EVERY_S, start)
                else:
                    copied(copies.holders, refusal)

            self.replicate(saved, policy, policy.fallback, want, settled)

        start()

    # --- fetches

    def fetch(self, manifest: bytes, sources: Sequence[bytes], fetched: Callable[[FetchProblem | None], None]) -> None:
        """Bring a checkpoint here: its manifest from the first source that has it, its chunks from any."""
        wanted = self.store.manifest(manifest) if self.store.has(manifest) else None
        asked: list[bytes] = []
        left = list(dict.fromkeys(sources))
        unsure: set[bytes] = set()

        def ask() -> None:
            if self.store.complete(manifest):
                fetched(None)
            elif left:
                self.call(left.pop(0), called)
            else:
                fetched(FetchProblem(frozenset(unsure)))

        def called(node: bytes, other: StoringNode | None) -> None:
            nonlocal wanted
            if other is None:
                unsure.add(node)
            elif wanted is None and other.store.has(manifest):
                wanted = other.store.manifest(manifest)
                left[:] = [node, *asked, *left]  # each may have chunks
            elif wanted is None:
                asked.append(node)
            elif problem := self._pull(wanted, node, other, unsure):
                fetched(problem)
                return
            ask()

        ask()

    def _pull(self, wanted: Saved, node: bytes, other: "StoringNode", unsure: set[bytes]) -> FetchProblem | None:
        """Take from a source what is missing here; add it to `unsure` if it fails with that."""
        missing = self.store.missing(wanted.chunks, self.unix())
        try:
            offered = other.store.sizes(missing)
        except MissingChunks:
            return None
        arriving = self._arriving(len(missing) + 1)
        try:
            self.store.receive({identity: offered[identity] for identity in missing[:arriving]}, self.unix())
            if arriving > len(missing):
                self.store.accept_manifest(wanted, "ignore")
            else:
                unsure.add(node)
        except StoreError as error:
            return FetchProblem(own=str(error))
        return None

    def bring(self, job: bytes, record: JobRecord, brought: Callable[[GuestFailed | None], None]) -> None:
        """Bring a job's last checkpoint here; if that fails, its predecessor, and report this as production does."""
        commit, before, policy = record.commit, record.predecessor, self.replica_policy(job)
        if commit is None:
            brought(None)
            return

        def fetched(problem: FetchProblem | None) -> None:
            if problem is None:
                brought(None)
            elif problem.own:
                brought(GuestFailed(problem.own, elsewhere=True))
            elif before is None:
                fail(problem, False)
            else:
                self.fetch(before.manifest, policy.sources(record, before), lambda also: fail(problem, also is None))

        def fail(problem: FetchProblem, predecessor_here: bool) -> None:
            unfetched: Literal["away", "lost"] = "away" if problem.unsure else "lost"
            brought(GuestFailed("no node gave it", True, unfetched=unfetched, predecessor_here=predecessor_here))

        self.fetch(commit.manifest, policy.sources(record, commit), fetched)
