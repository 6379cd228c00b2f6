"""CRIU checkpoints: a program that saves nothing moves between two nodes with its memory, /tmp and open files."""

from collections.abc import Iterator

import pytest

from mesh.daemon.stack import Stack
from tests.container_images import import_busybox
from tests.dockerd import dockerd
from tests.e2e.commands import finished, job_state, ok, read, until

STEPS = 300
# Each step depends on the previous one and is written to a file that stays open and to a file in memory.
PROGRAM = f"""
i=0; x=7; exec 3>trace
while [ $i -lt {STEPS} ]; do
  i=$((i+1)); x=$(( (x * 1103515245 + 12345 + i) & 2147483647 ))
  echo $i >&3; echo $x > /tmp/x; echo step $i; sleep 0.05
done
cat trace > $MESH_OUT_DIR/trace; cat /tmp/x > $MESH_OUT_DIR/x
"""


def undisturbed() -> int:
    x = 7
    for i in range(1, STEPS + 1):
        x = (x * 1103515245 + 12345 + i) & 2147483647
    return x


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with dockerd("--experimental") as engine, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", engine.host)
        yield engine.host, import_busybox()


@pytest.fixture
def stack(image: tuple[str, str]) -> Iterator[Stack]:
    overrides = {"slots": 1, "grace_s": 30.0, "engines": ["process", "docker"], "system_checkpoints": True}
    with Stack(2, overrides=overrides) as stack:
        for node in stack.nodes:
            node.within = ("env", f"DOCKER_HOST={image[0]}")
        stack.start_all()
        yield stack


@pytest.mark.e2e
@pytest.mark.criu
def test_program_without_checkpoints_moves_to_another_node(stack: Stack, image: tuple[str, str]) -> None:
    one, _ = stack.nodes
    system = read(one, "status")["engines"]["docker"]["system"]
    assert "CRIU" in system["platform"] and system["gpu_platform"] == "" and system["gpu_problem"]
    options = ("--no-workdir", "--image", image[1], "--ckpt-mode", "system", "--ckpt-every", "2s")

    job = ok(one, "submit", *options, "--", "sh", "-c", PROGRAM).strip()

    # With notice, no step is lost.
    first = until(lambda: (s := job_state(one, job)).get("checkpoint") and s, "a checkpoint")
    ok(one, "job", "migrate", job)
    moved = until(
        lambda: (s := job_state(one, job))["state"] == "running" and len(s["attempts"]) == 2 and s, "the job to move"
    )
    assert moved["node"] != first["node"]
    told = ok(one, "logs", job)
    steps = [int(line.split()[1]) for line in told.splitlines() if line.startswith("step ")]
    assert steps == list(range(1, len(steps) + 1)), "each step must run once"

    # Without notice, the program and its files return to the last committed checkpoint.
    seq = moved["checkpoint"]["seq"]
    until(lambda: job_state(one, job)["checkpoint"]["seq"] > seq, "a checkpoint of the second attempt")
    ok(stack.node(moved["node"]), "reclaim", "--now")
    done = finished(one, job)
    assert done["outcome"]["kind"] == "done" and len(done["attempts"]) == 3, done
    where = stack.directory / "result"
    ok(one, "cp", f"{job}:out/", str(where))
    assert (where / "x").read_text() == f"{undisturbed()}\n"
    assert (where / "trace").read_text().split() == [str(step) for step in range(1, STEPS + 1)]
