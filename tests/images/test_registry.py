"""The registry beyond the protocol (test_conformance.py): what it refuses, its bounds, and who may do what."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import aiohttp
import pytest

from mesh.images import blobs as blobs_module
from mesh.images import registry as registry_module
from mesh.images.blobs import BlobStore
from mesh.images.oci import MANIFEST, MAX_MANIFEST_BYTES, digest_hash
from mesh.images.registry import HOST, RegistryServer
from mesh.rpc import loopback
from mesh.util.errors import MeshError
from mesh.util.processes import Process
from tests.images.samples import digest_of, index_of, manifest_of

CONFIG, LAYER = b'{"rootfs":{}}', os.urandom(3 << 20)
BODY = manifest_of(CONFIG, [LAYER])


class Client:
    """A client with the password, without it, or with a wrong one."""

    def __init__(self, server: RegistryServer, session: aiohttp.ClientSession) -> None:
        self.server, self._session = server, session
        self.headers = {"Authorization": f"Bearer {server.access.password}"}

    async def ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        owner: bool = True,
    ) -> tuple[int, dict[str, str], bytes]:
        every = {**(self.headers if owner else {}), **(headers or {})}
        url = path if path.startswith("http") else f"http://{self.server.access.address}{path}"
        async with self._session.request(method, url, data=data, headers=every) as response:
            body = await response.read()
            if response.status >= 400 and method != "HEAD" and (body or response.status != 416):
                (error,) = json.loads(body)["errors"]
                assert error["code"].isupper() and error["message"]
            return response.status, dict(response.headers), body

    async def push(self, data: bytes, name: str = "lab/tool") -> int:
        status, headers, _ = await self.ask("POST", f"/v2/{name}/blobs/uploads/")
        assert status == 202
        status, headers, _ = await self.ask("PUT", f"{headers['Location']}?digest={digest_of(data)}", data)
        return status

    async def push_image(self, name: str = "lab/tool", tag: str = "1") -> None:
        assert await self.push(CONFIG, name) == await self.push(LAYER, name) == 201
        status, headers, _ = await self.ask("PUT", f"/v2/{name}/manifests/{tag}", BODY, {"Content-Type": MANIFEST})
        assert status == 201 and headers["Docker-Content-Digest"] == digest_of(BODY)


class Campus:
    def __init__(self) -> None:
        self.allowed: set[bytes] = set()
        self.aliases: dict[str, bytes] = {}
        self.asked: list[tuple[bytes, str]] = []

    async def bring(self, digest: bytes, name: str) -> None:
        self.asked.append((digest, name))


@pytest.fixture
def campus() -> Campus:
    return Campus()


@pytest.fixture
async def client(tmp_path: Path, campus: Campus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 0)
    store = BlobStore(tmp_path, 1 << 40)
    server = RegistryServer(store, tmp_path / "port", campus.allowed.__contains__, campus.aliases.get, campus.bring)
    await server.open(0)
    async with aiohttp.ClientSession() as session:
        yield Client(server, session)
    await server.close()


async def test_wrong_or_abandoned_upload_leaves_nothing(client: Client, tmp_path: Path) -> None:
    for wrong in (digest_of(b"other"), "sha256:12", "sha512:" + "0" * 128, "", "../../key"):
        place = (await client.ask("POST", "/v2/x/blobs/uploads/"))[1]["Location"]
        assert (await client.ask("PUT", f"{place}?digest={wrong}", CONFIG))[0] == 400
        await client.ask("DELETE", place)
    place = (await client.ask("POST", "/v2/x/blobs/uploads/"))[1]["Location"]
    assert (await client.ask("PATCH", place, CONFIG))[0] == 202 and list((tmp_path / "blobs").iterdir())
    assert (await client.ask("DELETE", place))[0] == 204 and (await client.ask("DELETE", place))[0] == 404
    assert not list((tmp_path / "blobs").iterdir())


async def test_uploads_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(await client.ask("POST", "/v2/x/blobs/uploads/"))[0] for _ in range(65)]
    assert answers == [*[202] * 64, 429]
    for upload in client.server._uploads.values():
        upload.busy = True
    monkeypatch.setattr(registry_module, "UPLOAD_IDLE_S", -1)
    assert (await client.ask("POST", "/v2/x/blobs/uploads/"))[0] == 429, (
        "an upload that is being written is not abandoned"
    )
    for upload in client.server._uploads.values():
        upload.busy = False
    assert (await client.ask("POST", "/v2/x/blobs/uploads/"))[0] == 202, "abandoned ones make room"


async def test_names_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "MAX_TAGS", 2)
    for tag in ("1", "2"):
        await client.push_image(tag=tag)
    assert (await client.ask("PUT", "/v2/lab/tool/manifests/3", BODY))[0] == 429
    assert (await client.ask("PUT", "/v2/lab/tool/manifests/2", BODY))[0] == 201, "a known name may mean something else"


async def test_manifest_is_taken_only_if_it_is_valid_and_its_blobs_are_here(client: Client) -> None:
    path = "/v2/lab/tool/manifests/1"
    assert (await client.ask("PUT", path, BODY))[0] == 400, "its blobs are missing"
    assert await client.push(CONFIG) == 201
    assert (await client.ask("PUT", path, BODY))[0] == 400, "one of them is missing"
    await client.push_image()
    assert (await client.ask("PUT", f"/v2/lab/tool/manifests/{digest_of(BODY)}", BODY + b" "))[0] == 400
    assert (await client.ask("PUT", "/v2/lab/tool/manifests/-no-tag", BODY))[0] == 400
    deep = b'{"schemaVersion":2,"config":' + b"[" * 100_000
    for wrong in (b"", b"[]", b'{"schemaVersion":1}', os.urandom(300), deep, BODY.replace(b'"size": ', b'"size": -')):
        assert (await client.ask("PUT", path, wrong))[0] == 400, wrong[:40]
    assert (await client.ask("PUT", path, bytes(MAX_MANIFEST_BYTES + 1)))[0] == 413
    assert (await client.ask("GET", path))[2] == BODY
    foreign = index_of(riscv64=manifest_of(b"x", ()))
    assert (await client.ask("PUT", "/v2/lab/tool/manifests/2", foreign))[0] == 400
    index = index_of(amd64=BODY, riscv64=manifest_of(b"x", ()))
    assert (await client.ask("PUT", "/v2/lab/tool/manifests/2", index))[0] == 201, "an engine pushes one machine's"
    for name in ("Upper", "a//b", "a/../b", "-a", "a" * 256):
        assert (await client.ask("GET", f"/v2/{name}/manifests/1"))[0] in {400, 404}


async def test_without_password_only_allowed_images_are_pulled(client: Client, campus: Campus) -> None:
    await client.push_image()
    blob, by_tag = f"/v2/any/blobs/{digest_of(LAYER)}", "/v2/lab/tool/manifests/1"
    place = (await client.ask("POST", "/v2/x/blobs/uploads/"))[1]["Location"]
    for headers in (
        {},
        {"Authorization": "Bearer anonymous"},
        {"Authorization": "Basic !!"},
        {"Authorization": "Basic YTpi"},
    ):
        for path in (blob, by_tag, "/v2/lab/tool/tags/list"):
            assert (await client.ask("GET", path, headers=headers, owner=False))[0] == 404
        for method, path in (
            ("POST", "/v2/x/blobs/uploads/"),
            ("PATCH", place),
            ("PUT", f"{place}?digest={digest_of(b'')}"),
            ("GET", place),
            ("DELETE", place),
            ("PUT", by_tag),
        ):
            status, answer, _ = await client.ask(method, path, b"", headers, owner=False)
            assert status == 401 and answer["WWW-Authenticate"].startswith('Bearer realm="http://127.0.0.1:')
    assert not campus.asked, "nobody else makes this node fetch"
    campus.allowed |= {digest_hash(digest_of(LAYER)), digest_hash(digest_of(BODY))}
    assert (await client.ask("GET", blob, owner=False))[2] == LAYER
    campus.aliases["pytorch"] = digest_hash(digest_of(BODY))
    assert (await client.ask("GET", "/v2/pytorch/manifests/latest", owner=False))[2] == BODY


async def test_tokens_follow_password(client: Client) -> None:
    status, headers, _ = await client.ask("GET", "/v2/", owner=False)
    assert status == 401 and "/token" in headers["WWW-Authenticate"]
    status, _, body = await client.ask("GET", "/token?service=campus-mesh", owner=False)
    nobody = {"Authorization": f"Bearer {json.loads(body)['token']}"}
    assert status == 200 and (await client.ask("GET", "/v2/", headers=nobody))[0] == 200
    right = aiohttp.encode_basic_auth("mesh", client.server.access.password)
    body = (await client.ask("GET", "/token", headers={"Authorization": right}))[2]
    assert json.loads(body)["token"] == client.server.access.password
    wrong = aiohttp.encode_basic_auth("mesh", "wrong")
    assert (await client.ask("GET", "/token", headers={"Authorization": wrong}))[0] == 401
    assert (await client.ask("GET", "/v2/", headers={"Authorization": "Bearer wrong"}))[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-origin"},
    ],
)
async def test_web_pages_are_refused(client: Client, headers: dict[str, str]) -> None:
    assert (await client.ask("GET", "/v2/", headers=headers))[0] == 403
    assert (await client.ask("OPTIONS", "/v2/", headers=headers))[0] in {403, 405}
    assert (await client.ask("GET", "/v2/"))[0] == 200


async def test_port_is_kept_and_only_loopback_listens(tmp_path: Path, campus: Campus) -> None:
    def server() -> RegistryServer:
        store = BlobStore(tmp_path, 1)
        return RegistryServer(store, tmp_path / "port", campus.allowed.__contains__, campus.aliases.get, campus.bring)

    one = server()
    await one.open(0)
    assert one.access.address == f"127.0.0.1:{one.port}"
    two = server()
    with pytest.raises(MeshError, match="registry_port"):
        await two.open(one.port)
    await two.open(0)
    assert two.port != one.port and two.access.password != one.access.password
    kept = two.port
    for each in (one, two):
        await each.close()
    again = server()
    await again.open(0)
    assert again.port == kept
    await again.close()


@pytest.mark.parametrize("kept", ["70000", "-5", "", "no number"])
async def test_damaged_note_of_a_port_holds_up_no_start(tmp_path: Path, campus: Campus, kept: str) -> None:
    (tmp_path / "port").write_text(kept)
    store = BlobStore(tmp_path, 1)
    server = RegistryServer(store, tmp_path / "port", campus.allowed.__contains__, campus.aliases.get, campus.bring)
    await server.open(0)
    assert int((tmp_path / "port").read_text()) == server.port > 0
    await server.close()


async def test_end_of_the_registry_ends_its_uploads(client: Client, tmp_path: Path) -> None:
    place = (await client.ask("POST", "/v2/x/blobs/uploads/"))[1]["Location"]
    assert (await client.ask("PATCH", place, CONFIG))[0] == 202 and list((tmp_path / "blobs").iterdir())
    await client.server.close()
    assert not list((tmp_path / "blobs").iterdir())


async def test_registry_listens_once_in_the_network_of_an_engine(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, engine, later = Process(os.getpid(), 1), Process(7, 1), Process(7, 2)
    entered: list[Process] = []

    def listen(process: Process, port: int) -> socket.socket:
        assert port == client.server.port
        entered.append(process)
        return socket.create_server((HOST, 0))

    monkeypatch.setattr(registry_module, "listen_in", listen)
    monkeypatch.setattr(registry_module, "has_own_network", lambda pid: pid == 7)
    await client.server.let_in(own)
    assert not entered, "it is there already"
    await asyncio.gather(*(client.server.let_in(engine) for _ in range(3)))
    await client.server.let_in(later)
    assert entered == [engine, later], "an engine that has started again has a new network"


def test_samples_have_their_digests() -> None:
    assert digest_hash(digest_of(CONFIG)) == sha256(CONFIG).digest()


def request_of(client: Client, line: str, rest: str = "\r\n") -> bytes:
    host = f"{HOST}:{client.server.port}"
    return f"{line} HTTP/1.1\r\nHost: {host}\r\nAuthorization: {client.headers['Authorization']}\r\n{rest}".encode()


async def said(client: Client, request: bytes) -> bytes:
    """Return the first line of the answer; empty if the connection is closed without one."""
    reader, writer = await asyncio.open_connection(HOST, client.server.port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.readline(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_connections_are_few(client: Client) -> None:
    base = request_of(client, "GET /v2/")
    others = [await asyncio.open_connection(HOST, client.server.port) for _ in range(64)]
    assert await said(client, base) == b""
    for _, writer in others:
        writer.close()
    async with asyncio.timeout(20):
        while b" 200 " not in await said(client, base):
            await asyncio.sleep(0.01)


async def test_client_that_sends_half_a_body_is_told(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "SILENT_S", 0.2)
    place = (await client.ask("POST", "/v2/x/blobs/uploads/"))[1]["Location"]
    for line in ("PUT /v2/lab/tool/manifests/1", f"PATCH {place}"):
        assert b" 408 " in await said(client, request_of(client, line, "Content-Length: 10\r\n\r\n12345"))


async def test_client_that_reads_nothing_is_closed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    await client.push_image()
    monkeypatch.setattr(loopback, "SILENT_S", 0.2)
    monkeypatch.setattr(client.server._server, "most", 2)  # the first is this client's, which it keeps for 15 s
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect((HOST, client.server.port))
        silent.sendall(request_of(client, f"GET /v2/x/blobs/{digest_of(LAYER)}"))
        base = request_of(client, "GET /v2/")
        assert await said(client, base) == b""
        async with asyncio.timeout(10):
            while b" 200 " not in await said(client, base):
                await asyncio.sleep(0.01)
