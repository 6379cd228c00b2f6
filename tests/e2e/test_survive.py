"""Survival estimates of real daemons, from their own stays and from the stays that peers report."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.e2e.commands import command, mesh, ok, read, until

pytestmark = pytest.mark.e2e


def survival(asked: StackNode, node: StackNode) -> dict[str, Any] | None:
    done = mesh(asked, "debug", "survive", node.nick, "--json")
    assert done.returncode in {0, 4}, done.stderr
    return read(asked, "debug", "survive", node.nick) if done.returncode == 0 else None


def test_survival_estimate_of_a_node_is_reported_by_itself_and_by_peers(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(2)
    here, there = stack.nodes
    for asked, node in ((here, here), (here, there)):
        answer = until(lambda a=asked, n=node: survival(a, n), f"the survival estimate of {node.nick}")
        chances = [row["probability"] for row in answer["survival"]]
        assert answer["lent"] and answer["me"] is (asked is node) and 1 <= answer["weight"] <= 64
        assert all(1 >= sooner > later > 0 for sooner, later in pairwise(chances))
        assert all(row["low"] <= row["probability"] <= row["high"] for row in answer["survival"])
        assert len(answer["week"]) == 168
    shown = ok(here, "debug", "survive", there.nick)
    assert "STAYS FOR" in shown and "Mon" in shown and "Sun" in shown
    unknown = mesh(here, "debug", "survive", "nobody")
    assert unknown.returncode == 4 and "no node called 'nobody'" in unknown.stderr

    ok(there, "pause")
    until(
        lambda: (a := survival(there, there)) and not a["lent"] and a["departures"] > 0,
        "the pause to count as a departure",
    )
    until(lambda: (a := survival(here, there)) and a["departures"] > 0, "the other node to know the departure")
    assert "is not lent now" in ok(there, "debug", "survive", there.nick)
    ok(there, "lend")
    again = until(lambda: (a := survival(there, there)) and a["lent"] and a, "the node to lend again")
    assert again["lent_h"] >= 0

    def alike() -> bool:
        (row,) = [row for row in read(there, "nodes")["nodes"] if row["me"]]
        return bool(row["weight"] == read(there, "debug", "survive", there.nick)["weight"])

    until(alike, "its advert to match its own estimate")
    refused = mesh(there, "debug", "sim", "history")  # this machine has no GPU
    assert refused.returncode == 2 and "no node of this mesh lends a GPU" in refused.stderr
    journal = there.where.root / "journal.sqlite"
    done = mesh(None, "debug", "survive", "eval", "--trace", str(journal), "--format", "journal", "--no-boosting")
    assert done.returncode == 2 and "two bins" in done.stderr, command(None)
