"""Worlds and traces from files: what is wrong is named with its line, and no bytes do worse than that."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.campus.churn import absences, machines
from sim.campus.traces import events_of, parse_events
from sim.campus.world import World, WorldError, find_world, parse_world, presets, world_file
from sim.streams import Streams

TEXT = world_file("lab-building").read_text()
DAY_S = 86_400.0


def refused(text: str) -> str:
    with pytest.raises(WorldError) as caught:
        parse_world(text.encode(), "w.toml")
    return str(caught.value)


def line_of(fragment: str, text: str = TEXT) -> int:
    return text[: text.index(fragment)].count("\n") + 1


@pytest.mark.parametrize("name", presets())
def test_the_presets_are_worlds(name: str) -> None:
    world = find_world(name)
    assert world.name == name and world.says and world.machines in {11, 48, 54, 500}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("per_day = 60", 'per_day = "60"', "expected `float"),
        ("per_day = 60", "per_dya = 60", "unknown field `per_dya`"),
        ("count = 48", "count = 0", "expected `int` >= 1"),
        ('owners = "students"', 'owners = "studnets"', "there are no owners 'studnets' (there are: students)"),
        ("ends_h = 13", "ends_h = 8", "it ends before it begins"),
        ('rooms = ["lab/r3"]', 'rooms = ["lab/r9"]', "no machine is in room 'lab/r9'"),
        ("vram_gib = [8, 12]", "vram_gib = [8, 80]", "no GPU has so much memory (at most 12)"),
        ("days = 28", "days = nan", ""),
        ("days = 28", "days = 1e400", ""),
        ("noticed = 0.3", "noticed = 0.95", "more than all departures"),
    ],
)
def test_a_mistake_is_named_with_its_line(before: str, after: str, words: str) -> None:
    text = TEXT.replace(before, after, 1)
    told = refused(text)
    assert words in told
    if words:
        assert f"line {line_of(after, text)}:" in told


def test_what_toml_does_not_allow_is_told_with_its_line() -> None:
    assert "line 3" in refused('name = "x"\ndays = 3\ndays = 4\n')
    with pytest.raises(WorldError, match="line 2: not UTF-8"):
        parse_world(b'name = "x"\nsays = "\xff"\n', "w")
    with pytest.raises(WorldError, match="are no world"):
        parse_world(b"#" * (1 << 21), "w")


def test_a_world_too_large_is_refused_before_it_is_made() -> None:
    assert "machines; at most" in refused(TEXT.replace("[owners.students]", GROUP * 9 + "[owners.students]"))
    assert "jobs in all" in refused(TEXT.replace("per_day = 60", "per_day = 1e8"))


GROUP = '[[groups]]\nname = "g"\ncount = 20000\nowners = "students"\n'


def test_changes_take_their_place_and_wrong_ones_are_told() -> None:
    world = find_world(
        "reclaimnet-54", ["jobs.per_day=7", "groups.0.count=3", "owners.lab.noticed = 0.1", "wire.noon=0.9"]
    )
    assert (world.jobs.per_day, world.groups[0].count, world.owners["lab"].noticed, world.wire.noon) == (7, 3, 0.1, 0.9)
    for wrong in (
        "jobs.per_day",
        "=3",
        "jobs.per_day=",
        "jobs.per_day=many",
        "groups.9.count=1",
        "groups.x=1",
        "name.x=1",
    ):
        with pytest.raises(WorldError):
            find_world("reclaimnet-54", [wrong])
    assert find_world("reclaimnet-54").digest == find_world("reclaimnet-54", ["days=60"]).digest
    assert find_world("reclaimnet-54").digest != world.digest


def test_a_world_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(WorldError, match="presets: campus-500, gpunion-11"):
        find_world("recalimnet")
    with pytest.raises(WorldError, match="No such file"):
        find_world("nowhere.toml")


LINES = """[[groups]] [jobs] [owners.x] name=1 days=-1 count=99 rooms=[] hours={} = \0 [a.b] x.y=2 says='"' """
PIECES = st.sampled_from([*LINES.split(), '"' * 3])


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.lists(PIECES, max_size=12).map(lambda lines: "\n".join(lines).encode())))
def test_no_bytes_do_worse_than_being_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_world(data, "w.toml"), World)
    except WorldError as error:
        assert str(error).startswith("w.toml: ")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_real_world_with_a_piece_replaced_is_refused_or_a_world(data: st.DataObject) -> None:
    lines = TEXT.split("\n")
    place = data.draw(st.integers(0, len(lines) - 1))
    lines[place] = data.draw(st.one_of(PIECES, st.text(max_size=30), st.just(""), st.sampled_from(lines)))
    try:
        world = parse_world("\n".join(lines).encode(), "w.toml")
    except WorldError as error:
        assert "line" in str(error) or "end of document" in str(error), str(error)
        return
    assert world.machines <= 20_000


# --- traces

HEADER = "node,start,end,state,cause"


def test_absences_are_read_merged_and_cut() -> None:
    text = f"{HEADER}\nb,50,60,away,sudden\na,0,10,away,\na,5,20,away,noticed\n\na,900,2000,away,brief\n"
    found = parse_events(text, "t.csv", 1000.0)
    assert [(one.start, one.end, one.cause) for one in found["a"]] == [(0, 20, None), (900, 2000, "brief")]
    assert [one.cause for one in found["b"]] == ["sudden"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a,1,2,away", "4 fields instead of 5"),
        ("a,x,2,away,", "'x' is no number"),
        ("a,2,1,away,", "it ends before it starts"),
        ("a,1,2,up,", "the state 'up' is not away"),
        ("a,1,2,away,fire", "the cause 'fire' is none of"),
        (",1,2,away,", "no node"),
        ("a,1,nan,away,", "out of all bounds"),
        ("a,-1,2,away,", "out of all bounds"),
    ],
)
def test_malformed_lines_of_a_trace_are_named(line: str, words: str) -> None:
    with pytest.raises(WorldError) as caught:
        parse_events(f"{HEADER}\na,0,9999,away,\n{line}\n", "t.csv", 10.0)
    assert "t.csv: line 3: " in str(caught.value) and words in str(caught.value)


def test_a_trace_that_is_shorter_than_the_world_is_told() -> None:
    with pytest.raises(WorldError, match=r"ends after 0\.0 days"):
        parse_events(f"{HEADER}\na,0,10,away,\n", "t.csv", DAY_S)
    with pytest.raises(WorldError, match="line 1: the header"):
        parse_events("node,start,end,cores,user\n", "t.csv", DAY_S)


@settings(max_examples=100)
@given(st.text(max_size=200), st.floats(1, 1e6))
def test_no_text_does_worse_than_being_refused(text: str, length_s: float) -> None:
    for candidate in (text, f"{HEADER}\n{text}"):
        try:
            parse_events(candidate, "t.csv", length_s)
        except WorldError as error:
            assert str(error).startswith("t.csv: ")


class Stay(msgspec.Struct):
    start: float
    end: float


def test_what_importers_give_becomes_a_trace_that_a_world_runs_on(tmp_path: Path) -> None:
    stays = {"n1": [Stay(100.0, 5 * DAY_S)], "n2": [Stay(0.0, 2 * DAY_S), Stay(3 * DAY_S, 40 * DAY_S)]}
    lines = list(events_of(stays, 0.0, 40 * DAY_S))
    (tmp_path / "trace.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "w.toml").write_text(TEXT.replace("[jobs]", '[trace]\nfile = "trace.csv"\n\n[jobs]'))
    world = find_world(str(tmp_path / "w.toml"))
    found = absences(world, machines(world), Streams(1))
    assert [(one.start, one.end) for one in found[0]] == [(0.0, 100.0), (5 * DAY_S, 40 * DAY_S)]
    assert [(one.start, one.end) for one in found[3]] == [(2 * DAY_S, 3 * DAY_S)]
    assert {one.kind for each in found for one in each} <= {"noticed", "sudden", "brief"}
    assert all(one.notice_s > 0 for each in found for one in each if one.kind == "noticed")
