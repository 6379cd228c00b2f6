"""Pages: text is escaped, colours have contrast, controls have names."""

import re
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh.api.schemas.checkpoints import Stored
from mesh.api.schemas.jobs import Described, Job, Why
from mesh.api.schemas.mesh import Node, Survival, Usage
from mesh.api.schemas.owner import Cost, Lend
from mesh.web import stylesheet
from mesh.web.frame import Shown, Viewer, document, message
from mesh.web.jobs import job_page, jobs_page, timeline
from mesh.web.lend import lend_page
from mesh.web.markup import element
from mesh.web.nodes import DAYS, MOST_GPUS, MOST_SHOWN, nodes_page, together, week_page
from mesh.web.palette import DARK, LIGHT, contrast
from mesh.web.stream import event
from mesh.web.usage import ledger_page
from tests.answers import answer
from tests.outline import Outline, outline

NOW = 1_700_000_000.0
MS = int(NOW * 1000)
HOSTILE = "</title></style><script>alert(1)</script>\"'&<!--\x00\u202e]]>\x1b[31m\n\nevent: say\ndata: x"
TEXTS = st.text(st.characters(codec=None, exclude_categories=()), min_size=1, max_size=30)


GPU = {"uuid": "GPU-x", "model": "x", "vram_mib": 24_000}


def node(text: str, **more: Any) -> Node:
    gpus = [{"uuid": f"GPU-{text}", "model": text, "vram_mib": 24_000}]
    return answer(Node, {
        "node": text, "nick": text, "user": text, "state": "alive", "me": True, "zone": text, "lending": True, "paused": False,
        "held_by": "", "back_unix": 0, "gpus": gpus, "gpus_free": 0,
        "gpu_room": [{"uuid": f"GPU-{text}", "vram_mib": 24_000, "share": 30}], "slots": 2,
        "slots_free": 1, "weight": 32, "jobs": 1, **more,
    })  # fmt: skip


def attempt(text: str, number: int, reason: str = "") -> dict[str, Any]:
    begun = MS - 60_000 + 20_000 * number
    return {
        "number": number, "node": f"{text}{number}", "term": number, "started_unix_ms": begun, "running_unix_ms": begun + 500,
        "ended_unix_ms": begun + 15_000 if reason else 0, "seen_unix_ms": 0, "reason": reason, "exit_code": None,
        "resumed_step": 7, "last_step": 9,
    }  # fmt: skip


def job(text: str, **more: Any) -> Job:
    return answer(Job, {
        "job": "q" * 26, "name": text, "user": text, "submitter": text, "command": text, "created_unix_ms": MS - 60_000,
        "state": "running", "detail": text, "node": text, "gang": [text], "standby": text, "warm": False, "gpus": 1,
        "gpu_share": 30, "witnesses": [text], "step": 9, "of": 20, "at_risk_s": 12.5, "heeds_notice": False,
        "next_checkpoint": {"due_unix": int(NOW) + 9, "interval_s": 9.0, "loss_s": 2.0, "why": text},
        "saving": {"kind": text, "seq": 4, "since_unix_ms": MS, "sent": 2, "bytes": 4, "nodes": 1},
        "checkpoint": {"seq": 3, "step": 7, "manifest": "", "holders": [text], "created_unix_ms": MS},
        "attempts": [attempt(text, 0, text), attempt(text, 1)], "outcome": None, **more,
    })  # fmt: skip


def lending(text: str, **more: Any) -> Lend:
    stand = {"level": "suspend", "why": text, "causes": ["load"], "next_s": 3.0}
    return answer(Lend, {
        "lending": True, "paused": False, "paused_until_unix": 0, "now": False, "guests": 1, "machine": stand, "hours": text,
        "hours_change_unix": NOW,
        "gpus": [{"index": 0, "withheld": True, "programs": [{"pid": 7, "name": text}], **stand}], "typed_s": 3.0,
        "typing_seen_by": [text], "load": 1.0, "problem": text, "warnings": [text], **more,
    })  # fmt: skip


def guest(text: str) -> Cost:
    return answer(Cost, {
        "job": "q" * 26, "name": text, "user": text, "ran_s": 60.0, "leads": True, "at_risk_s": 9.0, "save_s": 0.5,
        "ship_s": None, "ship_bytes": 4096, "chance": 0.8, "goes_to": text, "loses": text,
    })  # fmt: skip


def stored(text: str) -> Stored:
    return answer(
        Stored, {"kind": text, "seq": 3, "created_unix": int(NOW), "bytes": 4096, "use": text, "holders": [text]}
    )


