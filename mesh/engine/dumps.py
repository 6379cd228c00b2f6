"""A whole container, saved into files and restored from them, by Docker's API and the CRIU that it runs.

dump/images    CRIU's own files, of root            dump/made.json  what they can be restored on (`Made`)

A dump leaves the container as it was. One that takes too long is given up: whoever ordered it removes its directory, and the
container goes on when the engine is done with it. A restore needs a new container with the same image and settings: Docker has
CRIU put the processes into it, with its own mounts, control groups and pipes. Docker reads images only from a directory of its
own, so they are copied there. What CRIU does with images it does as root and unquestioned: see docs/isolation.md.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import docker.errors
import msgspec
import requests

from mesh.engine.criu import last_words
from mesh.engine.engine import EngineError

NAME = "mesh"  # of the one checkpoint that a container of ours has with its engine
IMAGES, MADE = "images", "made.json"
MAX_MADE_BYTES = 4096
LONG_S = 600.0  # a call writes or reads the container's memory, which stands still: 60 GB at a disk's 100 MB/s; ours
LOG_BYTES = 1 << 20  # of CRIU's own, from its end


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`image`: the id of what the container ran; `like`: see placement/likeness.py."""

    image: str
    like: str


def dump(container: Any, directory: Path, made: Made) -> None:
    """Save it into `directory`, which is new. EngineError if CRIU cannot, with its reason."""
    directory.mkdir(parents=True)
    order = {"CheckpointID": NAME, "CheckpointDir": str(directory), "Exit": False}
    try:
        _post(container, "checkpoints", json=order)
        (directory / NAME).rename(directory / IMAGES)
    except (docker.errors.APIError, requests.RequestException, OSError) as error:
        raise EngineError(f"the container could not be saved: {reason(error)}") from error
    (directory / MADE).write_bytes(msgspec.json.encode(made))


def made_of(directory: Path) -> Made:
    """EngineError if it is no dump."""
    try:
        with (directory / MADE).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_MADE_BYTES), type=Made)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineError(f"this is no system checkpoint: {error}") from error


def restore(container: Any, directory: Path, engine_root: Path) -> None:
    """Start a container that was created and not started, with the processes of the dump in it."""
    own = engine_root / "containers" / container.id / "checkpoints" / NAME
    try:
        _copy(directory / IMAGES, own)
        _post(container, "start", params={"checkpoint": NAME})
    except (docker.errors.APIError, requests.RequestException, OSError) as error:
        raise EngineError(f"the container could not be restored: {reason(error)}") from error
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _copy(images: Path, own: Path) -> None:
    """Only plain files, and none that a link stands for: they are read as root."""
    if images.is_symlink():
        raise OSError(f"{images.name} of this dump is a link")
    own.mkdir(parents=True, mode=0o700)
    for entry in os.scandir(images):
        if entry.is_file(follow_symlinks=False):
            shutil.copyfile(entry.path, own / entry.name, follow_symlinks=False)


def _post(container: Any, what: str, **options: Any) -> None:
    api = container.client.api
    answer = api.post(f"{api.base_url}/v{api.api_version}/containers/{container.id}/{what}", timeout=LONG_S, **options)
    try:
        answer.raise_for_status()
    except requests.HTTPError as error:
        raise docker.errors.create_api_error_from_http_exception(error) from error


def reason(error: Exception) -> str:
    """In CRIU's own words, where its log can be read."""
    if isinstance(error, requests.Timeout):
        return f"it takes longer than {LONG_S / 60:g} minutes"
    text = str(error.explanation) if isinstance(error, docker.errors.APIError) else str(error)
    named = re.search(r"(?:path=|log file:)\s*(/\S+?\.log)", text)
    if named is not None:
        try:
            with Path(named[1]).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
                said = file.read().decode(errors="replace")
        except OSError:
            return text.splitlines()[0]  # after a restore that failed, the engine has removed it
        return f"{last_words(said)} (CRIU)"
    return text
