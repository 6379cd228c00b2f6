"""A container engine's own socket, on the event loop: what containers write and how they end, followed without a thread each.

Docker's API of version 1.41, which Podman speaks too. The SDK does what is asked and answered at once; what may last as long as a
job is here.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import msgspec

HEADER = 8  # bytes before each piece of output: its stream, three of nothing, its length (Docker Engine API, attach)
AGAIN_S = 1.0  # until an engine that has gone away is asked once more; ours


class Ended(msgspec.Struct, frozen=True):
    """The engine's answer to a wait."""

    code: int = msgspec.field(name="StatusCode")


class _Made(msgspec.Struct):
    id: str = msgspec.field(name="Id")


class _Executed(msgspec.Struct):
    code: int | None = msgspec.field(name="ExitCode")


class NoContainer(Exception):
    """The engine does not know it (any more)."""


class EngineSocket:
    def __init__(self, path: str) -> None:
        self.path = path
        self._session: aiohttp.ClientSession | None = None

    async def attach(self, container: str) -> "Output":
        """What it will write. Attached before it starts, nothing is missed. OSError or aiohttp.ClientError if that cannot be."""
        address = f"http://engine/containers/{container}/attach?stream=1&stdout=1&stderr=1"
        response = await self._opened().post(address)
        if response.status != 200:
            text = (await response.text())[:200]
            raise OSError(f"HTTP {response.status}: {text}")
        return Output(response)

    async def ended(self, container: str) -> int:
        """Its exit status, once it has one; NoContainer if it is removed. An engine that goes away is asked again."""
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
        """Whether the engine is there."""
        try:
            async with asyncio.timeout(within_s), self._opened().get("http://engine/_ping") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):  # which a timeout is
            return False

    async def execute(self, container: str, argv: tuple[str, ...], path: str) -> tuple[int, str]:
        """Run a program inside, looked for in `path`: its exit code and what it said. 127 if it is not there; OSError if nothing
        could be run."""
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
            said = b"".join([piece async for piece in Output(response).pieces()])
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
    """Pieces of both streams in the order in which the engine had them."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    def close(self) -> None:
        self._response.close()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Until the container has ended, or the engine has gone away."""
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
    """In words, where it is a common one."""
    text = str(error)
    for sign, words in (
        ("FileNotFoundError", "its socket does not exist"),
        ("PermissionError", "this user may not use its socket: add it to the group docker"),
        ("ConnectionRefusedError", "its socket refuses: is dockerd running?"),
    ):
        if sign in text:
            return words
    return text[:200]
