"""The shell that keeps jobs for others: what it takes, what it refuses, what it remembers, and who may take it back."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from membership.events import MemberView
from mesh.api.peer import PeerError
from mesh.jobs.deputy import SECTION, Deputy, Refused
from mesh.jobs.errands import KEPT_FOR_OTHERS, Told, errand_of
from mesh.jobs.journal import Journal
from mesh.jobs.spec import JobSpec, SpecError
from placement.zones import Hierarchy
from tests.jobs.worlds import JOB, SPEC_BYTES, A, B, C, D, E, make_advert, make_spec

FRESH = make_spec(created_unix_ms=2**52)  # of a far future, so that its day is never over


class Mesh:
    """Stands for everything around: who is there, what was published, which calls were made and what they answer."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.there = [A, B, C, D, E]
        self.published: dict[str, bytes] = {}
        self.calls: list[tuple[bytes, str]] = []
        self.deaf: set[bytes] = set()
        self.problem: str | None = "no majority of its witnesses answered"
        self.notes: list[str] = []

    def members(self) -> list[MemberView]:
        return [MemberView(node, f"node{node[0]}", "ada", (), "alive", 0.0, host="10.0.0.1") for node in self.there]

    def records(self, section: str) -> list[Any]:
        body = self.published.get(section)
        return [SimpleNamespace(node=D, body=body)] if body else []

    def publish(self, section: str, body: bytes, ttl_s: float) -> None:
        self.published[section] = body

    def withdraw(self, section: str) -> None:
        self.published.pop(section, None)

    @property
    def outlook(self) -> "Mesh":
        return self

    def hierarchy(self) -> Hierarchy:
        return Hierarchy(0, tuple(make_advert(node, zone="north") for node in self.there))

    async def submit(self, spec: JobSpec) -> tuple[bytes, bytes, str | None]:
        return JOB, SPEC_BYTES, self.problem

    async def submit_sealed(self, job: bytes, sealed: bytes, spec: JobSpec) -> str | None:
        return self.problem

    async def call(self, node: bytes, method: str, path: str, body: bytes = b"", timeout_s: float = 0.0) -> bytes:
        self.calls.append((node, method))
        if node in self.deaf:
            raise PeerError("no answer")
        return b""

    def deputy(self, me: bytes, spec: JobSpec = FRESH) -> Deputy:
        def open_spec(job: bytes, sealed: bytes) -> JobSpec:
            if sealed != SPEC_BYTES:
                raise SpecError("not signed")
            return spec

        world: Any = self
        return Deputy(me, world, self.journal, world, world, open_spec, lambda job, text: self.notes.append(text))


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    yield Mesh(journal)
    await journal.close()


async def test_what_it_has_taken_it_knows_after_a_restart(mesh: Mesh) -> None:
    deputy = mesh.deputy(D)
    await deputy.take(A, JOB, SPEC_BYTES)
    await deputy.take(A, JOB, SPEC_BYTES)
    assert mesh.notes == ["kept for node1, until a majority of its witnesses has it"]
    again = mesh.deputy(D)
    await again.restore()
    assert again.errands.get(JOB) == errand_of(JOB, SPEC_BYTES, FRESH)
    again._tell()
    assert again.told() == {D: Told(1, (JOB,))} and "node4 submits it" in again.words(JOB)
    mesh.published[SECTION] = b"nonsense"
    assert again.told() == {}


async def test_it_takes_nothing_forged_old_or_too_much(mesh: Mesh) -> None:
    with pytest.raises(SpecError):
        await mesh.deputy(D).take(A, JOB, b"forged")
    with pytest.raises(Refused, match="too long ago"):
        await mesh.deputy(D, make_spec()).take(A, JOB, SPEC_BYTES)
    full = mesh.deputy(D)
    for number in range(KEPT_FOR_OTHERS):
        full.errands.keep(errand_of(number.to_bytes(16, "big"), SPEC_BYTES, FRESH))
    with pytest.raises(Refused, match="enough"):
        await full.take(A, JOB, SPEC_BYTES)
    assert await mesh.journal.errands() == []


async def test_only_the_submitter_takes_it_back(mesh: Mesh) -> None:
    deputy = mesh.deputy(D)
    await deputy.take(A, JOB, SPEC_BYTES)
    await deputy.release(E, JOB)
    assert deputy.errands.any
    await deputy.release(A, JOB)
    assert not deputy.errands.any and await mesh.journal.errands() == []


async def test_a_submitter_hands_it_to_the_first_that_answers_and_takes_it_back_when_it_is_cancelled(
    mesh: Mesh,
) -> None:
    deputy = mesh.deputy(A)
    one, other = (node for node in mesh.hierarchy().zones[0].line if node in {D, E})
    mesh.deaf = {one}
    job, words = await deputy.submit(FRESH)
    assert mesh.calls == [(one, "PUT"), (other, "PUT")]
    assert words == mesh.notes[-1] == deputy.words(job) and f"node{other[0]}, " in words and "of zone north" in words
    (stored,) = await mesh.journal.errands()
    assert msgspec.msgpack.decode(stored)["deputy"] == other
    await deputy.withdraw(job)
    assert mesh.calls[-1] == (other, "DELETE") and deputy.words(job) == "" and await mesh.journal.errands() == []


async def test_with_nobody_to_keep_it_the_user_is_told_so(mesh: Mesh) -> None:
    deputy = mesh.deputy(A)
    mesh.there = [A, B, C]
    _, words = await deputy.submit(FRESH)
    assert "while it is up" in words and mesh.calls == []
    mesh.problem = None
    assert await mesh.deputy(A).submit(FRESH) == (JOB, "")


async def test_a_deputy_that_leaves_lets_the_next_keep_it(mesh: Mesh) -> None:
    deputy = mesh.deputy(D)
    await deputy.take(A, JOB, SPEC_BYTES)
    await deputy.leave(1.0)
    assert mesh.calls == [(E, "PUT")]
    with pytest.raises(Refused, match="leaves"):
        await deputy.take(A, JOB, SPEC_BYTES)


async def test_once_its_witnesses_have_it_it_is_forgotten(mesh: Mesh) -> None:
    deputy = mesh.deputy(D)
    await deputy.take(A, JOB, SPEC_BYTES)
    errand = deputy.errands.get(JOB)
    assert errand is not None
    await deputy._bring(errand)
    assert deputy.errands.any
    mesh.problem = None
    await deputy._bring(errand)
    assert not deputy.errands.any and mesh.notes[-1] == "a majority of its witnesses has it now"
