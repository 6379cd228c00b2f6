"""Shares of a GPU by the real command line, on a daemon whose NVIDIA driver is a double."""

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
from mesh.provider.receipts import open_receipt
from mesh.stack import Stack, StackNode
from tests.e2e.commands import as_documented, finished, job_state, mesh, ok, read, until
from tests.fake import client
from tests.fake.build import build
from tests.fake.world import World

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
def gpu_world(tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> Iterator[World]:
    """GPUs that daemons started here see, and a project with programs for them. `fakes`: where the doubles are built."""
    world = World(tmp_path / "world", build(fakes), devices=devices)
    for name, value in {**world.environment(), "LD_LIBRARY_PATH": str(world.fakes.cuda.parent)}.items():
        monkeypatch.setenv(name, value)
    for name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(client.__file__, project)
    (project / "quota.py").write_text(QUOTA)
    (project / "work.py").write_text(WORK)
    for name, text in (("past.py", PAST), ("lent.py", LENT), ("saves.py", SAVES), ("needs.py", NEEDS)):
        (project / name).write_text(text)
    yield world
    assert list((tmp_path / "XDG_RUNTIME_DIR").iterdir()) == [], "its pages are gone with the daemon"


@pytest.fixture
def world(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with gpu_world(tmp_path, tmp_path_factory.getbasetemp().parent / "fakes", monkeypatch) as one:
        yield one


def submit(node: StackNode, world: World, program: str, *options: str) -> str:
    env = ("--env", f"FAKE_GPU_WORLD={world.path}")
    return ok(node, "submit", *env, *options, "--", sys.executable, program, cwd=world.path.parent / "project").strip()


def shares(node: StackNode) -> bool:
    return bool(read(node, "nodes")["nodes"][0]["gpu_shares"])


def new_of(node: StackNode, job: str) -> list[str]:
    """What has happened to it, in a word each."""
    return [event["new"] for event in read(node, "events", job)["events"]]


def on_gpus(node: StackNode) -> list[dict[str, Any]]:
    return [job for gpu in read(node, "gpus")["gpus"] for job in gpu["jobs"]]


def test_a_share_is_held_to_what_it_asked_for(world: World, make_stack: Callable[..., Stack]) -> None:
    node = make_stack(1).nodes[0]
    until(lambda: shares(node), "the guard to be ready")
    job = submit(node, world, "quota.py", *SHARE)
    assert finished(node, job)["outcome"]["kind"] == "done", ok(node, "logs", job)
    assert ok(node, "logs", job).splitlines() == [f"total {GIB}", "refused 2"]
    node.client.post("/v1/down", {"now": True})
    until(lambda: not node.running, "the daemon to end")


def test_its_owner_sees_changes_and_ends_what_runs_on_his_gpus(world: World, make_stack: Callable[..., Stack]) -> None:
    node = make_stack(1).nodes[0]
    until(lambda: shares(node), "the guard to be ready")
    job = submit(node, world, "work.py", *SHARE)
    seen = until(lambda: next((row for row in on_gpus(node) if row.get("gpu_s", 0) > 0.2), None), "it to work")
    assert (seen["job"], seen["share"], seen["limit"], seen["vram_mib"]) == (job, 30, 90, 1024)
    assert seen["guarded"] and seen["gate"] == "open" and seen["processes"] == 1 and seen["unguarded_calls"] == []
    assert GIB // 4 <= seen["memory"] <= GIB and seen["launches"] > 0 and 0 < seen["share_now"] <= 100
    assert "30 % to 90 % (" in ok(node, "gpus")

    changed = read(node, "gpus", "set", job, "--share", "50", "--limit", "50", "--vram", "2g")
    assert (changed["share"], changed["limit"], changed["vram_mib"]) == (50, 50, 2048)
    until(lambda: 44 < on_gpus(node)[0]["share_now"] < 57, "its share to be 50, by and large")
    uuid = f"GPU-{world.uuids[0]}"
    left = [{"uuid": uuid, "share": 50, "vram_mib": 14 * 1024}]
    assert read(node, "nodes")["nodes"][0]["gpu_room"] == left
    has = [{"uuid": uuid, "share": 50, "vram_mib": 2048}]
    until(lambda: job_state(node, job)["gpu_portions"] == has, "others to be told")
    for wrong, words in (("20g", "beside its other jobs"), ("100m", "already")):
        refused = mesh(node, "gpus", "set", job, "--vram", wrong)
        assert refused.returncode == 5 and words in refused.stderr
    assert mesh(node, "gpus", "set", job, "--share", "60", "--limit", "50").returncode == 2
    assert read(node, "nodes")["nodes"][0]["gpu_room"] == left

    assert world.used() > 0 and read(node, "gpus")["pause_problem"] == ""
    until(lambda: read(node, "nodes")["nodes"][0]["gpu_pauses"], "the mesh to know that it can pause")
    assert read(node, "gpus", "pause", job)["freed"] and world.used() == 0
    assert on_gpus(node)[0]["suspended"] and "(paused)" in ok(node, "gpus")
    before = on_gpus(node)[0]["launches"]
    assert ok(node, "gpus", "resume", job) == "it goes on\n" and world.used() > 0
    until(lambda: on_gpus(node)[0]["launches"] > before, "it to go on")
    assert mesh(node, "gpus", "pause", "nobody").returncode == 4
    until(lambda: on_gpus(node)[0]["memory_by_nvml"], "NVML to have been asked since")
    assert as_documented(node, job) > 15

    assert read(node, "reclaim", "--now")["reclaimed"] == [job]
    for words in (
        rf"job {job[:8]}: GPU gate closed in \d+ µs: it is killed",
        rf"killed for the owner: job {job[:8]} \(process\): \d+ processes gone after",
    ):
        until(lambda: re.search(words, node.where.log.read_text()), words)  # noqa: B023
    until(lambda: on_gpus(node) == [], "the attempt to be over")
    (receipt,) = until(lambda: read(node, "gpus", "--receipts")["receipts"], "the receipt")
    assert (receipt["job"], receipt["attempt"], len(receipt["devices"])) == (job, 0, 1)
    (used,) = receipt["devices"]
    assert used["gpu_ns"] == pytest.approx(world.busy_ns(), rel=0.1, abs=30_000_000) and used["peak"] >= GIB // 4
    assert used["nvml_ns"] and used["nvml_byte_s"] and job[:8] in ok(node, "gpus", "--receipts")
    sealed = b64decode(receipt["sealed"])
    assert open_receipt(sealed, TrustStore(node.where.genesis.read_bytes()).mesh_id).devices[0].uuid == uuid
    until(
        lambda: any(event["reason"].startswith("used ") for event in read(node, "events", job)["events"]),
        "its user to be told",
    )
    ok(node, "cancel", job)
    node.client.post("/v1/down", {"now": True})
    until(lambda: not node.running, "the daemon to end")


def test_memory_is_lent_and_comes_back_for_who_is_guaranteed_it(world: World, make_stack: Callable[..., Stack]) -> None:
    """One that cannot save is put away by the driver, alive, and goes on when there is room again; who can, saves and goes."""
    node = make_stack(1).nodes[0]
    until(lambda: shares(node), "the guard to be ready")
    soft = "--gpu-share", "30", "--vram", "1g", "--vram-limit", "8g"
    borrower = submit(node, world, "lent.py", *soft)
    until(lambda: f"total {8 * GIB}" in ok(node, "logs", borrower), "it to have what nobody is guaranteed")
    seen = on_gpus(node)[0]
    assert (seen["vram_mib"], seen["vram_limit_mib"], seen["memory_now"]) == (1024, 8192, 8 * GIB)
    assert seen["memory"] >= 6 * GIB and "/1 to 8 GiB (now 8)" in ok(node, "gpus")
    state = job_state(node, borrower)
    assert (state["vram_mib"], state["vram_limit_mib"]) == (1024, 8192)
    (left,) = read(node, "nodes")["nodes"][0]["gpu_room"]
    assert (left["share"], left["vram_mib"]) == (70, 15 * 1024), "what is lent is free for who comes"
    needs = submit(node, world, "needs.py", "--gpu-share", "30", "--vram", "12g")
    assert finished(node, needs)["outcome"]["kind"] == "done" and ok(node, "logs", needs) == "it is there\n"
    until(lambda: on_gpus(node)[0]["gate"] == "open" and on_gpus(node)[0]["memory_now"] == 8 * GIB, "it to go on")
    before = on_gpus(node)[0]["launches"]
    until(lambda: on_gpus(node)[0]["launches"] > before, "it to work")
    until(lambda: "goes on" in new_of(node, borrower), "its user to be told")
    told = [new for new in new_of(node, borrower) if new in {"memory recalled", "gpu paused", "goes on"}]
    assert told == ["memory recalled", "gpu paused", "goes on"]
    assert job_state(node, borrower)["attempts"][0]["reason"] == "" and len(job_state(node, borrower)["attempts"]) == 1
    log = node.where.log.read_text()
    assert re.search(rf"job {needs[:8]}: the memory it is guaranteed was lent, and is there after \d+ ms", log)
    assert re.search(
        rf"job {borrower[:8]}: GPU memory of 1 processes freed: lock of \d+ \d+ ms, checkpoint of \d+ \d+ ms", log
    )

    changed = read(node, "gpus", "set", borrower, "--vram-limit", "7g")
    assert (changed["vram_mib"], changed["vram_limit_mib"]) == (1024, 7168)
    assert on_gpus(node)[0]["memory_now"] == 7 * GIB
    for wrong, words in (("6g", "already"), ("512m", "be held to 512")):
        refused = mesh(node, "gpus", "set", borrower, "--vram-limit", wrong)
        assert refused.returncode in {2, 5} and words in refused.stderr
    assert on_gpus(node)[0]["memory_now"] == 7 * GIB
    ok(node, "cancel", borrower)
    until(lambda: on_gpus(node) == [], "it to be gone")

    saves = submit(node, world, "saves.py", *soft, "--ckpt", "ckpts", "--ckpt-mode", "rename")
    until(lambda: "holds" in ok(node, "logs", saves), "it to have what was lent")
    needs = submit(node, world, "needs.py", "--gpu-share", "30", "--vram", "12g")
    assert finished(node, needs)["outcome"]["kind"] == "done", ok(node, "logs", needs)
    assert finished(node, saves)["outcome"]["kind"] == "done"
    first, second = job_state(node, saves)["attempts"]
    assert first["exit_code"] == 85 and second["exit_code"] == 0 and "resumed" in ok(node, "logs", saves)
    (taken,) = [event["reason"] for event in read(node, "events", saves)["events"] if event["new"] == "taken back"]
    assert taken.endswith("memory that was lent is needed; nothing is lost")
    node.client.post("/v1/down", {"now": True})
    until(lambda: not node.running, "the daemon to end")


def test_one_past_the_guard_is_stopped_told_of_and_let_go_on(world: World, make_stack: Callable[..., Stack]) -> None:
    node = make_stack(1).nodes[0]
    until(lambda: shares(node), "the guard to be ready")
    job = submit(node, world, "past.py", *SHARE)
    stopped = until(lambda: next((row for row in on_gpus(node) if row.get("findings")), None), "it to be found")
    assert stopped["findings"][0]["kind"] == "unguarded" and stopped["closed_by"] == ["audit"]
    assert "without the guard" in mesh(node, "gpus").stderr
    (told,) = until(
        lambda: [event for event in read(node, "events", job)["events"] if event["new"] == "bypass"],
        "its user to be told",
    )
    assert told["reason"].endswith("without the guard: it is stopped")
    foreign = read(node, "gpus")["gpus"][0]["foreign"]
    assert foreign == {"processes": 0, "memory": 0}, "it is the job's, and no program of the owner's"

    pid = stopped["findings"][0]["pid"]
    ran = world.executed_ns(pid)
    assert ok(node, "gpus", "resume", job) == "it goes on\n"
    until(lambda: world.executed_ns(pid) > ran, "it to go on")
    node.client.post("/v1/down", {"now": True})
    until(lambda: not node.running, "the daemon to end")


def test_who_cannot_guard_says_why_and_takes_no_share(
    world: World, make_stack: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")  # there are no libraries yet, and none can be made
    node = make_stack(1).nodes[0]
    problem = until(lambda: read(node, "status")["problems"].get("guard"), "the trouble to be told")
    assert "could not be compiled by false" in problem and problem.splitlines()[0] in ok(node, "gpus", "--json")
    assert problem in ok(node, "status") and not shares(node)
    refused = mesh(node, "submit", "--no-workdir", *SHARE, "--", "true")
    assert refused.returncode == 6 and "cannot keep a job to a share of a GPU" in refused.stderr
    job = submit(node, world, "work.py", "--gpus", "1")
    whole = until(lambda: on_gpus(node), "it to run")[0]
    assert whole["job"] == job and not whole["guarded"] and json.dumps(whole["share"]) == "100"


def test_whose_owner_lends_whole_gpus_has_no_guard(world: World, make_stack: Callable[..., Stack]) -> None:
    node = make_stack(1, gpu_sharing=False).nodes[0]
    refused = mesh(node, "submit", "--no-workdir", *SHARE, "--", "true")
    assert refused.returncode == 6 and "lends whole GPUs only" in refused.stderr
    assert read(node, "status")["problems"] == {}
