"""A fake daemon that replays recorded answers by HTTP over a real unix socket."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

ANSWERS = Path(__file__).with_name("answers.json")


def recorded() -> dict[str, Any]:
    """Return the recorded answers by path, of one node of three with two GPUs."""
    answers: dict[str, Any] = json.loads(ANSWERS.read_text())
    return answers


class Recorded:
    """A fake daemon. Tests may change `answers` between two looks; `orders` lists the received paths and bodies."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.answers = recorded()
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket_path)).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            self.socket_path.unlink(missing_ok=True)

    async def _answer(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            body = await request.json()
            self.orders.append((request.path, body))
            return web.json_response(self._ordered(request.path, body))
        if request.path.endswith("/log"):
            return web.Response(body=self.answers["log"].encode())
        if request.path not in self.answers:
            return web.json_response({"error": f"no {request.path} was recorded", "exit_code": 4}, status=404)
        answer = self.answers[request.path]
        if request.path == "/v1/events":
            after = int(request.query.get("after", "0"))
            answer = {**answer, "events": [event for event in answer["events"] if event["id"] > after]}
        return web.json_response(answer)

    def _ordered(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status = self.answers["/v1/status"]
        if path == "/v1/reclaim" and body.get("dry_run"):
            cost: dict[str, Any] = self.answers["cost"]
            return cost
        if path == "/v1/reclaim":
            return {"reclaimed": status["guests"], "seconds": 1.25, "guests": []}
        if path == "/v1/pause":
            status["paused"] = body["paused"]
            return {"paused": body["paused"], "lending": True, "guests": len(status["guests"])}
        return {"jobs": [{"job": path.split("/")[3], "state": "cancelling", "already": False}]}


@asynccontextmanager
async def daemon(directory: Path) -> AsyncIterator[Recorded]:
    one = Recorded(directory / "mesh.sock")
    await one.start()
    try:
        yield one
    finally:
        await one.stop()
