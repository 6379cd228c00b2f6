"""GPU shares through the real command line, on a daemon with a fake NVIDIA driver."""

import json
import re
import shutil
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from membership.trust import TrustStore
from mesh.daemon.stack import Stack, StackNode
from mesh.gpus.receipts import open_receipt
from tests.e2e.commands import as_documented, finished, job_state, mesh, ok, read, until
from tests.fake import client
from tests.fake.build import build
from tests.fake.world import World
from tests.guards import built

pytestmark = pytest.mark.e2e
GIB = 1 << 30
SHARE = ("--gpu-share", "30", "--gpu-share-limit", "90", "--vram", "1g")
QUOTA = """
import sys
from client import CudaError, Driver
driver = Driver("libcuda.so.1")
driver.start()
print("total", driver.free_memory()[1])
driver.out("cuMemAlloc_v2", 512 << 20)
try:
    driver.out("cuMemAlloc_v2", 1 << 30)
except CudaError as error:
    print("refused", error.code)
"""
WORK = """
import time
from client import Driver
driver = Driver("libcuda.so.1")
driver.start()
kernel = driver.kernel("k_500us")
driver.out("cuMemAlloc_v2", 256 << 20)
while True:
    driver.launch(kernel)
    driver.cuCtxSynchronize()
"""

LENT = """
import time
from client import Driver
driver = Driver("libcuda.so.1")
driver.start()
kernel = driver.kernel("k_500us")
driver.out("cuMemAlloc_v2", 6 << 30)
print("total", driver.free_memory()[1], flush=True)
while True:
    driver.launch(kernel)
    driver.cuCtxSynchronize()
"""
SAVES = """
import os, signal, sys
from pathlib import Path
from client import Driver
if os.environ["MESH_RESUME"]:
    print("resumed")
    sys.exit(0)

def save(number, frame):
    new = Path(os.environ["MESH_CKPT_DIR"], ".new")
    new.write_text("1")
    new.rename(new.with_name("state"))
    sys.exit(85)

signal.signal(signal.SIGTERM, save)
driver = Driver("libcuda.so.1")
driver.start()
kernel = driver.kernel("k_500us")
driver.out("cuMemAlloc_v2", 6 << 30)
print("holds", flush=True)
while True:
    driver.launch(kernel)
    driver.cuCtxSynchronize()
"""
NEEDS = """
from client import Driver
driver = Driver("libcuda.so.1")
driver.start()
driver.out("cuMemAlloc_v2", 11 << 30)
print("it is there")
"""
PAST = """
import os, subprocess, sys
bare = {"FAKE_GPU_WORLD": os.environ["FAKE_GPU_WORLD"], "LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]}
subprocess.run([sys.executable, "work.py"], env=bare)
"""


@contextmanager
def gpu_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> Iterator[World]:
    """Provide fake GPUs for daemons of this test, a guard that is compiled already, and a project with GPU programs."""
    world = World(tmp_path / "world", build(), devices=devices)
    for name, value in {**world.environment(), "LD_LIBRARY_PATH": str(world.fakes.cuda.parent)}.items():
        monkeypatch.setenv(name, value)
    for name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    guard = built().cuda.parent
    shutil.copytree(guard, tmp_path / "XDG_CACHE_HOME" / "mesh" / "guard" / guard.name)
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(client.__file__, project)
    (project / "quota.py").write_text(QUOTA)
    (project / "work.py").write_text(WORK)
    for name, text in (("past.py", PAST), ("lent.py", LENT), ("saves.py", SAVES), ("needs.py", NEEDS)):
        (project / name).write_text(text)
    yield world
    assert list((tmp_path / "XDG_RUNTIME_DIR").iterdir()) == [], "the daemon must remove its shared pages"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with gpu_world(tmp_path, monkeypatch) as one:
        yield one


def submit(node: StackNode, world: World, program: str, *options: str) -> str:
    env = ("--env", f"FAKE_GPU_WORLD={world.path}")
    return ok(node, "submit", *env, *options, "--", sys.executable, program, cwd=world.path.parent / "project").strip()


