"""Logs of a job with more attempts than its status shows, read on their own node from real files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh.api.handlers.logs import LineSelector, LogReader
from mesh.api.queries import LogQuery
from mesh.consensus.status import ATTEMPTS_SHOWN
from mesh.jobs.log_times import LogPiece
from mesh.jobs.logs import COPY_KEPT_BYTES, JobLogs
from mesh.model.record import Attempt
from mesh.util.errors import MeshError

JOB, ME = b"j" * 16, b"m" * 32
HAD = ATTEMPTS_SHOWN + 4


def reader(directory: Path) -> LogReader:
    attempts = tuple(Attempt(number, ME, "desk", 1, 0, 0, 0, reason="left") for number in range(HAD))
    for attempt in attempts:
        (directory / str(attempt.number)).write_text(f"attempt {attempt.number}\n")
    status = SimpleNamespace(job=JOB, attempts=attempts[-ATTEMPTS_SHOWN:], outcome=None, witnesses=(ME,), commit=None)

    async def all_attempts(status: Any) -> tuple[Attempt, ...]:
        return attempts

    lookup: Any = SimpleNamespace(
        me=ME, find_job=lambda text: status, attempts=all_attempts, statuses=lambda: {JOB: status}
    )
    jobs: Any = SimpleNamespace(logs=SimpleNamespace(path=lambda job, number: directory / str(number)), attempts={})
    membership: Any = SimpleNamespace(members=lambda: [SimpleNamespace(node_id=ME, present=True)])
    nothing: Any = None
    return LogReader(membership, nothing, jobs, nothing, lookup)


async def read(directory: Path, follow: bool, only: int | None) -> str:
    return b"".join([piece async for piece in reader(directory).follow_log("job", LogQuery(follow, only))]).decode()


async def test_node_of_a_gang_gives_its_own_log_as_its_own_only(tmp_path: Path) -> None:
    """A witness that is a member of the gang was asked for rank 0's log, and answered with its own."""
    logs, mate, third, nothing = JobLogs(tmp_path), b"a" * 32, b"t" * 32, cast(Any, None)
    logs.prepare(JOB, 0, b"ada").write_text("rank 1\n")
    logs.append_copy(JOB, 0, mate, LogPiece(0, b"rank 0\n", ((1, 7),)), b"ada")
    jobs, lookup = SimpleNamespace(logs=logs, attempts={}), SimpleNamespace(me=ME)
    reader = LogReader(nothing, nothing, cast(Any, jobs), nothing, cast(Any, lookup))
    for node, text in ((ME, b"rank 1\n"), (mate, b"rank 0\n"), (third, b"")):
        assert b"".join([piece.data async for piece in reader.tail(JOB, 0, node, 0, False, 0)]) == text


@pytest.mark.parametrize("follow", [False, True])
async def test_rank_that_no_attempt_had_or_may_have_is_refused(follow: bool, tmp_path: Path) -> None:
    async def spec_of(status: Any) -> Any:
        return SimpleNamespace(most_nodes=3)

    asked = reader(tmp_path)
    asked._lookup.spec_of = spec_of  # type: ignore[method-assign]
    with pytest.raises(MeshError, match="has no rank 3: it has ranks 0 to 2"):
        _ = [piece async for piece in asked.follow_log("job", LogQuery(follow, rank=3))]
    assert [piece async for piece in asked.follow_log("job", LogQuery(rank=2))] == [], "a later attempt may have it"


async def test_log_contains_every_attempt(tmp_path: Path) -> None:
    assert await read(tmp_path, False, None) == "".join(f"attempt {number}\n" for number in range(HAD))


@pytest.mark.parametrize("follow", [False, True])
async def test_log_of_one_attempt_ends_with_the_attempt(follow: bool, tmp_path: Path) -> None:
    assert await read(tmp_path, follow, 2) == "attempt 2\n"
    with pytest.raises(MeshError, match=f"no attempt {HAD} so far"):
        await read(tmp_path, follow, HAD)


def select(since_ms: int | None, timestamps: bool, *pieces: tuple[int, int, LogPiece]) -> str:
    lines = LineSelector(since_ms, timestamps)
    return b"".join(lines.select(attempt, given, piece) for attempt, given, piece in pieces).decode()


FIRST = LogPiece(0, b"one\ntwo\nth", ((1_000, 4), (60_000, 10)))
SECOND = LogPiece(10, b"ree\r\nfour", ((61_250, 19),))


def test_lines_are_stamped_with_the_time_of_their_first_byte() -> None:
    assert select(None, True, (0, 0, FIRST), (0, 10, SECOND), (1, 0, LogPiece(0, b"next\n", ((70_000, 5),)))) == (
        "1970-01-01T00:00:01.000Z one\n"
        "1970-01-01T00:01:00.000Z two\n"
        "1970-01-01T00:01:00.000Z three\r\n"
        "1970-01-01T00:01:01.250Z four\n"
        "1970-01-01T00:01:10.000Z next\n"
    ), "an attempt begins on a line of its own"


@pytest.mark.parametrize(
    ("since_ms", "shown"),
    [(0, "one\ntwo\nthree\r\nfour"), (60_000, "two\nthree\r\nfour"), (60_001, "four"), (61_251, "")],
)
def test_lines_are_selected_by_the_time_of_their_first_byte(since_ms: int, shown: str) -> None:
    assert select(since_ms, False, (0, 0, FIRST), (0, 10, SECOND)) == shown


def test_missing_part_of_a_log_is_reported_only_in_the_whole_log() -> None:
    end = LogPiece(100, b"end\n", ((2_000, 104),))
    note = "[mesh: 90 bytes before this were not kept]\n"
    assert select(None, False, (0, 10, end)) == f"{note}end\n"
    assert select(None, True, (0, 10, end)) == f"1970-01-01T00:00:02.000Z {note}1970-01-01T00:00:02.000Z end\n"
    assert select(1_000, False, (0, 10, end)) == "end\n", "lines before that time are left out on purpose"


def kept(log: bytes, times: bytes) -> LogPiece:
    files = {"log/000.txt": log, "log/000.txt.times": times}
    store: Any = SimpleNamespace(read_file=lambda manifest, name, cipher: iter([files[name]] * 2))
    nothing: Any = None
    return LogReader(nothing, store, nothing, nothing, nothing)._read_kept(b"", "log/000.txt", None)


def test_log_in_a_checkpoint_is_read_only_up_to_the_length_that_is_kept() -> None:
    with pytest.raises(ValueError, match="too long"):
        kept(b"x" * (COPY_KEPT_BYTES // 2 + 1), b"")
    with pytest.raises(ValueError, match="do not fit"):
        kept(b"x" * (COPY_KEPT_BYTES // 2), b"")
