"""Data sets on real daemons: added, fetched from several holders, read by jobs, refused to others, and evicted."""

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.e2e.commands import finished, mesh, ok, read, until

pytestmark = pytest.mark.e2e

LIST = 'set -e; cd "$MESH_DATA_PICTURES"; find . -type f -exec sha256sum {} + | sort -k2; ! touch new; ! rm -f large'


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    root, rng = tmp_path / "pictures", random.Random(3)
    for name in ("cats", "dogs"):
        (root / name).mkdir(parents=True)
        for number in range(40):
            (root / name / f"{number}.jpg").write_bytes(rng.randbytes(3000))
    (root / "large").write_bytes(rng.randbytes(30 << 20))
    return root


def row(node: StackNode, name: str) -> dict[str, Any]:
    return next((row for row in read(node, "data", "ls")["data"] if row["name"] == name), {})


def sums(root: Path) -> list[str]:
    done = subprocess.run(
        "find . -type f -exec sha256sum {} + | sort -k2",
        shell=True,
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_data_set_is_added_fetched_and_read_by_jobs(make_stack: Callable[..., Stack], pictures: Path) -> None:
    stack = make_stack(3, process_engine_for="all")
    one, two, three = stack.nodes
    user = read(one, "status")["user"]
    name = f"{user}/pictures"
    first = read(one, "data", "add", "pictures", str(pictures))
    assert first["files"] == 83 and first["read_bytes"] == first["bytes"] > 30 << 20
    again = read(one, "data", "add", "pictures", str(pictures), "--reader", user)
    assert again["new_bytes"] < 1 << 20
    until(lambda: row(two, name).get("id") == again["id"], "the newest version to be known elsewhere")
    assert row(two, name)["nodes"] == ["node1"] and row(two, name)["here"] is False
    assert [entry["name"] for entry in read(one, "data", "show", "pictures", "cats")["entries"]][:1] == ["0.jpg"]

    # A node without it fetches it, and the guest can only read it.
    until(lambda: row(three, name), "node3 to know it")
    for node in (one, two):
        ok(node, "pause")
    until(lambda: all(r["paused"] for r in read(three, "nodes")["nodes"] if r["nick"] != "node3"), "the pauses")
    job = ok(three, "submit", "--no-workdir", "--data", "pictures", "--", "sh", "-c", LIST).strip()
    state = finished(three, job)
    assert state["outcome"]["kind"] == "done" and state["attempts"][-1]["node"] == "node3", ok(three, "logs", job)
    assert [line for line in ok(three, "logs", job).splitlines() if len(line) > 64] == sums(pictures)
    until(lambda: row(one, name)["nodes"] == ["node1", "node3"], "node3 to have become a holder")

    # From both holders; and placement knows who has it.
    why = ok(two, "why", job)
    assert "node2 would first fetch 29" not in why, "a paused node is refused anyway"
    ok(two, "data", "pin", name)
    assert row(two, name)["here"] is True and row(two, name)["pinned"] is True
    until(lambda: len(row(one, name)["nodes"]) == 3, "three holders")
    assert "all are good" in ok(two, "data", "verify", name)
    damage(two)
    report = read(two, "data", "verify", name)
    assert report["damaged"] >= 1 and report["fetched_again"] >= 1
    assert "all are good" in ok(two, "data", "verify", name)

    # Its owner removes it everywhere.
    ok(three, "data", "rm", "pictures")
    for node in stack.nodes:
        until(lambda node=node: not row(node, name) and not list((node.where.data / "sets").glob("*.pack")), "removal")
    done = mesh(one, "run", "--no-workdir", "--data", name, "--", "true")
    assert done.returncode == 125 and f"there is no data set {name}" in done.stderr


def damage(node: StackNode) -> None:
    pack = max((node.where.data / "packs").glob("*.pack"), key=lambda path: path.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(pack.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
