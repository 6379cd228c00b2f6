"""The report: one HTML file that needs nothing else. The same studies give the same bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mesh.web.markup import Markup, cut, element, join
from sim.campus.headline import Row
from sim.campus.observation import Observation
from sim.campus.policies import PERIODIC
from sim.campus.sensitivity import Tornado
from sim.campus.statistics import mean_of
from sim.campus.study import Side, shared
from sim.campus.tally import FIGURES
from sim.campus.world import World
from sim.report import churn, course, losses
from sim.report.figure import Figure, as_csv, as_json, as_table, joined
from sim.report.scale import written
from sim.report.sheet import SHEET
from sim.report.tornado import sensitivity

MOST_BYTES = 1_500_000
LONGEST_NAME, LONGEST_TEXT = 80, 400
SHOWN = (
    "work_loss",
    "overhead",
    "downtime_mean",
    "migration_success",
    "migrate_back",
    "makespan_inflation",
    "utilisation",
)


class ReportError(ValueError):
    """A page that would not be what was promised."""


class Chapter(msgspec.Struct, frozen=True):
    """What is known of one world. `sides`: all policies that ran; `seen`: the runs that were looked at, of the policies that are
    drawn, the first of which is told of in detail; `saving`: the policies whose saving is drawn."""

    world: World
    sides: Mapping[str, Side]
    seen: Mapping[str, Sequence[Observation]]
    saving: Sequence[str]
    by_hour: Sequence[Sequence[float]]
    tornado: Tornado | None = None

    @property
    def seeds(self) -> list[int]:
        return shared(*self.sides.values())


def figures(chapter: Chapter, place: str) -> list[Figure]:
    """All of a world; `place` makes their names the only ones of the page."""
    first = next(iter(chapter.seen.values()))[0]
    seeds = chapter.seeds
    saving = {
        policy: (
            mean_of(chapter.sides[policy].values("overhead", seeds)),
            mean_of(chapter.sides[policy].values("work_loss", seeds)),
        )
        for policy in chapter.saving
    }
    found = [
        churn.availability(chapter.by_hour, place),
        course.utilisation(first, place),
        course.attempts(first, place),
        losses.work_loss(
            {policy: [one for run in runs for one in run.lost] for policy, runs in chapter.seen.items()}, place
        ),
        losses.downtime(
            {policy: [one for run in runs for one in run.down] for policy, runs in chapter.seen.items()}, place
        ),
        losses.intervals(saving, place),
        churn.survival(first, place),
        churn.calibration(first, place),
        course.uplinks(first, place),
    ]
    if chapter.tornado is not None:
        found.append(sensitivity(chapter.tornado, FIGURES[chapter.tornado.figure][0], place))
    return found


def page(chapters: Sequence[Chapter], claims: Sequence[Row], command: str) -> str:
    """ReportError if it is larger than a page may be. `command` is what makes it again."""
    bodies = [_chapter(chapter, f"w{number}") for number, chapter in enumerate(chapters, 1)]
    items = [("claims", "What the papers claim")] if claims else []
    items += [(f"w{number}", _name(chapter.world)) for number, chapter in enumerate(chapters, 1)]
    found = "<!DOCTYPE html>\n" + element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
            element("title", f"Campus study: {', '.join(_name(chapter.world) for chapter in chapters)}"),
            element("style", Markup(SHEET)),
        ),
        element(
            "body",
            element("a", "To the content", href="#content", class_="skip"),
            element(
                "header",
                element("h1", "Campus study"),
                element(
                    "p",
                    "What a campus's churn does to its jobs, in virtual time. Intervals are of 95 %, over replications with the "
                    "same luck for every policy. Each figure has its numbers below it.",
                ),
                element(
                    "nav",
                    element("ul", *(element("li", element("a", name, href=f"#{place}")) for place, name in items)),
                ),
            ),
            element("main", _claims(claims), *bodies, id="content"),
            element("footer", element("p", "Made by ", element("code", command), ".")),
        ),
        lang="en",
    )
    size = len(found.encode("utf-8"))
    if size > MOST_BYTES:
        raise ReportError(
            f"the report would have {size / 1e6:.1f} MB, and 1.5 are the most: take fewer worlds or policies"
        )
    return found + "\n"


def _claims(claims: Sequence[Row]) -> Markup:
    if not claims:
        return Markup()
    rows = [
        element(
            "tr",
            element("th", row.source, scope="row"),
            element("td", row.claim),
            element("td", _share(row), class_="nowrap"),
            element("td", str(row.n), class_="number"),
            element("td", element("span", row.verdict, class_="verdict"), f"; {row.differs}" if row.differs else ""),
        )
        for row in claims
    ]
    head = element("tr", *(element("th", name, scope="col") for name in ("Paper", "Claims", "Here", "n", "Verdict")))
    table = element("table", element("thead", head), element("tbody", *rows))
    return join(
        element("h2", "What the papers claim", id="claims"),
        element(
            "p",
            "“Met” and “not met” only where the whole interval says so. Nothing was tuned to match; what is assumed about either "
            "testbed stands in its world's file.",
            class_="note",
        ),
        _scroll(table, "What the papers claim"),
    )


def _share(row: Row) -> str:
    value = f"{100 * row.ours:.1f} %"
    return value if row.n < 2 else f"{value} ({100 * row.low:.1f} to {100 * row.high:.1f})"


def _chapter(chapter: Chapter, place: str) -> Markup:
    world, seeds = chapter.world, chapter.seeds
    gpus = sum(group.count * group.gpus for group in world.groups)
    looked = {policy: len(runs) for policy, runs in chapter.seen.items()}
    rows: list[list[str | float]] = []
    for policy in dict.fromkeys([*chapter.seen, *(name for name in chapter.sides if not PERIODIC.fullmatch(name))]):
        side = chapter.sides[policy]
        rows.append([policy, *(_interval(side.values(figure, seeds)) for figure in SHOWN)])
    counted = f" of which the first {written(100 * world.warm_up)} % are not counted" if world.warm_up else ""
    units = ["policy", *(f"{figure.replace('_', ' ')}, {FIGURES[figure][0]}" for figure in SHOWN)]
    return join(
        element("h2", _name(world), id=place),
        element("p", cut(world.says, LONGEST_TEXT)) if world.says else "",
        element(
            "p",
            f"{world.machines} machines with {gpus} GPUs, {written(world.days)} days{counted}; {_replications(seeds)}. "
            f"Distributions are of {min(looked.values())} of them, courses of the first. "
            f"World {world.digest[:12]}.",
            class_="note",
        ),
        _scroll(as_table(units, rows), f"Figures of {_name(world)}"),
        joined(figures(chapter, place), place),
    )


def _replications(seeds: Sequence[int]) -> str:
    return (
        f"{len(seeds)} replications (seeds {seeds[0]} to {seeds[-1]})"
        if len(seeds) > 1
        else f"one replication (seed {seeds[0]})"
    )


def _scroll(inside: Markup, name: str) -> Markup:
    return element("div", inside, class_="scroll", tabindex="0", role="region", aria_label=name)


def _interval(values: Sequence[float]) -> str:
    interval = mean_of(values)
    return (
        f"{written(interval.value)}\u00a0±\u00a0{written(interval.half, 2)}"
        if interval.n > 1
        else written(interval.value)
    )


def _name(world: World) -> str:
    return cut(world.name, LONGEST_NAME) or "a world without a name"


def write_data(chapters: Sequence[Chapter], claims: Sequence[Row], folder: Path) -> list[Path]:
    """A CSV and a JSON file for each figure, and of the claims; folders are numbers, as a world's name may be anything."""
    tables: list[tuple[Path, Figure, str]] = []
    if claims:
        columns = ("paper", "claim", "world", "ours", "low", "high", "n", "verdict", "differs")
        rows = [
            (row.source, row.claim, row.world, row.ours, row.low, row.high, row.n, row.verdict, row.differs)
            for row in claims
        ]
        title = "What the papers claim"
        tables.append((folder, Figure("claims", title, title, Markup(), columns, list(rows)), ""))
    for number, chapter in enumerate(chapters, 1):
        tables += [(folder / f"{number:02d}", one, chapter.world.name) for one in figures(chapter, f"w{number}")]
    written_to = []
    for inside, figure, name in tables:
        inside.mkdir(parents=True, exist_ok=True)
        for ending, data in (("csv", as_csv(figure)), ("json", as_json(figure, world=name))):
            path = inside / f"{figure.name}.{ending}"
            path.write_bytes(data.encode("utf-8", "replace"))
            written_to.append(path)
    return written_to
