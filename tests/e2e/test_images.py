"""The mesh's image list on two real daemons, each with its own Docker engine."""

import getpass
import os
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from membership.identity import Identity
from membership.trust import TrustStore
from mesh.daemon.launcher import wait_ready
from mesh.daemon.stack import Stack, StackNode
from mesh.images.allowlist import Image
from mesh.images.catalogue import Catalogue
from mesh.images.messages import encode
from mesh.images.oci import decode_oci, digest_hash, digest_text
from tests.container_images import layered_image
from tests.dockerd import client_of, dockerd, dockerd_with_store
from tests.e2e.commands import finished, here, job_state, mesh, ok, read, suggestion, until
from tests.e2e.test_hostile import Insider

pytestmark = pytest.mark.e2e

SIZE = 24 << 20


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    with dockerd() as one, dockerd() as two:
        yield one.host, two.host


@pytest.fixture(scope="module")
def image_id(hosts: tuple[str, str]) -> str:
    with client_of(hosts[0]) as client:
        return layered_image(client, "lab/tool:1", os.urandom(SIZE), b"small")


@pytest.fixture
def stack(hosts: tuple[str, str], image_id: str) -> Iterator[Stack]:
    with Stack(2, overrides={"slots": 2, "engines": ["process", "docker"], "upload_mbps": 400}) as stack:
        for node, host in zip(stack.nodes, hosts, strict=True):
            node.within = ("env", f"DOCKER_HOST={host}")
        stack.start_all()
        yield stack
    with client_of(hosts[1]) as client:
        for image in client.images.list():
            client.images.remove(image.id, force=True)


def row(node: StackNode, alias: str = "tool") -> dict[str, object]:
    return next((row for row in read(node, "image", "ls")["images"] if row["alias"] == alias), {})


def names(node: StackNode) -> set[str]:
    """Return the names of the images that some node can run by name."""
    return {row["name"] for row in read(node, "image", "ls")["by_name"]}


def paused(seen_by: StackNode, node: StackNode) -> bool:
    (row,) = [row for row in read(seen_by, "nodes")["nodes"] if row["nick"] == node.nick]
    return bool(row["paused"])


def fails(node: StackNode, code: int, words: str, *arguments: str) -> None:
    done = mesh(node, *arguments)
    assert done.returncode == code and words in done.stderr, done


