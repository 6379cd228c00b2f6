"""Findings of the doctor from observations. tests/netns runs the doctor on broken networks."""

import fcntl
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from membership.identity import Identity, format_id
from membership.trust import found_mesh
from mesh.cli.doctor import Facts, Finding, Port, diagnose
from mesh.cli.nodes import edge_text
from mesh.daemon import leftovers
from mesh.daemon.layout import Layout, save_membership
from mesh.daemon.leftovers import Leftovers, find
from mesh.daemon.stack import Stack
from mesh.execution.apptainer.engine import NOT_INSTALLED
from mesh.execution.docker.watchdog import LABEL_NODE
from mesh.network.edge import EdgeState
from mesh.network.egress import tag_of
from mesh.util.errors import MeshError
from tests.chains import admitted
from tests.container_images import import_busybox
from tests.dockerd import client_of, dockerd
from tests.e2e.commands import mesh, read

NOW = 1_800_000_000.0


def edge(**changes: Any) -> dict[str, Any]:
    state: dict[str, Any] = msgspec.to_builtins(EdgeState(guests=True))
    return {**state, **changes}


def status(**changes: Any) -> dict[str, Any]:
    good = {"nick": "desk", "address": "10.0.0.1:7373", "pid": 1, "problems": {}, "engines": {}, "edge": edge()}
    good |= {"version": "0.1.0", "versions": {"desk": "0.1.0", "rack": "0.1.0"}}
    return {**good, **changes}


def network(**changes: Any) -> dict[str, Any]:
    good = {"nick": "rack", "udp": True, "tcp": "acked", "seen_host": "10.0.0.1", "error": ""}
    return {
        "others": 3,
        "asked": [good],
        "mdns_problem": "",
        "neighbours": 3,
        "neighbours_by_mdns": 3,
        "clock_offset_s": 0.0,
        "clock_peers": 3,
        "over_tcp": 0,
        "no_route": [],
        "relay": "",
        **changes,
    }


def facts(**changes: Any) -> Facts:
    sound = {
        "state": "/state",
        "member": True,
        "certificate_ends_unix": NOW + 80 * 86_400,
        "status": status(),
        "network": network(),
        "addresses": ("10.0.0.1", "2001:db8::1"),
        "own": frozenset({"127.0.0.1", "10.0.0.1", "10.0.0.7"}),
        "multicast": {"10.0.0.1": ""},
        "now_unix": NOW,
    }
    return Facts(**{**sound, **changes})


def worst(seen: Facts) -> Finding:
    findings = diagnose(seen)
    order = {"fail": 0, "warn": 1, "ok": 2}
    return min(findings, key=lambda finding: order[finding.state])


def test_doctor_finds_no_problem_on_healthy_node() -> None:
    assert {finding.state for finding in diagnose(facts())} == {"ok"}


def test_doctor_says_where_multicast_ends() -> None:
    routed = diagnose(facts(network=network(neighbours=0, neighbours_by_mdns=0)))
    (multicast,) = [finding for finding in routed if finding.check == "multicast"]
    assert multicast.state == "ok" and "beyond a router" in multicast.detail


def test_doctor_finds_what_prevents_lending() -> None:
    never = worst(facts(status=status(lend={"warnings": ["never lends: hours is never"]})))
    assert (never.check, never.state, never.detail) == ("lending", "warn", "never lends: hours is never")
    broken = worst(facts(policy_problem="/state/policy.toml: gpu.idle: '5x' is not a duration"))
    assert (broken.check, broken.state) == ("policy", "fail") and "gpu.idle" in broken.detail


def asked(**changes: Any) -> dict[str, Any]:
    return network(
        asked=[{"nick": "rack", "udp": False, "tcp": "silent", "seen_host": "10.0.0.7", "error": "", **changes}]
    )


