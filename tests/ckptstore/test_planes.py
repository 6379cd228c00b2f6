"""Byte planes: C and Python do the same, which is what numpy says; and where the library comes from."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptstore import planes
from ckptstore.buffers import allocate
from ckptstore.encoding import WIDTHS, Bytes

BLOCK = planes.BLOCK_BYTES
BOTH = [pytest.param("c", marks=pytest.mark.cc), "python"]


@pytest.fixture(params=BOTH)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(planes, "library", lambda: None)
    else:
        assert planes.library() is not None
    return str(request.param)


def expected(data: bytes, base: bytes | None, width: int) -> bytes:
    """Return the planes by the words of the format, element by element."""
    count = len(data) // width
    numbers = np.frombuffer(data[: count * width], f"<u{width}")
    if base is not None:
        moved = (numbers - np.frombuffer(base[: count * width], f"<u{width}")).view(f"<i{width}")
        numbers = ((moved << 1) ^ (moved >> (8 * width - 1))).view(f"<u{width}")
    return numbers.view(np.uint8).reshape(count, width).T.tobytes()


def joined(split: Bytes, base: Bytes | None, width: int) -> bytes:
    out = allocate(len(split))
    planes.join(split, base, width, out)
    return bytes(out)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 4097, BLOCK - 1, BLOCK, BLOCK + 9, 3 * BLOCK + 5])
@pytest.mark.parametrize("with_base", [False, True])
def test_planes_of_any_length(way: str, width: int, length: int, with_base: bool) -> None:
    data, base = os.urandom(length), os.urandom(length) if with_base else None
    split = planes.split(data, base, width)
    assert bytes(split) == expected(data, base, width)
    assert joined(split, base, width) == data[: length // width * width]


EDGES = b"".join(
    number.to_bytes(8, "little") for number in (0, 1, 1 << 63, (1 << 64) - 1, (1 << 63) - 1, 0x8000000080008000)
)


@pytest.mark.parametrize("width", WIDTHS)
@settings(max_examples=50)
@given(st.binary(min_size=48, max_size=48), st.binary(min_size=48, max_size=48))
@example(EDGES, EDGES[::-1])
@example(EDGES, bytes(48))
@example(bytes(48), EDGES)
@pytest.mark.parametrize("way", BOTH)
def test_differences_of_any_numbers(way: str, width: int, data: bytes, base: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if way == "python":
            patch.setattr(planes, "library", lambda: None)
        split = planes.split(data, base, width)
        assert bytes(split) == expected(data, base, width) and joined(split, base, width) == data


def test_any_kind_of_memory_is_read_and_left_alone(way: str) -> None:
    data, base = os.urandom(64), os.urandom(64)
    for kind in (
        bytes,
        bytearray,
        memoryview,
        lambda raw: memoryview(bytearray(raw)),
        lambda raw: memoryview(b"x" + raw)[1:],
    ):
        one, other = kind(data), kind(base)
        split = planes.split(one, other, 4)
        assert bytes(split) == expected(data, base, 4) and joined(kind(bytes(split)), other, 4) == data
        assert bytes(planes.xor(one, other)) == bytes(a ^ b for a, b in zip(data, base, strict=True))
        assert bytes(one) == data and bytes(other) == base
    assert bytes(planes.xor(b"", b"")) == b""


def test_memory_outside_of_a_chunk_is_never_touched(way: str) -> None:
    for width, data, base in ((3, 6, None), (0, 6, None), (4, 8, 7), (4, 8, 9), (8, 8, 0)):
        with pytest.raises(ValueError):
            planes.split(bytes(data), None if base is None else bytes(base), width)
    for width, split, base, out in ((3, 6, None, 6), (4, 8, 7, 8), (4, 8, None, 4), (4, 8, None, 12), (4, 9, None, 9)):
        with pytest.raises(ValueError):
            planes.join(bytes(split), None if base is None else bytes(base), width, allocate(out))
    with pytest.raises(ValueError):
        planes.xor(b"ab", b"a")


# --- where the library comes from


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Two directories in which the library may lie, in order."""
    found = [tmp_path / "package" / "lib", tmp_path / "cache"]
    monkeypatch.setattr(planes, "_directories", lambda: iter(found))
    yield found


@pytest.mark.cc
def test_library_is_compiled_once(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert planes.library.__wrapped__() is not None
    assert [path.name for path in places[0].iterdir()] == [planes.FILE], "and nothing half made is left"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert planes.library.__wrapped__() is not None


@pytest.mark.cc
def test_library_goes_to_the_cache_if_the_package_cannot_be_written(places: list[Path]) -> None:
    places[0].parent.mkdir()
    places[0].touch()  # also root cannot make a directory there
    assert planes.library.__wrapped__() is not None
    assert (places[1] / planes.FILE).exists()


@pytest.mark.cc
def test_damaged_library_is_passed_over(places: list[Path]) -> None:
    places[0].mkdir(parents=True)
    (places[0] / planes.FILE).write_bytes(b"\x7fELF, cut off")
    assert planes.library.__wrapped__() is not None
    assert (places[1] / planes.FILE).exists()


@pytest.mark.cc
def test_library_in_the_cache_of_another_user_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "SOURCE", tmp_path / "package" / "planes.c")
    (tmp_path / "package").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert list(planes._directories())[1:] == [tmp_path / "mesh" / "planes"]
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "mesh").stat().st_uid + 1)
    assert not list(planes._directories())[1:] and planes.library.__wrapped__() is None


@pytest.mark.parametrize("broken", [False, True])
def test_without_a_compiler_python_does_it_and_the_log_says_so(
    places: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, broken: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if broken:
        compiler = tmp_path / "cc"
        compiler.write_text("#!/bin/sh\nexit 1\n")
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    assert planes.library.__wrapped__() is None
    assert "apt install gcc" in caplog.text
