"""Jobs in real containers, through the command line."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.container_images import busybox_image
from tests.e2e.commands import finished, job_state, mesh, ok, read, send, until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]


@pytest.fixture
def stack(make_stack: Callable[..., Stack]) -> Stack:
    image = busybox_image()
    stack = make_stack(2, slots=3, engines=["process", "docker"])
    node = stack.nodes[0]
    until(
        lambda: mesh(node, "run", "--no-workdir", "--image", image, "--", "true").returncode == 0,
        "the image to be known",
    )
    return stack


def containers(node: StackNode) -> list[Any]:
    return labelled(read(node, "status")["node"])


def test_job_runs_in_its_image_with_its_files_and_leaves_no_container(stack: Stack) -> None:
    node = stack.nodes[0]
    script = "ls; id -u; pwd; echo kept > $MESH_OUT_DIR/file; exit 5"
    done = mesh(node, "run", "--image", busybox_image(), "--", "sh", "-c", script)
    assert done.returncode == 5 and "count.py" in done.stdout and "/mesh/work" in done.stdout
    assert "0" not in done.stdout.split(), "the container must not run as root"
    until(lambda: not any(containers(each) for each in stack.nodes), "the container to be removed")
    assert mesh(node, "submit", "--engine", "docker", "--", "true").returncode == 6
    system = ("submit", "--no-workdir", "--ckpt-mode", "system")
    refused = mesh(node, *system, "--image", busybox_image(), "--", "true")
    assert refused.returncode == 6 and "makes no system checkpoints: its owner has not allowed them" in refused.stderr
    assert "is of a container: add --image NAME" in mesh(node, *system, "--", "true").stderr


def test_killed_daemon_takes_its_containers_along_and_the_job_resumes(stack: Stack) -> None:
    script = (
        'echo "on $MESH_NODE, resumed [$MESH_RESUME]"; echo state > $MESH_CKPT_DIR/step-1; while :; do sleep 0.1; done'
    )
    options = ("--no-workdir", "--ckpt", "ckpts", "--ckpt-mode", "rename", "--image", busybox_image())
    job = ok(stack.nodes[0], "submit", *options, "--", "sh", "-c", script).strip()
    state = until(lambda: (s := job_state(stack.nodes[0], job)).get("checkpoint") and s, "a checkpoint")
    host = stack.node(state["node"])
    other = next(node for node in stack.nodes if node is not host)
    label = read(host, "status")["node"]
    send(signal.SIGKILL, host)
    until(lambda: not labelled(label), "the containers to be removed")

    def moved() -> bool:
        now = job_state(other, job)
        if now["state"] == "stranded" and not host.running:
            stack.start(host)  # in a mesh of two, one node has the record; the job resumes when that node returns
        return len(now["attempts"]) > 1 and now["state"] == "running"

    until(moved, "a new attempt")
    until(lambda: "resumed [/mesh/ckpt/step-1]" in ok(other, "logs", job), "the job to resume from its checkpoint")
    ok(other, "cancel", job)
    finished(other, job)


def labelled(node: str) -> list[Any]:
    import docker

    client = docker.from_env()
    try:
        mine = {"label": f"campus-mesh.node={node}"}
        return list(client.containers.list(all=True, filters=mine, sparse=True))
    finally:
        client.close()
