"""Job table and status gossip: choice among views of a job, and the rate of published statuses."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from membership.records import MAX_BODY_BYTES
from mesh.consensus.status import (
    RUNNER,
    JobStatus,
    NextCheckpoint,
    Saving,
    archived,
    decode_status,
    encode_status,
    status_of,
)
from mesh.jobs import status_gossip
from mesh.jobs.job_table import OWN, JobTable
from mesh.jobs.status_gossip import COMMITS_S, NEWS_S, REPEAT_S, SAME_S, WAITS_PER_S, StatusGossip, speaks_for
from mesh.model.record import Attempt, Commit, Outcome
from mesh.model.spec import ArrayPlace
from placement.advert import Portion
from placement.queue import MAX_PRIORITY, Waiting
from placement.request import Request
from tests.consensus.worlds import JOB, A, B, C, make_advert, make_witness

NOW = 1_000_000.0


def view(state: str = "pending", term: int = 0, **changes: object) -> JobStatus:
    status = status_of(JOB, make_witness(), None, state, "", None)
    rank = (int("outcome" in changes), term, 0, changes.pop("acts", 0))
    return msgspec.structs.replace(status, state=state, rank=rank, **changes)


DONE = Outcome(kind="done", detail="", exit_code=0, manifest=None, holders=(), ended_unix_ms=int(NOW * 1000))
WAITING = Waiting(Request(job=JOB, attempt=0, user="ada"), 50, int(NOW))
PLACE = ArrayPlace(b"a" * 16, index=1, place=1, of=9)
LIMITED = msgspec.structs.replace(PLACE, limit=2)
COMMIT = Commit(seq=1, term=1, manifest=b"m" * 32, parent=None, holders=(), step=1, created_unix_ms=0)


def test_job_table_takes_the_most_advanced_view_from_any_source() -> None:
    job_table = JobTable()
    job_table.update(A, JOB, view("running", term=2))
    job_table.update(B, JOB, view("pending", term=1))
    assert job_table.all()[JOB].state == "running"
    job_table.update(A, JOB, None)
    assert job_table.all()[JOB].state == "pending", "a withdrawn view does not count"
    job_table.update(B, JOB, None)
    assert not job_table.all() and not job_table.waiting


def test_own_view_counts_for_what_runs_here() -> None:
    table, other = JobTable(), b"k" * 16
    mine, false = view("running"), view("running", 1 << 40, acts=2)
    table.update(OWN, JOB, mine)
    table.update(B, JOB, false)
    table.update(B, other, false)
    assert table.by_own_view([JOB, b"n" * 16]) == {JOB: mine, other: false}
    assert table.by_own_view([]) == {JOB: false, other: false}
    assert list(table.every_view()) == [mine, false, false]


def test_end_that_a_status_claims_is_news_once_and_no_more() -> None:
    job_table = JobTable()
    assert not job_table.update(A, JOB, view("running"))
    assert job_table.update(B, JOB, view("done", outcome=DONE)) and not job_table.update(
        C, JOB, view("done", outcome=DONE)
    )
    assert job_table.may_be_over(JOB) and not job_table.ends, "any member can publish it"
    job_table.end(JOB, "failed", "ada", None)
    job_table.keep_only({})
    assert not job_table.all() and job_table.ends == {JOB: "failed"} and not job_table.may_be_over(JOB)
    job_table.update(OWN, JOB, view("running"))
    job_table.keep_only({})
    assert job_table.own(JOB) is not None, "the node's own view stays"


def test_end_that_this_node_knows_stays() -> None:
    job_table = JobTable()
    job_table.update(A, JOB, view("pending", term=2**50))
    assert not job_table.may_be_over(JOB)
    job_table.update(OWN, JOB, view("done", outcome=DONE, array=LIMITED))
    job_table.update(OWN, JOB, None)
    job_table.end(b"k" * 16, "done", "ada", msgspec.structs.replace(LIMITED, place=3))
    job_table.end(b"n" * 16, "done", "ada", msgspec.structs.replace(PLACE, array=b"n" * 16))
    assert job_table.ends[JOB] == "done", "only a limit needs the places"
    assert job_table.array_ends == {("ada", PLACE.array): 0b1010}
    job_table.end(b"m" * 16, "done", "mallory", msgspec.structs.replace(LIMITED, place=0))
    assert job_table.array_ends["ada", PLACE.array] == 0b1010, "another user's jobs release none"


def test_statuses_name_the_jobs_of_an_array_and_count_no_place() -> None:
    job_table, other = JobTable(), b"other" + bytes(11)
    job_table.update(A, JOB, view("done", outcome=DONE, array=LIMITED))
    job_table.update(B, JOB, view("done", outcome=DONE, array=LIMITED))
    job_table.update(A, other, view("running", array=msgspec.structs.replace(LIMITED, place=2)))
    job_table.update(A, b"no limit" + bytes(8), view("running", array=PLACE))
    assert job_table.jobs_of(PLACE.array) == {JOB, other} and not job_table.array_ends
    assert job_table.goes_on(LIMITED) and not job_table.goes_on(PLACE) and not job_table.goes_on(None)
    job_table.update(B, other, view("done", term=2**40, outcome=DONE, array=LIMITED))
    assert job_table.goes_on(LIMITED), "one that says so may be false"
    job_table.update(A, other, None)
    assert not job_table.goes_on(LIMITED)
    job_table.update(A, JOB, None)
    assert job_table.jobs_of(PLACE.array) == {JOB, other}, "another status names it"
    job_table.keep_only({})
    assert not job_table.jobs_of(PLACE.array) and not job_table._of_array


def test_arrays_that_statuses_invent_are_bounded_by_the_statuses() -> None:
    job_table = JobTable()
    for number in range(100):
        invented = msgspec.structs.replace(LIMITED, array=number.to_bytes(16, "big"))
        job_table.update(A, JOB, view("done", outcome=DONE, array=invented))
    assert len(job_table._of_array) == 1 and not job_table.array_ends


def test_waiting_job_is_queued_once() -> None:
    job_table, adverts = JobTable(), [make_advert(A)]
    job_table.update(A, JOB, view(waiting=WAITING))
    assert job_table.waiting and job_table.queue(adverts, NOW).kept == {(JOB, A)}
    assert job_table.queue(adverts, NOW, idle={JOB}).kept == set()
    job_table.update(B, JOB, view("running", term=1))
    assert not job_table.waiting and job_table.queue(adverts, NOW).kept == set()
    other = msgspec.structs.replace(WAITING.request, job=b"another's" + bytes(7))
    job_table.update(C, JOB, view(term=2, waiting=msgspec.structs.replace(WAITING, request=other)))
    assert not job_table.waiting, "a view applies only to its own job"


GPU = Portion("GPU-1", 30, 6_000)
SHARE = {"gpus": 1, "gpu_share": 30, "attempts": (Attempt(0, A, "a", 1, 0, running_unix_ms=1_000, seen_unix_ms=9_000),)}


def test_running_jobs_are_known_with_their_gpus() -> None:
    job_table, runs = JobTable(), view("running", term=1, acts=RUNNER, runner=A, portions=(GPU,), **SHARE)
    job_table.update(A, JOB, runs)
    assert [(stay.node, stay.portions) for stay in job_table.running] == [(A, (GPU,))]
    ahead = msgspec.structs.replace(runs, rank=(0, 1, 5, 0), portions=())
    job_table.update(B, JOB, ahead)
    assert [stay.portions for stay in job_table.running] == [(GPU,)], "a newer view of a witness does not name the GPUs"
    for state, leaves in (("vacating", True), ("saving", True), ("releasing", True), ("running", False)):
        job_table.update(A, JOB, msgspec.structs.replace(runs, state=state, rank=(0, 1, 6, RUNNER)))
        assert [stay.leaves for stay in job_table.running] == [leaves]
    job_table.update(A, JOB, None)
    assert not list(job_table.running), "a job with unknown GPUs is not listed"


def test_gpu_share_is_charged_by_its_fraction() -> None:
    job_table = JobTable()
    job_table.update(A, JOB, view("running", term=1, runner=A, **SHARE))
    job_table.update(B, b"other" + bytes(11), view(waiting=None, user="bob", **{**SHARE, "gpus": 0, "gpu_share": 100}))
    assert job_table.queue([], 9.0)._usage == {"ada": 8 * 30, "bob": 8 * 100}


def test_gang_is_charged_for_all_of_its_nodes() -> None:
    job_table = JobTable()
    attempt = msgspec.structs.replace(SHARE["attempts"][0], gang=((B, "b"), (C, "c")))
    over = view("done", outcome=msgspec.structs.replace(DONE, ended_unix_ms=9_000), **{**SHARE, "attempts": (attempt,)})
    job_table.update(A, JOB, over)
    assert job_table.usage(9.0) == {"ada": 8 * 30 * 3} and archived(over).used == 8 * 30 * 3


def test_false_times_of_one_job_do_not_outweigh_all_others() -> None:
    """The node that runs an attempt states how long: nobody else's clock was there."""
    now_ms = 1_800_000_000_000
    honest = Attempt(0, B, "b", 1, 0, running_unix_ms=now_ms - 3_600_000, seen_unix_ms=now_ms)
    ever = [
        Attempt(number, A, "a", 1, 0, running_unix_ms=1, ended_unix_ms=now_ms, seen_unix_ms=2**53 - 1, reason="left")
        for number in range(16)
    ]
    job_table, other = JobTable(), b"other" + bytes(11)
    job_table.update(
        B, other, view("running", runner=B, user="bob", **{**SHARE, "gpu_share": 0, "attempts": (honest,)})
    )
    for attempts in (tuple(ever), (*ever, honest)):
        lies = view(
            "done", outcome=msgspec.structs.replace(DONE, ended_unix_ms=now_ms), **{**SHARE, "attempts": attempts}
        )
        job_table.update(A, JOB, lies)
        month = 4 * 7 * 86_400 * 30
        assert job_table.usage(now_ms / 1000) == {"ada": month, "bob": 3600 * 100}
        assert archived(lies).used == month


