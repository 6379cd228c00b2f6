"""Conversations of the core over TCP: who asks, who answers, what they are worth when the other side is silent or hostile.

Frames are sealed (see `reconcile`). Each conversation has a time in which it must end.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from membership.admission import is_knock
from membership.core import Conversation, Core
from membership.effects import StreamOutcome
from membership.envelope import EnvelopeError
from membership.framing import read_frame, write_frame
from membership.identity import NodeId, short_id
from membership.reconcile import AnyFrame, Done, FrameError, Reached, ReachMe, StreamPing
from membership.trust import TrustError

CONVERSATION_S = 5.0
SERVED_AT_ONCE = 32  # memberlist allows 128
SERVED_TO_ONE = 16  # of those, to one address

log = logging.getLogger(__name__)

FAILURES = (OSError, TimeoutError, asyncio.IncompleteReadError, EnvelopeError, FrameError, TrustError)


class Streams:
    """`reach` tries a UDP ping; `knock` answers somebody who is no member yet."""

    def __init__(
        self,
        core: Core,
        reach: Callable[[NodeId, str, int], Awaitable[bool]],
        knock: Callable[[bytes, str], bytes],
    ) -> None:
        self._core, self._reach, self._knock = core, reach, knock
        self._counters: Counter[str] = core.counters
        self._served: Counter[str] = Counter()

    async def hold(self, conversation: Conversation, host: str, port: int) -> None:
        """Our side of an exchange with whoever is at this address; one of FAILURES if it came to nothing."""
        async with asyncio.timeout(CONVERSATION_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await self._drive(conversation, reader, writer)
            finally:
                writer.close()

    async def ping(self, node: NodeId, host: str, port: int, timeout_s: float) -> StreamOutcome:
        """Whether this node answers over TCP; `refused` if its machine says that nobody listens there."""
        ping = StreamPing(self._core.nonce())
        try:
            async with asyncio.timeout(timeout_s):
                sender, answer = await self._ask(ping, host, port)
        except ConnectionRefusedError:
            return "refused"
        except FAILURES:
            return "silent"
        return "acked" if sender == node and isinstance(answer, Done) and answer.answers == ping.nonce else "silent"

    async def reached(self, as_host: str, as_port: int, host: str, port: int) -> tuple[NodeId, Reached]:
        """Ask the node at `host:port` whether it can reach us as `as_host:as_port`."""
        async with asyncio.timeout(CONVERSATION_S):
            question = ReachMe(self._core.nonce(), as_host, as_port)
            sender, answer = await self._ask(question, host, port)
        if not isinstance(answer, Reached) or answer.answers != question.nonce:
            raise FrameError("an answer to something else")
        return sender, answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = str((writer.get_extra_info("peername") or ("",))[0])
        if self._served.total() >= SERVED_AT_ONCE or self._served[host] >= SERVED_TO_ONE:
            self._counters["refused_busy"] += 1
            writer.close()
            return
        self._served[host] += 1
        try:
            async with asyncio.timeout(CONVERSATION_S):
                await self._answer(host, reader, writer)
        except (EnvelopeError, FrameError):
            self._counters["refused_unsigned"] += 1
        except TrustError as error:
            self._counters["refused_foreign"] += 1
            log.info("refused a node: %s", error)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            self._counters["reconcile_failed"] += 1
        finally:
            self._served[host] -= 1
            if not self._served[host]:
                del self._served[host]
            writer.close()

    async def _answer(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await read_frame(reader)
        if is_knock(first):
            await write_frame(writer, self._knock(first, host))
            return
        sender, frame = self._core.open_frame(first)
        if isinstance(frame, ReachMe):
            await self._write(writer, await self._try_to_reach(sender, frame, host))
            return
        await self._drive(self._core.answer(sender, frame), reader, writer)

    async def _try_to_reach(self, sender: NodeId, asked: ReachMe, seen_host: str) -> Reached:
        """Only for members, and only the member itself is looked for there."""
        if not self._core.is_member(sender):
            raise TrustError(f"{short_id(sender)} is no member, and asks to be reached")
        udp, tcp = await asyncio.gather(
            self._reach(sender, asked.host, asked.port), self.ping(sender, asked.host, asked.port, 1.0)
        )
        return Reached(self._core.nonce(), asked.nonce, udp, tcp, seen_host)

    async def _ask(self, question: AnyFrame, host: str, port: int) -> tuple[NodeId, AnyFrame]:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            await self._write(writer, question)
            return self._core.open_frame(await read_frame(reader))
        finally:
            writer.close()

    async def _drive(
        self, conversation: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            frame = next(conversation)
            while True:
                await self._write(writer, frame)
                frame = conversation.send(self._core.open_frame(await read_frame(reader)))
        except StopIteration as end:
            if end.value is not None:
                await self._write(writer, end.value)
        finally:
            conversation.close()

    async def _write(self, writer: asyncio.StreamWriter, frame: AnyFrame) -> None:
        await write_frame(writer, self._core.seal_frame(frame))
