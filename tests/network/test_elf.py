"""Objects for BPF: read as clang writes them, and refused in words when they are something else."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.network import bpf, elf
from mesh.network.edge import lacking_privileges, left_at
from mesh.network.elf import Code, ObjectError, read_object
from mesh.network.program import BuildError, Programs, compile_into, compile_source, object_file
from tests.descriptors import descriptors

MOV, EXIT = struct.pack("<BBhi", 0xB7, 0, 0, 0), struct.pack("<BBhi", 0x95, 0, 0, 0)
LOAD = struct.pack("<BBhi", 0x18, 1, 0, 0) + bytes(8)


@pytest.fixture(scope="module")
def ours() -> bytes:
    return object_file().read_bytes()


@pytest.mark.bpf
def test_object_has_two_programs_with_shared_maps(ours: bytes) -> None:
    found = read_object(ours)
    assert set(found.programs) == {"tc/guest", "tc/device"} and found.terms == "Apache-2.0"
    for code in found.programs.values():
        assert {name for _, name in code.maps} == {"cut", "guests"}
        with pytest.raises(ObjectError, match="which is not a map"):
            code.with_maps({"cut": 3})


@pytest.mark.bpf
@given(data=st.data())
def test_damaged_object_is_read_or_refused(ours: bytes, data: st.DataObject) -> None:
    damaged = bytearray(ours[: data.draw(st.integers(0, len(ours)))])
    for at, value in data.draw(st.dictionaries(st.integers(0, len(ours)), st.integers(0, 255), max_size=8)).items():
        if at < len(damaged):
            damaged[at] = value
    try:
        found = read_object(bytes(damaged))
        for code in found.programs.values():
            code.with_maps({"cut": 3, "guests": 4})
    except ObjectError:
        pass


@pytest.mark.bpf
def test_object_for_another_machine_or_cut_within_an_instruction_is_refused(
    ours: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = bytearray(ours)
    other[18:20] = (62).to_bytes(2, "little")  # x86-64
    with pytest.raises(ObjectError, match="not an object for BPF"):
        read_object(bytes(other))
    monkeypatch.setattr(elf, "INSTRUCTION_BYTES", 7)
    with pytest.raises(ObjectError, match="ends within an instruction"):
        read_object(ours)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ObjectError):
        read_object(data)
    with pytest.raises(ObjectError):
        read_object(b"\x7fELF\x02\x01" + bytes(12) + b"\xf7\0" + data)


def test_map_address_is_inserted() -> None:
    code = Code(MOV + LOAD + EXIT, ((8, "cut"),))
    made = code.with_maps({"cut": 77})
    assert struct.unpack_from("<BBhi", made, 8) == (0x18, 0x11, 0, 77)
    assert made[:8] == MOV and made[24:] == EXIT


@pytest.mark.bpf
def test_rejected_program_has_verifier_log() -> None:
    with pytest.raises(bpf.Rejected) as caught:
        bpf.load_program("bad", EXIT, "Apache-2.0")  # its answer is not set
    assert "R0 !read_ok" in caught.value.log and caught.value.errno


@pytest.mark.bpf
def test_object_of_other_version_is_refused_without_leak(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text('__attribute__((section("tc/guest"), used)) int f(void) { return 0; }\n')
    compile_source(source, tmp_path / "old.o")
    before = descriptors()
    with pytest.raises(BuildError, match="not this version's"):
        Programs.load(tmp_path / "old.o")
    (tmp_path / "bad.o").write_bytes(b"nothing")
    with pytest.raises(BuildError, match="not an object for BPF"):
        Programs.load(tmp_path / "bad.o")
    assert not [target for _, target in descriptors() - before if "bpf" in target]


@pytest.mark.bpf
def test_program_is_compiled_once_atomically(tmp_path: Path) -> None:
    made = object_file(tmp_path)
    assert made.parent == tmp_path and object_file(tmp_path) == made and list(tmp_path.iterdir()) == [made]


def test_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="clang is not installed"):
        compile_into(tmp_path / "cache")
    broken = tmp_path / "clang"
    broken.write_text("#!/bin/sh\necho 'fatal: out of cheese' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(BuildError, match="out of cheese"):
        compile_into(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_edge_of_another_user_is_invisible(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir(mode=0o700)
    (place / "node").mkdir()
    assert left_at(place / "node") and not left_at(place / "other")
    code = (
        "import os, sys; from pathlib import Path; from mesh.network.edge import Edge\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "edge = Edge(Path(sys.argv[1])); edge.open(); print(edge.state().problem); edge.close()"
    )
    if os.geteuid() == 0:
        done = subprocess.run(
            [sys.executable, "-c", code, str(place / "node")], capture_output=True, text=True, check=True
        )
        assert "paced by their sockets alone" in done.stdout


@pytest.mark.parametrize(
    ("effective", "mounted", "lacking"),
    [
        ("000001ffffffffff", False, []),
        ("0000000000000000", False, ["CAP_NET_ADMIN", "CAP_BPF", "CAP_SYS_ADMIN"]),
        ("0000008000001000", False, ["CAP_SYS_ADMIN"]),
        ("0000008000001000", True, []),
        ("0000000000201000", False, []),
        ("0000000000001000", True, ["CAP_BPF"]),
    ],
)
def test_missing_privileges_are_listed(effective: str, mounted: bool, lacking: list[str]) -> None:
    status = f"Name:\tmesh\nCapPrm:\tffff\nCapEff:\t{effective}\nCapBnd:\tffff\n"
    assert lacking_privileges(status, mounted) == lacking
