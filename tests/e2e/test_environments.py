"""`mesh run --uv` and `--conda` on real daemons: a job runs in the environment of its lock, on whichever node it comes to."""

import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mesh.daemon.launcher import wait_ready
from mesh.daemon.stack import Stack
from tests.conda_channel import channel
from tests.container_images import busybox_image, import_python, python_image
from tests.e2e.commands import finished, job_state, mesh, ok, read, until
from tests.podman import podman_service
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
        # Another node whose owner allows no index makes it of the packages of this one.
        other = next(node for node in stack.nodes if node is not host)
        ok(other, "down")
        stack.overrides.pop("uv_index")
        stack.start(other)
        assert other.process is not None
        wait_ready(other.where, other.process, 60)
        until(lambda: stack.sees(host, 2), "the other node to be back")
        served.paths.clear()
        shown = ok(host, "run", "--uv", "--on", other.nick, "--", "python", "train.py", cwd=work)
        assert "1.0 " in shown and f"/{other.nick}/environments/" in shown
        assert not served.paths, "no request left the mesh"


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


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.docker)], ids=["process", "image"])
def test_second_start_is_as_fast_as_that_of_an_empty_job(make_stack: MakeStack, tmp_path: Path, inside: bool) -> None:
    """Warm within 1 s of an empty job, as the user sees it; the figures are printed."""
    with index(tmp_path / "index") as served:
        work = served.project(tmp_path / "work")
        stack = make_stack(1, uv_index=served.address, engines=["process", "docker"] if inside else ["process"])
        user = stack.nodes[0]
        image = ("--image", python_image()) if inside else ()

        def took(*options: str) -> float:
            begun = time.monotonic()
            ok(user, "run", *options, *image, "--", "python3", "-V", cwd=work)
            return time.monotonic() - begun

        until(lambda: mesh(user, "run", *image, "--", "python3", "-V", cwd=work).returncode == 0, "a first job to run")
        cold = took("--uv")
        warm, empty = (min(took(*options) for _ in range(3)) for options in (("--uv",), ()))
        print(f"cold {cold:.2f} s, warm {warm:.2f} s, without an environment {empty:.2f} s")
        assert warm < empty + 1.0


def test_job_runs_in_an_environment_of_conda_packages(make_stack: MakeStack, tmp_path: Path) -> None:
    """The submitter solves once; a node fetches once, and starts later jobs at once."""
    with channel(tmp_path / "channel") as served:
        work = served.project(tmp_path / "work")
        user = make_stack(1, conda_channels=[served.address]).nodes[0]

        def run(*words: str) -> tuple[str, str]:
            done = mesh(user, "run", "--conda", "environment.yml", "--", *words, cwd=work)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout, done.stderr

        out, told = run("train.py")
        assert "1.0 " in out and "/environments/" in out and "solving environment.yml" in told
        assert sum(path.endswith((".conda", ".bz2")) for path in served.paths) == 3
        job = read(user, "ps", "-a")["jobs"][-1]["job"]
        assert read(user, "describe", job)["asked"]["environment"] == "environment.yml.lock"
        assert "its environment was made in" in ok(user, "job", "events", job)
        served.paths.clear()
        out, told = run("sh", "-c", "tiny; hello; echo $CONDA_PREFIX; touch $CONDA_PREFIX/x || true")
        assert "1.0" in out and "Read-only file system" in out + told
        assert out.partition("hello from ")[2].split()[0] == out.partition("hello from ")[2].split()[1]
        assert "solving" not in told and not served.paths
        job = read(user, "ps", "-a")["jobs"][-1]["job"]
        assert "its environment was made in" not in ok(user, "job", "events", job), "warm"
        # A list of packages, as conda writes it, is a lock too.
        (work / "environment.yml.lock").rename(work / "explicit.txt")
        assert "1.0 " in ok(user, "run", "--conda", "explicit.txt", "--", "python", "train.py", cwd=work)
        # Another file is another lock.
        (work / "environment.yml").write_text((work / "environment.yml").read_text() + "  - nothing-like-it\n")
        refused = mesh(user, "run", "--conda", "environment.yml", "--", "true", cwd=work)
        assert refused.returncode == 125 and "nothing-like-it" in refused.stderr
        two = mesh(user, "run", "--uv", "--conda", "explicit.txt", "--", "true", cwd=work)
        assert two.returncode == 125 and "leave out --uv or --conda" in two.stderr


def test_node_whose_owner_allows_no_channel_says_so(make_stack: MakeStack, tmp_path: Path) -> None:
    with channel(tmp_path / "channel") as served:
        work = served.project(tmp_path / "work")
        user = make_stack(1).nodes[0]
        job = ok(user, "submit", "--conda", "environment.yml", "--", "true", cwd=work).split()[-1]
        why = until(lambda: "conda_channels" in (text := ok(user, "why", job)) and text, "the reason")
        assert f"needs packages of {served.address}, and its owner allows none here" in why
        assert not [path for path in served.paths if path.endswith((".conda", ".bz2"))]


