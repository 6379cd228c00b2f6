"""Contents of a system checkpoint, and the state of its guest during the save."""

import os
from pathlib import Path

import pytest

from mesh.checkpoints import system_checkpoints
from mesh.checkpoints.system_checkpoints import Dumps
from mesh.execution.engine import EngineError


class FakeGuest:
    """A guest that freezes one check after the request; with `fails`, its engine cannot save it."""

    def __init__(self, base: Path, fails: bool = False, runs_on: bool = False) -> None:
        self.base, self.fails, self.runs_on = base, fails, runs_on
        self.still, self.looks = False, 0
        self.told: list[bool] = []

    def stand(self, still: bool) -> None:
        self.told.append(still)
        self.still, self.looks = still, 0

    async def stands_still(self) -> bool:
        self.looks += 1
        return self.still and self.looks > 1 and not self.runs_on

    async def dump(self, directory: Path) -> str:
        assert await self.stands_still()
        if self.fails:
            raise EngineError("no")
        directory.mkdir()
        (directory / "images").write_text("memory")
        return "alike"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for part in system_checkpoints.PARTS:
        (tmp_path / part).mkdir()
    (tmp_path / "work" / "trace").write_text("1\n2\n")
    (tmp_path / "work" / "away").symlink_to("/etc/shadow")
    (tmp_path / "outside").mkdir()
    (tmp_path / "work" / "host").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "work" / "pipe")
    return tmp_path


async def test_dump_has_a_snapshot_of_the_files_and_the_guest_continues(base: Path) -> None:
    guest = FakeGuest(base)
    made = Dumps(base, guest.stand)
    dumped = await made.last(guest)  # type: ignore[arg-type]
    assert dumped is not None and dumped.platform == "alike" and guest.told == [True, False]
    (base / "work" / "trace").write_text("3\n")
    assert (dumped.roots["work"] / "trace").read_text() == "1\n2\n" and set(dumped.roots) == {
        "dump",
        *system_checkpoints.PARTS,
    }
    assert (dumped.roots["work"] / "away").is_symlink() and not (dumped.roots["work"] / "pipe").exists()
    assert (dumped.roots["work"] / "host").is_symlink(), "a link to a directory is not followed"
    await made.drop(dumped)
    assert not dumped.directory.exists() and await made.last(None) is None, "a guest that has ended cannot be saved"


async def test_departing_guest_stays_frozen_and_its_dump_is_stored(base: Path) -> None:
    guest = FakeGuest(base)
    made = Dumps(base, guest.stand)
    await made.part(guest)  # type: ignore[arg-type]
    assert guest.still and guest.told == [True]
    dumped = await made.last(None)
    assert dumped is not None and (dumped.roots["dump"] / "images").read_text() == "memory"
    assert await made.last(None) is None


@pytest.mark.parametrize("wrong", ["fails", "runs_on"])
async def test_failed_dump_leaves_no_files_and_unfreezes_the_guest(
    base: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(system_checkpoints, "LOOKS", 3)
    guest = FakeGuest(base, **{wrong: True})
    made = Dumps(base, guest.stand)
    for make in (made.last, made.part):
        with pytest.raises(EngineError):
            await make(guest)  # type: ignore[operator]
        assert not guest.still and not list((base / "dumps").glob("*")) and await made.last(None) is None
