"""What is in a system checkpoint, and how its guest stands meanwhile."""

import os
from pathlib import Path

import pytest

from mesh.engine.engine import EngineError
from mesh.jobs import dumps
from mesh.jobs.dumps import Dumps


class FakeGuest:
    """Stands still a look after it is told to; `fails`: its engine cannot save it."""

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
    for part in dumps.PARTS:
        (tmp_path / part).mkdir()
    (tmp_path / "work" / "trace").write_text("1\n2\n")
    (tmp_path / "work" / "away").symlink_to("/etc/shadow")
    os.mkfifo(tmp_path / "work" / "pipe")
    return tmp_path


async def test_it_has_the_files_of_its_moment_and_the_guest_goes_on(base: Path) -> None:
    guest = FakeGuest(base)
    made = Dumps(base, guest.stand)
    dumped = await made.last(guest)  # type: ignore[arg-type]
    assert dumped is not None and dumped.like == "alike" and guest.told == [True, False]
    (base / "work" / "trace").write_text("3\n")
    assert (dumped.roots["work"] / "trace").read_text() == "1\n2\n" and set(dumped.roots) == {"dump", *dumps.PARTS}
    assert (dumped.roots["work"] / "away").is_symlink() and not (dumped.roots["work"] / "pipe").exists()
    await made.drop(dumped)
    assert not dumped.directory.exists() and await made.last(None) is None, "what has ended cannot be saved"


async def test_who_has_to_go_stands_still_and_that_one_is_stored(base: Path) -> None:
    guest = FakeGuest(base)
    made = Dumps(base, guest.stand)
    await made.part(guest)  # type: ignore[arg-type]
    assert guest.still and guest.told == [True]
    dumped = await made.last(None)
    assert dumped is not None and (dumped.roots["dump"] / "images").read_text() == "memory"
    assert await made.last(None) is None


@pytest.mark.parametrize("wrong", ["fails", "runs_on"])
async def test_one_that_cannot_be_made_leaves_nothing(base: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(dumps, "LOOKS", 3)
    guest = FakeGuest(base, **{wrong: True})
    made = Dumps(base, guest.stand)
    for make in (made.last, made.part):
        with pytest.raises(EngineError):
            await make(guest)  # type: ignore[operator]
        assert not guest.still and not list((base / "dumps").glob("*")) and await made.last(None) is None
