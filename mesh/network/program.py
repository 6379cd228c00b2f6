"""The programs of `program.c`: compiled by clang once per version of the source, and loaded into the kernel.

The object file is the same on every machine of the same byte order, so a wheel can ship it (`lib/`).
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from membership.own_cache import own_cache
from mesh.network.bpf import HASH, Map, load_program
from mesh.network.elf import ObjectError, read_object
from mesh.network.shaping import BULK, GUEST, HOST, URGENT
from mesh.network.switch import GUESTS, MIGRATION, Switch

SOURCE = Path(__file__).parent / "program.c"
SHIPPED = Path(__file__).parent / "lib"
COMPILE = ("-O2", "-target", "bpf", "-Wall", "-Wextra", "-Werror")
NAMES = {"tc/guest": "mesh_guest", "tc/device": "mesh_device"}  # by section
INTERFACES = 4096  # of guests at a time; each guest has one or two
COMPILE_S = 60.0


class BuildError(RuntimeError):
    """The programs are missing and cannot be compiled, or the kernel refuses them; the text says why and what to do."""


class Programs:
    """The loaded programs with their maps. They end with the process unless pinned or attached."""

    def __init__(self, switch: Switch, guests: Map, descriptors: dict[str, int]) -> None:
        self.switch = switch
        self.guests = guests  # interface index -> 1 while that guest alone is cut off
        self.descriptors = descriptors  # by name

    @classmethod
    def load(cls, path: Path) -> "Programs":
        """Load an object file. BuildError if it is not ours; OSError, with the verifier's log, if the kernel refuses it."""
        try:
            found = read_object(path.read_bytes())
        except ObjectError as error:
            raise BuildError(f"{path}: {error}. Remove it, and start the daemon again.") from error
        switch = Switch.make()
        guests = Map.make(HASH, "mesh_guests", INTERFACES)
        made = cls(switch, guests, {})
        try:
            for section, name in NAMES.items():
                code = found.programs[section].with_maps({"cut": switch.map.fd, "guests": guests.fd})
                made.descriptors[name] = load_program(name, code, found.terms)
        except (KeyError, ObjectError) as error:
            made.close()
            raise BuildError(f"{path}: not this version's programs ({error})") from error
        except OSError:
            made.close()
            raise
        return made

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors = {}
        self.guests.close()
        self.switch.close()


def object_file(cache: Path | None = None) -> Path:
    """Return the object file: shipped, or compiled into `cache` (`own_cache`). BuildError without that or a working clang."""
    name = f"{source_hash()}.o"
    if (SHIPPED / name).is_file():
        return SHIPPED / name
    try:
        home = cache or own_cache("edge")
    except OSError as error:
        raise BuildError(str(error)) from error
    return home / name if (home / name).is_file() else compile_into(home)


def defines() -> tuple[str, ...]:
    """Return the compiler options for the numbers that the programs share with Python."""
    numbers = {"CUT_GUESTS": GUESTS, "CUT_MIGRATION": MIGRATION}
    classes = {"HOST": HOST, "URGENT": URGENT, "BULK": BULK, "GUEST": GUEST}
    numbers |= {f"CLASS_{name}": band.priority for name, band in classes.items()}
    return tuple(f"-D{name}={number}u" for name, number in numbers.items())


def source_hash() -> str:
    made_of = repr((COMPILE, defines(), sys.byteorder)).encode()
    return hashlib.sha256(made_of + SOURCE.read_bytes()).hexdigest()[:16]


def compile_into(home: Path) -> Path:
    """Compile the object file into `home`; it appears only when complete."""
    compiler = shutil.which("clang")
    if compiler is None:
        raise BuildError("clang is not installed (`apt install clang libc6-dev`)")
    home.mkdir(parents=True, exist_ok=True)
    made = home / f"{source_hash()}.o"
    with tempfile.TemporaryDirectory(dir=home) as directory:
        path = Path(directory) / made.name
        compile_source(SOURCE, path, compiler)
        path.rename(made)
    return made


def compile_source(source: Path, path: Path, compiler: str = "clang") -> None:
    # Debian keeps kernel headers in a directory per machine, where clang does not look when compiling for another target.
    include = ("-idirafter", f"/usr/include/{platform.machine()}-linux-gnu")
    command = [compiler, *COMPILE, *defines(), *include, "-c", str(source), "-o", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error
    if done.returncode != 0:
        last = "\n".join(done.stderr.splitlines()[-10:])
        raise BuildError(f"{source.name} cannot be compiled (`apt install clang libc6-dev`):\n{last}")
