"""Lookup of nodes and jobs: full names first, then prefixes, never a guess among several."""

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.handlers.lookup import JobLookup
from mesh.api.handlers.placement import _with_end
from mesh.model.spec import ArrayPlace, format_job
from mesh.util.errors import ExitCode, MeshError
from mesh.util.lookup import job_name_meant, node_meant

NICKS = {"abc234": "desk", "abd567": "den", "xyz777": "desk-2", "qqq222": "abc"}
USERS = {"abc234": "ada", "abd567": "den", "xyz777": "", "qqq222": "ada"}


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("desk", "abc234"),
        ("den", "abd567"),
        ("ABD567", "abd567"),
        ("xy", "xyz777"),
        ("desk-", "xyz777"),
        ("abc", "qqq222"),
    ],
)
def test_node_is_found_by_name_id_or_prefix(text: str, node: str) -> None:
    assert node_meant(text, NICKS, USERS) == node


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("de", ExitCode.USAGE, "'de' is ambiguous: desk (abc234), den (abd567), desk-2 (xyz777)"),
        ("ab", ExitCode.USAGE, "'ab' is ambiguous: abc (qqq222), desk (abc234), den (abd567)"),
        ("lab", ExitCode.NOT_FOUND, "no node called 'lab' (known: desk, den, desk-2, abc)"),
        ("", ExitCode.NOT_FOUND, "no node called ''"),
        ("ada", ExitCode.NOT_FOUND, "'ada' is a user, not a node: name one of desk (abc234), abc (qqq222)"),
    ],
)
def test_ambiguous_or_unknown_node_is_named(text: str, code: ExitCode, words: str) -> None:
    with pytest.raises(MeshError) as caught:
        node_meant(text, NICKS, USERS)
    assert caught.value.code == code and words in str(caught.value)


def test_irreversible_commands_need_full_name() -> None:
    assert (
        node_meant("den", NICKS, USERS, whole=True) == "abd567"
        and node_meant("xyz", NICKS, USERS, whole=True) == "xyz777"
    )
    with pytest.raises(MeshError, match="no node called"):
        node_meant("desk-", NICKS, USERS, whole=True)


@given(st.text(max_size=4), *[st.sets(st.text(min_size=1, max_size=4), max_size=5)] * 2)
def test_job_is_found_by_unique_prefix(text: str, others: set[str], own: set[str]) -> None:
    names = own | others
    fits = {name for name in names if text and name.startswith(text)}
    fits = fits & own or fits
    try:
        assert job_name_meant(text, names, own) == (text if text in names else next(iter(fits), None))
    except MeshError:
        assert len(fits) > 1 and text not in names


def job_lookup(rows: list[Any], archive: Any = None) -> JobLookup:
    membership: Any = SimpleNamespace(credentials=SimpleNamespace(user="her"))
    table = SimpleNamespace(all=lambda: {row.job: row for row in rows})
    jobs: Any = SimpleNamespace(job_table=table, archive=archive)
    nothing: Any = None
    return JobLookup(b"me", membership, nothing, nothing, jobs, nothing)


def row(job: bytes, name: str = "", user: str = "her", over: bool = False, **more: Any) -> Any:
    fields = {"created_unix_ms": job[0], "array": None, "attempts": (), "outcome": "its end" if over else None}
    return SimpleNamespace(job=job, user=user, name=name, **fields | more)


@pytest.mark.parametrize(
    ("text", "job"),
    [("train", b"2"), ("tra", b"2"), ("sweep", b"4"), ("eval", b"5"), ("s", b"4"), ("t", b"2")],
)
def test_name_means_the_newest_of_own_jobs_before_those_of_others(text: str, job: bytes) -> None:
    named = [("her", "train"), ("her", "train"), ("his", "train"), ("her", "sweep"), ("his", "eval"), ("his", "test")]
    rows = [row(b"%d" % number, name, user) for number, (user, name) in enumerate(named, 1)]
    assert job_lookup(rows).find_job(text).job == job


def number(count: int, first: int = 0) -> bytes:
    return bytes([first, count]) + bytes(14)


def test_full_id_beats_a_full_name_and_that_beats_the_beginning_of_an_id() -> None:
    old, new = number(1), number(2, 0x88)
    rows = [row(old, "bert"), row(new, format_job(old)[:4]), row(number(3, 0x44), format_job(old))]
    assert job_lookup(rows[:1]).find_job(format_job(old)[:4].upper()).job == old
    assert job_lookup(rows).find_job(format_job(old)[:4]).job == new, "another job has that name"
    assert job_lookup(rows).find_job(format_job(old)).job == old
    mine = [row(old), row(new, format_job(old)[:4], "his")]
    assert job_lookup(mine).find_job(format_job(old)[:4]).job == new, "also the name of another user's job"


def test_ended_job_does_not_stand_before_one_that_goes_on() -> None:
    named = [row(number(1, 1), "train"), row(number(2, 2), "train", over=True), row(number(3, 3), "train", "his")]
    assert job_lookup(named).find_job("train").job == named[0].job
    same = [row(number(1)), row(number(2), over=True)]
    begin = format_job(number(1))[:2]
    assert job_lookup(same).find_job(begin).job == same[0].job
    with pytest.raises(MeshError, match="ambiguous"):
        job_lookup([*same, row(number(3))]).find_job(begin)
    with pytest.raises(MeshError, match="ambiguous"):
        job_lookup([row(number(1), over=True), row(number(2), over=True)]).find_job(begin)


