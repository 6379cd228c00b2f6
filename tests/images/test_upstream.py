"""Public registries as a source: a real docker-registry, one that wants a token, and registries that lie."""

import asyncio
import os
import re
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from mesh.images import blobs as blobs_module
from mesh.images import outside as outside_module
from mesh.images.blobs import BlobStore, FetchFailed
from mesh.images.fetcher import BlobFetcher, Origin
from mesh.images.oci import MAX_MANIFEST_BYTES
from mesh.images.registry import RegistryServer
from mesh.images.upstream import Upstream
from tests.docker_registry import docker_registry
from tests.images.samples import manifest_of
from tests.images.test_clients import run
from tests.rpc.nodes import client_of
from tests.tls_site import site

CONFIG, LAYER = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}', os.urandom(3 << 20)
MANIFEST = manifest_of(CONFIG, [LAYER])
CONTENTS = (MANIFEST, CONFIG, LAYER)


def digest(data: bytes) -> bytes:
    return sha256(data).digest()


@pytest.fixture
async def brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Awaitable[BlobStore]]]:
    """Return a function that has an image fetched as a client asks for it, from the registries of an owner."""
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 0)
    peers = await client_of({})

    async def bring(name: str, *registries: str, contents: tuple[bytes, ...] = CONTENTS) -> BlobStore:
        store = BlobStore(tmp_path / "node", 1 << 40)
        upstream = Upstream(registries)
        places = upstream.places([name])

        def origin(digest: bytes, asked: str) -> Origin:
            size, is_manifest = store.described(digest) or (None, True)
            fetch = partial(upstream.bring, store, places, digest, size, is_manifest)
            return Origin({}, fetch if places else None)

        fetcher = BlobFetcher(b"m" * 32, store, peers, "/v1/images/blobs", origin, lambda *_: None)
        for data in contents:
            await fetcher.bring(digest(data), name)
            assert store.path(digest(data)).read_bytes() == data
            store.peek(digest(data))
        return store

    yield bring
    await peers.close()


