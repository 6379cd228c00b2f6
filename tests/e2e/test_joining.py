"""Founding, inviting, joining, starting and stopping, by the command line alone; and everything that can be wrong with it."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.layout import Layout
from tests.e2e.commands import WAIT_S, mesh, ok, read, start, until

pytestmark = pytest.mark.e2e
LOCAL = ("--bind", "127.0.0.1", "--port", "0", "--api-port", "0", "--profile", "local")


def found(home: Path, *options: str) -> Path:
    state = home / "a"
    ok(state, "init", "lab", "--nick", "desk", "--user", "ada")
    ok(state, "up", *LOCAL, *options)
    return state


def alive(state: Path) -> set[str]:
    return {row["nick"] for row in read(state, "nodes")["nodes"] if row["state"] == "alive"}


def test_two_machines_become_a_mesh_in_four_commands(home: Path) -> None:
    first = found(home, "--lend")
    invite = ok(first, "invite", "--ttl", "1h").strip()
    second = home / "b"
    assert "joined mesh 'lab'" in ok(second, "join", invite, "--nick", "rack", "--user", "bob")
    assert "rack is up in mesh 'lab'" in ok(second, "up", *LOCAL)
    for state in (first, second):
        until(lambda state=state: alive(state) == {"desk", "rack"}, "both to see each other")  # type: ignore[misc]
    rows = {row["nick"]: row for row in read(second, "nodes")["nodes"]}
    assert rows["desk"]["lending"] and not rows["rack"]["lending"] and rows["desk"]["user"] == "ada"
    assert ok(second, "down") == "down\n"
    until(lambda: alive(first) == {"desk"}, "the leave to be known")
    assert {row["nick"]: row["state"] for row in read(first, "nodes")["nodes"]}["rack"] == "left"


def test_without_multicast_an_address_is_enough_and_is_remembered(home: Path) -> None:
    first = found(home, "--no-mdns")
    address = read(first, "status")["address"]
    second = home / "b"
    ok(second, "join", ok(first, "invite").strip(), "--nick", "rack")
    (second / "seeds").write_text("")
    ok(second, "up", *LOCAL, "--no-mdns", "--join", address)
    until(lambda: alive(second) == {"desk", "rack"}, "the seed to be found")
    ok(second, "down")
    ok(second, "up", *LOCAL, "--no-mdns")
    until(lambda: alive(second) == {"desk", "rack"}, "the remembered peer to be found")


def test_another_users_job_is_not_run_without_a_container_unless_the_owner_allows_it(home: Path) -> None:
    first = found(home, "--lend", "--engine", "process")
    second = home / "b"
    ok(second, "join", ok(first, "invite").strip(), "--nick", "rack", "--user", "bob")
    ok(second, "up", *LOCAL)
    until(lambda: alive(second) == {"desk", "rack"}, "both to see each other")
    refused = until(
        lambda: (done := mesh(second, "submit", "--no-workdir", "--", "id")).returncode == 6 and done,
        "adverts to arrive",
    )
    assert "desk" in refused.stderr and "own" in refused.stderr
    ok(first, "down")
    warned = mesh(first, "up", *LOCAL, "--lend", "--engine", "process", "--allow-process-guests")
    assert warned.returncode == 0 and "without a sandbox" in warned.stderr
    until(lambda: mesh(second, "run", "--no-workdir", "--", "true").returncode == 0, "the owner's word to arrive")


def test_a_node_of_another_mesh_is_not_let_in_and_is_counted(home: Path) -> None:
    first = found(home)
    stranger = home / "z"
    ok(stranger, "init", "lab", "--nick", "stranger")
    ok(stranger, "up", *LOCAL, "--join", read(first, "status")["address"])
    until(
        lambda: any(key.startswith("refused") for key in read(first, "status")["counters"]),
        "its knocking to be counted",
    )
    assert alive(first) == {"desk"} and alive(stranger) == {"stranger"}
    assert "refused messages" in ok(first, "status")


def test_a_node_is_shut_out_by_its_key(home: Path) -> None:
    first = found(home, "--lend")
    second = home / "b"
    ok(second, "join", ok(first, "invite").strip(), "--nick", "rack", "--user", "bob")
    ok(second, "up", *LOCAL)
    until(lambda: alive(first) == {"desk", "rack"}, "both to see each other")
    key = ok(second, "key", "show").strip()
    rows = {row["nick"]: row for row in read(first, "trust", "ls")["members"]}
    assert rows["rack"]["node"] == key and rows["desk"]["founder"] and not rows["rack"]["founder"]
    assert mesh(second, "revoke", "desk", "--yes").returncode == 5, "only the founder may"
    assert mesh(first, "revoke", "nobody", "--yes").returncode == 4
    assert mesh(first, "revoke", "rack").returncode == 1, "it asks, and nobody said yes"
    assert "shut out" in ok(first, "revoke", "rack", "--yes", "--reason", "lost laptop")
    until(lambda: alive(first) == {"desk"}, "it to be out")
    assert "revoked" in ok(first, "trust", "ls") and "lost laptop" in ok(first, "trust", "ls")
    until(lambda: "revoked" in read(second, "status")["problem"], "it to be told")
    refused = mesh(second, "run", "--no-workdir", "--ckpt", "c", "--ckpt-to", "desk", "--", "true")
    assert refused.returncode != 0
    ok(second, "down", "--now")
    done = mesh(second, "up", *LOCAL)
    assert done.returncode == 1 and "revoked" in done.stderr and "--state" in done.stderr
    ok(first, "down")
    ok(first, "up", *LOCAL)
    assert "revoked" in ok(first, "trust", "ls"), "a restart forgets nothing"


def test_a_key_is_shown_without_a_daemon(home: Path) -> None:
    made = ok(home / "a", "key", "show").strip()
    assert made in ok(home / "a", "init", "lab"), "made for an allow list, it is the node's key"
    assert read(home / "a", "key", "show")["node"] == made


# --- what can be wrong


def test_a_second_founding_is_refused_and_loses_nothing(home: Path) -> None:
    state = home / "a"
    ok(state, "init", "lab")
    before = {path.name: path.read_bytes() for path in state.iterdir()}
    assert stat.S_IMODE((state / "node.key").stat().st_mode) == 0o600
    for again in (("init", "other"), ("join", "mesh1-whatever")):
        done = mesh(state, *again)
        assert done.returncode == 5 and "belongs to a mesh already" in done.stderr and "--state" in done.stderr
    assert {path.name: path.read_bytes() for path in state.iterdir()} == before


@pytest.mark.parametrize("text", ["", "hello", "mesh1-" + "a" * 500, "ÿ" * 30, "-x"])
def test_a_bad_invite_is_refused_in_words(home: Path, text: str) -> None:
    done = mesh(home / "b", "join", "--", text)
    assert done.returncode in {2, 4, 5} and "invite" in done.stderr and not (home / "b" / "genesis").exists()
    assert "Traceback" not in done.stderr


def test_up_without_a_mesh_says_what_to_do(home: Path) -> None:
    done = mesh(home / "a", "up", *LOCAL)
    assert done.returncode == 1 and "mesh init" in done.stderr and "mesh join" in done.stderr


def test_up_twice_says_so(home: Path) -> None:
    state = found(home)
    done = mesh(state, "up", *LOCAL)
    assert done.returncode == 1 and "runs here already" in done.stderr
    assert alive(state) == {"desk"}


@pytest.mark.parametrize("option", ["--port", "--api-port"])
def test_a_port_in_use_is_named_with_the_next_step(home: Path, option: str) -> None:
    state = home / "a"
    ok(state, "init", "lab")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        done = mesh(state, "up", *LOCAL, option, number)
    assert done.returncode == 1 and number in done.stderr and option in done.stderr and "Traceback" not in done.stderr
    assert "is up" in ok(state, "up", *LOCAL), "once the port is free it starts"


def test_no_daemon_is_told_with_the_next_step(home: Path) -> None:
    for arguments in (("ps",), ("nodes",), ("status",), ("run", "--", "true"), ("down",), ("invite",)):
        done = mesh(home / "none", *arguments)
        assert done.returncode == 3 and "mesh join INVITE" in done.stderr and done.stdout == "", "it has no mesh yet"
    assert mesh(home / "some", "init", "lab").returncode == 0
    done = mesh(home / "some", "ps")
    assert done.returncode == 3 and "start it with `mesh up`" in done.stderr and done.stdout == ""


def test_a_daemon_that_was_killed_starts_again(home: Path) -> None:
    state = found(home)
    os.kill(read(state, "status")["pid"], signal.SIGKILL)
    until(lambda: mesh(state, "status").returncode == 3, "the daemon to be gone")
    assert "is up" in ok(state, "up", *LOCAL)


Damage = Callable[[Layout], None]


def damaged(name: str, data: bytes = b"\xff\x00rubbish") -> Damage:
    def write(where: Layout) -> None:
        (where.root / name).write_bytes(data)

    return write


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (damaged("node.key"), "node.key"),
        (damaged("node.key", b""), "node.key"),
        (damaged("genesis"), "genesis"),
        (damaged("chain"), "chain"),
        (damaged("config.toml", b"slots = 'many'"), "config.toml"),
        (damaged("config.toml", b"slotz = 3"), "slotz"),
        (damaged("config.toml", b"slots = 99999"), "slots"),
        (damaged("config.toml", b"upload_mbps = -1"), "upload_mbps"),
        (damaged("config.toml", b"join = ['no:such:port']"), "no:such:port"),
        (damaged("config.toml", b"= ="), "config.toml"),
    ],
    ids=["key", "empty-key", "genesis", "chain", "type", "typo", "range", "rate", "address", "syntax"],
)
def test_a_damaged_state_directory_is_named_file_by_file_and_left_as_it_is(
    home: Path, damage: Damage, word: str
) -> None:
    state = home / "a"
    ok(state, "init", "lab")
    damage(Layout(state))
    before = {path.name: path.read_bytes() for path in state.iterdir() if path.is_file()}
    done = mesh(state, "up", *LOCAL)
    assert done.returncode == 1 and word in done.stderr and "Traceback" not in done.stderr, done.stderr
    after = {path.name: path.read_bytes() for path in state.iterdir() if path.is_file()}
    assert {name: after.get(name) for name in before} == before


def test_a_damaged_journal_is_moved_aside_and_told(home: Path) -> None:
    state = found(home)
    ok(state, "down")
    (state / "journal.sqlite").write_bytes(b"rubbish" * 1000)
    ok(state, "up", *LOCAL)
    assert "damaged journal moved to" in ok(state, "events")
    assert [path.read_bytes()[:7] for path in state.glob("journal.damaged-*")] == [b"rubbish"]


@pytest.mark.parametrize("name", ["gossip/snapshot.json", "seeds", "tls.pem", "store/index.sqlite"])
def test_damage_to_what_can_be_made_again_is_no_obstacle(home: Path, name: str) -> None:
    state = found(home)
    ok(state, "down")
    path = state / name
    assert path.exists()
    path.write_bytes(b"\xff\x00rubbish")
    done = mesh(state, "up", *LOCAL)
    assert done.returncode == 0, done.stderr


def test_a_place_that_cannot_be_written_is_named(home: Path) -> None:
    for arguments in (("init", "lab"), ("up", *LOCAL)):
        done = mesh(Path("/proc/no-such-place"), *arguments)
        assert done.returncode == 1 and "/proc/no-such-place" in done.stderr and "--state" in done.stderr


def can_mount() -> bool:
    return (
        os.geteuid() == 0
        and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    )


needs_mount = pytest.mark.skipif(not can_mount(), reason="needs root and a mount namespace")


def inside(pid: int, *command: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-m", *command], check=True, capture_output=True)


@needs_mount
def test_a_full_and_a_read_only_disk_stop_the_daemon_in_words_and_lose_no_state(home: Path) -> None:
    """In a mount namespace of its own: the daemon's disk fills up while it works, is read-only, then well again."""
    state = home / "a"
    ok(state, "init", "lab", "--nick", "desk")
    disk = home / "disk"
    disk.mkdir()
    keeper = subprocess.Popen(["unshare", "-m", "sleep", "300"])
    spaces = [Path(f"/proc/{pid}/ns/mnt") for pid in (keeper.pid, "self")]
    try:
        until(lambda: spaces[0].readlink() != spaces[1].readlink(), "the namespace")
        inside(keeper.pid, "mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk))
        inside(keeper.pid, "cp", "-a", f"{state}/.", str(disk))
        base = [sys.executable, "-m", "mesh.cli", "--state", str(disk)]

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = ["nsenter", "-t", str(keeper.pid), "-m", *base, *arguments]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

        assert run("up", *LOCAL, "--lend").returncode == 0
        job = run("submit", "--no-workdir", "--", "sleep", "300").stdout.strip()
        pid = int(run("status", "--json").stdout.split('"pid": ')[1].split(",")[0])
        fill = ["nsenter", "-t", str(keeper.pid), "-m", "dd", "if=/dev/zero", f"of={disk}/filler", "bs=4096"]
        subprocess.run(fill, capture_output=True, check=False)
        refused = run("submit", "--no-workdir", "--", "true")
        assert refused.returncode != 0 and "Traceback" not in refused.stderr
        until(lambda: gone(pid), "the daemon to stop: it cannot keep promises any more")
        full = run("up", *LOCAL)
        assert full.returncode == 1 and "disk is full" in full.stderr and "--state" in full.stderr, full.stderr
        assert "Traceback" not in full.stderr
        inside(keeper.pid, "rm", f"{disk}/filler")
        inside(keeper.pid, "mount", "-o", "remount,ro", str(disk))
        again = run("up", *LOCAL)
        assert again.returncode == 1 and "read-only" in again.stderr.lower() and "--state" in again.stderr, again.stderr
        inside(keeper.pid, "mount", "-o", "remount,rw", str(disk))
        assert run("up", *LOCAL).returncode == 0
        until(lambda: job in run("ps", "-a", "--json").stdout, "the job: no state was lost")
        assert run("down", "--now").returncode == 0
    finally:
        keeper.kill()
        keeper.wait()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_in_the_foreground_ctrl_c_leaves_in_order(home: Path) -> None:
    state = home / "a"
    ok(state, "init", "lab")
    process = start(state, "up", *LOCAL, "--foreground")
    until(lambda: mesh(state, "status").returncode == 0, "the daemon to answer")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0 and "leaving" in err and not (state / "mesh.sock").exists()


def test_settings_of_the_file_hold_and_the_command_line_wins(home: Path) -> None:
    state = home / "a"
    ok(state, "init", "lab", "--nick", "desk")
    text = 'bind = "127.0.0.1"\nport = 0\napi_port = 0\nprofile = "local"\nlend = true\nslots = 3\nzone = "east"\n'
    (state / "config.toml").write_text(text)

    def row() -> dict[str, Any]:
        return next(row for row in read(state, "nodes")["nodes"] if row["me"])

    ok(state, "up")
    until(lambda: (row()["slots"], row()["zone"], row()["lending"]) == (3, "east", True), "its advert")
    ok(state, "down")
    ok(state, "up", "--slots", "5")
    until(lambda: row()["slots"] == 5, "its advert")
