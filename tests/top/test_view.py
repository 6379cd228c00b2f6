"""Rendering of one set of answers, without a terminal."""

import unicodedata
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from mesh.api.schemas.gpus import Gpus
from mesh.api.schemas.jobs import Events, Jobs
from mesh.api.schemas.mesh import Nodes, Status, Transfer, Transfers
from mesh.top.answers import Look, understood
from mesh.top.table import LEAST, Cell, Column, Row, Table, bar, clock, titles_of, widths_of
from mesh.top.table_rows import JOB_SORTINGS, OVER
from mesh.top.view import View, text_lines
from mesh.util.errors import MeshError
from mesh.util.sanitize import cut, sanitize, width_of
from tests.answers import answer
from tests.top.recorded import recorded

AT = 1_800_000_000.0
ANSWERS = recorded()


def look(at: float = AT, **changes: Any) -> Look:
    one = Look(
        at,
        msgspec.convert(ANSWERS["/v1/status"], Status),
        msgspec.convert(ANSWERS["/v1/nodes"], Nodes).nodes,
        msgspec.convert(ANSWERS["/v1/jobs"], Jobs).jobs,
        msgspec.convert(ANSWERS["/v1/gpus"], Gpus).gpus,
        msgspec.convert(ANSWERS["/v1/transfers"], Transfers).transfers,
        msgspec.convert(ANSWERS["/v1/events"], Events).events,
    )
    return msgspec.structs.replace(one, **changes)


def seen(*looks: Look) -> View:
    view = View()
    for one in looks:
        view.take(one)
    return view


def keys(view: View, name: str) -> list[str]:
    return [row.key for row in view.tables()[name].rows]


def test_row_of_a_failed_job_has_its_command_and_why() -> None:
    job = msgspec.structs.replace(
        look().jobs[0], state="failed", command="train.py --lr 0.7", detail="exit 3", saving=None
    )
    (row,) = seen(look(jobs=[job])).tables()["jobs"].rows
    assert row.cells[-1].text == "train.py --lr 0.7  exit 3"


def test_totals_equal_the_sums_of_the_rows() -> None:
    totals = seen(one := look()).totals()
    assert (totals.nodes, totals.alive, totals.lending) == (3, 3, 3)
    assert totals.gpus == sum(len(node.gpus) for node in one.nodes) == 6
    assert 0 < totals.gpus_free < totals.gpus and totals.slots_free <= totals.slots
    going = [job for job in one.jobs if job.state not in OVER]
    assert totals.running + totals.waiting == len(going) < len(one.jobs) and totals.waiting
    assert totals.at_risk_s == pytest.approx(sum(job.at_risk_s or 0 for job in going))


def test_sort_orders_are_total_and_cycle() -> None:
    view, orders = seen(look()), []
    for _ in JOB_SORTINGS:
        orders.append(tuple(keys(view, "jobs")))
        view.sort_next("jobs")
    assert tuple(keys(view, "jobs")) == orders[0] and len(set(orders)) > 1
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert view.sort_next("events") is None
    while view.sortings["jobs"].name != "at risk":
        view.sort_next("jobs")
    risks = {job.job: job.at_risk_s or 0 for job in look().jobs}
    shown = [risks[key] for key in keys(view, "jobs")]
    assert shown == sorted(shown, reverse=True)


def test_filter_matches_text_in_any_column() -> None:
    view = seen(look())
    view.filter = "NODE2"
    assert keys(view, "nodes") == [node.node for node in look().nodes if node.nick == "node2"]
    assert titles_of(view.tables()["nodes"])[0].startswith("1/3 NODES")
    view.filter = "nobody has this"
    assert keys(view, "jobs") == [] and view.totals().nodes == 3


def test_changed_rows_are_marked_for_some_seconds() -> None:
    first, job = look(), look().jobs[0]

    def marked(view: View) -> set[str]:
        return {row.key for row in view.tables()["jobs"].rows if row.cells[0].tone == "bold"}

    assert marked(seen(first)) == set(), "the first look marks nothing"
    moved = [msgspec.structs.replace(job, state="stranded"), *first.jobs[1:]]
    view = seen(first, look(AT + 1, jobs=moved, events=[]))
    assert marked(view) == {job.job}
    view.take(look(AT + 5, jobs=moved, events=[]))
    assert marked(view) == {job.job}
    view.take(look(AT + 6, jobs=moved, events=[]))
    assert marked(view) == set()


def test_stream_rate_is_measured_between_two_looks() -> None:
    fields = {"id": 7, "to": "node2", "kind": "checkpoint", "sent": 1 << 20, "bytes": 100 << 20, "seconds": 1.0}
    begun = answer(Transfer, fields)
    later = msgspec.structs.replace(begun, sent=9 << 20, seconds=3.0)
    view = seen(look(transfers=[begun]))
    assert view.totals().sending_bps == 1 << 20
    view.take(look(AT + 2, transfers=[later]))
    assert view.totals().sending_bps == 4 << 20
    (row,) = view.tables()["transfers"].rows
    assert row.cells[0].text == "node2" and "9.0 MiB/100.0 MiB" in row.cells[2].text
    other = msgspec.structs.replace(begun, to="node3", sent=10 << 20, seconds=5.0)  # the same id, but another transfer
    view.take(look(AT + 3, transfers=[other]))
    assert view.totals().sending_bps == 2 << 20


def test_new_daemon_clears_the_events() -> None:
    one = look()
    view = seen(one)
    told = len(view.tables()["events"].rows)
    view.take(look(AT + 1, events=[]))
    assert len(view.tables()["events"].rows) == told > 0
    view.take(look(AT + 2, status=msgspec.structs.replace(one.status, pid=one.status.pid + 1), events=[]))
    assert view.tables()["events"].rows == []


def test_local_panel_shows_each_gpu_with_its_shares() -> None:
    one = look()
    rows = seen(one).tables()["here"].rows
    assert [row.cells[0].text for row in rows] == ["GPU 0", "GPU 1", "slots"]
    shared = next(row for row, gpu in zip(rows, one.gpus, strict=False) if gpu.jobs)
    assert "share-" in shared.cells[4].text and " 30 %" in shared.cells[4].text and "(now " in shared.cells[4].text
    assert shared.cells[2].text.endswith(" 90 %") and "█" in shared.cells[2].text
    lent = one.status.lend.gpus[0]
    taken = msgspec.structs.replace(lent, level="suspend", why="a program of its owner")
    lend = msgspec.structs.replace(one.status.lend, gpus=[taken, *one.status.lend.gpus[1:]])
    told = seen(look(status=msgspec.structs.replace(one.status, lend=lend))).tables()["here"].rows[0].cells[4]
    assert told.text.startswith("a program of its owner") and told.tone == "warn"


@pytest.mark.parametrize(("part", "shown"), [(0, "░░░░"), (0.001, "█░░░"), (0.5, "██░░"), (0.999, "███░"), (1, "████")])
def test_bar_shows_any_use_and_is_full_only_at_the_maximum(part: float, shown: str) -> None:
    assert bar(part, 4) == shown


def test_answers_of_older_and_newer_daemons_are_decoded() -> None:
    status = {**ANSWERS["/v1/status"], "something_new": [1]}
    assert not {"wire", "versions", "roles"} & set(status), "the recording is older than these fields"
    read = understood(msgspec.json.encode(status), Status)
    assert read.nick == "node1" and (read.wire, read.versions, read.roles) == (0, {}, [])
    for wrong in (b"", b"{}", b"[]", b'{"node": 1, "nick": "a"}', b'{"node": "\xff", "nick": "a"}'):
        with pytest.raises(MeshError, match="is not understood"):
            understood(wrong, Status)


# --- text chosen by other users

SIGNS = "\x1b\x07\x00\r\n\t\u202e\u2066\u200f\u0301\u0300\u20dd\ufeff\u2028[]\\\u0627\u05d0漢👩\ufe0f\u200d"
HOSTILE = st.text(st.one_of(st.characters(), st.sampled_from(SIGNS)), max_size=300)


