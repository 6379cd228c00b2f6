"""Training programs with the real frameworks, as a job finds itself: of the mesh it has `mesh.job` and the integrations."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from mesh.jobs.commits import committed_tree
from mesh.jobs.spec import Checkpointing
from tests.tiers import FRAMEWORKS_PYTHON

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
BY_RENAME = Checkpointing(mode="rename")
TIMEOUT_S = 600.0  # with workers that import a framework each: over two minutes on two fifths of a core
SHORT = ("--epochs", "6", "--every", "6")  # 48 steps, saved after the 6th and the 12th


def make_project(directory: Path) -> Path:
    """What a user has in the working directory: the programs and the copied files, under their own names."""
    shutil.copytree(PROGRAMS, directory, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("job.py", "integrations/hf.py", "integrations/lightning.py"):
        (directory / "mesh" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "mesh" / name, directory / "mesh" / name)
    return directory


def run(project: Path, program: str, *arguments: str, cwd: Path | None = None, **env: str) -> Any:
    """Run one of the programs, or with `-c` a line of Python, to its end."""
    words = [str(project / program), *arguments] if program != "-c" else ["-c", *arguments]
    try:
        return subprocess.run(
            [FRAMEWORKS_PYTHON, *words],
            cwd=cwd or project,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}, **env},
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode(errors="replace")  # bytes here, whatever was asked for
        raise AssertionError(f"{program} has not ended after {TIMEOUT_S:g} s; it said:\n{said[-6000:]}") from late


class Attempt:
    """One attempt's directories; what it left behind is judged, and brought to the next one, as the daemon does it."""

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
        """The entry that the daemon would resume from if all ended now."""
        tree = committed_tree(self.ckpts, BY_RENAME, time.time(), ended=True)
        return tree.resume if tree is not None else None

    def elsewhere(self, directory: Path) -> "Attempt":
        """The next attempt, in a fresh directory that holds nothing but what was committed."""
        following = Attempt(directory, self.project, self.program)
        tree = committed_tree(self.ckpts, BY_RENAME, time.time(), ended=True)
        assert tree is not None, "nothing was saved"
        for path in tree.roots.values():
            shutil.copytree(path, following.ckpts / path.name)
        following.resume = str(following.ckpts / tree.resume)
        return following


def digest_of(output: str) -> str:
    """The hash of the final weights, from a program's output."""
    lines = [line for line in output.splitlines() if line.startswith("digest ")]
    assert lines, output[-2000:]
    return lines[-1].removeprefix("digest ")


def reports(output: str) -> list[dict[str, Any]]:
    """What `stops.py` said; the frameworks write to the same stream."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"what"')]
