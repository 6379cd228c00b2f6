"""Owner presence, by real files, terminals, processes and a fake NVML: guests freeze, resume, or leave."""

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.container_images import busybox_image
from tests.e2e.commands import (
    finished,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    submit_count,
    until,
)
from tests.e2e.test_shares import gpu_world, on_gpus, shares, submit
from tests.fake.world import World

pytestmark = pytest.mark.e2e
MakeStack = Callable[..., Stack]

WORK = """
from client import CudaError, Driver
driver = Driver("libcuda.so.1")
for device in range(2):  # the double does not number them by CUDA_VISIBLE_DEVICES; the guard permits one
    try:
        driver.start(device)
        break
    except CudaError:
        continue
kernel = driver.kernel("k_500us")
driver.out("cuMemAlloc_v2", 256 << 20)
while True:
    driver.launch(kernel)
    driver.cuCtxSynchronize()
"""
OWNERS = """
import sys, time
from client import Driver
driver = Driver("libcuda.so.1")
driver.start(int(sys.argv[1]))
driver.out("cuMemAlloc_v2", int(sys.argv[2]) << 20)
print(time.time(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Two GPUs."""
    with gpu_world(tmp_path, monkeypatch, devices=2) as two:
        (tmp_path / "project" / "any.py").write_text(WORK)
        yield two


def policy(node: StackNode, text: str) -> None:
    """Replace the policy file as an editor does."""
    temporary = node.where.policy.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(node.where.policy)


def lending(node: StackNode) -> dict[str, Any]:
    """Query the daemon directly, since conditions are polled often."""
    found: dict[str, Any] = node.client.get("/v1/lend", timeout_s=60)
    return found


def job_state(node: StackNode, job: str) -> dict[str, Any]:
    found: dict[str, Any] = node.client.get(f"/v1/jobs/{job}", timeout_s=60)["job"]
    return found


def level(node: StackNode) -> str:
    return str(lending(node)["machine"]["level"])


def events(node: StackNode, job: str) -> list[str]:
    return [f"{event['new']}: {event['reason']}" for event in read(node, "job", "events", job)["events"]]


def taken_back(node: StackNode, job: str) -> str:
    return next((event for event in events(node, job) if event.startswith("taken back")), "")


def makes_no_progress(node: StackNode, job: str) -> bool:
    """Return True if the job makes no progress. Its last report may be 1 s old when it is stopped."""
    time.sleep(1.2)
    steps = job_state(node, job)["step"]
    time.sleep(0.6)
    return bool(job_state(node, job)["step"] == steps)


@pytest.fixture
def terminal() -> Iterator[Callable[[], None]]:
    """Return a function that types a line on a terminal of this machine and reads it."""
    master, slave = pty.openpty()
    os.utime(os.ttyname(slave), (1.0, 1.0))  # a new terminal would count as recent activity

    def typed() -> None:
        os.utime(os.ttyname(slave), (1.0, 1.0))  # the kernel updates terminal times in steps of 8 s
        os.write(master, b"line\n")
        os.read(slave, 64)

    yield typed
    os.close(master)
    os.close(slave)


def test_short_owner_visit_only_freezes_guests(make_stack: MakeStack, terminal: Callable[[], None]) -> None:
    stack = make_stack(2)
    user = stack.nodes[0]
    job = submit_count(user, 100_000)
    host = stack.node(running_with_checkpoint(user, job)["node"])
    other = next(node for node in stack.nodes if node is not host)
    ok(other, "pause")
    policy(host, "[keyboard]\n")
    until(lambda: lending(host)["typed_s"] is not None, "terminals to be watched")
    terminal()
    until(lambda: level(host) == "suspend", "the typing to be seen")
    until(
        lambda: "its keyboard or mouse is in use" in job_state(user, job)["detail"], "the job state to name the reason"
    )
    shown = {row["nick"]: row for row in read(user, "nodes")["nodes"]}
    assert not shown[host.nick]["lending"]
    until(lambda: "owner present" in ok(user, "nodes"), "other nodes to know the owner is present")
    until(lambda: makes_no_progress(user, job), "the job to report no further step")
    stood = job_state(user, job)["step"]
    policy(host, "")  # the default policy accepts guests while the owner types
    until(lambda: job_state(user, job)["step"] > stood + 5, "the job to continue")
    state = job_state(user, job)
    assert state["node"] == host.nick and len(state["attempts"]) == 1, "the job must not be vacated"
    for words in ("suspended: its keyboard or mouse is in use", "goes on: it was stopped for"):
        until(lambda words=words: any(event.startswith(words) for event in events(user, job)), words)  # type: ignore[misc]
    assert re.search(rf"job {job[:8]}: stage suspended: stopped after \d+ ms", host.where.log.read_text())
    ok(user, "cancel", job)


