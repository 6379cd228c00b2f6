"""Directories of this user alone, also in places that all users share: nobody else can have put something there."""

import os
import stat
from pathlib import Path

OWN = 0o700


def own_cache(name: str) -> Path:
    """Return `$XDG_CACHE_HOME/mesh/NAME` (`~/.cache`), after making it. OSError if it is not this user's alone.

    The base may be shared, as /tmp is, and root may have the home of another user (sudo).
    """
    try:
        top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mesh"
    except RuntimeError as error:
        raise FileNotFoundError("this user has no home, and XDG_CACHE_HOME is not set") from error
    try:
        make_own(top)
    except PermissionError as error:
        raise PermissionError(f"{error}, so nothing is loaded from there: set XDG_CACHE_HOME") from error
    (top / name).mkdir(exist_ok=True)
    return top / name


def make_own(place: Path) -> None:
    """Make a directory, unless it is there, and close it to others. PermissionError if another user has made it; OSError."""
    place.mkdir(mode=OWN, parents=True, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{place} belongs to another user")
    if found.st_mode & 0o077:
        place.chmod(OWN)
