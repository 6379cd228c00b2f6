"""A TCP conversation of two cores in virtual time, frame by frame; it breaks off when a side dies or the link does."""

from typing import TYPE_CHECKING

from membership.core import Conversation
from membership.envelope import EnvelopeError
from membership.identity import NodeId
from membership.reconcile import FrameError
from membership.trust import TrustError

if TYPE_CHECKING:
    from sim.gossip import GossipNode, GossipWorld

STREAM_TIMEOUT_S = 5.0


class Exchange:
    """One TCP conversation in virtual time."""

    def __init__(
        self, world: "GossipWorld", source: "GossipNode", target: "GossipNode", conversation: Conversation
    ) -> None:
        self.world = world
        self.ends = (source, target)
        self.lives = (source.life, target.life)
        self.talks: list[Conversation | None] = [conversation, None]
        self.begun = world.kernel.now
        self._speak(0, conversation, None)

    def _speak(self, side: int, talk: Conversation, heard: tuple[NodeId, object] | None) -> None:
        """Let one side go on, and carry what it says to the other."""
        me = self.ends[side]
        try:
            frame = next(talk) if heard is None else talk.send(heard)  # type: ignore[arg-type]
        except StopIteration as end:
            self.talks[side] = None
            if end.value is not None:
                self._carry(side, me.core.seal_frame(end.value))
            return
        except (FrameError, TrustError, EnvelopeError):
            self._break()
            return
        self.talks[side] = talk
        self._carry(side, me.core.seal_frame(frame))

    def _carry(self, side: int, data: bytes) -> None:
        me, other = self.ends[side], self.ends[1 - side]
        self.world.bytes_carried += len(data) + 60
        delay = me._network.uniform(0.0005, 0.01) + len(data) / 1e8
        self.world.kernel.post(delay, self._arrive, 1 - side, data, other)

    def _arrive(self, side: int, data: bytes, node: "GossipNode") -> None:
        world = self.world
        alive = all(end.up and end.life == life for end, life in zip(self.ends, self.lives, strict=True))
        linked = world.link(*self.ends) and world.link(*reversed(self.ends))
        if not alive or not linked or node.asleep or world.kernel.now - self.begun > STREAM_TIMEOUT_S:
            self._break()
            return
        if node.still:
            world.kernel.at(node.still_until, self._arrive, side, data, node)
            return
        talk = self.talks[side]
        try:
            sender, frame = node.core.open_frame(data)
            if talk is None and side == 1:
                self._speak(1, node.core.answer(sender, frame), None)
            elif talk is not None:
                self._speak(side, talk, (sender, frame))
        except (FrameError, TrustError, EnvelopeError):
            self._break()

    def _break(self) -> None:
        self.world.broken_conversations += 1
        for talk in self.talks:
            if talk is not None:
                talk.close()
        self.talks = [None, None]
