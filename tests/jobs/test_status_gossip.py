"""What nodes publish of jobs reaches the job table, and leaves it with its section; orders to recover jobs are told."""

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from membership.records import MAX_BODY_BYTES
from mesh.consensus.status import JobStatus, decode_status, encode_status
from mesh.jobs.job_table import OWN, JobTable
from mesh.jobs.own_status import OwnStatus
from mesh.jobs.status_gossip import MOST_PUBLISHED, RECOVERED, StatusGossip, speaks_for
from mesh.model.record import AHEAD_MS, Attempt, Config, Outcome
from mesh.model.spec import format_job
from tests.consensus.worlds import JOB, A, B, C, voters

OTHER = b"o" * 16


def view(job: bytes = JOB, **changes: Any) -> JobStatus:
    status = JobStatus(
        job=job,
        name="",
        user="ada",
        submitter=B,
        command="",
        created_unix_ms=0,
        state="pending",
        detail="",
        rank=(0, 1, 0, 0),
        config=Config(0, 0, voters(A, B, C)),
        gpus=0,
    )
    return msgspec.structs.replace(status, **changes)


class World:
    """The gossip of node A, with the sections that nodes publish."""

    def __init__(self) -> None:
        self.sections: dict[tuple[bytes, str], bytes] = {}
        self.published: list[tuple[str, bytes]] = []
        self.changes, self.full = 0, False
        self.table = JobTable()
        self.gossip = StatusGossip(A, self, self.table, self.changed)  # type: ignore[arg-type]

    def changed(self) -> None:
        self.changes += 1

    def record(self, node: bytes, section: str) -> Any:
        body = self.sections.get((node, section))
        return None if body is None else SimpleNamespace(node=node, section=section, body=body)

    def records(self, prefix: str) -> list[Any]:
        return [self.record(*key) for key in self.sections if key[1].startswith(prefix)]

    def publish(self, section: str, body: bytes, ttl_s: float, urgent: bool = False) -> bool:
        if self.full:
            return False
        self.published.append((section, body))
        self.sections[A, section] = body
        return True

    def tells(self, node: bytes, section: str, status: JobStatus | bytes | None) -> None:
        """A node publishes a section, or its section ends."""
        if status is None:
            del self.sections[node, section]
        else:
            self.sections[node, section] = status if isinstance(status, bytes) else encode_status(status)
        self.gossip.on_section(node, section)

    def views(self, job: bytes = JOB) -> int:
        return len(self.table.views().get(job, []))


def test_section_is_on_the_job_table_while_it_lasts() -> None:
    world, section = World(), f"jobs/{format_job(JOB)}"
    world.tells(B, section, view())
    assert world.table.get(JOB) == view() and world.changes == 0
    world.tells(C, section, view())
    assert world.views() == 2
    world.tells(C, section, None)
    assert world.views() == 1
    world.tells(B, section, view(OTHER))
    assert world.table.get(JOB) is None and world.table.get(OTHER) == view(OTHER), "it tells of another job now"
    world.tells(B, section, b"\xc1")
    assert not world.table.all() and not world.gossip._sections


def test_end_that_is_not_yet_is_not_believed() -> None:
    world, section, now_ms = World(), f"jobs/{format_job(JOB)}", time.time_ns() // 1_000_000
    ended = Outcome("done", "done", 0, None, (), now_ms + AHEAD_MS + 60_000)
    world.tells(B, section, view(state="done", rank=(1, 1, 0, 0), outcome=ended))
    assert not world.table.all()
    ended = msgspec.structs.replace(ended, ended_unix_ms=now_ms + AHEAD_MS - 60_000)
    world.tells(B, section, view(state="done", rank=(1, 1, 0, 0), outcome=ended))
    assert world.views() == 1


def test_own_section_is_not_taken_for_the_word_of_another_node() -> None:
    world, section = World(), f"jobs/{format_job(JOB)}"
    world.table.update(OWN, JOB, view(state="running"))
    world.tells(A, section, view())
    assert world.views() == 1 and world.table.own(JOB) == view(state="running")


def test_reload_leaves_what_sections_tell() -> None:
    world = World()
    world.tells(B, "jobs/1", view())
    world.tells(C, "jobs/1", view(OTHER))
    world.table.update(OWN, OTHER, view(OTHER))
    del world.sections[B, "jobs/1"]
    world.sections[B, "jobs/2"] = encode_status(view(OTHER, state="starting"))
    world.sections[B, "jobs/3"] = b"\xc1"
    world.gossip.reload()
    assert world.table.get(JOB) is None and world.views(OTHER) == 3


