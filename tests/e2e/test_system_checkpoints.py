"""CRIU checkpoints: a program that saves nothing moves between two nodes with its memory, /tmp and open files."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.container_images import import_busybox, import_python
from tests.dockerd import dockerd
from tests.e2e.commands import WAIT_S, finished, job_state, metric, ok, read, until
from tests.podman import podman_service

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


MEMORY_STEPS = 900
# All that it knows is in its memory, in shared memory and in a file without a name. Arguments: their directories, and its pace.
MEMORY_PROGRAM = f"""
import hashlib, os, sys, time
trace, shared, unnamed = (open(os.path.join(place, "x"), "w+") for place in (".", *sys.argv[1:3]))
os.unlink(unnamed.name)
memory, state = bytearray(8 << 20), b"7" * 32
for step in range(1, {MEMORY_STEPS} + 1):
    place = int.from_bytes(state[:4], "big") % (len(memory) - len(state))
    state = hashlib.sha256(state + memory[place:place + len(state)]).digest()
    memory[place:place + len(state)] = state
    print(step, file=trace, flush=True)
    for file in (shared, unnamed):
        file.seek(0)
        print(state.hex(), file=file, flush=True)
    print("step", step, flush=True)
    time.sleep(float(sys.argv[3]))
with open(os.environ["MESH_OUT_DIR"] + "/result", "wb") as result:
    for file in (trace, shared, unnamed):
        file.seek(0)
        result.write(file.read().encode())
    result.write(memory)
"""


@pytest.fixture
def two_stores(tmp_path: Path) -> Iterator[tuple[Stack, str]]:
    """Yield two nodes with a Podman and a store each, and an image that both have."""
    overrides = {"slots": 1, "grace_s": WAIT_S, "engines": ["process", "docker"], "system_checkpoints": True}
    with podman_service(False) as one, podman_service(False) as two, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", one.host)
        image = import_python()
        source, target = (docker.DockerClient(service.host, timeout=600) for service in (one, two))
        target.images.load(b"".join(source.api.get_image(image)))
        assert target.images.get(image).id == source.images.get(image).id
        with Stack(2, overrides=overrides) as stack:
            for node, service in zip(stack.nodes, (one, two), strict=True):
                node.within = ("env", f"DOCKER_HOST={service.host}")
            stack.start_all(WAIT_S)
            yield stack, image
        source.close()
        target.close()


def _system(node: StackNode) -> dict[str, str]:
    found: dict[str, str] = read(node, "status")["engines"]["docker"]["system"]
    return found


@pytest.mark.e2e
@pytest.mark.podman_criu
@pytest.mark.timeout(1500)
def test_python_program_moves_between_two_podmans_bit_for_bit(two_stores: tuple[Stack, str], tmp_path: Path) -> None:
    stack, image = two_stores
    one, _ = stack.nodes
    for node in stack.nodes:
        until(lambda node=node: "Podman" in _system(node)["platform"], "Podman to be offered", 5 * WAIT_S)
    options = ("--no-workdir", "--image", image, "--memory", "256M", "--ckpt-mode", "system", "--ckpt-every", "10s")
    program = ("python3", "-c", MEMORY_PROGRAM, "/dev/shm", "/tmp", "0.2")
    job = ok(one, "submit", *options, "--", *program).strip()
    first = until(lambda: (s := job_state(one, job)).get("checkpoint") and s, "a checkpoint", 5 * WAIT_S)
    runner, seq = stack.node(first["node"]), first["checkpoint"]["seq"]
    whole = metric(runner, "mesh_transfer_sent_bytes_total")
    last = until(
        lambda: (s := job_state(one, job)["checkpoint"]["seq"]) >= seq + 2 and s, "two more checkpoints", 5 * WAIT_S
    )
    more = metric(runner, "mesh_transfer_sent_bytes_total") - whole
    assert more / (last - seq) < whole / 2, f"the standby has most of the image already: {whole} bytes, then {more}"
    ok(one, "job", "migrate", job)
    moved = until(
        lambda: (s := job_state(one, job))["state"] == "running" and len(s["attempts"]) == 2 and s,
        "the job to move",
        5 * WAIT_S,
    )
    assert moved["node"] != first["node"]
    seq = moved["checkpoint"]["seq"]
    until(lambda: job_state(one, job)["checkpoint"]["seq"] > seq, "a checkpoint of the second attempt", 5 * WAIT_S)
    ok(stack.node(moved["node"]), "reclaim", "--now")
    done = until(lambda: (s := job_state(one, job)).get("outcome") and s, "the job to end", 10 * WAIT_S)
    assert done["outcome"]["kind"] == "done" and len(done["attempts"]) == 3, done
    ok(one, "cp", f"{job}:out/", str(tmp_path / "result"))
    for place in ("run", "shm", "tmp"):
        (tmp_path / place).mkdir()
    subprocess.run(
        [sys.executable, *program[1:3], tmp_path / "shm", tmp_path / "tmp", "0"],
        cwd=tmp_path / "run",
        env={**os.environ, "MESH_OUT_DIR": str(tmp_path / "run")},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    assert (tmp_path / "result" / "result").read_bytes() == (tmp_path / "run" / "result").read_bytes()
