"""What an owner lends to one job, from his settings to the words that its user reads."""

import re
from collections.abc import Callable

import pytest

from mesh.stack import Stack
from tests.e2e.commands import finished, mesh, ok

pytestmark = pytest.mark.e2e


def test_a_job_has_what_its_host_lends_and_no_more(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(1, max_memory_gib=1.0, max_cpus=2.0, max_disk_gib=0.05, max_log_gib=0.01)
    (node,) = stack.nodes
    done = mesh(node, "run", "--no-workdir", "--memory", "2g", "--", "true")
    assert done.returncode == 6 and "lends 1024 MiB of memory to a job, 2048 asked" in done.stderr
    done = mesh(node, "run", "--no-workdir", "--cpus", "3", "--", "true")
    assert done.returncode == 6 and "lends 2 CPUs to a job, 3 asked" in done.stderr
    script = "dd if=/dev/zero of=$MESH_OUT_DIR/big bs=1M count=100 2>/dev/null; while :; do sleep 0.1; done"
    order = ("submit", "--no-workdir", "--retries", "0", "--memory", "1g", "--cpus", "1")
    job = ok(node, *order, "--", "sh", "-c", script).strip()
    assert finished(node, job)["state"] == "failed"
    wrote = re.search(
        r"^mesh: ended: (it wrote \d+\.\d MiB), and may have 51\.0 MiB on this node$", ok(node, "logs", job), re.M
    )
    assert wrote is not None and wrote[1] in ok(node, "events", job)

    job = ok(node, *order, "--", "sh", "-c", "head -c 12000000 /dev/zero | tr '\\0' x").strip()
    assert finished(node, job)["state"] == "done"
    words = "log cut at 10.0 MiB: what it prints from here on is not kept"
    assert ok(node, "logs", job).endswith(f"xx\nmesh: {words}\n") and words in ok(node, "events", job)
