"""Server-sent events: each viewer sees the present state, and each log line once."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from mesh.util.log_text import MOST
from mesh.web import stream
from mesh.web.frame import Shown
from mesh.web.markup import element
from mesh.web.stream import BEAT, LogTail, Topic, event


class Viewer:
    """The side of the browser: received messages and shown parts. It receives only while `may` is set."""

    def __init__(self, topic: Topic, place: str = "") -> None:
        self.parts: dict[str, str] = {}
        self.said: list[str] = []
        self.log, self.place = "", place
        self.may = asyncio.Event()
        self.may.set()
        self.task = asyncio.create_task(topic.follow(self.take, place))

    async def take(self, data: bytes) -> None:
        await self.may.wait()
        for told in data.decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in told.splitlines() if not line.startswith(":"))
            if not fields:
                continue
            value: Any = json.loads(fields["data"])
            match fields["event"]:
                case "part":
                    self.parts[value["id"]] = value["html"]
                case "say":
                    self.said.append(value)
                case "log":
                    self.log = ("" if value["from"] == "start" else self.log) + value["text"]
                    self.place = fields["id"]

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Job:
    """A page with a step number and a log."""

    def __init__(self) -> None:
        self.step, self.renders = 0, 0
        self.printed: asyncio.Queue[bytes] = asyncio.Queue()

    async def render(self) -> Shown:
        self.renders += 1
        return Shown({"step": element("p", f"step {self.step}", id="step")}, {"job": f"state {self.step // 10}"})

    async def output(self) -> AsyncGenerator[bytes, None]:
        while piece := await self.printed.get():
            yield piece


async def test_a_thousand_viewers_receive_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "TICK_S", 0.02)
    job, over = Job(), asyncio.Event()
    topic = Topic(job.render, job.output, over.set)
    await topic.look()
    topic.open()
    viewers = [Viewer(topic) for _ in range(1000)]
    viewers[0].may.clear()
    text = ""
    for number in range(20):
        job.step = 3 * number
        line = f"line {number} ä\n"
        text += line
        job.printed.put_nowait(line.encode())
        if number == 7:
            async with asyncio.timeout(30):
                while not viewers[1].place:
                    await asyncio.sleep(0.01)
            await viewers[1].leave()
            viewers[1] = again = Viewer(topic, viewers[1].place)
            again.log = text[: int(again.place.partition(".")[2])]
        await asyncio.sleep(0.01)
    viewers[0].may.set()
    async with asyncio.timeout(30):
        while not all(viewer.log == text and viewer.parts == {"step": viewers[2].parts["step"]} for viewer in viewers):
            await asyncio.sleep(0.01)
        while "step 57" not in viewers[0].parts["step"]:
            await asyncio.sleep(0.01)
    assert viewers[2].said and viewers[2].said[-1] == "state 5"
    await topic.close()
    await asyncio.gather(*(viewer.task for viewer in viewers))
    assert topic.viewers == 0


async def test_page_without_viewers_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "TICK_S", 0.005)
    monkeypatch.setattr(stream, "LINGER_S", 0.1)
    job, over = Job(), asyncio.Event()
    topic = Topic(job.render, job.output, over.set)
    topic.open()
    async with asyncio.timeout(60):
        await over.wait()
    assert job.renders == 0


async def test_page_recovers_from_a_failed_render(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "TICK_S", 0.005)
    job = Job()
    failures = iter([OSError("no disk")] * 3)

    async def render() -> Shown:
        if (failure := next(failures, None)) is not None:
            raise failure
        return await job.render()

    topic = Topic(render, None, lambda: None)
    topic.open()
    viewer = Viewer(topic)
    async with asyncio.timeout(60):
        while not viewer.parts:
            await asyncio.sleep(0.005)
    assert caplog.text.count("a page cannot be shown") == 3
    await topic.close()
    await viewer.task


def test_slow_viewer_restarts_at_the_kept_text() -> None:
    tail = LogTail()
    tail.add("first\n")
    early = tail.place
    tail.add("second\n")
    assert tail.after(early) == (False, "second\n") and tail.after(tail.place) == (False, "")
    for strange in (
        "",
        "x",
        f"{tail.epoch}.",
        f"{tail.epoch}.-1",
        f"{tail.epoch}.99",
        f"{tail.epoch}.²",
        "other.6",
        early[:-1] + "9" * 30,
    ):
        assert tail.after(strange) == (True, "first\nsecond\n")
    tail.add("x" * MOST)
    assert tail.after(early) == (True, "x" * MOST) and len(tail.text) == MOST


def test_place_of_another_reading_or_beyond_the_text_starts_again() -> None:
    tail = LogTail()
    tail.add("abcdef")
    assert tail.after(f"{tail.epoch}.4") == (False, "ef") and tail.after(tail.place) == (False, "")
    assert tail.after(f"{tail.epoch}.0") == (False, "abcdef")
    for place in ("", "4", f"{'0' * 8}.4", f"{tail.epoch}.7", f"{tail.epoch}.-1", f"{tail.epoch}.", f"{tail.epoch}.٤"):
        assert tail.after(place) == (True, "abcdef"), place
    assert LogTail().epoch != tail.epoch


async def test_viewer_is_told_changes_only_and_news_once() -> None:
    shown = Shown({"sum": "1"}, {"a": "a: alive"})  # type: ignore[dict-item]

    async def render() -> Shown:
        return shown

    topic = Topic(render, None, lambda: None)
    await topic.ready()
    told: asyncio.Queue[bytes] = asyncio.Queue()
    viewer = asyncio.create_task(topic.follow(told.put, ""))
    assert await told.get() == event("part", {"id": "sum", "html": "1"}), "what is shown now, and no news of before"
    topic._take(shown)
    topic._wake()
    assert await told.get() == BEAT, "nothing has changed"
    shown = Shown({"sum": "1", "more": "2"}, {"a": "a: dead", "b": "b: alive"})  # type: ignore[dict-item]
    await topic.look()
    assert await told.get() == event("part", {"id": "more", "html": "2"}) + event("say", "a: dead; b: alive")
    late: asyncio.Queue[bytes] = asyncio.Queue()
    other = asyncio.create_task(topic.follow(late.put, ""))
    assert b"event: say" not in await late.get() and topic.viewers == 2, "to them it is not new"
    await topic.close()
    await asyncio.wait_for(asyncio.gather(viewer, other), 5)
    assert topic.viewers == 0


async def test_viewer_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WRITE_S", 0.01)

    async def render() -> Shown:
        return Shown({}, {})

    async def write(data: bytes) -> None:
        await asyncio.Event().wait()

    topic = Topic(render, None, lambda: None)
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError):
            await topic.follow(write, "")
    assert topic.viewers == 0


def test_event_is_one_line_of_data() -> None:
    made = event("log", {"text": "a\nb\r"}, "x.3")
    assert made == b'event: log\nid: x.3\ndata: {"text":"a\\nb\\r"}\n\n' and made.count(b"\n\n") == 1
    assert b"id:" not in event("say", "x")
