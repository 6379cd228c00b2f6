"""The files and commands of a tutorial, and a mesh of machines on which a reader would give them."""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.commands import mesh, ok, read, until

ROOT = Path(__file__).parents[2]
CONFIG = 'bind = "127.0.0.1"\nport = 0\napi_port = 0\nprofile = "local"\n'
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
PROMPT = re.compile(r"(\w*)\$ (.*)")


@dataclass(frozen=True)
class Command:
    """`machine`: before its `$`; empty for a command in the checkout."""

    machine: str
    text: str


@dataclass(frozen=True)
class File:
    name: str
    text: str


def steps(page: str) -> list[Command | File]:
    """Return the files (blocks with a title) and the commands (lines with a prompt) of a page, in order."""
    found: list[Command | File] = []
    for kind, title, text in BLOCK.findall((ROOT / page).read_text()):
        if title:
            found.append(File(title, text))
        elif kind == "console":
            found += [Command(*line.groups()) for line in map(PROMPT.fullmatch, text.splitlines()) if line]
    return found


@dataclass
class Reader:
    """Somebody who follows a tutorial: a state directory for each machine, and a current directory that `cd` changes.

    `given`: what they write instead of a word of the page. `typed`: what they answer when a command asks.
    """

    where: Path
    states: dict[str, Path] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    typed: str = ""
    cwd: Path = field(init=False)

    def __post_init__(self) -> None:
        self.cwd = self.where / "home"
        self.cwd.mkdir()

    def state(self, machine: str) -> Path:
        """Return the state directory of a machine; a new one is as on a new machine."""
        if machine not in self.states:
            self.states[machine] = self.where / machine
            self.states[machine].mkdir()
            (self.states[machine] / "config.toml").write_text(
                f'nick = "{machine}"\n{CONFIG}'
            )  # its host name otherwise
        return self.states[machine]

    def start(self, command: Command) -> "subprocess.Popen[str]":
        """Start a command as a shell would."""
        text = command.text
        for word, instead in self.given.items():
            text = text.replace(word, instead)
        own = {"MESH_STATE": str(self.state(command.machine)), "COLUMNS": "160"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", "-c", f"{text} && pwd > {shlex.quote(str(self.where / 'pwd'))}"],
            cwd=self.cwd,
            env={**os.environ, **self.env, **own, "PATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, command: Command, timeout_s: float = 300.0) -> str:
        """Run a command to its end, and return what it prints."""
        return self.ended(command, self.start(command), timeout_s)

    def ended(self, command: Command, process: "subprocess.Popen[str]", timeout_s: float = 300.0) -> str:
        try:
            shown, told = process.communicate(self.typed, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            shown, told = process.communicate()
            told += f"\nnot ended after {timeout_s:g} s"
        assert process.returncode == 0, f"{command.machine}$ {command.text}\n{shown}{told}"
        self.cwd = Path((self.where / "pwd").read_text().rstrip("\n"))
        words = command.text.split()
        if words[:4] == ["mesh", "member", "invite", "--mine"]:
            self.given["INVITE"] = shown.strip()
        elif words[:2] == ["mesh", "up"]:
            until(self._all_see_all, f"{[*self.states]} to see each other")
            self.given["INVITE"] = ok(next(iter(self.states.values())), "member", "invite", "--mine").strip()
        return shown + told

    def _all_see_all(self) -> bool:
        return all(self._alive(state) == len(self.states) for state in self.states.values())

    def _alive(self, state: Path) -> int:
        return len([row for row in read(state, "nodes")["nodes"] if row["state"] == "alive"])

    def computing(self, order: Command, process: "subprocess.Popen[str]", within_s: float = 300.0) -> dict[str, Any]:
        """Wait until the job of this `mesh run` reports steps, and return its row of `mesh ps`."""

        def row() -> dict[str, Any] | None:
            assert process.poll() is None, process.communicate()
            rows = read(self.state(order.machine), "ps")["jobs"]
            return next((row for row in rows if row["state"] == "running" and row["step"]), None)

        return dict(until(row, "the job to compute", within_s))

    def close(self) -> None:
        for state in self.states.values():
            mesh(state, "down", "--now")