@pytest.mark.docker
def test_container_is_frozen_and_resumes_when_lending_hours_begin(make_stack: MakeStack) -> None:
    image = busybox_image()
    (node,) = make_stack(1, engines=["docker"]).nodes
    policy(node, "[calendar]\nsuspend = '10m'\n")
    job = ok(node, "submit", "--no-workdir", "--image", image, "--", "sh", "-c", "while true; do date; sleep 0.1; done")
    job = job.strip()
    until(lambda: len(ok(node, "logs", job).splitlines()) > 5, "the job to run")
    ok(node, "lend", "--hours", "never")
    until(lambda: log_at(node, "stage suspended: stopped"), "the guest to be stopped")

    def silent() -> bool:
        """Return True if no output arrives for a second. Earlier output may still be on its way."""
        before = ok(node, "logs", job)
        time.sleep(1.0)
        return ok(node, "logs", job) == before

    until(silent, "the output to stop")
    stood = ok(node, "logs", job)
    ok(node, "lend", "--hours", "always")
    until(lambda: ok(node, "logs", job) != stood, "the job to continue")
    assert len(job_state(node, job)["attempts"]) == 1
    ok(node, "lend", "--hours", "never")
    until(lambda: len(log_at(node, "stage suspended: stopped")) == 2, "the guest to be stopped")
    assert read(node, "reclaim", "--now")["reclaimed"] == [job], "reclaim must include frozen guests"
    ok(node, "cancel", job)


def test_lending_hours_and_a_temporarily_broken_policy_file(make_stack: MakeStack) -> None:
    stack = make_stack(2)
    user, host = stack.nodes
    policy(host, "[gpu]\nidle = '5x'\n")
    problem = until(lambda: read(host, "status")["problems"].get("policy"), "the broken policy to be reported")
    assert "gpu.idle: '5x' is not a duration" in problem and "the previous policy stays in force" in problem
    assert lending(host)["now"] and "FAIL  policy" in mesh(host, "doctor").stdout
    refused = mesh(host, "lend", "--hours", "Mon-Fri 20-08")
    assert refused.returncode == 2 and "gpu.idle" in refused.stderr

    policy(host, "# mine\n[gpu]\nidle = '5s'\n")
    until(lambda: "policy" not in read(host, "status")["problems"], "the repaired policy to be accepted")
    assert mesh(host, "lend", "--hours", "Someday").returncode == 2
    ok(user, "pause")
    job = submit_count(user, 100_000)
    assert running_with_checkpoint(user, job)["node"] == host.nick
    never = mesh(host, "lend", "--hours", "never")
    assert never.returncode == 0 and "never lends: hours is never" in never.stderr
    assert "never lends" in ok(host, "status") and "warn  lending: never lends" in mesh(host, "doctor").stdout
    until(lambda: job_state(user, job)["state"] == "pending", "the job to be vacated")
    words = "its hours of lending are over"
    assert job_state(user, job)["attempts"][0]["reason"] == f"vacated: its owner took the machine back: {words}"
    taken = until(lambda: taken_back(user, job), "the reclaim to be reported")
    assert re.search(rf"the owner of {host.nick}: {words}; nothing is lost", taken) and words in ok(user, "logs", job)
    stages = rf"job {job[:8]}: .* from the order: notice \d+ ms, exited \d+ ms, gone \d+ ms"
    until(lambda: re.search(stages, host.where.log.read_text()), "the reclaim stages to be logged")
    assert "other hours" in ok(user, "why", job)
    assert host.where.policy.read_text() == "hours = \"never\"\n# mine\n[gpu]\nidle = '5s'\n"
    ok(host, "lend", "--hours", "always")
    assert host.where.policy.read_text() == "# mine\n[gpu]\nidle = '5s'\n"
    running_with_checkpoint(user, job)
    assert job_state(user, job)["attempts"][0]["last_step"] == job_state(user, job)["attempts"][1]["resumed_step"]
    ok(host, "pause")
    assert lending(host)["paused"] and job_state(user, job)["node"] == host.nick
    assert read(host, "lend")["now"]
    ok(user, "cancel", job)


