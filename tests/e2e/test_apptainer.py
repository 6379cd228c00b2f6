"""A job with an image on a machine without a container daemon: two real daemons, whose only engine is Apptainer."""

import base64
import gzip
import io
import json
import tarfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.daemon.stack import Stack, StackNode
from mesh.images.oci import MANIFEST
from tests.apptainer import unpacked
from tests.e2e.commands import mesh, ok, read, until
from tests.images.samples import digest_of

pytestmark = [pytest.mark.e2e, pytest.mark.apptainer]


@pytest.fixture
def stack(make_stack: Callable[..., Stack]) -> Stack:
    return make_stack(2, slots=2, engines=["apptainer"])


def push_busybox(node: StackNode, directory: Path, name: str) -> None:
    """Push an image into the node's registry, as skopeo does, which needs no engine."""
    access = read(node, "image", "registry")
    secret = base64.b64encode(f"mesh:{access['password']}".encode()).decode()
    base = f"http://{access['address']}"

    def ask(method: str, where: str, data: bytes = b"", kind: str = "application/octet-stream") -> str:
        url = where if where.startswith("http") else base + where
        headers = {"Authorization": f"Basic {secret}", "Content-Type": kind}
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.headers.get("Location", ""))

    image = unpacked(directory).removeprefix("sha256:")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(directory / image, ".")
    plain, layer = packed.getvalue(), gzip.compress(packed.getvalue(), 1)
    root = {"type": "layers", "diff_ids": [digest_of(plain)]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": root}).encode()
    blobs = {"application/vnd.oci.image.config.v1+json": config, "application/vnd.oci.image.layer.v1.tar+gzip": layer}
    rows = [{"mediaType": kind, "digest": digest_of(data), "size": len(data)} for kind, data in blobs.items()]
    for data in blobs.values():
        place = ask("POST", f"/v2/{name}/blobs/uploads/")
        ask("PUT", f"{place}?digest={digest_of(data)}", data)
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": rows[0], "layers": rows[1:]}
    ask("PUT", f"/v2/{name}/manifests/latest", json.dumps(manifest).encode(), MANIFEST)


def test_job_with_an_image_runs_by_apptainer_on_a_node_that_fetched_it(stack: Stack, tmp_path: Path) -> None:
    one, two = stack.nodes
    status = until(lambda: read(two, "status")["engines"]["apptainer"], "the engine to be looked at")
    assert status["ok"] and "weaker than Docker" in status["isolation"], status
    push_busybox(one, tmp_path / "images", "lab/busy")
    ok(one, "image", "allow", "busy", "--from", "lab/busy")
    script = "pwd; ls -d /home; echo kept > $MESH_OUT_DIR/file; exit 5"

    def ran() -> str:
        done = mesh(one, "run", "--image", "busy", "--", "sh", "-c", script)
        return done.stdout if done.returncode == 5 else ""

    assert "/mesh/work" in until(ran, "a job in the image")
    ok(one, "pause")
    until(lambda: mesh(two, "run", "--image", "busy", "--", "true").returncode == 0, "a job on the other node")
    assert "weaker than Docker" in mesh(one, "nodes").stderr
    assert len(read(two, "image", "ls")["fetched"]["images"]) == 1, "retention knows it"
    assert mesh(two, "submit", "--engine", "docker", "--image", "busy", "--", "true").returncode != 0