def no_harm(text: str) -> bool:
    return not any(unicodedata.category(sign) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"} for sign in text)


@given(HOSTILE, st.integers(0, 80))
def test_sanitized_name_has_exact_width(text: str, width: int) -> None:
    shown = sanitize(text)
    assert no_harm(shown) and sanitize(shown) == shown
    assume(all(width_of(sign) == cell_len(sign) for sign in shown))  # terminals differ about a few hundred signs
    for right in (False, True):
        assert cell_len(cut(shown, width, right)) == width


def test_hostile_names_are_sanitized() -> None:
    assert sanitize("[bold]x[/]") == "[bold]x[/]"
    assert sanitize("\x1b[2Jgone\u202eevil") == "�[2Jgone�evil"
    assert sanitize("two\nlines") == "two lines"
    assert sanitize("Việt") == "Việt" and sanitize("e" + "\u0336" * 50) == "e" + "\u0336" * 2
    assert len(sanitize("x" * 10**6)) == 200


@settings(max_examples=40)
@given(HOSTILE, HOSTILE, st.integers(20, 220), st.floats(allow_nan=False, allow_infinity=False))
def test_hostile_answers_fit_the_terminal(name: str, words: str, room: int, moment: float) -> None:
    one = look()
    nodes = [
        msgspec.structs.replace(node, nick=name, user=words, zone=name, state=words, held_by=words, since_unix=moment)
        for node in one.nodes
    ]
    jobs = [
        msgspec.structs.replace(job, name=name, user=words, state=name, node=words, command=name, detail=words)
        for job in one.jobs
    ]
    gpus = [msgspec.structs.replace(gpu, model=words) for gpu in one.gpus]
    status = msgspec.structs.replace(one.status, nick=name, mesh=words, user=name)
    events = [msgspec.structs.replace(event, actor=name, text=words, unix_ms=int(moment)) for event in one.events[:3]]
    sends = [Transfer(id=1, to=name, kind=words, job="j" * 26, name=name, sent=1, bytes=2, seconds=0.0, urgent=False)]
    for line in text_lines(seen(Look(AT, status, nodes, jobs, gpus, sends, events)), room, 3)[2:]:
        assert no_harm(line) and cell_len(line) <= max(room, 70)  # required columns may need this width


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=12),
    st.integers(10, 200),
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
)
def test_columns_fit_and_required_columns_stay(shape: list[tuple[int, int]], room: int, lengths: list[int]) -> None:
    columns = tuple(Column("T", most, rank if place else 0) for place, (most, rank) in enumerate(shape))
    rows = [
        Row(str(n), tuple(Cell("x" * (length + place)) for place in range(len(shape))))
        for n, length in enumerate(lengths)
    ]
    widths = widths_of(Table("t", columns, rows, None, len(rows)), room)
    assert all(width for width, column in zip(widths, columns, strict=True) if not column.rank)
    if sum(LEAST + 2 for column in columns if not column.rank) <= room:
        assert sum(width + 2 for width in widths if width) - 2 <= room


def test_clock_shows_invalid_times_as_unknown() -> None:
    assert clock(1e300) == "?" and clock(float("inf")) == "?"


def test_text_is_cut_to_exactly_its_cells() -> None:
    assert [cut("abcd", width) for width in (6, 4, 3, 1, 0)] == ["abcd  ", "abcd", "ab…", "…", ""]
    assert cut("ab", 4, right=True) == "  ab" and cut("漢字", 3) == "漢…" and cut("漢字", 4) == "漢字"
    assert cut("a漢字", 3) == "a …", "half a sign is none"
    assert [width_of(text) for text in ("ab", "漢", "ｱ", "Ａ", "e\u0301")] == [2, 2, 1, 2, 1]


def test_text_at_its_bound_is_whole_and_longer_text_ends_with_a_sign() -> None:
    assert sanitize("x" * 200) == "x" * 200 and sanitize("x" * 201) == "x" * 199 + "…" and sanitize("abc", 2) == "a…"
    marks = "e\u0336\u0336\u0336a\u0336"
    assert sanitize(marks) == "e\u0336\u0336a\u0336", "each letter has its own"
    assert sanitize("a\u20ddb") == "ab", "what encloses other signs"
    assert sanitize("\u2028\ue000\u200b\ud800") == "\ufffd" * 4 and sanitize("a\u00a0b\u2003c") == "a b c"
