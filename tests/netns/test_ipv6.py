"""Meshes with IPv6 alone, and with both families: mDNS, invites, addresses on the command line, jobs, departures."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.commands import WAIT_S, command, until
from tests.netns.lan import Host, Lan, all_see, found, offered
from tests.netns.test_jobs import LENDS, counted, saved, submit
from tests.netns.test_network import findings

pytestmark = pytest.mark.netns


def machine(lan: Lan, number: int, *families: int) -> Host:
    """Return a machine on the switch with an address of each of these families."""
    host = lan.host(f"h{number}")
    addresses = {4: f"10.77.0.{number + 1}/24", 6: f"fd77::{number + 1}/64"}
    first, *others = families
    host.plug("br0", addresses[first])
    for family in others:
        host.run("ip", "address", "add", addresses[family], "dev", "eth0", *(["nodad"] if family == 6 else []))
    return host


def test_mesh_of_ipv6_alone_is_founded_joined_discovered_and_continues_a_job_of_a_host_that_leaves(lan: Lan) -> None:
    lan.switch("br0")
    first, second, third = (machine(lan, number, 6) for number in range(3))
    first.ok("init", "lab", "--nick", "h0", "--user", "ada")
    first.up(**LENDS)
    assert first.status()["address"] == "[fd77::1]:7373"
    invite = first.ok("member", "invite", "--mine").strip().splitlines()[-1]
    second.ok("join", invite, "--nick", "h1")
    second.up(**LENDS)
    until(lambda: all_see([first, second], {"h0", "h1"}), "the invited machine to be a member")
    with asking(third, "fd77::1", "--nick", "h2", "--user", "bob"):
        until(lambda: "h2" in first.ok("member", "pending"), "the request to wait")
        first.ok("member", "approve", "h2")
    third.up(**LENDS, process_engine_for="all", join=["[fd77::1]:7373"])
    hosts = [first, second, third]
    until(lambda: all_see(hosts, {"h0", "h1", "h2"}), "all nodes to see each other")
    until(lambda: all(offered(host) == 3 for host in hosts), "all nodes to receive each other's offers")
    seen = until(lambda: (s := findings(second)) and "2 of 2" in s["multicast"]["detail"] and s, "mDNS to find both")
    assert seen["address"]["detail"] == "2 nodes can reach this one at [fd77::2]:7373"
    assert {name for name, finding in seen.items() if finding["state"] == "fail"} == set()
    assert "no IPv4" in seen["IP"]["detail"]
    first.ok("pause")
    job = submit(first)
    runs_on = saved(first, job)["node"]
    next(host for host in hosts if host.name == runs_on).ok("down")
    until(lambda: first.job(job)["node"] not in {None, runs_on}, "another host to take over")
    assert min(counted(first, job)) > 10
    assert len(first.job(job)["attempts"]) == 2


@contextmanager
def asking(host: Host, *arguments: str) -> Iterator[None]:
    """Ask to be admitted; at the end of the block the request must have been granted."""
    with subprocess.Popen([*host.within, *command(host.state, "join", *arguments)]) as process:
        try:
            yield
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def test_nodes_with_both_families_use_ipv4_and_move_to_ipv6_when_it_goes(lan: Lan) -> None:
    lan.switch("br0")
    hosts = [machine(lan, 0, 4, 6), machine(lan, 1, 4, 6), machine(lan, 2, 6, 4)]
    found(*hosts)
    for host in hosts:
        host.up()
    until(lambda: all_see(hosts, {host.name for host in hosts}), "all nodes to find each other")
    assert {host.status()["address"] for host in hosts} == {f"10.77.0.{number}:7373" for number in (1, 2, 3)}
    for host in hosts:
        host.run("ip", "-4", "address", "flush", "dev", "eth0")
    until(lambda: all(host.row("h0")["address"] == "[fd77::1]:7373" for host in hosts), "the mesh to move to IPv6")
    until(lambda: all_see(hosts, {host.name for host in hosts}), "all nodes to stay members")
