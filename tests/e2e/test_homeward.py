"""Warm standbys and migrate-back on real daemons."""

from collections.abc import Callable

import pytest

from mesh.daemon.stack import Stack
from tests.e2e.commands import (
    end_of,
    exact,
    finished,
    job_state,
    ok,
    read,
    running_with_checkpoint,
    submit_count,
    submit_endless,
    until,
)

pytestmark = pytest.mark.e2e
MakeStack = Callable[..., Stack]


def test_standby_receives_the_checkpoint_in_advance(make_stack: MakeStack) -> None:
    stack = make_stack(4)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit_count(user, 100_000, "--ckpt-to", user.nick, "--replicas", "1")
    host = stack.node(running_with_checkpoint(user, job)["node"])
    state = until(lambda: (s := job_state(host, job)).get("warm") and s, "the standby to be warm")
    standby = stack.node(state["standby"])
    assert standby not in (host, user) and standby.nick not in state["checkpoint"]["holders"]
    kept = {path.name for path in (standby.where.root / "store" / "manifests").iterdir()}
    assert any(state["checkpoint"]["manifest"] in name for name in kept)
    said = f"standby: {standby.nick} would take over if its node were lost, and has its last checkpoint"
    until(lambda: said in ok(host, "why", job), "it to be said")  # not between a checkpoint and its arrival
    until(lambda: job_state(user, job)["standby"] == standby.nick, "other nodes to know the standby")
    ok(host, "down")
    first, second = running_with_checkpoint(user, job, elsewhere=host.nick)["attempts"]
    assert second["node"] == standby.nick and second["resumed_step"] == first["last_step"]
    ok(user, "cancel", job)
    end = finished(user, job)
    assert end["standby"] is None and not end["warm"]


def test_job_migrates_back_when_the_owner_resumes_lending(make_stack: MakeStack) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    job = submit_endless(user, end_of(stack))
    home = stack.node(running_with_checkpoint(user, job)["node"])
    assert read(home, "reclaim")["reclaimed"] == [job]
    running_with_checkpoint(user, job, elsewhere=home.nick)
    ok(home, "lend")
    until(lambda: job_state(user, job)["node"] == home.nick, "the job to migrate back")
    running_with_checkpoint(user, job)
    end_of(stack).touch()
    end = finished(user, job)
    assert [attempt["reason"] for attempt in end["attempts"]] == [
        "vacated: its owner took the machine back",
        "vacated: its home node is free again",
        "done",
    ]
    for before, after in zip(end["attempts"], end["attempts"][1:], strict=False):
        assert after["resumed_step"] == before["last_step"], "no step may be lost"
    assert end["attempts"][2]["node"] == home.nick
    assert exact(user, job)
