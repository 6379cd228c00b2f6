"""What a node makes of all that is told of jobs, and how often it tells itself."""

import msgspec
import pytest

from mesh.jobs import herald
from mesh.jobs.board import OWN, Board
from mesh.jobs.herald import COMMITS_S, REPEAT_S, SAME_S, Herald
from mesh.jobs.ledger import Attempt, Commit, Outcome
from mesh.jobs.status import RUNNER, JobStatus, decode_status, encode_status, status_of
from placement.advert import Portion
from placement.queue import Waiting
from placement.request import Request
from tests.jobs.worlds import JOB, A, B, C, make_advert, make_witness

NOW = 1_000_000.0


def view(state: str = "pending", term: int = 0, **changes: object) -> JobStatus:
    status = status_of(JOB, make_witness(), None, state, "", None)
    rank = (int("outcome" in changes), term, 0, changes.pop("acts", 0))
    return msgspec.structs.replace(status, state=state, rank=rank, **changes)


DONE = Outcome(kind="done", detail="", exit_code=0, manifest=None, holders=(), ended_unix_ms=int(NOW * 1000))
WAITING = Waiting(Request(job=JOB, attempt=0, user="ada"), 50, int(NOW))
COMMIT = Commit(seq=1, term=1, manifest=b"m" * 32, parent=None, holders=(), step=1, created_unix_ms=0)


def test_the_most_advanced_view_counts_whoever_tells_it_and_whenever() -> None:
    board = Board()
    board.tell(A, JOB, view("running", term=2))
    board.tell(B, JOB, view("pending", term=1))
    assert board.all()[JOB].state == "running"
    board.tell(A, JOB, None)
    assert board.all()[JOB].state == "pending", "what is not told any more does not count"
    board.tell(B, JOB, None)
    assert not board.all() and not board.waiting


def test_an_end_is_news_once_and_never_forgotten() -> None:
    board = Board()
    assert not board.tell(A, JOB, view("running"))
    assert board.tell(B, JOB, view("done", outcome=DONE)) and not board.tell(C, JOB, view("done", outcome=DONE))
    board.keep_only({})
    assert not board.all() and board.ends == {JOB: "done"}
    board.tell(OWN, JOB, view("running"))
    board.keep_only({})
    assert board.own(JOB) is not None, "what this node knows itself stays"


def test_who_waits_stands_in_the_queue_and_in_nobody_elses_place() -> None:
    board, adverts = Board(), [make_advert(A)]
    board.tell(A, JOB, view(waiting=WAITING))
    assert board.waiting and board.queue(adverts, NOW).kept == {(JOB, A)}
    assert board.queue(adverts, NOW, idle={JOB}).kept == set()
    board.tell(B, JOB, view("running", term=1))
    assert not board.waiting and board.queue(adverts, NOW).kept == set()
    other = msgspec.structs.replace(WAITING.request, job=b"another's" + bytes(7))
    board.tell(C, JOB, view(term=2, waiting=msgspec.structs.replace(WAITING, request=other)))
    assert not board.waiting, "a view speaks for its own job alone"


GPU = Portion("GPU-1", 30, 6_000)
SHARE = {"gpus": 1, "gpu_share": 30, "attempts": (Attempt(0, A, "a", 1, 0, running_unix_ms=1_000, seen_unix_ms=9_000),)}


def test_who_runs_where_is_known_with_the_gpus_he_has() -> None:
    board, runs = Board(), view("running", term=1, acts=RUNNER, runner=A, portions=(GPU,), **SHARE)
    board.tell(A, JOB, runs)
    assert [(stay.node, stay.portions) for stay in board.stays] == [(A, (GPU,))]
    ahead = msgspec.structs.replace(runs, rank=(0, 1, 5, 0), portions=())
    board.tell(B, JOB, ahead)
    assert [stay.portions for stay in board.stays] == [(GPU,)], "a witness that is ahead does not know of them"
    board.tell(A, JOB, None)
    assert not list(board.stays), "of whom nobody knows that, nobody judges"


def test_a_share_is_charged_as_its_part() -> None:
    board = Board()
    board.tell(A, JOB, view("running", term=1, runner=A, **SHARE))
    board.tell(B, b"other" + bytes(11), view(waiting=None, user="bob", **{**SHARE, "gpus": 0, "gpu_share": 100}))
    assert board.queue([], 9.0)._usage == {"ada": 8 * 30, "bob": 8 * 100}


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
def test_a_view_with_impossible_gpus_is_not_heard(lie: dict[str, object]) -> None:
    assert decode_status(encode_status(view())) == view() and decode_status(encode_status(view(**lie))) is None


class Ear:
    """A herald, its clock, and what it has told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.told: list[tuple[JobStatus, bool]] = []
        monkeypatch.setattr(herald.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(herald.time, "time", lambda: NOW + self.now)
        self.herald = Herald(self._hear)

    def _hear(self, section: str, body: bytes, ttl_s: float, urgent: bool) -> None:
        status = decode_status(body)
        assert status is not None and section.startswith("jobs/")
        self.told.append((status, urgent))

    def hears(self, status: JobStatus, at: float) -> bool:
        self.now, before = at, len(self.told)
        self.herald.tell(status)
        return len(self.told) > before


def test_it_tells_at_once_what_others_act_on_and_the_rest_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ear = Ear(monkeypatch)
    assert ear.hears(view(), 0.0)
    assert not ear.hears(view(detail="for another reason"), 0.1) and not ear.hears(view("starting"), 0.2)
    assert ear.hears(view("starting", term=1), 0.3), "or those who know of the term would not believe it"
    assert ear.hears(view("running", term=1), 0.4) and not ear.hears(view("running", term=1, warm=True), 0.45)
    assert not ear.hears(view("running", term=1, step=2), 0.5)
    assert not ear.hears(view("running", term=1, commit=COMMIT), 0.6)
    assert ear.hears(view("running", term=1, commit=COMMIT), 0.5 + COMMITS_S)
    assert ear.hears(view("running", term=1, step=9, commit=COMMIT), 1.0 + COMMITS_S + SAME_S)
    assert not ear.told[-1][1]
    assert ear.hears(view("done", term=1, outcome=DONE), 1.1 + COMMITS_S + SAME_S) and ear.told[-1][1], "urgently"


def test_it_repeats_itself_now_and_then_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ear, ended = Ear(monkeypatch), view("done", outcome=DONE)
    assert ear.hears(ended, 0.0) and not ear.hears(ended, REPEAT_S - 1) and ear.hears(ended, REPEAT_S)
    assert not ear.hears(ended, herald.ENDED_TOLD_S + 1)
