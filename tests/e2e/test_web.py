"""`mesh top --web` in a real browser, and its refusals of unauthorized requests."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.e2e.browser import Page
from tests.e2e.commands import mesh, ok, read, until

pytestmark = [pytest.mark.e2e]

HOSTILE = "<img src=x onerror=alert(1)>"
PRINTS = r"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
print("\x1b[31mred\x1b[0m <b>not bold</b>", flush=True)
for number in range(10_000):
    print(f"line {number}", flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


def address(node: StackNode) -> tuple[str, str]:
    """Return the printed address with its token, and the address of the page."""
    url = ok(node, "top", "--web").strip()
    return url, url.partition("/enter")[0]


async def test_web_page_requires_a_token_and_changes_require_its_forms(
    shared: Stack, http: aiohttp.ClientSession
) -> None:
    node = shared.nodes[1]
    url, base = address(node)
    assert base.startswith("http://127.0.0.1:") and json.loads(ok(node, "top", "--web", "--json"))["port"] == int(
        base[-5:].strip(":")
    )

    async def status(path: str, method: str = "GET", **more: Any) -> int:
        async with http.request(method, base + path, allow_redirects=False, **more) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert answer.headers["Cache-Control"] == "no-store" and "Server" not in answer.headers
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            return answer.status

    pages = ("/", "/jobs", "/week", "/lend", "/stream/nodes", "/jobs/none")
    assert [await status(page) for page in ("/", "/jobs", "/week", "/lend", "/stream/nodes")] == [403] * 5
    assert await status("/enter?token=wrong") == 403
    async with http.get(url, allow_redirects=False) as answer:
        assert answer.status == 303 and answer.headers["Location"] == "/"
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert await status(url.removeprefix(base)) == 403, "the token must be valid only once"
    assert [await status(page) for page in pages if "stream" not in page] == [200, 200, 200, 200, 404]
    assert await status("/nowhere") == await status("/live.js/../../config.py") == 404
    port = base.rpartition(":")[2]
    for host in (f"attacker.example:{port}", "127.0.0.1", "127.0.0.1:1"):
        assert await status("/", headers={"Host": host}) == 403
    assert await status("/stream/jobs", headers={"Sec-Fetch-Site": "same-site"}) == 403

    async with http.get(base + "/lend") as answer:
        word = (await answer.text()).partition('name="word" value="')[2].partition('"')[0]
    own = {"Origin": base}
    assert len(word) == 64
    for data, headers in (
        ({"word": word}, {}),
        ({"word": word}, {"Origin": "http://attacker.example"}),
        ({"word": word}, {**own, "Sec-Fetch-Site": "cross-site"}),
        ({"word": "0" * 64}, own),
        ({}, own),
    ):
        assert await status("/lend/pause", "POST", data=data, headers=headers) == 403
    assert await status("/lend/pause", "POST", data={"word": word, "more": "x" * 9000}, headers=own) == 413
    assert await status("/lend/pause") == 405
    assert not read(node, "status")["lend"]["paused"]
    for order, paused in (("pause", True), ("resume", False)):
        assert await status(f"/lend/{order}", "POST", data={"word": word}, headers=own) == 303
        assert read(node, "status")["lend"]["paused"] == paused
    assert await status("/leave", "POST", data={"word": word}, headers=own) == 200
    assert await status("/") == 403


def test_owner_can_disable_the_web_page(make_stack: Callable[..., Stack]) -> None:
    done = mesh(make_stack(1, web=False).nodes[0], "top", "--web")
    assert done.returncode == 5 and "web = false" in done.stderr


@pytest.mark.browser
async def test_browser_shows_live_state_and_reclaims_the_machine(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    stack = make_stack(2)
    near, far = stack.nodes
    ok(far, "pause")
    (tmp_path / "prints.py").write_text(PRINTS)
    order = ("submit", "--name", "night", "--ckpt", "ckpts", "--", sys.executable, "prints.py", HOSTILE)
    job = ok(near, *order, cwd=tmp_path).strip()
    until(lambda: read(near, "status")["lend"]["guests"], "the guest to run here")
    url, base = address(near)
    async with Page("about:blank") as page:
        for domain in ("Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        await page.call("Page.navigate", url=url)
        await page.until(
            "document.querySelector('#link.live') && document.querySelectorAll('#nodes > li').length == 2", "the grid"
        )
        assert await page.run("location.href") == base + "/", "the address must not keep the token"
        assert await page.run("document.cookie") == ""

        await page.run("document.querySelector('nav a[href=\"/jobs\"]').focus()")
        await page.press("Enter")
        await page.until("document.querySelector('#mine a').textContent == 'night'", "the job's name")
        await page.run("document.querySelector('#mine a').focus()")
        await page.press("Enter")
        await page.until(
            "document.querySelector('#log').textContent.startsWith('red <b>not bold</b>\\n')", "its output"
        )
        last = await page.run("document.querySelector('#log').textContent.length")
        await page.until(f"document.querySelector('#log').textContent.length > {last} + 30", "lines that come")
        text = await page.run("document.querySelector('#log').textContent")
        numbers = [int(line.split()[1]) for line in text.splitlines()[1:]]
        assert numbers == list(range(len(numbers))), "each line must be shown once"
        await page.until("document.querySelector('#events li')", "what happened to it")

        await page.call("Page.navigate", url=base + "/lend")
        await page.until("document.querySelector('#link.live') && document.querySelector('#cost td')", "what it costs")
        ok(far, "lend")
        await page.click("#do-reclaim")
        await page.until(
            "document.querySelector('#order .say')?.textContent.includes('1 guest has gone')", "it to be taken back"
        )
        await page.until(
            "document.querySelector('#do-resume') && !document.querySelector('#cost td')", "the page to say so"
        )
        assert read(near, "status")["lend"]["paused"] and not read(near, "status")["lend"]["guests"]
        moved = until(
            lambda: (state := read(near, "ps", "-a")["jobs"][0])["node"] == far.nick and state,
            "the job to resume on the other node",
        )
        assert moved["job"] == job

        asked = [
            event["params"]["request"]["url"] for event in page.events if event["method"] == "Network.requestWillBeSent"
        ]
        assert asked and all(one.startswith((base, "data:,")) for one in asked), asked
        told = [
            event
            for event in page.events
            if event["method"] in {"Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"}
        ]
        assert not told, told
