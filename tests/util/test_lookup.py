"""Lookup of nodes and jobs: full names first, then prefixes, never a guess among several."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.handlers.lookup import JobLookup
from mesh.util.errors import ExitCode, MeshError
from mesh.util.lookup import job_name_meant, node_meant

NICKS = {"abc234": "desk", "abd567": "den", "xyz777": "desk-2", "qqq222": "abc"}


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
    assert node_meant(text, NICKS) == node


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("de", ExitCode.USAGE, "'de' is ambiguous: desk (abc234), den (abd567), desk-2 (xyz777)"),
        ("ab", ExitCode.USAGE, "'ab' is ambiguous: abc (qqq222), desk (abc234), den (abd567)"),
        ("lab", ExitCode.NOT_FOUND, "no node called 'lab' (known: desk, den, desk-2, abc)"),
        ("", ExitCode.NOT_FOUND, "no node called ''"),
    ],
)
def test_ambiguous_or_unknown_node_is_named(text: str, code: ExitCode, words: str) -> None:
    with pytest.raises(MeshError) as caught:
        node_meant(text, NICKS)
    assert caught.value.code == code and words in str(caught.value)


def test_irreversible_commands_need_full_name() -> None:
    assert node_meant("den", NICKS, whole=True) == "abd567" and node_meant("xyz", NICKS, whole=True) == "xyz777"
    with pytest.raises(MeshError, match="no node called"):
        node_meant("desk-", NICKS, whole=True)


@given(st.text(max_size=4), *[st.sets(st.text(min_size=1, max_size=4), max_size=5)] * 2)
def test_job_is_found_by_unique_prefix(text: str, others: set[str], own: set[str]) -> None:
    names = own | others
    fits = {name for name in names if text and name.startswith(text)}
    fits = fits & own or fits
    try:
        assert job_name_meant(text, names, own) == (text if text in names else next(iter(fits), None))
    except MeshError:
        assert len(fits) > 1 and text not in names


@pytest.mark.parametrize(
    ("text", "job"),
    [("train", b"2"), ("tra", b"2"), ("sweep", b"4"), ("eval", b"5"), ("s", b"4"), ("t", b"2")],
)
def test_name_means_the_newest_of_own_jobs_before_those_of_others(text: str, job: bytes) -> None:
    named = [("her", "train"), ("her", "train"), ("his", "train"), ("her", "sweep"), ("his", "eval"), ("his", "test")]
    rows = {
        b"%d" % number: SimpleNamespace(
            job=b"%d" % number, user=user, name=name, created_unix_ms=number, array=None, attempts=()
        )
        for number, (user, name) in enumerate(named, 1)
    }
    membership: Any = SimpleNamespace(credentials=SimpleNamespace(user="her"))
    jobs: Any = SimpleNamespace(job_table=SimpleNamespace(all=lambda: rows))
    nothing: Any = None
    assert JobLookup(b"me", membership, nothing, nothing, jobs, nothing).find_job(text).job == job
