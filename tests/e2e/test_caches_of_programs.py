"""Caches of the real Hugging Face hub, PyTorch, pip and uv: a second job on another node downloads nothing."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mesh.daemon.stack import Stack
from tests.e2e.test_caches import lenders, run
from tests.tiers import FRAMEWORKS_PYTHON
from tests.wheels import make_wheel

pytestmark = [pytest.mark.e2e, pytest.mark.long]
__all__ = ["lenders"]  # a fixture


class Site(ThreadingHTTPServer):
    """Serves `pages` with an ETag, as registries do, and counts what it has sent. `headers`: more of a page."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.pages: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.sent: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def taken(self) -> list[str]:
        """Return what was sent since the last call."""
        sent, self.sent = self.sent, []
        return sent


class Page(BaseHTTPRequestHandler):
    server: Site

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path)
        tag = f'"{hashlib.sha1(page or b"").hexdigest()}"'
        known = page is not None and self.headers.get("If-None-Match") == tag
        self.send_response(404 if page is None else 304 if known else 200)
        kind = "text/html" if path.endswith("/") else "application/json" if path.startswith("/api") else "x-data/x-data"
        told = {"ETag": tag, "Content-Type": kind, "Content-Length": str(len(page or b""))}
        for name, value in (told | self.server.headers.get(path, {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body and page is not None and not known:
            self.server.sent.append(path)
            self.wfile.write(page)

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing."""


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield site
        finally:
            site.shutdown()
            thread.join()


def put_model(site: Site, revision: str, weights: bytes) -> None:
    files = {"config.json": b"{}", "model.bin": weights}
    listed = {"id": "ada/tiny", "sha": revision, "siblings": [{"rfilename": name} for name in files]}
    tree = [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in files.items()
    ]
    for name in ("main", revision):
        site.pages[f"/api/models/ada/tiny/revision/{name}"] = json.dumps(listed).encode()
        site.pages[f"/api/models/ada/tiny/tree/{name}"] = json.dumps(tree).encode()
        for file, data in files.items():
            site.pages[f"/ada/tiny/resolve/{name}/{file}"] = data
            site.headers[f"/ada/tiny/resolve/{name}/{file}"] = {"X-Repo-Commit": revision}


SNAPSHOT = """
exec {python} -c 'import os, huggingface_hub as hub
root = hub.snapshot_download("ada/tiny")
print("weights", open(os.path.join(root, "model.bin")).read(), os.path.islink(os.path.join(root, "model.bin")))'
"""


@pytest.mark.frameworks
def test_model_of_the_hub_is_downloaded_once(lenders: Stack, site: Site) -> None:
    owner = lenders.nodes[0]
    script = SNAPSHOT.format(python=FRAMEWORKS_PYTHON)
    hub = ("--env", f"HF_ENDPOINT={site.url}", "--env", "HF_HUB_DISABLE_TELEMETRY=1", "--env", "HF_HUB_DISABLE_XET=1")
    put_model(site, "1" * 40, b"first")
    first = run(owner, script, "--on", "bob", *hub)
    assert "weights first True" in first["log"] and "written back" in first["events"], first
    assert any(path.endswith("model.bin") for path in site.taken())

    offline = run(owner, script, "--on", "carol", *hub, "--env", "HF_HUB_OFFLINE=1")
    assert "weights first True" in offline["log"], offline
    online = run(owner, script, "--on", "carol", *hub)
    assert "weights first True" in online["log"], online
    assert not any("/resolve/" in path for path in site.taken())

    put_model(site, "2" * 40, b"second")
    newer = run(owner, script, "--on", "bob", *hub)
    assert "weights second True" in newer["log"] and "written back" in newer["events"], newer
    assert [path for path in site.taken() if "/resolve/" in path] == [f"/ada/tiny/resolve/{'2' * 40}/model.bin"]
    last = run(owner, script, "--on", "carol", *hub, "--env", "HF_HUB_OFFLINE=1")
    assert "weights second True" in last["log"], last


@pytest.mark.frameworks
def test_weights_of_torch_hub_are_downloaded_once(lenders: Stack, site: Site, tmp_path: Path) -> None:
    owner, made = lenders.nodes[0], tmp_path / "weights.pth"
    save = "import sys, torch; torch.save({'w': torch.arange(3)}, sys.argv[1])"
    subprocess.run([FRAMEWORKS_PYTHON, "-c", save, made], check=True)
    name = f"tiny-{hashlib.sha256(made.read_bytes()).hexdigest()[:8]}.pth"
    site.pages[f"/{name}"] = made.read_bytes()
    load = f'torch.hub.load_state_dict_from_url("{site.url}/{name}", check_hash=True)["w"].tolist()'
    script = f"exec {FRAMEWORKS_PYTHON} -c 'import torch; print(\"w\", {load})'"
    for node, sent in (("bob", [f"/{name}"]), ("carol", [])):
        done = run(owner, script, "--on", node, cache="torch")
        assert "w [0, 1, 2]" in done["log"] and site.taken() == sent, done


def put_package(site: Site, wheel: Path) -> str:
    """Put a wheel of tinypkg into an index; return its path there."""
    data, path = wheel.read_bytes(), f"/files/{wheel.name}"
    link = f'<a href="{path}#sha256={hashlib.sha256(data).hexdigest()}">{wheel.name}</a>'
    site.pages[path] = data
    site.pages["/simple/tinypkg/"] = f"<!DOCTYPE html><html><body>{link}</body></html>".encode()
    site.headers[path] = {"Cache-Control": "max-age=365000000, immutable, public"}
    return path


@pytest.mark.parametrize("program", ["pip", "uv"])
def test_package_is_downloaded_once(lenders: Stack, site: Site, tmp_path: Path, program: str) -> None:
    owner, wheel = lenders.nodes[0], put_package(site, make_wheel(tmp_path, "1.0.7"))
    words = {
        "pip": f"PIP_CONFIG_FILE=/dev/null {sys.executable} -m pip install --trusted-host {site.url[7:]}",
        "uv": f"{Path(sys.executable).parent / 'uv'} pip install --no-config --python {sys.executable}",
    }[program]
    script = (
        f"{words} --target lib --index-url {site.url}/simple/ tinypkg; "
        f"PYTHONPATH=lib exec {sys.executable} -c 'import tinypkg; print(\"it says\", tinypkg.VERSION)'"
    )
    for node, sent in (("bob", {wheel}), ("carol", set[str]())):
        done = run(owner, script, "--on", node, cache=program)
        assert "it says 1.0.7" in done["log"], done
        assert {path for path in site.taken() if path == wheel} == sent, done
