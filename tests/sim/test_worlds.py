"""Worlds and traces from files: errors name the line, and arbitrary bytes raise no other errors."""

from datetime import date, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.availability import TraceError, trace_of_lent
from sim.campus.campus import Campus
from sim.campus.churn import absences, machines
from sim.campus.policies import POLICIES
from sim.campus.traces import _between, midnight, parse_events, read_trace
from sim.campus.workload import read_openb, read_philly, read_workload, submissions
from sim.campus.world import Owners, World, WorldError
from sim.campus.world_files import find_world, parse_world, presets, world_file
from sim.kernel import Streams

TEXT = world_file("lab-building").read_text()
DAY_S = 86_400.0


def refused(text: str) -> str:
    with pytest.raises(WorldError) as caught:
        parse_world(text.encode(), "w.toml")
    return str(caught.value)


def line_of(fragment: str, text: str = TEXT) -> int:
    return text[: text.index(fragment)].count("\n") + 1


@pytest.mark.parametrize("name", presets())
def test_presets_are_valid_worlds(name: str) -> None:
    world = find_world(name)
    assert world.name == name and world.description and world.machines in {11, 48, 54, 500}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("per_day = 60", 'per_day = "60"', "expected `float"),
        ("per_day = 60", "per_dya = 60", "unknown field `per_dya`"),
        ("count = 48", "count = 0", "expected `int` >= 1"),
        ('owners = "students"', 'owners = "studnets"', "unknown owners 'studnets' (defined: students)"),
        ("ends_h = 13", "ends_h = 8", "it ends before it begins"),
        ('rooms = ["lab/r3"]', 'rooms = ["lab/r9"]', "no machine is in room 'lab/r9'"),
        ("vram_gib = [8, 12]", "vram_gib = [8, 80]", "no GPU has so much memory (at most 12)"),
        ("days = 28", "days = nan", ""),
        ("days = 28", "days = 1e400", ""),
        ("noticed = 0.3", "noticed = 0.95", "add up to more than 1"),
    ],
)
def test_mistake_is_reported_with_its_line(before: str, after: str, words: str) -> None:
    text = TEXT.replace(before, after, 1)
    told = refused(text)
    assert words in told
    if words:
        assert f"line {line_of(after, text)}:" in told


def test_toml_errors_are_reported_with_their_line() -> None:
    assert "line 3" in refused('name = "x"\ndays = 3\ndays = 4\n')
    with pytest.raises(WorldError, match="line 2: not UTF-8"):
        parse_world(b'name = "x"\ndescription = "\xff"\n', "w")
    with pytest.raises(WorldError, match="a world file has at most"):
        parse_world(b"#" * (1 << 21), "w")


def test_too_large_world_is_rejected_before_it_is_built() -> None:
    assert "machines; at most" in refused(TEXT.replace("[owners.students]", GROUP * 9 + "[owners.students]"))
    assert "jobs in all" in refused(TEXT.replace("per_day = 60", "per_day = 1e8"))


GROUP = '[[groups]]\nname = "g"\ncount = 20000\nowners = "students"\n'


def test_changes_apply_and_invalid_changes_are_rejected() -> None:
    world = find_world(
        "reclaimnet-54", ["jobs.per_day=7", "groups.0.count=3", "owners.lab.noticed = 0.1", "network.noon_load=0.9"]
    )
    assert (world.jobs.per_day, world.groups[0].count, world.owners["lab"].noticed, world.network.noon_load) == (
        7,
        3,
        0.1,
        0.9,
    )
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


def test_unknown_world_lists_the_presets() -> None:
    with pytest.raises(WorldError, match="choose from campus-500, gpunion-11"):
        find_world("recalimnet")
    with pytest.raises(WorldError, match="No such file"):
        find_world("nowhere.toml")


LINES = """[[groups]] [jobs] [owners.x] name=1 days=-1 count=99 rooms=[] hours={} = \0 [a.b] x.y=2 description='"' """
PIECES = st.sampled_from([*LINES.split(), '"' * 3])


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.lists(PIECES, max_size=12).map(lambda lines: "\n".join(lines).encode())))
def test_arbitrary_bytes_are_rejected_without_other_errors(data: bytes) -> None:
    try:
        assert isinstance(parse_world(data, "w.toml"), World)
    except WorldError as error:
        assert str(error).startswith("w.toml: ")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_preset_is_rejected_or_valid(data: st.DataObject) -> None:
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


