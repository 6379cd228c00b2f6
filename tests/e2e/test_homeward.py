"""A job's next host has its checkpoint beforehand, and a job goes back home by itself: real daemons."""

from collections.abc import Callable

import pytest

from mesh.stack import Stack
from tests.e2e.commands import (
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


def test_the_heir_has_the_checkpoint_before_it_is_needed(make_stack: MakeStack) -> None:
    stack = make_stack(4)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit_count(user, 100_000, "--ckpt-to", user.nick, "--replicas", "1")
    host = stack.node(running_with_checkpoint(user, job)["node"])
    state = until(lambda: (s := job_state(host, job)).get("warm") and s, "the heir to be warm")
    heir = stack.node(state["heir"])
    assert heir not in (host, user) and heir.nick not in state["checkpoint"]["holders"]
    kept = {path.name for path in (heir.where.root / "store" / "manifests").iterdir()}
    assert any(state["checkpoint"]["manifest"] in name for name in kept)
    assert f"it would go to {heir.nick} next" in ok(host, "why", job)
    until(lambda: job_state(user, job)["heir"] == heir.nick, "others to hear of it")
    ok(host, "down")
    first, second = running_with_checkpoint(user, job, elsewhere=host.nick)["attempts"]
    assert second["node"] == heir.nick and second["resumed_step"] == first["last_step"]
    ok(user, "cancel", job)
    end = finished(user, job)
    assert end["heir"] is None and not end["warm"]


def test_a_job_goes_home_when_its_owner_gives_the_machine_back(make_stack: MakeStack) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    job = submit_endless(user, stack.directory / "end")
    home = stack.node(running_with_checkpoint(user, job)["node"])
    assert read(home, "reclaim")["reclaimed"] == [job]
    running_with_checkpoint(user, job, elsewhere=home.nick)
    ok(home, "resume")
    until(lambda: job_state(user, job)["node"] == home.nick, "it to go home")
    running_with_checkpoint(user, job)
    (stack.directory / "end").touch()
    end = finished(user, job)
    assert [attempt["reason"] for attempt in end["attempts"]] == [
        "vacated: its owner took the machine back",
        "vacated: its home is free again",
        "done",
    ]
    for before, after in zip(end["attempts"], end["attempts"][1:], strict=False):
        assert after["resumed_step"] == before["last_step"], "no step is lost"
    assert end["attempts"][2]["node"] == home.nick
    assert exact(user, job)
