"""A job's output where there have been more attempts than others are told of: a reader on its own node, with real files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.api.errors import MeshError
from mesh.api.logs import LogReader
from mesh.jobs.ledger import Attempt
from mesh.jobs.status import ATTEMPTS_SHOWN

JOB, ME = b"j" * 16, b"m" * 32
HAD = ATTEMPTS_SHOWN + 4


def reader(directory: Path) -> LogReader:
    attempts = tuple(Attempt(number, ME, "desk", 1, 0, 0, 0, reason="left") for number in range(HAD))
    for attempt in attempts:
        (directory / str(attempt.number)).write_text(f"attempt {attempt.number}\n")
    status = SimpleNamespace(job=JOB, attempts=attempts[-ATTEMPTS_SHOWN:], outcome=None, witnesses=(ME,), commit=None)

    async def all_attempts(status: Any) -> tuple[Attempt, ...]:
        return attempts

    desk: Any = SimpleNamespace(find_job=lambda text: status, attempts=all_attempts, statuses=lambda: {JOB: status})
    logs = SimpleNamespace(path=lambda job, number: directory / str(number))
    daemon: Any = SimpleNamespace(
        me=ME,
        jobs=SimpleNamespace(board=SimpleNamespace(), logs=logs, attempts={}),
        membership=SimpleNamespace(members=lambda: [SimpleNamespace(node_id=ME, present=True)]),
    )
    return LogReader(daemon, desk)


async def read(directory: Path, follow: bool, only: int | None) -> str:
    return b"".join([piece async for piece in reader(directory).follow_log("job", follow, only)]).decode()


async def test_no_attempt_is_left_out(tmp_path: Path) -> None:
    assert await read(tmp_path, False, None) == "".join(f"attempt {number}\n" for number in range(HAD))


@pytest.mark.parametrize("follow", [False, True])
async def test_of_one_attempt_only_and_until_that_has_ended(follow: bool, tmp_path: Path) -> None:
    assert await read(tmp_path, follow, 2) == "attempt 2\n"
    with pytest.raises(MeshError, match=f"no attempt {HAD} so far"):
        await read(tmp_path, follow, HAD)
