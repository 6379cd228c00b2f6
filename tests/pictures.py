"""Make the pictures of `mesh top` and the web page: `python -m tests.pictures`. Needs chromium, a C compiler and a minute.

They show a real mesh of three daemons with real jobs on this machine, on an emulation of NVIDIA's driver.
"""

import asyncio
import re
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh.daemon.stack import Stack, StackNode
from mesh.top.answers import Source
from mesh.top.app import Top
from tests.e2e.browser import Page
from tests.e2e.commands import ok, running_with_checkpoint, until
from tests.fake.build import build
from tests.fake.world import World

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
JOBS = {
    "bert": ("--gpus", "1"),
    "vision": ("--gpu-share", "50", "--vram", "12g"),
    "sweep": ("--gpu-share", "30", "--vram", "8g"),
    "diffusion": ("--gpus", "2"),
}
TERMINAL = (120, 32)  # columns and lines
SHOWN = {"x": 0, "y": 0, "width": 1200, "height": 500, "scale": 1}  # part of the page, in pixels
LOOKED_S = 2.5  # the display refreshes once a second


@contextmanager
def campus(where: Path) -> Iterator[Stack]:
    """Start three nodes with two GPUs each, and jobs on them."""
    fakes = build()
    with Stack(3, overrides={"slots": 2}) as stack:
        for node in stack.nodes:
            world = World(where / node.nick, fakes, devices=2, memory=48 << 30, name="NVIDIA RTX A6000")
            told = {**world.environment(), "LD_LIBRARY_PATH": str(fakes.cuda.parent)}
            node.within = ("env", *(f"{name}={value}" for name, value in told.items()))
        stack.start_all()
        until(lambda: all(row["gpu_shares"] for row in rows(stack.nodes[0])), "the GPUs to be offered, in shares")
        for job in [submit(stack.nodes[0], name) for name in JOBS]:
            running_with_checkpoint(stack.nodes[0], job)
        yield stack


def submit(node: StackNode, name: str) -> str:
    """Submit the counting job of the tests under a user's name for it, and return its id."""
    saves = ("--ckpt", "ckpts", "--ckpt-mode", "rename")
    return ok(node, "submit", "--name", name, *JOBS[name], *saves, "--", "python3", "count.py", "4000", "0.1").strip()


def rows(node: StackNode) -> list[dict[str, object]]:
    found: list[dict[str, object]] = node.client.get("/v1/nodes")["nodes"]
    return found


async def terminal(node: StackNode) -> str:
    """Return the display as an SVG, without the web font that Textual would fetch."""
    top = Top(Source(node.client), lambda: "")
    async with top.run_test(size=TERMINAL) as pilot:
        await pilot.pause(LOOKED_S)
        drawn = top.export_screenshot(title="mesh top")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    return drawn.replace("font-family: Fira Code", "font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas")


async def page(node: StackNode) -> bytes:
    async with Page(ok(node, "top", "--web").strip()) as opened:
        await opened.until("document.readyState == 'complete' && document.body.innerText.includes('node3')", "the page")
        told = await opened.call("Page.captureScreenshot", clip=SHOWN)
        return b64decode(told["data"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="mesh-pictures-") as directory, campus(Path(directory)) as mesh:
        (ASSETS / "top.svg").write_text(asyncio.run(terminal(mesh.nodes[0])))
        (ASSETS / "page.png").write_bytes(asyncio.run(page(mesh.nodes[0])))
