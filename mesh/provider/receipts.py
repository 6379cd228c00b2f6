"""What an attempt has used of this node: counted while it runs, then told in a receipt that the node signs.

Receipts are kept as they were signed, and are a node's history. Later versions may add fields: who reads ignores what it does
not know.
"""

from collections.abc import Sequence

import msgspec

from cuda_guard.auditor import Held
from cuda_guard.guard import Usage
from membership.envelope import OVERHEAD, EnvelopeError, open_envelope
from membership.identity import ID_BYTES, NodeId

KIND = "receipt"  # of its envelope
MAX_RECEIPT_BYTES = 8192  # sealed, of sixteen devices
SUSPICIOUS = 0.1  # discrepancy beyond NVML's own inaccuracy; ours


class ReceiptError(ValueError):
    """Bytes that are no receipt."""


class DeviceUse(msgspec.Struct, frozen=True):
    """Of one device. `gpu_ns`: its time as the guard measured it by events, and `nvml_ns` as NVML's samples have it; `byte_s`:
    the integral of the memory it was charged with, in byte seconds, and `nvml_byte_s` of what it really held. None: not told."""

    uuid: str
    gpu_ns: int
    byte_s: int
    launches: int
    peak: int
    nvml_ns: int | None = None
    nvml_byte_s: int | None = None

    @property
    def discrepancy(self) -> float | None:
        """How much more of the device's time NVML saw, as a part of what was measured."""
        if self.nvml_ns is None or not self.gpu_ns:
            return None
        return self.nvml_ns / self.gpu_ns - 1


class Receipt(msgspec.Struct, frozen=True):
    """One attempt of a job of this user's on one node. `devices`: what its guard measured, if it had one. `gpu_percent`: what it
    held, in per cent of a GPU; 0 is a slot. `reason`: why it ended, empty while it goes on; `lost_ms`: of its work, what no
    checkpoint had when it had to leave."""

    job: str
    attempt: int
    node: NodeId
    user: str
    from_unix_ms: int
    until_unix_ms: int
    devices: tuple[DeviceUse, ...]
    name: str = ""
    submitter: NodeId = b""
    engine: str = ""
    gpu_percent: int = 0
    reason: str = ""
    lost_ms: int = 0


_decoder = msgspec.msgpack.Decoder(Receipt)


def encode_receipt(receipt: Receipt) -> bytes:
    return msgspec.msgpack.encode(receipt)


def open_receipt(sealed: bytes, mesh_id: bytes) -> Receipt:
    """A receipt that the node it names has signed, in this mesh. ReceiptError for anything else."""
    if len(sealed) > MAX_RECEIPT_BYTES:
        raise ReceiptError("too long for a receipt")
    try:
        signer, payload = open_envelope(sealed, mesh_id, KIND)
        receipt = _decoder.decode(payload)
    except (EnvelopeError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ReceiptError(f"not a receipt: {error}") from error
    if receipt.node != signer or len(signer) != ID_BYTES:
        raise ReceiptError("its node has not signed it")
    return receipt


def own_receipt(sealed: bytes) -> Receipt:
    """One that this node has signed and kept itself; its signature is not checked again."""
    try:
        return _decoder.decode(sealed[OVERHEAD:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ReceiptError(f"not a receipt: {error}") from error


def in_words(devices: Sequence[DeviceUse]) -> str:
    """In a line, for people."""
    told = [
        f"{use.gpu_ns / 1e9:.1f} s of {use.uuid[:12]}, {use.byte_s / 2**30:.1f} GiB s, {use.launches} launches"
        + (f"; NVML differs by {use.discrepancy:+.0%}" if abs(use.discrepancy or 0) > SUSPICIOUS else "")
        for use in devices
    ]
    return "used " + "; ".join(told)


class Tally:
    """Integrals of what a tenant holds, by the trapezoidal rule over looks. Pure."""

    def __init__(self, devices: int, now: float) -> None:
        self._now = now
        self._memory = [0.0] * devices
        self._byte_s = [0.0] * devices
        self._nvml_at = [now] * devices  # when NVML told of its memory last
        self._nvml_memory: list[int | None] = [None] * devices
        self._nvml_byte_s = [0.0] * devices
        self._nvml_s: list[float | None] = [None] * devices

    def advance(self, now: float, usage: Sequence[Usage], held: Sequence[Held | None] = ()) -> None:
        """A look at `now` of a monotonic clock, seconds: what the pages say, and NVML where it was asked."""
        passed, self._now = now - self._now, now
        for place, use in enumerate(usage):
            self._byte_s[place] += passed * (self._memory[place] + use.memory) / 2
            self._memory[place] = use.memory
        for place, has in enumerate(held):
            if has is not None and has.memory is not None:
                mean = ((self._nvml_memory[place] or 0) + has.memory) / 2
                self._nvml_byte_s[place] += (now - self._nvml_at[place]) * mean
                self._nvml_at[place], self._nvml_memory[place] = now, has.memory
            if has is not None and has.busy is not None:
                self._nvml_s[place] = (self._nvml_s[place] or 0.0) + passed * has.busy / 100

    def held_now(self, place: int) -> int | None:
        """Bytes on a device, as NVML told them last; None before it has."""
        return self._nvml_memory[place]

    def uses(self, usage: Sequence[Usage]) -> tuple[DeviceUse, ...]:
        """Up to the last look. What NVML told before it is taken to have been held until then: it cannot be asked about
        processes that are gone."""
        return tuple(
            DeviceUse(
                uuid=use.uuid,
                gpu_ns=round(use.gpu_s * 1e9),
                byte_s=round(self._byte_s[place]),
                launches=use.launches,
                peak=use.peak,
                nvml_ns=_whole(self._nvml_s[place], 1e9),
                nvml_byte_s=None if held is None else round(self._nvml_byte_s[place] + held * (self._now - told)),
            )
            for place, (use, held, told) in enumerate(zip(usage, self._nvml_memory, self._nvml_at, strict=True))
        )


def _whole(value: float | None, unit: float) -> int | None:
    return None if value is None else round(value * unit)
