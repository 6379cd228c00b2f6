"""Founding, inviting, joining, starting and stopping from the command line, with all their errors."""

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

from mesh.daemon.layout import Layout
from tests.e2e.commands import WAIT_S, mesh, ok, read, start, until
from tests.ssh import make_key

pytestmark = pytest.mark.e2e
LOCAL = ("--bind", "127.0.0.1", "--port", "0", "--api-port", "0", "--profile", "local")


def found(home: Path, *options: str) -> Path:
    state = home / "a"
    ok(state, "init", "lab", "--nick", "desk", "--user", "ada")
    ok(state, "up", *LOCAL, *options)
    return state


def alive(state: Path) -> set[str]:
    return {row["nick"] for row in read(state, "nodes")["nodes"] if row["state"] == "alive"}


def test_two_machines_form_a_mesh_in_four_commands(home: Path) -> None:
    first = found(home, "--lend")
    invite = ok(first, "member", "invite", "bob", "--ttl", "1h").strip()
    second = home / "b"
    assert "joined mesh 'lab' as bob" in ok(second, "join", invite, "--nick", "rack")
    assert "rack is up in mesh 'lab'" in ok(second, "up", *LOCAL)
    for state in (first, second):
        until(lambda state=state: alive(state) == {"desk", "rack"}, "both nodes to see each other")  # type: ignore[misc]
    rows = {row["nick"]: row for row in read(second, "nodes")["nodes"]}
    assert rows["desk"]["lending"] and not rows["rack"]["lending"] and rows["desk"]["user"] == "ada"
    assert ok(second, "down") == "down\n"
    until(lambda: alive(first) == {"desk"}, "the leave to be known")
    assert {row["nick"]: row["state"] for row in read(first, "nodes")["nodes"]}["rack"] == "left"


def test_join_by_address_works_without_multicast_and_is_remembered(home: Path) -> None:
    first = found(home, "--no-mdns")
    address = read(first, "status")["address"]
    second = home / "b"
    ok(second, "join", ok(first, "member", "invite", "--mine").strip(), "--nick", "rack")
    (second / "seeds").write_text("")
    ok(second, "up", *LOCAL, "--no-mdns", "--join", address)
    until(lambda: alive(second) == {"desk", "rack"}, "the seed to be found")
    ok(second, "down")
    ok(second, "up", *LOCAL, "--no-mdns")
    until(lambda: alive(second) == {"desk", "rack"}, "the remembered peer to be found")


def test_uncontained_job_of_a_different_user_requires_owner_consent(home: Path) -> None:
    first = found(home, "--lend", "--engine", "process")
    second = home / "b"
    ok(second, "join", ok(first, "member", "invite", "bob").strip(), "--nick", "rack")
    ok(second, "up", *LOCAL)
    until(lambda: alive(second) == {"desk", "rack"}, "both nodes to see each other")
    refused = until(
        lambda: (done := mesh(second, "submit", "--no-workdir", "--", "id")).returncode == 6 and done,
        "adverts to arrive",
    )
    assert "desk" in refused.stderr and "own" in refused.stderr
    ok(first, "down")
    warned = mesh(first, "up", *LOCAL, "--lend", "--engine", "process", "--allow-process-guests")
    assert warned.returncode == 0 and "without a sandbox" in warned.stderr
    until(lambda: mesh(second, "run", "--no-workdir", "--", "true").returncode == 0, "the owner's consent to arrive")


def test_node_of_a_different_mesh_is_refused_and_counted(home: Path) -> None:
    first = found(home)
    stranger = home / "z"
    ok(stranger, "init", "lab", "--nick", "stranger")
    ok(stranger, "up", *LOCAL, "--join", read(first, "status")["address"])
    until(
        lambda: any(key.startswith("refused") for key in read(first, "status")["counters"]),
        "its refused requests to be counted",
    )
    assert alive(first) == {"desk"} and alive(stranger) == {"stranger"}
    assert "refused messages" in ok(first, "status")


