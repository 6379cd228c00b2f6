"""`mesh top` with a real daemon, through textual's pilot and as text."""

import json
import re

import pytest

from mesh.daemon.stack import Stack
from mesh.top.answers import Source
from mesh.top.app import Top
from tests.e2e.commands import ok, read, running_with_checkpoint, submit_count, until
from tests.top.test_app import foot, text
from tests.top.test_app import until as seen

pytestmark = pytest.mark.e2e


async def test_top_pauses_and_resumes_a_node_and_shows_a_job(shared: Stack) -> None:
    node = shared.nodes[0]
    job = submit_count(node, 100_000, "--name", "for-top")
    try:
        state = running_with_checkpoint(node, job)
        top = Top(Source(node.client), lambda: "")
        async with top.run_test(size=(160, 40)) as pilot:
            await seen(
                pilot, lambda: re.search(rf"{job[:8]} +for-top +running +{state['node']} ", text(top)), "the job"
            )
            await pilot.press("p")
            await seen(pilot, lambda: "PAUSED" in text(top), "the pause")
            assert read(node, "status")["paused"]
            await pilot.press("u")
            await seen(pilot, lambda: "PAUSED" not in text(top), "the end of the pause")
            assert not read(node, "status")["paused"]
            await pilot.press("slash", *"for-top", "enter", "enter")
            await seen(pilot, lambda: f"attempt 0 on {state['node']}" in text(top), "its output")
            await pilot.press("c")
            await seen(pilot, lambda: "Cancel job" in text(top), "the question")
            await pilot.press("y")
            await seen(pilot, lambda: "cancel" in foot(top) or "cancelled" in text(top), "its end")
        until(lambda: read(node, "ps", job)["jobs"][0]["outcome"], "the job to end")
    finally:
        ok(node, "cancel", job)


def test_top_prints_the_same_state_for_scripts(shared: Stack) -> None:
    answer = json.loads(ok(shared.nodes[1], "top", "--json"))
    assert answer["schema"] == 1 and answer["totals"]["alive"] == len(answer["nodes"]) == 4
    assert {"node", "jobs", "gpus", "transfers"} <= set(answer)
    piped = ok(shared.nodes[1], "top")
    assert piped.startswith("node2 of ") and "4/4 nodes alive, 4 lend" in piped and "\x1b" not in piped
