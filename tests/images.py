"""Container images without a registry: BusyBox as a root file system of one binary and its names, and programs beside it."""

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from mesh.engine.image import python_root

REPOSITORY = "campus-mesh/test-busybox"
JUPYTER = Path("/opt/jupyter")  # not where it is here: a container covers /tmp with a fresh one
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
def busybox_image(*programs: Path) -> str:
    """The name of the image, made on the engine that DOCKER_HOST names; `remove_images` takes it away again."""
    _made.append(import_busybox(*programs))
    return _made[-1]


def import_busybox(*programs: Path) -> str:
    """For an engine that goes away. `programs` are in its `/bin`, with the dynamic loader and the libraries that they need."""
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
        for program in programs:
            tar.add(program, f"bin/{program.name}")
        for library in sorted({library for program in programs for library in _needed(program)}):
            tar.add(Path(library).resolve(), library)
    client: Any = docker.from_env()
    tag = os.urandom(6).hex()
    try:
        answer = client.api.import_image_from_data(buffer.getvalue(), repository=REPOSITORY, tag=tag)
        client.api.tag(
            json.loads(answer.splitlines()[-1])["status"], REPOSITORY, tag
        )  # Podman does not heed the tag above
    finally:
        client.close()
    return f"{REPOSITORY}:{tag}"


def layered_image(client: Any, name: str, *layers: bytes) -> str:
    """An image on this engine, of BusyBox and a file `/dataN` of each of these contents, each in a layer of its own; its id.
    Whoever asks for it removes it, or its engine."""
    binary = busybox()
    assert binary is not None, "BusyBox is missing: apt-get install busybox-static"
    steps, context = ["FROM scratch", "ADD root.tar /"], io.BytesIO()
    root = io.BytesIO()
    with tarfile.open(fileobj=root, mode="w") as tar:
        tar.add(binary, "bin/busybox")
        for link in NAMES:
            _link(tar, f"bin/{link}", "busybox")
    with tarfile.open(fileobj=context, mode="w") as tar:
        _file(tar, "root.tar", root.getvalue())
        for number, content in enumerate(layers):
            _file(tar, f"data{number}", content)
            steps.append(f"COPY data{number} /")
        _file(tar, "Dockerfile", "\n".join(steps).encode())
    context.seek(0)
    image, _ = client.images.build(fileobj=context, custom_context=True, tag=name, rm=True, forcerm=True)
    return str(image.id)


# Prints where the files of JupyterLab and of all that it needs are, in the environment that runs this.
_FILES = """
import importlib.metadata as metadata, os, re
seen, left = set(), ["jupyterlab"]
while left:
    name = left.pop().lower().replace("_", "-")
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    if name in seen:
        continue
    seen.add(name)
    left += [re.match(r"[\\w.-]+", line)[0] for line in found.requires or () if "extra ==" not in line]
    for file in found.files or ():
        path = os.path.normpath(found.locate_file(file))
        if os.path.isfile(path):
            print(path)
"""


@contextmanager
def jupyter_image(python: Path) -> Iterator[str]:
    """The name of an image with JupyterLab as it is in the virtual environment of this Python, while it is needed."""
    import docker

    environment = python.parent.parent
    listed = subprocess.run([python, "-c", _FILES], capture_output=True, text=True, check=True).stdout
    files = {Path(line) for line in listed.splitlines()}
    files |= {environment / "pyvenv.cfg", *(environment / "bin").glob("python*")}
    client: Any = docker.from_env(timeout=300)
    name, tag = "campus-mesh/test-jupyter", os.urandom(6).hex()
    with tempfile.NamedTemporaryFile(suffix=".tar") as tar:
        python_root(Path(tar.name), [], [], linked=files)
        with tarfile.open(tar.name, "a") as root:
            for path in sorted(files):
                _move(root, path, environment)
        changes = [f"ENV PATH={JUPYTER}/bin:/usr/local/bin:/usr/bin:/bin"]
        client.api.import_image_from_data(tar.read(), repository=name, tag=tag, changes=changes)
    try:
        yield f"{name}:{tag}"
    finally:
        client.images.remove(f"{name}:{tag}", force=True)
        client.close()


_made: list[str] = []


def remove_images() -> None:
    """Leave the engine as it was found."""
    import docker

    while _made:
        client: Any = docker.from_env()
        client.images.remove(_made.pop(), force=True)
        client.close()


def _needed(program: Path) -> list[str]:
    """Paths of the loader and the libraries, as `ldd` tells: `libc.so.6 => /lib/libc.so.6 (0x...)`, `/lib64/ld.so (0x...)`."""
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return re.findall(r"(/\S+) \(0x", told)


def _move(tar: tarfile.TarFile, path: Path, environment: Path) -> None:
    """What lies in the environment, into the image's, with programs that name their interpreter there."""
    placed = str(JUPYTER / path.relative_to(environment))
    if path.parent == environment / "bin" and not path.is_symlink():
        script = path.read_bytes().split(b"\n", 1)[1]
        _file(tar, placed, f"#!{JUPYTER}/bin/python\n".encode() + script, 0o755)
    else:
        tar.add(path, placed, recursive=False)


def _file(tar: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(path)
    info.size, info.mode = len(content), mode
    tar.addfile(info, io.BytesIO(content))


def _link(tar: tarfile.TarFile, path: str, target: str) -> None:
    info = tarfile.TarInfo(path)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)