@pytest.mark.long
def test_revoked_node_is_shut_out_by_its_key(home: Path) -> None:
    first = found(home, "--lend")
    second = home / "b"
    ok(second, "join", ok(first, "member", "invite", "bob").strip(), "--nick", "rack")
    ok(second, "up", *LOCAL)
    until(lambda: alive(first) == {"desk", "rack"}, "both nodes to see each other")
    key = ok(second, "member", "key").strip()
    rows = {row["nick"]: row for row in read(first, "member", "ls")["members"]}
    assert rows["rack"]["node"] == key and rows["desk"]["founder"] and not rows["rack"]["founder"]
    assert mesh(second, "member", "revoke", "desk", "--yes").returncode == 5, "only the founder may revoke"
    assert mesh(first, "member", "revoke", "nobody", "--yes").returncode == 4
    assert mesh(first, "member", "revoke", "rack").returncode == 1, "revoke must ask for confirmation"
    assert "is revoked" in ok(first, "member", "revoke", "rack", "--yes", "--reason", "lost laptop")
    until(lambda: alive(first) == {"desk"}, "the revoked node to be gone")
    assert "revoked" in ok(first, "member", "ls") and "lost laptop" in ok(first, "member", "ls")
    assert {row["nick"]: row["address"] for row in read(first, "nodes")["nodes"]}["rack"] == ""
    until(lambda: "revoked" in read(second, "status")["problem"], "the revoked node to report it")
    refused = mesh(second, "run", "--no-workdir", "--ckpt", "c", "--ckpt-to", "desk", "--", "true")
    assert refused.returncode != 0
    ok(second, "down", "--now")
    done = mesh(second, "up", *LOCAL)
    assert done.returncode == 1 and "revoked" in done.stderr and f"mesh --state {second} leave" in done.stderr
    ok(first, "down")
    ok(first, "up", *LOCAL)
    assert "revoked" in ok(first, "member", "ls"), "the revocation must persist across a restart"


@pytest.mark.ssh
def test_invite_bound_to_an_ssh_key_is_of_no_use_to_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    own, other, agent_key = (make_key(home / name) for name in ("own", "other", "agent"))
    first = found(home)
    invite = ok(first, "member", "invite", "bob", "--ssh-key", str(own.with_suffix(".pub"))).strip()
    missing = mesh(home / "b", "join", invite)
    assert missing.returncode == 5 and "neither in ~/.ssh nor in ssh-agent" in missing.stderr
    stolen = mesh(home / "b", "join", invite, "--ssh-identity", str(other))
    assert stolen.returncode == 5 and "not signed with the SSH key" in stolen.stderr
    assert "joined mesh 'lab' as bob" in ok(home / "b", "join", invite, "--ssh-identity", str(own))
    used = mesh(home / "c", "join", invite, "--ssh-identity", str(own))
    assert used.returncode == 5 and "ask for another invite" in used.stderr

    # The key is found in ~/.ssh, and in ssh-agent alone.
    (home / ".ssh").mkdir()
    for name in ("own", "own.pub"):
        (home / name).rename(home / ".ssh" / name)
    at_home = ok(first, "member", "invite", "--mine", "--ssh-key", str(home / ".ssh" / "own.pub")).strip()
    assert "joined mesh 'lab' as ada" in ok(home / "d", "join", at_home)
    held = ok(first, "member", "invite", "cyd", "--ssh-key", str(agent_key.with_suffix(".pub"))).strip()
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", home / "s"], stdout=subprocess.DEVNULL)
    try:
        until((home / "s").exists, "ssh-agent to listen")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(home / "s"))
        subprocess.run(["ssh-add", "-q", agent_key], check=True)
        for path in (agent_key, agent_key.with_suffix(".pub")):
            path.unlink()
        assert "joined mesh 'lab' as cyd" in ok(home / "e", "join", held)
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.ssh
def test_ssh_key_of_an_invite_is_checked_when_it_is_made_or_used(home: Path) -> None:
    first = found(home)
    refused = mesh(first, "member", "invite", "bob", "--ssh-key", str(make_key(home / "key")))
    assert refused.returncode == 2 and "not one SSH public key" in refused.stderr
    free = ok(first, "member", "invite", "bob").strip()
    needless = mesh(home / "b", "join", free, "--ssh-identity", str(home / "key"))
    assert needless.returncode == 2 and "bound to no SSH key" in needless.stderr


