"""The report: safe with any world name, distinguishable colours, and reproducible bytes."""

import csv
import io
import json
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh.cli.main import cli
from mesh.util.sanitize import fit
from mesh.web.markup import Markup, element, escape, number
from mesh.web.palette import DARK, LIGHT, Palette, contrast, linear
from sim.campus.observation import AbsenceSpan, Observation, availability, observe
from sim.campus.sensitivity import Bar, Tornado
from sim.campus.statistics import Interval
from sim.campus.study import Sample
from sim.campus.world_files import find_world
from sim.report.figure import Figure, as_csv
from sim.report.page import MAX_BYTES, Chapter, ReportError, figures, page, write_data
from sim.report.plot import WIDTH
from sim.report.scale import Scale, decades, ticks, written
from tests.e2e.browser import Page
from tests.outline import outline

TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
HOSTILE = "</title></style><script>alert(1)</script>\"'&<!--\x00\u202e]]>"


# --- colours


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_enough_contrast(palette: Palette) -> None:
    for ground in (palette.ground, palette.raised):
        assert contrast(palette.text, ground) >= 7 and contrast(palette.muted, ground) >= 4.5  # WCAG 2.2: AAA, AA
        assert contrast(palette.link, ground) >= 4.5
    for colour in palette.series:
        assert contrast(colour, palette.ground) >= 3 and contrast(colour, palette.raised) >= 2.8, colour
    for ground, words in zip(palette.heat, palette.heat_text, strict=True):
        assert contrast(ground, words) >= 4.5, ground
    light = [contrast(ground, "#000000") for ground in palette.heat]
    assert light == sorted(light) or light == sorted(light, reverse=True)  # monotonic lightness


# Normal sight and complete dichromacies (Machado, Oliveira and Fernandes 2009), on linear light.
SIGHTS = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def lab(colour: str, sight: str) -> tuple[float, float, float]:
    """Return CIE 1976 L*a*b* for white point D65."""
    light = linear(colour)
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, light, strict=True)))) for row in SIGHTS[sight]]
    red, green, blue = seen
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_series_are_distinct_for_colour_blind_readers(palette: Palette, sight: str) -> None:
    for one, other in combinations(palette.series, 2):
        apart = sum((a - b) ** 2 for a, b in zip(lab(one, sight), lab(other, sight), strict=True)) ** 0.5
        assert apart > 18, (one, other)  # 2.3 is just noticeable


# --- text


@given(TEXTS, TEXTS)
def test_text_is_escaped_everywhere(inside: str, value: str) -> None:
    made = element("p", inside, title=value)
    made.encode("utf-8")
    found = outline(made)
    assert (
        found.tags == ["p"] and found.attributes == [("title", fit(value).replace("\r\n", "\n").replace("\r", "\n"))]
    ) or ("\r" in value and found.tags == ["p"])
    assert "".join(found.text) == fit(inside)
    assert escape(escape(inside)) == escape(inside)


def test_numbers_are_formatted_briefly() -> None:
    assert [number(value) for value in (1.0, 0.126, -0.001, 12.5)] == ["1", "0.13", "0", "12.5"]
    assert [written(value) for value in (0, 1234.5, 0.123456, 99.99, 1e-7, 2e9, -0.5, 1000)] == [
        "0", "1,230", "0.123", "100", "1e-07", "2e+09", "-0.5", "1,000",
    ]  # fmt: skip


# --- scales


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
@example(81_357.0, 431_000.0, 2)  # a step of 500,000 has no multiple in this range
def test_ticks_are_round_ordered_and_in_range(low: float, length: float, count: int) -> None:
    high = low + length
    found = ticks(low, high, count)
    assert 1 <= len(found) <= 2 * count + 2
    assert all(low - length * 1e-6 <= tick <= high + length * 1e-6 for tick in found)
    steps = [b - a for a, b in pairwise(found)]
    assert all(step == pytest.approx(steps[0], rel=1e-3) for step in steps)


@given(st.floats(1e-6, 1e3), st.floats(1.1, 1e6), st.lists(st.floats(-1e9, 1e9), min_size=2), st.booleans())
def test_scale_keeps_order_and_bounds(low: float, ratio: float, values: list[float], log: bool) -> None:
    scale = Scale(low, low * ratio, 700.0, 20.0, log)
    places = [scale(value) for value in sorted(values)]
    assert all(20 - 1e-6 <= place <= 700 + 1e-6 for place in places)
    assert places == sorted(places, reverse=True)
    assert all(low * (1 - 1e-6) <= decade <= low * ratio * (1 + 1e-6) for decade in decades(low, low * ratio))


# --- the page


INTERVAL = Interval(0.2, 0.1, 0.3, 2)


