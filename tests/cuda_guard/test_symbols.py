"""Which calls a driver has that the guard does not know, read from the library itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_guard.build import Libraries
from cuda_guard.symbols import declared, exported, known, main, unknown_to_the_guard
from tests.cuda_guard.test_abi import header_directory
from tests.fake.build import Fakes

pytestmark = pytest.mark.cc


def test_the_guard_exports_just_what_it_knows(built: Libraries) -> None:
    assert exported(built.cuda.read_bytes()) == known()


def test_nothing_of_a_header_or_driver_is_missing(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    header = header_directory() / "cuda.h"
    assert len(declared(header.read_text())) > 600 and declared(header.read_text()) <= known()
    assert unknown_to_the_guard(fakes.cuda) == []
    assert main([str(header), str(fakes.cuda)]) == 0
    assert capsys.readouterr().out.count(" 0 of them unknown") == 2


def test_a_call_of_tomorrow_is_named() -> None:
    text = "CUresult CUDAAPI cuMemAllocSomehow(int); #define cuMemAllocSomehow cuMemAllocSomehow_v2\n__CUDA_API_PTSZ(cuWait)"
    assert declared(text) == {"cuMemAllocSomehow", "cuMemAllocSomehow_v2", "cuWait_ptsz"}


@given(st.binary(max_size=300))
def test_what_is_no_library_is_said_to_be_none(data: bytes) -> None:
    for hostile in (data, b"\x7fELF\x02\x01" + data):
        try:
            assert exported(hostile) == set()
        except ValueError as error:
            assert "ELF" in str(error)
