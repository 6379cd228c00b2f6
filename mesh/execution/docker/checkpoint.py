"""System checkpoints: a whole container saved to files and restored from them, through Docker's API and CRIU.

dump/images    CRIU's files, owned by root            dump/made.json  where they can be restored (`Made`)

A dump does not change the container. A dump that takes too long is abandoned: the caller removes its directory, and the container
continues when the engine is done. A restore needs a new container with the same image and settings: Docker has CRIU put the
processes into it, with that container's mounts, control groups and pipes. Docker reads images only from its own directory, so
they are copied there. CRIU trusts the images and runs as root: see docs/explanation/isolation.md.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker.errors
import msgspec
import requests

from membership.malformed import MALFORMED
from mesh.execution.docker.criu import last_words
from mesh.execution.engine import EngineError

NAME = "mesh"  # of the only checkpoint that the engine keeps for one of our containers
IMAGES, MADE = "images", "made.json"
MAX_MADE_BYTES = 4096
LONG_S = 600.0  # a call writes or reads all memory of the stopped container: 60 GB at 100 MB/s (own choice)
LOG_BYTES = 1 << 20  # read from the end of CRIU's log


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The origin of a dump: the container's image id, and the kind of node that can restore it (`SystemCheckpoints`)."""

    image: str
    platform: str


def dump(container: Any, directory: Path, made: Made) -> None:
    """Save a container into the new `directory`. EngineError with CRIU's reason if that fails."""
    directory.mkdir(parents=True)
    order = {"CheckpointID": NAME, "CheckpointDir": str(directory), "Exit": False}
    with explained("saved"):
        post(container, "checkpoints", json=order)
        (directory / NAME).rename(directory / IMAGES)
    describe(directory, made)


def describe(directory: Path, made: Made) -> None:
    (directory / MADE).write_bytes(msgspec.json.encode(made))


def made_of(directory: Path) -> Made:
    """Read the description of a dump. EngineError if `directory` is not a dump."""
    try:
        with (directory / MADE).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_MADE_BYTES), type=Made)
    except (OSError, *MALFORMED) as error:
        raise EngineError(f"this is not a system checkpoint: {error}") from error


def restore(container: Any, directory: Path, engine_root: Path) -> None:
    """Start a created container with the processes of a dump."""
    own = engine_root / "containers" / container.id / "checkpoints" / NAME
    try:
        with explained("restored"):
            copy(directory / IMAGES, own)
            post(container, "start", params={"checkpoint": NAME})
    finally:
        shutil.rmtree(own, ignore_errors=True)


def copy(images: Path, own: Path) -> None:
    """Copy regular files only and follow no links: CRIU reads them as root."""
    if images.is_symlink():
        raise OSError(f"{images.name} of this dump is a link")
    own.mkdir(parents=True, mode=0o700)
    for entry in os.scandir(images):
        if entry.is_file(follow_symlinks=False):
            shutil.copyfile(entry.path, own / entry.name, follow_symlinks=False)


def post(container: Any, what: str, api_root: str = "", **options: Any) -> None:
    """Make a call of the engine that may take long. `api_root`: of another API than Docker's."""
    api = container.client.api
    address = f"{api.base_url}/{api_root or f'v{api.api_version}'}/containers/{container.id}/{what}"
    answer = api.post(address, timeout=LONG_S, **options)
    try:
        answer.raise_for_status()
    except requests.HTTPError as error:
        raise docker.errors.create_api_error_from_http_exception(error) from error


@contextlib.contextmanager
def explained(what: str, log: Path | None = None) -> Iterator[None]:
    """Raise EngineError with the reason of a failure, from CRIU's `log` if the engine does not name it."""
    try:
        yield
    except (docker.errors.APIError, requests.RequestException, OSError) as error:
        raise EngineError(f"the container could not be {what}: {reason(error, log)}") from error


def reason(error: Exception, log: Path | None = None) -> str:
    """Return the reason of a failure, from CRIU's log where it can be read."""
    if isinstance(error, requests.Timeout):
        return f"it takes longer than {LONG_S / 60:g} minutes"
    text = str(error.explanation) if isinstance(error, docker.errors.APIError) else str(error)
    named = re.search(r"(?:path=|log file:)\s*(/\S+?\.log)", text)
    log = Path(named[1]) if named is not None else log
    if log is not None:
        try:
            with log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
                said = file.read().decode(errors="replace")
        except OSError:
            return text.splitlines()[0]  # after a restore that failed, Docker has removed it
        if said:
            return f"{last_words(said)} (CRIU)"
    return text