def test_key_is_shown_without_a_daemon(home: Path) -> None:
    made = ok(home / "a", "member", "key").strip()
    assert made in ok(home / "a", "init", "lab"), "init must use the key made for the allow list"
    assert read(home / "a", "member", "key")["node"] == made


# --- errors


def test_second_init_is_refused_and_loses_no_state(home: Path) -> None:
    state = home / "a"
    ok(state, "init", "lab")
    before = {path.name: path.read_bytes() for path in state.iterdir()}
    assert stat.S_IMODE((state / "node.key").stat().st_mode) == 0o600
    for again in (("init", "other"), ("join", "mesh1-whatever")):
        done = mesh(state, *again)
        assert done.returncode == 5 and "belongs to a mesh already" in done.stderr and "--state" in done.stderr
    assert {path.name: path.read_bytes() for path in state.iterdir()} == before


@pytest.mark.parametrize("text", ["", "hello", "mesh1-" + "a" * 500, "ÿ" * 30, "-x"])
def test_bad_invite_is_refused_with_a_message(home: Path, text: str) -> None:
    done = mesh(home / "b", "join", "--", text)
    assert done.returncode in {2, 4, 5} and "invite" in done.stderr and not (home / "b" / "genesis").exists()
    assert "Traceback" not in done.stderr


def test_up_without_a_mesh_reports_the_next_step(home: Path) -> None:
    done = mesh(home / "a", "up", *LOCAL)
    assert done.returncode == 1 and " init" in done.stderr and " join" in done.stderr


def test_port_in_use_is_reported_with_the_next_step(home: Path) -> None:
    state = home / "a"
    ok(state, "init", "lab")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        for option in ("--port", "--api-port"):
            done = mesh(state, "up", *LOCAL, option, number)
            assert done.returncode == 1 and number in done.stderr and option in done.stderr, option
            assert "Traceback" not in done.stderr
    assert "is up" in ok(state, "up", *LOCAL, "--api-port", number), "the daemon must start once the port is free"


def test_missing_daemon_is_reported_with_the_next_step(home: Path) -> None:
    for arguments in (("ps",), ("nodes",), ("status",), ("submit", "--", "true"), ("down",), ("member", "invite")):
        done = mesh(home / "none", *arguments)
        assert (
            done.returncode == 3 and f"`mesh --state {home / 'none'} join INVITE`" in done.stderr and done.stdout == ""
        ), "without a mesh, the next step is to join"
    assert mesh(home / "some", "init", "lab").returncode == 0
    stopped = mesh(home / "some", "down")
    assert stopped.returncode == 0 and stopped.stdout == "this node is not running\n"
    done = mesh(home / "some", "ps")
    assert (
        done.returncode == 3
        and f"Start one with `mesh --state {home / 'some'} up`" in done.stderr
        and done.stdout == ""
    )


def test_daemon_starts_once_and_again_after_it_was_killed(home: Path) -> None:
    state = found(home)
    done = mesh(state, "up", *LOCAL)
    assert done.returncode == 1 and "runs here already" in done.stderr
    assert alive(state) == {"desk"}
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
        (damaged("config.toml", b"slotz = 3"), "slotz"),
        (damaged("config.toml", b"join = ['no:such:port']"), "no:such:port"),
    ],
    ids=["key", "empty-key", "genesis", "chain", "typo", "address"],
)
def test_damaged_state_files_are_reported_and_left_unchanged(home: Path, damage: Damage, word: str) -> None:
    state = home / "a"
    ok(state, "init", "lab")
    damage(Layout(state))
    before = {path.name: path.read_bytes() for path in state.iterdir() if path.is_file()}
    done = mesh(state, "up", *LOCAL)
    assert done.returncode == 1 and word in done.stderr and "Traceback" not in done.stderr, done.stderr
    after = {path.name: path.read_bytes() for path in state.iterdir() if path.is_file()}
    assert {name: after.get(name) for name in before} == before


