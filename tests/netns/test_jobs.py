"""Jobs on real daemons whose network is cut or loses: one history, whatever happens to the cables."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.aftermath import aftermath
from tests.e2e.commands import ENDLESS, count_digest, descendants, state_of, until
from tests.netns.lan import Host, Lan, office, run

pytestmark = pytest.mark.netns
LENDS = {"profile": "local", "lend": True, "slots": 2}


def submit(host: Host, *options: str) -> str:
    """Of a count that ends once it is let."""
    order = ("submit", "--ckpt", "ckpts", "--ckpt-mode", "rename", "--env", f"UNTIL={end_of(host.lan)}", *options)
    return host.ok(*order, "--", sys.executable, "count.py", str(ENDLESS), "0.05").strip()


def end_of(lan: Lan) -> Path:
    return lan.directory / "end"


def saved(host: Host, job: str) -> dict[str, Any]:
    """The job, once it runs and has committed a checkpoint; as `host` sees it."""
    state: dict[str, Any] = until(
        lambda: (s := host.job(job)) and s["state"] == "running" and s["checkpoint"] and s, "a checkpoint"
    )
    return state


def guests(host: Host, job: str) -> list[int]:
    """The processes of this job here: they name it in their environment."""
    assert host.daemon is not None
    mark = f"MESH_JOB_ID={job}".encode()
    found = [pid for pid, command in descendants(host.daemon.pid) if "count.py" in command]
    return [pid for pid in found if mark in Path(f"/proc/{pid}/environ").read_bytes()]


def counted(host: Host, *jobs: str) -> list[int]:
    """Let them end once they have gone on; how far each is, by an exact count."""
    for job in jobs:
        step = committed(host, job)
        until(lambda job=job, step=step: committed(host, job) > step, "it to go on, and to save")  # type: ignore[misc]
    end_of(host.lan).touch()
    return [end(host, job) for job in jobs]


def committed(host: Host, job: str) -> int:
    """The step of its last checkpoint."""
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


def test_a_host_that_is_cut_off_stands_still_before_another_goes_on(lan: Lan) -> None:
    hosts = office(lan, 4, **LENDS)
    user = hosts[0]
    user.ok("pause")
    job = submit(user)
    victim = next(host for host in hosts if host.name == saved(user, job)["node"])
    stopped = guests(victim, job)
    assert stopped
    victim.cut_off()
    until(lambda: user.job(job)["attempts"][-1]["number"] == 1, "somebody to take over")
    assert {state_of(pid) for pid in stopped} == {"T"}, "its guest stands still by then"
    assert victim.job(job)["state"] in {"frozen", "stranded"}
    victim.reconnect()
    assert min(counted(user, job)) > 10
    until(lambda: not guests(victim, job) and not victim.status()["guests"], "the old guest to be gone")
    assert user.job(job)["attempts"][0]["node"] == victim.name


def test_with_nobody_to_ask_one_guest_stands_still_and_the_other_goes_on_uncommitted(lan: Lan) -> None:
    hosts = office(lan, 3, **LENDS)
    user = hosts[0]
    user.ok("pause")
    still, alone = submit(user), submit(user, "--on-partition", "compute_uncommitted")
    at = {job: next(host for host in hosts if host.name == saved(user, job)["node"]) for job in (still, alone)}
    for host in hosts:
        host.cut_off()
    until(lambda: {state_of(pid) for pid in guests(at[still], still)} == {"T"}, "the one to be stopped")
    step = at[alone].job(alone)["step"]
    until(lambda: (at[alone].job(alone)["step"] or 0) > step + 20, "the other to go on")
    assert "T" not in {state_of(pid) for pid in guests(at[alone], alone)}
    for host in hosts:
        host.reconnect()
    assert min(counted(user, still, alone)) > 10


def test_its_owners_last_word_needs_no_network(lan: Lan) -> None:
    """Not even the machine's own loopback."""
    (host,) = office(lan, 1, **LENDS)
    jobs = [submit(host), submit(host)]
    running = [until(lambda job=job: guests(host, job), "it to run") for job in jobs]
    for interface in ("eth0", "lo"):
        host.run("ip", "link", "set", interface, "down")
    answer = json.loads(host.ok("reclaim", "--now", "--json"))
    assert sorted(answer["reclaimed"]) == sorted(jobs), answer
    assert not any(Path(f"/proc/{pid}").exists() for pids in running for pid in pids)
    assert host.status()["paused"], "and it is told so while it has none"


def test_a_host_whose_disk_fills_up_gives_the_job_away_and_does_not_blame_it(lan: Lan) -> None:
    with small_disk(lan.directory / "h1", mebibytes=24) as disk:
        hosts = office(lan, 4, **LENDS)
        user, small, *others = hosts
        for host in (user, *others):
            host.ok("pause")
        job = submit(user)
        assert saved(user, job)["node"] == small.name
        for host in others:
            host.ok("resume")
        fill(disk)
        until(lambda: user.job(job)["node"] not in {None, small.name}, "another host to take over")
        assert min(counted(user, job)) > 10
        first = user.job(job)["attempts"][0]
        assert "disk is full" in first["reason"] or not small.answers, first
        assert user.job(job)["state"] == "done", "and the job was not to blame"


@contextmanager
def small_disk(directory: Path, mebibytes: int) -> Iterator[Path]:
    directory.mkdir(parents=True)
    run("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", str(directory))
    aftermath().undo("umount", "-l", str(directory))
    try:
        yield directory
    finally:
        run("umount", "-l", str(directory))


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_network_that_loses_every_seventh_packet_slows_a_job_and_breaks_nothing(lan: Lan) -> None:
    hosts = office(lan, 3, **LENDS)
    user = hosts[0]
    for host in hosts:
        lossy = ("-i", "eth0", "-m", "statistic", "--mode", "random", "--probability", "0.14", "-j", "DROP")
        host.iptables("-A", "INPUT", *lossy)
    job = submit(user)
    until(lambda: (user.job(job).get("step") or 0) > 60, "it to go on all the same")
    assert min(counted(user, job)) > 60
