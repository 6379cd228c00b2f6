"""Every command in the README, as it stands there, in its order."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.commands import mesh, read, until

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONFIG = 'bind = "127.0.0.1"\nport = 0\napi_port = 0\nprofile = "local"\nnick = "{nick}"\n'


def commands() -> list[tuple[str, str]]:
    """(machine, command) of every console block; the machine is empty for what is run in the checkout."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if re.match(r"\w*\$ ", line)]
    found = [tuple(line.split("$ ", 1)) for line in lines]
    return [(machine, command) for machine, command in found]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Path]]:
    states = {name: tmp_path / name for name in ("first", "second")}
    for name, state in states.items():
        state.mkdir()
        (state / "config.toml").write_text(CONFIG.format(nick=name))
    yield states
    for state in states.values():
        mesh(state, "down", "--now")


def test_what_is_run_in_the_checkout_is_known() -> None:
    """`make test` is running now; `make demo` is run by test_demo.py."""
    assert [command for machine, command in commands() if not machine] == ["make demo", "make test"]


def test_the_commands_for_your_machines(machines: dict[str, Path], tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train_digits.py").write_bytes((ROOT / "docs" / "examples" / "train_digits.py").read_bytes())
    invite = job = ""
    ran = []
    for machine, text in commands():
        if not machine:
            continue
        words = shlex.split(text.replace("INVITE", invite).replace("JOB", job))
        assert words[0] == "mesh"
        if words[1:2] == ["nodes"]:
            until(lambda: len(read(machines["second"], "nodes")["nodes"]) == 2, "both to see each other")
        done = subprocess.run(
            [sys.executable, "-m", "mesh.cli", *words[1:]],
            env={
                **os.environ,
                "MESH_STATE": str(machines[machine]),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
            cwd=work,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{machine}$ {text}\n{done.stdout}{done.stderr}"
        ran.append(words[1])
        invite = done.stdout.strip() if words[1] == "invite" else invite
        job = done.stdout.strip() if words[1] == "submit" else job
    assert (work / "results" / "weights.bin").exists()
    assert {"init", "invite", "join", "up", "run", "submit", "reclaim", "down"} <= set(ran)


def test_every_page_it_names_exists() -> None:
    for page in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / page).exists(), page


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_every_page_that_the_docs_name_exists(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} names {target}"
