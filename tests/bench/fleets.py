"""Fleets of real membership agents, each in its own network namespace: this project's, serf's and kinship's.

They differ only in how they are started and in the format of their output.
"""

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from membership.identity import Identity
from membership.trust import found_mesh
from tests.chains import admitted

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
FIRST_PORT = 17_000


class Fleet:
    """A fleet. `view[observer][subject]` is the latest event and its time; `words` keeps all events in order."""

    name = ""

    def __init__(self, size: int, directory: Path) -> None:
        self.size = size
        self.directory = directory
        self.namespace = f"mb-{self.name[:4]}-{os.getpid()}"
        self.view: dict[str, dict[str, tuple[str, float]]] = {}
        self.words: list[tuple[float, str, str, str]] = []
        self.up_at: dict[str, float] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._leaving: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._open = True
        self._buffers: dict[str, bytes] = {}
        directory.mkdir(parents=True, exist_ok=True)
        _run("ip", "netns", "add", self.namespace)
        _run("ip", "netns", "exec", self.namespace, "ip", "link", "set", "lo", "up")
        self._reader = threading.Thread(target=self._read, name=f"read {self.name}", daemon=True)
        self._reader.start()

    @property
    def nicks(self) -> list[str]:
        return [f"n{number:03d}" for number in range(self.size)]

    def port(self, nick: str) -> int:
        return FIRST_PORT + 2 * int(nick[1:])

    def seeds(self, nick: str) -> list[str]:
        """Return the addresses of the first two agents, which all others know."""
        return [f"{HOST}:{self.port(other)}" for other in self.nicks[:2] if other != nick]

    def command(self, nick: str) -> list[str]:
        raise NotImplementedError

    def parse(self, line: str) -> tuple[str, str] | None:
        """Parse a line of output into (event, subject)."""
        words = line.split()
        return (words[0], words[1] if len(words) > 1 else "") if words else None

    # --- acting

    def start(self, nick: str) -> None:
        leaving = self._leaving.pop(nick, None)
        if leaving is not None:
            leaving.wait(30)
        with self._lock:
            self.view[nick] = {}
            self.up_at.pop(nick, None)
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *self.command(nick)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self.processes[nick] = process
        self._selector.register(process.stdout, selectors.EVENT_READ, nick)

    def kill(self, nick: str) -> float:
        """Send SIGKILL; return the time."""
        process = self.processes.pop(nick)
        at = time.monotonic()
        process.kill()
        process.wait()
        with self._lock:
            self.view.pop(nick, None)
        return at

    def leave(self, nick: str) -> float:
        process = self.processes.pop(nick)
        at = time.monotonic()
        process.send_signal(self.leave_signal)
        self._leaving[nick] = process
        with self._lock:
            self.view.pop(nick, None)
        return at

    leave_signal = signal.SIGTERM

    def close(self) -> None:
        for nick in list(self.processes):
            self.kill(nick)
        for process in self._leaving.values():
            process.kill()
            process.wait()
        self._open = False
        self._reader.join(5)
        subprocess.run(["ip", "netns", "del", self.namespace], check=False, capture_output=True)

    def drop(self, share: float) -> None:
        """Drop this share of all UDP packets from now on; 0 for none."""
        base = ["ip", "netns", "exec", self.namespace, "iptables"]
        _run(*base, "-F", "INPUT")
        if share:
            rule = ["-p", "udp", "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"]
            _run(*base, "-A", "INPUT", *rule)

    # --- observing

    def complete(self) -> bool:
        """Tell whether every running agent sees all others."""
        with self._lock:
            running = set(self.processes)
            return all(
                nick in self.up_at and {s for s, (word, _) in seen.items() if word in _PRESENT} >= running - {nick}
                for nick, seen in self.view.items()
                if nick in running
            )

    def heard(self, word: str, subject: str, since: float) -> list[float]:
        """Return when each observer first reported this event about the subject."""
        first: dict[str, float] = {}
        with self._lock:
            for at, observer, said, about in self.words:
                if at >= since and said == word and about == subject and observer in self.processes:
                    first.setdefault(observer, at)
        return sorted(first.values())

    def said(self, word: str, since: float) -> list[tuple[float, str, str]]:
        with self._lock:
            return [(at, observer, about) for at, observer, said, about in self.words if at >= since and said == word]

    def joined_at(self, nick: str) -> list[float]:
        with self._lock:
            return [at for word, at in self.view.get(nick, {}).values() if word in _PRESENT]

    def bytes_sent(self) -> int:
        text = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True
        ).stdout
        line = next(line for line in text.splitlines() if line.strip().startswith("lo:"))
        return int(line.split(":")[1].split()[8])

    def cpu_s(self) -> float:
        ticks = os.sysconf("SC_CLK_TCK")
        total = 0.0
        for process in self.processes.values():
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
        return total

    def rss_mb(self) -> list[float]:
        found = []
        for process in self.processes.values():
            text = Path(f"/proc/{process.pid}/status").read_text()
            found.append(int(re.search(r"VmRSS:\s+(\d+)", text).group(1)) / 1024)  # type: ignore[union-attr]
        return found

    # --- reading

    def _read(self) -> None:
        while self._open:
            for key, _ in self._selector.select(0.2):
                data = b""
                try:
                    data = os.read(key.fd, 1 << 16)
                except BlockingIOError:
                    continue
                if not data:
                    self._selector.unregister(key.fileobj)
                    continue
                self._take(key.data, data)

    def _take(self, nick: str, data: bytes) -> None:
        at = time.monotonic()
        *lines, rest = (self._buffers.get(nick, b"") + data).split(b"\n")
        self._buffers[nick] = rest
        with self._lock:
            for line in lines:
                parsed = self.parse(line.decode(errors="replace"))
                if parsed is None:
                    continue
                word, subject = parsed
                if word == "up":
                    self.up_at[nick] = at
                elif subject and subject != nick:
                    self.words.append((at, nick, word, subject))
                    self.view.setdefault(nick, {})[subject] = (word, at)


_PRESENT = {"joined", "suspect"}


class MeshFleet(Fleet):
    name = "mesh"

    def __init__(self, size: int, directory: Path) -> None:
        super().__init__(size, directory)
        now = time.time()
        founder = Identity.generate()
        genesis, chain = found_mesh(founder, "bench", self.nicks[0], "bench", now)
        for number, nick in enumerate(self.nicks):
            home = directory / nick
            home.mkdir()
            identity = founder if number == 0 else Identity.generate()
            identity.save(home / "node.key")
            own = chain
            if number > 0:
                own = admitted(founder, genesis, chain, identity.node_id, nick, "bench", now)
            (home / "genesis").write_bytes(genesis)
            (home / "chain").write_bytes(own)

    def command(self, nick: str) -> list[str]:
        agent = ["-m", "tests.bench.agents.mesh_agent"]
        return [sys.executable, *agent, str(self.directory / nick), HOST, str(self.port(nick)), *self.seeds(nick)]


class SerfFleet(Fleet):
    name = "serf"
    leave_signal = signal.SIGINT
    _event = re.compile(r"serf: (EventMember\w+): (\S+) ")

    def command(self, nick: str) -> list[str]:
        joins = [f"-retry-join={seed}" for seed in self.seeds(nick)]
        port = self.port(nick)
        return [
            "serf",
            "agent",
            f"-node={nick}",
            f"-bind={HOST}:{port}",
            f"-rpc-addr={HOST}:{port + 1}",
            "-profile=lan",
            "-retry-interval=1s",
            *joins,
        ]

    def parse(self, line: str) -> tuple[str, str] | None:
        if "Serf agent running" in line:
            return "up", ""
        found = self._event.search(line)
        return (_SERF_WORDS[found[1]], found[2]) if found and found[1] in _SERF_WORDS else None


_SERF_WORDS = {"EventMemberJoin": "joined", "EventMemberFailed": "dead", "EventMemberLeave": "left"}


class KinshipFleet(Fleet):
    name = "kinship"
    python = ""
    key = "ZGV0ZXJtaW5pc3RpYy1iZW5jaG1hcmsta2V5LTMyISE="

    def command(self, nick: str) -> list[str]:
        agent = str(ROOT / "tests" / "bench" / "agents" / "kinship_agent.py")
        return [self.python, agent, nick, self.key, HOST, str(self.port(nick)), *self.seeds(nick)]


def available(build: Path) -> tuple[list[type[Fleet]], dict[str, str]]:
    """Return the fleets that this machine can run, and the reasons for the others."""
    found: list[type[Fleet]] = [MeshFleet]
    missing: dict[str, str] = {}
    if shutil.which("serf"):
        found.append(SerfFleet)
    else:
        missing["serf"] = "not installed (Debian: apt-get install serf)"
    KinshipFleet.python = str(build / "peers" / "bin" / "python")
    if not Path(KinshipFleet.python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(build / "peers")], check=True)
        subprocess.run([KinshipFleet.python, "-m", "pip", "install", "-q", "kinship"], check=False, capture_output=True)
    if subprocess.run([KinshipFleet.python, "-c", "import kinship"], capture_output=True, check=False).returncode == 0:
        found.append(KinshipFleet)
    else:
        missing["kinship"] = "pip could not install it"
    return found, missing


def wait(ready: Any, timeout_s: float) -> bool:
    """Wait for a condition; return whether it became true in time."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
