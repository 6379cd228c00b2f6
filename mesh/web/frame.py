"""Common parts of all pages: head, navigation, forms, tables. Text becomes markup here and in the pages only."""

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from mesh.web.markup import Markup, element, join

TITLES = {"/": "Nodes", "/jobs": "Jobs", "/week": "Availability", "/lend": "Lend", "/usage": "Ledger"}


class Shown(msgspec.Struct, frozen=True):
    """A page's parts by their ids, and texts for screen readers by subject."""

    parts: Mapping[str, Markup]
    facts: Mapping[str, str] = {}


class Viewer(msgspec.Struct, frozen=True):
    """The viewer of a page: a node, its mesh and its user; `word` is the token of the session's forms."""

    nick: str
    mesh: str
    user: str
    word: str


def document(viewer: Viewer, title: str, here: str, stream: str, *inside: str) -> str:
    """A whole page. `here`: which entry of the navigation it belongs to; `stream`: where its changes come from, if they do."""
    entries = [
        element("li", element("a", name, href=path, aria_current="page" if path == here else None))
        for path, name in TITLES.items()
    ]
    header = element(
        "header",
        element("p", viewer.nick, " ", element("span", f"in {viewer.mesh}"), class_="brand"),
        element("nav", element("ul", *entries), aria_label="Pages"),
        element("p", "not live", id="link", class_="link") if stream else "",
        element("p", id="said", class_="unseen", role="status", aria_live="polite"),
    )
    still = element(
        "noscript", element("p", "Without scripts this page shows what was so when it was loaded: reload it.")
    )
    footer = element(
        "footer",
        element("span", f"This is {viewer.user}'s own page, on this machine only."),
        form(viewer, "/leave", element("button", "Sign out")),
    )
    return whole(
        f"{title} · {viewer.nick}",
        stream,
        header,
        element("main", still if stream else "", *inside, id="main"),
        footer,
    )


def whole(title: str, stream: str, *inside: str) -> str:
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("link", rel="stylesheet", href="/page.css"),
        element("script", src="/live.js", defer="") if stream else "",
    )
    skip = element("a", "Skip to the content", href="#main", class_="skip")
    body = element("body", skip, *inside, data_stream=stream or None)
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def message(title: str, *lines: str) -> str:
    """A page for who has no session, or asked for what is not there."""
    return whole(title, "", element("main", element("h1", title), *(element("p", line) for line in lines), id="main"))


def form(viewer: Viewer, action: str, *inside: str, **values: str) -> Markup:
    hidden = [element("input", type="hidden", name=name, value=value) for name, value in values.items()]
    word = element("input", type="hidden", name="word", value=viewer.word)
    return element("form", word, *hidden, *inside, method="post", action=action)


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> Markup:
    """The first cell of a row is its name. On a narrow screen each row is a card."""
    heads = [
        element("th", name, scope="col", class_="number" if place in numbers else None)
        for place, name in enumerate(header)
    ]
    body = []
    for row in rows:
        first, *rest = row
        cells = [
            element("td", cell, class_="number" if place in numbers else None, data_of=header[place])
            for place, cell in enumerate(rest, 1)
        ]
        body.append(element("tr", element("th", first, scope="row"), *cells))
    made = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads)),
        element("tbody", *body),
        class_="cards",
    )
    return element("div", made, class_="scroll")


def pairs(rows: Iterable[tuple[str, str]]) -> Markup:
    return element("dl", *(join(element("dt", name), element("dd", value)) for name, value in rows))


def badge(text: str, kind: str = "") -> Markup:
    return element("span", text, class_=f"badge {kind}".rstrip())


def bar(used: float, colour: int) -> Markup:
    """Draw a bar for a part of one; the text beside it says the same."""
    full = element("rect", width=f"{min(max(used, 0.0), 1.0):.0%}", height="100%", class_=f"f{colour}")
    return element("svg", full, class_="bar", aria_hidden="true")


def clock(unix_ms: float) -> Markup:
    """A moment, in this machine's time."""
    there = time.localtime(unix_ms / 1000)
    return element(
        "time",
        time.strftime("%Y-%m-%d %H:%M:%S", there),
        datetime=time.strftime("%Y-%m-%dT%H:%M:%S%z", there),
        class_="nowrap",
    )
