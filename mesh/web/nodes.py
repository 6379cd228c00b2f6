"""The grid of nodes, and the week of each: who is there, what is lent, what is left, whose machine it is."""

import time
from collections.abc import Mapping, Sequence
from itertools import groupby

from mesh.api.schemas.mesh import Node, Survival
from mesh.util.duration import lasting
from mesh.util.text import plural, when
from mesh.web.frame import Shown, badge, bar
from mesh.web.markup import Markup, element, join
from mesh.web.palette import LEVELS

MOST_SHOWN = 80  # nodes on a page, so that it stays small (own choice)
MOST_GPUS = 8  # of one node, drawn separately (own choice)
USED = 0  # colour of the series
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
HOURS = 24


def nodes_page(rows: Sequence[Node]) -> Shown:
    """Return the grid of nodes."""
    there = [row for row in rows if row.state == "alive"]
    gpus = sum(len(row.gpus) for row in there)
    free = sum(row.gpus_free for row in there if row.lending)
    lent = sum(row.lending for row in there)
    words = f"{plural(len(there), 'node')} here, {lent} lending"
    words += f"; {free} of {plural(gpus, 'GPU')} free" if gpus else ""
    ordered = sorted(rows, key=lambda row: (not row.me, row.state != "alive", row.nick, row.node))
    left = len(ordered) - MOST_SHOWN
    parts = {
        "sum": element("p", words, id="sum", class_="sum"),
        "nodes": element("ul", *(_node(row) for row in ordered[:MOST_SHOWN]), id="nodes", class_="nodes"),
        "more": element("p", f"{left} more: `mesh nodes` lists all" if left > 0 else "", id="more"),
    }
    return Shown(parts, {row.node: f"{row.nick}: {row.state}, {_lends(row)[0]}" for row in rows})


def _node(row: Node) -> Markup:
    words, kind = _lends(row)
    there = row.state == "alive"
    classes = " ".join(name for name, is_so in (("me", row.me), ("gone", not there)) if is_so)
    head = element(
        "div",
        element("h2", row.nick),
        badge("this node") if row.me else "",
        class_="head",
    )
    state = "" if there else join(badge(row.state, "warn"), " ")
    owner = element("span", element("span", "owner ", class_="muted"), row.user, class_="badge owner")
    lines = [element("p", state, join(badge(words, kind), " ") if there else "", owner)]
    if there:
        lines += _gpus(row)
        if row.slots:
            used = row.slots - row.slots_free
            lines.append(_line("slots", f"{row.slots_free} of {row.slots} free", used / row.slots))
        place = [f"runs {plural(row.jobs, 'job')}"] if row.jobs else []
        place += [f"zone {row.zone}"] if row.zone else []
        place += [f"stays an hour: {row.weight / 64:.0%}"] if row.lending and row.weight else []
        lines.append(element("p", " · ".join(place), class_="muted"))
    return element("li", head, *lines, class_=classes or None)


def _lends(row: Node) -> tuple[str, str]:
    """Return whether a node lends, in words, and the style of its badge."""
    back = f", back {when(row.back_unix)}" if row.back_unix else ""
    if row.lending:
        return "lending", "good"
    if row.paused:
        why = {"owner": "owner present", "hours": "outside hours"}.get(row.held_by, "paused")
        return why + back, "warn"
    return "not lending", ""


def _gpus(row: Node) -> list[Markup]:
    """A line for each, those that are alike below one name."""
    room = {left.uuid: left for left in row.gpu_room}
    lines = []
    for (model, vram_mib), alike in groupby(row.gpus[:MOST_GPUS], lambda gpu: (gpu.model, gpu.vram_mib)):
        gpus = list(alike)
        name = f"{model.removeprefix('NVIDIA ')}, {vram_mib / 1024:.3g} GiB"
        lines.append(element("p", f"{len(gpus)} × {name}" if len(gpus) > 1 else name, class_="model"))
        for gpu in gpus:
            left = room.get(gpu.uuid)
            share, free_mib = (0, 0) if left is None else (left.share, left.vram_mib)
            lines.append(_line("", _free(share, free_mib, vram_mib), 1 - share / 100))
    if len(row.gpus) > MOST_GPUS:
        lines.append(element("p", f"and {plural(len(row.gpus) - MOST_GPUS, 'more GPU')}", class_="muted"))
    return lines