@pytest.mark.dockerd
def test_image_is_allowed_on_one_node_fetched_by_a_peer_and_denied_by_owner(
    stack: Stack, image_id: str, hosts: tuple[str, str]
) -> None:
    one, two = stack.nodes
    # Without a list, each node runs the images that its owner put there.
    assert "this mesh has no list of images" in mesh(two, "image", "ls").stderr
    until(lambda: read(two, "image", "ls")["by_name"] == [{"name": "lab/tool:1", "nodes": ["node1"]}], "the image name")
    ok(two, "run", "--no-workdir", "--image", "lab/tool:1", "--", "true")
    fails(two, 5, "this mesh has no list of images", "image", "pull", "tool")

    fails(two, 4, "is not on this node's engine", "image", "allow", "tool")
    fails(two, 5, "may not sign the mesh's list of images", "image", "allow", "tool", "--id", image_id)
    allowed = mesh(one, "image", "allow", "tool", "--from", "lab/tool:1")
    assert allowed.returncode == 0 and "from now on nodes run only images on the list" in allowed.stderr
    until(lambda: row(two).get("nodes") == ["node1"], "the image list to arrive")
    assert row(two)["id"] == image_id and row(two)["by"] == "node1" and row(two)["here"] is False
    assert row(one)["here"] is True
    fails(
        two,
        125,
        "image lab/tool:1 is not on the mesh's list",
        "run",
        "--no-workdir",
        "--image",
        "lab/tool:1",
        "--",
        "true",
    )
    fails(one, 5, "not on the mesh's list", "submit", "--no-workdir", "--image", "other", "--", "true")

    # The only node that has it takes no guests, so the other fetches it.
    ok(one, "pause")
    until(
        lambda: mesh(two, "submit", "--no-workdir", "--image", "tool", "--", "true").returncode == 0,
        "the image to be fetchable",
    )
    job = ok(two, "submit", "--no-workdir", "--image", "tool", "--", "sh", "-c", "ls -l /data0; exit 3").strip()
    state = finished(two, job)
    assert state["outcome"]["exit_code"] == 3 and state["attempts"][-1]["node"] == "node2"
    assert str(SIZE) in ok(two, "logs", job)
    texts = [event["text"] for event in read(two, "job", "events")["events"]]
    assert any("image tool is not on this node: it is fetched from others" in text for text in texts)
    assert any("image tool came in" in text for text in texts)
    until(lambda: row(one).get("nodes") == ["node1", "node2"], "both nodes to report the image")
    with client_of(hosts[1]) as client:
        assert [image.id for image in client.images.list()] == [image_id]
        manifest = row(two)["manifest"]
        address = read(two, "image", "registry")["address"]
        again = client.images.pull(f"{address}/any/name", tag=str(manifest))
        assert again.id == image_id, "the engine pulls from the registry of its node"
        client.images.remove(f"{address}/any/name@{manifest}")

    # A fetched image stays while it is in use, at most for the owner's retention time.
    assert "fetched from other nodes: 1 image" in mesh(two, "image", "ls").stderr
    assert read(one, "image", "ls")["fetched"]["images"] == [], "an image put there by the owner is not a fetched one"
    assert read(two, "image", "prune", "--unused", "0")["images"] == [], "a recently used image must stay"
    used = two.where.images / "fetched" / image_id.removeprefix("sha256:")
    os.utime(used, (used.stat().st_mtime - 86_400,) * 2)
    assert read(two, "image", "prune")["images"] == [], "an image unused for one day must stay for 30 days"
    (would,) = read(two, "image", "prune", "--unused", "1h", "--dry-run")["images"]
    assert would["gone"] and would["id"] == image_id and row(two)["here"] is True
    assert "removed; unused for 1d" in ok(two, "image", "prune", "--unused", "1h")
    with client_of(hosts[1]) as client:
        assert client.images.list() == [] and row(two)["here"] is False
    until(lambda: row(one).get("nodes") == ["node1"], "other nodes to know that the image was removed")

    # On their own node, an owner overrides the list.
    ok(two, "image", "deny", "tool")
    assert row(two)["denied_here"] is True
    fails(two, 5, "this node's owner denies image tool", "image", "pull", "tool")
    assert "node2 does not have it" in mesh(one, "image", "push", "tool", "node2").stdout
    ok(two, "image", "allow", "tool", "--here")
    assert row(two)["denied_here"] is False
    ok(two, "image", "deny", "tool")
    job = ok(one, "submit", "--no-workdir", "--image", "tool", "--", "true").strip()
    until(
        lambda: f"its owner denies image tool ({suggestion(one, 'image deny`')})" in ok(one, "why", job),
        "the denial to be shown as a reason",
    )
    ok(one, "image", "deny", "tool", "--mesh")
    assert "is not on the mesh's list" in read(one, "why", job)["explanation"][0]
    ok(one, "cancel", job)
    until(lambda: row(two) == {} or row(two)["allowed"] is False, "the denial to arrive")
    fails(two, 125, "not on the mesh's list", "run", "--no-workdir", "--image", "tool", "--", "true")
    fails(one, 4, "is not on the mesh's list", "image", "deny", "tool", "--mesh")


@pytest.mark.dockerd
@pytest.mark.parametrize("first", [False, True], ids=["to-containerd", "from-containerd"])
def test_image_moves_between_the_image_stores_of_docker(first: bool) -> None:
    """A's job goes on at B, which has the other store and gets the image by the mesh."""
    settings = {"slots": 1, "engines": ["process", "docker"]}
    with dockerd_with_store(first) as one, dockerd_with_store(not first) as two, Stack(2, overrides=settings) as stack:
        for node, engine in zip(stack.nodes, (one, two), strict=True):
            node.within = ("env", f"DOCKER_HOST={engine.host}")
        stack.start_all()
        a, b = stack.nodes
        with client_of(one.host) as client:
            layered_image(client, "lab/tool:1", os.urandom(SIZE), b"small")
        ok(a, "image", "allow", "tool", "--from", "lab/tool:1")
        job = ok(a, "submit", "--no-workdir", "--image", "tool", "--", "sleep", "600").strip()

        def runs_on(node: StackNode) -> bool:
            state = job_state(a, job)
            return state["state"] == "running" and state["attempts"][-1]["node"] == node.nick

        until(lambda: runs_on(a), "the job to run where the image is")
        ok(a, "reclaim", "--grace", "1s", timeout_s=60)
        until(lambda: runs_on(b), "the job to run on the other node")
        assert row(b)["here"] is True
        ok(a, "cancel", job)