def told_of_usage(text: str) -> Usage:
    hours = {f"{kind}_{of}_h": 1.5 for kind in ("lent", "borrowed", "own") for of in ("gpu", "slot")}
    run = {
        "job": "q" * 26, "name": text, "user": text, "from_unix_ms": MS, "until_unix_ms": MS + 9000, "gpu_percent": 0, "end": text
    }  # fmt: skip
    return answer(Usage, {
        "rows": [{"name": text, "lost_h": 0.0, "attempts": 3, **hours}], "silent": [text], "cut": [text], "runs": [run],
        "since_unix_ms": MS,
    })  # fmt: skip


def pages(text: str) -> list[Shown]:
    events = [{"unix_ms": MS, "actor": text, "text": text}]
    described = answer(Described, {"job": msgspec.to_builtins(job(text)), "events": events})
    reasons = answer(Why, {
        "explanation": [text], "candidates": [{"nick": text, "weight": 9}], "refused": [{"nick": text, "reasons": [text]}]
    })  # fmt: skip
    one = answer(Survival, {
        "node": text, "nick": text, "lent": True, "lent_since_unix": NOW, "until_unix": int(NOW),
        "survival": [{"horizon_min": 60, "probability": 0.5, "low": 0.4, "high": 0.6}], "week": [None, *range(101), *[0] * 66],
    })  # fmt: skip
    return [
        nodes_page([node(text), node(f"{text}2", state=text, me=False)]),
        week_page([node(text)], {text: one.week}, None),
        week_page([node(text)], {}, one),
        jobs_page([job(text), job("other", user=f"not {text}")], text, NOW),
        job_page(job(text), described, reasons, [stored(text)], NOW),
        job_page(job(text), None, None, [], NOW),
        ledger_page(told_of_usage(text), "user", True),
        lend_page(VIEWER, lending(text), [guest(text)], 30.0, text, text),
    ]


VIEWER = Viewer("node1", "lab", "alice", "word")


def test_equal_gpus_share_one_heading() -> None:
    gpus = [{"uuid": str(number), "model": "NVIDIA A6000", "vram_mib": 49_152} for number in range(3)]
    left = [(100, 49_152), (20, 28_672), (0, 49_152)]
    room = [{"uuid": str(number), "share": share, "vram_mib": mib} for number, (share, mib) in enumerate(left)]
    text = nodes_page([node("desk", gpus=gpus, gpu_room=room)]).parts["nodes"]
    assert text.count("A6000") == 1 and "3 × A6000, 48 GiB" in text
    assert re.findall('class="has">([^<]*)', text) == ["free", "20 %, 28 GiB free", "taken", "1 of 2 free"]


def test_reclaim_button_precedes_the_cost() -> None:
    parts = list(lend_page(VIEWER, lending("x"), [guest("x")] * 30, 30.0, "", "").parts)
    assert parts.index("buttons") < parts.index("cost")


def whole(shown: Shown, text: str) -> str:
    named = Viewer(text, text, text, "word")
    return document(named, text, "/", "/stream/nodes", element("h1", text), *shown.parts.values())


@example(HOSTILE)
@given(TEXTS)
@settings(max_examples=15)
def test_hostile_names_add_no_markup(text: str) -> None:
    for shown, plain in zip(pages(text), pages("x"), strict=True):
        made = outline(whole(shown, text))
        assert made.tags == outline(whole(plain, "x")).tags
        for key, value in made.attributes:
            assert not key.startswith("on") and key != "style"
            if key in {"href", "src", "action"}:
                assert value is not None and value.startswith(("/", "#", "data:,"))
        for name, part in shown.parts.items():
            told = event("part", {"id": name, "html": part})
            assert told.count(b"\n") == 3 and told.endswith(b"\n\n")
    outline(message(text, text))


def test_controls_have_names_and_ids_are_unique() -> None:
    for shown in pages("x"):
        made = outline(whole(shown, "x"))
        ids = [value for key, value in made.attributes if key == "id"]
        assert len(ids) == len(set(ids)) and set(shown.parts) <= set(ids)
        assert made.tags.count("h1") == made.tags.count("main") == 1
        assert {"header", "nav", "footer"} <= set(made.tags)
    for button in re.findall(r"<button[^>]*>(.*?)</button>", whole(pages("x")[-1], "x")):
        assert button


def test_each_form_carries_the_token_of_its_session() -> None:
    made = whole(pages("x")[-1], "x")
    forms = re.findall(r"<form.*?</form>", made)
    assert len(forms) >= 3
    for form in forms:
        assert 'method="post"' in form and '<input type="hidden" name="word" value="word">' in form


