"""Trace readers: valid files are read, invalid lines are named."""

import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement import traces
from placement.availability import Stay, Trace, TraceError
from placement.logins import RECORD, read_last, read_wtmp
from placement.traces import Job, read_availability, read_fta, read_job_csv, read_nodes, read_swf

SWF = """; Version: 2.2
; UnixStartTime: 1000000
  1 0 100 3600 4 -1 -1 4 -1 -1 1 7 1 1 1 1 -1 -1 {n1,n1,n2,n2} q_1d 1:ppn=2
  2 7200 0 600.5 2 -1 -1 2 -1 -1 1 8 1 1 1 1 -1 -1 {n1,n1}
  3 7300 -1 -1 2 -1 -1 2 -1 -1 0 8 1 1 1 1 -1 -1
"""
CSV = """node,start,end,cores,user
n1,1000100,1003700,2,7
n2,1000100,1003700,2,7
n1,1007200,1007800.5,2,8
"""
FTA = """# event_id component_id node_id platform_id node_name event_type start end reason
1\t1\t1\t1\tpc1\t1\t1000\t5000\t2
2\t1\t1\t1\tpc1\t0\t5000\t6000\t2
3\t1\t1\t1\tpc1\t1\t6000\t9000\t0
4\t1\t2\t1\t\t0\t1000\t9000\t0
"""
LAST = """ada      pts/0        10.0.0.1         Mon Nov  2 09:00:00 2026 - Mon Nov  2 12:00:00 2026  (03:00)
bob      tty1                          Tue Nov  3 09:00:00 2026 - down                      (01:10)
reboot   system boot  6.1.0-1          Sun Nov  1 00:00:00 2026 - Tue Nov  3 10:10:00 2026 (2+10:10)
reboot   system boot  6.1.0-1          Wed Nov  4 00:00:00 2026   still running
eve      pts/1        10.0.0.1         Wed Nov  4 09:00:00 2026   gone - no logout
ada      pts/1        10.0.0.1         2026-11-04T12:00:00+00:00   still logged in

wtmp begins Sun Nov  1 00:00:00 2026
"""
SUNDAY = 1793491200.0  # 1 November 2026
HOUR_S = 3600.0


def read_or_refuse(read: Callable[[str], object], text: str) -> bool:
    """Return True if the reader takes the text."""
    try:
        read(text)
    except TraceError:
        return False
    return True


def test_swf_and_csv_give_same_trace() -> None:
    jobs = read_swf(SWF)
    assert jobs[0] == Job(1000100.0, 1003700.0, 4, "7", (("n1", 2), ("n2", 2)), 1000000.0) and len(jobs) == 2
    assert read_nodes(SWF) == read_nodes(CSV)
    assert read_nodes(CSV).nodes == {
        "n1": (Stay(1003700.0, 1007200.0, False),),
        "n2": (Stay(1003700.0, 1007200.0, False),),
    }, "known until the last job began"


def test_csv_with_spaces_and_comments_is_read() -> None:
    untidy = "# of the lab\r\n\r\n" + CSV.replace(",", ", ").replace("\n", "\r\n")
    assert read_nodes(untidy) == read_nodes(CSV)
    lines = CSV.splitlines()
    for repeated in ([*reversed(lines[1:]), *lines[1:]], [*lines[1:], *reversed(lines[1:])]):
        assert read_nodes("\n".join([lines[0], *repeated])) == read_nodes(CSV), (
            "repeated lines in any order give the same trace"
        )
    assert [job.user for job in read_job_csv(f"{lines[0]}\nn,1,2,1,ada\nn,1,2,1\n")] == ["ada", ""]


def test_node_is_lent_while_less_than_half_is_in_use() -> None:
    lines = ["node,start,end,cores,user", "n,0,1000,8,a", "n,2000,9000,3,a", "n,4000,5000,1,a", "n,9500,9600,1,a"]
    assert read_nodes("\n".join(lines)).nodes["n"] == (Stay(1000.0, 4000.0, True), Stay(5000.0, 9500.0, False))


