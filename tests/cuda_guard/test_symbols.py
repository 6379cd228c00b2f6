"""Functions of a driver that the guard does not know, read from the library."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_guard.build import Libraries
from cuda_guard.symbols import HOOKS, declared, exported, known, main, missing_in_guard, unclassified
from tests.cuda_guard.test_abi import header_directory
from tests.fake.build import Fakes

pytestmark = pytest.mark.cc


def test_guard_exports_exactly_the_known_functions(built: Libraries) -> None:
    assert exported(built.cuda.read_bytes()) == known()


def test_no_function_of_a_header_or_driver_is_missing(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    header = header_directory() / "cuda.h"
    assert len(declared(header.read_text())) > 600 and declared(header.read_text()) <= known()
    assert missing_in_guard(fakes.cuda) == []
    assert main([str(header), str(fakes.cuda)]) == 0
    assert capsys.readouterr().out.count(" 0 of them unknown") == 2


def test_every_forwarded_call_is_classified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unclassified() == []
    assert unclassified({"cuMemAllocSomehow", "cuSomething", "cuLaunchKernelSomehow"}) == [
        "cuLaunchKernelSomehow", "cuMemAllocSomehow", "cuSomething",
    ]  # fmt: skip
    header = tmp_path / "cuda.h"
    header.write_text("CUresult CUDAAPI cuNewCall(int);")
    assert main([str(header)]) == 1 and "cuNewCall" in capsys.readouterr().out


def test_copies_have_their_stream_where_the_header_has_it() -> None:
    """Names without a version whose form changed are declared in their newest form only, so they are left out."""
    text = re.sub(r"/\*.*?\*/", "", (header_directory() / "cuda.h").read_text(), flags=re.DOTALL)
    forms = dict(re.findall(r"CUresult CUDAAPI (\w+)\(([^;]*)\);", text))
    changed = {"cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync", "cuMemPrefetchAsync"}
    rows = re.findall(r"^COPY\((\w+), (\d), \w+, (\w), \w\)", HOOKS.read_text(), re.MULTILINE)
    for name, count, letter in rows:
        base = re.sub(r"(_v\d)?(_pt[ds][sz])?$", "", name)
        if base in changed:
            continue
        parameters = [one.strip() for one in forms[base].split(",")]
        streams = ["abcdefghi"[n] for n, one in enumerate(parameters) if one.startswith("CUstream ")] or ["0"]
        assert (len(parameters), streams) == (int(count), [letter]), name
    assert len(rows) > 100


def test_new_function_is_listed() -> None:
    text = "CUresult CUDAAPI cuMemAllocSomehow(int); #define cuMemAllocSomehow cuMemAllocSomehow_v2\n__CUDA_API_PTSZ(cuWait)"
    assert declared(text) == {"cuMemAllocSomehow", "cuMemAllocSomehow_v2", "cuWait_ptsz"}


@given(st.binary(max_size=300))
def test_other_bytes_than_a_library_raise_value_error(data: bytes) -> None:
    for hostile in (data, b"\x7fELF\x02\x01" + data):
        try:
            assert exported(hostile) == set()
        except ValueError as error:
            assert "ELF" in str(error)
