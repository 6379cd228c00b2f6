"""System checkpoints by Podman, through its own API (libpod). The parts of a dump are those of `checkpoint.py`.

Podman can export a container into an archive, but that contains the container's settings, which its origin could change. So the
archive is not used. Podman saves into a directory of the container, and a restore finds there what another node has saved: the
container is made with this node's settings, and CRIU's files and the content of /dev/shm are copied there. Tried with 5.8.

It must not know that the guest is frozen: it saves no container that it has paused (see `watchdog.py`).
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from mesh.execution.docker.checkpoint import IMAGES, LONG_S, Made, copy, describe, explained, post

API = "v4.0.0/libpod"
SAVED = "checkpoint"  # CRIU's files in the container's directory
SHM = "devshm-checkpoint.tar"  # beside them; within IMAGES in a dump
SAVE_LOG, RESTORE_LOG = "dump.log", "restore.log"


def dump(container: Any, directory: Path, made: Made) -> None:
    """Save a running container, frozen or not, into the new `directory`. EngineError with CRIU's reason if that fails."""
    directory.mkdir(parents=True)
    place = _place(container)
    try:
        with explained("saved", place / SAVE_LOG):
            _clear(place)
            post(container, "checkpoint", API, params={"leaveRunning": "true"})
            shutil.move(place / SAVED, directory / IMAGES)
            with contextlib.suppress(FileNotFoundError):
                shutil.move(place / SHM, directory / IMAGES / SHM)
    finally:
        _clear(place)
    describe(directory, made)


def restore(container: Any, directory: Path) -> None:
    """Start a created container with the processes of a dump. Its output must be attached to again.

    Podman restores only a container that has ended, and needs the settings that it writes when it prepares one to start.
    """
    place = _place(container)
    try:
        with explained("restored"):
            post(container, "init", API)
            container.stop(timeout=0)
            copy(directory / IMAGES, place / SAVED)
            with contextlib.suppress(FileNotFoundError):
                (place / SAVED / SHM).rename(place / SHM)
        with explained("restored", place / RESTORE_LOG):
            post(container, "restore", API)
    finally:
        _clear(place)


def _place(container: Any) -> Path:
    """Return Podman's directory of a container."""
    with explained("found"):
        api = container.client.api
        answer = api.get(f"{api.base_url}/{API}/containers/{container.id}/json", timeout=LONG_S)
        answer.raise_for_status()
        return Path(answer.json()["StaticDir"])


def _clear(place: Path) -> None:
    """Remove what a save or a restore has left in the container's directory."""
    shutil.rmtree(place / SAVED, ignore_errors=True)
    for name in (SHM, SAVE_LOG, RESTORE_LOG):
        (place / name).unlink(missing_ok=True)