def test_node_is_held_from_half_of_the_most_cores_that_it_ever_used() -> None:
    jobs = ["0,1000,3", "1000,1500,5", "2000,2500,4", "3000,3500,5", "3100,3500,3", "9000,9001,1", "9500,9500,99"]
    stays = read_nodes("\n".join(["node,start,end,cores,user", *(f"n,{job},a" for job in jobs)])).nodes["n"]
    assert [(stay.start, stay.end) for stay in stays] == [(0, 1000), (1500, 2000), (2500, 3000), (3500, 9500)], (
        "it has eight: a job without any time uses none"
    )


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("n,5,5,1,u", True),
        ("n,6,5,1,u", False),
        ("n,5,9,1000000,u", True),
        ("n,5,9,1000001,u", False),
        ("n,5,9,0.5,u", False),
        ("n,5,9,1", True),
        ("n,5,9,1,u,more", False),
        ("n,0,9,1,u", True),
        ("n,-1,9,1,u", False),
        ("n,5,1099511627775,1,u", True),
        ("n,5,1099511627776,1,u", False),
    ],
)
def test_bounds_of_a_job_by_node(line: str, taken: bool) -> None:
    assert read_or_refuse(read_job_csv, f"node,start,end,cores,user\n{line}\n") is taken


def test_bounds_of_a_job_of_a_workload() -> None:
    def jobs(wait: str = "0", ran: str = "60", cores: str = "1", submitted: str = "0", fields: int = 18) -> list[Job]:
        return read_swf(" ".join(["1", submitted, wait, ran, cores, *["-1"] * (fields - 5)]))

    assert jobs() == [Job(0.0, 60.0, 1, "-1")]
    assert jobs(wait="-1", submitted="100")[0].start == 100.0 and jobs(wait="9", submitted="100")[0].submitted == 100.0
    assert jobs(ran="0") == jobs(cores="0") == [] and len(jobs(cores="1000000")) == 1
    for wrong in ({"cores": "1000001"}, {"submitted": "-1"}, {"fields": 17}, {"ran": "1e12", "wait": "1e12"}):
        with pytest.raises(TraceError, match="line 1"):
            jobs(**wrong)  # type: ignore[arg-type]


def test_bounds_of_an_availability_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(gap: object, data: list[int]) -> bool:
        text = f'{{"metadata": {{"gap_seconds": {gap}}}, "data": {data}}}'
        return read_or_refuse(lambda text: read_availability(text, "z"), text)

    assert taken(86_400, [1, 0]) and not taken(86_401, [1, 0])
    assert taken(60, [1024, 0]) and not taken(60, [1025, 0])
    monkeypatch.setattr(traces, "MOST_SAMPLES", 3)
    assert taken(60, [1, 0, 1]) and not taken(60, [1, 0, 1, 0])


def test_bounds_of_an_event_of_the_failure_trace_archive() -> None:
    for line, taken in (
        ("9\t1\t3\t1\tpc3\t1\t5000\t5000", True),
        ("9\t1\t3\t1\tpc3\t1\t5000\t4999", False),
        ("9\t1\t3\t1\tpc3\t1\t5000", False),
        ("9\t1\t\t1\t\t1\t5000\t6000", False),
    ):
        assert read_or_refuse(read_fta, FTA + line) is taken, line


def test_five_invalid_lines_are_named() -> None:
    for count, more in ((5, ""), (6, "; and 1 more")):
        with pytest.raises(TraceError) as told:
            read_job_csv("node,start,end,cores,user\n" + "\n".join(["x"] * count))
        assert str(told.value).count("line ") == 5 and str(told.value).endswith(f"instead of 5{more}")


def test_availability_counts_become_nodes() -> None:
    text = '{"metadata": {"gap_seconds": 300}, "data": [2, 2, 1, 0, 1]}'
    trace = read_availability(text, "z")
    assert trace.nodes == {
        "z/0": (Stay(0.0, 900.0, True), Stay(1200.0, 1500.0, False)),
        "z/1": (Stay(0.0, 600.0, True),),
    }
    assert list(read_availability('{"metadata":{"gap_seconds":60},"data":[0,1]}', "z").nodes) == ["z"]


def test_failure_trace_archive_is_read() -> None:
    trace = read_fta(FTA)
    assert (trace.first, trace.last) == (1000.0, 9000.0)
    assert trace.nodes == {"pc1": (Stay(1000.0, 5000.0, True), Stay(6000.0, 9000.0, False)), "2": ()}
    by_start = sorted(FTA.splitlines(), key=lambda line: line.split("\t")[6:7])
    assert read_fta("\n".join(by_start)) == read_fta("\n".join(by_start[::-1])) == trace
    with pytest.raises(TraceError, match="covers no time"):
        read_fta("1\t1\t1\t1\tpc1\t1\t1000\t1000")