def test_archived_job_is_charged_once() -> None:
    job_table = JobTable()
    over = view("done", outcome=msgspec.structs.replace(DONE, ended_unix_ms=9_000), **SHARE)
    job_table.update(OWN, JOB, over)
    before = job_table.usage(9.0)
    for _ in range(2):  # a look at it loads it again
        job_table.archive(archived(over))
        assert job_table.usage(9.0) == before == {"ada": 8 * 30} and job_table.get(JOB) is None
        job_table.update(OWN, JOB, over)
        assert job_table.usage(9.0) == before


@pytest.mark.parametrize(
    "lie",
    [
        {"gpus": -1},
        {"gpu_share": -1},
        {"gpu_share_limit": 101},
        {"portions": (Portion("GPU-1", -5, 1),)},
        {"waiting": msgspec.structs.replace(WAITING, request=Request(JOB, 0, "ada", gpus=1, gpu_share=-50))},
        {"waiting": msgspec.structs.replace(WAITING, request=Request(JOB, 0, "ada", gpus=1, vram_mib=-1))},
    ],
)
def test_view_with_impossible_gpus_is_not_decoded(lie: dict[str, object]) -> None:
    assert decode_status(encode_status(view())) == view() and decode_status(encode_status(view(**lie))) is None


@pytest.mark.parametrize(
    "lie",
    [
        {"job": b"short"},
        {"runner": A},  # without the attempt that runs
        {"rank": (1, 0, 0, 0)},  # of a job that is over, without its end
        {"rank": (0, 1 << 53, 0, 0)},
        {"rank": (0, 0, 0, RUNNER + 1)},
        {"array": ArrayPlace(array=JOB, index=0, place=0, of=1, batch=2**40)},
        {"attempts": (Attempt(0, A, "a", 1, 0, running_unix_ms=-1),)},
        {"attempts": (Attempt(0, A, "a", 1, 0, seen_unix_ms=1 << 53),)},
        {"commit": msgspec.structs.replace(COMMIT, created_unix_ms=1 << 53)},
        {"outcome": msgspec.structs.replace(DONE, ended_unix_ms=1 << 53), "rank": (1, 0, 0, 0)},
        {"step": -1},
        {"saving": Saving("checkpoint", -1, 0)},
        {"next_checkpoint": NextCheckpoint(0, math.nan, 0.0, "")},
        {"next_checkpoint": NextCheckpoint(0, 0.0, math.inf, "")},
        {"waiting": msgspec.structs.replace(WAITING, priority=MAX_PRIORITY + 1)},
        {"waiting": msgspec.structs.replace(WAITING, since_unix=-1)},
        {"waiting": msgspec.structs.replace(WAITING, request=Request(JOB, 0, "ada", nodes=0))},
        {"waiting": msgspec.structs.replace(WAITING, request=Request(JOB, 0, "ada", nodes=-5))},
        {"waiting": msgspec.structs.replace(WAITING, request=Request(JOB, 0, "ada", memory_mib=-1))},
        {"waiting": msgspec.structs.replace(WAITING, request=Request(JOB, 0, "ada", remaining_s=-1))},
    ],
)
def test_view_that_no_job_can_have_is_not_decoded(lie: dict[str, Any]) -> None:
    """One ended every daemon of the mesh: the queue and the job table rely on what a status means."""
    assert decode_status(encode_status(msgspec.structs.replace(view(), **lie))) is None


