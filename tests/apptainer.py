"""An unpacked image for the `apptainer` engine: BusyBox with links for its commands, as `apptainer build --sandbox` leaves it."""

import os
import shutil
from pathlib import Path

from mesh.execution.apptainer.engine import ApptainerEngine
from mesh.execution.process.sandbox import Sandbox
from tests.container_images import NAMES, busybox

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


def unpacked(images: Path) -> str:
    """Make an image below `images` and return its id."""
    binary = busybox()
    assert binary is not None, "BusyBox is missing: apt-get install busybox-static"
    root = images / DIGEST
    for name in ("bin", *PLACES):
        (root / name).mkdir(parents=True)
    shutil.copy(binary, root / "bin" / "busybox")
    for name in NAMES:
        (root / "bin" / name).symlink_to("busybox")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    return f"sha256:{DIGEST}"


def apptainer_engine(root: Path) -> ApptainerEngine:
    """Return an engine whose images lie in `root`/images and whose guests do not see `root`."""
    return ApptainerEngine(None, root / "images", Sandbox(Path(os.environ.get("HOME", "/")), [root], {}))
