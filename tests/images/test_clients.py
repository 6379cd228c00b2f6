"""Real clients of the registry: Docker, with both of its image stores if it has two, Podman and skopeo."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from mesh.images import blobs as blobs_module
from mesh.images.allowlist import Image
from mesh.images.blobs import BlobStore
from mesh.images.engine import FETCHED, PUSHED, ImageEngine, StoredImage
from mesh.images.oci import digest_text
from mesh.images.registry import RegistryServer
from tests.container_images import layered_image
from tests.dockerd import client_of, dockerd, dockerd_with_store
from tests.execution.test_docker_podman import podman
from tests.images.samples import manifest_of

__all__ = ["podman"]  # a fixture

SIZE = 5 << 20


@pytest.fixture(scope="module", params=[False, True], ids=["overlay2", "containerd"])
def host(request: pytest.FixtureRequest) -> Iterator[str]:
    with dockerd_with_store(request.param) as engine:
        yield engine.host


class Node:
    """The registry of a node, and what it lets anybody pull."""

    def __init__(self, directory: Path) -> None:
        self.store = BlobStore(directory, 1 << 40)
        self.allowed = set[bytes]()
        self.server = RegistryServer(
            self.store, directory / "port", lambda one: one in self.allowed, lambda alias: None, self._bring
        )
        self.engine = ImageEngine(lambda: self.server.access)

    async def _bring(self, digest: bytes, name: str) -> None:
        """Nothing is fetched."""

    async def pushed(self, name: str) -> Image:
        """Push an image of the engine, and let anybody pull it."""
        found = await self.engine.find(name)
        assert found is not None and not found.fetched
        await self.engine.push(found, "x")
        return self.image(f"{PUSHED}:x")

    def image(self, tag: str) -> Image:
        digest = self.store.tags[tag]
        manifest = self.store.manifest(digest)
        assert manifest is not None
        self.allowed |= {digest, *(blob.hash for blob in manifest.blobs)}
        return Image(manifest.blobs[0].hash, digest)

    async def found(self, image: Image) -> StoredImage | None:
        return await self.engine.find(digest_text(image.config)) or await self.engine.find(digest_text(image.manifest))


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 0)
    node = Node(tmp_path / "node")
    await node.server.open(0)
    yield node
    await node.server.close()
    node.engine.close()


async def pushes_and_pulls(node: Node, host: str) -> None:
    with client_of(host) as client:
        name = layered_image(client, "lab/tool:1", os.urandom(SIZE), b"small")
        image = await node.pushed("lab/tool:1")
        assert (await node.engine.find("lab/tool:1")).names == ("lab/tool:1",)  # type: ignore[union-attr]
        client.images.remove(name, force=True)
        assert await node.found(image) is None
        await node.engine.pull(image.manifest, "abc")
        found = await node.found(image)
        assert found is not None and found.fetched and found.names == ()
        assert any(f"{FETCHED}:abc" in tag for tag in client.images.get(digest_text(found.id)).tags)
        container = client.containers.create(digest_text(found.id), "true")
        assert await node.engine.remove(found) is False, "a container needs it"
        container.remove()
        client.api.tag(digest_text(found.id), "mine", "1")
        assert await node.engine.remove(found) is True
        kept = await node.engine.find("mine:1")
        assert kept is not None and kept.id == found.id and not kept.fetched, "the owner's name for it stays"
        client.images.remove("mine:1", force=True)
        assert await node.found(image) is None
        assert not any(one.fetched for one in await node.engine.images())


@pytest.mark.dockerd
async def test_docker_pushes_and_pulls(node: Node, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    await pushes_and_pulls(node, host)


@pytest.mark.dockerd
@pytest.mark.netns
async def test_docker_with_a_network_of_its_own_pushes_and_pulls(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rootless Docker has one, too. A second start of the engine has another."""
    within = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    with dockerd("--bridge=none", within=within) as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        await pushes_and_pulls(node, engine.host)
        engine.stop()
        await asyncio.to_thread(engine.start)
        await pushes_and_pulls(node, engine.host)


@pytest.mark.dockerd
async def test_docker_command_pulls_without_password_and_pushes_with_it(
    node: Node, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    address = node.server.access.address
    with client_of(host) as client:
        layered_image(client, f"{address}/lab/own:2", b"own" * 1000)
    assert (await run("docker", "push", f"{address}/lab/own:2"))[0] != 0, "without the password"
    assert (await run("docker", "login", address, "-u", "mesh", "-p", "wrong"))[0] != 0
    assert (await run("docker", "login", address, "-u", "mesh", "-p", node.server.access.password))[0] == 0
    code, words = await run("docker", "push", f"{address}/lab/own:2")
    assert code == 0, words
    assert (await run("docker", "logout", address))[0] == 0
    digest = digest_text(node.store.tags["lab/own:2"])
    assert (await run("docker", "pull", f"{address}/lab/own@{digest}"))[0] != 0, "it is not allowed"
    node.image("lab/own:2")
    code, words = await run("docker", "pull", f"{address}/any/name@{digest}")
    assert code == 0 and digest in words, words


async def test_podman_pushes_and_pulls(node: Node, podman: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", podman[0])
    await pushes_and_pulls(node, podman[0])


@pytest.mark.podman
async def test_skopeo_copies_with_the_password_and_reads_without(node: Node, tmp_path: Path) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    here, there = tmp_path / "here", tmp_path / "there"
    config, layer = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}', os.urandom(SIZE)
    here.mkdir()
    (here / "version").write_text("Directory Transport Version: 1.1\n")
    (here / "manifest.json").write_bytes(manifest_of(config, [layer]))
    for data in (config, layer):
        (here / sha256(data).hexdigest()).write_bytes(data)
    access = node.server.access
    place = f"docker://{access.address}/lab/copy:1"
    assert (await run("skopeo", "copy", "--dest-tls-verify=false", f"dir:{here}", place))[0] != 0
    words = ["--dest-tls-verify=false", "--dest-creds", f"mesh:{access.password}"]
    code, told = await run("skopeo", "copy", *words, f"dir:{here}", place)
    assert code == 0, told
    image = node.image("lab/copy:1")
    source = f"docker://{access.address}/lab/copy@{digest_text(image.manifest)}"
    code, told = await run("skopeo", "copy", "--src-tls-verify=false", source, f"dir:{there}")
    assert code == 0 and (there / "manifest.json").read_bytes() == node.store.path(image.manifest).read_bytes(), told


async def run(*command: str) -> tuple[int, str]:
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr
