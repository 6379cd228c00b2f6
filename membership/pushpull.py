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
    Done,
    FrameError,
    Hello,
    Reply,
    StreamPing,
    decode_frame,
    encode_frame,
)
from membership.records import Digest, RecordTable
from membership.trust import TrustError, TrustStore

RECONCILE_TIMEOUT_S = 5.0
SERVED_AT_ONCE = 32  # memberlist allows 128

log = logging.getLogger(__name__)

FAILURES = (OSError, TimeoutError, asyncio.IncompleteReadError, EnvelopeError, FrameError, TrustError)


class PushPull:
    """`evidence` gives what we know of members, `take_in` receives what the other side sent; both are the node's."""

    def __init__(
        self,
        identity: Identity,
        trust: TrustStore,
        chain: bytes,
        records: RecordTable,
        counters: Counter[str],
        rng: random.Random,
        evidence: Callable[[], list[bytes]],
        take_in: Callable[[list[bytes], list[bytes]], None],
    ) -> None:
        self._identity, self._trust, self._chain = identity, trust, chain
        self._records, self._counters, self._rng = records, counters, rng
        self._evidence, self._take_in = evidence, take_in
        self._serving = 0

    async def exchange(self, host: str, port: int) -> None:
        """One push-pull with whoever answers at this address, if it is of our mesh."""
        async with asyncio.timeout(RECONCILE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                nonce = self._rng.getrandbits(62)
                await self._write(writer, Hello(nonce, self._chain, self._records.digest()))
                sender, reply = await self._read(reader)
                if not isinstance(reply, Reply) or reply.answers != nonce:
                    raise FrameError("an answer to something else")
                self._admit(sender, reply.chain)
                self._take_in(reply.records, reply.evidence)
                await self._write(writer, self._delta(reply.nonce, reply.digest))
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
                    records,
                    self._evidence(),
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

    def _delta(self, answers: int, digest: Digest) -> Delta:
        records = self._records.missing_from(digest, DELTA_BYTES)
        return Delta(self._rng.getrandbits(62), answers, records, self._evidence())

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