@pytest.mark.parametrize(
    ("seen", "check", "state", "words"),
    [
        (facts(key_problem="others may read it"), "state", "fail", "others may"),
        (facts(member=False), "state", "fail", "no mesh"),
        (facts(settings_problem="port must be"), "state", "fail", "port must"),
        (facts(certificate_problem="has ended"), "certificate", "fail", "has ended"),
        (facts(certificate_ends_unix=NOW + 3600), "certificate", "warn", "until"),
        (facts(status=None, network=None, daemon_problem="none runs"), "daemon", "fail", "none runs"),
        (
            facts(ports=(Port("udp", 7373, "--port", "dnsmasq (pid 7)"),)),
            "ports",
            "fail",
            "7373/udp is used by dnsmasq",
        ),
        (facts(ports=(Port("tcp", 7374, "--api-port", "?"),)), "ports", "fail", "another user"),
        (facts(multicast={"10.0.0.1": "No route"}), "multicast", "warn", "No route"),
        (facts(network=network(neighbours_by_mdns=0)), "multicast", "warn", "blocked between"),
        (facts(network=network(mdns_problem="cannot bind")), "multicast", "warn", "cannot bind"),
        (facts(network=network(others=0)), "others", "warn", "no other node"),
        (facts(network=asked(tcp="acked")), "UDP", "warn", "carries gossip instead"),
        (facts(network=asked(udp=True)), "TCP", "fail", "UDP does"),
        (facts(network=asked()), "address", "fail", "they see this machine as 10.0.0.7"),
        (facts(network=asked(seen_host="192.0.2.7")), "NAT", "fail", "see this machine as 192.0.2.7"),
        (facts(network=network(relay="rack")), "relay", "warn", "rack passes connections on"),
        (facts(addresses=()), "IP", "warn", "no address"),
        (facts(addresses=("fd77::1",), network=network(no_route=["rack"])), "IP", "fail", "but rack advertise IPv4"),
        (facts(network=asked(error="timed out")), "reaching others", "fail", "timed out"),
        (facts(network=network(clock_offset_s=240.0)), "clock", "fail", "240 s behind"),
        (facts(network=network(clock_offset_s=-30.0)), "clock", "warn", "30 s ahead"),
        (facts(network=network(clock_offset_s=240.0, clock_peers=1)), "clock", "warn", "too few"),
        (facts(status=status(edge=edge(problem="no clang", next="get it"))), "network edge", "warn", "no clang"),
        (facts(status=status(edge=edge(guests=False, problem="no tc", next="x"))), "network edge", "warn", "no tc"),
        (facts(status=status(versions={"desk": "0.1.0", "rack": "0.2.0"})), "versions", "warn", "rack: 0.2.0"),
        (facts(free_bytes=1 << 30), "disk", "warn", "1.0 GiB are free"),
        (facts(free_bytes=0), "disk", "fail", "0.0 GiB are free"),
        (facts(status=status(problems={"cloned": "another machine"})), "cloned", "fail", "another machine"),
        (facts(status=status(problems={"revoked": "its key was revoked"})), "revoked", "fail", "its key was revoked"),
    ],
)
def test_doctor_names_each_problem_and_the_next_step(seen: Facts, check: str, state: str, words: str) -> None:
    found = worst(seen)
    assert (found.check, found.state) == (check, state) and words in found.detail
    assert found.next or check in {"state", "cloned", "multicast"}


def test_doctor_advises_killing_a_hanging_daemon_first() -> None:
    for hangs in (True, False):
        found = worst(facts(status=None, network=None, daemon_problem="it is silent", daemon_hangs=hangs))
        assert ("kill -9" in found.next) == hangs and "`mesh up`" in found.next


def test_doctor_names_the_process_on_the_port_without_a_daemon(tmp_path: Path) -> None:
    state = tmp_path / "a"
    assert mesh(state, "init", "lab", "--nick", "desk").returncode == 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        (state / "config.toml").write_text(f'bind = "127.0.0.1"\nport = {port}\napi_port = 0\nmdns = false\n')
        done = mesh(state, "doctor")
        assert done.returncode == 1 and f"{port}/udp is used by" in done.stdout and "(pid " in done.stdout
        assert "no daemon answers" in done.stdout and f"next: `mesh --state {state} up`" in done.stdout
    (state / "config.toml").write_text("port = 'x'\n")
    assert "config.toml" in mesh(state, "doctor").stdout


def test_doctor_reports_expired_certificate_and_the_next_step(tmp_path: Path) -> None:
    root, old = Identity.generate(), time.time() - 100 * 86_400
    genesis, chain = found_mesh(root, "lab", "root", "ada", old)
    where = Layout(tmp_path / "a")
    where.root.mkdir()
    identity = Identity.generate()
    identity.save(where.key)
    save_membership(where, genesis, admitted(root, genesis, chain, identity.node_id, "rack", "bob", old), ())
    answer = mesh(where.root, "doctor", "--json")
    assert answer.returncode == 1
    assert "has expired" in answer.stdout and "mesh member approve" in answer.stdout
    refused = mesh(where.root, "up", "--bind", "127.0.0.1", "--port", "0", "--api-port", "0")
    assert refused.returncode == 1 and "has expired" in refused.stderr