def shares(node: StackNode) -> bool:
    return bool(read(node, "nodes")["nodes"][0]["gpu_shares"])


def new_of(node: StackNode, job: str) -> list[str]:
    """Return the kinds of the job's events."""
    return [event["new"] for event in read(node, "job", "events", job)["events"]]


def on_gpus(node: StackNode) -> list[dict[str, Any]]:
    return [job for gpu in read(node, "gpus")["gpus"] for job in gpu["jobs"]]


def test_gpu_share_is_limited_to_its_request(world: World, make_stack: Callable[..., Stack]) -> None:
    node = make_stack(1).nodes[0]
    until(lambda: shares(node), "the guard to be ready")
    job = submit(node, world, "quota.py", *SHARE)
    assert finished(node, job)["outcome"]["kind"] == "done", ok(node, "logs", job)
    assert ok(node, "logs", job).splitlines() == [f"total {GIB}", "refused 2"]
    node.client.post("/v1/down", {"now": True})
    until(lambda: not node.running, "the daemon to end")


def test_owner_lists_adjusts_and_ends_jobs_on_gpus(world: World, make_stack: Callable[..., Stack]) -> None:
    node = make_stack(1).nodes[0]
    until(lambda: shares(node), "the guard to be ready")
    job = submit(node, world, "work.py", *SHARE)
    seen = until(
        lambda: next((row for row in on_gpus(node) if row.get("gpu_s", 0) > 0.2), None), "the job to use the GPU"
    )
    assert (seen["job"], seen["share"], seen["limit"], seen["vram_mib"]) == (job, 30, 90, 1024)
    assert seen["guarded"] and seen["gate"] == "open" and seen["processes"] == 1 and seen["unguarded_calls"] == []
    assert GIB // 4 <= seen["memory"] <= GIB and seen["launches"] > 0 and 0 < seen["share_now"] <= 100
    assert "30 % to 90 % (" in ok(node, "gpus")

    changed = read(node, "gpus", "set", job, "--share", "50", "--limit", "50", "--vram", "2g")
    assert (changed["share"], changed["limit"], changed["vram_mib"]) == (50, 50, 2048)
    until(lambda: 44 < on_gpus(node)[0]["share_now"] < 57, "its share to be about 50")
    uuid = f"GPU-{world.uuids[0]}"
    left = [{"uuid": uuid, "share": 50, "vram_mib": 14 * 1024}]
    assert read(node, "nodes")["nodes"][0]["gpu_room"] == left
    has = [{"uuid": uuid, "share": 50, "vram_mib": 2048}]
    until(lambda: job_state(node, job)["gpu_portions"] == has, "the job state to show its GPU portion")
    for wrong, words in (("20g", "beside its other jobs"), ("100m", "already")):
        refused = mesh(node, "gpus", "set", job, "--vram", wrong)
        assert refused.returncode == 5 and words in refused.stderr
    assert mesh(node, "gpus", "set", job, "--share", "60", "--limit", "50").returncode == 2
    assert read(node, "nodes")["nodes"][0]["gpu_room"] == left

    assert world.used() > 0 and read(node, "gpus")["pause_problem"] == ""
    until(lambda: read(node, "nodes")["nodes"][0]["gpu_pauses"], "the mesh to know that the node can pause GPU jobs")
    assert read(node, "gpus", "pause", job)["freed"] and world.used() == 0
    assert on_gpus(node)[0]["suspended"] and "(paused)" in ok(node, "gpus")
    before = on_gpus(node)[0]["launches"]
    assert ok(node, "gpus", "resume", job) == "resumed\n" and world.used() > 0
    until(lambda: on_gpus(node)[0]["launches"] > before, "the job to continue")
    assert mesh(node, "gpus", "pause", "nobody").returncode == 4
    until(lambda: on_gpus(node)[0]["memory_by_nvml"], "NVML to report memory")
    assert as_documented(node, job) > 15

    assert read(node, "reclaim", "--now")["reclaimed"] == [job]
    for words in (
        rf"job {job[:8]}: GPU gate closed in \d+ µs: it is killed",
        rf"killed for the owner: job {job[:8]} \(process\): \d+ processes gone after",
    ):
        until(lambda: re.search(words, node.where.log.read_text()), words)  # noqa: B023
    until(lambda: on_gpus(node) == [], "the attempt to end")
    (receipt,) = until(lambda: read(node, "gpus", "--receipts")["receipts"], "the receipt")
    assert (receipt["job"], receipt["attempt"], len(receipt["devices"])) == (job, 0, 1)
    (used,) = receipt["devices"]
    assert used["gpu_ns"] == pytest.approx(world.busy_ns(), rel=0.1, abs=30_000_000) and used["peak"] >= GIB // 4
    assert used["nvml_ns"] and used["nvml_byte_s"] and job[:8] in ok(node, "gpus", "--receipts")
    sealed = b64decode(receipt["sealed"])
    assert open_receipt(sealed, TrustStore(node.where.genesis.read_bytes()).mesh_id).devices[0].uuid == uuid
    until(
        lambda: any(event["reason"].startswith("used ") for event in read(node, "job", "events", job)["events"]),
        "the job events to show it",
    )
    ok(node, "cancel", job)
    node.client.post("/v1/down", {"now": True})
    until(lambda: not node.running, "the daemon to end")


