"""`mesh run --network` on real daemons: a job goes where its hosts are allowed, and its events name what it reached.

No name here resolves, so nothing leaves the machine: tests/execution/test_guest_network.py reaches a server.
"""

import sys
from collections.abc import Callable

import pytest

from mesh.daemon.launcher import wait_ready
from mesh.daemon.stack import Stack
from tests.e2e.commands import mesh, ok, read, until

pytestmark = pytest.mark.e2e
MakeStack = Callable[..., Stack]
WHERE = "data.invalid:443"

FETCH = f"""
import urllib.request
for address in ("https://{WHERE}/", "https://else.invalid/"):
    try:
        urllib.request.urlopen(address, timeout=60)
    except OSError as error:
        print(address, error, flush=True)
print(sum(":" in line for line in open("/proc/net/dev")))
"""


def test_job_goes_where_its_hosts_are_allowed(make_stack: MakeStack) -> None:
    stack = make_stack(2)
    user, lender = stack.nodes
    ok(lender, "config", "set", "network", WHERE, "pypi")
    ok(lender, "down")
    assert lender.process is not None
    lender.process.wait(60)
    stack.start(lender)
    wait_ready(lender.where, lender.process, 60)
    offered = {user.nick: [], lender.nick: [WHERE, "files.pythonhosted.org:443", "pypi.org:443"]}
    until(
        lambda: {row["nick"]: row["network"] for row in read(user, "nodes")["nodes"]} == offered,
        "the lender to be back and to say what its jobs may reach",
    )

    shown = ok(user, "run", "--network", WHERE, "--", sys.executable, "-c", FETCH)
    assert f"https://{WHERE}/ <urlopen error Tunnel connection failed: 502" in shown
    assert "https://else.invalid/ <urlopen error Tunnel connection failed: 403" in shown
    assert shown.splitlines()[-1] == "1", "it has its loopback and no other interface"
    job = read(user, "ps", "-a")["jobs"][-1]
    assert [attempt["node"] for attempt in job["attempts"]] == [lender.nick]
    assert read(user, "describe", job["job"])["asked"]["network"] == [WHERE]
    told = [one["reason"] for one in read(user, "job", "events", job["job"])["events"] if one["new"] == "network"]
    assert told[0].startswith("refused: data.invalid was not found") and "else.invalid:443 is not among" in told[1]
    (refused,) = [row for row in read(user, "why", job["job"])["refused"] if row["nick"] == user.nick]
    assert refused["reasons"] == [f"its owner does not let jobs reach {WHERE} (network in its config.toml)"]


def test_orders_that_cannot_be_met_say_what_to_do(shared: Stack) -> None:
    node = shared.nodes[0]

    def refused(*words: str) -> str:
        done = mesh(node, "run", *words, "--", "true")
        assert done.returncode == 125, done.stdout + done.stderr
        return done.stderr

    assert f"its owner does not let jobs reach {WHERE} (network in its config.toml)" in refused("--network", WHERE)
    assert "has no port: write it as api.wandb.ai:443" in refused("--network", "api.wandb.ai")
    assert "addresses and patterns are not taken" in refused("--network", "127.0.0.1:443")
    assert "leave out --network, or --nodes" in refused("--network", WHERE, "--nodes", "2")
    assert "leave it out of --env" in refused("--network", WHERE, "-e", "https_proxy=http://x")
