"""Metrics and usage of a real node, as read by Prometheus, its owner and other nodes."""

import http.client
import json
import os
import socket
import tarfile
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from mesh.api.metric_names import METRICS
from mesh.daemon.stack import Stack, StackNode
from tests.e2e.commands import (
    as_documented,
    free_port,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    submit_count,
    until,
)

pytestmark = pytest.mark.e2e
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read_metrics(answer: str) -> Samples:
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value for family in parsed(answer) for one in family.samples
    }


def on_socket(node: StackNode) -> Samples:
    connection = http.client.HTTPConnection("mesh")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(node.where.socket))
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return read_metrics(answer.read().decode())


@pytest.mark.long
def test_node_reports_metrics_and_lending_usage(make_stack: Callable[..., Stack]) -> None:
    port = free_port()
    stack = make_stack(2)
    here, there = stack.nodes
    ok(there, "down", "--now")
    there.where.config.write_text(f'metrics_port = {port}\nnick = "another"\n')
    stack.start(there)
    until(
        lambda: there.where.socket.exists() and Stack.sees(here, 2) and Stack.sees(there, 2),
        "the restarted node to be seen",
    )
    ok(here, "pause")
    job = submit_count(here, 100_000)
    running_with_checkpoint(here, job)
    during = on_socket(there)
    running = ("engine", "process"), ("state", "running")
    assert (
        during["mesh_guests", running] == 1 and during["mesh_guest_starts_total", (running[0], ("result", "ok"))] == 1
    )
    assert during["mesh_members", (("state", "alive"),)] == 2 and during["mesh_slots_free", ()] == 0
    assert during["mesh_checkpoints_total", ()] >= 1 and during["mesh_lending", ()] == 1
    assert ("mesh_work_at_risk_seconds", ()) in during
    assert {name for name, _ in during} <= {
        metric.name + end for metric in METRICS for end in ("", "_bucket", "_sum", "_count")
    }
    as_documented(here, job)
    assert "has joined as 'node2'" in read(there, "status")["problems"]["nick"]
    (mine,) = [row for row in read(here, "member", "usage")["rows"] if row["attempts"]]
    assert mine["own_slot_h"] > 0, "running jobs must count, and both machines have one user"

    ok(there, "reclaim", "--grace", "20")
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def ended() -> Samples | None:
        connection.request("GET", "/metrics")
        told = read_metrics(connection.getresponse().read().decode())
        return told if told["mesh_reclaims_total", ()] == 1 and told["mesh_guests", running] == 0 else None

    after = until(ended, "the reclaim to be counted")
    assert after["mesh_reclaim_stage_seconds_count", (("stage", "gone"),)] == 1
    assert after["mesh_attempts_ended_total", (("end", "vacated"), running[0])] == 1 and after["mesh_paused", ()] == 1
    connection.request("GET", "/v1/status")
    refused = connection.getresponse()
    assert (refused.read(), refused.status)[1] == 404, "the port must serve nothing else"
    connection.close()
    ok(here, "cancel", job)

    (run,) = read(there, "member", "usage", "--runs")["runs"]
    assert run["job"] == job and run["end"].startswith("vacated: ") and run["submitter"] == here.nick
    by_node = {row["name"]: row for row in read(here, "member", "usage", "--by", "node")["rows"]}
    assert by_node[there.nick]["lent_slot_h"] == by_node[here.nick]["borrowed_slot_h"] > 0
    shown = ok(here, "member", "usage")
    assert "points ahead" in shown and "BORROWED" in shown and job[:8] in ok(there, "member", "usage", "--runs")
    (month,) = read(there, "member", "usage", "--by", "month", "--here")["rows"]
    assert month["own_slot_h"] > 0
    ordered = ok(there, "job", "events", "--audit")
    assert f"reclaim (grace_s=20.0), by uid {os.getuid()} (" in ordered and "running" not in ordered
    with tarfile.open(
        json.loads(ok(there, "debug", "dump", "-o", str(stack.directory / "dump.tar.gz"), "--json"))["file"]
    ) as tar:
        told = json.load(tar.extractfile("mesh-dump/status.json"))  # type: ignore[arg-type]
    assert told["nick"] == there.nick and told["versions"] == dict.fromkeys([here.nick, there.nick], told["version"])
    bad = mesh(here, "member", "usage", "--since", "yesterday")
    assert bad.returncode == 2 and "duration" in bad.stderr