@pytest.fixture(scope="module")
def chapter() -> Chapter:
    world = find_world("gpunion-11", ["days=3", "warm_up=0.2"])
    policies = ("mesh", "slurm-s60", "periodic-5", "periodic-60")
    seen = {policy: [observe(world, policy, 1, policy == "mesh")] for policy in policies}
    samples = {policy: Sample(policy) for policy in policies}
    for policy, side in samples.items():
        side.by_seed = {seed: msgspec.structs.replace(seen[policy][0].result, seed=seed) for seed in (1, 2)}
    bars = [Bar("notice share", end, "half", INTERVAL, INTERVAL) for end in ("low", "high")]
    turned = Tornado(world.name, "mesh", "work_loss", INTERVAL, bars)
    return Chapter(world, samples, seen, ["mesh", "periodic-5", "periodic-60"], availability(world, [1]), turned)


def named(chapter: Chapter, name: str) -> Chapter:
    """Return the chapter with this text in every name that a file can set."""

    def machine(one: str) -> str:
        return f"{one[:2]}{name}{one}"

    def renamed(seen: Observation) -> Observation:
        return msgspec.structs.replace(
            seen,
            gpus={machine(one): count for one, count in seen.gpus.items()},
            runs=[msgspec.structs.replace(run, machine=machine(run.machine)) for run in seen.runs],
            away=[AbsenceSpan(machine(one.machine), one.start_s, one.end_s, one.kind) for one in seen.away],
        )

    world = msgspec.structs.replace(chapter.world, name=name, description=name)
    seen = {policy: [renamed(one) for one in runs] for policy, runs in chapter.seen.items()}
    return msgspec.structs.replace(chapter, world=world, seen=seen)


@pytest.fixture(scope="module")
def tags(chapter: Chapter) -> list[str]:
    return outline(page([named(chapter, "x")], [], "mesh")).tags


@example(HOSTILE)
@given(st.text(min_size=1, max_size=40) | st.text("<>&'\"/=-!ab", min_size=1, max_size=40))  # as TOML allows
@settings(max_examples=12)
def test_names_add_no_markup_to_a_page(chapter: Chapter, tags: list[str], name: str) -> None:
    made = page([named(chapter, name)], [], f"mesh debug sim report {name}")
    assert outline(made).tags == tags
    made.encode("utf-8")


def test_page_has_no_scripts_and_no_external_resources(chapter: Chapter) -> None:
    found = outline(page([named(chapter, HOSTILE)], [], HOSTILE))
    assert not {"script", "img", "iframe", "object", "link", "form", "base"} & set(found.tags)
    for key, value in found.attributes:
        assert not key.startswith("on") and key not in {"src", "srcset", "xlink:href"}
        if key == "href":
            assert value is not None and value.startswith(("#", "data:text/csv"))
    assert "url(" not in "".join(found.text) and "@import" not in "".join(found.text)


def test_each_figure_has_a_summary_and_data(chapter: Chapter) -> None:
    found = figures(chapter, "w1")
    assert len({figure.name for figure in found}) == len(found) == 10
    for figure in found:
        root = ElementTree.fromstring(figure.picture)
        assert root.get("role") == "img" and root[0].text == figure.title and root[1].text == figure.summary
        assert root.get("aria-labelledby") == f"{root[0].get('id')} {root[1].get('id')}"
        assert figure.rows and all(len(row) == len(figure.columns) for row in figure.rows), figure.name


def test_nothing_is_drawn_outside_its_picture(chapter: Chapter) -> None:
    for figure in figures(named(chapter, "m" * 60), "w1"):
        root = ElementTree.fromstring(figure.picture)
        height = float((root.get("viewBox") or "").split()[3])
        for one in root.iter():
            if one.tag == "text":
                reach = 6.0 * len(one.text or "")
                x = float(one.get("x") or 0) - {None: 0.0, "middle": reach / 2, "end": reach}[one.get("text-anchor")]
                assert x >= -1 and x + reach <= WIDTH + 8, (figure.name, one.text)
                assert 0 <= float(one.get("y") or 0) <= height
            elif one.tag == "rect":
                assert float(one.get("x") or 0) >= -1
                assert float(one.get("x") or 0) + float(one.get("width") or 0) <= WIDTH + 1, figure.name
                assert float(one.get("y") or 0) + float(one.get("height") or 0) <= height + 1, figure.name


def test_world_without_departures_has_a_page() -> None:
    quiet = ["days=0.5", "jobs.at_start=0", "jobs.per_day=0"]
    world = find_world(
        "gpunion-11", [*quiet, *(f"owners.{name}.reclaims_per_day=0" for name in ("labs", "volunteers"))]
    )
    seen = {"mesh": [observe(world, "mesh", 1, True)]}
    side = Sample("mesh")
    side.by_seed[1] = seen["mesh"][0].result
    made = page([Chapter(world, {"mesh": side}, seen, ["mesh"], availability(world, [1]))], [], "mesh")
    assert "Of 11 stays, fewer than half end" in made
    assert outline(made).tags.count("svg") == 9


