"""Calls to the container engine's socket on the event loop: output and exits of containers, without a thread for each.

It speaks version 1.41 of Docker's API, as does Podman. Short calls go through the SDK; calls that may last as long as a job are
here.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import aiohttp
import msgspec

from membership.malformed import MALFORMED
from mesh.util.processes import Process, peer_of, process_of

HEADER = 8  # bytes before each piece of output: stream, three unused, length (Docker Engine API, attach)
MOST_BYTES = 64 << 10  # of what a program says in a container, where guests can write to it too (own choice)
ASK_S = 10.0  # timeout of a connection
AGAIN_S = 1.0  # between retries while the engine is away (own choice)


class Ended(msgspec.Struct, frozen=True):
    """The engine's answer to a wait for the end of a container."""

    code: int = msgspec.field(name="StatusCode")


class _Made(msgspec.Struct):
    id: str = msgspec.field(name="Id")


class _Executed(msgspec.Struct):
    code: int | None = msgspec.field(name="ExitCode")


class _Problem(msgspec.Struct):
    message: str


class NoContainer(Exception):
    """The engine does not know the container, or no longer."""


def socket_path() -> str:
    """Return the engine's socket path. OSError if the engine is on another machine: its guests could not be watched or killed."""
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not host.startswith("unix://"):
        raise OSError(f"DOCKER_HOST is {host}: it must be the socket of an engine on this machine (unix://...)")
    return host.removeprefix("unix://")


def engine_process() -> Process | None:
    """Return the process that listens at the engine's socket; None if it has just ended. OSError if there is none."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ASK_S)
        client.connect(socket_path())
        return process_of(peer_of(client)[0])


class EngineSocket:
    """A client of the engine's Unix socket at `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._session: aiohttp.ClientSession | None = None

    async def attach(self, container: str) -> "Output":
        """Return the container's output; attach before it starts to miss nothing. OSError or aiohttp.ClientError on failure."""
        address = f"http://engine/containers/{container}/attach?stream=1&stdout=1&stderr=1"
        response = await self._opened().post(address)
        if response.status != 200:
            text = await response.text()
            with contextlib.suppress(*MALFORMED):
                text = msgspec.json.decode(text, type=_Problem).message
            raise OSError(f"HTTP {response.status}: {text[:1000]}")
        return Output(response)

    async def ended(self, container: str) -> int:
        """Wait for the exit status. NoContainer if the container is removed. Retries while the engine is away."""
        while True:
            try:
                async with self._opened().post(f"http://engine/containers/{container}/wait") as response:
                    if response.status == 404:
                        raise NoContainer
                    if response.status == 200:
                        return msgspec.json.decode(await response.read(), type=Ended).code
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
                pass
            await asyncio.sleep(AGAIN_S)

    async def answers(self, within_s: float) -> bool:
        """Return whether the engine answers a ping."""
        try:
            async with asyncio.timeout(within_s), self._opened().get("http://engine/_ping") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return False

    async def execute(self, container: str, argv: tuple[str, ...], path: str) -> tuple[int, str]:
        """Run a program inside a container, looked up in `path`; return its exit code and output.

        The code is 127 if the program does not exist. OSError if nothing could be run, or if the output is endless.
        """
        order = {"Cmd": list(argv), "Env": [f"PATH={path}"], "AttachStdout": True, "AttachStderr": True}
        async with self._opened().post(f"http://engine/containers/{container}/exec", json=order) as response:
            if response.status != 201:
                raise OSError(f"HTTP {response.status}: {(await response.text())[:200]}")
            key = msgspec.json.decode(await response.read(), type=_Made).id
        async with self._opened().post(f"http://engine/exec/{key}/start", json={"Detach": False}) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                if any(sign in text for sign in ("not found", "no such file", "permission denied")):
                    return 127, text
                raise OSError(f"HTTP {response.status}: {text}")
            said = bytearray()
            async for piece in Output(response).pieces():
                said += piece
                if len(said) > MOST_BYTES:
                    raise OSError(f"{argv[0]} writes more than {MOST_BYTES} bytes")
        async with self._opened().get(f"http://engine/exec/{key}/json") as response:
            code = msgspec.json.decode(await response.read(), type=_Executed).code
        return 1 if code is None else code, said.decode(errors="replace")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(self.path, limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._session


class Output:
    """Output of a container, both streams in the order in which the engine received them."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    def close(self) -> None:
        self._response.close()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield output until the container ends or the engine goes away."""
        rest, left = b"", 0
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            while data := await self._response.content.readany():
                rest += data
                found = bytearray()
                while rest and (left or len(rest) >= HEADER):
                    if not left:
                        left = int.from_bytes(rest[4:HEADER], "big")
                        rest = rest[HEADER:]
                        continue
                    found += rest[:left]
                    rest, left = rest[left:], max(0, left - len(rest))
                if found:
                    yield bytes(found)


def why_silent(error: Exception) -> str:
    """Return why an engine does not answer, in plain words for common errors."""
    text = str(error)
    for sign, words in (
        ("FileNotFoundError", "its socket does not exist"),
        ("PermissionError", "this user may not use its socket: add it to the group docker"),
        ("ConnectionRefusedError", "its socket refuses: is dockerd running?"),
    ):
        if sign in text:
            return words
    return text[:200]
