"""A guest registry, its kill switch, and a bench with an engine that uses both."""

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from mesh.execution.docker.engine import DockerEngine
from mesh.execution.engine import Engine
from mesh.execution.guest_registry import GuestEntry, GuestRegistry, boot_id
from mesh.execution.killswitch import open_switch
from mesh.execution.process.engine import ProcessEngine
from tests.container_images import busybox_image
from tests.execution.bench import LOOP, WAIT_S, Bench


class Place:
    """A registry, its kill switch, and a bench with an engine that uses both."""

    def __init__(self, root: Path, kind: str, image: str | None = None) -> None:
        """Use `image` for containers, else an image on the engine that all tests share."""
        self.root, self.kind = root, kind
        self.register = GuestRegistry(root / "guests")
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


def entry(**changes: object) -> GuestEntry:
    return replace(GuestEntry(boot_id(), "process", "j" * 26, 0), **changes)  # type: ignore[arg-type]
