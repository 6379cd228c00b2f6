"""Jobs on real daemons during partitions, packet loss and full disks: each job keeps a single history."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.config import GOSSIP_PORT
from tests.cleanup import cleanup
from tests.e2e.commands import ENDLESS, count_digest, descendants, state_of, until
from tests.netns.lan import Host, Lan, all_see, office, run

pytestmark = pytest.mark.netns
LENDS = {"profile": "local", "lend": True, "slots": 2, "process_home": "shared"}  # jobs look for the file `end_of`


def submit(host: Host, *options: str, pace_s: float = 0.05) -> str:
    """Submit a counting job that ends when the file `end_of` exists."""
    order = ("submit", "--ckpt", "ckpts", "--ckpt-mode", "rename", "--env", f"UNTIL={end_of(host.lan)}", *options)
    return host.ok(*order, "--", sys.executable, "count.py", str(ENDLESS), str(pace_s)).strip()


def end_of(lan: Lan) -> Path:
    return lan.directory / "end"


def saved(host: Host, job: str) -> dict[str, Any]:
    """Wait until the job runs and has committed a checkpoint; return its state as `host` sees it."""
    state: dict[str, Any] = until(
        lambda: (s := host.job(job)) and s["state"] == "running" and s["checkpoint"] and s, "a checkpoint"
    )
    return state


def guests(host: Host, job: str) -> list[int]:
    """Return the processes of this job on the host. Their environment names the job."""
    assert host.daemon is not None
    mark = f"MESH_JOB_ID={job}".encode()
    found = [pid for pid, command in descendants(host.daemon.pid) if "count.py" in command]
    return [pid for pid in found if mark in Path(f"/proc/{pid}/environ").read_bytes()]


def counted(host: Host, *jobs: str) -> list[int]:
    """End the jobs after further progress; check each digest and return each count."""
    for job in jobs:
        step = committed(host, job)
        until(lambda job=job, step=step: committed(host, job) > step, "the job to continue and to commit a checkpoint")  # type: ignore[misc]
    end_of(host.lan).touch()
    return [end(host, job) for job in jobs]


def committed(host: Host, job: str) -> int:
    """Return the step of the last checkpoint."""
    state = host.job(job)
    assert state["outcome"] is None, state
    return int((state["checkpoint"] or {}).get("step") or 0)


def end(host: Host, job: str) -> int:
    state = until(lambda: (s := host.job(job)) and s["outcome"] and s, "the job to end", 120.0)
    assert state["state"] == "done", state
    *_, counted, digest = host.ok("logs", job).splitlines()
    steps = int(counted.removeprefix("counted "))
    assert digest == f"digest {count_digest(steps)}"
    return steps


def test_isolated_host_freezes_its_guest_before_another_host_resumes_it(lan: Lan) -> None:
    hosts = office(lan, 4, **LENDS)
    user = hosts[0]
    user.ok("pause")
    job = submit(user)
    victim = next(host for host in hosts if host.name == saved(user, job)["node"])
    stopped = guests(victim, job)
    assert stopped
    victim.cut_off()
    until(lambda: user.job(job)["attempts"][-1]["number"] == 1, "another host to take over")
    assert {state_of(pid) for pid in stopped} == {"T"}, "the isolated guest must be stopped before the takeover"
    assert victim.job(job)["state"] in {"frozen", "stranded"}
    victim.reconnect()
    assert min(counted(user, job)) > 10
    until(lambda: not guests(victim, job) and not victim.status()["guests"], "the old guest to be gone")
    assert user.job(job)["attempts"][0]["node"] == victim.name


@pytest.mark.parametrize("chain", ["INPUT", "OUTPUT"])
def test_host_that_only_hears_or_only_speaks_freezes_its_guest_before_another_resumes_it(lan: Lan, chain: str) -> None:
    hosts = office(lan, 4, **LENDS)
    user = hosts[0]
    user.ok("pause")
    job = submit(user)
    victim = next(host for host in hosts if host.name == saved(user, job)["node"])
    stopped = guests(victim, job)
    assert stopped
    victim.cut_off(chain)
    until(lambda: user.job(job)["attempts"][-1]["number"] == 1, "another host to take over")
    assert {state_of(pid) for pid in guests(victim, job)} <= {"T"}, "the old guest must not run after the takeover"
    victim.reconnect()
    assert min(counted(user, job)) > 10
    until(lambda: not guests(victim, job) and not victim.status()["guests"], "the old guest to be gone")
    assert user.job(job)["attempts"][0]["node"] == victim.name


def test_isolated_guest_freezes_or_continues_uncommitted_as_configured(lan: Lan) -> None:
    hosts = office(lan, 3, **LENDS)
    user = hosts[0]
    user.ok("pause")
    still, alone = submit(user), submit(user, "--on-partition", "compute_uncommitted")
    at = {job: next(host for host in hosts if host.name == saved(user, job)["node"]) for job in (still, alone)}
    for host in hosts:
        host.cut_off()
    until(
        lambda: {state_of(pid) for pid in guests(at[still], still)} == {"T"},
        "the guest without uncommitted mode to be stopped",
    )
    step = at[alone].job(alone)["step"]
    until(lambda: (at[alone].job(alone)["step"] or 0) > step + 20, "the guest in uncommitted mode to continue")
    assert "T" not in {state_of(pid) for pid in guests(at[alone], alone)}
    for host in hosts:
        host.reconnect()
    assert min(counted(user, still, alone)) > 10


def test_checkpoint_saved_while_its_holder_is_suspect_outlives_its_host(lan: Lan) -> None:
    """The host hears no gossip, but it can call the other, which also is the only witness."""
    user, host = office(lan, 2, **LENDS, api_port=GOSSIP_PORT + 1)
    user.ok("pause")
    job = submit(user, "--replicas", "1", pace_s=0.05)
    saved(user, job)
    user.ok("lend")

    def suspects() -> bool:
        return host.sees()[user.name] == "suspect"

    def saved_while_it_is_suspect() -> dict[str, Any]:
        """Return a checkpoint that began and was committed meanwhile; nothing if the other is declared dead before."""
        host.cut_off_gossip()
        until(suspects, "the other to be suspect")
        first = host.job(job)["checkpoint"]["seq"]
        while suspects():
            last: dict[str, Any] = user.job(job)["checkpoint"]
            if last["seq"] >= first + 2 and suspects():
                return last
        host.reconnect()
        until(lambda: all_see([user, host], {user.name, host.name}), "the nodes to see each other again")
        return {}

    last = until(saved_while_it_is_suspect, "a checkpoint")
    host.power_off()
    until(lambda: user.job(job)["node"] == user.name and user.job(job)["state"] == "running", "a takeover")
    assert user.job(job)["attempts"][-1]["resumed_step"] >= last["step"]
    assert min(counted(user, job)) > last["step"]


def test_of_two_recoveries_on_two_sides_of_a_cut_one_keeps_the_job(lan: Lan) -> None:
    hosts = office(lan, 3, encrypt=False, **LENDS)  # no side has enough shares of a key
    user = hosts[0]
    user.ok("pause")
    job = submit(user, "--replicas", "2")
    lost = next(host for host in hosts if host.name == saved(user, job)["node"])
    user.ok("lend")
    sides = [host for host in hosts if host is not lost]
    lost.power_off()
    user.cut_off()
    for side in sides:
        until(lambda side=side: side.job(job)["state"] == "stranded", "the loss of two witnesses to be noticed")  # type: ignore[misc]
        side.ok("job", "recover", job, "--yes")
    for side in sides:
        until(lambda side=side: guests(side, job) and side.job(job)["state"] == "running", "the job to run")  # type: ignore[misc]
    user.reconnect()
    until(lambda: sum(bool(guests(side, job)) for side in sides) == 1, "one of the two to give up")
    steps = counted(user, job)
    first, second = (until(lambda side=side: side.job(job)["outcome"], "the end to be known") for side in sides)  # type: ignore[misc]
    assert first == second and sides[0].job(job)["attempts"] == sides[1].job(job)["attempts"], steps


def test_owner_reclaim_needs_no_network(lan: Lan) -> None:
    """Reclaim while all interfaces, loopback included, are down."""
    (host,) = office(lan, 1, **LENDS)
    jobs = [submit(host), submit(host)]
    running = [until(lambda job=job: guests(host, job), "the job to run") for job in jobs]
    for interface in ("eth0", "lo"):
        host.run("ip", "link", "set", interface, "down")
    answer = json.loads(host.ok("reclaim", "--now", "--json"))
    assert sorted(answer["reclaimed"]) == sorted(jobs), answer
    assert not any(Path(f"/proc/{pid}").exists() for pids in running for pid in pids)
    assert host.status()["paused"], "the pause must be shown without a network"


def test_host_with_a_full_disk_hands_over_the_job_without_blaming_it(lan: Lan) -> None:
    with small_disk(lan.directory / "h1", mebibytes=24) as disk:
        hosts = office(lan, 4, **LENDS)
        user, small, *others = hosts
        for host in (user, *others):
            host.ok("pause")
        job = submit(user)
        assert saved(user, job)["node"] == small.name
        for host in others:
            host.ok("lend")
        fill(disk)
        until(lambda: user.job(job)["node"] not in {None, small.name}, "another host to take over")
        assert min(counted(user, job)) > 10
        first = user.job(job)["attempts"][0]
        assert "disk is full" in first["reason"] or not small.answers, first
        assert user.job(job)["state"] == "done", "the full disk must not fail the job"


def test_save_on_a_full_disk_fails_and_the_next_one_succeeds_once_there_is_room(lan: Lan) -> None:
    with small_disk(lan.directory / "h1" / "store", mebibytes=4) as disk:
        user, small = office(lan, 2, **LENDS)
        user.ok("pause")
        job = submit(user)
        saved(user, job)
        fill(disk)
        text = f"the disk of {disk} is full: free some space; earlier checkpoints are safe"
        until(lambda: text in user.ok("describe", job), "the reason why the checkpoint is not saved")
        full = small.job(job)
        goal = (full["step"] or 0) + 40
        until(lambda: (small.job(job)["step"] or 0) > goal, "the guest to continue")
        assert small.job(job)["checkpoint"] == full["checkpoint"], "no save may succeed while the disk is full"
        small.ok("ckpt", "extract", job, str(lan.directory / "extracted"))
        steps = [int(path.name.removeprefix("step-")) for path in (lan.directory / "extracted").rglob("step-*")]
        assert max(steps) <= full["checkpoint"]["step"] < max(steps) + 10
        (disk / "filler").unlink()
        assert min(counted(user, job)) > goal
        assert len(user.job(job)["attempts"]) == 1, "the job must stay where it is"


@contextmanager
def small_disk(directory: Path, mebibytes: int) -> Iterator[Path]:
    directory.mkdir(parents=True)
    run("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", str(directory))
    cleanup().undo("umount", "-l", str(directory))
    try:
        yield directory
    finally:
        run("umount", "-l", str(directory))


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_job_completes_despite_loss_of_every_seventh_packet(lan: Lan) -> None:
    hosts = office(lan, 3, **LENDS)
    user = hosts[0]
    for host in hosts:
        lossy = ("-i", "eth0", "-m", "statistic", "--mode", "random", "--probability", "0.14", "-j", "DROP")
        host.iptables("-A", "INPUT", *lossy)
    job = submit(user)
    until(lambda: (user.job(job).get("step") or 0) > 60, "the job to progress despite the loss")
    assert min(counted(user, job)) > 60
