"""The owner's page: what is lent and why not, one large button to take the machine back, and what that would cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from mesh.duration import lasting
from mesh.web.frame import Shown, Standing, count, form, table
from mesh.web.markup import Markup, element
from mesh.words import COST, cost_cells, lend_lines


def lend_page(
    standing: Standing,
    state: Mapping[str, Any],
    cost: Sequence[Mapping[str, Any]],
    notice_s: float,
    under_way: str,
    problem: str = "",
) -> Shown:
    """Of `mesh lend --json` and `mesh reclaim --dry-run --json`; `under_way`: what became of the last order."""
    lines = lend_lines(dict(state))
    warnings = [*filter(None, [state["problem"]]), *state["warnings"]]
    told = [
        element("p", lines[0][:1].upper() + lines[0][1:]),
        *(element("p", line.strip(), class_="muted") for line in lines[1:]),
    ]
    told += [element("p", warning, class_="note") for warning in warnings]
    parts = {
        "now": element("div", *told, id="now"),
        "order": element(
            "div",
            element("p", problem, class_="note") if problem else "",
            element("p", under_way, class_="say") if under_way else "",
            id="order",
        ),
        "buttons": element("div", *_buttons(standing, state, notice_s), class_="big", id="buttons"),
        "at-once": _at_once(standing, state),
        "cost": element("section", element("h2", "What taking it back costs now"), *_cost(cost, notice_s), id="cost"),
    }
    facts = {"lend": lines[0].strip(), "order": problem or under_way}
    return Shown(parts, {name: words for name, words in facts.items() if words})


def _buttons(standing: Standing, state: Mapping[str, Any], notice_s: float) -> list[Markup]:
    guests = state["guests"]
    pause = form(standing, "/lend/pause", _button("PAUSE", "no new guests; those here stay"))
    resume = form(standing, "/lend/resume", _button("RESUME", "lend this machine", "give"))
    words = f"{count(guests, 'guest gets', 'guests get')} {lasting(notice_s)} to save and move on"
    reclaim = form(standing, "/lend/reclaim", _button("RECLAIM", words if guests else "nobody is here now", "take"))
    open_now = state["lending"] and not state["paused"] and not any(gpu["withheld"] for gpu in state["gpus"])
    return [reclaim, pause] if open_now else [resume, reclaim] if guests else [resume]


def _button(name: str, words: str, kind: str = "") -> Markup:
    return element("button", name, element("small", words), type="submit", id=f"do-{name.lower()}", class_=kind or None)


def _at_once(standing: Standing, state: Mapping[str, Any]) -> Markup:
    if not state["guests"]:
        return element("div", id="at-once")
    words = "Guests are killed now, and go on from their last checkpoint elsewhere; what is at risk is lost."
    press = form(standing, "/lend/reclaim", element("button", "Reclaim at once", id="do-kill"), now="1")
    return element(
        "div", element("details", element("summary", "Without waiting"), element("p", words), press), id="at-once"
    )


def _cost(rows: Sequence[Mapping[str, Any]], notice_s: float) -> list[Markup]:
    if not rows:
        return [element("p", "Nobody is here: it costs nothing.")]
    body = [[row["name"] or row["job"][:8], row["user"], *cost_cells(row)] for row in rows]
    return [table(f"Whose work it is, with a notice of {lasting(notice_s)}", ("Job", "User", *COST), body)]
