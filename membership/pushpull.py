"""The push-pull over TCP (see `reconcile` for its frames): both ends of one exchange, with every frame verified."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable

from membership.effects import StreamOutcome
from membership.envelope import EnvelopeError, open_envelope, seal
from membership.identity import Identity, NodeId
from membership.reconcile import (
    DELTA_BYTES,
    FRAME_LIMIT,
    AnyFrame,
    Delta,
    Differs,
    Done,
    FrameError,
    Greeting,
    Hello,
    MemberDigest,
    Reply,
    StreamPing,
    decode_frame,
    encode_frame,
)
from membership.records import Digest, RecordTable
from membership.swim import Swim
from membership.trust import TrustError, TrustStore

RECONCILE_TIMEOUT_S = 5.0
SERVED_AT_ONCE = 32  # memberlist allows 128

log = logging.getLogger(__name__)

FAILURES = (OSError, TimeoutError, asyncio.IncompleteReadError, EnvelopeError, FrameError, TrustError)


class PushPull:
    """`core` knows the members, `take_in` receives what the other side sent; both are the node's."""

    def __init__(
        self,
        identity: Identity,
        trust: TrustStore,
        chain: bytes,
        records: RecordTable,
        counters: Counter[str],
        rng: random.Random,
        core: Callable[[], Swim],
        take_in: Callable[[list[bytes], list[bytes]], None],
    ) -> None:
        self._identity, self._trust, self._chain = identity, trust, chain
        self._records, self._counters, self._rng = records, counters, rng
        self._core, self._take_in = core, take_in
        self._serving = 0

    async def exchange(self, host: str, port: int, unless_equal: bool = False) -> None:
        """One push-pull with whoever answers at this address, if it is of our mesh; `unless_equal`: compare roots first."""
        async with asyncio.timeout(RECONCILE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                nonce = self._rng.getrandbits(62)
                if unless_equal:
                    await self._write(writer, Greeting(nonce, self._core().root()))
                    _, answer = await self._read(reader)
                    if isinstance(answer, Done) and answer.answers == nonce:
                        return
                await self._write(writer, Hello(nonce, self._chain, self._records.digest(), self._members()))
                sender, reply = await self._read(reader)
                if not isinstance(reply, Reply) or reply.answers != nonce:
                    raise FrameError("an answer to something else")
                self._admit(sender, reply.chain)
                self._take_in(reply.records, reply.evidence)
                await self._write(writer, self._delta(reply.nonce, reply.digest, reply.members))
                await self._read(reader)
                self._counters["reconciled"] += 1
            finally:
                writer.close()

    async def ping(self, node: NodeId, host: str, port: int, timeout_s: float) -> StreamOutcome:
        """Whether this node answers over TCP; `refused` if its machine says that nobody listens there."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    nonce = self._rng.getrandbits(62)
                    await self._write(writer, StreamPing(nonce))
                    sender, answer = await self._read(reader)
                    return (
                        "acked" if sender == node and isinstance(answer, Done) and answer.answers == nonce else "silent"
                    )
                finally:
                    writer.close()
        except ConnectionRefusedError:
            return "refused"
        except FAILURES:
            return "silent"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._serving >= SERVED_AT_ONCE:
            writer.close()
            return
        self._serving += 1
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT_S):
                sender, hello = await self._read(reader)
                if isinstance(hello, StreamPing):
                    await self._write(writer, Done(0, hello.nonce))
                    return
                if isinstance(hello, Greeting):
                    equal = hello.root == self._core().root() and self._trust.standing(sender, time.time()) is not None
                    await self._write(writer, Done(0, hello.nonce) if equal else Differs(0, hello.nonce))
                    if equal:
                        return
                    sender, hello = await self._read(reader)
                if not isinstance(hello, Hello):
                    raise FrameError("a push-pull starts with Hello")
                self._admit(sender, hello.chain)
                nonce = self._rng.getrandbits(62)
                records = self._records.missing_from(hello.digest, DELTA_BYTES)
                reply = Reply(
                    nonce,
                    hello.nonce,
                    self._chain,
                    self._records.digest(),
                    self._members(),
                    records,
                    self._core().evidence_missing_from(hello.members, boottime()),
                )
                await self._write(writer, reply)
                again, delta = await self._read(reader)
                if again != sender or not isinstance(delta, Delta) or delta.answers != nonce:
                    self._counters["refused_replayed"] += 1
                    raise FrameError("an answer to something else")
                self._take_in(delta.records, delta.evidence)
                await self._write(writer, Done(0, delta.nonce))
        except (EnvelopeError, FrameError):
            self._counters["refused_unsigned"] += 1
        except TrustError as error:
            self._counters["refused_foreign"] += 1
            log.info("refused a node: %s", error)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            self._counters["reconcile_failed"] += 1
        finally:
            self._serving -= 1
            writer.close()

    def _admit(self, sender: NodeId, chain: bytes) -> None:
        if self._trust.admit_chain(chain, time.time()).node_id != sender:
            raise TrustError("a node showed the certificate of another one")

    def _members(self) -> MemberDigest:
        return self._core().digest(boottime())

    def _delta(self, answers: int, digest: Digest, members: MemberDigest) -> Delta:
        records = self._records.missing_from(digest, DELTA_BYTES)
        evidence = self._core().evidence_missing_from(members, boottime())
        return Delta(self._rng.getrandbits(62), answers, records, evidence)

    async def _write(self, writer: asyncio.StreamWriter, frame: AnyFrame) -> None:
        data = seal(self._identity, self._trust.mesh_id, "reconcile", encode_frame(frame))
        writer.write(len(data).to_bytes(4, "big") + data)
        await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[NodeId, AnyFrame]:
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > FRAME_LIMIT:
            raise FrameError(f"a frame of {length} bytes is over the limit")
        data = await reader.readexactly(length)
        sender, payload = open_envelope(data, self._trust.mesh_id, "reconcile")
        return sender, decode_frame(payload)


def boottime() -> float:
    """Seconds of CLOCK_BOOTTIME: it counts while the machine sleeps, so that a wake-up is seen as one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
