"""The descriptors of this process. Garbage of other tests may be closed at any time, so a test looks only at its own."""

from contextlib import suppress
from pathlib import Path


def descriptors() -> set[tuple[int, str]]:
    """Return the number and the target of each open descriptor."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that listed them
            found.add((int(entry.name), str(entry.readlink())))
    return found


def descriptors_below(directory: Path) -> list[str]:
    """Return what is open in a directory, itself included."""
    return [target for _, target in descriptors() if Path(target).is_relative_to(directory)]