def test_order_to_recover_a_job_is_published_once_and_read_from_each_node() -> None:
    world = World()
    world.gossip.publish_recovery(JOB, b"the order")
    world.gossip.publish_recovery(JOB, b"the order")
    section = RECOVERED + format_job(JOB)
    assert world.published == [(section, b"the order")]
    world.gossip.publish_recovery(JOB, b"a later one")
    world.gossip.publish_recovery(OTHER, bytes(MAX_BODY_BYTES + 1))
    assert world.published[1:] == [(section, b"a later one")]
    world.sections |= {(B, section): b"another", (C, section): b"a later one", (C, RECOVERED + "no job"): b"nonsense"}
    world.sections[C, section.upper().replace("RECOVERED", "recovered")] = b"one more for the same job"
    assert world.gossip.recoveries() == {JOB: [b"a later one", b"another"]}


def test_runner_that_is_alive_speaks_for_its_job() -> None:
    alive = frozenset({A, B, C})

    def speaks(status: JobStatus, me: bytes = A, runs: bool = False, alive: frozenset[bytes] = alive) -> bool:
        return speaks_for(status, me, runs, False, alive, False, 0.0)

    running = view(state="running", runner=B)
    assert not speaks(running) and speaks(running, B, runs=True)
    assert speaks(running, alive=frozenset({A, C})) and not speaks(running, C, alive=frozenset({A, C}))
    assert speaks(view(), C, alive=frozenset({C})) and not speaks(view(), C)


def test_status_of_a_job_that_has_left_this_node_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that only runs jobs kept the last status of each."""
    world, runners = World(), dict[bytes, object]()
    participant: Any = SimpleNamespace(witnesses={}, runners=runners, leaders={})
    rest: Any = SimpleNamespace(last=SimpleNamespace(alive=frozenset()), forget=lambda job: None)
    own = OwnStatus(A, participant, {}, rest, world.table, world.gossip, rest, rest, world.changed)
    monkeypatch.setattr(own, "status", lambda job: view(job, rank=(0, 1, 0, 2)) if job in runners else None)
    runners[JOB] = rest
    own.publish(JOB)
    assert len(world.published) == len(world.gossip._published) == 1
    del runners[JOB]
    own.publish(JOB)
    assert world.table.own(JOB) is None and not world.gossip._published


def test_status_that_finds_no_room_is_published_later() -> None:
    world = World()
    world.full = True
    world.gossip.publish(view())
    world.full = False
    world.gossip.publish(view())
    world.gossip.publish(view())
    assert len(world.published) == 1


def test_status_that_is_too_large_is_published_with_fewer_attempts_or_not_at_all() -> None:
    attempts = tuple(Attempt(number, B, "desk", 1, 0, reason="r" * 1000) for number in range(30))
    for size, kept in ((0, 4), (9_000, 4), (13_000, 1), (15_000, 0)):
        world = World()
        world.gossip.publish(view(attempts=attempts, detail="d" * size))
        ((_, body),) = world.published
        told = decode_status(body)
        assert told is not None and told.attempts == attempts[30 - kept :] and len(body) <= MAX_BODY_BYTES
    world = World()
    for _ in range(2):
        world.gossip.publish(view(detail="d" * (17 << 10)))
    assert not world.published and world.gossip._published, "it is not tried again at once"


def test_jobs_that_ended_first_leave_room_for_others() -> None:
    world, now = World(), int(time.time() * 1000)

    def publish(number: int) -> bool:
        """Publish a numbered job. Every second one has ended, in the order of the numbers."""
        outcome = Outcome("done", "", 0, None, (), now - 100_000 + number) if number % 2 else None
        before = len(world.published)
        world.gossip.publish(view(number.to_bytes(16), outcome=outcome))
        return len(world.published) > before

    assert all(publish(number) for number in range(MOST_PUBLISHED + 1))
    left = MOST_PUBLISHED // 10
    assert len(world.gossip._published) == MOST_PUBLISHED + 1 - left
    world.gossip._published.clear()
    again = [number for number in range(MOST_PUBLISHED) if publish(number)]
    assert [number for number in range(MOST_PUBLISHED) if number not in again] == list(range(1, 2 * left, 2))