def test_reclaim_dry_run_reports_the_cost_and_changes_nothing(make_stack: MakeStack) -> None:
    stack = make_stack(2)
    user = stack.nodes[0]
    job = submit_count(user, 100_000, "--name", "count")
    host = stack.node(running_with_checkpoint(user, job)["node"])
    (row,) = read(host, "reclaim", "--dry-run")["guests"]
    assert (row["job"], row["name"], row["gpus"]) == (job, "count", []) and row["ran_s"] > 0 and row["notice_s"] == 10.0
    assert row["checkpoint"]["seq"] >= 1 and 0 <= row["at_risk_s"] < 60 and row["save_s"] > 0 and row["ship_bytes"] > 0
    assert row["goes_to"] == row["sent_to"] != host.nick and row["turn"] == 0
    assert row["plan"].startswith(f"continues on {row['goes_to']}; ")
    paths = {node["nick"]: node["path"] for node in read(host, "nodes")["nodes"]}
    assert paths[host.nick] is None and paths[row["goes_to"]]["source"] in {"measured", "zone", "mesh", "guessed"}
    assert (
        "count" in ok(host, "reclaim", "--dry-run")
        and read(host, "reclaim", "--dry-run", "--now")["guests"][0]["notice_s"] == 0
    )
    assert not read(host, "status")["paused"] and job_state(user, job)["node"] == host.nick
    assert mesh(host, "reclaim", "--gpu", "0").returncode == 4
    assert mesh(host, "reclaim", "--now", "--grace", "1m").returncode == 2
    answer = read(host, "reclaim", "--grace", "1m30s")
    (gone,) = answer["guests"]
    assert (
        answer["reclaimed"] == [job]
        and gone["lost_steps"] == 0
        and {"notice", "exited", "gone"} <= gone["stages_ms"].keys()
    )
    assert f"destination: continues on {row['goes_to']}" in ok(user, "job", "events", job)
    ok(user, "cancel", job)


SLOW = """
import json, os, signal, sys, time
from pathlib import Path
from typing import Any
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(time.monotonic()))
control, ckpt = Path(os.environ["MESH_CTL_DIR"]), Path(os.environ["MESH_CKPT_DIR"])
resume, step, ran = os.environ["MESH_RESUME"], 0, 0
if resume:
    print("resumed", Path(resume).read_text(), flush=True)
    sys.exit(0)
while ran < int(sys.argv[1]):  # it needs so many looks at its clock to save, and does not get them while it stands still
    step, ran = step + 1, ran + bool(asked)
    (control / "progress.tmp").write_text(json.dumps({"step": step}))
    (control / "progress.tmp").rename(control / "progress.json")
    time.sleep(0.05)
(ckpt / ".new").write_text(str(step))
(ckpt / ".new").rename(ckpt / "state")
print("saved", step, flush=True)
sys.exit(85)
"""


LOOKS = "80"  # 4 s of work, so that a notice of 1 s ends first even if the daemon is late


