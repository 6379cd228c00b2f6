"""A package index on loopback with one small package, and projects that are locked against it."""

import base64
import hashlib
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mesh.jobs.environments import find_uv

SCRIPT = '# /// script\n# requires-python = ">=3.11"\n# dependencies = ["tinypkg"]\n# ///\n'
USES = "import os, sys, tinypkg\nprint(tinypkg.VERSION, tinypkg.__file__, flush=True)\n"


def make_wheel(directory: Path, version: str = "1.0", filler: int = 0) -> Path:
    """Make a wheel of tinypkg with `filler` bytes that do not compress."""
    info = f"tinypkg-{version}.dist-info"
    files = {
        "tinypkg/__init__.py": f"VERSION = {version!r}\n".encode(),
        "tinypkg/filler": b"".join(hashlib.sha256(b"%d" % part).digest() for part in range(filler // 32)),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tinypkg\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    path = directory / f"tinypkg-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


class Index:
    """A simple index (PEP 503). `paths`: what was asked of it; it holds its answers to wheels until `going` is set."""

    def __init__(self, root: Path, filler: int = 0) -> None:
        self.paths: list[str] = []
        self.going, self.asked = threading.Event(), threading.Event()
        self.going.set()
        self.wheels = root / "simple" / "tinypkg"
        self.wheels.mkdir(parents=True)
        wheel = make_wheel(self.wheels, filler=filler)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        (self.wheels / "index.html").write_text(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>')
        index = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                index.paths.append(self.path)
                if ".whl" in self.path:
                    index.asked.set()
                    index.going.wait(60)
                with suppress(ConnectionError):  # it was stopped
                    super().do_GET()

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root)))
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}/simple"

    def close(self) -> None:
        self.going.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def project(self, place: Path) -> Path:
        """Make a project that needs the package, with its lock, and a script with a lock of its own."""
        place.mkdir()
        (place / "pyproject.toml").write_text(
            '[project]\nname = "demo"\nversion = "0.1"\nrequires-python = ">=3.11"\ndependencies = ["tinypkg"]\n'
        )
        (place / "train.py").write_text(USES)
        (place / "alone.py").write_text(SCRIPT + USES)
        for which in ([], ["--script", "alone.py"]):
            order = [find_uv() or "uv", "lock", "--no-config", "--no-cache", "--default-index", self.address, *which]
            subprocess.run(order, cwd=place, check=True, capture_output=True)
        self.paths.clear()
        self.asked.clear()
        return place


@contextmanager
def index(root: Path, filler: int = 0) -> Iterator[Index]:
    made = Index(root, filler)
    try:
        yield made
    finally:
        made.close()
