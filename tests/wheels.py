"""A package index on loopback: one small package, and those that are installed here; and projects that are locked against it."""

import base64
import hashlib
import io
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mesh.jobs.environments import Environments, find_uv
from mesh.jobs.packages import Neighbours

SCRIPT = '# /// script\n# requires-python = ">=3.11"\n# dependencies = ["tinypkg"]\n# ///\n'
USES = "import os, sys, tinypkg\nprint(tinypkg.VERSION, tinypkg.__file__, flush=True)\n"


def alone(directory: Path, index: str, quota_bytes: int, channels: Sequence[str] = ()) -> Environments:
    """Return the environments of a node without other nodes."""
    nobody = Neighbours(b"m" * 32, cast(Any, None), lambda: [], lambda node, what: None)
    return Environments(directory, index, quota_bytes, channels, nobody)


def make_wheel(directory: Path, version: str = "1.0", filler: int = 0, more: Mapping[str, bytes] = {}) -> Path:
    """Make a wheel of tinypkg with `filler` bytes that do not compress, and more files."""
    info = f"tinypkg-{version}.dist-info"
    files = {
        "tinypkg/__init__.py": f"VERSION = {version!r}\n\n\ndef show():\n    print(VERSION)\n".encode(),
        f"{info}/entry_points.txt": b"[console_scripts]\ntiny = tinypkg:show\n",
        "tinypkg/filler": b"".join(hashlib.sha256(b"%d" % part).digest() for part in range(filler // 32)),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tinypkg\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **more,
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


def packed(found: Distribution, directory: Path) -> Path:
    """Make a wheel of an installed package, with only those requirements that apply here."""
    info = found.metadata["Name"], found.version
    tags = [
        line.removeprefix("Tag: ").split("-")
        for line in (found.read_text("WHEEL") or "").splitlines()
        if "Tag: " in line
    ]
    tag = "-".join(".".join(sorted({parts[place] for parts in tags})) for place in range(3))
    path = directory / f"{info[0].replace('-', '_')}-{info[1]}-{tag}.whl"
    metadata = found.read_text("METADATA") or ""
    apply = {f"Requires-Dist: {text}" for text in requirements(found)}
    head, _, body = metadata.partition("\n\n")
    kept = [line for line in head.splitlines() if not line.startswith("Requires-Dist:") or line in apply]
    changed = "\n".join(kept) + "\n\n" + body
    files = found.files or []
    place = next(file.parent for file in files if file.match("*.dist-info/METADATA") and len(file.parts) == 2)
    ours = {place / name for name in ("INSTALLER", "REQUESTED", "RECORD", "METADATA", "direct_url.json")}
    listed = [file for file in files if file not in ours and file.parts[0] != ".." and "__pycache__" not in file.parts]
    with zipfile.ZipFile(path, "w") as wheel:
        for file in listed:
            wheel.write(str(file.locate()), str(file))
        wheel.writestr(f"{place}/METADATA", changed)
        names = [*listed, place / "METADATA", place / "RECORD"]
        wheel.writestr(f"{place}/RECORD", "".join(f"{name},,\n" for name in names))
    path.with_name(f"{path.name}.metadata").write_text(changed)
    return path


def requirements(found: Distribution) -> list[str]:
    """Return the requirements of a package that apply here, without its extras."""
    read = [(text, Requirement(text)) for text in found.requires or []]
    return [text for text, one in read if one.marker is None or one.marker.evaluate({"extra": ""})]


class Index:
    """A simple index (PEP 503), and one at `/closed` that asks for a password. `paths`: what was asked, `named`: with which names
    and passwords; it holds its answers to wheels until `going` is set."""

    def __init__(self, root: Path, filler: int = 0) -> None:
        self.paths: list[str] = []
        self.named = set[str]()
        self.going, self.asked = threading.Event(), threading.Event()
        self.going.set()
        self._root = root / "simple"
        self.wheels = self._root / "tinypkg"
        self.wheels.mkdir(parents=True)
        self.offer(make_wheel(self.wheels, filler=filler))
        index = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                index.paths.append(self.path)
                index.named |= {self.headers["Authorization"]} - {None}
                if self.path.startswith("/closed"):
                    self.send_error(401)
                    return
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

    def offer(self, wheel: Path) -> None:
        """Offer this package, and no other version of it."""
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        apart = ' data-core-metadata="true"' if wheel.with_name(f"{wheel.name}.metadata").exists() else ""
        link = f'<a href="{quote(wheel.name)}#sha256={digest}"{apart}>{wheel.name}</a>'
        (wheel.parent / "index.html").write_text(link)

    def offer_source(self, setup: str) -> Path:
        """Offer tinypkg as a source package with this `setup.py` only."""
        for wheel in self.wheels.glob("*.whl"):
            wheel.unlink()
        path = self.wheels / "tinypkg-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name, text in (
                ("setup.py", setup),
                ("PKG-INFO", "Metadata-Version: 2.1\nName: tinypkg\nVersion: 1.0\n"),
            ):
                info = tarfile.TarInfo(f"tinypkg-1.0/{name}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
        self.offer(path)
        return path

    def offer_installed(self, site: Path, *names: str) -> None:
        """Offer these packages of a directory `site-packages`, and all that they need."""
        installed = {canonicalize_name(found.metadata["Name"]): found for found in distributions(path=[str(site)])}
        wanted, seen = list(names), set[str]()
        while wanted:
            name = canonicalize_name(wanted.pop())
            if name in seen:
                continue
            seen.add(name)
            (self._root / name).mkdir()
            self.offer(packed(installed[name], self._root / name))
            wanted += [Requirement(text).name for text in requirements(installed[name])]

    def close(self) -> None:
        self.going.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def project(self, place: Path, *more: str) -> Path:
        """Make a project that needs the package and `more`, with its lock, and a script with a lock of its own."""
        place.mkdir()
        needs = ", ".join(f'"{name}"' for name in ("tinypkg", *more))
        (place / "pyproject.toml").write_text(
            f'[project]\nname = "demo"\nversion = "0.1"\nrequires-python = ">=3.11"\ndependencies = [{needs}]\n'
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