def test_slow_guest_is_paused_after_notice_and_finishes_if_owner_leaves(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack(1)
    (node,) = stack.nodes
    (tmp_path / "slow.py").write_text(SLOW)
    policy(node, "[reclaim]\nnotice = 1\npause = '50s'\n")
    until(lambda: lending(node)["policy"]["notice"] == 1.0, "the policy to be read")
    order = ("submit", "--ckpt", "ckpts", "--ckpt-mode", "rename", "--", sys.executable, "slow.py", LOOKS)
    job = ok(node, *order, cwd=tmp_path).strip()
    until(lambda: (job_state(node, job).get("step") or 0) > 3, "the job to make progress")
    assert ok(node, "lend", "--hours", "never").startswith("not lent now")
    until(lambda: log_at(node, "stage paused: stopped"), "the notice to expire")
    until(lambda: makes_no_progress(node, job), "the job to report no further step")
    ok(node, "lend", "--hours", "always")
    end = finished(node, job)
    assert end["state"] == "done", end["outcome"]
    first, second = end["attempts"]
    assert first["exit_code"] == 85 and first["last_step"] == second["resumed_step"], "the job must be allowed to save"
    assert "resumed" in ok(node, "logs", job)

    policy(node, "[reclaim]\nnotice = 1\npause = 1\n")
    until(lambda: lending(node)["policy"]["pause"] == 1.0, "the policy to be read")
    job = ok(node, *order, cwd=tmp_path).strip()
    until(lambda: (job_state(node, job).get("step") or 0) > 3, "the job to make progress")
    (gone,) = read(node, "reclaim")["guests"]
    stages = gone["stages_ms"]
    assert stages["paused"] - stages["notice"] > 900 and stages["paused"] < stages["killed"] <= stages["exited"]
    assert gone["lost_steps"] >= 3 and stages["killed"] - stages["notice"] > 1800
    taken = until(lambda: taken_back(node, job), "the reclaim to be reported")
    assert re.search(r"by hand; lost: \d+ steps since its last checkpoint", taken)
    assert f"mesh: {time.strftime('%Y')}" in ok(node, "logs", job)
    ok(node, "cancel", job)

    ok(node, "lend")
    job = ok(
        node, *order[:-4], "--max-time", "1s", "--grace", "5m", "--", sys.executable, "slow.py", "100000", cwd=tmp_path
    )
    job = job.strip()
    until(lambda: job_state(node, job).get("state") == "vacating", "the job to be in its own notice of five minutes")
    (gone,) = read(node, "reclaim", "--grace", "1s")["guests"]
    assert gone["stages_ms"]["killed"] < 150_000, "the owner's limit must override the job's notice"


class Owners:
    """An owner's program that uses a GPU until it is ended."""

    def __init__(self, world: World, device: int, size_mib: int = 64) -> None:
        project = world.path.parent / "project"
        (project / "owners.py").write_text(OWNERS)
        self._process = subprocess.Popen(
            [sys.executable, "owners.py", str(device), str(size_mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=project,
        )
        assert self._process.stdout is not None
        self.began_unix = float(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate("")


def log_at(node: StackNode, words: str) -> list[float]:
    """Return the times at which lines with these words were logged, in Unix seconds."""
    found = []
    for line in node.where.log.read_text().splitlines():
        if words in line:
            stamp, millis = line[:23].split(",")
            found.append(time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S")) + int(millis) / 1000)
    return found


def on_gpus_of(node: StackNode, job: str) -> str:
    return next(str(gpu["uuid"]) for gpu in read(node, "gpus")["gpus"] if any(one["job"] == job for one in gpu["jobs"]))


WHOLE_GPU = ("--gpus", "1")


@pytest.mark.cc
def test_owner_program_on_a_gpu_stops_the_guests_of_that_gpu(world: World, make_stack: MakeStack) -> None:
    node = make_stack(1, slots=1).nodes[0]
    until(lambda: shares(node), "the guard to be ready")
    policy(node, "[gpu]\nsuspend = '10m'\nresume = 0\nidle = 2\n")
    job = submit(node, world, "any.py", *WHOLE_GPU)
    until(lambda: (rows := on_gpus(node)) and rows[0].get("launches", 0) > 10, "the job to make progress")
    uuid = on_gpus_of(node, job)
    device = [f"GPU-{one}" for one in world.uuids].index(uuid)
    took: list[float] = []
    for _ in range(2):
        launches = on_gpus(node)[0]["launches"]
        owners = Owners(world, device)
        shut = until(lambda: log_at(node, "GPU gate closed")[len(took) :], "the GPU gate to close")
        took.append(shut[0] - owners.began_unix)
        until(lambda: len(log_at(node, "stage suspended")) == len(took), "the guest to be stopped")
        seen = on_gpus(node)[0]
        assert seen["gate"] == "closed" and "presence" in seen["closed_by"] and seen["suspended"]
        assert lending(node)["gpus"][device]["programs"][0]["name"].startswith("python")
        (left,) = read(node, "nodes")["nodes"][0]["gpu_room"]
        assert left["uuid"] != uuid and "runs on its GPU" in ok(node, "status"), "only the other GPU may be lent"
        stood = on_gpus(node)[0]["launches"]
        assert stood >= launches and world.used(device) < 400 << 20, "the guest's memory must leave the GPU"
        time.sleep(1.0)
        assert on_gpus(node)[0]["launches"] == stood
        owners.end()
        until(lambda: on_gpus(node)[0]["launches"] > stood, "the job to continue")  # noqa: B023
    policy(node, "[gpu]\nsuspend = 3\n[reclaim]\nnotice = 2\n")
    until(lambda: lending(node)["policy"]["notice"] == 2.0, "the policy to be read")
    owners = Owners(world, device)
    until(lambda: on_gpus(node)[0]["suspended"], "the guest's memory to leave the GPU")
    greedy = Owners(world, device, 15_400)  # too little memory is left for the guest to return
    gone = until(
        lambda: (rows := job_state(node, job)["attempts"]) and rows[0]["reason"] and rows[0], "the job to be vacated"
    )
    assert gone["reason"].endswith("could not be brought back for it to save")
    for each in (owners, greedy):
        each.end()
    # 1.5 s on an idle machine; docs/explanation/provider.md has the measurements.
    assert min(took) < 10.0, took
    ok(node, "cancel", job)
    node.client.post("/v1/down", {"now": True})
    until(lambda: not node.running, "the daemon to end")


@pytest.mark.cc
def test_unguarded_guest_is_not_an_owner_program_and_stops_for_one(world: World, make_stack: MakeStack) -> None:
    node = make_stack(1, gpu_sharing=False).nodes[0]
    policy(node, "[gpu]\nsuspend = '10m'\nresume = 0\nidle = 0\n")
    job = submit(node, world, "any.py", *WHOLE_GPU)
    (row,) = until(lambda: on_gpus(node), "the job to run")
    assert not row["guarded"]
    until(lambda: world.used() > 256 << 20, "the guest to hold GPU memory")
    time.sleep(2.0)
    assert not log_at(node, "suspend") and [gpu["programs"] for gpu in lending(node)["gpus"]] == [[], []]
    device = [f"GPU-{one}" for one in world.uuids].index(on_gpus_of(node, job))
    owners = Owners(world, 1 - device)
    time.sleep(1.5)
    assert world.used() > 256 << 20 and not log_at(node, "stage suspended"), (
        "an owner on the other GPU must not affect the guest"
    )
    owners.end()
    owners = Owners(world, device)
    until(lambda: log_at(node, "stage suspended: stopped"), "the guest to be stopped")
    stood = world.busy_ns(0)  # without a guard, it uses GPU 0 whatever its assignment
    time.sleep(1.0)
    assert world.busy_ns(0) == stood
    owners.end()
    until(lambda: world.busy_ns(0) > stood, "the job to continue")
    ok(node, "cancel", job)


@pytest.mark.cc
def test_reclaim_of_one_gpu_keeps_the_guest_of_the_other(world: World, make_stack: MakeStack) -> None:
    node = make_stack(1).nodes[0]
    until(lambda: shares(node), "the guard to be ready")
    jobs = [submit(node, world, "any.py", *WHOLE_GPU) for _ in range(2)]
    until(lambda: len([row for row in on_gpus(node) if row.get("launches")]) == 2, "both jobs to use their GPUs")
    gpus = read(node, "gpus")["gpus"]
    first, other = (gpu["jobs"][0]["job"] for gpu in gpus)
    assert {first, other} == set(jobs)
    (row,) = until(
        lambda: [guest for guest in read(node, "reclaim", "--gpu", "0", "--dry-run")["guests"] if guest["loses"]],
        "the guest to have work to lose",
    )
    assert row["job"] == first and row["gpus"] == [gpus[0]["uuid"]]
    answer = read(node, "reclaim", "--gpu", "0", "--now")
    assert answer["reclaimed"] == [first] and answer["gpu"] == gpus[0]["uuid"]
    until(lambda: [one["job"] for one in on_gpus(node)] == [other], "the attempt to end")
    assert not read(node, "status")["paused"]
    until(lambda: job_state(node, first)["state"] == "pending", "the job to wait")
    assert "GPU 0: taken back" in ok(node, "status")
    assert lending(node)["gpus"][0]["withheld"] and not lending(node)["gpus"][1]["withheld"]
    ok(node, "lend", "--gpu", "0")
    until(lambda: {one["job"] for one in on_gpus(node)} == set(jobs), "the job to run again")
    ok(node, "reclaim", "--gpu", gpus[1]["uuid"].removeprefix("GPU-")[:8], "--now")
    node.client.post("/v1/down", {"now": True})
    until(lambda: not node.running, "the daemon to end")
    assert b"withheld" in node.where.lending.read_bytes()
