"""Attempt: a stop before the guest runs leaves no guest; a last checkpoint that cannot be stored is reported."""

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore.errors import DiskFull, FileChanged, StoreError
from ckptstore.mappings import Processes
from ckptstore.pack import BLOCK_BYTES
from membership.identity import Identity
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.checkpoints.replicator import Expected, FetchError, Replicator
from mesh.consensus.effects import Kill, RunUntil, SaveCheckpoint, SaveResult
from mesh.consensus.effects import Launch as LaunchGuest
from mesh.consensus.reports import (
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    GuestExited,
    GuestFailed,
    GuestStarted,
    ResultStored,
    RunnerEvent,
)
from mesh.execution.engine import Availability, EngineError, Guest, Launch
from mesh.execution.process.engine import ProcessEngine
from mesh.execution.secret_files import SecretFiles
from mesh.execution.wrapped import WrappedGuest
from mesh.jobs import attempt as attempt_module
from mesh.jobs.attempt import Attempt, seen_places
from mesh.jobs.attempt_secrets import AttemptSecrets
from mesh.jobs.logs import SNAPSHOT_BYTES
from mesh.model.record import Attempt as Attempted
from mesh.model.record import Commit, JobRecord
from mesh.model.spec import Checkpointing, CommitMode
from tests.ckptstore.worlds import open_store, save
from tests.consensus.worlds import A, B, C, D, E, make_spec
from tests.wheels import alone

WAIT_S, MIB = 30.0, 1 << 20


class LateEngine:
    """Engine of real processes whose start lasts until `late` is set. With `waits`, it first waits until it is not wanted."""

    name, own_root = "process", False

    def __init__(self, waits: bool) -> None:
        self.at_it, self.late, self.waits = asyncio.Event(), asyncio.Event(), waits
        self.guests: list[Guest] = []
        self._engine = ProcessEngine()

    async def availability(self) -> Availability:
        return await self._engine.availability()

    async def start(self, launch: Launch) -> Guest:
        self.at_it.set()
        while self.waits:
            if not launch.wanted():
                raise EngineError("it was stopped while it waited")
            await asyncio.sleep(0.01)
        self.guests.append(await self._engine.start(launch))
        await self.late.wait()
        return self.guests[-1]

    async def close(self) -> None:
        await self._engine.close()


class SavedGuest(WrappedGuest):
    """A real process with a fake dump."""

    async def dump(self, directory: Path) -> str:
        assert await self.stands_still()
        directory.mkdir()
        return "alike"


class SavedEngine(LateEngine):
    async def start(self, launch: Launch) -> Guest:
        return SavedGuest(await super().start(launch))


class Place:
    """An attempt on a fake node, with a `store` or one whose save is `save`; `limit` is its disk limit in bytes."""

    def __init__(
        self, root: Path, engine: LateEngine, save: Any = None, store: Any = None, limit: int = 1 << 30, **spec: object
    ) -> None:
        self.engine, self.events = engine, asyncio.Queue[RunnerEvent]()
        self.notes: list[tuple[str, str]] = []
        self.log = root / "log"
        store = store or SimpleNamespace(save=save)

        async def nothing(*given: object) -> None:
            return None

        replicator: Any = SimpleNamespace(bandwidth=SimpleNamespace(mean_bps=lambda holders: None), fetch=nothing)
        replicator.mended = partial(Replicator.mended, replicator)

        made = make_spec(**{"argv": ("sleep", "600"), "checkpointing": None, **spec})
        self.attempt = Attempt(
            b"j" * 16,
            made,
            0,
            root / "attempt",
            self.log,
            engine,
            (),
            "desk",
            store,
            replicator,
            lambda payload: payload,
            lambda: ReplicaPolicy(0, 0, ()),
            nothing,
            self.events.put,
            lambda place: limit,
            AttemptSecrets(made, "attempt", False, Identity.generate(), SecretFiles(bytes(32)), nothing, lambda: None),
            alone(root / "environments", "", 1 << 30),
            lambda text, new="": self.notes.append((text, new)),
        )

    def launch(self, record: JobRecord) -> None:
        self.attempt.perform(RunUntil(math.inf))
        self.attempt.perform(LaunchGuest(record))

    async def begin(self) -> None:
        self.launch(JobRecord())
        async with asyncio.timeout(WAIT_S):
            await self.engine.at_it.wait()

    async def next_event(self) -> RunnerEvent:
        async with asyncio.timeout(WAIT_S):
            return await self.events.get()


