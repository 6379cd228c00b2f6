"""Rendering of one set of answers, without a terminal."""

import unicodedata
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from mesh.api.schemas.gpus import Gpus
from mesh.api.schemas.jobs import Described, Events, Job, Jobs
from mesh.api.schemas.mesh import Node, Nodes, Status, Transfer, Transfers
from mesh.api.schemas.owner import Rehearsed
from mesh.top.answers import Look, understood
from mesh.top.table import LEAST, Cell, Column, Row, Table, bar, clock, titles_of, widths_of
from mesh.top.table_rows import (
    JOB_SORTINGS,
    OVER,
    attempts,
    cost_rows,
    job_lines,
    job_row,
    lends,
    moves,
    node_row,
    slots_row,
)
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


def texts(row: Row) -> list[str]:
    return [cell.text for cell in row.cells]


def a_node(**fields: Any) -> Node:
    told: dict[str, Any] = {"node": "n" * 26, "nick": "desk", "user": "ada", "state": "alive", "me": False, "zone": ""}
    told |= {"lending": True, "paused": False, "held_by": "", "back_unix": 0, "slots": 2, "slots_free": 1, "jobs": 0}
    told |= {"gpus": [], "gpu_room": [], "engines": ["process", "docker"], "since_unix": AT - 60}
    return answer(Node, told | fields)


def a_job(**fields: Any) -> Job:
    told: dict[str, Any] = {"job": "j" * 26, "name": "train", "user": "ada", "state": "running", "node": "desk"}
    told |= {"array": None, "detail": "", "saving": None, "step": None, "of": None, "checkpoint": None, "gang": []}
    told |= {
        "next_checkpoint": None,
        "at_risk_s": 0.0,
        "attempts": [],
        "gpus": 1,
        "gpu_share": 100,
        "command": "train.py",
    }
    return answer(Job, told | {"created_unix_ms": 5, "standby": None, "outcome": None} | fields)


GPU = {"uuid": "g", "model": "T4", "vram_mib": 16_384}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "1/2 slots"),
        ({"slots": 0}, "-"),
        ({"gpus": [GPU], "gpu_room": [{"uuid": "g", "share": 30, "vram_mib": 1}]}, "0.3/1 GPUs, 1/2 slots"),
        ({"gpus": [GPU], "gpu_room": [{"uuid": "g", "share": 30, "vram_mib": 0}], "slots": 0}, "0/1 GPUs"),
        ({"lending": False}, "-"),
        ({"lending": False, "paused": True}, "paused"),
        ({"lending": False, "paused": True, "held_by": "owner"}, "owner present"),
        ({"lending": False, "paused": True, "held_by": "hours"}, "outside hours"),
    ],
)
def test_node_says_what_it_lends_or_why_not(fields: dict[str, Any], words: str) -> None:
    assert lends(a_node(**fields)) == words


def test_row_of_a_node() -> None:
    row = node_row(a_node(gpus=[GPU, GPU | {"uuid": "h"}], me=True, jobs=3, zone="lab"), AT, False)
    assert texts(row)[:2] == ["desk *", "alive"] and texts(row)[3].endswith(" 2/2") and texts(row)[4:6] == ["3", "1m"]
    assert texts(row)[6:] == ["ada", "lab", "T4", "process,docker"] and row.cells[0].tone == "bold"
    assert node_row(a_node(), AT, False).cells[0].tone == "" and node_row(a_node(), AT, True).cells[0].tone == "bold"


