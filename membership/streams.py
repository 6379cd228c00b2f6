"""TCP streams between nodes: run the core's exchanges, answer those of others, and contain silent or hostile peers.

Each frame is sealed (see `reconcile`). Each exchange has a time limit. A connection is a stranger's (see `listener`) until a
member has sealed its first frame: strangers take no places of members, and few bytes a second of one address are read.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from membership.addresses import address_group
from membership.admission import is_join_request
from membership.core import TOLD_EVERY_S, Core, StreamExchange
from membership.effects import StreamOutcome
from membership.envelope import OVERHEAD, EnvelopeError, Recent
from membership.framing import connected, read_frame, write_frame
from membership.identity import NodeId, short_id
from membership.listener import Strangers
from membership.ratelimit import TokenBuckets
from membership.reconcile import FRAME_LIMIT, AnyFrame, Done, FrameError, Reached, ReachMe, RelayMe, StreamPing
from membership.relay import Relay
from membership.trust import TrustError

EXCHANGE_TIMEOUT_S = 5.0
PACKET_TIMEOUT_S = 1.0  # of a packet and its answers: one probe interval
PACKET = b"P"  # before a packet in a frame; alone, it confirms that the packet was accepted
MAX_ANSWERS = 8  # to a packet: an ack, or a nack and what it caused
MAX_SERVED = 32  # of members, and as many of strangers; memberlist allows 128
MAX_SERVED_PER_HOST = 16
STRANGER_BYTES_S = 64 * 1024  # from one address, after 4 MiB at once: to verify those takes 0.1 s (own measurement)
MEMBER_BYTES_S = 1024 * 1024  # after four of the largest frames; 500 nodes with 10,000 jobs fit into one (own choice)
REMEMBERED = 8192  # first frames of members, as packets
FRAME_COST_BYTES = 2 * 1024  # of the smallest frame: its signature, its log line (own choice)

log = logging.getLogger(__name__)

FAILURES = (OSError, TimeoutError, asyncio.IncompleteReadError, EnvelopeError, FrameError, TrustError)


class Busy(Exception):
    """All places for streams of members are taken."""


class Incoming:
    """The frames of one connection. They count against its address, and against the member that has signed one of them."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        group: str,
        strangers: TokenBuckets,
        members: TokenBuckets,
        counters: Counter[str],
    ) -> None:
        self._reader, self._members, self._counters = reader, members, counters
        self._buckets = strangers
        self._source: str | NodeId = group
        self._taken = 0

    async def read(self) -> bytes:
        return await read_frame(self._reader, take=self._take)

    def _take(self, length: int) -> bool:
        cost = max(length, FRAME_COST_BYTES)
        if not self._buckets.allow(self._source, asyncio.get_running_loop().time(), cost):
            self._counters["refused_flood"] += 1
            return False
        self._taken += cost
        return True

    def recognize(self, member: NodeId) -> None:
        """Count the frames against this member instead. FrameError if it has sent too many."""
        if self._source == member:
            return
        strangers, group, taken = self._buckets, self._source, self._taken
        self._buckets, self._source, self._taken = self._members, member, 0
        if not self._take(taken):
            raise FrameError(f"{short_id(member)} sends more than a member may")
        strangers.give_back(group, taken)

    def forgive(self) -> None:
        """Count nothing of what has come so far."""
        self._buckets.give_back(self._source, self._taken)