def _free(share: int, vram_mib: int, of_mib: int) -> str:
    if not share:
        return "taken"
    return "free" if share == 100 and vram_mib == of_mib else f"{share} %, {vram_mib / 1024:.3g} GiB free"


def _line(name: str, has: str, used: float) -> Markup:
    head = element("span", name) if name else ""
    return element("div", head, bar(used, USED), element("span", has, class_="has"), class_="gpu")


# --- the week


def week_page(nodes: Sequence[Node], weeks: Mapping[str, Sequence[int | None]], one: Survival | None) -> Shown:
    """`weeks`: of each node's `mesh debug survive`, by nick; `one`: all of a node's, if one is looked at."""
    links = [element("li", element("a", "All nodes", href="/week", aria_current=None if one else "true"))]
    for row in sorted(nodes, key=lambda row: row.nick)[:MOST_SHOWN]:
        here = one is not None and one.node == row.node
        link = element("a", row.nick, href=f"/week?node={row.node}", aria_current="true" if here else None)
        links.append(element("li", link))
    if one is None:
        says = f"In per cent of each hour of the week: how much of {plural(len(weeks), 'node')} was lent, by what they tell."
        parts = [heatmap(together(list(weeks.values())), says)]
    else:
        parts = [
            *_stays(one),
            heatmap(one.week, f"In per cent of each hour of the week: how much of it {one.nick} was lent."),
        ]
    return Shown(
        {
            "week": element("div", *parts, id="week"),
            "which": element("nav", element("ul", *links), id="which", aria_label="Nodes"),
        }
    )


def together(weeks: Sequence[Sequence[int | None]]) -> list[int | None]:
    """The mean of those that know an hour."""
    found: list[int | None] = []
    for hour in range(7 * HOURS):
        known = [share for week in weeks if len(week) > hour and (share := week[hour]) is not None]
        found.append(round(sum(known) / len(known)) if known else None)
    return found


def heatmap(week: Sequence[int | None], caption: str) -> Markup:
    """A row a day, a column an hour; darker (or, on dark, lighter) is more; the number says it too."""
    heads = [element("td"), *(element("th", f"{hour:02}", scope="col") for hour in range(HOURS))]
    rows = []
    for number, day in enumerate(DAYS):
        cells = [_cell(share) for share in week[HOURS * number : HOURS * (number + 1)]]
        rows.append(element("tr", element("th", element("abbr", day[:3], title=day), scope="row"), *cells))
    made = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads)),
        element("tbody", *rows),
        class_="heat",
    )
    key = element("p", "· is not known yet. Hours are this machine's.", class_="muted")
    return join(element("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption), key)


def _cell(share: int | None) -> Markup:
    if share is None:
        return element("td", "·", class_="none")
    return element("td", str(share), class_=f"h{min(LEVELS - 1, max(0, share) * LEVELS // 101)}")


def _stays(one: Survival) -> list[Markup]:
    if one.lent_since_unix is None:
        return [element("p", f"{one.nick} is not lent now.")]
    words = f"{one.nick} has been lent for {lasting(time.time() - one.lent_since_unix)}."
    if one.until_unix:
        words += f" Its owner takes it back {when(one.until_unix)}."
    chances = [
        element(
            "li",
            f"{lasting(row.horizon_min * 60)}: {row.probability:.0%} ({row.low:.0%} to {row.high:.0%})",
        )
        for row in one.survival
    ]
    return [
        element("p", words),
        element("p", "How likely it is to stay, with the interval of 90 %:"),
        element("ul", *chances),
    ]