@pytest.mark.long
@pytest.mark.dockerd
def test_image_is_prefetched_and_a_start_waiting_for_one_stops_at_once(stack: Stack, hosts: tuple[str, str]) -> None:
    one, two = stack.nodes
    ok(one, "image", "allow", "tool", "--from", "lab/tool:1")
    until(lambda: row(two).get("nodes") == ["node1"], "the image list to arrive")
    ok(one, "pause")
    until(lambda: paused(two, one), "the pause to arrive")
    # The image source is stopped during the transfer: the job reports that it waits for its image, and a reclaim does not wait.
    until(lambda: mesh(one, "image", "pull", "tool").returncode == 0, "the image to be pulled")
    stack_source = one.process
    assert stack_source is not None
    os.kill(stack_source.pid, 19)
    try:
        # Without new processes, which take seconds on a loaded machine: the source soon counts as dead, and nobody has the image.
        job = here(two, "submit", "--no-workdir", "--image", "tool", "--", "sleep", "600").stdout.strip()
        until(lambda: "preparing: image" in str(job_state(two, job).get("detail")), "the job to prepare its image")
        reclaimed = read(two, "status")
        assert reclaimed["guests"] == [job]
        begun = time.monotonic()
        assert here(two, "reclaim", "--grace", "40s").exit_code == 0 and time.monotonic() - begun < 35
        until(
            lambda: job_state(two, job)["attempts"][-1]["reason"].startswith("vacated"),
            "the attempt to be recorded as vacated",
        )
    finally:
        os.kill(stack_source.pid, 18)
    ok(two, "cancel", job)
    ok(two, "lend")
    assert "tool is here" in ok(two, "image", "pull", "tool", timeout_s=60)
    assert ok(one, "image", "push", "tool", "node2", "node1") == "node2 has it\nnode1 has it\n"
    assert read(two, "image", "push", "tool", "node1")["nodes"][0]["here"] is True
    fails(two, 4, "no node called", "image", "push", "tool", "nobody")


@pytest.mark.long
@pytest.mark.dockerd
def test_owner_without_list_rights_allows_an_image_on_their_node(stack: Stack, hosts: tuple[str, str]) -> None:
    one, two = stack.nodes
    with client_of(hosts[1]) as client:
        layered_image(client, "mine:1", b"own")
    ok(one, "image", "allow", "tool", "--from", "lab/tool:1")
    until(lambda: row(two).get("nodes") == ["node1"], "the image list to arrive")
    fails(two, 125, "is not on the mesh's list", "run", "--no-workdir", "--image", "mine:1", "--", "true")
    assert "may not sign" in mesh(two, "image", "allow", "mine:1").stderr
    assert "on this node" in ok(two, "image", "allow", "mine:1", "--here")
    until(
        lambda: mesh(one, "run", "--no-workdir", "--image", "mine:1", "--", "true").returncode == 0,
        "the image to be offered",
    )
    ok(two, "image", "deny", "mine:1")
    until(lambda: "mine:1" not in names(one), "the denial to arrive")
    fails(one, 125, "mine:1", "run", "--no-workdir", "--image", "mine:1", "--", "true")
    # Denials and the list persist across a restart.
    assert two.process is not None
    ok(two, "down", "--now")
    two.process.wait(30)
    stack.start(two)
    until(lambda: mesh(two, "status").returncode == 0, "the restarted daemon to answer")
    assert read(two, "image", "ls")["own"]["denied"] == ["mine:1"] and row(two)["by"] == "node1"


@pytest.mark.parametrize(
    "arguments",
    [
        ("allow", "a b"),
        ("allow", "x", "--id", "sha256:12"),
        ("allow", "x", "--id", "sha256:" + "0" * 64, "--from", "y"),
        ("allow", "*", "--here"),
        ("allow", ""),
        ("deny", "../x"),
        ("deny", "nothing", "--mesh"),
        ("pull", "a\x01b"),
        ("push", "x", "nobody"),
    ],
)
def test_bad_image_arguments_are_refused_with_a_message(shared: Stack, arguments: tuple[str, ...]) -> None:
    done = mesh(shared.nodes[0], "image", *arguments)
    assert done.returncode in {2, 4, 5} and "Traceback" not in done.stderr and done.stderr
    assert read(shared.nodes[0], "image", "ls")["listed"] is False


