"""The owner's page: what is lent and why not, one large button to take the machine back, and what that would cost."""

from collections.abc import Sequence

import msgspec

from mesh.api.schemas.owner import Cost, Lend
from mesh.util.duration import lasting
from mesh.util.text import COST, cost_cells, lend_lines, plural
from mesh.web.frame import Shown, Viewer, form, table
from mesh.web.markup import Markup, element


def lend_page(
    viewer: Viewer,
    state: Lend,
    cost: Sequence[Cost],
    notice_s: float,
    under_way: str,
    problem: str = "",
) -> Shown:
    """Return the owner's page; `under_way`: progress or result of the last order."""
    lines = lend_lines(msgspec.to_builtins(state))
    warnings = [*filter(None, [state.problem]), *state.warnings]
    notes = [
        element("p", lines[0][:1].upper() + lines[0][1:]),
        *(element("p", line.strip(), class_="muted") for line in lines[1:]),
    ]
    notes += [element("p", warning, class_="note") for warning in warnings]
    parts = {
        "now": element("div", *notes, id="now"),
        "order": element(
            "div",
            element("p", problem, class_="note") if problem else "",
            element("p", under_way, class_="say") if under_way else "",
            id="order",
        ),
        "buttons": element("div", *_buttons(viewer, state, notice_s), class_="big", id="buttons"),
        "at-once": _at_once(viewer, state),
        "cost": element("section", element("h2", "What taking it back costs now"), *_cost(cost, notice_s), id="cost"),
    }
    facts = {"lend": lines[0].strip(), "order": problem or under_way}
    return Shown(parts, {name: words for name, words in facts.items() if words})


def _buttons(viewer: Viewer, state: Lend, notice_s: float) -> list[Markup]:
    guests = state.guests
    pause = form(viewer, "/lend/pause", _button("PAUSE", "no new guests; those here stay"))
    resume = form(viewer, "/lend/resume", _button("RESUME", "lend this machine", "give"))
    words = f"{plural(guests, 'guest gets', 'guests get')} {lasting(notice_s)} to save and move on"
    reclaim = form(viewer, "/lend/reclaim", _button("RECLAIM", words if guests else "there are no guests now", "take"))
    open_now = state.lending and not state.paused and not any(gpu.withheld for gpu in state.gpus)
    return [reclaim, pause] if open_now else [resume, reclaim] if guests else [resume]


def _button(name: str, words: str, kind: str = "") -> Markup:
    return element("button", name, element("small", words), type="submit", id=f"do-{name.lower()}", class_=kind or None)


def _at_once(viewer: Viewer, state: Lend) -> Markup:
    if not state.guests:
        return element("div", id="at-once")
    words = "Guests are killed now, and go on from their last checkpoint elsewhere; what is at risk is lost."
    press = form(viewer, "/lend/reclaim", element("button", "Reclaim at once", id="do-kill"), now="1")
    return element(
        "div", element("details", element("summary", "Without waiting"), element("p", words), press), id="at-once"
    )


def _cost(rows: Sequence[Cost], notice_s: float) -> list[Markup]:
    if not rows:
        return [element("p", "There are no guests: it costs nothing.")]
    body = [[row.name or row.job[:8], row.user, *cost_cells(msgspec.to_builtins(row))] for row in rows]
    return [table(f"Whose work it is, with a notice of {lasting(notice_s)}", ("Job", "User", *COST), body)]
