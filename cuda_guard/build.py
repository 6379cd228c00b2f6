"""The guard's libraries: shipped with the wheel for this machine, or compiled from the sources beside this file at first use."""

import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

NATIVE = Path(__file__).parent / "native"
SHIPPED = Path(__file__).parent / "lib"

COMPILE = ("-std=c11", "-O2", "-g1", "-fPIC", "-ftls-model=initial-exec", "-Wall", "-Wextra", "-Werror", "-pthread")
LINK = ("-shared", "-Wl,-z,now,-z,relro,-z,nodelete,-z,noexecstack", "-Wl,-Bsymbolic", "-ldl", "-lpthread")
GLIBC_FLOOR = "2.17"  # of manylinux2014: what a container that runs CUDA has at least


class BuildError(RuntimeError):
    """The libraries are not shipped for this machine and could not be compiled; the text says why and what to do."""


class Libraries(msgspec.Struct, frozen=True):
    """`cuda` and `nvml` stand in for NVIDIA's in a guarded job; `host` is the daemon's own."""

    cuda: Path
    nvml: Path
    host: Path


class Recipe(msgspec.Struct, frozen=True):
    """How one library is made. `exported`: all of its functions can be called from outside, not only the driver's."""

    name: str
    sources: tuple[str, ...]
    defines: tuple[str, ...] = ()
    exported: bool = False


CUDA = Recipe(
    "libcuda.so.1",
    (
        "stubs.S",
        "pages.c",
        "load.c",
        "wait.c",
        "ledger.c",
        "table.c",
        "memory.c",
        "pinned.c",
        "pools.c",
        "graphs.c",
        "contexts.c",
        "cover.c",
        "predict.c",
        "meter.c",
        "launch.c",
    ),
)
NVML = Recipe("libnvidia-ml.so.1", ("stubs.S", "pages.c", "ledger.c", "nvml.c"), ("GUARD_NVML",))
HOST = Recipe("libmeshguard.so", ("arbiter.c", "lender.c", "ledger.c", "cover.c", "predict.c", "host.c"), exported=True)


def libraries(cache: Path | None = None) -> Libraries:
    """The three libraries. Compiling takes some seconds, once for each version of the sources; it leaves them in `cache`
    (`~/.cache/mesh/guard`). BuildError if there is no compiler or it fails."""
    shipped = SHIPPED / platform.machine()
    if all((shipped / recipe.name).is_file() for recipe in (CUDA, NVML, HOST)):
        return _in(shipped)
    home = (cache or default_cache()) / sources_hash()
    if not home.is_dir():
        compile_into(home)
    return _in(home)


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mesh" / "guard"


def sources_hash() -> str:
    """Of everything the libraries are made of, and how."""
    digest = hashlib.sha256(repr((COMPILE, LINK, CUDA, NVML, HOST, platform.machine())).encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_into(home: Path, compiler: list[str] | None = None, flags: tuple[str, ...] = ()) -> Libraries:
    """Compile the three into a new directory, which appears only when all is done. Where the portable compiler is installed it is
    used: what this machine's own makes does not load in containers whose C library is older."""
    command = compiler or portable_compiler() or find_compiler()
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as directory:
        for recipe in (CUDA, NVML, HOST):
            compile_one(recipe, Path(directory) / recipe.name, command, flags)
        made = Path(directory) / "made"
        made.mkdir()
        for recipe in (CUDA, NVML, HOST):
            (Path(directory) / recipe.name).rename(made / recipe.name)
        try:
            made.rename(home)
        except OSError:
            if not home.is_dir():  # somebody else was faster
                raise
    return _in(home)


def compile_one(recipe: Recipe, path: Path, compiler: list[str], flags: tuple[str, ...] = ()) -> None:
    options = COMPILE if recipe.exported else (*COMPILE, "-fvisibility=hidden")
    defines = [f"-D{define}" for define in recipe.defines]
    sources = [str(NATIVE / source) for source in recipe.sources]
    command = [*compiler, *options, *flags, *defines, *sources, *LINK, f"-Wl,-soname,{recipe.name}", "-o", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last = "\n".join(result.stderr.splitlines()[-20:])
        raise BuildError(f"the guard's {recipe.name} could not be compiled by {' '.join(compiler)}:\n{last}")


def find_compiler() -> list[str]:
    """`$CC`, `cc`, or zig's from PyPI, which also makes libraries that run with older C libraries than this machine's."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    zig = portable_compiler()
    if zig is None:
        raise BuildError(
            "GPUs cannot be shared: no C compiler to make the guard with. "
            "Install one (`apt install gcc libc6-dev`, or `pip install ziglang`), then start the daemon again."
        )
    return zig


def portable_compiler(machine: str | None = None) -> list[str] | None:
    """A compiler for the glibc that manylinux2014 promises; None without PyPI's ziglang."""
    try:
        importlib.import_module("ziglang")
    except ImportError:
        return None
    return [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        f"{machine or platform.machine()}-linux-gnu.{GLIBC_FLOOR}",
    ]


def _in(home: Path) -> Libraries:
    return Libraries(home / CUDA.name, home / NVML.name, home / HOST.name)