@asynccontextmanager
async def registry(answer: Handler) -> AsyncIterator[str]:
    """Serve these answers; yield the address."""
    app = web.Application()
    app.add_routes([web.get("/{path:.*}", answer)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.podman
async def test_image_comes_from_registry_that_owner_allows(
    brought: Callable[..., Awaitable[BlobStore]], tmp_path: Path
) -> None:
    if shutil.which("docker-registry") is None or shutil.which("skopeo") is None:
        pytest.skip("docker-registry or skopeo is not installed")
    here = tmp_path / "here"
    here.mkdir()
    (here / "version").write_text("Directory Transport Version: 1.1\n")
    (here / "manifest.json").write_bytes(MANIFEST)
    for data in (CONFIG, LAYER):
        (here / sha256(data).hexdigest()).write_bytes(data)
    with docker_registry() as address:
        place = f"docker://{address}/lab/tool:1"
        code, told = await run("skopeo", "copy", "--preserve-digests", "--dest-tls-verify=false", f"dir:{here}", place)
        assert code == 0, told
        with pytest.raises(FetchFailed, match="nobody has it now"):
            await brought("lab/tool:1")
        with pytest.raises(FetchFailed, match="it answers 404"):
            await brought("lab/other:1", address)
        await brought("lab/tool:1", address)


async def test_registry_must_have_a_certificate_that_this_machine_trusts(
    brought: Callable[..., Awaitable[BlobStore]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: resolve("127.0.0.1", *rest, **named))
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONFIG)}\r\nConnection: close\r\n\r\n"
    async with site(tmp_path, answer=head.encode() + CONFIG) as served:
        with pytest.raises(FetchFailed, match="certificate verify failed"):
            await brought("lab/tool:1", served.where, contents=(CONFIG,))
        assert served.heads == []
        monkeypatch.setenv("SSL_CERT_FILE", str(served.ca))
        await brought("lab/tool:1", served.where, contents=(CONFIG,))


async def test_registry_gives_token_to_anybody(brought: Callable[..., Awaitable[BlobStore]], tmp_path: Path) -> None:
    """The upstream is another node's registry."""
    store = BlobStore(tmp_path / "other", 1 << 40)
    for data in CONTENTS:
        store.keep(data)
    allowed = {digest(MANIFEST), digest(CONFIG)}

    async def bring(digest: bytes, name: str) -> None:
        """It has all."""

    server = RegistryServer(store, tmp_path / "port", allowed.__contains__, lambda alias: None, bring)
    await server.open(0)
    try:
        with pytest.raises(FetchFailed, match="it answers 404"):
            await brought("lab/tool@sha256:" + "0" * 64, server.access.address)
        allowed.add(digest(LAYER))
        await brought("lab/tool@sha256:" + "0" * 64, server.access.address)
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ("lies", "is not what its hash says"),
        ("sends without end", f"it sends over {len(LAYER)} bytes"),
        ("sends a manifest without end", f"it sends over {MAX_MANIFEST_BYTES} bytes"),
        ("drips", "it does not answer"),
        ("ends early", "not what its hash says|ContentLengthError|transfer"),
        ("wants a password", "it wants a password"),
        ("wants a token of a stranger", "it wants a password"),
    ],
)
async def test_registry_that_lies_is_an_error(
    brought: Callable[..., Awaitable[BlobStore]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    manner: str,
    words: str,
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if manner.startswith("wants"):
            kind = "Basic" if manner == "wants a password" else "Bearer"
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": f'{kind} realm="http://10.0.0.1/token"'})
        data = next(one for one in CONTENTS if digest(one).hex() in request.path)
        if data == MANIFEST and manner != "sends a manifest without end":
            return web.Response(body=data)
        response = web.StreamResponse(headers={"Content-Length": str(len(data))} if manner == "ends early" else {})
        await response.prepare(request)
        if manner == "lies":
            await response.write(data[:-1] + bytes([data[-1] ^ 1]))
        elif manner == "ends early":
            await response.write(data[:10])
            assert request.transport is not None
            request.transport.close()
        else:
            while True:
                await response.write(b"drop" if manner == "drips" else bytes(1 << 20))
                await asyncio.sleep(0.05 if manner == "drips" else 0)
        return response

    if manner == "drips":
        monkeypatch.setattr(outside_module, "IDLE_S", 0.2)
        monkeypatch.setattr(outside_module, "SLOWEST_BPS", 8 << 20)
    async with registry(answer) as address:
        with pytest.raises(FetchFailed, match=words):
            await brought("lab/tool:1", address, contents=(MANIFEST, LAYER))
    assert not list((tmp_path / "node" / "blobs").glob("*.part"))


@pytest.mark.parametrize("by", ["redirect", "token"])
async def test_registry_sends_node_only_to_named_registries_or_to_public_addresses(
    brought: Callable[..., Awaitable[BlobStore]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    found = CONFIG if by == "redirect" else b'{"token":"secret"}'
    targets: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/token":
            return web.Response(body=b'{"token":"secret"}')
        if request.headers.get("Authorization") != "Bearer secret":
            realm = targets[-1] if by == "token" else f"http://{address}/token"
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": f'Bearer realm="{realm}",service="images"'})
        if by == "redirect":
            raise web.HTTPFound(targets[-1])
        return web.Response(body=CONFIG)

    async def sent(target: str, *named: str) -> None:
        targets.append(target)
        await brought("lab/tool:1", address, *named, contents=(CONFIG,))

    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(found)}\r\n\r\n"
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: resolve("127.0.0.1", *rest, **named))
    async with registry(answer) as address, site(tmp_path, answer=head.encode() + found) as other:
        monkeypatch.setenv("SSL_CERT_FILE", str(other.ca))
        mapped = str(ip_address("::ffff:10.0.0.1"))  # Python 3.14 writes it in another way than those before
        for target in (f"https://127.0.0.1:{other.port}/x", f"https://{other.where}/x", "https://[::ffff:10.0.0.1]/"):
            with pytest.raises(FetchFailed, match=rf"(127\.0\.0\.1|{re.escape(mapped)}) is not public"):
                await sent(target)
        for target in (f"http://127.0.0.1:{other.port}/x", f"http://{address}@{other.where}/x", "http://10.0.0.1/"):
            with pytest.raises(FetchFailed, match=r"an address without TLS|it wants a password"):
                await sent(target)
        assert not other.connections
        monkeypatch.setattr(outside_module, "checked", lambda answers: answers)
        await sent(f"https://{other.where}/x")
        assert other.connections == 1 and b"secret" not in other.heads[0], "the token is for the registry"
        monkeypatch.undo()
        monkeypatch.setattr(blobs_module, "SPARE_BYTES", 0)
        monkeypatch.setenv("SSL_CERT_FILE", str(other.ca))
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: resolve("127.0.0.1", *rest, **named))
        (tmp_path / "node").rename(tmp_path / "before")
        await sent(f"https://{other.where}/x", other.where)
        assert other.connections == 2 and b"secret" not in other.heads[1], "the owner has named that one, too"


async def test_registry_may_redirect_to_itself_but_not_without_end(
    brought: Callable[..., Awaitable[BlobStore]],
) -> None:
    left = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal left
        left -= 1
        if left >= 0:
            raise web.HTTPTemporaryRedirect(f"/at/{left}")
        return web.Response(body=CONFIG)

    async with registry(answer) as address:
        left = outside_module.REDIRECTS + 1
        with pytest.raises(FetchFailed, match="it redirects more than"):
            await brought("lab/tool:1", address, contents=(CONFIG,))
        left = outside_module.REDIRECTS
        await brought("lab/tool:1", address, contents=(CONFIG,))


def test_alias_names_its_registry() -> None:
    upstream = Upstream(["docker.io", "ghcr.io", "127.0.0.1:5000"])
    every = [("docker.io", "library/python"), ("ghcr.io", "python"), ("127.0.0.1:5000", "python")]
    assert upstream.places(["python:3.12"]) == every
    assert upstream.places(["ghcr.io/lab/tool:1", "ghcr.io/lab/tool@sha256:" + "0" * 64]) == [("ghcr.io", "lab/tool")]
    assert upstream.places(["docker.io/python"]) == [("docker.io", "library/python")]
    assert upstream.places(["127.0.0.1:5000/a/b:c"]) == [("127.0.0.1:5000", "a/b")]
    assert upstream.places(["quay.io/x/y", "localhost/x", "127.0.0.1:5001/x", "other:5000/x", ""]) == []
    assert upstream.places(["@ada/python", "@ada@uni.edu/x:1"]) == [], "images of users are in no public registry"
    assert Upstream([]).places(["python"]) == []
