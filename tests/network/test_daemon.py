"""A real daemon at whose edge the kernel watches: what its owner sees, a reclaim, a death, an end in order."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.layout import Layout
from tests.cleanup import cleanup
from tests.e2e.commands import until
from tests.netns.lan import Host, Lan, office

pytestmark = [pytest.mark.bpf, pytest.mark.e2e]


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    with Lan(tmp_path) as lan:
        (host,) = office(lan, 1, edge_device="eth0", edge_mbps=100.0)
        cleanup().undo(sys.executable, "-m", "mesh.cli", "--state", str(host.state), "down")
        try:
            yield host
        finally:
            host.end()
            host.up(edge="off")  # a run that is killed leaves its place in /run; the next one takes it away
            host.ok("down", "--now")


def edge_of(host: Host) -> dict[str, Any]:
    found: dict[str, Any] = host.status()["edge"]
    return found


def finding(host: Host, check: str = "network edge") -> dict[str, str]:
    found = json.loads(host.mesh("doctor", "--json").stdout)["findings"]
    return next((row for row in found if row["check"] == check), {})


def test_owner_sees_uses_and_removes_edge(desk: Host) -> None:
    standing = edge_of(desk)
    assert standing["guests"] and standing["device"] == "eth0" and standing["shaped_mbps"] == 100, standing
    assert "network edge: can cut off guests" in desk.ok("status") and "shapes eth0 to 100 Mbit/s" in desk.ok("status")
    assert finding(desk)["state"] == "ok"
    desk.ok("reclaim", "--now")
    until(lambda: edge_of(desk)["cut"] == ["guests"], "checkpoints to go on once nobody is here any more")
    assert "CUT OFF NOW: guests" in desk.ok("status")
    desk.ok("lend")
    assert edge_of(desk)["cut"] == []

    assert desk.daemon is not None
    desk.daemon.send_signal(signal.SIGKILL)
    desk.daemon.wait()
    assert "htb 6d65:" in desk.run("tc", "qdisc", "show")
    left = finding(desk, "leftovers")
    assert left["state"] == "warn" and f"the network edge ({Layout(desk.state).edge})" in left["detail"]
    desk.up(edge_device="eth0", edge_mbps=50.0)
    assert edge_of(desk)["shaped_mbps"] == 50 and not edge_of(desk)["problem"]

    desk.ok("down")
    until(lambda: desk.daemon and desk.daemon.poll() is not None, "the daemon to end")
    queues = desk.run("tc", "qdisc", "show")
    assert "htb" not in queues and "clsact" not in queues and not Layout(desk.state).edge.exists()


def test_edge_reports_missing_privileges(desk: Host) -> None:
    desk.ok("down")
    until(lambda: desk.daemon and desk.daemon.poll() is not None, "the daemon to end")
    desk.up(edge_device="eth7")
    assert "no interface eth7" in edge_of(desk)["problem"]
    assert finding(desk)["state"] == "warn" and "paced by their sockets alone" in desk.ok("status")
    desk.ok("down")
    until(lambda: desk.daemon and desk.daemon.poll() is not None, "the daemon to end")
    desk.up(edge="off")
    assert "network edge: off" in desk.ok("status") and finding(desk)["state"] == "ok"
