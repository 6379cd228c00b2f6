"""The README's pictures of `mesh top` and of the page: `python -m tests.pictures`, a minute. Needs chromium and a C compiler.

What they show is a real mesh of three daemons on this machine with real jobs; its GPUs are doubles of NVIDIA's driver.
"""

import asyncio
import re
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh.stack import Stack, StackNode
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
SHOWN = {"x": 0, "y": 0, "width": 1200, "height": 500, "scale": 1}  # of the page
LOOKED_S = 2.5  # the display asks once a second


@contextmanager
def campus(where: Path) -> Iterator[Stack]:
    """Three nodes with two GPUs each, and jobs on them."""
    fakes = build(where / "fakes")
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
    """The counting job of the tests, as a user would call it: long enough to be seen."""
    saves = ("--ckpt", "ckpts", "--ckpt-mode", "rename")
    return ok(node, "submit", "--name", name, *JOBS[name], *saves, "--", "python3", "count.py", "4000", "0.1").strip()


def rows(node: StackNode) -> list[dict[str, object]]:
    found: list[dict[str, object]] = node.client.get("/v1/nodes")["nodes"]
    return found


async def terminal(node: StackNode) -> str:
    """The display as textual draws it, without the font that it would fetch from elsewhere."""
    top = Top(Source(node.client), lambda: "")
    async with top.run_test(size=TERMINAL) as pilot:
        await pilot.pause(LOOKED_S)
        drawn = top.export_screenshot(title="mesh top")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    return drawn.replace("font-family: Fira Code", "font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas")


async def page(node: StackNode) -> bytes:
    async with Page(ok(node, "web").strip()) as opened:
        await opened.until("document.readyState == 'complete' && document.body.innerText.includes('node3')", "the page")
        told = await opened.call("Page.captureScreenshot", clip=SHOWN)
        return b64decode(told["data"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="mesh-pictures-") as directory, campus(Path(directory)) as mesh:
        (ASSETS / "top.svg").write_text(asyncio.run(terminal(mesh.nodes[0])))
        (ASSETS / "page.png").write_bytes(asyncio.run(page(mesh.nodes[0])))
