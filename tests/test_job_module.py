"""`mesh.job`, in a job and without a mesh."""

import json
import multiprocessing
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import job
from mesh.checkpoints.commit_modes import committed_tree
from mesh.checkpoints.save_schedule import decode_stall
from mesh.model.spec import Checkpointing


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_notice", job._File("notice.json", job._notice._decode))
    monkeypatch.setattr(job, "_timetable", job._Timetable())
    for name in [name for name in os.environ if name.startswith("MESH_")]:
        monkeypatch.delenv(name)


def write_notice(control: Path, **fields: object) -> None:
    notice = {"seq": 1, "kind": "vacate", "deadline_unix": 99.0, "grace_s": 30.0, "reason": "the owner", **fields}
    (control / ".new").write_text(json.dumps(notice))
    (control / ".new").rename(control / "notice.json")


def test_no_notice_without_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert job.notice() is None and not job.should_yield() and job.resume_path() is None
    job.progress(1, 2)
    assert list(tmp_path.iterdir()) == []
    assert job.Checkpoint().directory == Path("ckpts")


def test_new_and_changed_notices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path))
    assert job.notice() is None
    write_notice(tmp_path, kind="checkpoint")
    os.utime(tmp_path / "notice.json", ns=(1, 1))
    notice = job.notice()
    assert notice == job.Notice(1, "checkpoint", 99.0, 30.0, "the owner") and not job.should_yield()
    before = (tmp_path / "notice.json").stat().st_ino
    write_notice(tmp_path, seq=2, later_field=True)
    os.utime(tmp_path / "notice.json", ns=(1, 1))  # within one tick of the clock
    assert (tmp_path / "notice.json").stat().st_ino != before
    assert job.should_yield() and job.notice() is job.notice()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seq": 1}', "null"])
def test_malformed_notice_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path))
    (tmp_path / "notice.json").write_text(text)
    assert job.notice() is None


def test_progress_file_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path))
    job.progress(3, 9)
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    assert json.loads((tmp_path / "progress.json").read_text()) == {"step": 3, "of": 9}


def test_progress_of_several_ranks_ends_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path))
    ranks = [multiprocessing.get_context("fork").Process(target=_rank) for _ in range(2)]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks):
        with suppress(FileNotFoundError):
            assert json.loads((tmp_path / "progress.json").read_text())["of"] == 1000, "a file is whole"
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path / "gone"))
    job.progress(1, 2)


def _rank() -> None:
    for step in range(1000):
        job.progress(step, 1000)


def test_resume_path_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_RESUME", "/mesh/ckpt/step-3")
    assert job.resume_path() == Path("/mesh/ckpt/step-3")


def test_checkpoints_are_atomic_and_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_CKPT_DIR", str(tmp_path / "ckpt"))
    keeper = job.Checkpoint(keep=2)
    assert keeper.latest() is None
    for step in (1, 2, 10):
        keeper.save(step, lambda path, step=step: (path / "weights").write_text(str(step)))  # type: ignore[misc]
    assert sorted(path.name for path in keeper.directory.iterdir()) == ["step-00000002", "step-00000010"]
    latest = keeper.latest()
    assert latest is not None and (latest / "weights").read_text() == "10"
    keeper.save(10, lambda path: (path / "weights").write_text("again"))
    assert (keeper.directory / "step-00000010" / "weights").read_text() == "again"


def test_checkpoint_that_was_just_written_stays(tmp_path: Path) -> None:
    keeper = job.Checkpoint(tmp_path, keep=2)
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        assert keeper.save(step, lambda path: None).exists()
        latest = keeper.latest()
        assert latest is not None and int(latest.name[5:]) == step
    assert len([*tmp_path.iterdir()]) == 2
    keeper = job.Checkpoint(tmp_path / "one", keep=1)
    keeper.save(100, lambda path: None)
    assert keeper.save(60, lambda path: None).exists(), "resumed from an older one"


