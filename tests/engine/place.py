"""A register of guests, its kill-switch, and a bench on an engine that has them."""

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from mesh.engine.docker import DockerEngine
from mesh.engine.engine import Engine
from mesh.engine.killswitch import open_switch
from mesh.engine.process import ProcessEngine
from mesh.engine.register import Entry, Register, boot_id
from tests.engine.bench import LOOP, WAIT_S, Bench
from tests.images import busybox_image


class Place:
    """A register, its switch, and a bench on an engine that has them."""

    def __init__(self, root: Path, kind: str, image: str | None = None) -> None:
        """`image`: for containers; without it, one on the engine that all tests share."""
        self.root, self.kind = root, kind
        self.register = Register(root / "guests")
        self.socket = root / "kill.sock"
        self.switch = open_switch(self.register, self.socket)
        self.label = f"kill-{os.getpid()}-{time.monotonic_ns()}"
        engine: Engine
        if kind == "docker":
            engine = DockerEngine(self.label, self.switch)
        else:
            engine = ProcessEngine(self.switch, namespaces=kind == "process")
        (root / "attempt").mkdir()
        self.bench = Bench(engine, root / "attempt", (image or busybox_image()) if kind == "docker" else None)

    async def guest(self, mark: str) -> None:
        script = f"trap '' TERM; (sleep 9{mark} &); sh -c 'sleep 8{mark} & wait' & echo ready{mark}; {LOOP}"
        await self.bench.shell(script)
        await self.bench.until_logged(f"ready{mark}")

    def press(self, timeout_s: float = WAIT_S) -> dict[str, object]:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(timeout_s)
            client.connect(str(self.socket))
            client.sendall(b"kill\n")
            heard = b""
            while not heard.endswith(b"\n"):
                heard += client.recv(65536) or b"\n"
        answer: dict[str, object] = json.loads(heard)
        return answer


def fresh_mark() -> str:
    return f"{time.time_ns()}"[-8:]


def entry(**changes: object) -> Entry:
    return replace(Entry(boot_id(), "process", "j" * 26, 0), **changes)  # type: ignore[arg-type]
