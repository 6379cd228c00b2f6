"""`mesh job jupyter`: a real JupyterLab on another node, used by a real local browser."""

import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.container_images import jupyter_image
from tests.e2e.browser import Page
from tests.e2e.commands import descendants, finished, job_state, mesh, ok, start, until
from tests.tiers import FRAMEWORKS_PYTHON

pytestmark = [pytest.mark.e2e, pytest.mark.browser, pytest.mark.jupyter]

WAIT_S = 90.0
NOTEBOOK = '.jp-LauncherCard[data-category="Notebook"]'
CELL = ".jp-Notebook .jp-Cell .cm-content"
SAVE = 'jp-button[data-command="docmanager:save"]'
SHIFT = 8
NOTE = "contents/notebooks/Untitled.ipynb"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Three nodes with JupyterLab on their daemons' PATH; the first lends nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{FRAMEWORKS_PYTHON.parent}:{os.environ['PATH']}")
        with Stack(3, overrides={"slots": 1, "grace_s": 20.0}) as stack:
            stack.start_all()
            ok(stack.nodes[0], "pause")
            yield stack


class Session:
    """A running `mesh job jupyter --json` and its output."""

    def __init__(self, node: StackNode, *options: str) -> None:
        self.node = node
        self.process = start(node, "job", "jupyter", "--json", "--no-workdir", *options)

    def told(self) -> dict[str, Any]:
        """Return the next address that it prints."""
        assert self.process.stdout is not None and self.process.stderr is not None
        text = ""
        while line := self.process.stdout.readline():
            text += line
            if line == "}\n":
                found: dict[str, Any] = json.loads(text)
                return found
        raise AssertionError(f"it ended: {self.process.wait()} {self.process.stderr.read()}")

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def interrupt(self) -> str:
        self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, said
        return said


@pytest.fixture
async def web() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
        yield session


def api(url: str, path: str) -> str:
    """Return the address of a call on the server of this page."""
    parts = urlsplit(url)
    assert parts.hostname == "127.0.0.1"
    return f"http://{parts.netloc}{parts.path.removesuffix('lab')}api/{path}"


def token_of(url: str) -> str:
    (token,) = parse_qs(urlsplit(url).query)["token"]
    return token


@pytest.mark.long
async def test_notebook_runs_on_another_node_and_moves_with_its_files(stack: Stack, web: aiohttp.ClientSession) -> None:
    node = stack.nodes[0]
    with Session(node) as session:
        told = session.told()
        host = stack.node(told["node"])
        assert host is not node
        await compute(told["url"])
        nothing_is_open_or_shown(host, token_of(told["url"]))
        for token in ("", "wrong"):
            async with web.get(api(told["url"], NOTE), headers={"Authorization": f"token {token}"}) as answer:
                assert answer.status == 403
        assert "continues as job" in session.interrupt() and job_state(node, told["job"])["state"] == "running"

    until(lambda: job_state(node, told["job"])["checkpoint"], "the notebooks to be in a checkpoint")
    with Session(node, "--job", told["job"][:8]) as session:
        again = session.told()
        assert token_of(again["url"]) == token_of(told["url"])
        ok(node, "job", "migrate", told["job"])
        moved = session.told()
        assert moved["node"] not in {told["node"], node.nick} and token_of(moved["url"]) != token_of(told["url"])
        assert urlsplit(moved["url"]).netloc == urlsplit(again["url"]).netloc, "the tunnel must follow the job"
        headers = {"Authorization": f"token {token_of(moved['url'])}"}
        async with web.get(api(moved["url"], NOTE), headers=headers) as answer:
            cells = (await answer.json())["content"]["cells"]
        assert "".join(cells[0]["outputs"][0]["text"]) == "42 of a kernel\n"
        session.interrupt()
    ok(node, "cancel", told["job"])
    finished(node, told["job"])


@pytest.mark.long
@pytest.mark.docker
async def test_notebook_runs_in_a_container_without_network() -> None:
    with (
        jupyter_image(FRAMEWORKS_PYTHON) as image,
        Stack(1, overrides={"slots": 1, "engines": ["docker"]}) as stack,
    ):
        stack.start_all()
        node = stack.nodes[0]
        with Session(node, "--image", image) as session:
            told = session.told()
            await compute(told["url"])
            session.interrupt()
        ok(node, "cancel", told["job"])
        finished(node, told["job"])


async def compute(url: str) -> None:
    """Create a notebook, run a cell, check its output and save the notebook."""
    async with Page(url) as page:
        await page.click(NOTEBOOK)
        await page.until(f"document.querySelector({CELL!r})", "a cell")
        await page.until("document.body.innerText.includes('| Idle')", "a kernel")
        await page.click(CELL)
        await page.type("print(6 * 7, 'of a kernel')")
        await page.until(f"document.querySelector({CELL!r}).innerText.includes('kernel')", "what was typed")
        await page.press("Enter", SHIFT)
        output = "document.querySelector('.jp-OutputArea-output pre').innerText"
        assert await page.until(output, "its output") == "42 of a kernel\n"
        await page.click(SAVE)
        await page.click(".jp-Dialog .jp-mod-accept")  # accept the proposed name
        headers = f"{{headers: {{Authorization: 'token {token_of(url)}'}}}}"
        saved = f"(await (await fetch({api(url, NOTE)!r}, {headers})).text()).includes('42 of a kernel')"
        await page.until_async(saved, "it to be saved")


def nothing_is_open_or_shown(host: StackNode, token: str) -> None:
    """Check that guests listen on loopback only, JupyterLab on no port, and that no argument or variable holds the token.

    A kernel listens on loopback for the output of its child processes.
    """
    assert host.process is not None
    guest = dict(descendants(host.process.pid))
    told = subprocess.run(["ss", "-Hltunp"], capture_output=True, text=True, check=True).stdout
    for line in told.splitlines():
        for pid in {int(found) for found in re.findall(r"pid=(\d+)", line)} & guest.keys():
            assert line.split()[4].startswith("127.0.0.1:") and "jupyter-lab" not in guest[pid], line
    for pid in guest:
        for name in ("cmdline", "environ"):
            assert token.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


@pytest.mark.long
def test_idle_jupyter_session_warns_and_ends(stack: Stack) -> None:
    done = mesh(stack.nodes[0], "job", "jupyter", "--no-workdir", "--idle", "6", timeout_s=WAIT_S)
    assert done.returncode == 0, done
    warned, ended = (done.stderr.find(words) for words in ("it ends in", "was not used for 6 s, and ends"))
    assert 0 < warned < ended and "is done" in done.stderr, done.stderr
