"""Real daemons on real (virtual) networks: discovery, blocked ports, wrong and changing addresses, clones, partitions."""

import shutil
import signal
import time

import pytest

from mesh.layout import Layout
from tests.e2e.commands import until
from tests.netns.lan import Host, Lan, all_see, found, office

pytestmark = pytest.mark.netns


def findings(host: Host) -> dict[str, dict[str, str]]:
    import json

    done = host.mesh("doctor", "--json")
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_machines_on_one_switch_find_each_other_by_multicast_and_doctor_is_content(lan: Lan) -> None:
    hosts = office(lan, 3)
    seen = findings(hosts[1])
    assert {name for name, finding in seen.items() if finding["state"] == "fail"} == set()
    assert "2 nodes reach this one at 10.77.0.2:7373" in seen["address"]["detail"]
    assert seen["multicast"]["detail"] == "2 of 2 neighbours seen by it"
    assert hosts[1].mesh("doctor").returncode == 0


def test_one_node_that_knows_another_subnet_bridges_everybody(lan: Lan) -> None:
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
        host.up(**({"join": ["10.77.0.1"]} if number == 1 else {}))
    until(lambda: all_see(hosts, {host.name for host in hosts}), "the islands to meet")


def test_blocked_udp_is_survived_over_tcp_and_named(lan: Lan) -> None:
    hosts = office(lan, 3)
    hosts[2].iptables("-A", "INPUT", "-p", "udp", "--dport", "7373", "-j", "DROP")
    until(lambda: hosts[2].status()["counters"].get("tcp_pings_acked", 0) > 2, "probes to fall back to TCP")
    finding = findings(hosts[2])["UDP"]
    assert finding["state"] == "fail" and "UDP port 7373" in finding["next"]
    assert hosts[2].mesh("doctor").returncode == 1
    time.sleep(5)  # longer than any suspicion of a refused connection; nothing can be waited for that must not come
    assert not any("dead" in host.sees().values() for host in hosts), "nobody is given up for a firewall's rule"
    until(lambda: all_see(hosts, {host.name for host in hosts}), "suspicions to be refuted")


def test_a_node_that_nobody_can_reach_is_told_so(lan: Lan) -> None:
    hosts = office(lan, 2)
    hosts[1].iptables("-A", "INPUT", "-p", "tcp", "--dport", "7373", "-j", "DROP")
    finding = findings(hosts[1])["TCP"]
    assert finding["state"] == "fail" and "TCP port 7373" in finding["next"]
    hosts[1].iptables("-A", "INPUT", "-p", "udp", "--dport", "7373", "-j", "DROP")
    finding = findings(hosts[1])["address"]
    assert "cannot reach this node at 10.77.0.2:7373" in finding["detail"] and "--advertise" in finding["next"]


def test_blocked_multicast_is_named_and_an_address_helps(lan: Lan) -> None:
    lan.switch("br0")
    hosts = [lan.host(f"h{number}") for number in range(2)]
    for number, host in enumerate(hosts):
        host.plug("br0", f"10.77.0.{number + 1}/24")
        lan.in_switch("ip", "link", "set", f"p{number + 1}", "type", "bridge_slave", "mcast_flood", "off")
    found(*hosts)
    hosts[0].up()
    hosts[1].up(join=["10.77.0.1:7373"])
    until(lambda: all_see(hosts, {"h0", "h1"}), "them to meet by address")
    finding = findings(hosts[1])["multicast"]
    assert finding["state"] == "warn" and "shows none" in finding["detail"] and "--join" in finding["next"]
    hosts[1].iptables("-A", "OUTPUT", "-d", "224.0.0.0/4", "-j", "REJECT")
    assert "does not work on 10.77.0.2" in findings(hosts[1])["multicast"]["detail"]


