"""Run training programs with the real frameworks as in a job: only `mesh.job` and the integrations are present."""

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from mesh.checkpoints.commit_modes import committed_tree
from mesh.cli.main import cli
from mesh.model.spec import Checkpointing
from tests.tiers import FRAMEWORKS_PYTHON

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
BY_RENAME = Checkpointing(mode="rename")
TIMEOUT_S = 600.0  # measured: over two minutes on 0.4 cores, with workers that each import a framework
SHORT = ("--epochs", "6", "--every", "6")  # 48 steps, saved after the 6th and the 12th


def make_project(directory: Path) -> Path:
    """Make a user's working directory: programs, and the files of campus-mesh under their own names."""
    shutil.copytree(PROGRAMS, directory, ignore=shutil.ignore_patterns("__pycache__"))
    done = CliRunner().invoke(cli, ["job", "sdk", str(directory)])
    assert done.exit_code == 0, done.output
    return directory


def run(project: Path, program: str, *arguments: str, cwd: Path | None = None, **env: str) -> Any:
    """Run one of the programs, or with `-c` a line of Python, to its end, in a fork of `server`."""
    words = [str(project / program), *arguments] if program != "-c" else ["-c", *arguments]
    forks = server(project)
    assert forks.stdin is not None and forks.stdout is not None
    with tempfile.NamedTemporaryFile("r") as said, tempfile.NamedTemporaryFile("r") as errors:
        order = [words, str(cwd or project), plain() | env, said.name, errors.name]
        print(json.dumps(order), file=forks.stdin, flush=True)
        if not select.select([forks.stdout], [], [], TIMEOUT_S)[0]:
            os.killpg(forks.pid, signal.SIGKILL)
            raise AssertionError(f"{program} has not ended after {TIMEOUT_S:g} s; it said:\n{errors.read()[-6000:]}")
        return subprocess.CompletedProcess(words, int(forks.stdout.readline()), said.read(), errors.read())


def plain() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


@cache
def server(project: Path) -> subprocess.Popen[str]:
    """Start a process that imports the frameworks, which takes ten seconds, and ends when this one does."""
    command, pipe = [FRAMEWORKS_PYTHON, project / "forked.py"], subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, cwd=project, env=plain(), start_new_session=True
    )


class Attempt:
    """The directories of one attempt; its checkpoints pass to the next attempt as the daemon does it."""

    def __init__(self, directory: Path, project: Path, program: str) -> None:
        self.directory = directory
        self.project = project
        self.program = program
        self.ckpts = directory / "ckpts"
        self.resume = ""
        for path in (directory / "ctl", self.ckpts):
            path.mkdir(parents=True)

    def run(self, *arguments: str) -> Any:
        return run(
            self.project,
            self.program,
            *arguments,
            cwd=self.directory,
            MESH_CTL_DIR=str(self.directory / "ctl"),
            MESH_CKPT_DIR=str(self.ckpts),
            MESH_RESUME=self.resume,
        )

    def committed(self) -> str | None:
        """Return the entry from which the daemon would resume if the attempt ended now."""
        tree = committed_tree(self.ckpts, BY_RENAME, time.time(), ended=True)
        return tree.resume if tree is not None else None

    def elsewhere(self, directory: Path) -> "Attempt":
        """Return the next attempt, in a fresh directory with only the committed checkpoint."""
        following = Attempt(directory, self.project, self.program)
        tree = committed_tree(self.ckpts, BY_RENAME, time.time(), ended=True)
        assert tree is not None, "no checkpoint was saved"
        for path in tree.roots.values():
            shutil.copytree(path, following.ckpts / path.name)
        following.resume = str(following.ckpts / tree.resume)
        return following


def digest_of(output: str) -> str:
    """Return the hash of the final weights from the output of a program."""
    lines = [line for line in output.splitlines() if line.startswith("digest ")]
    assert lines, output[-2000:]
    return lines[-1].removeprefix("digest ")


def reports(output: str) -> list[dict[str, Any]]:
    """Return the reports in the output, which also has lines of the frameworks."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"what"')]
