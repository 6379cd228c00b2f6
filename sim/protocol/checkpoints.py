"""Checkpoints of a simulated node: saves to its own store, copies to peers by the production plan, fetches before a start.

Peers are called directly: a call needs both directions of the link and a process that answers, whatever gossip knows.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b

from ckptstore.errors import StoreError
from ckptstore.replication import CopyTo, Replication, Settled
from membership.events import MemberView
from mesh.checkpoints.replica_policy import ReplicaPolicy, replica_policy_of
from mesh.consensus.participant import Participant
from mesh.model.record import Commit
from placement.zones import Hierarchy
from sim.protocol.membership import MembershipNode
from sim.protocol.memory_store import MemoryStore, Saved

PART_BYTES = 1 << 20
TIMEOUT_S = 3.0  # of a call that nobody answers


def content(job: bytes, step: int) -> dict[bytes, int]:
    """Return the chunks of a job's state after this step: one that never changes, one for ten steps, and its own."""
    names = (b"%b" % job, b"%b/%d" % (job, step // 10), b"%b/%d/last" % (job, step))
    return {blake2b(name, digest_size=32).digest(): PART_BYTES for name in names}


class StoringNode(MembershipNode):
    """A node with a checkpoint store on its disk."""

    participant: Participant

    @property
    def store(self) -> MemoryStore:
        raise NotImplementedError

    def hierarchy(self) -> Hierarchy:
        raise NotImplementedError

    def replica_policy(self, job: bytes) -> ReplicaPolicy:
        members = [
            MemberView(member.node, "", "sim", (), member.state, 0.0, member.draining)
            for member in self.core.swim.table.all()
        ]
        return replica_policy_of(job, self.id, self.participant.runners.get(job), members, self.hierarchy())

    def peer(self, node: bytes) -> "StoringNode | None":
        """Return a peer that answers calls now, else None."""
        other = self.world.by_id.get(node)
        if not isinstance(other, StoringNode) or not other.up or other.stalled:
            return None
        return other if self.world.link(self, other) and self.world.link(other, self) else None

    def replicate(self, saved: Saved, policy: ReplicaPolicy, want: int, settled: Callable[[Settled], None]) -> None:
        """Copy a checkpoint to `want` peers; `settled` is called once."""
        plan = Replication((), policy.fallback, want, policy.gone)

        def act(actions: Sequence[CopyTo | Settled]) -> None:
            for action in actions:
                if isinstance(action, Settled):
                    settled(action)
                    return
                took_s = self.world.streams.get(self.name, "copy").uniform(0.02, 0.6)
                self.after(took_s if self.peer(action.peer) else TIMEOUT_S, copied, action.peer)

        def copied(peer: bytes) -> None:
            other = self.peer(peer)
            if other is None:
                act(plan.retry_elsewhere(peer, "it does not answer"))
                return
            try:
                now = self.unix()
                other.store.receive(self.store.sizes(other.store.missing(saved.chunks, now)), now)
                other.store.accept_manifest(saved, "raise")
            except StoreError as error:
                act(plan.retry_elsewhere(peer, str(error)))
            else:
                act(plan.durable(peer))

        act(plan.start())

    def fetch(self, commit: Commit, others: Sequence[bytes]) -> int | None:
        """Bring a checkpoint here; return its step, or None if no peer that answers has it whole."""
        if self.store.complete(commit.manifest):
            return self.store.manifest(commit.manifest).step
        for node in dict.fromkeys([*commit.holders, *others]):
            other = self.peer(node)
            if other is None or not other.store.complete(commit.manifest):
                continue
            saved = other.store.manifest(commit.manifest)
            self.store.receive(other.store.sizes(self.store.missing(saved.chunks)), self.unix())
            self.store.accept_manifest(saved, "ignore")
            return saved.step
        return None
