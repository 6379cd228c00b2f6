"""Who ordered what on a node is noted, with what became of it, and without what is nobody's business."""

import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web

from mesh.api.errors import ExitCode, MeshError
from mesh.api.local import application


async def noted(tmp_path: Path, path: str, body: dict[str, Any], daemon: Mock) -> str:
    runner = web.AppRunner(application(daemon))
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "s"))) as session:
        async with session.post(f"http://mesh{path}", json=body) as answer:
            await answer.read()
        async with session.get("http://mesh/v1/pending") as answer:
            await answer.read()
    await runner.cleanup()
    ((job, kind, words),) = [call.args for call in daemon.jobs.chronicle.say.call_args_list]
    assert (job, kind) == (None, "audit"), "and reads are not"
    return str(words)


@pytest.fixture
def daemon() -> Mock:
    made = Mock()

    async def heard_of(job: str) -> None:
        pass

    made.job_desk.heard_of = heard_of
    made.desk.pending.return_value = []
    return made


async def test_an_order_is_noted_with_its_terms_and_by_whom(tmp_path: Path, daemon: Mock) -> None:
    import os

    daemon.ask_down.return_value = {"pid": 1, "guests": 0}
    words = await noted(tmp_path, "/v1/down", {"now": True}, daemon)
    assert words.startswith(f"down (now=True), by uid {os.getuid()} (") and f"pid {os.getpid()})" in words
    assert struct.calcsize("3i") == 12


async def test_what_is_refused_is_noted_too(tmp_path: Path, daemon: Mock) -> None:
    daemon.desk.revoke.side_effect = MeshError("only a founder may", ExitCode.REFUSED)
    words = await noted(tmp_path, "/v1/revoke", {"node": "lab\x1b[2J3", "reason": "gone"}, daemon)
    assert words.startswith("revoke (node=lab?[2J3, reason=gone), by uid ") and words.endswith(
        ": refused: only a founder may"
    )


async def test_a_jobs_description_is_not_in_it(tmp_path: Path, daemon: Mock) -> None:
    body = {"argv": ["train", "--token", "hunter2"], "env": {"KEY": "hunter2"}, "name": "night"}
    daemon.job_desk.submit.side_effect = RuntimeError("disk full: hunter2")
    words = await noted(tmp_path, "/v1/jobs", body, daemon)
    assert "name=night" in words and words.endswith(": failed: RuntimeError") and "hunter2" not in words
