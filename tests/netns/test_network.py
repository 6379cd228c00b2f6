"""Real daemons on real (virtual) networks: discovery, blocked ports, wrong and changing addresses, clones, partitions."""

import shutil
import signal
import time

import pytest

from mesh.daemon.layout import Layout
from tests.e2e.commands import until
from tests.netns.lan import Host, Lan, all_see, found, office

pytestmark = pytest.mark.netns


def findings(host: Host) -> dict[str, dict[str, str]]:
    import json

    done = host.mesh("doctor", "--json")
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_machines_on_one_switch_discover_each_other_by_multicast(lan: Lan) -> None:
    hosts = office(lan, 3)
    seen = findings(hosts[1])
    assert {name for name, finding in seen.items() if finding["state"] == "fail"} == set()
    assert "2 nodes can reach this one at 10.77.0.2:7373" in seen["address"]["detail"]
    assert seen["multicast"]["detail"] == "2 of 2 neighbours found by mDNS"
    assert hosts[1].mesh("doctor").returncode == 0


def test_blocked_udp_falls_back_to_tcp_and_is_reported(lan: Lan) -> None:
    hosts = office(lan, 3)
    hosts[2].iptables("-A", "INPUT", "-p", "udp", "--dport", "7373", "-j", "DROP")
    until(lambda: hosts[2].status()["counters"].get("packets_by_tcp", 0) > 2, "packets to go over TCP")
    finding = findings(hosts[2])["UDP"]
    assert finding["state"] == "warn" and "UDP port 7373" in finding["next"]
    time.sleep(5)  # longer than any suspicion timeout; the test checks that no death follows
    assert not any("dead" in host.sees().values() for host in hosts), "blocked UDP must not get a node declared dead"
    until(lambda: all_see(hosts, {host.name for host in hosts}), "suspicions to be refuted")


def test_unreachable_node_reports_the_problem(lan: Lan) -> None:
    hosts = office(lan, 2, relay_nodes=0)
    hosts[1].iptables("-A", "INPUT", "-p", "tcp", "--dport", "7373", "-j", "DROP")
    finding = findings(hosts[1])["TCP"]
    assert finding["state"] == "fail" and "TCP port 7373" in finding["next"]
    hosts[1].iptables("-A", "INPUT", "-p", "udp", "--dport", "7373", "-j", "DROP")
    finding = findings(hosts[1])["address"]
    assert "cannot reach this node at 10.77.0.2:7373" in finding["detail"] and "--advertise" in finding["next"]


def test_blocked_multicast_is_reported_and_an_address_connects_the_nodes(lan: Lan) -> None:
    lan.switch("br0")
    hosts = [lan.host(f"h{number}") for number in range(2)]
    for number, host in enumerate(hosts):
        host.plug("br0", f"10.77.0.{number + 1}/24")
        lan.in_switch("ip", "link", "set", f"p{number + 1}", "type", "bridge_slave", "mcast_flood", "off")
    found(*hosts)
    hosts[0].up()
    hosts[1].up(join=["10.77.0.1:7373"])
    until(lambda: all_see(hosts, {"h0", "h1"}), "both nodes to meet by address")
    finding = findings(hosts[1])["multicast"]
    assert finding["state"] == "warn" and "mDNS finds none" in finding["detail"] and "--join" in finding["next"]
    hosts[1].iptables("-A", "OUTPUT", "-d", "224.0.0.0/4", "-j", "REJECT")
    assert "does not work on 10.77.0.2" in findings(hosts[1])["multicast"]["detail"]


