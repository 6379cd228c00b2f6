"""Run every command of the README and of the first pages, as written and in order."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mesh.cli.main import SECTIONS
from tests.e2e.commands import mesh, ok, read, until
from tests.e2e.pages import File, steps

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONFIG = 'bind = "127.0.0.1"\nport = 0\napi_port = 0\nprofile = "local"\n'

# The pages of a story share one mesh, in this order: found it, lend to it, use it.
STORIES = {
    "README": ["README.md"],
    "site": ["docs/how-to/operate.md", "docs/tutorials/lend.md", "docs/tutorials/start.md"],
}
# Commands on these pages that this test does not run, with the reasons.
NOT_RUN = {
    "make demo": "test_demo.py runs `mesh debug demo`, which it calls",
    "make test": "it runs this test",
    "pipx install .": "needs a package index; the gate runs the same build with `pip install --editable .`",
    "mesh member approve KEY": "needs a join request first: test_admission.py",
    "mesh member revoke NODE": "would revoke a node that the next pages need: test_joining.py",
    "mesh doctor": "its exit code depends on the machine that runs the tests: tests/cli/test_doctor.py",
    "mesh image allow pytorch --from pytorch:2.6": "needs a container engine with that image: test_images.py",
    "mesh install-service": "needs systemd as a service manager: tests/daemon/test_systemd.py",
    "mesh job rehearse --ckpt ckpts --ckpt-mode rename -- python3 train.py": "starts three daemons of its "
    "own, for minutes: test_rehearse.py",
    "mesh job jupyter --gpus 1 --image lab": "needs a GPU and an image: test_jupyter.py",
}


def commands(page: str) -> list[tuple[str, str]]:
    """Return (machine, command) for each console line. The machine is empty for commands that run in the checkout."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if re.match(r"\w*\$ ", line)]
    found = [tuple(line.split("$ ", 1)) for line in lines]
    return [(machine, command) for machine, command in found]


@contextmanager
def machines(names: set[str], where: Path) -> Iterator[dict[str, Path]]:
    states = {name: where / name for name in names}
    for state in states.values():
        state.mkdir()
        (state / "config.toml").write_text(CONFIG)
    try:
        yield states
    finally:
        for state in states.values():
            mesh(state, "down", "--now")


def test_each_excluded_command_is_on_a_page() -> None:
    shown = {command for pages in STORIES.values() for page in pages for _, command in commands(page)}
    assert set(NOT_RUN) <= shown
    assert all(command in NOT_RUN for page in ["README.md"] for machine, command in commands(page) if not machine)


@pytest.mark.parametrize(
    "story", [pytest.param(name, marks=() if name == "README" else pytest.mark.long) for name in STORIES]
)
def test_commands_of_a_story_succeed(story: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for file in (step for page in STORIES[story] for step in steps(page) if isinstance(step, File)):
        (work / file.name).write_text(file.text)
    told = [(page, machine, text) for page in STORIES[story] for machine, text in commands(page) if text not in NOT_RUN]
    known: dict[str, str] = {}  # placeholders that the reader fills in
    up: set[str] = set()
    with machines({machine for _, machine, _ in told}, tmp_path) as states:
        for page, machine, text in told:
            bare = text.replace("--image IMAGE ", "")  # the machines are of one user
            words = shlex.split(re.sub(r"\b(INVITE|JOB|NODE)\b", lambda name: known[name[0]], bare))
            assert words[0] == "mesh"
            if words[1:2] == ["nodes"]:
                until(partial(_sees, states[machine], len(up)), f"{machine} to see {up}")
            done = subprocess.run(
                [sys.executable, "-m", "mesh.cli", *words[1:]],
                env={
                    **os.environ,
                    "MESH_STATE": str(states[machine]),
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                },
                cwd=work,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, f"{page}, {machine}$ {text}\n{done.stdout}{done.stderr}"
            match words[1:]:
                case ["member", "invite", "--mine"]:
                    known["INVITE"] = done.stdout.strip()
                case ["join", _]:
                    known["INVITE"] = ok(states["first"], "member", "invite", "--mine").strip()  # it admits one machine
                case ["submit", *_]:
                    known["JOB"] = done.stdout.strip()
                case ["up", *_]:
                    known["NODE"] = next(row["node"] for row in _alive(states[machine]) if row["me"])
                    up.add(machine)
                case ["down"]:
                    up.remove(machine)
    if story == "site":
        assert json.loads((work / "results" / "line.json").read_text()) == pytest.approx([3, 1], abs=0.2)


def _alive(state: Path) -> list[dict[str, Any]]:
    return [row for row in read(state, "nodes")["nodes"] if row["state"] == "alive"]


def _sees(state: Path, count: int) -> bool:
    return len(_alive(state)) == count


def test_command_line_page_lists_the_commands_of_help() -> None:
    section = (ROOT / "docs" / "reference" / "cli.md").read_text().partition("## Commands\n")[2].partition("\n\n")[0]
    lines = [line.removeprefix("- ").partition(":") for line in section.splitlines()]
    assert {title: re.findall(r"`([a-z-]+)`", names) for title, _, names in lines} == {
        title: [name for name, _, _ in rows] for title, rows in SECTIONS.items()
    }


def test_each_readme_promise_links_to_its_proof() -> None:
    """A promise links to the page, or names the command, that supports it."""
    for section in re.findall(r"## How .*?\n(.*?)(?=\n## )", README, re.DOTALL):
        for promise in re.findall(r"^- .*", section, re.MULTILINE):
            assert "](docs/" in promise or "`make " in promise, promise


def test_each_link_of_the_readme_exists() -> None:
    for page in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / page).exists(), page


@pytest.mark.parametrize(
    "page", sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]), ids=lambda page: page.name
)
def test_each_link_between_pages_exists(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        place = (page.parent / target).resolve()
        assert place.exists(), f"{page.name} names {target}, which is not in the checkout"
