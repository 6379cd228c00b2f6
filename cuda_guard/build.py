"""Build of the guard's libraries: shipped with the wheel for this machine, or compiled from `native` at first use."""

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

from membership.own_cache import own_cache

NATIVE = Path(__file__).parent / "native"
SHIPPED = Path(__file__).parent / "lib"

COMPILE = ("-std=c11", "-O2", "-g1", "-fPIC", "-ftls-model=initial-exec", "-Wall", "-Wextra", "-Werror", "-pthread")
LINK = ("-shared", "-Wl,-z,now,-z,relro,-z,nodelete,-z,noexecstack", "-Wl,-Bsymbolic", "-ldl", "-lpthread")
GLIBC_FLOOR = "2.17"  # of manylinux2014; every container with CUDA has at least this version


class BuildError(RuntimeError):
    """The wheel has no libraries for this machine and they could not be compiled; the message says why and what to do."""


class Libraries(msgspec.Struct, frozen=True):
    """`cuda` and `nvml` replace NVIDIA's libraries in a guarded job; the daemon uses `host`."""

    cuda: Path
    nvml: Path
    host: Path

    @property
    def preloaded(self) -> tuple[Path, ...]:
        """The libraries that every program of a job loads, under each name by which programs look for the driver."""
        return (self.cuda, self.nvml, self.cuda.with_suffix(""), self.nvml.with_suffix(""))


class Recipe(msgspec.Struct, frozen=True):
    """Sources and options of one library. `exported`: it exports all its functions, not only the driver's; `needs`: another one
    of these, whose functions are also found in it."""

    name: str
    sources: tuple[str, ...]
    defines: tuple[str, ...] = ()
    exported: bool = False
    needs: str = ""


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
        "predict.c",
        "meter.c",
        "launch.c",
    ),
)
NVML = Recipe("libnvidia-ml.so.1", ("stubs.S", "pages.c", "ledger.c", "nvml.c"), ("GUARD_NVML",))
HOST = Recipe("libmeshguard.so", ("arbiter.c", "lender.c", "ledger.c", "host.c"), exported=True)
# A program that opens `libcuda.so` would get the driver's own, which is not that of the preloaded `libcuda.so.1`.
CUDA_ALIAS = Recipe("libcuda.so", ("alias.c",), needs=CUDA.name)
NVML_ALIAS = Recipe("libnvidia-ml.so", ("alias.c",), needs=NVML.name)
RECIPES = (CUDA, NVML, HOST, CUDA_ALIAS, NVML_ALIAS)


def libraries(cache: Path | None = None) -> Libraries:
    """Return the libraries; compile them to `cache` (`own_cache`) if necessary.

    That takes some seconds, once for each version of the sources. BuildError if there is no cache or compiler, or it fails.
    """
    shipped = SHIPPED / platform.machine()
    if all((shipped / recipe.name).is_file() for recipe in RECIPES):
        return _in(shipped)
    try:
        home = (cache or own_cache("guard")) / sources_hash()
    except OSError as error:
        raise BuildError(str(error)) from error
    if not home.is_dir():
        compile_into(home)
    return _in(home)


def sources_hash() -> str:
    """Return the hash of the sources and the build options."""
    digest = hashlib.sha256(repr((COMPILE, LINK, RECIPES, platform.machine())).encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_into(home: Path, compiler: list[str] | None = None, flags: tuple[str, ...] = ()) -> Libraries:
    """Compile the libraries into a new directory, which appears only when all are complete.

    The portable compiler is preferred: libraries made by this machine's own do not load in containers with an older C library.
    """
    command = compiler or portable_compiler() or find_compiler()
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as directory:
        for recipe in RECIPES:
            compile_one(recipe, Path(directory) / recipe.name, command, flags)
        made = Path(directory) / "made"
        made.mkdir()
        for recipe in RECIPES:
            (Path(directory) / recipe.name).rename(made / recipe.name)
        try:
            made.rename(home)
        except OSError:
            if not home.is_dir():  # another process was faster
                raise
    return _in(home)


def compile_one(recipe: Recipe, path: Path, compiler: list[str], flags: tuple[str, ...] = ()) -> None:
    options = COMPILE if recipe.exported else (*COMPILE, "-fvisibility=hidden")
    defines = [f"-D{define}" for define in recipe.defines]
    sources = [str(NATIVE / source) for source in recipe.sources]
    needs = ["-Wl,--no-as-needed", str(path.parent / recipe.needs)] if recipe.needs else []
    command = [
        *compiler,
        *options,
        *flags,
        *defines,
        *sources,
        *needs,
        *LINK,
        f"-Wl,-soname,{recipe.name}",
        "-o",
        str(path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last = "\n".join(result.stderr.splitlines()[-20:])
        raise BuildError(f"the guard's {recipe.name} could not be compiled by {' '.join(compiler)}:\n{last}")


def find_compiler() -> list[str]:
    """Return `$CC`, `cc`, `gcc`, `clang`, or the portable compiler. BuildError if there is none."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    zig = portable_compiler()
    if zig is None:
        raise BuildError(
            "GPUs cannot be shared: there is no C compiler to build the guard. "
            "Install one (`apt install gcc libc6-dev`, or `pip install ziglang`), then start the daemon again."
        )
    return zig


def portable_compiler(machine: str | None = None) -> list[str] | None:
    """Return zig's compiler with the glibc of manylinux2014 as target; None without PyPI's ziglang."""
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