def test_too_large_page_is_rejected(chapter: Chapter) -> None:
    with pytest.raises(ReportError, match="Choose fewer worlds or policies"):
        page([chapter] * 12, [], "mesh")


def test_data_is_written_as_csv_and_json(chapter: Chapter, tmp_path: Path) -> None:
    wild = named(chapter, "=cmd()\r\n../..")
    paths = write_data([wild], [], tmp_path / "data")
    assert all(path.is_relative_to(tmp_path / "data" / "01") for path in paths) and len(paths) == 20
    for path in paths:
        if path.suffix == ".csv":
            lines = list(csv.reader(io.StringIO(path.read_text(), newline="")))
            assert len({len(line) for line in lines}) == 1 and len(lines) > 1
        else:
            told = json.loads(path.read_text())
            assert told["schema"] == 1 and told["rows"] and len(told["columns"]) == len(told["rows"][0])


def test_csv_cells_are_never_formulas() -> None:
    texts = ("=1+1", "+1", "-1", "@x", "\t=1", "plain")
    figure = Figure("f", "t", "s", Markup(), ("a",), [*((text,) for text in texts), (-1.5,)])
    replications = [row[0] for row in csv.reader(io.StringIO(as_csv(figure), newline=""))]
    assert replications == ["a", "'=1+1", "'+1", "'-1", "'@x", "'\t=1", "plain", "-1.5"]


# --- the command


def report(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, ["debug", "sim", "report", *words])
    return done.exit_code, done.stdout, done.stderr


def test_same_studies_give_the_same_page(tmp_path: Path) -> None:
    words = ("gpunion-11", "--days", "1", "--seeds", "2", "--policy", "mesh", "--policy", "slurm-s0")
    one, other = tmp_path / "one.html", tmp_path / "other.html"
    keep = tmp_path / "kept.jsonl"
    code, out, _ = report(*words, "-o", str(one), "--executor", "serial", "--keep", str(keep), "--json")
    told = json.loads(out)
    assert code == 0 and told["complete"] and told["bytes"] == one.stat().st_size <= MAX_BYTES
    assert told["worlds"][0]["n"] == 2 and not told["data"]
    assert report(*words, "-o", str(other), "--workers", "2", "--keep", str(keep))[0] == 0
    assert one.read_bytes() == other.read_bytes()
    text = one.read_text()
    assert "What the papers claim" in text and "migrate back" in text and "Kaplan-Meier" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.jsonl", "one.html", "other.html"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere",), "unknown world 'nowhere'"),
        (("gpunion-11", "--policy", "best"), "unknown policy 'best'"),
        (("gpunion-11", "-o", "/nowhere/at/all.html"), "is not a writable directory"),
        (("gpunion-11", "-o", "/"), "is a directory"),
        (tuple("abcde"), "5 worlds; a report has at most 4"),
    ],
)
def test_usage_errors_come_before_any_run(words: tuple[str, ...], told: str) -> None:
    code, out, err = report(*words)
    assert code == 2 and told in err and not out and "Traceback" not in err


# --- in a browser


@pytest.mark.browser
async def test_browser_shows_the_page_without_requests(chapter: Chapter, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page([named(chapter, HOSTILE + "M" * 60)], [], HOSTILE), "utf-8")
    async with Page("about:blank") as browser:
        for domain in ("Runtime", "Log", "Network", "Accessibility"):
            await browser.call(f"{domain}.enable")
        await browser.call("Page.navigate", url=file.as_uri())
        await browser.until(
            "document.readyState === 'complete' && document.querySelector('footer')", "the page to be shown"
        )
        tree = (await browser.call("Accessibility.getFullAXTree"))["nodes"]
        pictures = [node for node in tree if node.get("role", {}).get("value") in {"image", "img", "graphics-document"}]
        assert len(pictures) == 10
        assert all(node["name"]["value"] and len(node["name"]["value"]) > 20 for node in pictures)
        for width in (1280, 400):
            await browser.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
            )
            assert await browser.run("document.documentElement.scrollWidth") <= width  # only figures scroll sideways
        grounds = []
        for mode in ("light", "dark"):
            scheme = [{"name": "prefers-color-scheme", "value": mode}]
            await browser.call("Emulation.setEmulatedMedia", features=scheme)
            grounds.append(await browser.run("getComputedStyle(document.body).backgroundColor"))
        assert len(set(grounds)) == 2
        assert await browser.run("document.querySelectorAll('details').length") == 10
        await browser.run("document.querySelector('summary').focus()")
        await browser.press("Enter")
        assert await browser.run("document.querySelector('details').open")
        events = browser.events
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert asked == [file.as_uri()]
    trouble = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert [event for event in events if event["method"] in trouble] == []