def test_statuses_share_what_they_name_alike_unless_it_is_long() -> None:
    """Shared values stay in memory for a while, so a hostile node must not be able to fill it with long ones."""
    body, hostile = encode_status(view()), encode_status(view(user="u" * 10_000))
    one, other = decode_status(body), decode_status(body)
    assert one is not None and other is not None and one == other == view()
    assert one.submitter is other.submitter and one.config.members[0] is other.config.members[0]
    long = [decode_status(hostile) for _ in range(2)]
    assert long[0] == long[1] and long[0] is not None and long[1] is not None and long[0].user is not long[1].user


def test_witness_that_alone_knows_of_the_end_tells_it() -> None:
    """Regression (simulator seed 1240203): the first witness had an old disk, and the job after this one waited for ever."""
    ended_ms = DONE.ended_unix_ms
    late_ms = ended_ms + NEWS_S * 1000
    over, first = view("done", outcome=DONE), view().witnesses[0]
    later = next(node for node in over.witnesses if node != first)
    alive = set(over.witnesses)

    def speaks(me: bytes, status: JobStatus = over, told: bool = False, at_ms: float = late_ms) -> bool:
        return speaks_for(status, me, False, False, alive, told, at_ms)

    assert speaks(later)
    assert not speaks(later, told=True), "another node tells it"
    assert not speaks(later, at_ms=ended_ms), "the first witness may yet hear of it"
    assert not speaks(later, status=view()) and speaks(first, status=view())
    assert not speaks_for(over, later, False, True, alive, False, late_ms), "its leader found no majority for it"