def test_addresses_of_containers_and_dead_ends_are_not_advertised(lan: Lan) -> None:
    """Consul and alertmanager (issue 1909) advertised docker0. And of two real interfaces only one leads to the others."""
    lan.switch("br0")
    lan.switch("br1")
    hosts = [lan.host(f"h{number}") for number in range(2)]
    hosts[0].plug("br0", "10.77.0.1/24")
    hosts[1].plug("br1", "10.10.0.1/24", "eno1")  # sorts and comes first, and leads nowhere
    hosts[1].plug("br0", "10.77.0.2/24", "eth0")
    for host in hosts:
        host.run("ip", "link", "add", "docker0", "type", "bridge")
        host.run("ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
        host.run("ip", "link", "set", "docker0", "up")
    found(*hosts)
    for host in hosts:
        host.up()
    until(lambda: all_see(hosts, {"h0", "h1"}), "them to find each other")
    until(lambda: hosts[0].row("h1")["address"] == "10.77.0.2:7373", "the address that works to be advertised")
    until(lambda: not hosts[1].status()["problems"], "that it works to be seen")
    assert hosts[0].status()["address"] == "10.77.0.1:7373"


def test_a_machine_that_gets_another_address_says_so_itself(lan: Lan) -> None:
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


def test_of_two_machines_with_one_key_the_younger_stops_and_both_are_told(lan: Lan) -> None:
    hosts = office(lan, 2)
    clone = lan.host("clone")
    clone.plug("br0", "10.77.0.50/24")
    shutil.copytree(hosts[1].state, clone.state, ignore=shutil.ignore_patterns("*.sock", "daemon.lock"))
    clone.up()
    assert clone.daemon is not None
    until(lambda: clone.daemon is not None and clone.daemon.poll() is not None, "the clone to stop")
    assert clone.daemon.returncode == 1 and "in use on another machine, at 10.77.0.2:7373" in clone.log()
    until(lambda: "cloned" in hosts[1].status()["problems"], "the elder to be told")
    assert "10.77.0.50" in findings(hosts[1])["cloned"]["detail"]
    until(lambda: all_see(hosts, {"h0", "h1"}), "peace")
    assert hosts[0].row("h1")["address"] == "10.77.0.2:7373"


def test_a_partition_heals_and_a_stopped_machine_is_not_given_up_too_soon(lan: Lan) -> None:
    hosts = office(lan, 4, profile="local")
    side = {"h0", "h1"}
    for host in hosts[2:]:
        for other in hosts[:2]:
            host.iptables("-A", "INPUT", "-s", other.address, "-j", "DROP")
            host.iptables("-A", "OUTPUT", "-d", other.address, "-j", "DROP")
    until(lambda: all_see(hosts[:2], side) and all_see(hosts[2:], {"h2", "h3"}), "both sides to give each other up")
    for host in hosts[2:]:
        host.iptables("-F")
    until(lambda: all_see(hosts, {host.name for host in hosts}), "the partition to heal")
    hosts[3].signal(signal.SIGSTOP)
    time.sleep(1.0)
    hosts[3].signal(signal.SIGCONT)
    until(lambda: all_see(hosts, {host.name for host in hosts}), "all to be well")
    assert hosts[0].row("h3")["state"] == "alive"


def test_a_quarter_of_all_packets_may_be_lost_and_a_crash_is_still_seen(lan: Lan) -> None:
    hosts = office(lan, 5)
    for host in hosts:
        host.iptables("-A", "INPUT", "-m", "statistic", "--mode", "random", "--probability", "0.25", "-j", "DROP")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert not any("dead" in host.sees().values() for host in hosts), "a healthy node was given up"
        time.sleep(0.5)
    hosts[4].signal(signal.SIGKILL)
    until(lambda: all(host.sees()["h4"] == "dead" for host in hosts[:4]), "the crash to be known")
    # At this loss somebody healthy is suspected now and then; it answers for itself, and is never given up.
    healthy = {"h0", "h1", "h2", "h3"}
    assert not any(host.sees()[nick] == "dead" for host in hosts[:4] for nick in healthy)
    until(lambda: all_see(hosts[:4], healthy), "suspicions to be refuted")
    assert Layout(hosts[4].state).socket.exists(), "it had no time to tidy up"
