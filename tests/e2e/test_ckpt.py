"""`mesh ckpt` on real daemons: listing, verification, repair from another node, and removal of checkpoints."""

import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.e2e.commands import (
    finished,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    send,
    submit_count,
    submit_endless,
    until,
)

pytestmark = pytest.mark.e2e


def kept(node: StackNode, job: str) -> list[dict[str, Any]]:
    return [row for row in read(node, "ckpt", "ls", job)["checkpoints"] if row["kind"] == "checkpoint"]


def workdir_uses(node: StackNode, job: str) -> set[str]:
    return {row["use"] for row in read(node, "ckpt", "ls", job)["checkpoints"] if row["kind"] == "workdir"}


def test_ckpt_lists_verifies_repairs_fetches_and_removes_checkpoints(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    stack = make_stack(3)
    node = stack.nodes[0]
    job = submit_endless(node, tmp_path / "end", "--replicas", "2")
    host = stack.node(running_with_checkpoint(node, job)["node"])
    text = until(
        lambda: "committed" in (t := ok(host, "ckpt", "ls", job)) and t, "the checkpoint to be listed as committed"
    )
    assert "on this disk" in text and "node" in text

    def refused() -> bool:
        """Return True if removal is refused. The newest checkpoint may be superseded before the removal."""
        newest = [row for row in kept(host, job) if row["use"] == "committed"]
        whole = newest and len(newest[0]["holders"]) == 2
        done = mesh(host, "ckpt", "rm", newest[0]["id"]) if whole else None
        return done is not None and done.returncode == 2 and "--force" in done.stderr

    until(refused, "removal of the newest checkpoint to be refused")

    assert all(row["encrypted"] for row in read(host, "ckpt", "ls")["checkpoints"])
    for holder in stack.nodes:
        for directory, _, names in os.walk(holder.where.store):
            for name in names:
                with suppress(FileNotFoundError):  # the job still runs, and its host prunes
                    assert b"count.py" not in Path(directory, name).read_bytes(), (
                        "packs must be encrypted, file names too"
                    )

    assert workdir_uses(node, job) == {"in use"}
    there = ok(node, "ckpt", "extract", job, str(tmp_path / "pulled"))
    assert "files" in there and list((tmp_path / "pulled").rglob("*"))
    again = mesh(node, "ckpt", "extract", job, str(tmp_path / "pulled"))
    assert again.returncode == 2 and "new directory" in again.stderr
    (tmp_path / "end").touch()
    state = finished(node, job)
    until(lambda: workdir_uses(node, job) == {"over"}, "the working directory to be needed no more")
    last = state["checkpoint"]

    # Flip one bit of every pack here; the last checkpoint is then repaired from another node.
    for pack in (host.where.store / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        data[-1] ^= 1
        pack.write_bytes(bytes(data))
    report = read(host, "ckpt", "verify")
    assert report["bad_chunks"] and report["quarantined"] and report["repaired"] and report["lost"] == {}
    assert read(host, "ckpt", "verify")["bad_chunks"] == 0
    ok(host, "ckpt", "extract", job, str(tmp_path / "mended"), "--seq", str(last["seq"]))
    assert list((tmp_path / "mended").rglob("*"))

    for row in kept(host, job):
        ok(host, "ckpt", "rm", "--force", row["id"][:16])
    assert kept(host, job) == []
    before = read(host, "ckpt", "ls")["stored_bytes"]
    freed = read(host, "ckpt", "gc", "--older", "0s")
    assert freed["bytes"] > 0 and freed["stored_bytes"] < before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("rm", "zz"), 4, "no checkpoint"),
        (("rm", "zzzzzz"), 4, "no checkpoint"),
        (("ls", "nosuchjob"), 4, "no job"),
        (("extract", "nosuchjob", "/nonexistent/x"), 4, "no job"),
        (("gc", "--older", "yesterday"), 2, "not a duration"),
        (("extract", "x", "y", "--seq", "-1"), 2, "seq"),
    ],
)
def test_bad_ckpt_arguments_are_refused_with_a_message(
    shared: Stack, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = mesh(shared.nodes[1], "ckpt", *arguments)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr


def kill(stack: Stack, nicks: Iterable[str]) -> None:
    for nick in nicks:
        send(signal.SIGKILL, stack.node(nick))
        until(lambda nick=nick: not stack.node(nick).running, f"{nick} to end")  # type: ignore[misc]


def test_result_that_lost_its_holders_is_copied_to_other_nodes(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    stack = make_stack(5)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit_count(user, 30, "--replicas", "2")
    finished(user, job)

    def holders() -> set[str]:
        """Return the live nodes that hold the result."""
        living = [node for node in stack.nodes if node.running]
        return {
            node.nick
            for node in living
            if any(r["use"] == "result" for r in read(node, "ckpt", "ls", job)["checkpoints"])
        }

    first = until(lambda: len(found := holders()) >= 3 and found, "the result to be on three nodes")
    lost = sorted(first - {user.nick})[:2]
    kill(stack, lost)
    until(lambda: len(holders()) >= 3, "other nodes to hold the result", timeout_s=90)
    assert holders() - first, "a node that did not hold the result must receive it"
    kill(stack, first - {user.nick, *lost})
    ok(user, "cp", f"{job}:out/", str(tmp_path / "out"))
    assert "copied to" in ok(user, "job", "events", job)
