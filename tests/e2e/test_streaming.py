"""Jobs that read a data set while it comes, on real daemons: as plain processes and in containers, and through crashes."""

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.daemon.leftovers import Leftovers, find
from mesh.daemon.stack import Stack, StackNode
from mesh.data import fuse
from mesh.data.streams import LEAST_BYTES, PLACE, problem
from tests.container_images import layered_image
from tests.dockerd import client_of, dockerd
from tests.e2e.commands import finished, job_state, mesh, ok, read, send, until
from tests.e2e.test_data import row, sums

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(problem()), reason="needs /dev/fuse and the right to mount")]

MIB = 1 << 20
SLOW = 100  # megabits per second that each node gives: the data set takes ten seconds
READ_ALL = (
    'cd "$MESH_DATA_LARGE"; find . -type f -exec sha256sum {} + | sort -k2; ! touch new; ! rm -f 0; echo "at $PWD"'
)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    root, rng = tmp_path / "large", random.Random(4)
    root.mkdir()
    for number in range(8):
        (root / f"{number}").write_bytes(rng.randbytes(LEAST_BYTES // 8 + MIB))
    return root


def mounts(node: StackNode) -> list[Path]:
    return fuse.mounts_below(node.where.data / PLACE)


def file_system_of(node: StackNode) -> int:
    """Return the process that serves a node's one stream."""
    (path,) = mounts(node)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and os.fsencode(path) in (entry / "cmdline").read_bytes():
            return int(entry.name)
    raise AssertionError("nobody serves it")


def pause_all_but(stack: Stack, kept: StackNode) -> None:
    for node in stack.nodes:
        if node is not kept:
            ok(node, "pause")
    until(lambda: all(r["paused"] for r in read(kept, "nodes")["nodes"] if r["nick"] != kept.nick), "the pauses")


def full_name(node: StackNode) -> str:
    return f"{read(node, 'status')['user']}/large"


def two_nodes(make_stack: Callable[..., Stack], large: Path) -> Stack:
    """Return a node with the data set, which it gives slowly, and one that lends."""
    stack = make_stack(2, upload_mbps=SLOW)
    one, two = stack.nodes
    read(one, "data", "add", "large", str(large))
    name = full_name(one)
    until(lambda: row(two, name), "node2 to know it")
    pause_all_but(stack, two)
    return stack


def test_job_reads_a_data_set_while_it_comes(make_stack: Callable[..., Stack], large: Path) -> None:
    _, two = two_nodes(make_stack, large).nodes
    name = full_name(two)
    script = (
        'head -c 1000 "$MESH_DATA_LARGE/7" | sha256sum; echo first; while [ ! -e go ]; do sleep 0.1; done; ' + READ_ALL
    )
    job = ok(two, "submit", "--no-workdir", "--data", "large", "--", "sh", "-c", script).strip()
    until(lambda: "first" in ok(two, "logs", job), "the first read")
    assert row(two, name)["here"] is False, "a file at the end is read before all has come"
    used = mesh(two, "data", "rm", "--here", "large")
    assert used.returncode != 0 and len(mounts(two)) == 1
    (work,) = two.where.jobs.glob("*/*/work")
    (work / "go").touch()
    state = finished(two, job)
    assert state["outcome"]["kind"] == "done", ok(two, "logs", job)
    assert [line for line in ok(two, "logs", job).splitlines() if len(line) > 64 and " ./" in line] == sums(large)
    assert "is read while it is fetched" in two.where.log.read_text()
    until(lambda: not mounts(two), "the mount to go")
    until(lambda: mesh(two, "data", "pin", "large").returncode == 0 and row(two, name)["here"], "all of it")
    done = mesh(two, "run", "--no-workdir", "--data", "large", "--", "sh", "-c", READ_ALL)
    assert done.returncode == 0 and f"at {two.where.data}/trees" in done.stdout, (
        "once it is whole, jobs get plain files"
    )


def test_crashes_leave_no_mount_and_the_job_goes_on_elsewhere(make_stack: Callable[..., Stack], large: Path) -> None:
    stack = two_nodes(make_stack, large)
    one, two = stack.nodes
    script = 'echo begun; cat "$MESH_DATA_LARGE"/7 "$MESH_DATA_LARGE"/* > /dev/null && echo ended'
    job = ok(one, "submit", "--no-workdir", "--data", "large", "--", "sh", "-c", script).strip()
    until(lambda: mounts(two) and "begun" in ok(one, "logs", job), "the job to read")

    # A file system that is killed is the node's fault, not the job's, which is tried again.
    os.kill(file_system_of(two), signal.SIGKILL)
    until(lambda: "its file system has ended" in str(job_state(one, job)["attempts"]), "the end of the attempt")
    ok(one, "lend")
    assert finished(one, job)["outcome"]["kind"] == "done"
    assert job_state(one, job)["attempts"][-1]["node"] == "node1"
    until(lambda: not mounts(two), "the mount to go")

    # A daemon and its file system that are killed together leave a mount, which the next start takes away.
    ok(one, "pause")
    until(lambda: next(r for r in read(two, "nodes")["nodes"] if r["nick"] == "node1")["paused"], "the pause")
    job = ok(one, "submit", "--no-workdir", "--data", "large", "--", "sh", "-c", script).strip()
    until(lambda: mounts(two) and "begun" in ok(one, "logs", job), "the next job to read")
    server = file_system_of(two)
    os.kill(server, signal.SIGSTOP)
    send(signal.SIGKILL, two)
    os.kill(server, signal.SIGKILL)
    left = find(two.where)
    assert left.mounts == tuple(map(str, mounts(two))) and "1 mounted data set" in left.words
    ok(one, "lend")
    stack.start(two)
    until(lambda: mesh(two, "status").returncode == 0, "the restarted daemon to answer")
    assert find(two.where).mounts == Leftovers().mounts == ()
    assert finished(one, job)["outcome"]["kind"] == "done"


MAP = """
import mmap, os
file = open(os.environ["MESH_DATA_LARGE"] + "/7", "rb")
data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
data.madvise(mmap.MADV_RANDOM)  # so that the program itself waits for each answer
print("begun", flush=True)
while True:
    sum(data[at] for at in range(0, len(data), 4096))
    data.madvise(mmap.MADV_DONTNEED)
"""


def test_job_is_killed_although_its_file_system_stands_still(make_stack: Callable[..., Stack], large: Path) -> None:
    one, two = two_nodes(make_stack, large).nodes
    job = ok(one, "submit", "--no-workdir", "--data", "large", "--", sys.executable, "-c", MAP).strip()
    until(lambda: mounts(two) and "begun" in ok(one, "logs", job), "the job to read")
    os.kill(file_system_of(two), signal.SIGSTOP)
    ok(one, "cancel", job)
    assert finished(one, job)["outcome"]["kind"] == "cancelled"
    until(lambda: not mounts(two), "the mount to go")


@pytest.mark.long
@pytest.mark.dockerd
def test_container_reads_a_data_set_while_it_comes(large: Path) -> None:
    settings = {"engines": ["docker"], "upload_mbps": SLOW}
    with dockerd() as engine, client_of(engine.host) as client, Stack(2, overrides=settings) as stack:
        one, two = stack.nodes
        for node in stack.nodes:
            node.within = ("env", f"DOCKER_HOST={engine.host}")
        image = "lab/tool:1"
        layered_image(client, image, b"small")
        stack.start_all()
        read(one, "data", "add", "large", str(large))
        name = full_name(one)
        until(lambda: row(two, name), "node2 to know it")
        pause_all_but(stack, two)
        until(lambda: mesh(two, "run", "--no-workdir", "--image", image, "--", "true").returncode == 0, "the image")
        script = "cd /data/x && head -c 1000 7 | sha256sum && ls /data && ! touch new && echo read && cat * | sha256sum"
        options = ("--no-workdir", "--image", image, "--data", "large:/data/x")
        job = ok(two, "submit", *options, "--", "sh", "-c", script).strip()
        until(lambda: "read" in ok(two, "logs", job), "the first read")
        assert row(two, name)["here"] is False
        assert finished(two, job)["outcome"]["kind"] == "done", ok(two, "logs", job)
        until(lambda: not mounts(two), "the mount to go")