def test_job_table_tells_whether_another_node_says_that_a_job_is_over() -> None:
    job_table = JobTable()
    job_table.update(OWN, JOB, view("done", outcome=DONE))
    job_table.update(A, JOB, view("running"))
    assert not job_table.told_over_by(JOB)
    job_table.update(B, JOB, view("done", outcome=DONE))
    assert job_table.told_over_by(JOB)


class PublishedStatuses:
    """A status gossip with a clock set by the test and the published statuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, table: JobTable | None = None) -> None:
        self.now = 0.0
        self.statuses: list[tuple[JobStatus, bool]] = []
        monkeypatch.setattr(status_gossip.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(status_gossip.time, "time", lambda: NOW + self.now)
        membership: Any = SimpleNamespace(publish=self._receive)
        self.gossip = StatusGossip(A, membership, table or JobTable(), lambda: None)

    def _receive(self, section: str, body: bytes, ttl_s: float, urgent: bool) -> bool:
        status = decode_status(body)
        assert status is not None and section.startswith("jobs/")
        self.statuses.append((status, urgent))
        return True

    def publishes(self, status: JobStatus, at: float) -> bool:
        self.now, before = at, len(self.statuses)
        self.gossip.publish(status)
        return len(self.statuses) > before


def test_gossip_publishes_urgent_changes_at_once_and_others_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gossip = PublishedStatuses(monkeypatch)
    assert gossip.publishes(view(), 0.0)
    assert not gossip.publishes(view(detail="for another reason"), 0.1) and not gossip.publishes(view("starting"), 0.2)
    assert gossip.publishes(view("starting", term=1), 0.3), (
        "a new term is published at once, so that later statuses are accepted"
    )
    assert gossip.publishes(view("running", term=1), 0.4) and not gossip.publishes(
        view("running", term=1, warm=True), 0.45
    )
    assert not gossip.publishes(view("running", term=1, step=2), 0.5)
    assert not gossip.publishes(view("running", term=1, commit=COMMIT), 0.6)
    assert gossip.publishes(view("running", term=1, commit=COMMIT), 0.5 + COMMITS_S)
    assert gossip.publishes(view("running", term=1, step=9, commit=COMMIT), 1.0 + COMMITS_S + SAME_S)
    assert not gossip.statuses[-1][1]
    assert gossip.publishes(view("done", term=1, outcome=DONE), 1.1 + COMMITS_S + SAME_S) and gossip.statuses[-1][1], (
        "an outcome is published as urgent"
    )


def test_gossip_tells_less_often_why_jobs_wait_if_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    world, table = PublishedStatuses(monkeypatch), JobTable()
    world.gossip = StatusGossip(A, SimpleNamespace(publish=world._receive), table, lambda: None)  # type: ignore[arg-type]
    first, other = view(waiting=WAITING), view(waiting=WAITING, detail="for another reason")
    assert world.publishes(first, 0.0)
    assert world.publishes(other, SAME_S)
    for number in range(1000):
        job = number.to_bytes(16, "big")
        waits = msgspec.structs.replace(WAITING, request=Request(job=job, attempt=0, user="ada"))
        table.update(B, job, msgspec.structs.replace(first, job=job, waiting=waits))
    assert not world.publishes(first, SAME_S + 1000 / WAITS_PER_S - 1)
    assert world.publishes(view("running", term=1), SAME_S + 1000 / WAITS_PER_S - 1), "what changes it is told at once"
    assert world.publishes(view(term=2, waiting=WAITING), SAME_S + 1000 / WAITS_PER_S - 1)
    assert world.publishes(view(term=2, waiting=WAITING, detail="for another reason"), SAME_S + 2000 / WAITS_PER_S)


def test_gossip_repeats_a_status_until_it_is_history(monkeypatch: pytest.MonkeyPatch) -> None:
    gossip, ended = PublishedStatuses(monkeypatch), view("done", outcome=DONE)
    assert (
        gossip.publishes(ended, 0.0) and not gossip.publishes(ended, REPEAT_S - 1) and gossip.publishes(ended, REPEAT_S)
    )
    assert not gossip.publishes(ended, status_gossip.ENDED_TOLD_S + 1)


def test_end_in_an_array_with_a_limit_is_published_while_the_array_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that begins to lead a place of it later counts the ends of the others."""
    table = JobTable()
    gossip, ended = PublishedStatuses(monkeypatch, table), view("done", outcome=DONE, array=LIMITED)
    late = status_gossip.ENDED_TOLD_S + 1
    assert not gossip.publishes(ended, late)
    table.update(B, b"other" + bytes(11), view("running", array=LIMITED))
    assert gossip.publishes(ended, late)


def test_status_that_is_too_large_is_published_shorter_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = PublishedStatuses(monkeypatch)
    large = Attempt(number=1, node=A, nick="a", term=1, started_unix_ms=0, reason="x" * 3000)
    assert world.publishes(view(attempts=(large,) * 16), 0.0)
    assert len(world.statuses[-1][0].attempts) == 4
    larger = msgspec.structs.replace(large, reason="x" * MAX_BODY_BYTES)
    assert world.publishes(view("running", term=1, runner=A, attempts=(larger,)), 1000.0)
    assert (world.statuses[-1][0].attempts, world.statuses[-1][0].runner) == ((), None)
    assert not world.publishes(view(outcome=msgspec.structs.replace(DONE, detail="x" * MAX_BODY_BYTES)), 2000.0)
