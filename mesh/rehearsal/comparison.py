"""Is what a disturbed run made the same as what an undisturbed one made? File by file, by digest."""

from typing import Literal

import msgspec

from mesh.rehearsal.facts import Checkpoint, Play

NAMES_TOLD = 5

What = Literal["published files", "last checkpoint", "checkpoint of the same name", "last line of output"]


class Compared(msgspec.Struct, frozen=True):
    """`differs`: what is not the same in both, by name; `count`: of how many. Lines are given as they stand."""

    what: What
    count: int
    differs: tuple[str, ...] = ()
    name: str = ""

    @property
    def equal(self) -> bool:
        return not self.differs


def compare(one: Play, other: Play) -> list[Compared]:
    """What two plays both have; both to their ends, else the newest checkpoint that both wrote under one name."""
    if not (one.done and other.done):
        name = common_checkpoint(one, other)
        if name is None:
            return []
        return [_files("checkpoint of the same name", _holding(one, name), _holding(other, name), name)]
    found = []
    if one.published is not None and other.published is not None and (one.published or other.published):
        found.append(_files("published files", one.published, other.published))
    if one.checkpoints and other.checkpoints:
        mine, theirs = (_entry(play.checkpoints[-1], play.checkpoints[-1].resume) for play in (one, other))
        found.append(_files("last checkpoint", mine, theirs))
    if one.last_line or other.last_line:
        same = one.last_line == other.last_line
        found.append(Compared("last line of output", 1, () if same else (one.last_line, other.last_line)))
    return found


def results_differ(compared: list[Compared]) -> bool:
    """In files, that is: a line may tell the time it took."""
    return any(not found.equal for found in compared if found.what != "last line of output")


def common_checkpoint(disturbed: Play, undisturbed: Play) -> str | None:
    """The newest entry that both wrote, the disturbed one after it was moved; a name without a number says nothing."""
    late = disturbed.moved
    before = {_top(path) for checkpoint in disturbed.checkpoints if checkpoint not in late for path in checkpoint.files}
    theirs = {_top(path) for checkpoint in undisturbed.checkpoints for path in checkpoint.files}
    moved = [_top(path) for checkpoint in late for path in checkpoint.files]
    shared = [name for name in moved if name in theirs - before and any(character.isdigit() for character in name)]
    return shared[-1] if shared else None


def _entry(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """An entry's own files, without those of others that travel with it; all of them, if it has no name."""
    return {path: digest for path, digest in checkpoint.files.items() if name in {"", _top(path)}}


def _holding(play: Play, name: str) -> dict[str, str]:
    return next(found for checkpoint in reversed(play.checkpoints) if (found := _entry(checkpoint, name)))


def _top(path: str) -> str:
    return path.partition("/")[0]


def _files(what: What, one: dict[str, str], other: dict[str, str], name: str = "") -> Compared:
    differs = [path for path in sorted({*one, *other}) if one.get(path) != other.get(path)]
    return Compared(what, len({*one, *other}), tuple(differs), name)
