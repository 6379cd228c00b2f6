"""Submission retry: jobs kept for other nodes, refusals, restarts and withdrawal."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from membership.events import MemberView
from mesh.consensus.submission_retry import KEPT_FOR_ONE, HeldSubmissions, pending_submission
from mesh.jobs.submission_retry import SECTION, Refused, SubmissionRetry
from mesh.journal import Journal
from mesh.model.spec import JobSpec, SpecError
from mesh.rpc.client import PeerError
from placement.zones import Hierarchy
from tests.consensus.worlds import JOB, SPEC_BYTES, A, B, C, D, E, make_advert, make_spec

FRESH = make_spec(created_unix_ms=2**52)  # far in the future, so that the retry period never ends


class Mesh:
    """Fake surroundings of a node: the members, the published records, and the calls with their answers."""

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
    def mesh_view(self) -> "Mesh":
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

    def keeper(self, me: bytes, spec: JobSpec = FRESH) -> SubmissionRetry:
        def open_spec(job: bytes, sealed: bytes) -> JobSpec:
            if sealed != SPEC_BYTES:
                raise SpecError("not signed")
            return spec

        world: Any = self
        return SubmissionRetry(
            me, world, self.journal, world, world, open_spec, lambda job, text: self.notes.append(text)
        )


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    yield Mesh(journal)
    await journal.close()


async def test_kept_submission_survives_a_restart(mesh: Mesh) -> None:
    keeper = mesh.keeper(D)
    await keeper.take(A, JOB, SPEC_BYTES)
    await keeper.take(A, JOB, SPEC_BYTES)
    assert mesh.notes == ["kept for node1, until a majority of its witnesses has it"]
    again = mesh.keeper(D)
    await again.restore()
    assert again.pending.get(JOB) == pending_submission(JOB, SPEC_BYTES, FRESH)
    again._publish()
    assert again.held_by_node() == {D: HeldSubmissions(1, (JOB,))} and "node4 submits it" in again.describe(JOB)
    mesh.published[SECTION] = b"nonsense"
    assert again.held_by_node() == {}


async def test_user_is_told_why_a_witness_does_not_take_a_job(mesh: Mesh) -> None:
    mesh.problem = "a witness does not take it: it is full"
    assert await mesh.keeper(A).submit(FRESH) == (JOB, f"{mesh.problem}; it is submitted again for a day")


async def test_keeper_refuses_forged_old_and_too_many_submissions(mesh: Mesh) -> None:
    with pytest.raises(SpecError):
        await mesh.keeper(D).take(A, JOB, b"forged")
    with pytest.raises(Refused, match="too long ago"):
        await mesh.keeper(D, make_spec()).take(A, JOB, SPEC_BYTES)
    full = mesh.keeper(D)
    for number in range(KEPT_FOR_ONE):
        full.pending.keep(pending_submission(number.to_bytes(16, "big"), SPEC_BYTES, FRESH))
    with pytest.raises(Refused, match="enough"):
        await full.take(A, JOB, SPEC_BYTES)
    assert await mesh.journal.pending_submissions() == []


async def test_only_the_submitter_releases_a_submission(mesh: Mesh) -> None:
    keeper = mesh.keeper(D)
    await keeper.take(A, JOB, SPEC_BYTES)
    await keeper.release(E, JOB)
    assert keeper.pending.any
    await keeper.release(A, JOB)
    assert not keeper.pending.any and await mesh.journal.pending_submissions() == []


async def test_submitter_entrusts_the_first_answering_node_and_withdraws_on_cancel(
    mesh: Mesh,
) -> None:
    keeper = mesh.keeper(A)
    one, other = (node for node in mesh.hierarchy().zones[0].line if node in {D, E})
    mesh.deaf = {one}
    job, words = await keeper.submit(FRESH)
    await asyncio.gather(*keeper._tasks._tasks)
    assert sorted(mesh.calls) == sorted([(one, "PUT"), (one, "DELETE"), (other, "PUT")]), (
        "the first one may have taken it"
    )
    assert words == mesh.notes[-1] == keeper.describe(job) and f"node{other[0]}, " in words and "of zone north" in words
    (stored,) = await mesh.journal.pending_submissions()
    assert msgspec.msgpack.decode(stored)["keeper"] == other
    await keeper.withdraw(job)
    assert (
        mesh.calls[-1] == (other, "DELETE")
        and keeper.describe(job) == ""
        and await mesh.journal.pending_submissions() == []
    )


async def test_job_cancelled_while_a_keeper_is_asked_is_taken_back(mesh: Mesh) -> None:
    keeper, answer = mesh.keeper(A), mesh.call

    async def cancelled_meanwhile(node: bytes, method: str, *rest: Any, **named: Any) -> bytes:
        if method == "PUT":
            await keeper.withdraw(JOB)
        return await answer(node, method, *rest, **named)

    mesh.call = cancelled_meanwhile  # type: ignore[method-assign]
    await keeper.submit(FRESH)
    ((node, _), *after) = mesh.calls
    assert after == [(node, "DELETE")] and not keeper.pending.any and await mesh.journal.pending_submissions() == []


async def test_node_that_refuses_a_submission_is_not_asked_to_forget_it(mesh: Mesh) -> None:
    async def refused(node: bytes, method: str, *rest: Any, **named: Any) -> bytes:
        mesh.calls.append((node, method))
        raise PeerError("it keeps enough", 503)

    mesh.call = refused  # type: ignore[method-assign]
    await mesh.keeper(A).submit(FRESH)
    assert {method for _, method in mesh.calls} == {"PUT"}


async def test_user_gets_a_report_when_no_node_keeps_the_submission(mesh: Mesh) -> None:
    keeper = mesh.keeper(A)
    mesh.there = [A, B, C]
    _, words = await keeper.submit(FRESH)
    assert "while it is up" in words and mesh.calls == []
    mesh.problem = None
    assert await mesh.keeper(A).submit(FRESH) == (JOB, "")


async def test_leaving_keeper_hands_its_submissions_to_the_next(mesh: Mesh) -> None:
    keeper = mesh.keeper(D)
    await keeper.take(A, JOB, SPEC_BYTES)
    await keeper.leave(1.0)
    assert mesh.calls == [(E, "PUT")]
    with pytest.raises(Refused, match="leaves"):
        await keeper.take(A, JOB, SPEC_BYTES)


async def test_submission_is_dropped_once_its_witnesses_have_it(mesh: Mesh) -> None:
    keeper = mesh.keeper(D)
    await keeper.take(A, JOB, SPEC_BYTES)
    submission = keeper.pending.get(JOB)
    assert submission is not None
    await keeper._bring(submission)
    assert keeper.pending.any
    mesh.problem = None
    await keeper._bring(submission)
    assert not keeper.pending.any and mesh.notes[-1] == "a majority of its witnesses has it now"
