"""A network of machines in namespaces: switches with hosts, routers between them, faults by iptables and tc's absence.

Everything is made by the test that uses it and goes with it; nothing outside the namespaces is touched.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mesh.client import Client
from mesh.launcher import start_daemon
from mesh.layout import Layout
from tests.aftermath import aftermath
from tests.e2e.commands import mesh, ok, until


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def make_namespace(name: str) -> None:
    """It goes with the test that made it, and after a run that was killed."""
    run("ip", "netns", "add", name)
    aftermath().undo("ip", "netns", "del", name)
    run("ip", "-n", name, "link", "set", "lo", "up")


class Host:
    """A machine: a namespace, an address on each switch it is plugged into, perhaps a daemon."""

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
        """Connect to a switch, with this address (`10.77.0.2/24`)."""
        port = self.lan.next_port()
        peer = ("type", "veth", "peer", "name", port, "netns", self.lan.switch_namespace)
        run("ip", "-n", self.namespace, "link", "add", interface, *peer)
        self.run("ip", "address", "add", address, "dev", interface)
        self.run("ip", "link", "set", interface, "up")
        self.lan.in_switch("ip", "link", "set", port, "master", switch, "up")
        self.addresses.append(address.partition("/")[0])

    @property
    def address(self) -> str:
        return self.addresses[0]

    # --- the daemon

    def mesh(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """A command on this machine."""
        return mesh(self.state, *arguments, within=self.within)

    def ok(self, *arguments: str) -> str:
        return ok(self.state, *arguments, within=self.within)

    def up(self, **settings: Any) -> None:
        """Start the daemon, as its own child, and wait until it answers."""
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
        """Nick and state of everybody it knows."""
        return {row["nick"]: row["state"] for row in self.client.get("/v1/nodes")["nodes"]}

    def row(self, nick: str) -> dict[str, Any]:
        found: dict[str, Any] = next(row for row in self.client.get("/v1/nodes")["nodes"] if row["nick"] == nick)
        return found

    def job(self, job: str) -> dict[str, Any]:
        """The job as this machine sees it; empty while it does not know it."""
        found = [row for row in self.client.get("/v1/jobs")["jobs"] if row["job"] == job]
        return found[0] if found else {}

    def cut_off(self) -> None:
        """Nothing comes in, nothing goes out."""
        for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o")):
            self.iptables("-A", chain, way, "eth0", "-j", "DROP")

    def reconnect(self) -> None:
        self.iptables("-F")

    def log(self) -> str:
        path = Layout(self.state).log
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """To the daemon itself: `ip netns exec` becomes it."""
        assert self.daemon is not None
        self.daemon.send_signal(number)

    def processes(self) -> list[int]:
        """Whatever runs on this machine, the daemon's guests too."""
        return [int(pid) for pid in run("ip", "netns", "pids", self.namespace).split()]

    def power_off(self) -> None:
        """Everything on it ends at once. Its cables stay, so its kernel still refuses connections."""
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
    """Switches are bridges in a namespace of their own."""

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
        """The name of the next cable's end at a switch: `p1`, `p2`, ..."""
        self._ports += 1
        return f"p{self._ports}"

    def in_switch(self, *words: str) -> str:
        return run("ip", "netns", "exec", self.switch_namespace, *words)

    def switch(self, name: str) -> None:
        # Without a querier, a snooping bridge would forget who listens to multicast.
        self.in_switch("ip", "link", "add", name, "type", "bridge", "mcast_snooping", "0")
        self.in_switch("ip", "link", "set", name, "up")

    def host(self, name: str) -> Host:
        host = Host(self, name)
        self.hosts.append(host)
        return host


def found(first: Host, *others: Host) -> None:
    """Make a mesh of these: the first founds it, the others join by an invite. Nobody runs afterwards."""
    import time

    from membership.identity import Identity
    from membership.trust import make_invite

    first.ok("init", "lab", "--nick", first.name, "--user", "ada")
    where = Layout(first.state)
    identity = Identity.load(where.key)
    text = make_invite(identity, where.chain.read_bytes(), where.genesis.read_bytes(), (), 3600, time.time())
    for host in others:
        host.ok("join", text, "--nick", host.name, "--user", "ada")


def all_see(hosts: Sequence[Host], nicks: set[str], state: str = "alive") -> bool:
    return all({nick for nick, seen in host.sees().items() if seen == state} == nicks for host in hosts)


def offered(host: Host) -> int:
    """How many nodes' offers it has heard."""
    return len([row for row in host.client.get("/v1/nodes")["nodes"] if row["engines"]])


def office(lan: Lan, count: int, **settings: Any) -> list[Host]:
    """Machines on one switch, of one mesh, all up; they must find each other by multicast alone."""
    lan.switch("br0")
    hosts = [lan.host(f"h{number}") for number in range(count)]
    for number, host in enumerate(hosts):
        host.plug("br0", f"10.77.0.{number + 1}/24")
    found(*hosts)
    for host in hosts:
        host.up(**settings)
    until(lambda: all_see(hosts, {host.name for host in hosts}), "all to find each other")
    if settings.get("lend"):
        until(lambda: all(offered(host) == len(hosts) for host in hosts), "all to hear what the others lend")
    return hosts