def test_lent_gpu_memory_returns_to_the_job_with_the_guarantee(world: World, make_stack: Callable[..., Stack]) -> None:
    """A job that cannot save is suspended by the driver and continues when memory is free. A job that can save leaves."""
    node = make_stack(1).nodes[0]
    until(lambda: shares(node), "the guard to be ready")
    soft = "--gpu-share", "30", "--vram", "1g", "--vram-limit", "8g"
    borrower = submit(node, world, "lent.py", *soft)
    until(lambda: f"total {8 * GIB}" in ok(node, "logs", borrower), "the job to hold the memory without a guarantee")
    seen = on_gpus(node)[0]
    assert (seen["vram_mib"], seen["vram_limit_mib"], seen["memory_now"]) == (1024, 8192, 8 * GIB)
    assert seen["memory"] >= 6 * GIB and "/1 to 8 GiB (now 8)" in ok(node, "gpus")
    state = job_state(node, borrower)
    assert (state["vram_mib"], state["vram_limit_mib"]) == (1024, 8192)
    (left,) = read(node, "nodes")["nodes"][0]["gpu_room"]
    assert (left["share"], left["vram_mib"]) == (70, 15 * 1024), "lent memory must count as free"
    needs = submit(node, world, "needs.py", "--gpu-share", "30", "--vram", "12g")
    assert finished(node, needs)["outcome"]["kind"] == "done" and ok(node, "logs", needs) == "it is there\n"
    until(
        lambda: on_gpus(node)[0]["gate"] == "open" and on_gpus(node)[0]["memory_now"] == 8 * GIB, "the job to continue"
    )
    before = on_gpus(node)[0]["launches"]
    until(lambda: on_gpus(node)[0]["launches"] > before, "the job to use the GPU")
    until(lambda: "goes on" in new_of(node, borrower), "the job events to show it")
    told = [new for new in new_of(node, borrower) if new in {"memory recalled", "gpu paused", "goes on"}]
    assert told == ["memory recalled", "gpu paused", "goes on"]
    assert job_state(node, borrower)["attempts"][0]["reason"] == "" and len(job_state(node, borrower)["attempts"]) == 1
    log = node.where.log.read_text()
    assert re.search(rf"job {needs[:8]}: its guaranteed memory was lent and is back after \d+ ms", log)
    assert re.search(
        rf"job {borrower[:8]}: GPU memory of 1 process freed: lock of \d+ \d+ ms, checkpoint of \d+ \d+ ms", log
    )

    changed = read(node, "gpus", "set", borrower, "--vram-limit", "7g")
    assert (changed["vram_mib"], changed["vram_limit_mib"]) == (1024, 7168)
    assert on_gpus(node)[0]["memory_now"] == 7 * GIB
    for wrong, words in (("6g", "already"), ("512m", "be held to 512")):
        refused = mesh(node, "gpus", "set", borrower, "--vram-limit", wrong)
        assert refused.returncode in {2, 5} and words in refused.stderr
    assert on_gpus(node)[0]["memory_now"] == 7 * GIB
    ok(node, "cancel", borrower)
    until(lambda: on_gpus(node) == [], "the job to be gone")

    saves = submit(node, world, "saves.py", *soft, "--ckpt", "ckpts", "--ckpt-mode", "rename")
    until(lambda: "holds" in ok(node, "logs", saves), "the job to hold lent memory")
    needs = submit(node, world, "needs.py", "--gpu-share", "30", "--vram", "12g")
    assert finished(node, needs)["outcome"]["kind"] == "done", ok(node, "logs", needs)
    assert finished(node, saves)["outcome"]["kind"] == "done"
    first, second = job_state(node, saves)["attempts"]
    assert first["exit_code"] == 85 and second["exit_code"] == 0 and "resumed" in ok(node, "logs", saves)
    (taken,) = [
        event["reason"] for event in read(node, "job", "events", saves)["events"] if event["new"] == "taken back"
    ]
    assert taken.endswith("memory that was lent is needed; nothing is lost")
    node.client.post("/v1/down", {"now": True})
    until(lambda: not node.running, "the daemon to end")


