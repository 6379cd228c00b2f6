"""Container images without a registry: one BusyBox binary with links for its commands, and optional further programs."""

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

from mesh.cli.demo_image import python_root

REPOSITORY = "campus-mesh/test-busybox"
JUPYTER = Path("/opt/jupyter")  # not its path here, because a container mounts a fresh /tmp
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
    """Return a statically linked BusyBox (Debian: busybox-static), or None."""
    found = shutil.which("busybox")
    return Path(found).resolve() if found else None


@cache
def busybox_image(*programs: Path) -> str:
    """Make an image on the engine of DOCKER_HOST and return its name. `remove_images` removes it."""
    _made.append(import_busybox(*programs))
    return _made[-1]


def import_busybox(*programs: Path) -> str:
    """Make an image that is not removed and return its name. `programs` are in `/bin`, with their loader and libraries."""
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
        for library in sorted({library for program in programs for library in needed(program)}):
            tar.add(Path(library).resolve(), library)
    client: Any = docker.from_env()
    tag = os.urandom(6).hex()
    try:
        answer = client.api.import_image_from_data(buffer.getvalue(), repository=REPOSITORY, tag=tag)
        client.api.tag(json.loads(answer.splitlines()[-1])["status"], REPOSITORY, tag)  # Podman ignores the tag above
    finally:
        client.close()
    return f"{REPOSITORY}:{tag}"


def changed_image(image: str, *changes: str) -> str:
    """Make an image with these lines of a Dockerfile, and return its name. It is removed if the first one is."""
    import docker

    client: Any = docker.from_env()
    container = client.containers.create(image, "true")
    try:
        tag = os.urandom(6).hex()
        container.commit(REPOSITORY, tag, changes=list(changes))
    finally:
        container.remove()
        client.close()
    made = f"{REPOSITORY}:{tag}"
    if image in _made:
        _made.append(made)
    return made


def layered_image(client: Any, name: str, *layers: bytes) -> str:
    """Make an image of BusyBox and one layer with a file `/dataN` for each content, and return its id. The caller removes it."""
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


# Prints the files of JupyterLab and its dependencies in the environment that runs this.
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
    """Make an image with the JupyterLab of this Python's virtual environment, yield its name, and remove it."""
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


@cache
def python_image() -> str:
    """Make an image of this machine's Python on the engine of DOCKER_HOST and return its name. `remove_images` removes it."""
    _made.append(import_python())
    return _made[-1]


def import_python() -> str:
    """Make an image that is not removed and return its name. It has another tinypkg (`tests.wheels`) on its PYTHONPATH, and the
    libraries that msgspec needs.
    """
    import docker
    from msgspec import _core

    name, tag = "campus-mesh/test-python", os.urandom(6).hex()
    client: Any = docker.from_env(timeout=300)
    with tempfile.NamedTemporaryFile(suffix=".tar") as tar:
        python_root(Path(tar.name), [], [], linked=[Path(_core.__file__)])
        with tarfile.open(tar.name, "a") as root:
            _file(root, "opt/own/tinypkg.py", b"VERSION = 'of the image'\n")
        changes = ["ENV PATH=/usr/local/bin:/only/here", "ENV PYTHONPATH=/opt/own"]
        answer = client.api.import_image_from_data(tar.read(), repository=name, tag=tag, changes=changes)
    client.api.tag(json.loads(answer.splitlines()[-1])["status"], name, tag)  # Podman ignores the tag above
    client.close()
    return f"{name}:{tag}"


_made: list[str] = []


def remove_images() -> None:
    """Remove the images of this run from the engine."""
    import docker

    while _made:
        client: Any = docker.from_env()
        client.images.remove(_made.pop(), force=True)
        client.close()


def needed(program: Path) -> list[str]:
    """Return the loader and libraries from `ldd`: `libc.so.6 => /lib/libc.so.6 (0x...)`, `/lib64/ld.so (0x...)`."""
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return re.findall(r"(/\S+) \(0x", told)


def _move(tar: tarfile.TarFile, path: Path, environment: Path) -> None:
    """Add a file of the environment under JUPYTER. Scripts in `bin` get the interpreter of the image."""
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