@pytest.mark.docker
def test_conda_packages_run_in_an_image_without_python(make_stack: MakeStack, tmp_path: Path) -> None:
    image = busybox_image()
    with channel(tmp_path / "channel") as served:
        work = served.project(tmp_path / "work")
        stack = make_stack(1, conda_channels=[served.address], engines=["process", "docker"])
        user = stack.nodes[0]
        until(
            lambda: mesh(user, "run", "--no-workdir", "--image", image, "--", "true").returncode == 0,
            "the image to be known",
        )
        command = ("sh", "-c", "hello; echo $CONDA_PREFIX; touch /mesh/env/x 2>&1")
        done = mesh(user, "run", "--conda", "environment.yml", "--image", image, "--", *command, cwd=work)
        shown = done.stdout + done.stderr
        assert "hello from /mesh/env\n/mesh/env" in shown and "Read-only file system" in shown


WAITS = """
import os, pathlib, subprocess, sys, time
import msgspec, tinypkg
print("native", msgspec.json.decode(b"[1]"), msgspec._core.__file__, flush=True)
print(tinypkg.VERSION, tinypkg.__file__, subprocess.check_output(["tiny"], text=True).strip(), flush=True)
print("PATH", os.environ["PATH"], flush=True)
try:
    pathlib.Path(tinypkg.__file__).write_text("")
except OSError as error:
    print(error.strerror, flush=True)
saved = pathlib.Path(os.environ["MESH_CKPT_DIR"], "step")
print("resumed", saved.exists(), flush=True)
done = saved.exists()
saved.write_text("1")
while not done:
    time.sleep(0.1)
"""


@pytest.fixture(
    params=[pytest.param(False, marks=pytest.mark.docker), pytest.param(True, marks=pytest.mark.podman)],
    ids=["docker", "podman"],
)
def image(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if not request.param:
        yield python_image()
        return
    with podman_service(rootless=False) as service:
        monkeypatch.setenv("DOCKER_HOST", service.host)
        yield import_python()


@pytest.mark.long
def test_environment_for_an_image_moves_with_its_job(image: str, make_stack: MakeStack, tmp_path: Path) -> None:
    """The host leaves; the next node makes its own environment for the Python of the same image."""
    with index(tmp_path / "index") as served:
        served.offer_installed(Path(sysconfig.get_path("purelib")), "msgspec")
        work = served.project(tmp_path / "work", "msgspec")
        (work / "train.py").write_text(WAITS)
        before = os.umask(0o077)  # as the service has it
        try:
            stack = make_stack(3, uv_index=served.address, engines=["process", "docker"])
        finally:
            os.umask(before)
        user = stack.nodes[0]
        until(
            lambda: mesh(user, "run", "--no-workdir", "--image", image, "--", "python3", "-V").returncode == 0,
            "the image to be known",
        )
        options = ("--uv", "--image", image, "--ckpt", "ckpts", "--ckpt-mode", "rename")
        job = ok(user, "submit", *options, "--", "python", "train.py", cwd=work).strip()
        state = until(lambda: (s := job_state(user, job)).get("checkpoint") and s, "a checkpoint")
        host = stack.node(state["node"])
        asked = next(node for node in stack.nodes if node is not host)
        ok(host, "down")
        finished(asked, job)
        shown = ok(asked, "logs", job)
        inside = "/mesh/env/lib/"
        assert shown.count(f"1.0 {inside}") == 2 and "Read-only file system" in shown
        assert shown.count(f"native [1] {inside}") == 2
        assert "PATH /mesh/env/bin:/usr/local/bin:/only/here" in shown
        assert "resumed False" in shown and "resumed True" in shown
        assert shown.count("its environment was made in") == 0
        assert ok(asked, "job", "events", job).count("its environment was made in") == 2


@pytest.mark.docker
def test_image_without_python_says_what_to_do(make_stack: MakeStack, tmp_path: Path) -> None:
    image = busybox_image()
    with index(tmp_path / "index") as served:
        work = served.project(tmp_path / "work")
        stack = make_stack(1, uv_index=served.address, engines=["process", "docker"])
        user = stack.nodes[0]
        until(
            lambda: mesh(user, "run", "--no-workdir", "--image", image, "--", "true").returncode == 0,
            "the image to be known",
        )
        done = mesh(user, "run", "--uv", "--image", image, "--", "python", "train.py", cwd=work)
        assert done.returncode != 0 and "has no python3 for an environment" in done.stdout + done.stderr
        system = ("--image", image, "--ckpt-mode", "system")
        refused = mesh(user, "submit", "--uv", *system, "--", "python", "train.py", cwd=work)
        assert refused.returncode != 0 and "leave out --uv" in refused.stderr


@pytest.mark.docker
def test_reason_is_shown_where_no_package_fits_the_image(make_stack: MakeStack, tmp_path: Path) -> None:
    image = python_image()
    with index(tmp_path / "index") as served:
        (wheel,) = served.wheels.glob("*.whl")
        served.offer(wheel.rename(wheel.with_name("tinypkg-1.0-py3-none-musllinux_1_2_x86_64.whl")))
        work = served.project(tmp_path / "work")
        stack = make_stack(1, uv_index=served.address, engines=["process", "docker"])
        user = stack.nodes[0]
        until(
            lambda: mesh(user, "run", "--no-workdir", "--image", image, "--", "python3", "-V").returncode == 0,
            "the image to be known",
        )
        job = ok(user, "submit", "--uv", "--image", image, "--", "python", "train.py", cwd=work).strip()
        why = until(lambda: "cannot be made" in (text := ok(user, "why", job)) and text, "the reason")
        assert "on this node: No solution found" in why and "no wheels with a matching platform tag" in why