class Streams:
    """`reach` tries a UDP ping; `answer_join` answers a join request of a node that is no member yet; `relay` serves members."""

    def __init__(
        self,
        core: Core,
        reach: Callable[[NodeId, str, int], Awaitable[bool]],
        answer_join: Callable[[bytes, str], bytes],
        relay: Relay,
    ) -> None:
        self._core, self._reach, self._answer_join, self._relay = core, reach, answer_join, relay
        self._counters: Counter[str] = core.counters
        self._strangers = Strangers(MAX_SERVED, MAX_SERVED_PER_HOST)
        self._members: dict[asyncio.Task[None], str] = {}  # streams of members, and their hosts
        self._buckets = TokenBuckets(STRANGER_BYTES_S, FRAME_LIMIT)
        self._of_members = TokenBuckets(MEMBER_BYTES_S, 4 * FRAME_LIMIT)
        self._begun = Recent(REMEMBERED)
        self._refused, self._tell_at = 0, 0.0

    async def run(self, exchange: StreamExchange, host: str, port: int) -> None:
        """Run our side of an exchange with the node at this address; one of FAILURES if it fails."""
        async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
            async with connected(host, port) as (reader, writer):
                await self._drive(exchange, partial(read_frame, reader), writer)

    async def ping(self, node: NodeId, host: str, port: int, timeout_s: float) -> StreamOutcome:
        """Ping a node over TCP. `refused`: its machine answers that no process listens on the port."""
        ping = StreamPing(self._core.nonce())
        try:
            async with asyncio.timeout(timeout_s):
                sender, answer = await self._ask(ping, host, port)
        except ConnectionRefusedError:
            return "refused"
        except FAILURES:
            return "silent"
        return "acked" if sender == node and isinstance(answer, Done) and answer.answers == ping.nonce else "silent"

    async def send_packet(self, data: bytes, host: str, port: int) -> None:
        """Send a packet to the node at this address and handle its answers; one of FAILURES if it does not accept it."""
        limit = len(PACKET) + self._core.packet_bytes
        async with asyncio.timeout(PACKET_TIMEOUT_S):
            async with connected(host, port) as (reader, writer):
                await write_frame(writer, PACKET + data)
                for _ in range(MAX_ANSWERS):
                    answer = await read_frame(reader, limit)
                    if answer == PACKET:
                        return
                    self._core.on_stream_packet(answer.removeprefix(PACKET), host)
                raise FrameError("too many answers to a packet")

    async def ask_reached(self, node: NodeId, own_host: str, own_port: int, host: str, port: int) -> Reached:
        """Ask a node at `host:port` whether it reaches this node at `own_host:own_port`."""
        async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
            question = ReachMe(self._core.nonce(), own_host, own_port)
            sender, answer = await self._ask(question, host, port)
        if sender != node or not isinstance(answer, Reached) or answer.answers != question.nonce:
            raise FrameError("the answer does not match the question")
        return answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, group: str) -> None:
        """Answer one exchange that another node begins; failures are counted, not raised."""
        host = str((writer.get_extra_info("peername") or ("",))[0])
        if address_group(host) != group:
            host = group  # a relay is between
        ended = self._strangers.make_place(group)
        self._counters["refused_busy"] += 1 if ended is None else ended
        if ended is None:
            writer.close()
            return
        self._strangers.add(_this_task(), group)
        relayed = False
        try:
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                incoming = Incoming(reader, group, self._buckets, self._of_members, self._counters)
                asks = await self._answer(host, incoming, writer)
            if asks is not None:
                self._relay.lend(*asks, reader, writer)
                relayed = True
        except (EnvelopeError, FrameError):
            self._counters["refused_unsigned"] += 1
        except TrustError as error:
            self._counters["refused_foreign"] += 1
            self._tell_refusal(error)
        except Busy:
            self._counters["refused_busy"] += 1
        except asyncio.CancelledError:  # not raised: asyncio 3.11 reports a cancelled stream as an error
            log.debug("the stream from %s made place for another", host)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            self._counters["reconcile_failed"] += 1
        finally:
            self._strangers.recognize(_this_task())
            self._members.pop(_this_task(), None)
            if not relayed:
                writer.close()

    def _tell_refusal(self, error: TrustError) -> None:
        """Log refused nodes now and then: anybody on the network can cause them."""
        self._refused += 1
        now = asyncio.get_running_loop().time()
        if now >= self._tell_at:
            log.info("refused %d connections since this was last said; of the last one: %s", self._refused, error)
            self._refused, self._tell_at = 0, now + TOLD_EVERY_S

    async def _answer(
        self, host: str, incoming: Incoming, writer: asyncio.StreamWriter
    ) -> tuple[NodeId, RelayMe] | None:
        """Answer an exchange; return the member and its question if it asks for a relay, which keeps the stream."""
        first = await incoming.read()
        if is_join_request(first):
            await write_frame(writer, self._answer_join(first, host))
            return None
        if first.startswith(PACKET):
            answers = self._core.on_stream_packet(first.removeprefix(PACKET), host)
            if answers is not None:
                incoming.forgive()  # the core counts packets
            for answer in [] if answers is None else [*answers[: MAX_ANSWERS - 1], b""]:
                await write_frame(writer, PACKET + answer)
            return None
        sender, frame = self._core.open_frame(first)
        if self._core.is_member(sender):
            if self._begun.seen_before(first[:OVERHEAD]):
                self._counters["refused_replayed"] += 1
                raise FrameError("a copy of an earlier frame")
            incoming.recognize(sender)
            self._take_place(address_group(host))
        elif isinstance(frame, ReachMe | RelayMe):
            raise TrustError(f"{short_id(sender)} asks for a service and is not a member")
        if isinstance(frame, ReachMe):
            await self._write(writer, await self._try_to_reach(sender, frame, host))
            return None
        if isinstance(frame, RelayMe):
            return sender, await self._proven(sender, frame, incoming, writer)
        await self._drive(self._core.answer(sender, frame), incoming.read, writer)
        if self._core.is_member(sender):
            incoming.recognize(sender)  # it has shown its certificate
        return None

    async def _proven(
        self, sender: NodeId, question: RelayMe, incoming: Incoming, writer: asyncio.StreamWriter
    ) -> RelayMe:
        """Have the sender ask this node again with a fresh nonce, since a question alone may be a copy. FrameError."""
        challenge = Done(self._core.nonce(), question.nonce)
        await self._write(writer, challenge)
        other, again = self._core.open_frame(await incoming.read())
        wanted = self._core.me, challenge.nonce
        if other != sender or not isinstance(again, RelayMe) or (again.relay, again.answers) != wanted:
            self._counters["refused_replayed"] += 1
            raise FrameError("the answer does not match the question")
        return again

    def _take_place(self, group: str) -> None:
        """Give this task, which serves a member, a place that strangers leave it; Busy if there is none."""
        if len(self._members) >= MAX_SERVED or list(self._members.values()).count(group) >= MAX_SERVED_PER_HOST:
            raise Busy
        self._strangers.recognize(_this_task())
        self._members[_this_task()] = group

    async def _try_to_reach(self, sender: NodeId, question: ReachMe, seen_host: str) -> Reached:
        """Ping the sender, a member, at the address it names."""
        udp, tcp = await asyncio.gather(
            self._reach(sender, question.host, question.port), self.ping(sender, question.host, question.port, 1.0)
        )
        return Reached(self._core.nonce(), question.nonce, udp, tcp, seen_host)

    async def _ask(self, question: AnyFrame, host: str, port: int) -> tuple[NodeId, AnyFrame]:
        async with connected(host, port) as (reader, writer):
            await self._write(writer, question)
            return self._core.open_frame(await read_frame(reader))

    async def _drive(
        self, exchange: StreamExchange, read: Callable[[], Awaitable[bytes]], writer: asyncio.StreamWriter
    ) -> None:
        try:
            frame = next(exchange)
            while True:
                if frame is None:
                    await asyncio.sleep(0)
                    frame = next(exchange)
                    continue
                await self._write(writer, frame)
                frame = exchange.send(self._core.open_frame(await read()))
        except StopIteration as end:
            if end.value is not None:
                await self._write(writer, end.value)
        finally:
            exchange.close()

    async def _write(self, writer: asyncio.StreamWriter, frame: AnyFrame) -> None:
        await write_frame(writer, self._core.seal_frame(frame))


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