def test_peers_serve_the_image_list_while_its_signer_is_away() -> None:
    """A node that joins while the founder is away receives the founder's list from others."""
    with Stack(3) as stack:
        founder, kept, fresh = stack.nodes
        identity, trust = Identity.load(founder.where.key), TrustStore(founder.where.genesis.read_bytes())
        signer = Catalogue(founder.where.images, identity, trust, time.time)
        trust.admit_chain(founder.where.chain.read_bytes(), time.time())
        signer.load()
        body = signer.say("tool", Image(b"i" * 32), True, founder.where.chain.read_bytes())
        (path,) = (founder.where.images / "list").iterdir()
        (kept.where.images / "list").mkdir(parents=True)
        (kept.where.images / "list" / path.name).write_bytes(body)
        for node in (kept, fresh):
            stack.start(node)
        for node in (kept, fresh):
            assert node.process is not None
            wait_ready(node.where, node.process)
        assert row(kept)["id"] == f"sha256:{b'i'.hex() * 32}"
        until(lambda: row(fresh), "another node to serve the list")
        assert row(fresh) == {**row(kept), "nodes": []}
        fails(fresh, 5, "not on the mesh's list", "submit", "--no-workdir", "--image", "other", "--", "true")


@pytest.mark.dockerd
async def test_only_listed_images_are_served_and_fetched(stack: Stack, image_id: str) -> None:
    """Send requests of a hostile member: images that are not listed, and malformed requests."""
    one, two = stack.nodes
    ok(one, "image", "allow", "tool", "--from", "lab/tool:1")
    insider = Insider(two, one)
    await insider.peers.open()
    try:
        other, manifest = "ab" * 32, digest_hash(str(row(one)["manifest"]))
        path, first = f"/v1/images/blobs/{manifest.hex()}", encode([0])
        assert (await insider.refused("POST", f"/v1/images/blobs/{other}", first))[0] == 404
        assert (await insider.refused("POST", f"/v1/images/{other}/fetch", b""))[0] == 403
        for wrong in ("zz" * 32, "ab" * 31, manifest.hex().upper(), "..", "%2e%2e"):
            assert (await insider.refused("POST", f"/v1/images/blobs/{wrong}", first))[0] in {400, 403, 404, 413}
        for body in (b"", b"\xc1", *map(encode, ([], [-1], [2**40], [b"0"], [0] * 5000)), os.urandom(3000)):
            assert (await insider.refused("POST", path, body))[0] == 400
        data = await insider.call("POST", path, first)
        assert sha256(data).digest() == manifest
        config = decode_oci(data).blobs[0].hash
        assert digest_text(config) == image_id
        given = await insider.call("POST", f"/v1/images/blobs/{config.hex()}", encode([0, 7, 0]))
        assert given[: len(given) // 2] == given[len(given) // 2 :], "there is no piece 7"
        assert sha256(given[: len(given) // 2]).digest() == config
        ok(one, "image", "deny", "tool")
        assert (await insider.refused("POST", path, first))[0] == 404
    finally:
        await insider.peers.close()
    assert "Traceback" not in one.where.log.read_text()


@pytest.mark.long
@pytest.mark.dockerd
def test_user_builds_an_image_and_runs_it_on_their_other_node(
    stack: Stack, hosts: tuple[str, str], image_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image comes from a Dockerfile; no admitter signs it, and the mesh still has no list afterwards."""
    one, two = stack.nodes
    monkeypatch.setenv("DOCKER_HOST", hosts[0])
    project = tmp_path / "My project"
    project.mkdir()
    (project / "Dockerfile").write_text("FROM lab/tool:1\nCOPY words /words\n")
    (project / "words").write_text("built here\n")
    ok(one, "pause")
    until(lambda: paused(two, one), "the other node to know that this one is paused")
    order = ("--no-workdir", "--build", str(project), "--", "cat", "/words")
    done = mesh(one, "submit", *order)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    state = finished(two, job)
    assert state["outcome"]["kind"] == "done" and state["attempts"][-1]["node"] == "node2"
    assert ok(two, "logs", job) == "built here\n"
    (alias,) = [one["alias"] for one in read(two, "image", "ls")["images"]]
    assert alias.startswith(f"@{getpass.getuser()}/my-project:") and f"image {alias}" in done.stderr
    assert read(two, "image", "ls")["listed"] is False
    with client_of(hosts[0]) as client:
        assert not [tag for image in client.images.list() for tag in image.tags if "mesh-build" in tag]
    fails(one, 5, "only a node of user nobody may sign", "image", "allow", "@nobody/x", "--from", "lab/tool:1")
    fails(one, 5, "is not on the mesh's list", "submit", "--no-workdir", "--image", "@nobody/x", "--", "true")
    (project / "Dockerfile").write_text("FROM lab/tool:1\nCOPY nothing /x\n")
    fails(one, 1, "build` failed with exit code 1; its output is above", "submit", *order)

    # The owner comes first.
    ok(two, "image", "deny", alias)
    waits = ok(one, "submit", "--no-workdir", "--image", alias, "--", "true").strip()
    until(lambda: f"its owner denies image {alias}" in ok(one, "why", waits), "the denial to be the reason")
    ok(one, "cancel", waits)