def test_row_of_a_job() -> None:
    assert texts(job_row(a_job(), AT, False)) == [
        "jjjjjjjj", "train", "running", "desk", "0", "", "-", "-", "", "ada", "1", "train.py",
    ]  # fmt: skip
    kept = {"seq": 3, "step": 7, "holders": ["a", "b"], "created_unix_ms": (int(AT) - 65) * 1000, "manifest": ""}
    due = {"due_unix": int(AT) + 30, "interval_s": 1.0, "loss_s": 1.0, "why": "hazard"}
    busy = a_job(
        step=7, of=20, checkpoint=kept, next_checkpoint=due, at_risk_s=61.0, gang=["den"], gpus=2, gpu_share=50,
        detail="it saves", array={"array": "x" * 26, "label": "12"},
    )  # fmt: skip
    shown = texts(job_row(busy, AT, True))
    assert shown[0] == "xxxxxxxx_12" and shown[3] == "desk +1" and shown[5:8] == ["7/20", "1m5s on 2", "1m1s"]
    assert shown[8] and shown[10:] == ["1", "it saves"]
    over = msgspec.structs.replace(busy, state="done")
    assert texts(job_row(over, AT, False))[8] == "" and texts(job_row(over, AT, False))[11] == "train.py  it saves"
    assert texts(job_row(a_job(gpus=0, node=None, step=7), AT, False))[3:11:7] == ["-", "-"]


def test_moves_are_attempts_that_ran_elsewhere() -> None:
    def attempt(number: int, running_unix_ms: int) -> dict[str, Any]:
        return {"number": number, "node": "n", "term": 0, "started_unix_ms": 1, "running_unix_ms": running_unix_ms,
                "ended_unix_ms": 0, "seen_unix_ms": 0, "reason": "", "exit_code": None}  # fmt: skip

    assert moves(a_job()) == 0 and moves(a_job(attempts=[attempt(0, 1)])) == 0
    assert moves(a_job(attempts=[attempt(4, 1), attempt(5, 1)])) == 5, "only the last ones are listed"
    assert moves(a_job(attempts=[attempt(0, 1), attempt(1, 0), attempt(2, 1)])) == 1
    assert moves(a_job(attempts=[attempt(0, 0)])) == 0


def test_guests_without_a_gpu_share_one_row() -> None:
    one = look()
    status = msgspec.structs.replace(one.status, guests=["j" * 26, "unknown"])
    mine = look(status=status, nodes=[a_node(me=True)], jobs=[a_job(gpus=0)], gpus=[])
    row = slots_row(mine)
    assert row is not None and texts(row)[2].endswith("1/2") and texts(row)[4] == "train of ada"
    none = slots_row(look(status=msgspec.structs.replace(status, guests=[]), nodes=[a_node(me=True)], gpus=[], jobs=[]))
    assert none is not None and texts(none)[4] == "free"
    assert slots_row(look(nodes=[a_node()])) is None
    assert slots_row(look(status=msgspec.structs.replace(status, guests=[]), nodes=[a_node(me=True, slots=0)])) is None


def test_new_checkpoint_of_a_job_is_news() -> None:
    kept = {"seq": 3, "step": 7, "holders": [], "created_unix_ms": 5, "manifest": ""}
    before, after = a_job(), a_job(checkpoint=kept)

    def marked(first: Job, then: Job) -> bool:
        view = seen(look(jobs=[first]), look(AT + 1, jobs=[then], events=[]))
        return view.tables()["jobs"].rows[0].cells[0].tone == "bold"

    assert marked(before, after) and not marked(after, after) and marked(after, a_job(checkpoint=kept | {"seq": 4}))
    assert not marked(before, a_job(step=9)), "a step is none"


def test_totals_count_nodes_that_are_here_alone() -> None:
    room = [{"uuid": "g", "share": 50, "vram_mib": 1}]
    nodes = [a_node(node="1", gpus=[GPU], gpu_room=room), a_node(node="2", state="dead", gpus=[GPU], gpu_room=room)]
    nodes.append(a_node(node="3", lending=False, gpus=[GPU], gpu_room=room))
    jobs = [a_job(job="1", at_risk_s=5.0), a_job(job="2", node=None), a_job(job="3", state="done", at_risk_s=9.0)]
    totals = seen(look(nodes=nodes, jobs=jobs)).totals()
    assert (totals.nodes, totals.alive, totals.lending, totals.gpus, totals.gpus_free) == (3, 2, 1, 1, 0.5)
    assert (totals.slots, totals.slots_free, totals.running, totals.waiting, totals.at_risk_s) == (2, 1, 1, 1, 5.0)


