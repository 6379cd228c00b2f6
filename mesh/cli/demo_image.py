"""An image made without a registry: the running interpreter, some packages and their libraries, as one tar.

For `mesh debug demo --engine docker` and the tests, where nothing can be pulled. `docker import` takes it as it is.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "__pycache__", "site-packages"}
PACKAGES = Path("/opt/mesh/packages")
DEMO_IMAGE = "campus-mesh/demo"


class ImageError(RuntimeError):
    """An image could not be made; the text says why."""


def python_root(destination: Path, packages: Iterable[str], files: Iterable[Path], linked: Iterable[Path] = ()) -> None:
    """Write a root file system as a tar: Python at its own path, `python3` on PATH, packages and single files beside it, and the
    libraries of all of them and of `linked`.

    Files of this environment's site-packages go to `PACKAGES`, which is on the image's PYTHONPATH: a virtual environment may be
    below /tmp, which a container replaces, and Debian's Python has no site-packages of its own.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    executable = Path(sys.executable).resolve()
    with tarfile.open(destination, "w") as tar:
        chosen: set[Path] = {executable}
        chosen.update(_tree(stdlib))
        purelib = Path(sysconfig.get_path("purelib"))

        def placed(path: Path) -> Path:
            return PACKAGES / path.relative_to(purelib) if path.is_relative_to(purelib) else path

        for package in packages:
            spec = find_spec(package)
            if spec is None or spec.origin is None:
                raise ImageError(f"package {package} is not installed: `make venv` installs what the demo needs")
            home = Path(spec.origin).parent
            chosen.update(_tree(home))
            libraries = home.parent / f"{package}.libs"
            if libraries.is_dir():
                chosen.update(_tree(libraries))
        chosen.update(files)
        binaries = [path for path in {*chosen, *linked} if path == executable or ".so" in path.name]
        for library in sorted(_shared_libraries(binaries) - chosen):
            tar.add(library.resolve(), str(library), recursive=False)
        for path in sorted(chosen):
            tar.add(path, str(placed(path)), recursive=False)
        for name in ("python", "python3"):
            _link(tar, f"/usr/local/bin/{name}", str(executable))
        for directory in ("/tmp", "/mesh/work", "/mesh/ckpt", "/mesh/out", "/mesh/ctl", "/proc", "/dev", "/sys"):
            info = tarfile.TarInfo(directory)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if directory == "/tmp" else 0o755
            tar.addfile(info)


@contextmanager
def demo_image(client: Any, workspace: Path) -> Iterator[str]:
    """Make the demo's image, with numpy and the digits, and remove it after the block."""
    digits = demo_data()
    name = f"{DEMO_IMAGE}:{os.urandom(6).hex()}"
    tar = workspace / "demo-image.tar"
    python_root(tar, ["numpy"], [digits, digits.parents[2] / "__init__.py"])
    repository, tag = name.split(":")
    with tar.open("rb") as file:
        changes = [f"ENV PYTHONPATH={PACKAGES}"]
        client.api.import_image_from_data(file.read(), repository=repository, tag=tag, changes=changes)
    tar.unlink()
    try:
        yield name
    finally:
        client.images.remove(name, force=True)


def demo_data() -> Path:
    """Return the digits data set that scikit-learn ships."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ImageError("scikit-learn is not installed: pip install scikit-learn")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _tree(root: Path) -> Iterable[Path]:
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in LEFT_OUT)
        yield from (Path(directory) / name for name in files if not name.endswith((".pyc", ".a")))


def _shared_libraries(binaries: list[Path]) -> set[Path]:
    """Return every library that these need, by ldd, under the loader's names, and the loader itself."""
    found: set[Path] = set()
    for start in range(0, len(binaries), 50):
        done = subprocess.run(["ldd", *binaries[start : start + 50]], capture_output=True, text=True, check=False)
        found.update(
            Path(os.path.normpath(path)) for path in re.findall(r"(?:=> |^\s+)(/[^\s(]+)", done.stdout, re.MULTILINE)
        )
    return found


def _link(tar: tarfile.TarFile, path: str, target: str) -> None:
    info = tarfile.TarInfo(path)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)