async def test_archive_is_asked_before_the_beginning_of_an_id_counts() -> None:
    asked = []

    async def find(text: str, whole: bool) -> None:
        asked.append((text, whole))

    lookup = job_lookup([row(number(1), "bert")], SimpleNamespace(find=find))
    begin = format_job(number(1))[:4]
    for text in ("bert", format_job(number(1)), begin, "ber", "nothing"):
        await lookup.load(text)
    assert asked == [(begin, True), ("ber", True), ("nothing", False)]


async def test_only_the_id_of_an_array_waits_for_its_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.api.handlers.lookup.HEARD_WITHIN_S", 0.2)
    array, now_ms = ArrayPlace(number(9, 9), 1, 0, 3), int(time.time() * 1000)
    archive = SimpleNamespace(find=AsyncMock())
    lookup = job_lookup([row(number(1), created_unix_ms=now_ms, array=array)], archive)
    begun = time.monotonic()
    await lookup.load(format_job(number(1)))
    assert time.monotonic() - begun < 0.1
    await lookup.load(format_job(array.array))
    assert time.monotonic() - begun > 0.2


def test_array_says_which_jobs_it_has() -> None:
    def of(count: int) -> list[Any]:
        return [row(number(n, 1), array=ArrayPlace(number(9, 9), n, n, count)) for n in range(count)]

    name = format_job(number(9, 9))[:8]
    with pytest.raises(MeshError, match=f"an array of 3 jobs, 0, 1, 2: name one of them, as {name}_0"):
        job_lookup(of(3)).find_job(name)
    with pytest.raises(MeshError, match=f"an array of 40 jobs, 0 to 39 \\(`mesh ps {name}`\\): name one"):
        job_lookup(of(40)).find_job(name)


@pytest.mark.parametrize(
    ("indices", "chosen"),
    [("7", [7]), ("3-5", [3, 4, 5]), ("18-99", [18, 19, 20]), ("20-20", [20]), ("007", [7])],
)
def test_some_jobs_of_an_array_are_named_by_its_id_or_its_name(indices: str, chosen: list[int]) -> None:
    rows = [row(number(n, 1), "my_sweep", array=ArrayPlace(number(9, 9), n, n - 1, 20)) for n in range(1, 21)]
    lookup = job_lookup([*rows, row(number(30, 1), "my"), row(number(31, 1), "my_sweep", "his")])
    for array in (format_job(number(9, 9)), format_job(number(9, 9))[:8].upper(), "my_sweep"):
        found = lookup.find_jobs(f"{array}_{indices}")
        assert [status.array.index for status in found if status.array is not None] == chosen, array


@pytest.mark.parametrize("indices", ["0", "21", "5-3", "21-30", "1-", "-3", "1-2-3", "x", "٣", "1" * 5000, "[1-3]"])
def test_indices_that_an_array_has_not_name_no_job(indices: str) -> None:
    rows = [row(number(n, 1), "sweep", array=ArrayPlace(number(9, 9), n, n - 1, 20)) for n in range(1, 21)]
    for array in (format_job(number(9, 9)), "sweep"):
        with pytest.raises(MeshError) as none:
            job_lookup(rows).find_jobs(f"{array}_{indices}")
        assert none.value.code == ExitCode.NOT_FOUND


def test_full_name_and_its_beginning_are_no_indices() -> None:
    array = [row(number(n, 1), "train", array=ArrayPlace(number(9, 9), n, n, 9)) for n in range(2)]
    other, longer = row(number(5, 5), "train_1"), row(number(6, 6), "train_27")
    assert job_lookup([*array, other, longer]).find_jobs("train_1") == [other]
    assert job_lookup([*array, longer]).find_jobs("train_1") == [array[1]]
    assert job_lookup([*array, longer]).find_jobs("train_2") == [longer], "the array has no index 2"


def test_span_means_the_batches_that_are_whole_in_it() -> None:
    rows = [row(number(n, 1), array=ArrayPlace(number(9, 9), 1 + 25 * n, n, 4, 0, 25, 100)) for n in range(4)]
    name = format_job(number(9, 9))
    for indices, chosen in (("26", [1]), ("26-50", [1]), ("1-60", [0, 1]), ("1-100", [0, 1, 2, 3])):
        assert job_lookup(rows).find_jobs(f"{name}_{indices}") == [rows[n] for n in chosen], indices


def test_refusal_of_a_node_says_how_the_job_failed_there() -> None:
    attempts: Any = [SimpleNamespace(node=b"a", reason="old"), SimpleNamespace(node=b"a", reason="no uv")]
    reasons = ["is in zone b", "failed this job a moment ago"]
    assert _with_end(reasons, attempts, b"a") == ["is in zone b", "failed this job a moment ago: no uv"]
    assert _with_end(reasons, attempts, b"b") == reasons
