"""The daemon's web page: time to first paint, size, and a thousand viewers of a job's output.

Run by `make bench-api`; alone: `python tests/bench/web.py`. Chromium is driven as in the tests.
"""

import asyncio
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mesh.daemon.stack import Stack, StackNode  # noqa: E402
from tests.bench.harness import not_run, row, write  # noqa: E402
from tests.e2e.browser import Page  # noqa: E402
from tests.e2e.commands import job_state, ok, until  # noqa: E402
from tests.tiers import browser_problem  # noqa: E402

LOADS = 11  # loads of each page, including the first one with a cold browser and daemon
VIEWERS, LINES, PACE_S = 1000, 600, 0.1
FILES = 2 * VIEWERS + 512
PAINT_MS, WEIGHT_KB = 300.0, 150.0
PAGES = {
    "nodes": "/",
    "jobs": "/jobs",
    "a job": "/jobs/{job}",
    "availability": "/week",
    "lend": "/lend",
    "ledger": "/usage",
}
PRINTS = f"""
import time
for number in range({LINES}):
    print(f"line {{number}} of what a training prints, about as long as such lines are", flush=True)
    time.sleep({PACE_S})
print("over", flush=True)
time.sleep(3600)
"""


def rows() -> list[dict[str, Any]]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], min(FILES, limit[1])), limit[1]))
    found = []
    with Stack(5, overrides={"slots": 2}) as stack:
        stack.start_all()
        node = stack.nodes[0]
        if problem := browser_problem():
            found.append(not_run("first paint", "ms", f"<= {PAINT_MS:g} ms", problem))
        else:
            found += asyncio.run(_painted(node, _running(node)))
        found += asyncio.run(_held(node, _running(node)))
    return found


def _running(node: StackNode) -> str:
    job = ok(node, "submit", "--no-workdir", "--", sys.executable, "-c", PRINTS).strip()
    until(lambda: job_state(node, job).get("state") == "running", "the job to run")
    return job


async def _painted(node: StackNode, job: str) -> list[dict[str, Any]]:
    url = node.client.post("/v1/web")["url"]
    base = url.partition("/enter")[0]
    found = []
    async with Page("about:blank") as page:
        for domain in ("Runtime", "Network"):
            await page.call(f"{domain}.enable")
        await page.call("Network.setCacheDisabled", cacheDisabled=True)
        await page.call("Page.navigate", url=url)
        await page.until("document.querySelector('#link.live')", "the page")
        for name, path in PAGES.items():
            paints, weights = [], []
            for _ in range(LOADS):
                page.events.clear()
                await page.call("Page.navigate", url=base + path.format(job=job))
                paint = await page.until(
                    "document.readyState === 'complete' && performance.getEntriesByName('first-contentful-paint')[0]?.startTime",
                    "the first paint",
                )
                paints.append(float(paint))
                streams = {
                    event["params"]["requestId"]
                    for event in page.events
                    if event["method"] == "Network.requestWillBeSent"
                    and "/stream/" in event["params"]["request"]["url"]
                }
                ended = [event["params"] for event in page.events if event["method"] == "Network.loadingFinished"]
                weights.append(sum(one["encodedDataLength"] for one in ended if one["requestId"] not in streams) / 1000)
            met = sorted(paints)[LOADS // 2] <= PAINT_MS
            found.append(row(f"first paint: {name}", paints, "ms", goal=f"<= {PAINT_MS:g} ms", met=met))
            heavy = max(weights)
            found.append(row(f"weight: {name}", weights, "kB", goal=f"<= {WEIGHT_KB:g} kB", met=heavy <= WEIGHT_KB))
    return found


async def _held(node: StackNode, job: str) -> list[dict[str, Any]]:
    """Open viewers of the job's output; each must receive every line once, in order."""
    url = node.client.post("/v1/web")["url"]
    base = url.partition("/enter")[0]
    jar, connector = aiohttp.CookieJar(unsafe=True), aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
    async with aiohttp.ClientSession(cookie_jar=jar, connector=connector, timeout=timeout) as http:
        async with http.get(url) as answer:
            answer.raise_for_status()
        there = asyncio.Semaphore(50)
        begun = time.monotonic()
        opened: list[float] = []

        async def view() -> tuple[str, int, int]:
            text, parts, live = "", 0, 0
            async with there:
                answer = await http.get(f"{base}/stream/jobs/{job}")
                opened.append(time.monotonic() - begun)
            async with answer:
                answer.raise_for_status()
                kind = ""
                async for raw in answer.content:
                    name, _, value = raw.decode().rstrip("\n").partition(": ")
                    if name == "event":
                        kind = value
                    elif name == "data" and kind == "log":
                        told = json.loads(value)
                        live += told["text"].count("\n") if text else 0
                        text = ("" if told["from"] == "start" else text) + told["text"]
                        if "over\n" in text:
                            break
                    elif name == "data":
                        parts += 1
            return text, parts, live

        before, small = _cpu_s(node), _rss_mib(node)
        seen = await asyncio.gather(*(view() for _ in range(VIEWERS)))
        took, spent, large = time.monotonic() - begun, _cpu_s(node) - before, _rss_mib(node)
    printed = ok(node, "logs", job)
    lost = sum(text != printed for text, _, _ in seen)
    return [
        row(
            f"{VIEWERS} viewers: viewers that lost or repeated a line of {printed.count(chr(10))}",
            [lost],
            "viewers",
            goal="0",
            met=lost == 0,
        ),
        row("until the last viewer was connected", [max(opened)], "s", goal="-", met=None),
        row("lines during the viewing", [live for _, _, live in seen], "lines", goal="-", met=None),
        row("other changes sent to each viewer", [parts for _, parts, _ in seen], "events", goal="-", met=None),
        row("the daemon's memory before", [small], "MiB", goal="-", met=None),
        row("the daemon's memory with all viewers", [large], "MiB", goal="-", met=None),
        row("the daemon's CPU during the viewing", [100 * spent / took], "% of a core", goal="-", met=None),
    ]


def _cpu_s(node: StackNode) -> float:
    assert node.process is not None
    fields = Path(f"/proc/{node.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(node: StackNode) -> float:
    assert node.process is not None
    pages = int(Path(f"/proc/{node.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    write("web", rows())
