"""Time from the command to a running container, through the mesh and by `docker run`, with the same image, in turns.

The engine's own events give the start of a container; they use the machine's clock.
"""

import contextlib
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mesh.daemon.stack import Stack, StackNode
from tests.bench.harness import installed, not_run, row
from tests.container_images import busybox_image, remove_images
from tests.tiers import docker_problem

ROUNDS, WARMUP = 20, 2
MOST = 1.3  # times the duration of `docker run`
WAIT_S = 60.0


class Starts:
    """The starts of containers of one image, from the engine's events."""

    def __init__(self, image: str) -> None:
        import docker

        self._client: Any = docker.from_env()
        self._names = {
            image,
            str(self._client.images.get(image).id),
        }  # `docker run` names the image, the mesh gives its id
        self._events = self._client.events(decode=True, filters={"event": "start", "type": "container"})
        self._seen: queue.Queue[float] = queue.Queue()
        self._thread = threading.Thread(target=self._listen, name="events of the engine", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(Exception):  # closed
            for event in self._events:
                if event["Actor"]["Attributes"].get("image") in self._names:
                    self._seen.put(event["timeNano"] / 1e9)

    def after(self, begin: Callable[[], object]) -> float:
        """Return the seconds from before `begin` to the next start."""
        with contextlib.suppress(queue.Empty):  # of earlier starts
            while True:
                self._seen.get_nowait()
        begun = time.time()
        begin()
        return self._seen.get(timeout=WAIT_S) - begun

    def close(self) -> None:
        self._events.close()
        self._thread.join(WAIT_S)
        self._client.close()


@contextlib.contextmanager
def lender(order: dict[str, Any]) -> Iterator[StackNode]:
    """Start a mesh of one node that has run such a container once."""
    with Stack(1, overrides={"engines": ["docker"], "slots": 2}) as stack:
        stack.start_all()
        node = stack.nodes[0]
        finish(node, node.client.post("/v1/jobs", order, timeout_s=WAIT_S)["job"])
        yield node


def start(trials: int | None = None) -> Sequence[dict[str, Any]]:
    measure, goal = "container start through mesh and by docker run of the same image, interleaved", f"<= {MOST:g}x"
    if docker_problem():
        return [not_run(f"{measure}: {way}", "s", goal, docker_problem()) for way in ("call", "command")]
    import docker

    image = busybox_image()
    starts, client = Starts(image), docker.from_env()
    taken: dict[str, list[float]] = {name: [] for name in ("call", "docker call", "command", "docker command")}
    try:
        order = {"argv": ["true"], "image": image}
        with lender(order) as node:
            mesh = [str(Path(sys.executable).parent / "mesh"), "--state", str(node.where.root)]
            ways: dict[str, Callable[[], object]] = {
                "call": lambda: finish(node, node.client.post("/v1/jobs", order, timeout_s=WAIT_S)["job"]),
                "docker call": lambda: client.containers.run(image, "true", remove=True, network_mode="none"),
                "command": lambda: run(*mesh, "run", "--no-workdir", "--image", image, "--", "true"),
                "docker command": lambda: run("docker", "run", "--rm", "--network", "none", image, "true"),
            }
            for number in range(WARMUP + (trials or ROUNDS)):
                for name, way in ways.items():
                    seconds = starts.after(way)
                    if number >= WARMUP:
                        taken[name].append(seconds)
    finally:
        client.close()
        starts.close()
        remove_images()
    rows = []
    for way in ("call", "command"):
        ours, theirs = taken[way], taken[f"docker {way}"]
        ratio = statistics.median(ours) / statistics.median(theirs)
        words = f"{measure}: by one {way}"
        found = row(words, ours, "s", goal=goal, met=ratio <= MOST, peer=f"docker {way}", peer_values=theirs)
        rows.append({**found, "ratio": round(ratio, 3)})
        print(f"{words}: {ratio:.2f}x", flush=True)
    return rows


def finish(node: StackNode, job: str) -> None:
    """Remove everything of a round before the next."""
    deadline = time.monotonic() + WAIT_S
    while (state := node.client.get(f"/v1/jobs/{job}", timeout_s=WAIT_S)["job"])["outcome"] is None:
        assert time.monotonic() < deadline, f"{job} did not end"
        time.sleep(0.02)
    assert state["state"] == "done", state


def run(*words: str) -> None:
    quiet = subprocess.DEVNULL
    subprocess.run(words, check=True, stdout=quiet, stderr=quiet, env=installed())
