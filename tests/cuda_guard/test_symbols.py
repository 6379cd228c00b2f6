"""Functions of a driver that the guard does not know, read from the library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_guard.build import Libraries
from cuda_guard.symbols import declared, exported, known, main, missing_in_guard
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
