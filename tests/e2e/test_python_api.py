"""The Python API with real daemons, and the examples of docs/how-to/python-api.md and executors.md."""

import asyncio
import concurrent.futures
import doctest
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import joblib
import pytest

import mesh
from mesh.daemon.stack import Stack
from mesh.sdk.futures import RemoteTraceback
from mesh.sdk.integrations.joblib import Backend
from mesh.sdk.payload import Terms
from mesh.util.errors import MeshError
from tests.api.test_async_client import asking, nobody_asks
from tests.e2e.commands import running_with_checkpoint, until
from tests.e2e.test_shares import gpu_world, shares

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


class Odd(Exception):
    """An exception with an attribute besides its message."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{number} is odd")
        self.number = number


def half(number: int) -> Any:
    print("halving", number, os.environ.get("CALLED", ""), flush=True)
    if number % 2:
        raise Odd(number)
    return {"half": number // 2}, os.environ["MESH_NODE"]


class Count:
    """A counter that records the nodes on which it ran."""

    def __init__(self, last: int) -> None:
        self.last, self.number, self.total, self.nodes = last, 0, 0, []

    def __call__(self, pace_s: float) -> "Count":
        self.nodes.append(os.environ["MESH_NODE"])
        while self.number < self.last:
            self.number += 1
            self.total += self.number
            time.sleep(pace_s)
            mesh.checkpoint(self.number, self.last)
        return self

    def checkpoint(self, pace_s: float) -> mesh.Call:
        return mesh.Call(self, 0)  # the call that resumes it


def tick() -> None:
    for number in range(6000):
        print("tick", number, flush=True)
        time.sleep(0.1)


def test_function_results_and_exceptions_return_to_the_caller(shared: Stack) -> None:
    client = mesh.Client(shared.nodes[0].where.root)
    good = client.submit(half, 4, name="halves")
    gone = client.submit(os._exit, 3)
    plain = client.submit(half, 2, results="json", after=[good], env={"CALLED": "plain"})
    value, node = good.result(60)
    assert value == {"half": 2} and node in {node.nick for node in shared.nodes}
    assert good.wait() == "done" and good.done() and "halving 4" in "".join(good.logs())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}Z halving 4 \n", "".join(good.logs(timestamps=True)))
    assert "".join(good.logs(since=datetime.now())) == ""
    assert {"submitted", "attempt", "end"} <= {event["kind"] for event in good.events()}
    assert client.job("halves").result(30) == (value, node)
    with pytest.raises(mesh.JobFailed, match="exit 3"):
        gone.result(60)
    with pytest.raises(mesh.JobFailed, match="JSON"):  # JSON would turn the tuple into a list
        plain.result(60)
    assert plain.state == "failed" and "halving 2 plain" in "".join(plain.logs())
    assert good.info()["attempts"][-1]["ended_unix_ms"] <= plain.info()["attempts"][0]["running_unix_ms"]
    with pytest.raises(TypeError, match=r"functools\.partial"):
        client.submit(half, number=3)  # type: ignore[call-arg]
    with pytest.raises(MeshError, match="no job"):
        client.job("nosuchjob")
    with pytest.raises(TypeError, match="not callable"):
        client.submit(7)  # type: ignore[arg-type]


async def test_coroutines_follow_and_cancel_jobs(shared: Stack) -> None:
    """Cancelling a wait leaves the job alone; cancelling a submission leaves no job. More: tests/api/test_async_client.py."""
    client = mesh.sdk.aio.Client(shared.nodes[0].where.root)
    ticking = await client.submit(tick)
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def listen() -> None:
        async for piece in ticking.logs(follow=True):
            heard.put_nowait(piece)

    listener, text = asyncio.create_task(listen()), ""
    while "tick 1\n" not in text:
        text += await heard.get()
    listener.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listener
    assert nobody_asks()
    while not await ticking.running():
        await asyncio.sleep(0.1)
    assert nobody_asks()
    unwanted = asyncio.create_task(client.submit(time.sleep, 600, name="unwanted"))
    while not asking():
        await asyncio.sleep(0)
    unwanted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unwanted
    assert await (await client.job("unwanted")).wait(60) == "cancelled"
    assert len(await client.nodes()) == 4 and ticking.id in {row["job"] for row in await client.jobs()}
    assert "submitted" in {event["kind"] for event in await ticking.events()}
    assert await ticking.cancel() and ticking.cancelled() and await ticking.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        await ticking
    assert await ticking.wait(60) == ticking.future.wait(60) == "cancelled", (
        "the job must be cancelled, not only the future"
    )


def interrupted() -> Iterator[Any]:
    """Yield calls and raise KeyboardInterrupt after two of them are jobs."""
    yield from [joblib.delayed(time.sleep)(600)] * 2
    raise KeyboardInterrupt


def test_joblib_reraises_job_errors_and_cancels_jobs_on_interrupt(shared: Stack) -> None:
    """The example page covers a successful call."""
    client = mesh.Client(shared.nodes[1].where.root)
    backend = Backend(client=client, name="batch")
    assert 2 <= backend.effective_n_jobs(-1) <= 16 and Backend(client=client, gpus=1).effective_n_jobs(-1) == 2
    with joblib.parallel_config(backend=backend):
        with pytest.raises(Odd, match="3 is odd") as found:
            joblib.Parallel(n_jobs=2)([joblib.delayed(half)(3)])
        assert found.value.number == 3 and isinstance(found.value.__cause__, RemoteTraceback)
        assert "in half" in str(found.value.__cause__)
        with pytest.raises(KeyboardInterrupt):
            joblib.Parallel(n_jobs=2)(interrupted())

    def outcomes() -> list[str]:
        rows = [row for row in client.jobs() if row["name"] == "batch"]
        return sorted(row["outcome"]["kind"] for row in rows) if all(row["outcome"] for row in rows) else []

    assert until(outcomes, "all jobs to end") == ["cancelled", "cancelled", "failed"]


def test_callable_object_resumes_on_another_node_from_its_checkpoint(shared: Stack) -> None:
    client = mesh.Client(shared.nodes[1].where.root)
    job = client.submit(Count(600), 0.1, grace="10s", checkpoint_every=1)
    before = running_with_checkpoint(shared.nodes[1], job.id)
    job.migrate()
    counted = job.result(60)
    assert counted.total == sum(range(601)) and counted.number == 600
    assert len(counted.nodes) == 2 and counted.nodes[0] == before["node"] != counted.nodes[1]
    last = job.info()["attempts"][-1]
    assert last["resumed_step"] and job.events()


def hold(mebibytes: int) -> int:
    """Allocate GPU memory through the driver."""
    from client import Driver  # type: ignore[import-not-found]

    driver = Driver("libcuda.so.1")
    driver.start()
    driver.out("cuMemAlloc_v2", mebibytes << 20)
    return mebibytes


@pytest.mark.long
@pytest.mark.cc
def test_auto_requests_the_gpu_memory_that_earlier_runs_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_stack: Callable[..., Stack],
) -> None:
    """The GPU is fake; the guard and its receipt are real."""
    with gpu_world(tmp_path, monkeypatch) as world:
        node = make_stack(1).nodes[0]
        until(lambda: shares(node), "the guard to be ready")
        client = mesh.Client(node.where.root)
        auto: Terms = {"gpus": "auto", "workdir": tmp_path / "project", "env": {"FAKE_GPU_WORLD": str(world.path)}}
        assert client.needs(hold, **auto) == (0, None, None)
        first = client.submit(hold, 700, **auto)
        assert first.result(60) == 700 and (first.info()["gpus"], first.info()["vram_mib"]) == (1, 0)
        needs = client.needs(hold)
        assert needs.runs == 1 and needs.vram_mib is not None and 700 <= needs.vram_mib < 1200 and needs.ran_s
        second = client.submit(hold, 10, **auto)
        assert second.result(60) == 10 and second.info()["vram_mib"] == round(needs.vram_mib * 1.2)
        assert client.needs(hold)[:2] == (2, needs.vram_mib) and client.needs(half).runs == 0
        node.client.post("/v1/down", {"now": True})
        until(lambda: not node.running, "the daemon to end")


def test_client_is_a_concurrent_futures_executor(shared: Stack) -> None:
    """Check the limits of the executor; the example page runs jobs with it."""
    with mesh.Executor(mesh.Client(shared.nodes[2].where.root)) as executor:
        assert executor._max_workers == 16
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(pow, 2, 2)


@pytest.mark.parametrize(("page", "least"), [("python-api.md", 10), ("executors.md", 4)])
def test_examples_of_the_python_api_pages_run(
    page: str, least: int, shared: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MESH_STATE", str(shared.nodes[3].where.root))
    monkeypatch.chdir(tmp_path)
    done = doctest.testfile(
        str(ROOT / "docs" / "how-to" / page),
        module_relative=False,
        optionflags=doctest.ELLIPSIS,
        encoding="utf-8",
    )
    assert done.attempted > least and not done.failed


def test_importing_the_client_is_light() -> None:
    listed = (
        "import mesh, sys; print(sorted(name for name in sys.modules if name.startswith('mesh') or name == 'asyncio'))"
    )
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['mesh']"
    assert {"submit", "Client", "Job", "checkpoint", "aio"} <= set(dir(mesh))
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        _ = mesh.sumbit
