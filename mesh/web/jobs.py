"""The list of jobs, and one job looked at closely: its attempts over time, what is at risk, what was saved and where that is."""

from collections.abc import Sequence

import msgspec

from mesh.api.schemas.checkpoints import Stored
from mesh.api.schemas.jobs import Described, Job, Saving, Why
from mesh.util.byte_text import amount
from mesh.util.duration import lasting
from mesh.util.text import HEEDS, WHY, doing, plural, saving_words, standby_text
from mesh.web.frame import Shown, badge, clock, pairs, table
from mesh.web.markup import Markup, cut, element, join

BAR = 100  # width of a timeline's own coordinates
MOST_SHOWN = 50  # the newest jobs of a list (own choice)
EVENTS_SHOWN = 40
STORED_SHOWN = 8  # the newest of a job
LONGEST = 80  # characters of a command or reason in a list
RAN, ENDED_WELL, LOST, WAITED = 0, 2, 1, 3  # colours of the series
SHAPES = 5  # series that tell one node from another


def jobs_page(rows: Sequence[Job], user: str, now_unix: float) -> Shown:
    """Return the list of this user's jobs and of the others' jobs."""
    newest = sorted(rows, key=lambda row: (row.outcome is None, row.created_unix_ms), reverse=True)
    mine = [row for row in newest if row.user == user]
    others = [row for row in newest if row.user != user]
    going = [row for row in mine if row.outcome is None]
    risk = sum(row.at_risk_s for row in going)
    words = f"{plural(len(going), 'job')} of yours under way"
    words += f", {lasting(risk)} of work at risk" if risk >= 1 else ", no work at risk" if going else ""
    parts = {
        "sum": element("p", words, id="sum", class_="sum"),
        "mine": _list("Your jobs", mine, now_unix, "mine", "None yet: `mesh submit -- COMMAND` makes one."),
        "others": _list("Others' jobs", others, now_unix, "others", "None that this node knows."),
    }
    return Shown(parts, {row.job: _said(row) for row in mine})


def _said(row: Job) -> str:
    return f"{_called(row)}: {row.state}" + (f" on {row.node}" if row.node else "")


def _called(row: Job) -> str:
    return str(row.name or row.job[:8])


def _list(title: str, rows: Sequence[Job], now_unix: float, name: str, none: str) -> Markup:
    if not rows:
        return element("section", element("h2", title), element("p", none, class_="muted"), id=name)
    header = ("Job", "State", "On", "Progress", "At risk", "Attempts over time")
    body = [_row(row, now_unix) for row in rows[:MOST_SHOWN]]
    left = len(rows) - MOST_SHOWN
    more = element("p", f"{left} older: `mesh ps -a` lists all", class_="muted") if left > 0 else ""
    shown = table(f"{plural(len(rows), 'job')}, newest first", header, body)
    return element("section", element("h2", title), shown, more, id=name)


def _row(row: Job, now_unix: float) -> list[str]:
    short = row.job[:8]
    link = element("a", row.name or short, href=f"/jobs/{row.job}")
    what = element("span", cut(" ".join(row.command.split()), LONGEST), class_="muted")
    first = join(link, f" {short}" if row.name else "", element("br"), what)
    words = doing(row.detail, None if row.saving is None else msgspec.to_builtins(row.saving))
    detail = join(element("br"), element("span", cut(words, LONGEST), class_="muted")) if words else ""
    return [
        first,
        join(_state(row), detail),
        row.node or "",
        _progress(row),
        lasting(row.at_risk_s) if row.at_risk_s else "",
        join(timeline(row, now_unix), _where(row)),
    ]


def _where(row: Job) -> str:
    """Return the nodes of a job that has moved."""
    nodes = [attempt.node for attempt in row.attempts]
    return element("span", ", ".join(nodes[-SHAPES:]), class_="muted") if len(nodes) > 1 else ""


def _state(row: Job) -> Markup:
    kinds = {
        "running": "busy",
        "done": "good",
        "failed": "warn",
        "stranded": "warn",
        "saving": "busy",
        "vacating": "warn",
    }
    return badge(row.state, kinds.get(row.state, ""))


