"""Meshes across borders: a router without multicast, and firewalls that let one TCP port through. Jobs cross them."""

import pytest

from tests.e2e.commands import until
from tests.netns.lan import Host, Lan, all_see, found, offered
from tests.netns.test_jobs import LENDS, counted, saved, submit
from tests.netns.test_network import findings

pytestmark = pytest.mark.netns


def continue_after_departure(user: Host, hosts: list[Host]) -> None:
    """Run a job of a user who lends nothing, let its host leave, and check that another one continues it."""
    until(lambda: all(offered(host) == len(hosts) for host in hosts), "all nodes to receive each other's offers")
    user.ok("pause")
    job = submit(user)
    runs_on = saved(user, job)["node"]
    assert runs_on != user.name
    next(host for host in hosts if host.name == runs_on).ok("down")
    until(lambda: user.job(job)["node"] not in {None, runs_on}, "another host to take over")
    assert user.sees()[runs_on] == "left", "the farewell must cross the border"
    assert min(counted(user, job)) > 10
    assert len(user.job(job)["attempts"]) == 2


def test_one_seed_in_a_second_subnet_connects_all_nodes_and_their_jobs(lan: Lan) -> None:
    lan.switch("br0")
    lan.switch("br1")
    router = lan.host("router")
    router.plug("br0", "10.77.0.254/24", "eth0")
    router.plug("br1", "10.78.0.254/24", "eth1")
    router.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    hosts = [lan.host(f"h{number}") for number in range(4)]
    for number, host in enumerate(hosts):
        net = 77 + number % 2
        host.plug(f"br{number % 2}", f"10.{net}.0.{number + 1}/24")
        host.run("ip", "route", "add", "default", "via", f"10.{net}.0.254")
    found(*hosts)
    for number, host in enumerate(hosts):
        host.up(**LENDS, **({"join": ["10.77.0.1"]} if number == 1 else {}))
    until(lambda: all_see(hosts, {host.name for host in hosts}), "both subnets to see each other")
    hosts[2].ok("pause")  # the user's neighbour: its job has to cross the router, and to leave by it
    continue_after_departure(hosts[0], hosts)


def test_firewalls_that_let_one_tcp_port_through_carry_gossip_calls_and_jobs(lan: Lan) -> None:
    lan.switch("br0")
    hosts = [lan.host(f"h{number}") for number in range(3)]
    for number, host in enumerate(hosts):
        host.plug("br0", f"10.77.0.{number + 1}/24")
        for side in ("--dport", "--sport"):
            host.iptables("-A", "INPUT", "-p", "tcp", side, "7373", "-j", "ACCEPT")
        host.iptables("-A", "INPUT", "-i", "eth0", "-j", "DROP")
    found(*hosts)
    for host in hosts:
        host.up(**LENDS, **({} if host is hosts[0] else {"join": ["10.77.0.1"]}))
    until(lambda: all_see(hosts, {host.name for host in hosts}), "all nodes to see each other")
    until(lambda: all(host.status()["counters"].get("packets_by_tcp", 0) > 5 for host in hosts), "gossip over TCP")
    seen = findings(hosts[1])
    assert {name for name, finding in seen.items() if finding["state"] == "fail"} == set()
    assert "carries gossip instead (to 2 of 2 nodes)" in seen["UDP"]["detail"]
    assert "does not work" in seen["multicast"]["detail"] and "--join" in seen["multicast"]["next"]
    continue_after_departure(hosts[0], hosts)


def behind_nat(lan: Lan, outside: int) -> tuple[Host, list[Host]]:
    """Return a host behind NAT, and some that it reaches."""
    lan.switch("br0")
    lan.switch("br1")
    router, inside = lan.host("router"), lan.host("inside")
    router.plug("br0", "10.77.0.254/24", "eth0")
    router.plug("br1", "192.168.9.1/24", "eth1")
    router.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    router.iptables("-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE")
    inside.plug("br1", "192.168.9.2/24")
    inside.run("ip", "route", "add", "default", "via", "192.168.9.1")
    others = [lan.host(f"h{number}") for number in range(outside)]
    for number, other in enumerate(others):
        other.plug("br0", f"10.77.0.{number + 1}/24")
    found(*others, inside)
    return inside, others


def test_machine_behind_nat_takes_part_by_a_relay(lan: Lan) -> None:
    inside, others = behind_nat(lan, 2)
    for other in others:
        other.up(**LENDS)
    inside.up(join=["10.77.0.1"], **LENDS)
    relayed = until(lambda: findings(inside).get("relay"), "a node to lend a port")
    assert inside.status()["address"].rpartition(":")[0] in {"10.77.0.1", "10.77.0.2"}, relayed
    until(lambda: all_see([*others, inside], {host.name for host in (*others, inside)}), "all to see each other")
    user, other = others
    until(lambda: offered(user) == 3, "all offers to reach the user")
    user.ok("pause")
    other.ok("pause")
    job = submit(user)
    assert saved(user, job)["node"] == inside.name
    other.ok("lend")
    inside.ok("down")
    until(lambda: user.job(job)["node"] == other.name, "the host outside to take over")
    assert min(counted(user, job)) > 10
    assert len(user.job(job)["attempts"]) == 2


def test_machine_behind_nat_has_another_relay_when_one_leaves(lan: Lan) -> None:
    inside, others = behind_nat(lan, 2)
    for other in others:
        other.up()
    inside.up(join=["10.77.0.1"])
    relay = until(lambda: inside.client.get("/v1/network")["relay"], "a node to lend a port")
    (gone,), (rest,) = ([host for host in others if (host.name == relay) is at] for at in (True, False))
    until(lambda: all_see([rest, inside], {host.name for host in (*others, inside)}), "all to see each other")
    gone.ok("down")
    until(lambda: inside.client.get("/v1/network")["relay"] == rest.name, "the other node to lend a port")
    until(lambda: rest.sees()[inside.name] == "alive", "the host inside to be seen")
    assert rest.row(inside.name)["address"] == inside.status()["address"] != "192.168.9.2:7373"


def test_machine_behind_nat_is_told_so(lan: Lan) -> None:
    inside, (outside,) = behind_nat(lan, 1)
    outside.up(relay_nodes=0)
    inside.up(join=["10.77.0.1"])
    finding = until(lambda: findings(inside).get("NAT"), "the doctor to see the NAT")
    assert "see this machine as 10.77.0.254" in finding["detail"]
    assert "mesh up --advertise 10.77.0.254" in finding["next"]
