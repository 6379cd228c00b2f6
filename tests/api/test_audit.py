"""The audit log holds each order, its sender and its result, and no secrets."""

import asyncio
import os
import socket
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import aiohttp
import pytest
from aiohttp import web

from mesh.api import audit as module
from mesh.api.handlers.jobs import JobHandlers
from mesh.api.requests import DownOrder
from mesh.api.routing import Call
from mesh.api.schemas.owner import Leaving
from mesh.api.server import application
from mesh.journal import EVENTS_READ, Journal
from mesh.model.events import Event
from mesh.model.spec import SpecError
from mesh.util.errors import ExitCode, MeshError


async def audited(tmp_path: Path, path: str, body: dict[str, Any], handlers: Mock) -> str:
    event_log = Mock()
    runner = web.AppRunner(application(handlers, event_log))
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "s"))) as session:
        async with session.post(f"http://mesh{path}", json=body) as answer:
            await answer.read()
        async with session.get("http://mesh/v1/pending") as answer:
            await answer.read()
    await runner.cleanup()
    ((job, kind, words),) = [call.args for call in event_log.add.call_args_list]
    assert (job, kind) == (None, "audit"), "reads are not audited"
    return str(words)


@pytest.fixture
def handlers() -> Mock:
    made = Mock()
    made.lookup.load = AsyncMock()
    made.trust.pending.return_value = []
    return made


async def test_audit_records_terms_and_sender_of_an_order(tmp_path: Path, handlers: Mock) -> None:
    handlers.node.down.return_value = Leaving(pid=1, guests=0)
    words = await audited(tmp_path, "/v1/down", {"now": True}, handlers)
    assert words.startswith(f"down (now=True), by uid {os.getuid()} (") and f"pid {os.getpid()})" in words
    assert struct.calcsize("3i") == 12


async def test_audit_records_why_a_request_cannot_be_a_job(tmp_path: Path, handlers: Mock) -> None:
    handlers.submission.submit = AsyncMock(side_effect=SpecError("the deadline must lie in the future"))
    words = await audited(tmp_path, "/v1/jobs", {"argv": ["true"], "workdir": None}, handlers)
    assert words.endswith(": refused: the deadline must lie in the future")


async def test_audit_records_refused_orders(tmp_path: Path, handlers: Mock) -> None:
    handlers.trust.revoke.side_effect = MeshError("only a founder may", ExitCode.REFUSED)
    words = await audited(tmp_path, "/v1/revoke", {"node": "lab\x1b[2J3", "reason": "gone"}, handlers)
    assert words.startswith("revoke (node=lab?[2J3, reason=gone), by uid ") and words.endswith(
        ": refused: only a founder may"
    )


async def test_audit_omits_the_specification_of_a_job(tmp_path: Path, handlers: Mock) -> None:
    body = {"argv": ["train", "--token", "hunter2"], "env": {"KEY": "hunter2"}, "name": "night", "image": "hunter2"}
    handlers.submission.submit.side_effect = RuntimeError("disk full: hunter2")
    words = await audited(tmp_path, "/v1/jobs", body, handlers)
    assert "name=night" in words and words.endswith(": failed: RuntimeError") and "hunter2" not in words


async def test_every_audit_entry_that_is_kept_can_be_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    for seq in range(EVENTS_READ + 5):
        for job in (None, b"j" * 16):
            event = Event(job, seq, unix_ms=seq, kind="audit", new="down")
            journal.record_event(b"me", event, b"%d" % seq)
    jobs = Mock()
    jobs.event_log.open = lambda sealed: (b"me", Event(None, int(sealed), unix_ms=0, kind="audit"))
    membership = Mock()
    membership.members.return_value = []
    handlers = JobHandlers(Mock(), Mock(), membership, journal, jobs, Mock(), Mock())
    assert [event.seq for event in await handlers.events(None, 0, audit=True)] == list(range(EVENTS_READ + 5))
    assert len(await handlers.events(None, 0)) == EVENTS_READ
    await journal.close()


async def test_audit_bounds_each_term_and_records_an_order_whose_client_went_away(tmp_path: Path) -> None:
    event_log, request = Mock(), Mock(match_info={"job": "j" * 100}, transport=None, remote="10.0.0.7\n")

    async def handle(handlers: object, call: object) -> None:
        raise asyncio.CancelledError

    route: Any = SimpleNamespace(name="down_now", handle=handle)
    with pytest.raises(asyncio.CancelledError):
        await module.audited(event_log, route, Mock(), Call(request, DownOrder(grace_s=5.0)))
    ((_, _, words),) = [call.args for call in event_log.add.call_args_list]
    assert words.startswith(
        f"down now ({'j' * 60}, grace_s=5.0), by a client at 10.0.0.7?: who ordered it did not wait"
    )


def test_audit_names_a_client_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int) -> str:
        raise FileNotFoundError(pid)

    monkeypatch.setattr(module, "name_of", gone)
    near, far = socket.socketpair()
    with near, far:
        request: Any = SimpleNamespace(transport=SimpleNamespace(get_extra_info=lambda name: near))
        assert module._who(request) == f"uid {os.getuid()} (a program that has ended, pid {os.getpid()})"
