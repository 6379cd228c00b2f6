"""A copy from a real daemon whose job has a file with a hole, and links and names against its user."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.e2e.commands import mesh, ok, read, until

pytestmark = pytest.mark.e2e

PROGRAM = r"""
import os, time
with open("hole", "wb") as file:
    file.truncate(2 << 30)
    file.seek(1 << 30)
    file.write(b"in the middle")
os.symlink("/etc/passwd", "passwd")
os.symlink("hole", "latest")
open("name\x1b[2J\nSPOOFED", "w").close()
os.mkfifo("pipe")
open("ready", "w").close()
time.sleep(600)
"""
MEMORY = 64 << 10  # KiB that a copy may take in the daemon


def process_id(node: StackNode) -> int:
    assert node.process is not None
    return node.process.pid


def memory_kib(pid: int) -> int:
    """Return the most memory that a process has had (proc(5))."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def test_copy_of_a_sparse_file_costs_neither_daemon_memory(make_stack: Callable[..., Stack], tmp_path: Path) -> None:
    """Finding 12: a hole of 2 GiB raised the lender's daemon to 4.3 GB."""
    stack = make_stack(2)
    user = stack.nodes[0]
    job = ok(user, "submit", "--no-workdir", "--", "python3", "-c", PROGRAM).strip()
    host = until(lambda: read(user, "describe", job)["job"]["node"], "the job to run")
    taker = next(node for node in stack.nodes if node.nick != host)
    lender = stack.node(host)
    until(lambda: _copies(taker, job, "ready", tmp_path / "ready"), "its files")
    before = {node.nick: memory_kib(process_id(node)) for node in (lender, taker)}
    copied = read(taker, "cp", f"{job}:work", str(tmp_path / "copy"))
    grown = {node.nick: memory_kib(process_id(node)) - before[node.nick] for node in (lender, taker)}
    assert max(grown.values()) < MEMORY, grown
    hole = (tmp_path / "copy" / "hole").stat()
    assert hole.st_size == 2 << 30 and hole.st_blocks * 512 < 1 << 20
    assert copied["left_out"] == 1 and (tmp_path / "copy" / "latest").is_symlink()
    assert not (tmp_path / "copy" / "passwd").is_symlink() and not (tmp_path / "copy" / "pipe").exists()
    ok(user, "cancel", job)


def _copies(node: StackNode, job: str, path: str, target: Path) -> bool:
    return mesh(node, "cp", f"{job}:{path}", str(target)).returncode == 0