def test_container_and_dead_end_addresses_are_not_advertised(lan: Lan) -> None:
    """Consul and alertmanager (issue 1909) advertised docker0. Here, only one of two real interfaces reaches the peer."""
    lan.switch("br0")
    lan.switch("br1")
    hosts = [lan.host(f"h{number}") for number in range(2)]
    hosts[0].plug("br0", "10.77.0.1/24")
    hosts[1].plug("br1", "10.10.0.1/24", "eno1")  # first in order, but without a route to the peer
    hosts[1].plug("br0", "10.77.0.2/24", "eth0")
    for host in hosts:
        host.run("ip", "link", "add", "docker0", "type", "bridge")
        host.run("ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
        host.run("ip", "link", "set", "docker0", "up")
    found(*hosts)
    for host in hosts:
        host.up()
    until(lambda: all_see(hosts, {"h0", "h1"}), "both nodes to find each other")
    until(lambda: hosts[0].row("h1")["address"] == "10.77.0.2:7373", "the reachable address to be advertised")
    until(lambda: not hosts[1].status()["problems"], "the problem to be cleared")
    assert hosts[0].status()["address"] == "10.77.0.1:7373"


def test_machine_announces_its_changed_address(lan: Lan) -> None:
    hosts = office(lan, 3)
    hosts[2].run("ip", "address", "del", "10.77.0.3/24", "dev", "eth0")
    hosts[2].run("ip", "address", "add", "10.77.0.99/24", "dev", "eth0")
    until(
        lambda: (
            all(host.row("h2")["address"] == "10.77.0.99:7373" for host in hosts[:2])
            and all_see(hosts, {"h0", "h1", "h2"})
        ),
        "the new address to be known",
    )


def test_younger_clone_stops_and_both_machines_report_the_shared_key(lan: Lan) -> None:
    hosts = office(lan, 2)
    clone = lan.host("clone")
    clone.plug("br0", "10.77.0.50/24")
    shutil.copytree(hosts[1].state, clone.state, ignore=shutil.ignore_patterns("*.sock", "daemon.lock"))
    clone.up()
    assert clone.daemon is not None
    until(lambda: clone.daemon is not None and clone.daemon.poll() is not None, "the clone to stop")
    assert clone.daemon.returncode == 1 and "another machine at 10.77.0.2:7373 was started earlier" in clone.log()
    until(lambda: "cloned" in hosts[1].status()["problems"], "the older node to report the clone")
    assert "10.77.0.50" in findings(hosts[1])["cloned"]["detail"]
    until(lambda: all_see(hosts, {"h0", "h1"}), "both nodes to be alive again")
    assert hosts[0].row("h1")["address"] == "10.77.0.2:7373"


def test_partition_heals_and_a_stopped_machine_is_not_declared_dead_early(lan: Lan) -> None:
    hosts = office(lan, 4, profile="local")
    side = {"h0", "h1"}
    for host in hosts[2:]:
        for other in hosts[:2]:
            host.iptables("-A", "INPUT", "-s", other.address, "-j", "DROP")
            host.iptables("-A", "OUTPUT", "-d", other.address, "-j", "DROP")
    until(
        lambda: all_see(hosts[:2], side) and all_see(hosts[2:], {"h2", "h3"}), "both sides to declare each other dead"
    )
    for host in hosts[2:]:
        host.iptables("-F")
    until(lambda: all_see(hosts, {host.name for host in hosts}), "the partition to heal")
    hosts[3].signal(signal.SIGSTOP)
    time.sleep(1.0)
    hosts[3].signal(signal.SIGCONT)
    until(lambda: all_see(hosts, {host.name for host in hosts}), "all nodes to be alive")
    assert hosts[0].row("h3")["state"] == "alive"


def test_crash_is_detected_at_25_percent_packet_loss(lan: Lan) -> None:
    hosts = office(lan, 5)
    for host in hosts:
        host.iptables("-A", "INPUT", "-m", "statistic", "--mode", "random", "--probability", "0.25", "-j", "DROP")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert not any("dead" in host.sees().values() for host in hosts), "a healthy node was declared dead"
        time.sleep(0.5)
    hosts[4].signal(signal.SIGKILL)
    until(lambda: all(host.sees()["h4"] == "dead" for host in hosts[:4]), "the crash to be known")
    # At this loss, healthy nodes are sometimes suspected; they refute it and are never declared dead.
    healthy = {"h0", "h1", "h2", "h3"}
    assert not any(host.sees()[nick] == "dead" for host in hosts[:4] for nick in healthy)
    until(lambda: all_see(hosts[:4], healthy), "suspicions to be refuted")
    assert Layout(hosts[4].state).socket.exists(), "a crash must leave the socket behind"