def _progress(row: Job) -> str:
    if row.step is None:
        return ""
    return f"step {row.step}" + (f" of {row.of}" if row.of else "")


def timeline(row: Job, now_unix: float) -> Markup:
    """Draw a job from its submission to its end, or to now: a bar for each attempt, in its node's colour; gaps are waiting."""
    attempts = row.attempts
    if not attempts:
        return Markup()
    outcome = row.outcome
    begun = row.created_unix_ms
    now_ms = now_unix * 1000
    over = max(outcome.ended_unix_ms if outcome else now_ms, begun + 1)
    nodes = list(dict.fromkeys(attempt.node for attempt in attempts))
    drawn, texts = [], []
    for attempt in attempts:
        since = max(begun, attempt.started_unix_ms)
        end = attempt.ended_unix_ms or (max(since, attempt.seen_unix_ms) if attempt.reason else over)
        x = BAR * (since - begun) / (over - begun)
        width = max(0.6, BAR * (min(end, over) - since) / (over - begun))
        colour = nodes.index(attempt.node) % SHAPES
        drawn.append(element("rect", x=min(x, BAR - width), y=3, width=width, height=14, class_=f"f{colour} cut"))
        why = attempt.reason or "under way"
        texts.append(f"{attempt.node} {lasting(max(0, end - since) / 1000)}, {why}")
    first = attempts[0].number
    before = f"the last of {attempts[-1].number + 1}, " if first else ""
    words = f"{before}{plural(len(attempts), 'attempt')} in {lasting((over - begun) / 1000)}: {'; '.join(texts)}"
    rail = element("rect", x=0, y=9, width=BAR, height=2, class_="rail")
    box = {"viewBox": f"0 0 {BAR} 20", "preserveAspectRatio": "none"}
    return element(
        "svg",
        element("title", words),
        rail,
        *drawn,
        class_="time",
        role="img",
        aria_label=words,
        focusable="false",
        **box,
    )


# --- one job


def job_page(
    row: Job,
    described: Described | None,
    reasons: Why | None,
    stored: Sequence[Stored],
    now_unix: float,
) -> Shown:
    """Return the page of one job; answers that are None have been requested and will follow."""
    whole = row if described is None else msgspec.structs.replace(row, attempts=described.job.attempts)
    parts = {
        "state": element("div", *_head(row), id="state"),
        "course": element("section", *_course(whole, now_unix), id="course"),
        "saved": element("section", *_saved(row, stored), id="saved"),
        "why": element("section", *_why(row, reasons), id="why"),
        "events": element("section", *_events(described), id="events"),
    }
    return Shown(parts, {row.job: _said(row)})


def _head(row: Job) -> list[Markup]:
    rows: list[tuple[str, str]] = [
        ("Job", element("code", row.job)),
        ("User", f"{row.user}, from {row.submitter}"),
        ("Command", element("code", cut(row.command, 4 * LONGEST))),
        ("Submitted", clock(row.created_unix_ms)),
    ]
    if row.node:
        rows.append(("Runs on", ", ".join([row.node, *filter(None, row.gang)])))
    if row.gpus:
        share = f"{row.gpu_share} % of " if row.gpu_share < 100 else ""
        rows.append(("GPUs", f"{share}{row.gpus}"))
    if row.step is not None:
        rows.append(("Progress", _progress(row)))
    rows.append(("Record", f"kept by {', '.join(filter(None, row.witnesses))}"))
    if row.outcome is None:
        rows.append(
            ("At risk", f"{lasting(row.at_risk_s)} of work, if its host died now" if row.at_risk_s else "nothing")
        )
        if row.heeds_notice is not None:
            rows.append(("At a notice", HEEDS[row.heeds_notice]))
    else:
        code = row.outcome.exit_code
        rows.append(("Ended", join(clock(row.outcome.ended_unix_ms), f", exit {code}" if code is not None else "")))
    detail = join(" ", element("span", row.detail)) if row.detail else ""
    return [element("p", _state(row), detail), pairs(rows)]