def test_machine_is_lent_while_up_without_logins() -> None:
    stays = [(stay.start - SUNDAY, stay.end - SUNDAY, stay.ended) for stay in read_last(LAST, "pc").nodes["pc"]]
    day = 24 * HOUR_S
    assert stays == [
        (0.0, day + 9 * HOUR_S, True),
        (day + 12 * HOUR_S, 2 * day + 9 * HOUR_S, True),
        (3 * day, 3 * day + 9 * HOUR_S, True),
        (3 * day + 9 * HOUR_S + 60, 3 * day + 12 * HOUR_S, False),
    ]
    local = LAST.replace("2026-11-04T12:00:00+00:00", "2026-11-04T12:00:00")
    assert read_last(local, "pc", HOUR_S).first == SUNDAY - HOUR_S
    assert read_last(local.replace("T12:00:00 ", "T12:00:00Z"), "pc", HOUR_S).last == SUNDAY + 3 * day + 12 * HOUR_S


@pytest.mark.parametrize(
    ("moment", "taken"),
    [
        ("1970-01-01T00:00:00Z", True),
        ("1969-12-31T23:59:59Z", False),
        ("9998-12-31T23:59:60Z", True),
        ("9999-01-01T00:00:00Z", False),
        ("2026-00-10T00:00:00Z", False),
        ("2026-12-31T23:59:59Z", True),
        ("2026-13-10T00:00:00Z", False),
        ("2028-02-29T00:00:00Z", True),
        ("2026-02-29T00:00:00Z", False),
        ("2026-02-00T00:00:00Z", False),
        ("2026-02-01T24:00:00Z", False),
        ("2026-02-01T00:60:00Z", False),
        ("2026-02-01T00:00:61Z", False),
    ],
)
def test_impossible_dates_are_refused(moment: str, taken: bool) -> None:
    text = f"ada tty1 {moment} still logged in\nbob tty2 2026-06-01T00:00:00Z still logged in\n"
    assert read_or_refuse(lambda text: read_last(text, "pc"), text) is taken


def test_time_without_a_zone_is_local() -> None:
    text = "ada tty1 2026-11-01T09:00:00 - 2026-11-01T10:00:00\nada tty1 2026-11-02T00:00:00Z still logged in\n"
    assert read_last(text, "pc", HOUR_S).first == SUNDAY + 8 * HOUR_S
    with pytest.raises(TraceError, match="2026-13-01 is not a valid date"):
        read_last(text.replace("-11-", "-13-"), "pc")


def test_end_of_a_login_is_given_or_follows_from_its_length() -> None:
    def used(end: str, start: str = "2026-11-02T00:00:00Z") -> list[tuple[float, float]]:
        text = f"ada tty1 {start} {end}\nroot tty9 2026-11-30T00:00:00Z - 2026-11-30T00:00:00Z\n"
        trace = read_last(f"wtmp begins 2026-11-01T00:00:00Z\n{text}", "pc")
        stays, day = trace.nodes["pc"], SUNDAY + 24 * HOUR_S
        return [(one.end - day, two.start - day) for one, two in pairwise(stays)]

    assert used("- down (1+02:03)") == [(0.0, 26 * HOUR_S + 180)]
    assert used("- down (01:02:03)") == [(0.0, HOUR_S + 123)]
    assert used("- 2026-11-02T01:00:00Z (05:00)") == [(0.0, HOUR_S)], "the recorded end counts"
    assert used("- crash") == [(0.0, 60.0)]
    assert used("- 2026-11-02T00:00:00+0000") == [], "a login of no length"
    with pytest.raises(TraceError, match="line 2: the session ends before it begins"):
        used("- 2026-11-01T23:59:59Z")
    assert used("- down (01:00)", "2026-11-02T05:30:00+05:30") == used("- down (01:00)", "2026-11-01T20:30:00-0330")
    assert used("- down (01:00)", "2026-11-02T05:30:00,123+05:30") == [(0.0, HOUR_S)]


def test_records_of_the_system_are_no_logins() -> None:
    text = "shutdown system down 2026-11-02T00:00:00Z - 2026-11-03T00:00:00Z\n"
    text += "runlevel (to lvl 5) 2026-11-02T00:00:00Z - 2026-11-03T00:00:00Z\n"
    text += "ada tty1 2026-11-01T00:00:00Z - 2026-11-01T01:00:00Z\nada tty1 2026-11-04T00:00:00Z still logged in\n"
    assert [stay.start - SUNDAY for stay in read_last(text, "pc").nodes["pc"]] == [HOUR_S]
    with pytest.raises(TraceError, match="cover no time"):
        read_last("ada tty1 2026-11-01T00:00:00Z still logged in", "pc")


