"""Completion in real shells: Tab on a terminal, with the scripts in the places that `mesh debug completion` names."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.cli.debug import COMPLETION_FILES, completion_script
from tests.cli.test_lists import SAID, daemon

WAIT_S = 60.0
PROMPT = "what? "
STARTS = {  # shell -> command, startup file and its text
    "bash": (["bash", "--noprofile", "-i"], ".bashrc", f"PS1='{PROMPT}'\n. {COMPLETION_FILES['bash']}\n"),
    "zsh": (
        ["zsh", "-d", "-i"],
        ".zshrc",
        f"PROMPT='{PROMPT}'\nfpath=(~/.zfunc $fpath)\nautoload -Uz compinit && compinit -u\n",
    ),
    "fish": (
        ["fish", "-i"],
        ".config/fish/config.fish",
        f"function fish_prompt; echo -n '{PROMPT}'; end\nset -g fish_greeting\n",
    ),
}
# Answers completion requests without the usual time limit, and prints the arguments of any other call.
MESH = f"""#!/bin/sh
test -z "$_MESH_COMPLETE" ||
  exec {sys.executable} -c 'from mesh.cli import main, names; names.ANSWER_S = {WAIT_S}; main.main()' "$@"
echo "asked: $*."
"""


class Terminal:
    """A shell on its own terminal."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._here, there = pty.openpty()
        ours = ["setsid", "--ctty", *command]
        self._process = subprocess.Popen(ours, stdin=there, stdout=there, stderr=there, env=env, cwd=env["HOME"])
        os.close(there)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._here, text.encode())

    def wait_for(self, text: str) -> None:
        """Wait for this text, and discard the output up to its end."""
        until = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert select.select([self._here], [], [], max(0.0, until - time.monotonic()))[0], f"{text!r}: {self.shown}"
            self.shown += os.read(self._here, 65_536).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._here)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    program = tmp_path / "bin" / "mesh"
    program.parent.mkdir()
    program.write_text(MESH)
    program.chmod(0o755)
    with daemon(tmp_path / "state", SAID):
        yield tmp_path


@pytest.mark.parametrize(
    "shell", ["bash", pytest.param("zsh", marks=pytest.mark.zsh), pytest.param("fish", marks=pytest.mark.fish)]
)
def test_tab_completes_commands_options_and_names(shell: str, home: Path) -> None:
    command, place, text = STARTS[shell]
    for path, content in ((place, text), (COMPLETION_FILES[shell].removeprefix("~/"), completion_script(shell))):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(content)
    # Else fish goes on in the background to make completions of all manual pages: a minute of CPU time.
    (home / ".local/share/fish/generated_completions").mkdir(parents=True)
    env = {
        "HOME": str(home),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MESH_STATE": str(home / "state"),
        "TERM": "xterm",
        "LANG": "C.UTF-8",
    }
    terminal = Terminal(command, env)
    try:
        for typed, meant in (
            ("stat\t", "status"),
            ("logs --fol\tbe\t", "logs --follow bert"),
            ("config g\t", "config get"),
        ):
            terminal.wait_for(PROMPT)
            terminal.type(f"mesh {typed}")
            terminal.type("\r")
            terminal.wait_for(f"asked: {meant}.")
    finally:
        terminal.close()