def test_first_line_says_whether_the_node_lends() -> None:
    status = look().status
    for paused, now, words in ((True, True, "paused"), (False, True, "lending"), (False, False, "not lending now")):
        lend = msgspec.structs.replace(status.lend, now=now)
        one = look(status=msgspec.structs.replace(status, paused=paused, lend=lend))
        assert text_lines(seen(one), 100, 3)[0].endswith(f", {words}")
    lines = text_lines(seen(look()), 100, 1)
    assert sum(line.startswith("EVENTS") for line in lines) == 1 and lines[-2].startswith("EVENTS")


def test_page_of_a_job_says_where_its_checkpoint_is_and_how_attempts_ended() -> None:
    kept = {
        "seq": 3,
        "step": 7,
        "holders": ["den"],
        "created_unix_ms": (int(AT) - 65) * 1000,
        "manifest": "",
        "at_risk": True,
    }
    due = {"due_unix": int(AT) - 5, "interval_s": 1.0, "loss_s": 1.0, "why": "hazard"}
    job = a_job(checkpoint=kept | {"wanted": 2}, next_checkpoint=due, at_risk_s=61.0, standby="lab", detail="x")
    ran = {"started_unix_ms": (int(AT) - 99) * 1000, "running_unix_ms": (int(AT) - 90) * 1000}
    ended = ran | {"number": 0, "node": "den", "term": 0, "ended_unix_ms": (int(AT) - 30) * 1000, "seen_unix_ms": 0}
    ended |= {"reason": "its node left", "exit_code": None, "resumed_step": None, "last_step": 7}
    runs = ended | {
        "number": 1,
        "ended_unix_ms": 0,
        "reason": "",
        "running_unix_ms": (int(AT) - 20) * 1000,
        "resumed_step": 7,
    }
    lost = ended | {"number": 2, "ended_unix_ms": 0, "seen_unix_ms": (int(AT) - 50) * 1000}
    never = ended | {"number": 3, "running_unix_ms": 0}
    told = {**msgspec.to_builtins(job), "attempts": [ended, runs, lost, never]}
    described = answer(Described, {"job": told, "events": []})
    lines = [" ".join(cell.text for cell in line) for line in job_lines(described, AT)]
    assert lines[0].startswith("jjjjjjjj  train") and lines[0].endswith("on desk, standby lab  of ada")
    assert "checkpoint 3 at step 7, 1m5s ago, on den (at risk: 2 wanted); next due " in lines[2]
    assert lines[2].endswith("; at risk 1m1s")
    rows = [texts(row) for row in attempts(described, AT)]
    assert [row[0] for row in rows] == ["3", "2", "1", "0"], "the newest first"
    assert [row[3] for row in rows] == ["-", "40s", "20s", "1m"] and [row[4] for row in rows] == ["-", "-", "7", "-"]
    assert [row[6] for row in rows] == ["its node left", "its node left", "running", "its node left"]


def test_cost_of_a_guest_that_is_not_led_here_is_not_known() -> None:
    guest = {"job": "j" * 26, "name": "", "user": "ada", "ran_s": 60.0, "gpus": ["g"], "leads": True, "at_risk_s": 61.0,
             "save_s": 0.25, "ship_bytes": 2**20, "ship_s": None, "chance": 0.5, "goes_to": "den", "loses": ""}  # fmt: skip
    other = guest | {"leads": False, "gpus": [], "chance": None, "ship_bytes": None, "ship_s": 2.0, "save_s": None}
    rows = cost_rows(answer(Rehearsed, {"guests": [guest, other | {"goes_to": None, "loses": "all"}]}))
    assert texts(rows[0]) == ["jjjjjjjj", "ada", "1m", "1", "1m1s", "0.2s", "1.0 MiB ?", "50%", "den", "nothing"]
    assert texts(rows[1])[3:] == ["-", "-", "?", "2.0s", "?", "-", "all"] and rows[1].cells[-1].tone == "bad"
