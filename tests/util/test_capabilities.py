"""Capabilities: which ones a process has, and that programs get those that are lent for as long as they are."""

import pytest

from mesh.util import capabilities
from mesh.util.capabilities import BPF, NET_ADMIN, SYS_ADMIN

AMBIENT = 47  # PR_CAP_AMBIENT of prctl(2); its operations are 2 raise, 3 lower, 4 clear all


def test_effective_capabilities_of_a_process_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "CapInh:\t0000000000000000",
        "CapPrm:\t000001ffffffffff",
        f"CapEff:\t{1 << 12 | 1 << 39:016x}",
        "CapBnd:\t0",
    ]
    asked: list[str] = []
    monkeypatch.setattr(capabilities, "lines_of", lambda path: asked.append(path) or lines)
    assert [capabilities.has(capability) for capability in (NET_ADMIN, SYS_ADMIN, BPF)] == [True, False, True]
    assert capabilities.has(NET_ADMIN, 7) and set(asked) == {"/proc/self/status", "/proc/7/status"}


def test_capabilities_are_lent_to_programs_of_one_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ambient, calls = {BPF}, []

    class Kernel:
        def prctl(self, option: int, operation: int, capability: int, *rest: int) -> int:
            calls.append((option, rest))
            if operation == 4:
                ambient.clear()
            (ambient.add if operation == 2 else ambient.discard)(capability)
            return 0

    monkeypatch.setattr(capabilities, "_libc", Kernel())
    capabilities.keep()
    assert not ambient
    with pytest.raises(RuntimeError), capabilities.lent(NET_ADMIN, SYS_ADMIN):
        assert ambient == {12, 21}
        raise RuntimeError
    assert not ambient and set(calls) == {(AMBIENT, (0, 0))}