def test_reclaim_is_the_main_button_and_shows_the_cost() -> None:
    def buttons(**state: Any) -> list[str]:
        shown = lend_page(VIEWER, lending("", gpus=[], **state), [], 30.0, "", "")
        return re.findall(r'id="do-(\w+)"', shown.parts["buttons"])

    assert buttons() == ["reclaim", "pause"]
    assert buttons(paused=True) == ["resume", "reclaim"]
    assert buttons(paused=True, guests=0) == buttons(lending=False, guests=0) == ["resume"]
    page = lend_page(VIEWER, lending("x"), [guest("training")], 30.0, "", "")
    assert all(words in page.parts["cost"] for words in ("training", "30s", "80%", "4.0 KiB"))


def test_announced_facts_describe_nodes_and_jobs() -> None:
    before, after = (nodes_page([node("a", state=state)]).facts for state in ("alive", "gone"))
    assert before["a"] == "a: alive, lending" and after["a"] == "a: gone, lending"
    assert jobs_page([job("t", user="u")], "u", NOW).facts == {"q" * 26: "t: running on t"}


def test_week_of_many_nodes_is_the_mean_of_known_hours() -> None:
    assert together([[0, None, 100] + [None] * 165, [50, None, None] + [None] * 165])[:3] == [25, None, 100]
    assert together([]) == [None] * 168
    made: Outline = outline(pages("x")[1].parts["week"])
    assert made.tags.count("tr") == 1 + len(DAYS) and made.tags.count("td") == 1 + 168


def test_page_of_many_nodes_stays_small() -> None:
    many = [node(f"lab3-{number:03}", me=False, gpus=[GPU] * 4) for number in range(2 * MOST_SHOWN)]
    assert len(whole(nodes_page(many), "x")) + len(stylesheet.sheet()) < 140_000


def test_colours_have_enough_contrast() -> None:
    for palette in (LIGHT, DARK):
        assert contrast(stylesheet.PRESS, palette.series[1]) >= 4.5  # the reclaim button
        assert contrast(palette.ground, palette.link) >= 4.5  # the lend button
        for colour in (palette.series[0], palette.series[1], palette.series[2], palette.muted, palette.link):
            assert (
                contrast(colour, palette.raised) >= 2.8 and contrast(colour, palette.ground) >= 3
            )  # bars, edges, focus
        assert contrast(palette.muted, palette.raised) >= 4.5 and contrast(palette.text, palette.raised) >= 7
    used = set(re.findall(r"var\(--([\w-]+)\)", stylesheet.sheet()))
    assert all(f"--{name}:" in stylesheet.sheet() for name in used)


