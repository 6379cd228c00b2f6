"""Images from three nodes, beside `docker pull` from Debian's docker-registry, on one machine and with the same engine.

Writes build/bench/images.json. Needs root, dockerd, docker-registry and skopeo.
"""

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import docker
import docker.errors

from mesh.daemon.stack import Stack, StackNode
from tests.bench.harness import interleave, not_run, row, save
from tests.container_images import layered_image
from tests.docker_registry import docker_registry
from tests.dockerd import client_of, dockerd
from tests.e2e.commands import metric

LAYERS, LAYER_BYTES = (
    3,
    24 << 20,
)  # of random bytes, written in hexadecimal, as programs compress about by half (own choice)
LEAST = 0.9  # times the speed of the peer
MOST_MOVED = 1.02  # times the missing layers
WAIT_S = 120.0
POLL_S = 0.01  # what it adds to a pull is not the mesh's (own choice)
SPEED = f"image of {LAYERS} layers, {LAYERS * LAYER_BYTES >> 20} MiB compressed, from three nodes onto the engine"
MOVED = "bytes between nodes for a second image that shares layers, by its missing layers"


def content() -> bytes:
    return os.urandom(LAYER_BYTES).hex().encode()


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(POLL_S)


def listed(node: StackNode, alias: str) -> dict[str, Any]:
    rows = node.client.get("/v1/images", timeout_s=WAIT_S)["images"]
    return next((found for found in rows if found["alias"] == alias), {})


def fetching(node: StackNode, alias: str) -> bool:
    return bool(listed(node, alias)["fetching"])


def clear(node: StackNode, client: Any) -> None:
    """Remove all images from an engine, and all blobs from its node's registry."""
    for image in client.images.list():
        client.images.remove(image.id, force=True)
    for path in (node.where.images / "blobs").iterdir():
        path.unlink()


def copied(source: StackNode, target: StackNode) -> None:
    shutil.copytree(source.where.images / "blobs", target.where.images / "blobs", dirs_exist_ok=True)


def has(client: Any, image: str) -> bool:
    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        return False
    return True


def pull(node: StackNode, client: Any, alias: str, image: str) -> None:
    node.client.post("/v1/images/pull", {"alias": alias}, timeout_s=WAIT_S)
    until(lambda: has(client, image), f"the image on {node.nick}")


def measure(rounds: int) -> list[dict[str, Any]]:
    overrides = {"engines": ["process", "docker"]}
    with dockerd() as one, dockerd() as two, docker_registry() as peer, Stack(4, overrides=overrides) as stack:
        first, *others, last = stack.nodes
        for node in stack.nodes:
            node.within = ("env", f"DOCKER_HOST={two.host if node is last else one.host}")
        stack.start_all()
        with client_of(one.host) as source, client_of(two.host) as target:
            layers = [content() for _ in range(LAYERS)]
            image = layered_image(source, "bench:1", *layers)
            first.client.post("/v1/images/allow", {"alias": "bench", "source": "bench:1"}, timeout_s=WAIT_S)
            for node in others:
                copied(first, node)
            until(lambda: len(listed(last, "bench").get("nodes", ())) == 3, "three holders")
            digest = listed(first, "bench")["manifest"]
            access = first.client.get("/v1/images/registry", timeout_s=WAIT_S)
            words = ["--src-tls-verify=false", "--dest-tls-verify=false", "--preserve-digests"]
            places = (f"docker://{access['address']}/bench@{digest}", f"docker://{peer}/bench:1")
            subprocess.run(["skopeo", "copy", *words, *places], check=True, stdout=subprocess.DEVNULL)

            def from_nodes() -> None:
                pull(last, target, "bench", image)

            def from_peer() -> None:
                target.images.pull(f"{peer}/bench", tag="1")

            taken: dict[str, list[float]] = {"nodes": [], "peer": []}
            for number in range(1 + rounds):
                for name, subject in (("nodes", from_nodes), ("peer", from_peer)):
                    until(lambda: not fetching(last, "bench"), "the end of the fetch")
                    clear(last, target)
                    (seconds,) = interleave({name: subject}, 1, warmup=0)[name]
                    if number:
                        taken[name].append(seconds)
            speed = {name: [LAYERS * LAYER_BYTES / 2**20 / one for one in times] for name, times in taken.items()}
            found = row(
                SPEED,
                speed["nodes"],
                "MiB/s",
                goal=f">= {LEAST:g}x",
                met=None,
                peer="docker pull from docker-registry",
                peer_values=speed["peer"],
            )
            found["met"] = found["value"] >= LEAST * found["peer_value"]

            until(lambda: not fetching(last, "bench"), "the end of the fetch")
            clear(last, target)
            pull(last, target, "bench", image)
            more = layered_image(source, "bench:2", *layers, content())
            first.client.post("/v1/images/allow", {"alias": "more", "source": "bench:2"}, timeout_s=WAIT_S)
            until(lambda: bool(listed(last, "more").get("nodes")), "a holder of the second image")
            until(lambda: not fetching(last, "bench"), "the end of the fetch")
            before, sent = blobs(last), received(last)
            pull(last, target, "more", more)
            missing = sum(size for name, size in blobs(last).items() if name not in before)
            until(lambda: received(last) > sent, "the metric to count them")  # it is told anew once a second
            ratio = (received(last) - sent) / missing
    return [found, row(MOVED, [ratio], "", goal=f"<= {MOST_MOVED:g}", met=ratio <= MOST_MOVED)]


def blobs(node: StackNode) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (node.where.images / "blobs").iterdir()}


def received(node: StackNode) -> int:
    """Return the bytes of images that a node has got from others."""
    return int(metric(node, "mesh_image_received_bytes_total"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    lacks = [program for program in ("dockerd", "docker-registry", "skopeo", "ip") if shutil.which(program) is None]
    if lacks or os.geteuid():
        why = f"needs {', '.join(lacks) or 'root'}"
        rows = [not_run(SPEED, "MiB/s", f">= {LEAST:g}x", why), not_run(MOVED, "", f"<= {MOST_MOVED:g}", why)]
    else:
        rows = measure(rounds)
    print(save("images", rows))


if __name__ == "__main__":
    main()