def test_machine_counts_as_up_before_its_first_boot_and_as_down_between_boots() -> None:
    text = "ada tty1 2026-11-01T00:00:00Z - 2026-11-01T01:00:00Z\n"
    for begins, ends in (("03T00", "04T00"), ("05T00", "06T00"), ("05T01", "05T02")):
        text += f"reboot system boot 2026-11-{begins}:00:00Z - 2026-11-{ends}:00:00Z\n"
    text += "ada tty1 2026-11-08T00:00:00Z - 2026-11-08T00:00:00Z\n"
    hours = [
        ((stay.start - SUNDAY) / HOUR_S, (stay.end - SUNDAY) / HOUR_S) for stay in read_last(text, "pc").nodes["pc"]
    ]
    assert hours == [(1, 72), (96, 120)]


def record(kind: int, now: int, line: bytes = b"", user: bytes = b"") -> bytes:
    return RECORD.pack(kind, 1, line, b"", user, b"", 0, 0, 0, now, 0, 0, 0, 0, 0, b"")


def test_login_ends_with_the_next_on_its_line_and_with_the_system() -> None:
    def stays(*records: bytes) -> list[tuple[float, float]]:
        return [(stay.start, stay.end) for stay in read_wtmp(b"".join(records), "pc").nodes["pc"]]

    begin, end = record(5, 0), record(5, 900)
    ada, bob = record(7, 100, b"tty1", b"ada"), record(7, 300, b"tty1", b"bob")
    assert stays(begin, ada, bob, record(8, 400, b"tty1"), end) == [(0, 100), (400, 900)]
    for other in (record(8, 400, b"tty2"), record(6, 400, b"tty1")):
        assert stays(begin, ada, other, end) == [(0, 100)], "another line, or no end"
    assert stays(begin, ada, record(1, 300, b"~", b"runlevel"), end) == [(0, 100)]
    assert stays(begin, ada, record(1, 300, b"~", b"shutdown"), end) == [(0, 100), (300, 900)]
    assert stays(begin, ada, record(2, 300, b"~", b"reboot"), end) == [(0, 100), (300, 900)]
    off = (record(2, 100), record(1, 300, b"~", b"shutdown"), record(2, 400), end)
    assert stays(begin, *off) == [(0, 300), (400, 900)], "nobody uses it, and it is off in between"
    assert stays(begin, record(2, 100), record(1, 300, b"~", b"shutdown"), end) == [(0, 300)]
    assert stays(begin, ada, record(8, 50, b"tty1"), end) == [(0, 900)], "the clock was set back"
    assert stays(record(9, 0), record(0, 5), end) == [(0, 900)]
    assert stays(begin, ada, record(7, 200, b"tty2", b"shutdown"), end) == [(0, 100)], "a user of that name"
    for wrong in (record(10, 5), record(5, -1), record(-1, 5)):
        with pytest.raises(TraceError, match="record 2"):
            stays(begin, wrong, end)