def _course(row: Job, now_unix: float) -> list[Markup]:
    head = element("h2", "Attempts")
    if not row.attempts:
        return [head, element("p", "None yet.", class_="muted")]
    rows = []
    for attempt in row.attempts:
        end = attempt.ended_unix_ms or (attempt.seen_unix_ms if attempt.reason else now_unix * 1000)
        ran = lasting(max(0, end - attempt.running_unix_ms) / 1000) if attempt.running_unix_ms else ""
        steps = ["" if step is None else str(step) for step in (attempt.resumed_step, attempt.last_step)]
        began = clock(attempt.started_unix_ms)
        rows.append([str(attempt.number), attempt.node, began, ran, *steps, attempt.reason or "under way"])
    header = ("Attempt", "Node", "Began", "Ran", "From step", "To step", "Ended")
    return [head, timeline(row, now_unix), table("Each time it ran", header, rows, numbers=(4, 5))]


def _saved(row: Job, stored: Sequence[Stored]) -> list[Markup]:
    kept, due = row.checkpoint, row.next_checkpoint
    lines: list[tuple[str, str]] = []
    if kept is not None:
        step = f" at step {kept.step}" if kept.step is not None else ""
        lines.append(("Last", join(f"number {kept.seq}{step}, ", clock(kept.created_unix_ms))))
        lines.append(
            ("Its replicas", (", ".join(kept.holders) or "on its host alone") + (" (at risk)" if kept.at_risk else ""))
        )
    if row.saving is not None:
        lines.append(("Under way", _far(row.saving)))
    if due is not None:
        lines.append(("Next", join("due ", clock(due.due_unix * 1000), f", {WHY.get(due.why, due.why)}")))
        lines.append(("Expected loss", f"{due.loss_s:.1f} s of work until then"))
    if row.standby is not None and row.outcome is None:
        lines.append(("Standby", standby_text(row.standby, row.warm)))
    made = [element("h2", "Checkpoints"), pairs(lines) if lines else element("p", "None yet.", class_="muted")]
    if stored:
        newest = sorted(stored, key=lambda one: (-one.created_unix, -one.seq))[:STORED_SHOWN]
        rows = [
            [
                f"{one.kind} {one.seq}",
                clock(one.created_unix * 1000),
                amount(one.bytes),
                one.use,
                ", ".join(one.holders) or "-",
            ]
            for one in newest
        ]
        made.append(
            table(
                f"In this node's own store, the newest of {len(stored)}",
                ("What", "Made", "Size", "Use", "Replicas"),
                rows,
            )
        )
    return made


def _far(saving: Saving) -> Markup:
    words = saving_words(msgspec.to_builtins(saving))
    if not saving.bytes:
        return join(words)
    return join(element("progress", value=saving.sent, max=saving.bytes, aria_label=words), f" {words}")


def _why(row: Job, reasons: Why | None) -> list[Markup]:
    title = element("h2", "Why it is where it is" if row.node else "Why")
    if reasons is None:
        return [title, element("p", "Still being asked for.", class_="muted")]
    items = [element("li", line) for line in reasons.explanation]
    chosen = [element("li", f"{one.nick}: may take it (survival {one.weight} of 64)") for one in reasons.candidates[:5]]
    refused = [element("li", f"{one.nick}: {'; '.join(one.reasons)}") for one in reasons.refused[:20]]
    return [title, element("p", "For its next attempt:"), element("ul", *items, *chosen, *refused)]


def _events(described: Described | None) -> list[Markup]:
    title = element("h2", "Events")
    if described is None:
        return [title, element("p", "Still being asked for.", class_="muted")]
    items = [
        element("li", clock(event.unix_ms), element("span", event.actor), element("span", event.text))
        for event in reversed(described.events[-EVENTS_SHOWN:])
    ]
    return [
        title,
        element("ol", *items, class_="events", tabindex="0", role="list", aria_label="Events, the newest first"),
    ]