@pytest.fixture(params=[False, True])
async def place(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    place = Place(tmp_path, LateEngine(request.param))
    yield place
    await place.attempt.close()
    await place.engine.close()


@pytest.mark.parametrize("place", [False], indirect=True)
async def test_attempt_killed_during_start_leaves_no_guest(place: Place) -> None:
    await place.begin()
    place.attempt.perform(Kill("cancelled"))
    await asyncio.sleep(0)
    place.engine.late.set()
    assert isinstance(await place.next_event(), GuestStarted)
    end = await place.next_event()
    assert isinstance(end, GuestExited) and end.code == 137 and not await place.engine.guests[0].pids()


@pytest.mark.parametrize("place", [True], indirect=True)
async def test_attempt_waiting_to_start_stops_at_once(place: Place) -> None:
    await place.begin()
    assert place.events.empty()
    place.attempt.perform(Kill("cancelled"))
    end = await place.next_event()
    assert isinstance(end, GuestFailed) and "while it waited" in end.reason and not place.engine.guests


@pytest.mark.parametrize("place", [False], indirect=True)
async def test_time_for_which_a_guest_is_held_until_its_end_is_no_lost_work(place: Place) -> None:
    stood = list[tuple[float, float]]()
    place.attempt._loss.stood_still = lambda since, until: stood.append((since, until))  # type: ignore[method-assign]
    place.engine.late.set()
    await place.begin()
    assert isinstance(await place.next_event(), GuestStarted)
    place.attempt.hold("its owner is back")
    place.attempt.perform(Kill("its owner is back"))
    assert isinstance(await place.next_event(), GuestExited) and len(stood) == 1


async def test_notice_to_leave_is_not_replaced_by_one_to_save(tmp_path: Path) -> None:
    place = Place(tmp_path, LateEngine(waits=False))
    (tmp_path / "attempt" / "ctl").mkdir(parents=True)
    await place.attempt._notify("checkpoint", 5.0, "due")
    told = tmp_path / "attempt" / "ctl" / "notice.json"
    assert json.loads(told.read_text())["kind"] == "checkpoint"
    await place.attempt._notify("vacate", 30.0, "its owner is back")
    await place.attempt._notify("checkpoint", 5.0, "due")
    notice = json.loads(told.read_text())
    assert (notice["kind"], notice["reason"], notice["seq"]) == ("vacate", "its owner is back", 2)
    await place.attempt.close()
    await place.engine.close()


async def test_notice_leaves_the_reserve_out_and_outlives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, LateEngine(waits=False))
    (tmp_path / "attempt" / "ctl").mkdir(parents=True)
    place.attempt.reserve_s = 10.0
    await place.attempt._notify("vacate", 30.0, "its owner is back")
    assert json.loads((tmp_path / "attempt" / "ctl" / "notice.json").read_text())["grace_s"] == 20.0

    def full(path: Path, data: bytes) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(attempt_module, "put_file", full)
    await place.attempt._notify("vacate", 30.0, "its owner is back")
    await place.attempt.close()
    await place.engine.close()


