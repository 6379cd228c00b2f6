"""Copies of what attempts elsewhere print: they join piece to piece, keep the end, and say what they lack."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mesh.jobs import joblogs
from mesh.jobs.joblogs import JobLogs
from mesh.jobs.logcopies import PIECE_BYTES, _news
from tests.jobs.worlds import JOB


def test_pieces_join_whatever_overlaps(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    assert logs.append_copy(JOB, 0, 0, b"hello ", "ada") == 6 and logs.owner(JOB) == "ada"
    assert logs.append_copy(JOB, 0, 3, b"lo world", "ada") == 11
    assert logs.append_copy(JOB, 0, 0, b"hel", "ada") == 11, "what is known already changes nothing"
    assert logs.read_copy(JOB, 0, 0) == b"hello world" and logs.read_copy(JOB, 0, 6) == b"world"
    assert logs.read_copy(JOB, 0, 11) == b"" == logs.read_copy(JOB, 1, 0)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    logs.append_copy(JOB, 0, 0, b"begin", "ada")
    assert logs.append_copy(JOB, 0, 100, b"end", "ada") == 103
    assert logs.read_copy(JOB, 0, 0) == b"[mesh: 100 bytes before this were not kept]\nend"
    (tmp_path / "damaged").mkdir()


def test_only_the_end_of_much_is_kept(tmp_path: Path) -> None:
    logs, kept = JobLogs(tmp_path), joblogs.COPY_KEPT_BYTES
    end = 0
    for number in range(12):
        end = logs.append_copy(JOB, 0, end, bytes([number]) * (kept // 4), "ada")
    assert end == 3 * kept
    tail = logs.read_copy(JOB, 0, end - kept // 4)
    assert tail == bytes([11]) * (kept // 4)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.copy")) <= 2 * kept + 16


def test_a_damaged_copy_is_begun_anew(tmp_path: Path) -> None:
    logs = JobLogs(tmp_path)
    logs.append_copy(JOB, 0, 0, b"begin", "ada")
    (path,) = tmp_path.rglob("*.copy")
    path.write_bytes(b"rubbish")
    assert logs.read_copy(JOB, 0, 0) == b""
    assert logs.append_copy(JOB, 0, 5, b"more", "ada") == 9 and logs.read_copy(JOB, 0, 5) == b"more"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=8))
def test_a_copy_never_says_what_was_not_printed(tmp_path_factory: object, pieces: list[tuple[int, int]]) -> None:
    whole = bytes(range(100))
    logs = JobLogs(tmp_path_factory.mktemp("logs"))  # type: ignore[attr-defined]
    for offset, length in pieces:
        end = logs.append_copy(JOB, 0, offset, whole[offset : offset + length], "ada")
        assert end >= offset + length or length == 0
    text = logs.read_copy(JOB, 0, 0)
    assert whole.find(text.partition(b"kept]\n")[2] if text.startswith(b"[mesh") else text) >= 0


def test_of_a_flood_only_the_end_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "000.txt"
    assert _news(path, 0) == (0, b"")
    path.write_bytes(b"x" * PIECE_BYTES * 3 + b"end")
    offset, data = _news(path, 10)
    assert offset == path.stat().st_size - PIECE_BYTES and data.endswith(b"end") and len(data) == PIECE_BYTES
    assert _news(path, offset + len(data)) == (offset + len(data), b"")