def test_doctor_json_is_versioned(tmp_path: Path) -> None:
    assert mesh(tmp_path / "x", "doctor").returncode == 1
    assert '"schema": 1' in mesh(tmp_path / "x", "doctor", "--json").stdout
    with pytest.raises(AssertionError):
        read(tmp_path / "x", "doctor")


def test_nothing_is_removed_while_a_daemon_has_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Layout(tmp_path)
    monkeypatch.setattr(leftovers, "find", lambda where: pytest.fail("it looks"))
    with where.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MeshError, match="a daemon starts or ends"):
            leftovers.remove(where)


@pytest.mark.dockerd
def test_doctor_lists_leftovers_of_killed_daemon_and_down_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Stack(1, directory=tmp_path) as stack, dockerd() as engine, client_of(engine.host) as client:
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        where = stack.nodes[0].where
        node = format_id(Identity.load(where.key).node_id)
        assert mesh(where.root, "down").stdout == "this node is not running\n", "there are no leftovers"
        for name in (node, "another node's"):
            client.api.create_container(import_busybox(), "true", labels={LABEL_NODE: name})
            client.networks.create(tag_of(name), labels={LABEL_NODE: name})
        (where.data / "trees" / "ab").mkdir(parents=True)
        told = mesh(where.root, "doctor").stdout
        assert (
            "leftovers: a killed daemon left on this machine: 1 container, 1 network, 1 data set in the clear" in told
        )
        assert "down` removes it" in told
        taken = mesh(where.root, "down")
        assert taken.returncode == 0 and "had left: 1 container, 1 network, 1 data set" in taken.stderr
        assert find(where) == Leftovers() and "leftovers:" not in mesh(where.root, "doctor").stdout
        (other,) = client.containers.list(all=True)
        assert other.labels[LABEL_NODE] == "another node's" and client.networks.list(names=[tag_of("another node's")])


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (edge(off=True), "off (`edge`"),
        (edge(attached=["a", "b"]), "of their own (2 interfaces now); leaves the machine's own interfaces alone"),
        (edge(device="eth0", shaped_mbps=1000.0, reserved_mbps=120.5), "shapes eth0 to 1000 Mbit/s, 120.5 of them"),
        (edge(device="eth0", problem="a queue of somebody else's"), "that leave by eth0; a queue of"),
        (edge(cut=["guests", "checkpoints"]), "CUT OFF NOW: guests and checkpoints"),
    ],
)
def test_doctor_describes_network_edge(state: dict[str, Any], words: str) -> None:
    assert words in edge_text(state)


@pytest.mark.parametrize(
    ("unlimited", "limits_disk", "named"),
    [
        ([], True, None),
        (["disk rate"], False, None),
        (["disk rate"], True, "none of disk rate for"),
        (["CPU", "disk rate"], False, "none of CPU for"),
    ],
)
def test_limits_that_cannot_be_set_are_named_with_the_way_to_get_them(
    unlimited: list[str], limits_disk: bool, named: str | None
) -> None:
    engine = {"ok": True, "detail": "ready", "isolation": "", "unlimited": unlimited, "limits_by": "`loginctl ...`"}
    found = diagnose(facts(status=status(engines={"process": engine}), limits_disk=limits_disk))
    said = [finding for finding in found if finding.check == "limits of process"]
    assert [finding.state for finding in said] == (["warn"] if named else [])
    assert named is None or (said[0].detail.startswith(named) and said[0].next == "`loginctl ...`")


@pytest.mark.parametrize(
    ("apptainer", "docker", "shown"),
    [
        ("", True, False),
        ("guests cannot be limited here", True, False),
        ("guests cannot be limited here", False, True),
        (NOT_INSTALLED, False, False),
        (NOT_INSTALLED, None, True),
        ("", False, True),
    ],
)
def test_apptainer_is_named_where_it_could_run_images(apptainer: str, docker: bool | None, shown: bool) -> None:
    engines: dict[str, Any] = {} if docker is None else {"docker": {"ok": docker, "detail": "", "isolation": ""}}
    for engine in engines.values():
        engine |= {"unlimited": [], "limits_by": "", "system": {"platform": "", "problem": "", "gpu_problem": ""}}
    other = {"ok": not apptainer and not docker, "detail": apptainer, "isolation": "", "unlimited": [], "limits_by": ""}
    found = diagnose(facts(status=status(engines={**engines, "apptainer": other})))
    assert any("apptainer" in one.check for one in found) == shown


def test_doctor_says_that_checkpoints_are_slow_without_a_compiler() -> None:
    found = worst(facts(native=False))
    assert (found.check, found.state) == ("checkpoints", "warn") and "apt install gcc" in found.next