@pytest.mark.parametrize("mode", ["rename", "stable"])
async def test_files_that_others_have_open_keep_no_checkpoint_from_being_stored(
    tmp_path: Path, mode: CommitMode
) -> None:
    """Nobody but its guest writes there, and another guest, with millions of mappings, chooses how long a look at it takes."""
    looked: list[frozenset[int]] = []

    def keep(roots: dict[str, Path], *, processes: Processes, **more: object) -> None:
        looked.append(frozenset(processes()))
        raise StoreError("it has been looked at")

    engine = LateEngine(waits=False)
    engine.late.set()
    place = Place(tmp_path, engine, keep, checkpointing=Checkpointing(mode=mode, stable_s=0.0))
    await place.begin()
    assert isinstance(await place.next_event(), GuestStarted)
    (tmp_path / "attempt" / "ckpt" / "step-1").mkdir()
    with (tmp_path / "attempt" / "ckpt" / "step-1" / "state").open("w"):
        assert await place.next_event() == CheckpointFound()
        place.attempt.perform(SaveCheckpoint(seq=1, parent=None, final=False))
        assert await place.next_event() == CheckpointFailed("it has been looked at")
    assert looked == [await place.attempt.pids()] and os.getpid() not in looked[0] and looked[0]
    await place.attempt.close()
    await engine.close()


async def test_unforeseen_error_of_the_last_save_is_reported(tmp_path: Path) -> None:
    def fails(*roots: object, **more: object) -> None:
        raise KeyError("x")

    place = Place(tmp_path, LateEngine(waits=False), fails)
    place.attempt.perform(SaveResult(seq=1, parent=None))
    stored = await place.next_event()
    assert stored == ResultStored(None, (), "its files could not be kept: internal error: KeyError('x')")
    await place.attempt.close()
    await place.engine.close()


@pytest.mark.parametrize(("own_root", "seen"), [(True, "/mesh"), (False, "/base")])
def test_guest_names_its_checkpoints_by_each_path_that_it_has_for_them(own_root: bool, seen: str) -> None:
    places = {f"{seen}/work": "work", f"{seen}/ckpt": "ckpt", f"{seen}/out": "out"}
    assert seen_places(make_spec(checkpointing=None), Path("/base"), own_root) == places
    spec = make_spec(checkpointing=Checkpointing(directory="runs/last"))
    assert seen_places(spec, Path("/base"), own_root) == places | {f"{seen}/work/runs/last": "ckpt"}


async def test_log_written_beside_checkpoints_keeps_none_from_being_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[str]] = []

    async def store(roots: dict[str, Path], *more: object) -> CheckpointStored:
        tried.append(sorted(roots))
        if "ckpt/log.txt" in roots:
            raise FileChanged("log.txt changed while it was being saved")
        return CheckpointStored(b"m" * 32, (), None)

    monkeypatch.setattr(attempt_module, "POLL_S", 0.0)
    place = Place(tmp_path, LateEngine(waits=False), checkpointing=Checkpointing(mode="rename"))
    monkeypatch.setattr(place.attempt.writer, "checkpoint", store)
    (tmp_path / "attempt" / "ckpt" / "step-1").mkdir(parents=True)
    (tmp_path / "attempt" / "ckpt" / "log.txt").touch()
    place.attempt.perform(SaveCheckpoint(seq=1, parent=None, final=False))
    assert isinstance(await place.next_event(), CheckpointStored)
    assert tried[0] == ["ckpt/log.txt", "ckpt/step-1", "log"] and tried[-1] == ["ckpt/step-1", "log"]
    await place.attempt.close()
    await place.engine.close()


async def test_start_that_breaks_off_by_an_unforeseen_error_is_reported(tmp_path: Path) -> None:
    class Broken(LateEngine):
        async def start(self, launch: Launch) -> Guest:
            raise KeyError("x")

    place = Place(tmp_path, Broken(waits=False))
    place.launch(JobRecord())
    failed = await place.next_event()
    assert isinstance(failed, GuestFailed) and failed.elsewhere and failed.reason == "internal error: KeyError('x')"
    await place.attempt.close()
    await place.engine.close()


