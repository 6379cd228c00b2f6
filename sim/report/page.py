"""The report: one self-contained HTML file. The same studies give the same bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mesh.web.markup import Markup, cut, element, join
from mesh.web.palette import DARK, LEVELS, LIGHT, style
from sim.campus.claims import ClaimResult
from sim.campus.metrics import METRICS
from sim.campus.observation import Observation
from sim.campus.policies import PERIODIC
from sim.campus.sensitivity import Tornado
from sim.campus.statistics import mean_of
from sim.campus.study import Sample, common_seeds
from sim.campus.world import World
from sim.report import churn, losses, timeline
from sim.report.figure import Figure, as_csv, as_json, as_table, joined
from sim.report.scale import written

MAX_BYTES = 1_500_000
MAX_NAME_LENGTH, MAX_TEXT_LENGTH = 80, 400
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
    """The report exceeds its size limit."""


class Chapter(msgspec.Struct, frozen=True):
    """The results of one world.

    `samples` has all policies that ran. `seen` has the observed runs of the drawn policies; the figures of a single run show
    the first of them. `saving` names the policies in the figure of checkpoint intervals.
    """

    world: World
    samples: Mapping[str, Sample]
    seen: Mapping[str, Sequence[Observation]]
    saving: Sequence[str]
    by_hour: Sequence[Sequence[float]]
    tornado: Tornado | None = None

    @property
    def seeds(self) -> list[int]:
        return common_seeds(*self.samples.values())


def figures(chapter: Chapter, place: str) -> list[Figure]:
    """Return all figures of a world; `place` makes their ids unique on the page."""
    first = next(iter(chapter.seen.values()))[0]
    seeds = chapter.seeds
    saving = {
        policy: (
            mean_of(chapter.samples[policy].values("overhead", seeds)),
            mean_of(chapter.samples[policy].values("work_loss", seeds)),
        )
        for policy in chapter.saving
    }
    found = [
        churn.availability(chapter.by_hour, place),
        timeline.utilisation(first, place),
        timeline.attempts(first, place),
        losses.work_loss(
            {policy: [one for run in runs for one in run.lost] for policy, runs in chapter.seen.items()}, place
        ),
        losses.downtime(
            {policy: [one for run in runs for one in run.down] for policy, runs in chapter.seen.items()}, place
        ),
        losses.intervals(saving, place),
        churn.survival(first, place),
        churn.calibration(first, place),
        timeline.uplinks(first, place),
    ]
    if chapter.tornado is not None:
        found.append(losses.sensitivity(chapter.tornado, METRICS[chapter.tornado.metric][0], place))
    return found


def page(chapters: Sequence[Chapter], claims: Sequence[ClaimResult], command: str) -> str:
    """Return the page; `command` reproduces it. Raises ReportError if it exceeds MAX_BYTES."""
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
                    "How jobs fare on a campus whose machines come and go, in virtual time. Intervals are 95 % intervals over "
                    "replications in which every policy meets the same events. The data of each figure is below it.",
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
    if size > MAX_BYTES:
        raise ReportError(
            f"the report would have {size / 1e6:.1f} MB; the limit is 1.5 MB. Choose fewer worlds or policies."
        )
    return found + "\n"


def _claims(claims: Sequence[ClaimResult]) -> Markup:
    if not claims:
        return Markup()
    rows = [
        element(
            "tr",
            element("th", row.source, scope="row"),
            element("td", row.claim),
            element("td", _share(row), class_="nowrap"),
            element("td", str(row.n), class_="number"),
            element("td", element("span", row.verdict, class_="verdict"), f"; {row.caveat}" if row.caveat else ""),
        )
        for row in claims
    ]
    head = element("tr", *(element("th", name, scope="col") for name in ("Paper", "Claim", "Here", "n", "Verdict")))
    table = element("table", element("thead", head), element("tbody", *rows))
    return join(
        element("h2", "What the papers claim", id="claims"),
        element(
            "p",
            "A claim is “met” or “not met” only if the whole interval agrees. No parameter was tuned to match. The assumptions "
            "about each testbed are in the file of its world.",
            class_="note",
        ),
        _scroll(table, "What the papers claim"),
    )


def _share(row: ClaimResult) -> str:
    value = f"{100 * row.value:.1f} %"
    return value if row.n < 2 else f"{value} ({100 * row.low:.1f} to {100 * row.high:.1f})"


def _chapter(chapter: Chapter, place: str) -> Markup:
    world, seeds = chapter.world, chapter.seeds
    gpus = sum(group.count * group.gpus for group in world.groups)
    observed = {policy: len(runs) for policy, runs in chapter.seen.items()}
    rows: list[list[str | float]] = []
    for policy in dict.fromkeys([*chapter.seen, *(name for name in chapter.samples if not PERIODIC.fullmatch(name))]):
        sample = chapter.samples[policy]
        rows.append([policy, *(_interval(sample.values(metric, seeds)) for metric in SHOWN)])
    counted = f" (the first {written(100 * world.warm_up)} % are warm-up and do not count)" if world.warm_up else ""
    units = ["policy", *(f"{metric.replace('_', ' ')}, {METRICS[metric][0]}" for metric in SHOWN)]
    return join(
        element("h2", _name(world), id=place),
        element("p", cut(world.description, MAX_TEXT_LENGTH)) if world.description else "",
        element(
            "p",
            f"{world.machines} machines with {gpus} GPUs, {written(world.days)} days{counted}; {_replications(seeds)}. "
            f"Distributions use {min(observed.values())} of them; figures over time show the first. "
            f"World {world.digest[:12]}.",
            class_="note",
        ),
        _scroll(as_table(units, rows), f"Metrics of {_name(world)}"),
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
    return cut(world.name, MAX_NAME_LENGTH) or "unnamed world"


def write_data(chapters: Sequence[Chapter], claims: Sequence[ClaimResult], folder: Path) -> list[Path]:
    """Write a CSV and a JSON file for the claims and for each figure; return the paths.

    Folders are numbered, because the name of a world can be any text.
    """
    tables: list[tuple[Path, Figure, str]] = []
    if claims:
        columns = ("paper", "claim", "world", "value", "low", "high", "n", "verdict", "caveat")
        rows = [
            (row.source, row.claim, row.world, row.value, row.low, row.high, row.n, row.verdict, row.caveat)
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


_SERIES = "".join(f".s{n}{{stroke:var(--series-{n})}}.f{n}{{fill:var(--series-{n})}}" for n in range(len(LIGHT.series)))
_HEAT = "".join(f".h{n}{{fill:var(--heat-{n})}}.t{n}{{fill:var(--heat-text-{n})}}" for n in range(LEVELS))
# Colours of the ends of attempts. Only attempts that lost work have this colour and an edge.
_ENDS = (
    ".e0{fill:var(--series-0)}.e1{fill:var(--series-2)}.e2{fill:var(--series-1);stroke:var(--text)}"
    ".e3{fill:var(--series-3)}.e4{fill:none;stroke:var(--series-0)}"
)

SHEET = f"""
:root{{color-scheme:light dark;{style(LIGHT)}}}
@media(prefers-color-scheme:dark){{:root{{{style(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--ground);color:var(--text);font:16px/1.5 system-ui,sans-serif}}
main,header,footer{{max-width:60rem;margin:0 auto;padding:0 1rem}}
h1{{font-size:1.7rem;line-height:1.2;margin:1.5rem 0 .5rem}}
h2{{font-size:1.35rem;margin:2.5rem 0 .5rem;padding-top:1rem;border-top:2px solid var(--grid)}}
h3{{font-size:1.05rem;margin:0}}
h1,h2,h3,p,li{{overflow-wrap:anywhere}}
a{{color:var(--link)}}
:focus-visible{{outline:3px solid var(--link);outline-offset:2px}}
.skip{{position:absolute;left:-100rem}}
.skip:focus{{left:1rem;top:1rem;background:var(--ground);padding:.5rem}}
nav ul{{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;list-style:none}}
figure{{margin:1.75rem 0;padding:1rem;background:var(--raised);border-radius:.5rem}}
figcaption p{{margin:.25rem 0 .75rem;color:var(--muted);font-size:.92rem}}
.scroll{{overflow-x:auto}}
svg{{display:block;width:100%;min-width:40rem;height:auto;font:12px system-ui,sans-serif}}
svg text{{fill:var(--text)}}
svg .tick{{fill:var(--muted);font-size:11.5px}}
svg .title{{fill:var(--text);font-size:12.5px}}
svg .replication{{font-size:10.5px}}
.grid{{stroke:var(--grid);fill:none}}
.axis{{stroke:var(--muted);fill:none}}
.line{{fill:none;stroke-width:2;stroke-linejoin:round}}
.mark{{stroke:var(--raised);stroke-width:1}}
.idle{{fill:var(--muted);opacity:.22}}
.band{{opacity:.22}}
.stripe{{fill:var(--ground);opacity:.6}}
.away{{fill:var(--muted);opacity:.35}}
.run{{stroke-width:1}}
{_SERIES}{_HEAT}{_ENDS}
table{{border-collapse:collapse;font-size:.85rem;margin:.5rem 0}}
caption{{text-align:left;color:var(--muted)}}
th,td{{padding:.3rem .7rem .3rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid)}}
thead th{{border-bottom:2px solid var(--muted)}}
td.number{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
tbody th{{font-weight:400}}
.scroll>table{{min-width:40rem}}
.nowrap,td.number,tbody th{{white-space:nowrap}}
.verdict{{font-weight:600;white-space:nowrap}}
.note{{color:var(--muted);font-size:.92rem}}
details{{margin-top:.75rem}}
details .scroll{{max-height:24rem;overflow:auto}}
summary{{cursor:pointer;width:max-content}}
code{{font-size:.9em;overflow-wrap:anywhere}}
footer{{color:var(--muted);font-size:.9rem;margin-top:3rem;padding-bottom:2rem}}
@media print{{
:root{{{style(LIGHT)}color-scheme:light}}
body{{font-size:10pt}}main,header,footer{{max-width:none}}
nav,details,.skip{{display:none}}
figure{{break-inside:avoid;border:1px solid var(--grid);background:none}}
h2{{break-before:page}}h2,h3,figcaption{{break-after:avoid}}
svg,.scroll>table{{min-width:0}}.scroll{{overflow:visible}}table{{font-size:.75em}}
}}
""".strip()