def test_wtmp_gives_same_trace_as_last() -> None:
    data = b"".join(
        [
            record(2, 1000, b"~", b"reboot"),
            record(7, 5000, b"pts/0", b"ada"),
            record(7, 5500, b"tty1", b"bob"),
            record(8, 6000, b"pts/0"),
            record(8, 7000, b"tty1"),
            record(7, 8000, b"tty1", b"bob"),
            record(1, 9000, b"~", b"shutdown"),
            record(2, 9900, b"~", b"reboot"),
            record(7, 20_000, b"tty1", b"bob"),
            record(8, 21_000, b"tty1"),
        ]
    )
    assert RECORD.size == 384
    assert read_wtmp(data, "pc").nodes["pc"] == (
        Stay(1000.0, 5000.0, True),
        Stay(7000.0, 8000.0, True),
        Stay(9900.0, 20_000.0, True),
    )


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (read_swf, SWF + "4 1 2 3\n", "line 6: 4 fields instead of 18"),
        (read_swf, SWF.replace("3600", "36oo", 1), "line 3: '36oo' is not a number"),
        (read_swf, SWF.replace("n2,n2}", "n2,n2"), "line 3: the list of nodes has no closing brace"),
        (read_swf, SWF.replace("600.5", "nan"), "line 4: 'nan' is out of range"),
        (read_swf, SWF.replace("600.5", "1e300"), "line 4: '1e300' is out of range"),
        (read_nodes, SWF.split("{", 1)[0] + "\n", "lists the nodes"),
        (read_job_csv, "a,b\n", "line 1: the first line is not node,start,end,cores,user"),
        (
            read_job_csv,
            CSV + "n1,5,4,1,u\nn1,5,6,0,u\n,1,2,3,u\nn,1\n",
            "line 5: the node is missing, .*; line 6: .*; line 7: .*; line 8: 2 f",
        ),
        (read_job_csv, "node,start,end,cores,user\n" + "x\n" * 9, "line 6: .*; and 4 more"),
        (read_nodes, "node,start,end,cores,user\nn,5,9,1,u\n", "at the same time"),
        (read_fta, FTA + "1\t2\n", "line 6: 2 columns"),
        (read_fta, FTA.replace("\t0\t5000", "\t7\t5000"), "line 3: .* neither 0 nor 1"),
        (read_fta, "", "covers no time"),
        (lambda text: read_last(text, "pc"), LAST.replace(" 2026 - Mon", " - Mon"), "line 1: the date has no year"),
        (
            lambda text: read_last(text, "pc"),
            LAST.replace("Nov  3 09:00:00 2026", "Nov  3 09:00"),
            "line 2: the date has no year",
        ),
        (
            lambda text: read_last(text, "pc"),
            LAST.replace("Nov  3 09:00:00 2026", "Nov 33 09:00:00 2026"),
            "line 2: 2026-11-33",
        ),
        (lambda text: read_last(text, "pc"), LAST.replace("Nov  3 09", "Nox  3 09"), "line 2: 'Nox' is not a month"),
        (lambda text: read_last(text, "pc"), "", "neither logins nor boots"),
        (lambda text: read_availability(text, "z"), '{"data": [1, 2]}', "metadata"),
        (lambda text: read_availability(text, "z"), '{"metadata":{"gap_seconds":0},"data":[1, 2]}', ">"),
        (lambda text: read_availability(text, "z"), '{"metadata":{"gap_seconds":60},"data":[1, -2]}', "data"),
        (lambda text: read_availability(text, "z"), '{"metadata":{"gap_seconds":60},"data":[1]}', "1 samples"),
        (lambda text: read_availability(text, "z"), '{"metadata":{"gap_seconds":60},"data":[1, 999999]}', "<= 1024"),
    ],
)
def test_error_names_invalid_line(read: Callable[[str], object], text: str, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read(text)


def test_invalid_wtmp_is_refused() -> None:
    good = record(2, 1000) + record(7, 2000)
    for data, words in (
        (b"", "0 bytes"),
        (good[:-1], "767 bytes"),
        (record(7, 5), "no time"),
        (record(77, 5) + good, "record 1"),
    ):
        with pytest.raises(TraceError, match=words):
            read_wtmp(data, "pc")


READERS: list[Callable[[str], object]] = [
    read_swf,
    read_nodes,
    read_fta,
    lambda text: read_last(text, "n"),
    lambda text: read_availability(text, "n"),
]
SAMPLES = [SWF, CSV, FTA, LAST, '{"metadata": {"gap_seconds": 300}, "data": [2, 2, 1, 0, 1]}']


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Return a valid file with one part replaced."""
    text = draw(st.sampled_from(SAMPLES))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        upto = min(len(text), at + draw(st.integers(0, 12)))
        new = draw(
            st.one_of(
                st.text(max_size=8), st.sampled_from(["-1", "1e999", "nan", "9" * 30, "\t", "{", "}", "\n", "inf"])
            )
        )
        text = text[:at] + new + text[upto:]
    return text


@given(st.one_of(damaged(), st.text(max_size=200)), st.sampled_from(READERS))
def test_hostile_text_is_refused_or_read(text: str, read: Callable[[str], object]) -> None:
    try:
        found = read(text)
    except TraceError as error:
        assert str(error)
        return
    if isinstance(found, Trace):
        assert found.first < found.last
        for stays in found.nodes.values():
            assert all(found.first <= stay.start < stay.end <= found.last for stay in stays)


@given(
    st.lists(st.tuples(st.integers(-2, 12), st.integers(-5, 2**31 - 1), st.binary(max_size=4)), max_size=8),
    st.binary(max_size=5),
)
def test_hostile_wtmp_is_refused_or_read(records: list[tuple[int, int, bytes]], tail: bytes) -> None:
    data = b"".join(record(kind, now, line) for kind, now, line in records) + tail
    try:
        trace = read_wtmp(data, "pc")
    except TraceError:
        return
    assert all(stay.start < stay.end for stay in trace.nodes["pc"])


def test_utmp_record_matches_c_struct() -> None:
    data = bytearray(record(7, 1_700_000_000, b"pts/3", b"ada"))
    assert struct.unpack_from("<h", data, 0) == (7,) and data[8:13] == b"pts/3" and data[44:47] == b"ada"
    assert struct.unpack_from("<i", data, 340) == (1_700_000_000,)
