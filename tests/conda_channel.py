"""A conda channel on loopback: small packages in both of conda's formats, for any machine and for this one, and their index."""

import bz2
import hashlib
import io
import json
import os
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from ckptstore.codec import zstd
from mesh.model.environment import CONDA_PLATFORMS

HERE = CONDA_PLATFORMS[os.uname().machine]
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
PLACEHOLDER = "/opt/" + "placeholder_" * 20  # as long as conda-build's: in a program, a prefix can only become shorter
# In place of conda's Python, which has 30 MB: the one of this machine, with the modules of the environment.
PYTHON = f"""#!/bin/sh
PYTHONPATH="{PLACEHOLDER}/lib/python{MINOR}/site-packages" exec {os.path.realpath(sys._base_executable)} "$@"
"""
TINY = b"VERSION = '1.0'\n\n\ndef show():\n    print(VERSION)\n"
NATIVE = b"\x7fELF" + PLACEHOLDER.encode() + b"/share/native\0the rest\0"
ENVIRONMENT = "name: demo\nchannels:\n  - {channel}\n  - nodefaults\ndependencies:\n  - tinypkg >=1\n  - native\n"
USES = "import tinypkg\nprint(tinypkg.VERSION, tinypkg.__file__, flush=True)\n"


class HardLink(NamedTuple):
    target: str


File = bytes | str | HardLink  # the content of a file, or the target of a link


def member(name: str, content: File, mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.mtime, info.mode = 1_700_000_000, mode
    if not isinstance(content, bytes):
        hard = isinstance(content, HardLink)
        info.type, info.linkname = (tarfile.LNKTYPE, content.target) if hard else (tarfile.SYMTYPE, content)
        return info, b""
    info.size = len(content)
    return info, content


def packed(members: Sequence[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


class Channel:
    """`paths`: what was asked of it; it holds its answers to packages until `going` is set."""

    def __init__(self, root: Path) -> None:
        self.paths: list[str] = []
        self.going, self.asked = threading.Event(), threading.Event()
        self.going.set()
        self.root = root
        self._index: dict[str, dict[str, Any]] = {HERE: {}, "noarch": {}}
        channel = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                channel.paths.append(self.path)
                if self.path.endswith((".conda", ".bz2")):
                    channel.asked.set()
                    channel.going.wait(60)
                with suppress(ConnectionError):  # it was stopped
                    super().do_GET()

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root)))
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        for subdir in self._index:
            (root / subdir).mkdir(parents=True)
        self.offer(
            "python",
            {f"bin/python{MINOR}": PYTHON.encode(), "bin/python": f"python{MINOR}"},
            subdir=HERE,
            version=f"{MINOR}.0",
        )
        tiny = {"site-packages/tinypkg/__init__.py": TINY}
        self.offer("tinypkg", tiny, noarch="python", depends=["python"], entry_points=["tiny = tinypkg:show"])
        native = {
            "lib/native.so": NATIVE,
            "lib/native.so.1": "native.so",
            "bin/hello": f"#!/bin/sh\necho hello from {PLACEHOLDER}\n".encode(),
            "bin/.native-post-link.sh": b"touch $PREFIX/ran\n",
        }
        self.offer("native", native, subdir=HERE, suffix=".tar.bz2")

    def offer(
        self,
        name: str,
        files: Mapping[str, File],
        *,
        subdir: str = "noarch",
        version: str = "1.0",
        suffix: str = ".conda",
        noarch: str | None = None,
        depends: Sequence[str] = (),
        entry_points: Sequence[str] = (),
        listed: Sequence[str] | None = None,
        called: str = "",
        instead: Mapping[str, File] | None = None,
        **more: str,
    ) -> str:
        """Offer a package, and return its line in a lock; `listed`: what it says to have; `called`: what it says to be;
        `instead`: files in place of those by which it says so."""
        index = {
            "name": called or name,
            "version": version,
            "build": "0",
            "build_number": 0,
            "subdir": subdir,
            "depends": list(depends),
            **({"noarch": noarch} if noarch else {}),
            **more,
        }
        paths = [self._path(path, files.get(path, b"")) for path in (files if listed is None else listed)]
        info = {"index.json": index, "paths.json": {"paths": paths, "paths_version": 1}}
        if entry_points:
            info["link.json"] = {
                "noarch": {"type": "python", "entry_points": entry_points},
                "package_metadata_version": 1,
            }
        described = [member(f"info/{file}", json.dumps(content).encode()) for file, content in info.items()]
        described += [member(f"info/{file}", content) for file, content in (instead or {}).items()]
        content = [member(path, file, 0o755 if path.startswith("bin/") else 0o644) for path, file in files.items()]
        archive = f"{name}-{version}-0{suffix}"
        if suffix == ".conda":
            made = io.BytesIO()
            with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as outer:
                outer.writestr("metadata.json", json.dumps({"conda_pkg_format_version": 2}))
                for kind, members in (("pkg", content), ("info", described)):
                    outer.writestr(f"{kind}-{archive.removesuffix(suffix)}.tar.zst", zstd.compress(packed(members)))
            data = made.getvalue()
        else:
            data = bz2.compress(packed([*described, *content]))
        (self.root / subdir / archive).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        self._index[subdir][archive] = {**index, "name": name, "sha256": digest, "size": len(data)}
        for each, packages in self._index.items():
            halves = {
                key: {file: one for file, one in packages.items() if file.endswith(end)}
                for key, end in (("packages", ".bz2"), ("packages.conda", ".conda"))
            }
            (self.root / each / "repodata.json").write_text(json.dumps({"info": {"subdir": each}, **halves}))
        return f"{self.address}/{subdir}/{archive}#sha256:{digest}"

    def _path(self, path: str, content: File) -> dict[str, Any]:
        kind = "softlink" if isinstance(content, str) else "hardlink"
        data = content if isinstance(content, bytes) else b""
        entry = {
            "_path": path,
            "path_type": kind,
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_in_bytes": len(data),
        }
        if PLACEHOLDER.encode() in data:
            mode = "binary" if data.startswith(b"\x7fELF") else "text"
            entry |= {"prefix_placeholder": PLACEHOLDER, "file_mode": mode}
        return entry

    @property
    def lines(self) -> list[str]:
        """Return the lines of a lock of the packages that it began with."""
        return [
            f"{self.address}/{subdir}/{archive}#sha256:{one['sha256']}"
            for subdir, packages in self._index.items()
            for archive, one in packages.items()
            if one["name"] in {"python", "tinypkg", "native"}
        ]

    def project(self, place: Path) -> Path:
        """Make a project with an environment.yml."""
        place.mkdir()
        (place / "environment.yml").write_text(ENVIRONMENT.format(channel=self.address))
        (place / "train.py").write_text(USES)
        return place

    def close(self) -> None:
        self.going.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def channel(root: Path) -> Iterator[Channel]:
    made = Channel(root)
    try:
        yield made
    finally:
        made.close()
