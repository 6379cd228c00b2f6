"""Test helpers for all engines: an engine with the directories of an attempt, and observation of its guests."""

import asyncio
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from mesh.execution.engine import Engine, Guest, Launch

WAIT_S = float(os.environ.get("MESH_TEST_WAIT_S", "60"))  # for a condition; emulated machines need longer
LOOP = "while :; do sleep 0.05; done"
COUNT = "while :; do echo step >> $MESH_OUT_DIR/steps; sleep 0.01; done"


class Bench:
    """An engine and the directories of one attempt."""

    def __init__(self, engine: Engine, root: Path, image: str | None, image_id: str | None = None) -> None:
        self.engine, self.root, self.image, self.image_id = engine, root, image, image_id
        for name in ("work", "ckpt", "out", "ctl"):
            (root / name).mkdir()
        self.guests: list[Guest] = []

    def launch(self, *argv: str, **changes: object) -> Launch:
        fields: dict[str, object] = {
            "job": "j" * 26,
            "attempt": 2,
            "argv": argv,
            "env": {},
            "work_dir": str(self.root / "work"),
            "ckpt_dir": str(self.root / "ckpt"),
            "out_dir": str(self.root / "out"),
            "ctl_dir": str(self.root / "ctl"),
            "log_path": str(self.root / "log"),
            "node": "desk",
            "grace_s": 30.0,
            "image": self.image,
            "image_id": self.image_id,
        }
        return Launch(**{**fields, **changes})  # type: ignore[arg-type]

    async def start(self, *argv: str, **changes: object) -> Guest:
        guest = await self.engine.start(self.launch(*argv, **changes))
        self.guests.append(guest)
        return guest

    async def shell(self, script: str, **changes: object) -> Guest:
        return await self.start("sh", "-c", script, **changes)

    async def output(self, script: str, **changes: object) -> str:
        guest = await self.shell(script, **changes)
        async with asyncio.timeout(WAIT_S):
            await guest.wait()
        return self.log

    @property
    def log(self) -> str:
        return (self.root / "log").read_text()

    async def until_logged(self, text: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not (self.root / "log").exists() or text not in self.log:
                await asyncio.sleep(0.02)


def processes_with(mark: str) -> list[str]:
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if f"sleep {mark}" in line or f"sleep 9{mark}" in line or f"sleep 8{mark}" in line]


def steps_taken(bench: Bench) -> int:
    path = bench.root / "out" / "steps"
    return path.read_text().count("step\n") if path.exists() else 0


async def beyond(bench: Bench, steps: int) -> None:
    """Wait until the guest has taken more steps than these."""
    async with asyncio.timeout(WAIT_S):
        while steps_taken(bench) <= steps:
            await asyncio.sleep(0.01)


async def steps_when_stopped(bench: Bench) -> int:
    """Wait until no step comes within the time of fifty steps; return the number of steps, which must not be zero."""
    async with asyncio.timeout(WAIT_S):
        while True:
            before = steps_taken(bench)
            await asyncio.sleep(0.5)
            if before and steps_taken(bench) == before:
                return before


def containers(label: str) -> list[object]:
    import docker

    client = docker.from_env()
    try:
        return list(client.containers.list(all=True, filters={"label": f"campus-mesh.node={label}"}, sparse=True))
    finally:
        client.close()


def wait_until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.05)