def test_damaged_journal_and_regenerable_files_do_not_prevent_a_start(home: Path) -> None:
    """The journal is moved aside and reported; the other files are made anew."""
    state = found(home)
    ok(state, "down")
    (state / "journal.sqlite").write_bytes(b"rubbish" * 1000)
    for name in ("gossip/snapshot.json", "seeds", "store/index.sqlite"):
        assert (state / name).exists(), name
        (state / name).write_bytes(b"\xff\x00rubbish")
    ok(state, "up", *LOCAL)
    assert "damaged journal moved to" in ok(state, "job", "events")
    assert [path.read_bytes()[:7] for path in state.glob("journal.damaged-*")] == [b"rubbish"]


def test_unwritable_state_directory_is_reported(home: Path) -> None:
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
def test_full_or_read_only_disk_stops_the_daemon_and_loses_no_state(home: Path) -> None:
    """In its own mount namespace, the daemon's disk fills up at run time, becomes read-only, then recovers."""
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
        jobs = [run("submit", "--no-workdir", "--", "sleep", "300").stdout.strip() for _ in range(4)]
        pid = int(run("status", "--json").stdout.split('"pid": ')[1].split(",")[0])
        words = ("dd", "if=/dev/zero", f"of={disk}/filler", "bs=4096", "oflag=append", "conv=notrunc")
        fill = ["nsenter", "-t", str(keeper.pid), "-m", *words]
        subprocess.run(fill, capture_output=True, check=False)
        refused = run("submit", "--no-workdir", "--", "true")
        assert refused.returncode != 0 and "Traceback" not in refused.stderr
        for job in jobs:  # one change may fit into what the daemon has freed since
            subprocess.run(fill, capture_output=True, check=False)
            run("cancel", job)
        until(lambda: gone(pid), "the daemon to stop, since it cannot persist its promises")
        full = run("up", *LOCAL)
        assert full.returncode == 1 and "disk is full" in full.stderr and "--state" in full.stderr, full.stderr
        assert "Traceback" not in full.stderr
        inside(keeper.pid, "rm", f"{disk}/filler")
        inside(keeper.pid, "mount", "-o", "remount,ro", str(disk))
        again = run("up", *LOCAL)
        assert again.returncode == 1 and "read-only" in again.stderr.lower() and "--state" in again.stderr, again.stderr
        inside(keeper.pid, "mount", "-o", "remount,rw", str(disk))
        assert run("up", *LOCAL).returncode == 0
        until(lambda: jobs[0] in run("ps", "-a", "--json").stdout, "the job to be listed after the restart")
        assert run("down", "--now").returncode == 0
    finally:
        keeper.kill()
        keeper.wait()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_ctrl_c_in_the_foreground_leaves_gracefully(home: Path) -> None:
    state = home / "a"
    ok(state, "init", "lab")
    process = start(state, "up", *LOCAL, "--foreground")
    until(lambda: mesh(state, "status").returncode == 0, "the daemon to answer")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0 and "leaving" in err and not (state / "mesh.sock").exists()


def test_command_line_options_override_the_settings_file(home: Path) -> None:
    state = home / "a"
    ok(state, "init", "lab", "--nick", "desk")
    text = 'bind = "127.0.0.1"\nport = 0\napi_port = 0\nprofile = "local"\nlend = true\nslots = 3\nzone = "east"\n'
    (state / "config.toml").write_text(text)

    def row() -> dict[str, Any]:
        return next(row for row in read(state, "nodes")["nodes"] if row["me"])

    ok(state, "up")
    until(
        lambda: (row()["slots"], row()["zone"], row()["lending"]) == (3, "east", True), "the advert with these settings"
    )
    ok(state, "down")
    ok(state, "up", "--slots", "5")
    until(lambda: row()["slots"] == 5, "the advert with these settings")