def words(page: Shown) -> dict[str, str]:
    """Return the text of each part, without tags."""
    return {name: re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", part)).strip() for name, part in page.parts.items()}


def test_sum_counts_nodes_that_are_here_and_gpus_that_are_lent() -> None:
    rows = [
        node("a", gpus_free=1, me=False),
        node("b", lending=False, paused=True, held_by="owner", gpus_free=1, me=False),
        node("c", state="dead", gpus_free=1, me=False),
        node("z", gpus_free=0),
    ]
    page = nodes_page(rows)
    assert words(page)["sum"] == "3 nodes here, 2 lending; 1 of 3 GPUs free"
    order = [str(page.parts["nodes"]).index(f"<h2>{name}</h2>") for name in "zabc"]
    assert order == sorted(order), "this node first, those that are gone last"
    assert page.facts["b"] == "b: alive, owner present" and page.facts["c"].startswith("c: dead")
    assert words(nodes_page([node("a", gpus=[])]))["sum"] == "1 node here, 1 lending"


def test_node_says_what_is_free_of_it() -> None:
    gpu = {"uuid": "g", "model": "NVIDIA T4", "vram_mib": 16_384}
    for room, text in (
        ([], "taken"),
        ([{"uuid": "g", "share": 100, "vram_mib": 16_384}], "free"),
        ([{"uuid": "g", "share": 30, "vram_mib": 8192}], "30 %, 8 GiB free"),
        ([{"uuid": "g", "share": 100, "vram_mib": 8192}], "100 %, 8 GiB free"),
    ):
        told = words(nodes_page([node("a", gpus=[gpu], gpu_room=room)]))["nodes"]
        assert f"T4, 16 GiB {text}" in told, told
    told = words(nodes_page([node("a", slots=4, slots_free=1, weight=16, jobs=2)]))["nodes"]
    assert "slots 1 of 4 free" in told and "runs 2 jobs · zone a · stays an hour: 25%" in told
    part = str(nodes_page([node("a", slots=4, slots_free=1)]).parts["nodes"])
    assert re.findall(r'width="(\d+%)"', part) == ["70%", "75%"], "what is used is drawn"
    many = [{**gpu, "uuid": f"g{number}"} for number in range(MOST_GPUS + 2)]
    assert "and 2 more GPUs" in words(nodes_page([node("a", gpus=many)]))["nodes"]
    page = nodes_page([node(f"n{number:03}", me=False) for number in range(MOST_SHOWN + 3)])
    assert words(page)["more"] == "3 more: `mesh nodes` lists all" and len(page.facts) == MOST_SHOWN + 3
    assert str(page.parts["nodes"]).count("<li") == MOST_SHOWN


def test_jobs_are_listed_with_what_is_at_risk() -> None:
    rows = [
        job("old", job="o" * 26, user="ada", outcome={"kind": "done", "ended_unix_ms": MS}, created_unix_ms=MS - 5),
        job("mine", job="m" * 26, user="ada", at_risk_s=61.0, created_unix_ms=MS - 10),
        job("theirs", job="t" * 26, user="bob", at_risk_s=99.0),
    ]
    page = jobs_page(rows, "ada", NOW)
    told = words(page)
    assert told["sum"] == "1 job of yours under way, 1m1s of work at risk"
    assert told["mine"].index("mine") < told["mine"].index("old"), "what goes on comes first"
    assert "theirs" in told["others"] and "theirs" not in told["mine"] and "t" * 26 not in page.facts
    assert set(page.facts) == {"o" * 26, "m" * 26}, "no news of others' jobs"
    safe = [job("mine", user="ada", at_risk_s=0.5)]
    assert words(jobs_page(safe, "ada", NOW))["sum"] == "1 job of yours under way, no work at risk"
    assert words(jobs_page([], "ada", NOW))["sum"] == "0 jobs of yours under way"
    many = [job(f"n{number}", user="ada") for number in range(52)]
    assert "2 older: `mesh ps -a` lists all" in words(jobs_page(many, "ada", NOW))["mine"]


def test_timeline_covers_a_job_from_its_submission_to_its_end() -> None:
    rows = [attempt("n", 0, "its node left"), attempt("n", 1)]
    drawn = str(timeline(job("x", attempts=rows), NOW))
    bars = re.findall(r'x="([\d.]+)" y="3" width="([\d.]+)"', drawn)
    assert [tuple(map(float, bar)) for bar in bars] == [(0.0, 25.0), (33.33, 66.67)]
    assert "2 attempts in 1m: n0 15s, its node left; n1 40s, under way" in drawn
    ended = {"kind": "done", "ended_unix_ms": MS - 20_000}
    assert "in 40s:" in str(timeline(job("x", attempts=rows, outcome=ended), NOW))
    lost = [{**attempt("n", 4, "lost"), "ended_unix_ms": 0, "seen_unix_ms": MS + 40_000}]
    assert "the last of 5, 1 attempt" in str(timeline(job("x", attempts=lost), NOW)) and "20s, lost" in str(
        timeline(job("x", attempts=lost), NOW)
    )
    assert not timeline(job("x", attempts=[]), NOW)


def test_ledger_names_those_who_did_not_answer() -> None:
    told = words(ledger_page(told_of_usage("den"), "user", False))
    assert told["notes"] == ("Not counted, as they did not answer: den. Only their newest receipts are counted: den.")
    assert "slot" in told["runs"] and "9s" in told["runs"]
    assert "are being asked" in words(ledger_page(told_of_usage("den"), "user", True))["notes"]


def test_owner_is_offered_what_makes_sense_now() -> None:
    open_gpus = [
        {"index": 0, "withheld": False, "programs": [], "level": "lend", "why": "", "causes": [], "next_s": None}
    ]

    def offered(**state: Any) -> list[str]:
        page = lend_page(VIEWER, lending("x", **state), [], 30.0, "")
        return re.findall(r'id="do-(\w+)"', str(page.parts["buttons"]) + str(page.parts["at-once"]))

    assert offered(gpus=open_gpus, guests=1) == ["reclaim", "pause", "kill"]
    assert offered(gpus=open_gpus, guests=0) == ["reclaim", "pause"]
    assert offered(gpus=open_gpus, guests=1, paused=True) == ["resume", "reclaim", "kill"]
    assert offered(gpus=open_gpus, guests=0, lending=False) == offered(guests=0) == ["resume"], "a GPU is withheld"
