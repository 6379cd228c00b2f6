"""A container image without a registry: BusyBox alone, as a root file system of one binary and its names."""

import io
import os
import shutil
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = "campus-mesh/test-busybox"
NAMES = (
    "sh",
    "sleep",
    "cat",
    "echo",
    "env",
    "kill",
    "id",
    "ls",
    "tail",
    "touch",
    "test",
    "true",
    "mv",
    "mkdir",
    "dd",
    "pwd",
)


def busybox() -> Path | None:
    """A statically linked BusyBox (Debian: busybox-static), or None."""
    found = shutil.which("busybox")
    return Path(found).resolve() if found else None


@cache
def busybox_image() -> str:
    """The name of the image, made on the engine that DOCKER_HOST names; `remove_images` takes it away again."""
    import docker

    binary = busybox()
    assert binary is not None, "BusyBox is missing: apt-get install busybox-static"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(binary, "bin/busybox")
        for name in NAMES:
            _link(tar, f"bin/{name}", "busybox")
        for directory in ("tmp", "proc", "dev", "sys", "mesh/work", "mesh/ckpt", "mesh/out", "mesh/ctl"):
            info = tarfile.TarInfo(directory)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if directory == "tmp" else 0o755
            tar.addfile(info)
    client: Any = docker.from_env()
    tag = os.urandom(6).hex()
    try:
        client.api.import_image_from_data(buffer.getvalue(), repository=REPOSITORY, tag=tag)
    finally:
        client.close()
    _made.append(f"{REPOSITORY}:{tag}")
    return _made[-1]


_made: list[str] = []


def remove_images() -> None:
    """Leave the engine as it was found."""
    import docker

    while _made:
        client: Any = docker.from_env()
        client.images.remove(_made.pop(), force=True)
        client.close()


def _link(tar: tarfile.TarFile, path: str, target: str) -> None:
    info = tarfile.TarInfo(path)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)
