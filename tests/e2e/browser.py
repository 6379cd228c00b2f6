"""Headless Chromium, driven by its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = "chromium"
WAIT_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root cannot use the sandbox; the pages are trusted
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--window-size=1200,900",
    "--remote-debugging-port=0",
)


class Page:
    """One page. The context manager ends the browser and removes its files on exit."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._asked = 0
        self.events: list[dict[str, Any]] = []  # events of the enabled domains, in order of arrival
        self._profile = Path(tempfile.mkdtemp(prefix="mesh-browser-"))

    async def __aenter__(self) -> "Page":
        self._process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *FLAGS,
            f"--user-data-dir={self._profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self._profile), "HOME": str(self._profile)},  # Chromium writes to both
        )
        self._session = aiohttp.ClientSession()
        try:
            port = (await self._until(self._port, "the browser to start")).split()[0]
            async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [target for target in await answer.json() if target["type"] == "page"]
            self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=1 << 26)
            await self.call("Page.enable")
            await self.call("Page.navigate", url=self._address)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(10):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    async def _port(self) -> str:
        assert self._process.returncode is None, f"the browser ended: {self._process.returncode}"
        path = self._profile / "DevToolsActivePort"
        return path.read_text() if path.exists() else ""

    async def call(self, method: str, **parameters: Any) -> Any:
        self._asked += 1
        number = self._asked
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        async with asyncio.timeout(WAIT_S):
            while True:
                answer = await self._socket.receive_json()
                if "method" in answer:
                    self.events.append(answer)
                elif answer.get("id") == number:
                    assert "error" not in answer, answer
                    return answer["result"]

    async def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        told = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, script: str, what: str) -> Any:
        """Wait until the expression is true and return its value. An error in it counts as false."""
        plain = "value instanceof Element ? true : value"  # DevTools cannot return an element by value
        look = f"(() => {{ try {{ const value = {script}; return {plain} }} catch (error) {{ return false }} }})()"
        return await self._until(lambda: self.run(look), what)

    async def until_async(self, script: str, what: str) -> Any:
        """Like `until`, for an asynchronous expression."""
        return await self._until(lambda: self.run(f"(async () => {script})()"), what)

    async def _until(self, look: Callable[[], Awaitable[Any]], what: str) -> Any:
        async with asyncio.timeout(WAIT_S):
            while not (value := await look()):
                await asyncio.sleep(0.1)
        assert value, what
        return value

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, modifiers: int = 0) -> None:
        """`modifiers`: 8 is Shift."""
        code, char = {"Enter": (13, "\r")}[key]
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
                text=char if kind == "keyDown" else "",
            )

    async def click(self, selector: str) -> None:
        """Click the center of the element with the mouse."""
        place = await self.until(
            f"(() => {{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
            " return r.width && [r.x + r.width / 2, r.y + r.height / 2] })()",
            f"{selector} to be shown",
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    async def picture(self) -> bytes:
        import base64

        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])
