"""Receipts: what goes into them, and what is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_guard.auditor import Measured
from cuda_guard.guard import Usage
from membership.envelope import seal
from membership.identity import Identity
from mesh.gpus.receipts import (
    KIND,
    MAX_RECEIPT_BYTES,
    DeviceUse,
    Receipt,
    ReceiptError,
    Tally,
    encode_receipt,
    in_words,
    open_receipt,
)
from placement.advert import MAX_GPUS

MESH = b"m" * 32
NODE, OTHER = Identity(b"n" * 32), Identity(b"o" * 32)
GIB = 1 << 30
USE = DeviceUse("GPU-0123456789", 20_000_000_000, 7 * GIB, 12, GIB, 26_000_000_000, 8 * GIB)
RECEIPT = Receipt("j" * 26, 2, NODE.node_id, "ada", 1000, 3000, (USE,))


def sealed(receipt: Receipt, by: Identity = NODE, mesh: bytes = MESH, kind: str = KIND) -> bytes:
    return seal(by, mesh, kind, encode_receipt(receipt))


def test_receipt_round_trips_for_its_node_only() -> None:
    assert open_receipt(sealed(RECEIPT), MESH) == RECEIPT
    for wrong in (sealed(RECEIPT, OTHER), sealed(RECEIPT, mesh=b"x" * 32), sealed(RECEIPT, kind="event")):
        with pytest.raises(ReceiptError):
            open_receipt(wrong, MESH)


def test_receipt_fits_all_gpus_of_a_node() -> None:
    most = DeviceUse("GPU-" + "f" * 36, *([2**63 - 1] * 6))
    full = Receipt("j" * 26, 2**31, NODE.node_id, "u" * 64, 2**63 - 1, 2**63 - 1, (most,) * MAX_GPUS)
    assert open_receipt(sealed(full), MESH) == full
    with pytest.raises(ReceiptError, match="too long"):
        open_receipt(bytes(MAX_RECEIPT_BYTES + 1), MESH)


@given(st.binary(max_size=400))
def test_receipt_decoder_accepts_or_raises(data: bytes) -> None:
    for hostile in (data, seal(NODE, MESH, KIND, data)):
        with pytest.raises(ReceiptError):
            open_receipt(hostile, MESH)


@given(st.data())
def test_altered_receipt_is_refused(data: st.DataObject) -> None:
    good = sealed(RECEIPT)
    at = data.draw(st.integers(0, len(good) - 1))
    changed = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    with pytest.raises(ReceiptError):
        open_receipt(changed, MESH)


def test_large_discrepancy_is_named() -> None:
    assert in_words(RECEIPT.devices) == "used 20.0 s of GPU-01234567, 7.0 GiB s, 12 launches; NVML differs by +30%"
    near = DeviceUse("GPU-0", 10**9, 0, 1, 0, 1_050_000_000)
    unknown = (DeviceUse("GPU-1", 0, 0, 0, 0, 5), DeviceUse("GPU-2", 1, 0, 0, 0))
    assert near.discrepancy == pytest.approx(0.05) and "NVML" not in in_words((near, *unknown))


def usage(memory: int, gpu_s: float = 0.0) -> tuple[Usage, ...]:
    return (Usage("GPU-1", gpu_s, 3, memory, memory, 0, 1),)


def test_tally_integrates_uneven_samples() -> None:
    tally = Tally(1, 10.0)
    tally.advance(11.0, usage(0), (Measured(0, 50.0),))
    tally.advance(13.0, usage(4 * GIB), (Measured(5 * GIB, 100.0),))
    tally.advance(14.0, usage(4 * GIB), (None,))
    tally.advance(14.5, usage(2 * GIB))
    (use,) = tally.uses(usage(2 * GIB, 2.25))
    assert (use.gpu_ns, use.byte_s, use.launches, use.peak) == (2_250_000_000, int(9.5 * GIB), 3, 2 * GIB)
    assert (use.nvml_ns, use.nvml_byte_s) == (2_500_000_000, int(12.5 * GIB)), "its last figure until the end"
    assert tally.held_now(0) == 5 * GIB


def test_tally_bridges_missing_nvml_samples() -> None:
    tally = Tally(1, 0.0)
    tally.advance(1.0, usage(GIB), (Measured(GIB, None),))
    tally.advance(2.0, usage(GIB), (Measured(None, None),))
    tally.advance(3.0, usage(GIB), (Measured(3 * GIB, None),))
    (use,) = tally.uses(usage(GIB))
    assert use.nvml_byte_s == int(4.5 * GIB)


def test_tally_without_nvml_has_no_nvml_values() -> None:
    tally = Tally(1, 0.0)
    tally.advance(1.0, usage(GIB), (Measured(None, None),))
    (use,) = tally.uses(usage(GIB))
    assert (use.byte_s, use.nvml_ns, use.nvml_byte_s, use.discrepancy) == (GIB // 2, None, None, None)
    assert tally.held_now(0) is None


@given(st.lists(st.tuples(st.floats(0.001, 10), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_tally_is_bounded_by_peak(looks: list[tuple[float, int]]) -> None:
    tally, now = Tally(1, 0.0), 0.0
    for passed, memory in looks:
        now += passed
        tally.advance(now, usage(memory))
    (use,) = tally.uses(usage(0))
    assert 0 <= use.byte_s <= now * max(memory for _, memory in looks) + 1