@pytest.mark.parametrize(
    ("error", "why"),
    [(DiskFull("the disk is full"), "the disk is full"), (KeyError("x"), "internal error: KeyError('x')")],
)
async def test_user_gets_a_report_when_the_last_system_checkpoint_is_not_stored(
    tmp_path: Path, error: Exception, why: str
) -> None:
    def fails(*roots: object, **more: object) -> None:
        raise error

    engine = SavedEngine(waits=False)
    engine.late.set()
    place = Place(tmp_path, engine, fails, checkpointing=Checkpointing(mode="system"))
    await place.begin()
    assert isinstance(await place.next_event(), GuestStarted) and place.attempt.heeds_notice
    place.attempt.notify("vacate", 30.0, "its owner is back")
    assert isinstance(await place.next_event(), GuestExited) and list((tmp_path / "attempt" / "dumps").iterdir())
    place.attempt.perform(SaveCheckpoint(seq=2, parent=b"m" * 32, final=True))
    failed = await place.next_event()
    assert isinstance(failed, CheckpointFailed) and failed.reason == why
    stands = "its last checkpoint could not be stored; the one before it stands"
    assert place.notes[-1] == (f"{stands}: {why}", "not stored")
    assert f"its last checkpoint could not be stored: {why}; the one before it stands\n" in place.log.read_text()
    assert not list((tmp_path / "attempt" / "dumps").iterdir()), "the failed dump frees its disk space"
    await place.attempt.close()
    await engine.close()


async def test_checkpoint_is_found_once_and_a_newer_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_module, "POLL_S", 0.01)
    engine = LateEngine(waits=False)
    engine.late.set()
    place = Place(tmp_path, engine, checkpointing=Checkpointing(stable_s=0.05))
    looks: list[object] = []
    committed = place.attempt._committed

    def look(ended: bool, **more: Any) -> object:
        looks.append(found := committed(ended, **more))
        return found

    monkeypatch.setattr(place.attempt, "_committed", look)
    await place.begin()
    assert isinstance(await place.next_event(), GuestStarted)
    for number in range(2):
        (tmp_path / "attempt" / "ckpt" / f"{number}").write_text("state")
        assert await place.next_event() == CheckpointFound()
        before = len(looks)
        async with asyncio.timeout(WAIT_S):
            while sum(found is not None for found in looks[before:]) < 3:
                await asyncio.sleep(0.01)
        assert place.events.empty()
    await place.attempt.close()
    await engine.close()


async def test_logs_of_a_checkpoint_that_are_too_large_are_left_out(tmp_path: Path) -> None:
    for name in ("log", "ckpt"):
        (tmp_path / "saved" / name).mkdir(parents=True)
        (tmp_path / "saved" / name / "000.txt.times").touch()
    store = open_store(tmp_path / "store")
    for size, left_out in ((SNAPSHOT_BYTES - 2 * BLOCK_BYTES, False), (SNAPSHOT_BYTES, True)):
        os.truncate(tmp_path / "saved" / "log" / "000.txt.times", size)
        roots = {name: tmp_path / "saved" / name for name in ("log", "ckpt")}
        saved = save(store, roots, job=b"j" * 16)
        engine = LateEngine(waits=False)
        engine.late.set()
        root = tmp_path / f"{left_out}"
        root.mkdir()
        place = Place(root, engine, store=store, checkpointing=Checkpointing())
        place.launch(JobRecord(commit=Commit(1, 1, saved.id, None, (), None, 0)))
        assert isinstance(await place.next_event(), GuestStarted)
        assert len([*(root / "attempt" / "logs").iterdir()]) == int(not left_out)
        assert any("left out" in text for text, _ in place.notes) == left_out
        await place.attempt.close()
        await engine.close()