def test_guest_that_bypasses_the_guard_is_stopped_reported_and_resumed(
    world: World, make_stack: Callable[..., Stack]
) -> None:
    node = make_stack(1).nodes[0]
    until(lambda: shares(node), "the guard to be ready")
    job = submit(node, world, "past.py", *SHARE)
    stopped = until(lambda: next((row for row in on_gpus(node) if row.get("findings")), None), "the bypass to be found")
    assert stopped["findings"][0]["kind"] == "unguarded" and stopped["closed_by"] == ["audit"]
    assert "without the guard" in mesh(node, "gpus").stderr
    (told,) = until(
        lambda: [event for event in read(node, "job", "events", job)["events"] if event["new"] == "bypass"],
        "the job events to show it",
    )
    assert told["reason"].endswith("without the guard: it is stopped")
    foreign = read(node, "gpus")["gpus"][0]["foreign"]
    assert foreign == {"processes": 0, "memory": 0}, "the job must not count as an owner's program"

    pid = stopped["findings"][0]["pid"]
    ran = world.executed_ns(pid)
    assert ok(node, "gpus", "resume", job) == "resumed\n"
    until(lambda: world.executed_ns(pid) > ran, "the job to continue")
    node.client.post("/v1/down", {"now": True})
    until(lambda: not node.running, "the daemon to end")


def test_node_without_guard_reports_why_and_accepts_no_share(
    world: World, make_stack: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(world.path.parent / "empty"))
    monkeypatch.setenv("CC", "false")  # no libraries exist, and none can be compiled
    node = make_stack(1).nodes[0]
    problem = until(lambda: read(node, "status")["problems"].get("guard"), "the missing guard to be reported")
    assert "could not be compiled by false" in problem and problem.splitlines()[0] in ok(node, "gpus", "--json")
    assert problem.splitlines()[0] in ok(node, "status") and not shares(node)
    refused = mesh(node, "submit", "--no-workdir", *SHARE, "--", "true")
    assert refused.returncode == 6 and "cannot keep a job to a share of a GPU" in refused.stderr
    job = submit(node, world, "work.py", "--gpus", "1")
    whole = until(lambda: on_gpus(node), "the job to run")[0]
    assert whole["job"] == job and not whole["guarded"] and json.dumps(whole["share"]) == "100"


def test_node_that_lends_whole_gpus_has_no_guard(world: World, make_stack: Callable[..., Stack]) -> None:
    node = make_stack(1, gpu_sharing=False).nodes[0]
    refused = mesh(node, "submit", "--no-workdir", *SHARE, "--", "true")
    assert refused.returncode == 6 and "lends whole GPUs only" in refused.stderr
    assert read(node, "status")["problems"] == {}
