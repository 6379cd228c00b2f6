"""The guard's declarations of the driver's interface match NVIDIA's header."""

import subprocess
from importlib.metadata import files
from pathlib import Path

import pytest

from cuda_guard.build import NATIVE, find_compiler

pytestmark = pytest.mark.cc


def header_directory() -> Path:
    """Return the path of `cuda.h` from PyPI's `nvidia-cuda-runtime`."""
    found = next(file for file in files("nvidia-cuda-runtime") or [] if file.name == "cuda.h")
    return Path(str(found.locate())).parent


def told(directory: Path, *options: str) -> str:
    program = directory / "abi"
    source = Path(__file__).parent / "abi.c"
    command = [*find_compiler(), "-std=c11", *options, f"-I{NATIVE}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout


REAL = ("-DREAL_HEADER", "-D__CUDA_API_VERSION_INTERNAL")


def test_numbers_layouts_and_prototypes_match_cuda_h(tmp_path: Path) -> None:
    ours, theirs = told(tmp_path), told(tmp_path, *REAL, f"-I{header_directory()}")
    assert ours.splitlines() == theirs.splitlines() and len(ours.splitlines()) == 87


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuLaunchKernel_ptsz", "cuGraphAddNode_v2", "cuGetProcAddress_v2"])
def test_wrong_prototype_is_detected(tmp_path: Path, call: str) -> None:
    """The comparison can fail: an extra parameter conflicts with the header."""
    (tmp_path / "hooks.def").write_text(
        (NATIVE / "hooks.def").read_text().replace(f"HOOK({call}, (", f"HOOK({call}, (int more, ")
    )
    source = (Path(__file__).parent / "abi.c").read_text().replace('"abi.h"', f'"{NATIVE}/abi.h"')
    (tmp_path / "abi.c").write_text(source)
    command = [*find_compiler(), "-std=c11", "-fsyntax-only", *REAL, f"-I{header_directory()}", str(tmp_path / "abi.c")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "conflicting types" in result.stderr and call in result.stderr