def test_absences_are_read_merged_and_truncated() -> None:
    text = f"{HEADER}\nb,50,60,away,sudden\na,0,10,away,\na,5,20,away,noticed\n\na,900,2000,away,brief\n"
    found = parse_events(text, "t.csv", 1000.0)
    assert [(one.start, one.end, one.cause) for one in found["a"]] == [(0, 20, None), (900, 2000, "brief")]
    assert [one.cause for one in found["b"]] == ["sudden"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a,1,2,away", "4 fields instead of 5"),
        ("a,x,2,away,", "'x' is not a number"),
        ("a,2,1,away,", "it ends before it starts"),
        ("a,1,2,up,", "the state 'up' is not away"),
        ("a,1,2,away,fire", "the cause 'fire' is not noticed, sudden, brief or empty"),
        (",1,2,away,", "no node"),
        ("a,1,nan,away,", "out of range"),
        ("a,-1,2,away,", "out of range"),
    ],
)
def test_malformed_trace_lines_are_named(line: str, words: str) -> None:
    with pytest.raises(WorldError) as caught:
        parse_events(f"{HEADER}\na,0,9999,away,\n{line}\n", "t.csv", 10.0)
    assert "t.csv: line 3: " in str(caught.value) and words in str(caught.value)


def test_trace_shorter_than_the_world_is_rejected() -> None:
    with pytest.raises(WorldError, match=r"it has 0\.0 days"):
        parse_events(f"{HEADER}\na,0,10,away,\n", "t.csv", DAY_S)
    with pytest.raises(WorldError, match="line 1: the header"):
        parse_events("node,start,end,cores,user\n", "t.csv", DAY_S)


@settings(max_examples=100)
@given(st.text(max_size=200), st.floats(1, 1e6))
def test_arbitrary_text_is_rejected_without_other_errors(text: str, length_s: float) -> None:
    for candidate in (text, f"{HEADER}\n{text}"):
        try:
            parse_events(candidate, "t.csv", length_s)
        except WorldError as error:
            assert str(error).startswith("t.csv: ")


def away(stays: list[tuple[float, float]], first: float, last: float) -> list[tuple[float, float]]:
    trace = trace_of_lent({"n": stays}, first, last)
    return [(one.start, one.end) for one in _between(trace.nodes["n"], first, last)]


def test_time_between_stays_is_absence() -> None:
    assert away([(100.0, 500.0)], 0.0, 900.0) == [(0.0, 100.0), (500.0, 900.0)]
    assert away([(50.0, 60.0), (70.0, 200.0)], 50.0, 100.0) == [(10.0, 20.0)]
    assert away([], 10.0, 20.0) == [(0.0, 10.0)]


def test_trace_starts_on_the_worlds_first_weekday() -> None:
    assert midnight(0.0, 3, 0.0) == 0.0  # Unix time began on a Thursday
    assert midnight(1.0, 3, 0.0) == 7 * DAY_S
    assert midnight(0.0, 0, 3600.0) == 4 * DAY_S - 3600.0


SPOT = '{"metadata": {"gap_seconds": 3600}, "data": [%s]}'
FTA = "1\t1\t1\t1\tn1\t1\t0\t7000000\t0\n1\t1\t2\t1\tn2\t1\t0\t864000\t0\n1\t1\t2\t1\tn2\t0\t864000\t7000000\t0\n"


def test_worlds_run_on_every_trace_form(tmp_path: Path) -> None:
    (tmp_path / "spot").mkdir()
    for name, hours in (("a", "1,1,0,0," * 200), ("b", "1," * 800)):
        (tmp_path / "spot" / f"{name}.json").write_text(SPOT % hours.rstrip(","))
    (tmp_path / "t.tab").write_text(FTA)
    world = with_trace(tmp_path, 'file = "spot"\nform = "spot-json"')
    found = absences(world, machines(world), Streams(1))
    lessons = find_world("lab-building")
    assert [(one.start, one.end) for one in found[0]][:2] == [(7200.0, 14400.0), (21600.0, 28800.0)]
    only_lessons = msgspec.structs.replace(lessons, owners={"students": replace_rate(lessons)})
    forced = absences(only_lessons, machines(only_lessons), Streams(1))
    assert found[1] == forced[1]
    assert {one.kind for each in found for one in each} <= {"noticed", "sudden", "brief"}
    assert all(one.notice_s > 0 for each in found for one in each if one.kind == "noticed")
    world = with_trace(tmp_path, 'file = "t.tab"\nform = "fta"')
    found = absences(world, machines(world), Streams(1))
    assert found[0] == forced[0]
    assert [one.end for one in found[1]][-1] == 28 * DAY_S and found[1][-1].start <= 6 * DAY_S


def replace_rate(world: World) -> Owners:
    return msgspec.structs.replace(world.owners["students"], reclaims_per_day=0.0)


def with_trace(folder: Path, lines: str) -> World:
    (folder / "w.toml").write_text(TEXT.replace("[jobs]", f"[trace]\n{lines}\n\n[jobs]"))
    return find_world(str(folder / "w.toml"))


