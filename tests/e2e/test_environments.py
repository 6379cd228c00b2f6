"""`mesh run --uv` on real daemons: a job runs in the environment of its lock, on whichever node it comes to."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.daemon.stack import Stack
from tests.e2e.commands import mesh, ok, read
from tests.wheels import index

pytestmark = pytest.mark.e2e
MakeStack = Callable[..., Stack]


def test_job_runs_in_the_environment_of_its_lock(make_stack: MakeStack, tmp_path: Path) -> None:
    with index(tmp_path / "index") as served:
        work = served.project(tmp_path / "work")
        stack = make_stack(2, uv_index=served.address)
        user = stack.nodes[0]
        shown = ok(user, "run", "--uv", "--", "python", "train.py", cwd=work)
        assert "1.0 " in shown and "/environments/" in shown
        job = read(user, "ps", "-a")["jobs"][-1]
        assert read(user, "describe", job["job"])["asked"]["environment"] == "uv.lock"
        host = stack.node(job["attempts"][-1]["node"])
        assert "its environment was made in" in ok(host, "job", "events", job["job"])
        # A script describes its own; it cannot change what is there.
        spoils = 'import pathlib; pathlib.Path(tinypkg.__file__).write_text("")\n'
        with (work / "alone.py").open("a") as file:
            file.write(spoils)
        done = mesh(user, "run", "--uv", "--", "./alone.py", cwd=work)
        assert done.returncode == 1 and "Read-only file system" in done.stdout + done.stderr
        assert "1.0 " in ok(user, "run", "--uv", "--", "train.py", cwd=work)


def test_orders_that_cannot_be_met_say_what_to_do(shared: Stack, tmp_path: Path) -> None:
    node = shared.nodes[0]
    (tmp_path / "train.py").write_text("print(1)\n")

    def refused(*words: str) -> str:
        done = mesh(node, "run", "--uv", *words, cwd=tmp_path)
        assert done.returncode == 125
        return done.stderr

    assert "has no pyproject.toml: `uv init` or a script with inline metadata" in refused("--", "python", "train.py")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    assert "has no uv.lock: `uv lock` makes it" in refused("--", "python", "train.py")
    assert "leave out --no-workdir" in refused("--no-workdir", "--", "python", "train.py")
    (tmp_path / "train.py").write_text("# /// script\n# dependencies = []\n# ///\n")
    assert "has no train.py.lock: `uv lock --script train.py` makes it" in refused("--", "train.py")


def test_second_start_is_as_fast_as_that_of_an_empty_job(make_stack: MakeStack, tmp_path: Path) -> None:
    """Warm within 1 s of an empty job, by the attempts' own times; the figures are printed."""
    with index(tmp_path / "index") as served:
        work = served.project(tmp_path / "work")
        stack = make_stack(1, uv_index=served.address)
        user = stack.nodes[0]

        def took(*options: str) -> float:
            begun = time.monotonic()
            ok(user, "run", *options, "--", "true", cwd=work)
            return time.monotonic() - begun

        cold = took("--uv")
        warm, empty = (min(took(*options) for _ in range(3)) for options in (("--uv",), ()))
        print(f"cold {cold:.2f} s, warm {warm:.2f} s, without an environment {empty:.2f} s")
        assert warm < empty + 1.0