def test_failed_save_keeps_previous_checkpoint(tmp_path: Path) -> None:
    keeper = job.Checkpoint(tmp_path)
    keeper.save(1, lambda path: (path / "weights").write_text("1"))

    def fail(path: Path) -> None:
        (path / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        keeper.save(2, fail)
    latest = keeper.latest()
    assert latest is not None and latest.name == "step-00000001"


def test_kill_during_deletion_keeps_newest_checkpoint_for_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = job.Checkpoint(tmp_path, keep=1)

    def write(path: Path) -> None:
        (path / "weights").write_text("w")
        (path / "state").write_text("s")

    def killed_half_way(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "weights").unlink()
            os.utime(path, ns=(2**62, 2**62))  # a deletion changes the time of the directory
            raise KeyboardInterrupt

    keeper.save(1, write)
    monkeypatch.setattr(job.shutil, "rmtree", killed_half_way)
    with pytest.raises(KeyboardInterrupt):
        keeper.save(2, write)
    tree = committed_tree(tmp_path, Checkpointing(mode="rename"), 0.0)
    assert tree is not None and tree.resume == "step-00000002" and list(tree.roots) == ["ckpt/step-00000002"]


def write_schedule(control: Path, **fields: object) -> None:
    (control / ".new").write_text(json.dumps(fields))
    (control / ".new").rename(control / "schedule.json")


def test_each_schedule_number_requests_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path))
    write_schedule(tmp_path, number=1, due_unix=2e10, why="hazard")
    assert not job.should_checkpoint() and not job.should_checkpoint(every_s=0.0), "the schedule overrides the interval"
    write_schedule(tmp_path, number=2, due_unix=1.0, why="hazard", later_field=True)
    assert [job.should_checkpoint() for _ in range(3)] == [True, False, False]
    write_notice(tmp_path, kind="checkpoint")
    assert not job.should_checkpoint(), "the notice repeats the same request"
    write_schedule(tmp_path, number=3, due_unix=1.0)
    assert job.should_checkpoint()


def test_unchanged_schedule_costs_one_stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path))
    write_schedule(tmp_path, number=1, due_unix=2e10)
    job.should_checkpoint()
    seen: list[str] = []
    monkeypatch.setattr(job.Path, "read_text", lambda path: seen.append("read"))
    stat = Path.stat
    monkeypatch.setattr(job.Path, "stat", lambda path: (seen.append("stat"), stat(path))[1])
    for _ in range(5):
        job.should_checkpoint()
    assert seen == ["stat"] * 5


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"number": 1}', '{"number": [], "due_unix": 1}', "\udcff"])
def test_malformed_schedule_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path))
    (tmp_path / "schedule.json").write_bytes(text.encode(errors="surrogateescape"))
    assert not job.should_checkpoint() and job.should_checkpoint(every_s=0.0)
    write_notice(tmp_path, seq=4, kind="checkpoint")
    assert [job.should_checkpoint() for _ in range(2)] == [True, False], "without a schedule, the notice counts"


def test_saves_without_a_mesh_follow_the_given_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(job.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(job, "_timetable", job._Timetable())
    keeper = job.Checkpoint(tmp_path)
    assert not job.should_checkpoint() and not job.should_checkpoint(60.0)
    now[0] += 60.0
    assert [job.should_checkpoint(60.0), job.should_checkpoint(60.0), job.should_checkpoint()] == [True, False, False]
    now[0] += 59.0
    keeper.save(1, lambda path: None)
    now[0] += 59.0
    assert not job.should_checkpoint(60.0), "the interval starts at the last save"


def test_save_writes_its_stall_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path))
    now = [0.0]
    monkeypatch.setattr(job.time, "monotonic", lambda: now[0])

    def write(path: Path) -> None:
        now[0] += 2.5

    with job.Checkpoint(tmp_path / "ckpt") as keeper:
        keeper.save(1, write)
        assert decode_stall((tmp_path / "stall.json").read_bytes()) == 2.5
        assert keeper.snapshot(2, {"step": 2})
        assert decode_stall((tmp_path / "stall.json").read_bytes()) == 0.0


@given(st.binary(max_size=300) | st.builds(lambda x: json.dumps({"seconds": x}).encode(), st.floats() | st.integers()))
def test_stall_decoder_returns_bounded_seconds_or_none(data: bytes) -> None:
    stall_s = decode_stall(data)
    assert stall_s is None or 0 <= stall_s <= 86_400
