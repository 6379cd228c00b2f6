"""Logs: copies of an attempt's output join piece by piece and keep the end; times stay with the bytes that they belong to."""

import os
import time
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.jobs import log_times
from mesh.jobs import logs as logs_module
from mesh.jobs.log_times import (
    MARK_BYTES,
    LogPiece,
    Mark,
    decode_marks,
    decode_piece,
    encode_piece,
    mark_sizes,
    offset_since,
    read_marks,
    read_piece,
    times_path,
)
from mesh.jobs.logs import COPIES, COPY_MARKS, SENT_BYTES, JobLogs, LogShipping, snapshot_logs
from mesh.rpc.client import PeerClient
from tests.consensus.worlds import JOB

HOST, MATE = b"h" * 32, b"m" * 32


def piece(offset: int, data: bytes, unix_ms: int = 7000) -> LogPiece:
    return LogPiece(offset, data, ((unix_ms, offset + len(data)),))


def copied(logs: JobLogs, offset: int) -> bytes:
    found = logs.read_copy(JOB, 0, HOST, offset)
    return found.data if found is not None else b""


def test_overlapping_pieces_of_a_log_are_joined(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    assert logs.append_copy(JOB, 0, HOST, piece(0, b"hello "), b"ada") == 6 and logs.owner(JOB) == b"ada"
    assert logs.append_copy(JOB, 0, HOST, piece(3, b"lo world", 8000), b"ada") == 11
    assert logs.append_copy(JOB, 0, HOST, piece(0, b"hel", 9000), b"ada") == 11, "a repeated piece changes nothing"
    assert copied(logs, 0) == b"hello world" and copied(logs, 6) == b"world"
    assert copied(logs, 11) == b"" and logs.read_copy(JOB, 1, HOST, 0) is None
    assert logs.read_copy(JOB, 0, HOST, 2) == LogPiece(2, b"llo world", ((7000, 6), (8000, 11)))


def test_nodes_of_a_gang_have_a_copy_each(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    for node, text in ((HOST, b"rank 0"), (MATE, b"rank 1")):
        logs.append_copy(JOB, 0, node, piece(0, text), b"ada")
    assert logs.read_copy(JOB, 0, MATE, 0) == piece(0, b"rank 1") and copied(logs, 0) == b"rank 0"


def test_copy_of_a_log_starts_over_after_missing_parts(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    logs.append_copy(JOB, 0, HOST, piece(0, b"begin"), b"ada")
    assert logs.append_copy(JOB, 0, HOST, piece(100, b"end", 8000), b"ada") == 103
    assert logs.read_copy(JOB, 0, HOST, 0) == piece(100, b"end", 8000)


def test_copy_keeps_only_the_end_of_a_long_log(tmp_path: Path) -> None:
    logs, kept = JobLogs(tmp_path), logs_module.COPY_KEPT_BYTES
    end = 0
    for number in range(12):
        end = logs.append_copy(JOB, 0, HOST, piece(end, bytes([number]) * (kept // 4), 1000 * number), b"ada")
    assert end == 3 * kept
    tail = logs.read_copy(JOB, 0, HOST, end - kept // 4)
    assert tail == piece(end - kept // 4, bytes([11]) * (kept // 4), 11_000)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.copy")) <= 2 * kept + 16


def test_copy_keeps_the_last_times(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    for start in range(0, 2 * COPY_MARKS, COPY_MARKS // 2):
        marks = tuple((1000 * at, at) for at in range(start + 1, start + COPY_MARKS // 2 + 1))
        logs.append_copy(JOB, 0, HOST, LogPiece(start, b"x" * len(marks), marks), b"ada")
    found = logs.read_copy(JOB, 0, HOST, 0)
    assert found is not None and len(found.data) == 2 * COPY_MARKS and len(found.marks) == COPY_MARKS
    assert found.marks[-1] == (2000 * COPY_MARKS, 2 * COPY_MARKS)


def test_damaged_copy_starts_over(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    logs.append_copy(JOB, 0, HOST, piece(0, b"begin"), b"ada")
    (path,) = tmp_path.rglob("*.copy")
    path.write_bytes(b"rubbish")
    assert copied(logs, 0) == b""
    assert logs.append_copy(JOB, 0, HOST, piece(5, b"more"), b"ada") == 9 and copied(logs, 5) == b"more"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=8))
def test_copy_contains_only_printed_output(tmp_path_factory: object, pieces: list[tuple[int, int]]) -> None:
    whole = bytes(range(100))
    logs = JobLogs(tmp_path_factory.mktemp("logs"))  # type: ignore[attr-defined]
    for offset, length in pieces:
        end = logs.append_copy(JOB, 0, HOST, piece(offset, whole[offset : offset + length]), b"ada")
        assert end >= offset + length
    found = logs.read_copy(JOB, 0, HOST, 0)
    assert (found is None) == (not pieces)
    if found is not None:
        assert found.data == whole[found.offset : found.end] and found == decode_piece(encode_piece(found))


def test_only_the_end_of_a_burst_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "000.txt"
    assert logs_module._end_of(path, 0, SENT_BYTES) is None
    path.write_bytes(b"x" * SENT_BYTES * 3 + b"end")
    found = logs_module._end_of(path, 10, SENT_BYTES)
    assert found is not None and found.data.endswith(b"end") and len(found.data) == SENT_BYTES
    assert found.end == path.stat().st_size and logs_module._end_of(path, found.end, SENT_BYTES) is None


def printed(path: Path, text: str, unix_s: float, mark: bool = True) -> None:
    with path.open("a") as file:
        file.write(text)
    os.utime(path, (unix_s, unix_s))
    if mark:
        mark_sizes([path])


def test_each_byte_of_a_log_has_the_time_at_which_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "000.txt"
    mark_sizes([path])
    printed(path, "one\n", 100.0)
    mark_sizes([path])
    printed(path, "two\nthr", 103.5)
    printed(path, "ee\n", 110.0)
    printed(path, "four\n", 110.2)
    assert [unix_ms for unix_ms, _ in read_marks(path)] == [100_000, 103_500, 110_000], "at most one mark a second"
    found = read_piece(path, 0)
    assert found is not None and [*found.timed()] == [
        (100_000, b"one\n"),
        (103_500, b"two\nthr"),
        (110_000, b"ee\n"),
        (110_200, b"four\n"),
    ]
    assert read_piece(path, 2, 4) == LogPiece(2, b"e\ntw", ((100_000, 4), (103_500, 6)))


@pytest.mark.parametrize(
    ("since_ms", "rest"), [(0, b"one"), (100_001, b"\ntwo"), (103_500, b"\ntwo"), (103_501, b"o\n")]
)
def test_reading_starts_one_byte_before_the_lines_of_a_time(tmp_path: Path, since_ms: int, rest: bytes) -> None:
    path = tmp_path / "000.txt"
    printed(path, "one\n", 100.0)
    printed(path, "two\n", 103.5)
    printed(path, "three\n", 109.0, mark=False)
    if since_ms == 103_501:
        rest = b"\nthree"
    found = read_piece(path, offset_since(path, since_ms))
    assert found is not None and found.data.startswith(rest)


def test_times_follow_a_log_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "000.txt"
    printed(path, "x" * 100, 100.0)
    printed(path, "y" * 100, 102.0)
    os.truncate(path, 150)
    printed(path, "z" * 10, 104.0)
    assert read_marks(path) == [(100_000, 100), (104_000, 160)]


def test_times_of_a_long_log_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_times, "DOUBLE_AFTER", 4)
    path = tmp_path / "000.txt"
    for second in range(1, 61):
        printed(path, "x", float(second))
    gaps = [b - a for (a, _), (b, _) in zip(read_marks(path), read_marks(path)[1:], strict=False)]
    assert gaps == [1000] * 3 + [2000] * 4 + [4000] * 4 + [8000] * 4
    found = read_piece(path, 0)
    assert found is not None and found.marks[-1] == (60_000, 60)


@pytest.mark.parametrize("unix_s", [-5.0, 1e11])
def test_guest_cannot_date_its_output_before_1970_or_into_the_future(tmp_path: Path, unix_s: float) -> None:
    path = tmp_path / "000.txt"
    printed(path, "x", unix_s)
    ((unix_ms, size),) = read_marks(path)
    assert 0 <= unix_ms <= time.time() * 1000 and size == 1
    found = read_piece(path, 0)
    assert found is not None and found == decode_piece(encode_piece(found))


def test_half_written_time_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "000.txt"
    printed(path, "one\n", 100.0)
    with times_path(path).open("ab") as file:
        file.write(b"half")
    assert read_marks(path) == [(100_000, 4)]


def test_snapshot_keeps_the_end_of_each_log_with_its_times(tmp_path: Path) -> None:
    kept, live = logs_module.COPY_KEPT_BYTES, tmp_path / "001.txt"
    (tmp_path / "logs").mkdir()
    printed(tmp_path / "logs" / "000.txt", "earlier\n", 50.0)
    printed(live, "x" * 100, 100.0)
    printed(live, "y" * kept, 102.0)
    snapshot = snapshot_logs(tmp_path, live)
    assert read_piece(snapshot / "000.txt", 0) == LogPiece(0, b"earlier\n", ((50_000, 8),))
    assert read_piece(snapshot / "001.txt", 0) == LogPiece(0, b"y" * kept, ((102_000, kept),))


def test_snapshot_reads_only_the_last_times_and_the_newest_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lender's checkpoint can hold any number of logs, and a hole of any size in place of times."""
    (tmp_path / "logs").mkdir()
    for number in range(COPIES + 2):
        printed(tmp_path / "logs" / f"{number + 990:03d}.txt", "x", 50.0)
    os.truncate(times_path(tmp_path / "logs" / "1050.txt"), 64 << 20)
    read: list[int] = []

    def decode(data: bytes) -> list[Mark]:
        read.append(len(data))
        return decode_marks(data)

    monkeypatch.setattr(log_times, "decode_marks", decode)
    printed(tmp_path / "2000.txt", "live", 100.0)
    read.clear()
    names = {path.name for path in snapshot_logs(tmp_path, tmp_path / "2000.txt").glob("*.txt")}
    assert names == {*(f"{number}.txt" for number in range(993, 990 + COPIES + 2)), "2000.txt"}
    assert max(read) == COPY_MARKS * MARK_BYTES


@pytest.mark.parametrize(
    "marks",
    [
        (),
        ((1, 4),),
        ((1, 6),),
        ((1, 3), (2, 3), (3, 5)),
        ((1, 4), (2, 3), (3, 5)),
        ((1, 2), (2, 5)),
        ((-1, 5),),
        ((2**60, 5),),
    ],
)
def test_piece_whose_times_do_not_fit_is_refused(marks: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="times of a log"):
        decode_piece(encode_piece(LogPiece(2, b"abc", marks)))
    with pytest.raises(ValueError, match="not a piece"):
        decode_piece(b"rubbish")


# --- old logs


def aged(logs: JobLogs, job: bytes, days: float, size: int = 1) -> Path:
    """Write a log of a job that printed last so many days ago; return its directory."""
    path = logs.prepare(job, 0, b"ada")
    path.write_bytes(bytes(size))
    for file in path.parent.iterdir():
        os.utime(file, (time.time() - days * 86_400,) * 2)
    return path.parent


OLD, NEW = b"\1" * 16, b"\2" * 16


def test_log_is_kept_for_a_week(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    old, new = aged(logs, OLD, 7.1), aged(logs, NEW, 6.9)
    logs.trim(set())
    assert not old.exists()
    assert new.exists()


def test_log_of_a_running_job_is_kept(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    old = aged(logs, OLD, 8)
    logs.trim({OLD})
    assert old.exists()


def test_oldest_logs_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "KEPT_BYTES", 1500)
    logs = JobLogs(tmp_path)
    old, new = aged(logs, OLD, 2, 1000), aged(logs, NEW, 1, 1000)
    logs.trim(set())
    assert not old.exists()
    assert new.exists()


def test_log_that_goes_meanwhile_does_not_end_the_trim(tmp_path: Path) -> None:
    """Copies are written, and the oldest of them removed, while the logs are looked at."""
    logs = JobLogs(tmp_path)
    old, new = aged(logs, OLD, 7.1), aged(logs, NEW, 6.9)
    for home in (old, new):
        (home / "gone.copy").symlink_to("a file that was here when the directory was read")
    logs.trim(set())
    assert not old.exists() and new.exists()


# --- copies on witnesses


class Witness:
    """A witness that answers each piece with this offset."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.heard = answer, bytearray()

    async def call(self, node: bytes, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        self.heard += decode_piece(body).data
        return self.answer


@pytest.mark.parametrize("answer", [b"1000000", b"3"], ids=["beyond the log", "its end"])
async def test_witness_gets_what_follows_whatever_it_answers(tmp_path: Path, answer: bytes) -> None:
    path, witness = tmp_path / "log", Witness(answer)
    shipping = LogShipping(cast(PeerClient, witness))
    for text in (b"one", b"two"):
        with path.open("ab") as file:
            file.write(text)
        await shipping.ship({(JOB, 0): (path, [b"w" * 32])})
    assert witness.heard == b"onetwo"
