"""Per-job limits of an owner, from the settings to the message that the user reads."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.daemon.stack import Stack
from tests.e2e.commands import finished, mesh, ok, until

pytestmark = pytest.mark.e2e


def test_job_is_limited_to_the_resources_that_its_host_lends(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(1, max_memory_gib=1.0, max_cpus=2.0, max_disk_gib=0.05, max_log_gib=0.01)
    (node,) = stack.nodes
    done = mesh(node, "submit", "--no-workdir", "--memory", "2g", "--", "true")
    assert done.returncode == 6 and "lends at most 1024 MiB of memory to a job, and it asks for 2048" in done.stderr
    done = mesh(node, "submit", "--no-workdir", "--cpus", "3", "--", "true")
    assert done.returncode == 6 and "lends at most 2 CPUs to a job, and it asks for 3" in done.stderr
    script = "dd if=/dev/zero of=$MESH_OUT_DIR/big bs=1M count=100 2>/dev/null; while :; do sleep 0.1; done"
    order = ("submit", "--no-workdir", "--retries", "0", "--memory", "1g", "--cpus", "1")
    job = ok(node, *order, "--", "sh", "-c", script).strip()
    assert finished(node, job)["state"] == "failed"
    wrote = re.search(
        r"^mesh: ended: (it wrote \d+\.\d MiB), and its limit on this node is 51\.0 MiB$", ok(node, "logs", job), re.M
    )
    assert wrote is not None and wrote[1] in ok(node, "job", "events", job)

    job = ok(node, *order, "--", "sh", "-c", "head -c 12000000 /dev/zero | tr '\\0' x").strip()
    assert finished(node, job)["state"] == "done"
    words = "log cut at 10.0 MiB: later output is not kept"
    assert ok(node, "logs", job).endswith(f"xx\nmesh: {words}\n") and words in ok(node, "job", "events", job)


def test_working_directory_beyond_the_disk_ceiling_is_not_written_out(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    """Submit a file that is one hole: it takes almost nothing until a node writes it out."""
    (node,) = make_stack(1, max_disk_gib=0.05).nodes
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(200 << 20)
    job = ok(node, "submit", "--workdir", str(tmp_path), "--", "true").strip()
    words = "its files could not be brought here: its files take 2097"  # bytes: 200 MiB, and a block for each file
    until(lambda: words in ok(node, "job", "events", job), "the refusal")
    assert not list(node.where.jobs.rglob("hole*"))
    ok(node, "cancel", job)
