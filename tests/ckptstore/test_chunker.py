"""Chunker: real formats, shifted and damaged files, and bytes that only look like them."""

import io
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.chunker import CHUNK_BYTES, OWN_CHUNK_BYTES, Piece, split
from tests.tiers import FRAMEWORKS_PYTHON

BIG = OWN_CHUNK_BYTES


def cut(data: bytes) -> list[Piece]:
    found = split(lambda length, offset: data[offset : offset + length], len(data))
    end = 0
    for piece in found:
        assert piece.offset == end and 0 < piece.length <= CHUNK_BYTES
        end += piece.length
    assert end == len(data), "every byte occurs once"
    return found


def safetensors(tensors: dict[str, bytes], dtype: str = "F32") -> bytes:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps({"__metadata__": {"a": "b"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


def torch_zip(tensors: dict[str, bytes], root: str = "model-10", compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip as `torch.save` writes it: one stored entry per storage, below the archive's name."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr(f"{root}/data.pkl", b"pickled")
        for name, data in tensors.items():
            archive.writestr(f"{root}/data/{name}", data)
    return file.getvalue()


@pytest.mark.parametrize("write", [safetensors, torch_zip])
def test_tensor_gives_the_same_pieces_at_any_offset(write: object) -> None:
    assert callable(write)
    tensors = {"w": bytes(CHUNK_BYTES + 5), "small": b"s" * 100, "v": b"v" * BIG}
    before = write(tensors)
    after = write({"lora": b"l" * 999, **tensors})
    held = []
    for data in (before, after):
        found = [piece for piece in cut(data) if not piece.name.startswith(" ")]
        assert [(p.name.rpartition("/")[2], p.number, p.length) for p in found] == [
            ("w", 0, CHUNK_BYTES),
            ("w", 1, 5),
            ("v", 0, BIG),
        ]
        held.append([data[p.offset : p.offset + p.length] for p in found])
    assert held[0] == held[1]


def test_element_width_comes_from_the_file() -> None:
    tensor = {"w": bytes(BIG)}
    for dtype, width in (("F32", 4), ("BF16", 2), ("I64", 8), ("BOOL", 1), ("new", 1)):
        assert [p.width for p in cut(safetensors(tensor, dtype)) if p.name == "w"] == [width]
    assert [p.width for p in cut(torch_zip(tensor)) if p.name == "data/w"] == [0], "a zip does not state it"


def test_names_in_a_zip_do_not_depend_on_the_archive_name() -> None:
    names = [{p.name for p in cut(torch_zip({"0": bytes(BIG)}, root))} for root in ("step-1", "step-2")]
    assert names[0] == names[1]


def test_compressed_entries_are_not_tensors() -> None:
    data = torch_zip({"0": bytes(9 * BIG)}, compression=zipfile.ZIP_DEFLATED)
    assert all(piece.name.startswith(" ") for piece in cut(data))


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 1 << 40]}},
        {"a": {"dtype": "F32", "shape": [], "data_offsets": [-5, BIG]}},
        {"a": {"dtype": "F32", "shape": [], "data_offsets": [BIG, 0]}},
        {"a": {"dtype": "F32", "data_offsets": [0, BIG]}, "b": {"dtype": "F32", "data_offsets": [9, BIG]}},
        {"a": {"dtype": "F32", "data_offsets": [0, 2 * BIG + 1]}},
        {"a": {"dtype": "F32", "data_offsets": [0, BIG]}, "b": {"dtype": "F32", "data_offsets": [BIG - 1, 2 * BIG]}},
        {"a": {"dtype": "F32"}},
        {"a": 7},
        [],
    ],
)
def test_invalid_directory_is_ignored(header: object) -> None:
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(2 * BIG)
    assert [piece.name for piece in cut(data)] == [" 0"]


@given(st.binary(max_size=300))
def test_any_bytes_are_split(data: bytes) -> None:
    for prefix in (b"", b"PK\3\4", (20).to_bytes(8, "little") + b'{"a":'):
        for end in (b"", b"PK\5\6" + bytes(18), b"PK\6\7" + bytes(16) + b"PK\5\6" + bytes(18)):
            cut(prefix + data + end)


ZIP = torch_zip({"0": bytes(BIG), "1": bytes(BIG)})


@given(st.integers(0, len(ZIP) - 1), st.integers(1, 255), st.integers(0, len(ZIP)))
def test_damaged_or_truncated_zip_is_split(place: int, flip: int, length: int) -> None:
    data = bytearray(ZIP)
    data[-1 - place % 400] ^= flip  # most of the structure is at the end
    cut(bytes(data))
    cut(ZIP[:length])


TORCH = """
import sys, torch
from safetensors.torch import save_file
state = {"w": torch.zeros(1 << 18), "b": torch.zeros(3), "half": torch.zeros(1 << 18, dtype=torch.bfloat16)}
torch.save(state, sys.argv[1] + ".pt")
save_file(state, sys.argv[1] + ".safetensors")
"""


@pytest.mark.frameworks
def test_real_checkpoints_of_torch_and_safetensors(tmp_path: Path) -> None:
    subprocess.run([FRAMEWORKS_PYTHON, "-c", TORCH, tmp_path / "model"], check=True)
    for suffix, widths in ((".pt", {0}), (".safetensors", {2, 4})):
        found = [piece for piece in cut((tmp_path / f"model{suffix}").read_bytes()) if not piece.name.startswith(" ")]
        assert sorted(piece.length for piece in found) == [2 << 18, 4 << 18], suffix
        assert {piece.width for piece in found} == widths
