"""Compiles the doubles of NVIDIA's two libraries, and the one by which Python looks into their world."""

import fcntl
import hashlib
import importlib.metadata
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "cuda_guard" / "native"
BUILT = HERE.parents[1] / "build" / "fake"  # kept from one run to the next
FLAGS = ["-std=c11", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
LINK = [
    "-lm",
    "-Wl,-Bsymbolic",
    "-Wl,-z,now",
    "-Wl,-z,defs",
]  # its calls and addresses are its own, whatever is loaded before
WORLD = ["chance.c", "timeline.c", "world.c"]  # in each library
NVML = ["nvml.c", "nvml_stubs.c"]
PYTHON = ["python.c"]
TYPEDEFS = ["cudaTypedefs.h", "cudaGLTypedefs.h", "cudaEGLTypedefs.h", "cudaProfilerTypedefs.h", "cudaVDPAUTypedefs.h"]


@dataclass(frozen=True)
class Fakes:
    """The built libraries; each has the name that the real one is loaded by."""

    cuda: Path
    nvml: Path
    world: Path


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make the directory and let one process at a time build in it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(directory: Path = BUILT) -> Fakes:
    """Built once for the same sources, however many processes ask at once."""
    table = "".join(f'ROW("{name}", {since}, {own}, {symbol})\n' for name, since, own, symbol in rows())
    digest = hashlib.sha256(table.encode() + repr(FLAGS + LINK).encode())
    for path in sorted([*HERE.glob("*.[ch]"), *NATIVE.glob("*.[dh]*")]):
        digest.update(path.read_bytes())
    target = directory / digest.hexdigest()[:16]
    fakes = Fakes(target / "libcuda.so.1", target / "libnvidia-ml.so.1", target / "libworld.so")
    with locked(directory):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=directory) as name:
                scratch = Path(name) / "built"
                scratch.mkdir()
                (scratch / "table.inc").write_text(table)
                driver = sorted({path.name for path in HERE.glob("*.c")} - {*WORLD, *NVML, *PYTHON})
                _compile(scratch, fakes.cuda.name, [*driver, *WORLD], "cu")
                _compile(scratch, fakes.nvml.name, [*NVML, *WORLD], "nvml")
                _compile(scratch, fakes.world.name, [*PYTHON, *WORLD], "python_")
                scratch.rename(target)
    return fakes


def _compile(scratch: Path, name: str, sources: list[str], prefix: str) -> None:
    script = scratch / f"{name}.map"
    script.write_text(f"{{ global: {prefix}*; local: *; }};\n")
    words = ["cc", *FLAGS, f"-I{NATIVE}", f"-I{scratch}", *(str(HERE / source) for source in sources), *LINK]
    subprocess.run([*words, f"-Wl,--version-script={script}", f"-Wl,-soname,{name}", "-o", scratch / name], check=True)


def exports() -> list[str]:
    """All names that the driver exports."""
    pattern = re.compile(r"^(?:EXPORT|HOOK|COPY|PAUSE|DENY)\((\w+)", re.MULTILINE)
    return [name for file in ("exports.def", "hooks.def") for name in pattern.findall((NATIVE / file).read_text())]


def headers() -> Path | None:
    """NVIDIA's headers, if the package that has them is installed."""
    try:
        files = importlib.metadata.files("nvidia-cuda-runtime") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(os.fspath(file.locate())) for file in files if file.name == TYPEDEFS[0]]
    return found[0].parent if found else None


def typedefs() -> set[tuple[str, int, str]]:
    """NVIDIA's list of its calls: name, the version of CUDA that gave it this form, `_ptsz` or `_ptds` for per-thread ones."""
    folder = headers()
    text = "".join((folder / name).read_text() for name in TYPEDEFS) if folder else ""
    found = re.findall(r"\(CUDAAPI \*PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)", text)
    return {(name, int(version), suffix) for name, version, suffix in found}


def rows() -> list[tuple[str, int, int, str]]:
    """Return the table of cuGetProcAddress: name, first version, per-thread default streams, export.

    The forms of a name are exported as name, name_v2, name_v3 in the order of their versions. Without NVIDIA's list, all exist
    from the first version.
    """
    forms: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for export in exports():
        match = re.fullmatch(r"(cu\w+?)(?:_v(\d+))?(_ptsz|_ptds)?", export)
        assert match
        forms.setdefault((match[1], match[3] or ""), []).append((int(match[2] or 1), export))
    versions: dict[tuple[str, str], list[int]] = {}
    for name, version, suffix in typedefs():
        versions.setdefault((name, suffix), []).append(version)
    table = []
    for (name, suffix), symbols in sorted(forms.items()):
        ordered = [symbol for _, symbol in sorted(symbols)]
        since = sorted(versions.get((name, suffix), [])) if versions else [number for number, _ in sorted(symbols)]
        table += [(name, version, int(bool(suffix)), symbol) for version, symbol in zip(since, ordered, strict=False)]
    return table
