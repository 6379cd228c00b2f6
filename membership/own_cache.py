"""The directory for what this program compiles and loads: nobody but this user can have put something there."""

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
    top.mkdir(mode=OWN, parents=True, exist_ok=True)
    found = top.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{top} belongs to another user, so nothing is loaded from there: set XDG_CACHE_HOME")
    if found.st_mode & 0o077:
        top.chmod(OWN)
    (top / name).mkdir(exist_ok=True)
    return top / name