async def test_checkpoint_directory_that_cannot_be_read_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempt_module, "POLL_S", 0.01)
    engine = LateEngine(waits=False)
    engine.late.set()
    place = Place(tmp_path, engine, checkpointing=Checkpointing(mode="rename"))
    await place.begin()
    assert isinstance(await place.next_event(), GuestStarted)
    directory = tmp_path / "attempt" / "ckpt"
    directory.rmdir()
    directory.symlink_to("ckpt")  # a loop
    async with asyncio.timeout(WAIT_S):
        while "cannot be read" not in caplog.text:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert caplog.text.count("cannot be read") == 1
    told = [text for text, new in place.notes if new == "checkpoints unreadable"]
    assert len(told) == 1 and "symbolic links" in told[0], "an event of the job says so too"
    directory.unlink()
    (directory / "step-1").mkdir(parents=True)
    assert await place.next_event() == CheckpointFound()
    await place.attempt.close()
    await engine.close()


@pytest.mark.parametrize("part", ["work", "ckpt"])
async def test_restore_beyond_disk_limit_is_refused_before_anything_is_written(tmp_path: Path, part: str) -> None:
    """A file that is one hole takes a few hundred bytes in the store."""
    trees = {name: tmp_path / name for name in ("work", "ckpt")}
    for name, path in trees.items():
        path.mkdir()
        with (path / "file").open("wb") as file:
            file.truncate(48 * MIB if name == part else 8 * MIB)
    store = open_store(tmp_path / "store")
    ids = {name: save(store, path, prefix=name).id for name, path in trees.items()}
    commit = Commit(1, 1, ids["ckpt"], None, (), None, 0)
    for limit_mib, starts in ((56, False), (57, True)):
        engine = LateEngine(waits=False)
        engine.late.set()
        root = tmp_path / str(limit_mib)
        root.mkdir()
        place = Place(
            root, engine, store=store, limit=limit_mib * MIB, workdir=ids["work"], checkpointing=Checkpointing()
        )
        place.launch(JobRecord(commit=commit))
        end = await place.next_event()
        if starts:
            assert isinstance(end, GuestStarted), end
        else:
            assert isinstance(end, GuestFailed) and end.elsewhere and "holes count" in end.reason, end
            assert not list(root.rglob("file")) and not (root / "attempt").exists()
        await place.attempt.close()
        await engine.close()


@pytest.mark.parametrize("unsure", [frozenset(), frozenset({B})])
@pytest.mark.parametrize("predecessor_is_there", [True, False])
async def test_start_without_its_checkpoint_says_if_it_is_lost_and_what_is_here(
    unsure: frozenset[bytes], predecessor_is_there: bool, tmp_path: Path
) -> None:
    engine, asked = LateEngine(waits=False), []
    place = Place(tmp_path, engine, store=open_store(tmp_path / "store"), checkpointing=Checkpointing())

    async def fetch(manifest: bytes, sources: list[bytes], of: Expected, tell: object = None) -> None:
        assert of == Expected.of(b"j" * 16, place.attempt.spec)
        asked.append((manifest, sources))
        if manifest == b"2" * 32 or not predecessor_is_there:
            raise FetchError("gone", unsure)

    place.attempt._replicator.fetch = fetch  # type: ignore[method-assign]
    place.attempt._replica_policy = lambda: ReplicaPolicy(0, 0, (E, B), never=frozenset({C}))
    ran = Attempted(0, D, "d", 2, 1, running_unix_ms=1, reason="gone"), Attempted(1, E, "e", 3, 1, reason="gone")
    last, before = Commit(2, 2, b"2" * 32, None, (B, C), None, 0), Commit(1, 1, b"1" * 32, None, (A,), None, 0)
    place.launch(JobRecord(commit=last, predecessor=before, attempts=ran))
    end = await place.next_event()
    assert isinstance(end, GuestFailed) and end.elsewhere
    assert end.unfetched == ("away" if unsure else "lost") and end.predecessor_here == predecessor_is_there
    assert asked == [(last.manifest, [B, D, E]), (before.manifest, [A, D, E, B])], "C was revoked"
    assert not (tmp_path / "attempt").exists()
    await place.attempt.close()
    await engine.close()
