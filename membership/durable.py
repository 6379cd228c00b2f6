"""Durable file replacement: after a crash a file holds either its old or its new content. Only its user may read it."""

import os
from pathlib import Path
from threading import Lock

_writing = Lock()  # writers are threads, and share the temporary file's name


def write_durably(path: Path, data: bytes) -> None:
    """Write a temporary file, fsync it, rename it over `path`, fsync the directory."""
    with _writing:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        fresh = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fresh, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
