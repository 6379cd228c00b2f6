"""Receipts: what an attempt used of this node, counted while it runs and signed by the node.

Receipts are kept as they were signed. Later versions may add fields; readers ignore unknown ones.
"""

from collections.abc import Sequence

import msgspec

from cuda_guard.auditor import Measured
from cuda_guard.guard import Usage
from membership.envelope import OVERHEAD, EnvelopeError, open_envelope
from membership.identity import ID_BYTES, NodeId
from membership.malformed import MALFORMED

KIND = "receipt"  # of its envelope
MAX_RECEIPT_BYTES = 16_384  # sealed, with all GPUs that a node can have
SUSPICIOUS = 0.1  # discrepancy beyond NVML's own inaccuracy (own choice)


class ReceiptError(ValueError):
    """The bytes are not a valid receipt."""


class DeviceUse(msgspec.Struct, frozen=True):
    """Use of one device.

    `gpu_ns`: GPU time measured by the guard with events, and `nvml_ns` by NVML's samples; `byte_s`: the integral of charged
    memory in byte seconds, and `nvml_byte_s` of the memory that NVML saw. None: not measured.
    """

    uuid: str
    gpu_ns: int
    byte_s: int
    launches: int
    peak: int
    nvml_ns: int | None = None
    nvml_byte_s: int | None = None

    @property
    def discrepancy(self) -> float | None:
        """Return how much more GPU time NVML saw, relative to the measured time; None if unknown."""
        if self.nvml_ns is None or not self.gpu_ns:
            return None
        return self.nvml_ns / self.gpu_ns - 1


class Receipt(msgspec.Struct, frozen=True):
    """One attempt on one node.

    `devices`: measured by its guard, if it had one. `gpu_percent`: what it held, in per cent of a GPU; 0 is a slot. `reason`: why
    it ended, empty while it runs; `lost_ms`: work that no checkpoint held when it had to leave.
    """

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
    """Open a receipt. ReceiptError unless the node that it names has signed it in this mesh."""
    if len(sealed) > MAX_RECEIPT_BYTES:
        raise ReceiptError("too long for a receipt")
    try:
        signer, payload = open_envelope(sealed, mesh_id, KIND)
        receipt = _decoder.decode(payload)
    except (EnvelopeError, *MALFORMED) as error:
        raise ReceiptError(f"not a receipt: {error}") from error
    if receipt.node != signer or len(signer) != ID_BYTES:
        raise ReceiptError("its node has not signed it")
    return receipt


def own_receipt(sealed: bytes) -> Receipt:
    """Open a receipt that this node signed and kept; the signature is not checked again."""
    try:
        return _decoder.decode(sealed[OVERHEAD:])
    except MALFORMED as error:
        raise ReceiptError(f"not a receipt: {error}") from error


def in_words(devices: Sequence[DeviceUse]) -> str:
    """Return one line of text about the use of devices."""
    parts = [
        f"{use.gpu_ns / 1e9:.1f} s of {use.uuid[:12]}, {use.byte_s / 2**30:.1f} GiB s, {use.launches} launches"
        + (f"; NVML differs by {use.discrepancy:+.0%}" if abs(use.discrepancy or 0) > SUSPICIOUS else "")
        for use in devices
    ]
    return "used " + "; ".join(parts)


class Tally:
    """Integrals of a tenant's use, by the trapezoidal rule over samples. Pure."""

    def __init__(self, devices: int, now: float) -> None:
        self._now = now
        self._memory = [0.0] * devices
        self._byte_s = [0.0] * devices
        self._nvml_at = [now] * devices  # time of NVML's last memory sample
        self._nvml_memory: list[int | None] = [None] * devices
        self._nvml_byte_s = [0.0] * devices
        self._nvml_s: list[float | None] = [None] * devices

    def advance(self, now: float, usage: Sequence[Usage], held: Sequence[Measured | None] = ()) -> None:
        """Add a sample at `now` (monotonic seconds): the guard's pages, and NVML where available."""
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
        """Return NVML's last sample of the bytes on a device; None before the first."""
        return self._nvml_memory[place]

    def uses(self, usage: Sequence[Usage]) -> tuple[DeviceUse, ...]:
        """Return the use up to the last sample.

        NVML's last value is extended to that time, since NVML cannot be asked about processes that are gone.
        """
        return tuple(
            DeviceUse(
                uuid=use.uuid,
                gpu_ns=round(use.gpu_s * 1e9),
                byte_s=round(self._byte_s[place]),
                launches=use.launches,
                peak=use.peak,
                nvml_ns=_whole(self._nvml_s[place], 1e9),
                nvml_byte_s=None if held is None else round(self._nvml_byte_s[place] + held * (self._now - at)),
            )
            for place, (use, held, at) in enumerate(zip(usage, self._nvml_memory, self._nvml_at, strict=True))
        )


def _whole(value: float | None, unit: float) -> int | None:
    return None if value is None else round(value * unit)
