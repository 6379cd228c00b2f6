"""An unpacked image for the `apptainer` engine: BusyBox with links for its commands, as `apptainer build --sandbox` leaves it.

Of the files that Apptainer adds, it has what concerns libraries of the machine.
"""

import os
import shutil
from pathlib import Path

from mesh.execution.apptainer.engine import ApptainerEngine
from mesh.execution.process.sandbox import Sandbox
from tests.container_images import NAMES, busybox, needed

DIGEST = "ab" * 32
PLACES = (
    "tmp",
    "var/tmp",
    "run/secrets",
    "proc",
    "dev",
    "sys",
    "etc",
    "mesh/work",
    "mesh/ckpt",
    "mesh/out",
    "mesh/ctl",
)


ENVIRONMENT = """
LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/.singularity.d/libs"
export LD_LIBRARY_PATH
"""


def unpacked(images: Path, *programs: Path) -> str:
    """Make an image below `images` and return its id. `programs` are in `/bin`, with their loader and libraries."""
    binary = busybox()
    assert binary is not None, "BusyBox is missing: apt-get install busybox-static"
    root = images / DIGEST
    for name in ("bin", ".singularity.d/env", ".singularity.d/libs", *PLACES):
        (root / name).mkdir(parents=True)
    shutil.copy(binary, root / "bin" / "busybox")
    for name in NAMES:
        (root / "bin" / name).symlink_to("busybox")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    (root / ".singularity.d" / "env" / "99-base.sh").write_text(ENVIRONMENT)
    for program in programs:
        shutil.copy(program, root / "bin")
        for library in needed(program):
            (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, root / library[1:])
    return f"sha256:{DIGEST}"


def apptainer_engine(root: Path) -> ApptainerEngine:
    """Return an engine whose images lie in `root`/images and whose guests do not see `root`."""
    return ApptainerEngine(None, root / "images", Sandbox(Path(os.environ.get("HOME", "/")), [root], {}))