@pytest.mark.parametrize(
    ("form", "content", "words"),
    [
        ("fta", FTA + "1\t2\n", "line 4: 2 columns"),
        ("swf-nodes", "1 0 0 10 4\n", "line 1: 5 fields instead of 18"),
        ("spot-json", "{}", "not a valid availability trace"),
        ("fta", FTA.replace("7000000", "900000"), "it has 6.4 days from its first Mon on"),
        ("journal", "x" * 4096, "not a node's journal"),
        ("last", "root pts/0\n", "line 1: the date has no year"),
    ],
)
def test_invalid_trace_is_reported_with_both_lines(tmp_path: Path, form: str, content: str, words: str) -> None:
    (tmp_path / "t").write_text(content)
    with pytest.raises(WorldError, match=r"w\.toml: line \d+: .*t") as caught:
        with_trace(tmp_path, f'file = "t"\nform = "{form}"')
    assert words in str(caught.value)


def test_content_of_trace_files_is_part_of_the_digest(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(FTA)
    before = with_trace(tmp_path, 'file = "t"\nform = "fta"')
    (tmp_path / "t").write_text(FTA.replace("864000", "950400"))
    assert with_trace(tmp_path, 'file = "t"\nform = "fta"').digest != before.digest
    read_trace.cache_clear()  # as in another process
    with pytest.raises(WorldError, match="has changed"):
        absences(before, machines(before), Streams(1))


def test_traced_and_untraced_owners_share_a_world(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(FTA)
    group = '[[groups]]\nname = "new"\ncount = 2\nowners = "others"\nrooms = ["other/1"]\n\n[owners.others]\n'
    group += "reclaims_per_day = 0\nabsent_h = { median = 1 }\n\n"
    group += "[trace]\nfile = 't'\nform = 'fta'\nowners = ['students']\n\n[jobs]"
    (tmp_path / "w.toml").write_text(TEXT.replace("[jobs]", group))
    world = find_world(str(tmp_path / "w.toml"))
    found = absences(world, machines(world), Streams(1))
    assert len(found) == 50 and not [one for one in found[48] if one.kind != "sudden"]


# --- jobs from files

OPENB = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)
PODS = (
    "p0,1,1,1,460,,LS,Succeeded,100,7300,100\np1,1,1,8,1000,,LS,Running,900,4500,1000\n"
    "p2,1,1,0,0,,LS,Running,0,10,0\np3,1,1,1,1000,,BE,Pending,5,,\n"
)


def mixed(folder: Path, lines: str, days: str = "") -> World:
    text = find_text("reclaimnet-54")
    start = text.index("hours = {")
    text = text.replace(text[start : text.index("\n", start)], "")
    (folder / "w.toml").write_text(f"{text}\n[jobs.trace]\n{lines}\n")
    return find_world(str(folder / "w.toml"), [days] if days else [])


def find_text(name: str) -> str:
    return world_file(name).read_text()


def test_jobs_are_drawn_from_a_job_trace(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("runtime\n0.0\n3600\n7200.5\n9e6\n")
    world = mixed(tmp_path, 'file = "m.csv"\nform = "philly"\nmax_h = 72')
    assert {submission.work_s for submission in submissions(world, Streams(1))} == {3600, 7200.5}
    assert {submission.gpus for submission in submissions(world, Streams(1))} == {1, 2, 4, 8}
    (tmp_path / "m.csv").write_text(OPENB + PODS)
    world = mixed(tmp_path, 'file = "m.csv"\nform = "openb"\nmax_gpus = 8')
    assert {(submission.work_s, submission.gpus) for submission in submissions(world, Streams(1))} == {
        (7200, 1),
        (3500, 8),
    }


def test_jobs_arrive_at_the_times_of_the_trace(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text(OPENB + PODS)
    (tmp_path / "w.toml").touch()
    world = mixed(tmp_path, 'file = "m.csv"\nform = "openb"\nmax_gpus = 8\narrivals = true', "jobs.per_day=0")
    assert [(submission.at, submission.work_s, submission.gpus) for submission in submissions(world, Streams(1))] == [
        (0, 7200, 1),
        (800, 3500, 8),
    ]


@pytest.mark.parametrize(
    ("lines", "content", "words"),
    [
        (
            'form = "philly"',
            "runtime\n1\nx\n2,3\n-1\n",
            "line 3: 'x' is not a number; line 4: 2 fields instead of 1; line 5: ",
        ),
        ('form = "philly"', "seconds\n1\n", "line 1: the header is not runtime"),
        ('form = "philly"\nmin_h = 9', "runtime\n1\n", "none of its 1 jobs is within"),
        ('form = "philly"\narrivals = true', "runtime\n1\n", "the file has no submission times"),
        ('form = "openb"', OPENB + PODS, "no machine has more than 8 GPUs; write max_gpus = 8"),
        ('form = "openb"\nmax_gpus = 8', OPENB + "p,1,1,1,1,,,,9,8,10\n", "line 2: it ends before it begins"),
        ('form = "swf"', "1 2 3\n", "line 1: 3 fields instead of 18"),
    ],
)
def test_malformed_job_trace_lines_are_named(tmp_path: Path, lines: str, content: str, words: str) -> None:
    (tmp_path / "m").write_text(content)
    with pytest.raises(WorldError) as caught:
        mixed(tmp_path, f'file = "m"\n{lines}')
    assert words in str(caught.value) and "w.toml: line " in str(caught.value)


@settings(max_examples=60)
@given(st.text(max_size=120))
def test_job_trace_is_read_whole_or_rejected(text: str) -> None:
    for read, header in ((read_philly, "runtime\n"), (read_openb, OPENB), (read_workload, "")):
        try:
            assert all(job.ran_s >= 0 and job.at >= 0 for job in read(header + text))
        except TraceError as error:
            assert "line " in str(error)


# --- calendars


def semester(*changes: str) -> World:
    return find_world("semester", ["days=40", *changes])


def test_breaks_cancel_classes_and_deadlines_raise_submissions() -> None:
    calm = {
        "first": date(2026, 10, 19),
        "last": date(2026, 10, 25),
        "reclaim_factor": 0,
        "lessons": False,
        "job_factor": 0,
    }
    busy = {"first": date(2026, 10, 26), "last": date(2026, 11, 1), "job_factor": 4}
    world = find_world("semester", ["days=40", ("periods", [calm, busy]), ("outages", []), ("shocks", [])])
    gone = [one for each in absences(world, machines(world), Streams(3)) for one in each]
    assert world.first_date == date(2026, 10, 12) and world.first_weekday == "Mon"
    assert not [one for one in gone if 7 <= one.start / DAY_S < 14] and [
        one for one in gone if 14 <= one.start / DAY_S < 15
    ]
    weeks = [
        sum(week <= submission.at / DAY_S / 7 < week + 1 for submission in submissions(world, Streams(3)))
        for week in range(4)
    ]
    assert weeks[1] == 0 and 3 < weeks[2] / weeks[0] < 5
    plain = find_world("semester", ["days=40", ("periods", []), ("outages", []), ("shocks", [])])
    same = [one for each in absences(plain, machines(plain), Streams(3)) for one in each if one.start < 7 * DAY_S]
    assert same == [one for one in gone if one.start < 7 * DAY_S]


def test_outage_takes_a_building_off_the_network() -> None:
    cut = {"at": datetime(2026, 10, 14, 6, 30), "hours": 2, "buildings": ["lab"], "notice_s": 600}
    world = find_world(
        "semester",
        ["days=4", ("periods", []), ("outages", [cut]), ("owners.students.reclaims_per_day", 0), ("shocks", [])],
    )
    begins = 2 * DAY_S + 6.5 * 3600
    found = [[one for one in each if one.dark] for each in absences(world, machines(world), Streams(1))]
    assert [(one.start, one.end, one.kind) for each in found for one in each] == [
        (begins, begins + 7200, "noticed")
    ] * 48
    campus = Campus(world, POLICIES["mesh"], 1)
    campus.begin()
    campus.kernel.run(begins + 60)
    assert not any(host.reachable or host.lent for host in campus.hosts)
    campus.kernel.run(begins + 7260)
    assert all(host.reachable and host.lent for host in campus.hosts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("periods.0.last", date(2026, 10, 1)), "it ends before it begins"),
        (("periods.0.owners", ["nobody"]), "unknown owners 'nobody'"),
        (("first_date", date(2029, 10, 8)), "it is not within the world's days"),
        (("first_weekday", "Tue"), "2026-10-12 is a Mon"),
        (("outages.0.buildings", ["x"]), "no machine is in building 'x'"),
        (("outages.0.at", "soon"), "invalid RFC3339 encoded datetime"),
        (("jobs.trace", {"file": "x", "form": "philly"}), "either hours or trace"),
        (("trace", {"file": "none.csv"}), "No such file"),
        (("trace", {"file": ".", "owners": ["x"]}), "unknown owners 'x'"),
    ],
)
def test_impossible_calendars_are_rejected(change: tuple[str, Any], words: str) -> None:
    with pytest.raises(WorldError) as caught:
        find_world("semester", [change])
    assert words in str(caught.value) and "line " in str(caught.value)


def test_dates_need_first_date() -> None:
    text = world_file("semester").read_text().replace("first_date = 2026-10-12\n", "")
    assert "needs first_date" in refused(text)
