"""The ledger: hours lent and borrowed, whose thanks are whose, and what ran on this machine lately."""

from collections.abc import Sequence
from typing import get_args

from mesh.api.schemas.mesh import Account, Run, Usage
from mesh.provider.usage import By
from mesh.util.duration import lasting
from mesh.util.text import hours, plural
from mesh.web.frame import Shown, bar, clock, table
from mesh.web.markup import Markup, element, join

MOST_SHOWN = 100  # rows (own choice)
RUNS_SHOWN = 20
LENT, BORROWED = 2, 0  # colours of the series


def ledger_page(answer: Usage, by: str, asking: bool) -> Shown:
    """Return the page of accounts; `asking`: the other nodes have not answered yet."""
    kinds = [
        element("li", element("a", f"By {kind}", href=f"/usage/{kind}", aria_current="true" if kind == by else None))
        for kind in get_args(By)
    ]
    notes = ["The other nodes are being asked; this is what this node has signed itself."] if asking else []
    if answer.silent:
        notes.append(f"Not counted, as they did not answer: {', '.join(answer.silent)}.")
    if answer.cut:
        notes.append(f"Only their newest receipts are counted: {', '.join(answer.cut)}.")
    parts = {
        "by": element("nav", element("ul", *kinds), id="by", aria_label="By whom"),
        "notes": element("div", *(element("p", note, class_="muted") for note in notes), id="notes"),
        "ledger": element("section", *_accounts(answer.rows, by, answer.since_unix_ms), id="ledger"),
        "runs": element("section", *_runs(answer.runs), id="runs"),
    }
    return Shown(parts)


def _accounts(rows: Sequence[Account], by: str, since_ms: int) -> list[Markup]:
    if not rows:
        return [element("p", "Nothing has run yet in that time.", class_="muted")]
    most = max(max(_all(row, "lent"), _all(row, "borrowed")) for row in rows) or 1.0
    body = []
    for row in rows[:MOST_SHOWN]:
        both = join(bar(_all(row, "lent") / most, LENT), bar(_all(row, "borrowed") / most, BORROWED))
        cells = [
            hours(getattr(row, f"{kind}_gpu_h"), getattr(row, f"{kind}_slot_h")) for kind in ("lent", "borrowed", "own")
        ]
        body.append([row.name, both, *cells, f"{row.lost_h:.3g}", str(row.attempts)])
    caption = join("Hours of whole GPUs, and after the + those of slots, since ", clock(since_ms))
    header = (by.capitalize(), "Lent over borrowed", "Lent", "Borrowed", "Own", "Lost", "Runs")
    return [table(caption, header, body, numbers=(2, 3, 4, 5, 6))]


def _all(row: Account, kind: str) -> float:
    return float(getattr(row, f"{kind}_gpu_h") + getattr(row, f"{kind}_slot_h"))


def _runs(runs: Sequence[Run]) -> list[Markup]:
    title = element("h2", "What ran on this machine")
    if not runs:
        return [title, element("p", "Nothing yet.", class_="muted")]
    body = [
        [
            element("a", run.name or run.job[:8], href=f"/jobs/{run.job}"),
            run.user,
            clock(run.from_unix_ms),
            lasting((run.until_unix_ms - run.from_unix_ms) / 1000),
            f"{run.gpu_percent / 100:g} GPU" if run.gpu_percent else "slot",
            run.end or "runs",
        ]
        for run in runs[:RUNS_SHOWN]
    ]
    header = ("Job", "User", "Began", "Ran", "Held", "End")
    return [title, table(f"{plural(len(runs), 'attempt')}, by signed receipts, newest first", header, body)]
