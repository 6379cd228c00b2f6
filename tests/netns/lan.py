"""A network of machines in namespaces: switches with hosts, routers between them, faults by iptables.

Each test creates and removes its own network. Nothing outside the namespaces changes.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mesh.api.client import Client
from mesh.daemon.config import GOSSIP_PORT
from mesh.daemon.launcher import start_daemon
from mesh.daemon.layout import Layout
from tests.cleanup import cleanup
from tests.e2e.commands import mesh, ok, until


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def make_namespace(name: str) -> None:
    """Make a namespace that is removed after its test, even if the run is killed."""
    run("ip", "netns", "add", name)
    cleanup().undo("ip", "netns", "del", name)
    run("ip", "-n", name, "link", "set", "lo", "up")


class Host:
    """A machine: a namespace, an address on each connected switch, and at most one daemon."""

    def __init__(self, lan: "Lan", name: str) -> None:
        self.lan = lan
        self.name = name
        self.namespace = f"{lan.prefix}-{name}"
        self.state = lan.directory / name
        self.daemon: subprocess.Popen[bytes] | None = None
        self.addresses: list[str] = []
        make_namespace(self.namespace)

    @property
    def within(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)

    def run(self, *words: str) -> str:
        return run(*self.within, *words)

    def iptables(self, *words: str) -> None:
        self.run("iptables", *words)

    def plug(self, switch: str, address: str, interface: str = "eth0") -> None:
        """Connect to a switch, with this address (`10.77.0.2/24`, `fd77::2/64`)."""
        port = self.lan.next_port()
        peer = ("type", "veth", "peer", "name", port, "netns", self.lan.switch_namespace)
        run("ip", "-n", self.namespace, "link", "add", interface, *peer)
        # Without a check for duplicates, an IPv6 address can be used at once.
        self.run("ip", "address", "add", address, "dev", interface, *(["nodad"] if ":" in address else []))
        self.run("ip", "link", "set", interface, "up")
        self.lan.in_switch("ip", "link", "set", port, "master", switch, "up")
        self.addresses.append(address.partition("/")[0])

    @property
    def address(self) -> str:
        return self.addresses[0]

    # --- the daemon

    def mesh(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a `mesh` command on this machine."""
        return mesh(self.state, *arguments, within=self.within)

    def ok(self, *arguments: str) -> str:
        return ok(self.state, *arguments, within=self.within)

    def up(self, **settings: Any) -> None:
        """Start the daemon as a child process and wait until it answers."""
        self.daemon = start_daemon(Layout(self.state), {"engines": ["process"], **settings}, within=self.within)
        until(lambda: self.answers or (self.daemon and self.daemon.poll() is not None), f"{self.name} to answer")
        assert self.answers, self.log()

    @property
    def client(self) -> Client:
        return Client(Layout(self.state).socket)

    @property
    def answers(self) -> bool:
        return Layout(self.state).socket.exists() and self.client.alive()

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get("/v1/status")
        return answer

    def sees(self) -> dict[str, str]:
        """Return the nick and state of every node that it knows."""
        return {row["nick"]: row["state"] for row in self.client.get("/v1/nodes")["nodes"]}

    def row(self, nick: str) -> dict[str, Any]:
        found: dict[str, Any] = next(row for row in self.client.get("/v1/nodes")["nodes"] if row["nick"] == nick)
        return found

    def job(self, job: str) -> dict[str, Any]:
        """Return the job as this machine sees it, empty while the machine does not know the job."""
        found = [row for row in self.client.get("/v1/jobs")["jobs"] if row["job"] == job]
        return found[0] if found else {}

    def cut_off(self, *chains: str) -> None:
        """Drop all incoming and outgoing packets, or those of these chains: `INPUT`, `OUTPUT`."""
        for chain in chains or ("INPUT", "OUTPUT"):
            self.iptables("-A", chain, "-i" if chain == "INPUT" else "-o", "eth0", "-j", "DROP")

    def cut_off_gossip(self) -> None:
        """Drop incoming gossip; calls between nodes pass if they have a port of their own (`api_port`)."""
        for protocol in ("udp", "tcp"):
            for side in ("--sport", "--dport"):
                self.iptables("-A", "INPUT", "-p", protocol, side, str(GOSSIP_PORT), "-j", "DROP")

    def reconnect(self) -> None:
        self.iptables("-F")

    def log(self) -> str:
        path = Layout(self.state).log
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon. `ip netns exec` execs it, so the pid is the same."""
        assert self.daemon is not None
        self.daemon.send_signal(number)

    def processes(self) -> list[int]:
        """Return the processes of this machine, guests included."""
        return [int(pid) for pid in run("ip", "netns", "pids", self.namespace).split()]

    def power_off(self) -> None:
        """Kill all its processes at once. Its cables stay, so its kernel still refuses connections."""
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self.daemon is not None:
            self.daemon.wait()

    def end(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.send_signal(signal.SIGCONT)
            self.daemon.kill()
            self.daemon.wait()


class Lan:
    """A network of hosts. Its switches are bridges in a separate namespace."""

    _made = 0

    def __init__(self, directory: Path) -> None:
        Lan._made += 1
        self.directory = directory
        self.prefix = f"mt{os.getpid()}-{Lan._made}"
        self.switch_namespace = f"{self.prefix}-switch"
        self.hosts: list[Host] = []
        self._ports = 0
        make_namespace(self.switch_namespace)

    def __enter__(self) -> "Lan":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for host in self.hosts:
            host.power_off()
        for namespace in [*(host.namespace for host in self.hosts), self.switch_namespace]:
            run("ip", "netns", "del", namespace)

    def next_port(self) -> str:
        """Return the name of the switch port for the next cable: `p1`, `p2`, ..."""
        self._ports += 1
        return f"p{self._ports}"

    def in_switch(self, *words: str) -> str:
        return run("ip", "netns", "exec", self.switch_namespace, *words)

    def switch(self, name: str) -> None:
        # Without a querier, a snooping bridge would forget its multicast listeners.
        self.in_switch("ip", "link", "add", name, "type", "bridge", "mcast_snooping", "0")
        self.in_switch("ip", "link", "set", name, "up")

    def host(self, name: str) -> Host:
        host = Host(self, name)
        self.hosts.append(host)
        return host


def found(first: Host, *others: Host) -> None:
    """Make a mesh of these hosts: the first founds it, and admits the others as machines of its user. No daemon runs yet."""
    import time

    from membership.identity import Identity
    from mesh.daemon.layout import save_membership
    from tests.chains import admitted

    first.ok("init", "lab", "--nick", first.name, "--user", "ada")
    where = Layout(first.state)
    identity = Identity.load(where.key)
    genesis, own = where.genesis.read_bytes(), where.chain.read_bytes()
    for host in others:
        host.ok("member", "key")
        other = Identity.load(Layout(host.state).key)
        chain = admitted(identity, genesis, own, other.node_id, host.name, "ada", time.time())
        save_membership(Layout(host.state), genesis, chain, ())


def all_see(hosts: Sequence[Host], nicks: set[str], state: str = "alive") -> bool:
    return all({nick for nick, seen in host.sees().items() if seen == state} == nicks for host in hosts)


def offered(host: Host) -> int:
    """Return how many nodes' offers this host has received."""
    return len([row for row in host.client.get("/v1/nodes")["nodes"] if row["engines"]])


def office(lan: Lan, count: int, **settings: Any) -> list[Host]:
    """Start machines of one mesh on one switch, and wait until they find each other by multicast."""
    lan.switch("br0")
    hosts = [lan.host(f"h{number}") for number in range(count)]
    for number, host in enumerate(hosts):
        host.plug("br0", f"10.77.0.{number + 1}/24")
    found(*hosts)
    for host in hosts:
        host.up(**settings)
    until(lambda: all_see(hosts, {host.name for host in hosts}), "all nodes to find each other")
    if settings.get("lend"):
        until(lambda: all(offered(host) == len(hosts) for host in hosts), "all nodes to receive each other's offers")
    return hosts
