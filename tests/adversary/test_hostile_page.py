"""A hostile page in the browser in which the owner is signed in reads nothing and changes nothing."""

from collections.abc import Callable

import pytest

from mesh.daemon.stack import Stack
from tests.adversary.page import hostile_site
from tests.e2e.browser import Page
from tests.e2e.commands import ok, read

pytestmark = [pytest.mark.e2e, pytest.mark.browser]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_page_of_another_site_reads_and_changes_nothing(make_stack: Callable[..., Stack], host: str) -> None:
    """From 127.0.0.1 it is another port of the same site, to which browsers send the owner's cookie."""
    node = make_stack(1).nodes[0]
    url = ok(node, "top", "--web").strip()
    base = url.partition("/enter")[0]
    before = read(node, "status")["lend"]
    async with hostile_site(base) as port, Page("about:blank") as page:
        await page.call("Page.navigate", url=url)
        await page.until("document.querySelector('#link.live')", "the owner to be signed in")
        await page.call("Page.navigate", url=f"http://{host}:{port}/")
        await page.until("window.told", "the hostile page to run")
        told = await page.run("window.told")
        assert len(told) == 4 * 4 + 3 * 4 + 2
        for what, answer in told.items():
            kind, _, text = answer.partition(":")
            assert node.nick not in text and kind != "read" and answer != "open", (what, answer)
            assert kind in {"refused", "silent", "sent", "loaded", "opaque"} and not text.strip(), (what, answer)
        assert read(node, "status")["lend"] == before
        await page.call("Page.navigate", url=f"{base}/lend")
        await page.until("document.querySelector('#do-pause')", "the owner still to be signed in")
