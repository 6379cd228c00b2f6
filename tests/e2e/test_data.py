"""Data sets on real daemons: added, fetched from several holders, read by jobs, refused to others, and evicted."""

import hashlib
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptstore.dataset_adder import SETTLED_NS
from membership.identity import Identity
from mesh.daemon.layout import save_membership
from mesh.daemon.stack import Stack, StackNode
from mesh.data.keys import KeptKey
from mesh.util.redaction import spellings
from tests.chains import admitted
from tests.container_images import layered_image
from tests.dockerd import client_of, dockerd
from tests.e2e.commands import finished, mesh, metric, ok, read, send, start, until
from tests.e2e.test_secrets import arguments_of_all, found_in

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
    assert "node2 would fetch 29" not in why, "a paused node is refused anyway"
    ok(two, "data", "pin", name)
    assert row(two, name)["here"] is True and row(two, name)["pinned"] is True
    until(lambda: len(row(one, name)["nodes"]) == 3, "three holders")
    assert "all are good" in ok(two, "data", "verify", name)
    damage(two)
    read(three, "data", "rm", "--here", name)
    ok(three, "data", "pin", name)  # what the damaged holder cannot give comes from the other
    assert "all are good" in ok(three, "data", "verify", name)
    report = read(two, "data", "verify", name)
    assert report["damaged"] >= 1 and report["fetched_again"] >= 1
    assert "all are good" in ok(two, "data", "verify", name)

    # Its owner removes it everywhere.
    ok(three, "data", "rm", "pictures")
    for node in stack.nodes:
        until(lambda node=node: not row(node, name) and not list((node.where.data / "sets").glob("*.pack")), "removal")
    done = mesh(one, "run", "--no-workdir", "--data", name, "--", "true")
    assert done.returncode == 125 and f"there is no data set {name}" in done.stderr


def test_nodes_that_fetch_at_once_give_each_other_what_they_have(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    size = 72 << 20
    (tmp_path / "large").write_bytes(random.Random(5).randbytes(size))
    one, *others = make_stack(3, upload_mbps=80.0).nodes
    user = read(one, "status")["user"]
    read(one, "data", "add", "large", str(tmp_path / "large"))
    for node in others:
        until(lambda node=node: row(node, f"{user}/large"), "the others to know it")
    fetches = [start(node, "data", "pin", "large") for node in others]
    assert [fetch.wait(300) for fetch in fetches] == [0, 0]
    sent = lambda *nodes: sum(metric(node, "mesh_transfer_sent_bytes_total") for node in nodes)  # noqa: E731
    until(lambda: sent(one, *others) >= 2 * size, "the senders to count the last chunks")
    assert sent(*others) > size / 10
    for node in others:
        assert "all are good" in ok(node, "data", "verify", "large")


def damage(node: StackNode) -> None:
    pack = max((node.where.data / "packs").glob("*.pack"), key=lambda path: path.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(pack.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


PROOF = 'cd "$MESH_DATA_PATIENTS"; cat * | sha256sum; until [ -e "$UNTIL" ]; do sleep 0.1; done'


def of_three_users(make_stack: Callable[..., Stack], tmp_path: Path, *users: str) -> Stack:
    """Return the running nodes of three users: the founder and these."""
    overrides = {"slots": 1, "process_engine_for": "all", "encrypt": False, "process_sees": [str(tmp_path)]}
    stack, now = Stack(3, overrides=overrides), time.time()
    make_stack.stacks.append(stack)  # type: ignore[attr-defined]
    stack.found()
    owner, *others = stack.nodes
    founder, genesis = Identity.load(owner.where.key), owner.where.genesis.read_bytes()
    for node, user in zip(others, users, strict=True):
        identity, chain = Identity.load(node.where.key), owner.where.chain.read_bytes()
        save_membership(node.where, genesis, admitted(founder, genesis, chain, identity.node_id, user, user, now), ())
    stack.start_all()
    return stack


def test_canary_of_a_private_set_is_on_no_disk_after_the_job(make_stack: Callable[..., Stack], tmp_path: Path) -> None:
    """The owner, a reader and a lender, each another user. The key comes with the job, and no node keeps it for that."""
    stack = of_three_users(make_stack, tmp_path, "bob", "lend")
    owner, reader, lender = stack.nodes
    founder = Identity.load(owner.where.key)
    name, source, end = f"{read(owner, 'status')['user']}/patients", tmp_path / "patients", tmp_path / "end"
    source.mkdir()
    content, canary = os.urandom(600_000), f"canary-{os.urandom(12).hex()}"
    (source / canary).write_bytes(canary.encode() * 100)
    (source / "large").write_bytes(canary.encode() + content)
    wanted = [*spellings(canary.encode()), content[:40], content[-40:]]
    read(owner, "data", "add", "patients", str(source), "--reader", "bob")
    (sealed,) = (owner.where.data / "keys").iterdir()
    kept = msgspec.msgpack.decode(founder.decrypt(sealed.read_bytes()), type=KeptKey)
    wanted += [*spellings(kept.key), kept.key]
    for node in (owner, reader):
        ok(node, "pause")
    until(lambda: row(reader, name) and row(lender, name), "it to be known")
    until(lambda: sum(r["paused"] for r in read(reader, "nodes")["nodes"]) == 2, "the pauses")

    options = ("--no-workdir", "--env", f"UNTIL={end}", "--data", name)
    job = ok(reader, "submit", *options, "--", "sh", "-c", PROOF).strip()
    files = b"".join(path.read_bytes() for path in sorted(source.iterdir()))
    proof = hashlib.sha256(files).hexdigest()
    until(lambda: proof in ok(reader, "logs", job), "the job to have read it")
    trees = lender.where.data / "trees"
    shown = found_in(lender.where.root, wanted)
    assert shown and all(trees in Path(path).parents for path in shown)
    realms = [{path.name for path in (node.where.data / "keys").glob("*")} for node in stack.nodes]
    assert len(realms[0]) == 1 and realms[1] == realms[0] and realms[2] == set(), "the lender has the key in memory"
    assert not [one for one in wanted if one in arguments_of_all()]
    end.touch()
    assert finished(reader, job)["outcome"]["kind"] == "done"
    until(lambda: not list(trees.iterdir()), "the files to be removed")
    assert not found_in(reader.where.root, wanted) and not found_in(lender.where.root, wanted)
    assert {Path(path).name.removesuffix("-wal") for path in found_in(owner.where.root, wanted)} <= {"sources.sqlite"}

    # The lender keeps, verifies and gives what it cannot read.
    until(lambda: row(reader, name)["nodes"] == ["lend", "node1"], "the lender to be a holder")
    held = read(lender, "data", "show", name)
    assert held["here"] and held["encrypted"] and held["entries"] is None
    assert "all are good" in ok(lender, "data", "verify", name)
    refused = mesh(lender, "data", "show", name, canary)
    assert refused.returncode == 5 and "a job has to bring its key" in refused.stderr
    assert canary in [entry["name"] for entry in read(owner, "data", "show", "patients")["entries"]]

    # A reader who was left out can open no later version.
    read(owner, "data", "add", "patients", str(source))
    first = held["id"]
    until(lambda: row(reader, name)["id"] != first and row(lender, name)["id"] != first, "the new version to be known")
    later = {path.name for path in (owner.where.data / "keys").iterdir()} - realms[0]
    assert len(later) == 1 and {path.name for path in (reader.where.data / "keys").iterdir()} == realms[0]
    for command in (("submit", *options, "--", "true"), ("data", "pin", name)):
        assert mesh(reader, *command).returncode == 5
    job = ok(owner, "submit", *options, "--", "sh", "-c", PROOF).strip()
    assert finished(owner, job)["attempts"][-1]["node"] == "lend" and proof in ok(owner, "logs", job)
    until(lambda: not list(trees.iterdir()), "the files to be removed")
    assert not found_in(lender.where.root, wanted)


def test_members_of_a_group_read_until_they_are_left_out(make_stack: Callable[..., Stack], tmp_path: Path) -> None:
    """The owner of a group and of a data set, and two other users. A change of the group needs no new version of the data set."""
    stack = of_three_users(make_stack, tmp_path, "bob", "carol")
    owner, bob, carol = stack.nodes
    user, source = read(owner, "status")["user"], tmp_path / "scans"
    name, group = f"{user}/scans", f"{user}/vision"
    source.write_bytes(os.urandom(100_000))
    add = ("data", "add", "scans", str(source), "--reader", "group:vision")
    none = mesh(owner, *add)
    assert none.returncode == 4 and "there is no group vision" in none.stderr
    assert ok(owner, "data", "group", "set", "vision", "bob") == f"{group} has 1 member: bob\n"
    first = read(owner, *add)["id"]
    assert row(owner, name)["readers"] == [f"group:{group}"]

    def readable(node: StackNode) -> bool:
        return bool(row(node, name).get("readable"))

    def runs(node: StackNode) -> subprocess.CompletedProcess[str]:
        return mesh(
            node, "run", "--no-workdir", "--data", name, "--", "sh", "-c", 'cat "$MESH_DATA_SCANS"/* | sha256sum'
        )

    proof = hashlib.sha256(source.read_bytes()).hexdigest()
    until(lambda: readable(bob), "bob to be a member")
    until(lambda: row(carol, name), "carol to know the data set")
    ok(bob, "data", "pin", name)
    assert proof in runs(bob).stdout
    refused = mesh(carol, "data", "pin", name)
    assert refused.returncode == 5 and "is not for carol" in refused.stderr and runs(carol).returncode == 125
    others = mesh(carol, "data", "group", "set", group, "carol")
    assert others.returncode == 5 and "only they can change it" in others.stderr

    # Who comes into the group reads what there is.
    ok(owner, "data", "group", "set", "vision", "bob", "carol")
    until(lambda: readable(carol), "carol to be a member")
    assert row(carol, name)["id"] == first
    shown = read(carol, "data", "group", "show", group)
    assert shown["members"] == ["bob", "carol"] and shown["data"] == [name] and not shown["mine"]
    assert proof in runs(carol).stdout
    ok(carol, "data", "pin", name)

    # Who is left out gets it no more, and not with the next version either, which has another key.
    ok(owner, "data", "group", "set", "vision", "carol")
    until(lambda: not readable(bob), "bob to be left out")
    refused = mesh(bob, "data", "pin", name)
    assert refused.returncode == 5 and "is not for bob" in refused.stderr and runs(bob).returncode == 125
    realms = [{path.name for path in (node.where.data / "keys").iterdir()} for node in stack.nodes]
    assert len(realms[0]) == 1 and realms == [realms[0]] * 3
    second = read(owner, *add)["id"]
    assert len(list((owner.where.data / "keys").iterdir())) == 2
    until(lambda: row(bob, name)["id"] == row(carol, name)["id"] == second, "the new version to be known")
    ok(carol, "data", "pin", name)
    assert not readable(bob) and len(list((bob.where.data / "keys").iterdir())) == 1
    assert len(list((carol.where.data / "keys").iterdir())) == 2

    # A node that has the data set keeps the group, and tells others while the owner is away.
    send(signal.SIGTERM, *stack.nodes)
    for node in stack.nodes:
        assert node.process is not None and node.process.wait(60) == 0
    for node in (bob, carol):
        stack.start(node)
    for node in (bob, carol):
        until(lambda node=node: mesh(node, "status").returncode == 0, "the restarted daemon to answer")
    assert readable(carol)
    until(lambda: read(bob, "data", "group", "ls")["groups"], "bob's node to hear of it")
    assert not readable(bob)
    stack.start(owner)
    until(lambda: mesh(owner, "data", "group", "rm", "vision").returncode == 0, "the owner to be back")
    until(lambda: not readable(carol) and not read(carol, "data", "group", "ls")["groups"], "the group to be removed")
    assert runs(carol).returncode == 125 and readable(owner)


def test_full_quota_evicts_what_another_node_keeps_and_never_the_last_copy(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    stack = make_stack(2, data_quota_gib=0.1)
    one, two = stack.nodes
    rng = random.Random(5)
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(rng.randbytes(40 << 20))
        read(one, "data", "add", name, str(tmp_path / name))
    user = read(one, "status")["user"]
    until(lambda: row(two, f"{user}/second"), "both to be known")
    ok(two, "data", "pin", "first")
    ok(two, "data", "pin", "second")
    (tmp_path / "third").write_bytes(rng.randbytes(40 << 20))
    full = mesh(one, "data", "add", "third", str(tmp_path / "third"))
    assert full.returncode == 1 and "data_quota_gib" in full.stderr
    read(two, "data", "rm", "--here", "second")
    alone = mesh(one, "data", "rm", "--here", "second")
    assert alone.returncode == 5 and "--force drops the last copy" in alone.stderr
    ok(two, "data", "pin", "second")

    # Space is needed for the files of a job: of what is not pinned, the longest unused goes, since node1 has it pinned.
    ok(two, "data", "pin", "--off", "first")
    ok(one, "pause")
    until(lambda: any(r["nick"] == "node1" and r["paused"] for r in read(two, "nodes")["nodes"]), "the pause")
    job = ok(two, "submit", "--no-workdir", "--data", "second", "--", "sh", "-c", 'wc -c "$MESH_DATA_SECOND"/*').strip()
    assert finished(two, job)["outcome"]["kind"] == "done"
    assert str(40 << 20) in ok(two, "logs", job)
    assert row(two, f"{user}/first")["here"] is False and row(one, f"{user}/first")["here"] is True
    assert row(two, f"{user}/second")["here"] is True


@pytest.mark.dockerd
def test_container_sees_data_sets_and_offered_directories_read_only(pictures: Path, tmp_path: Path) -> None:
    offered = tmp_path / "offered"
    offered.mkdir()
    (offered / "word").write_text("plain directory\n")
    (pictures / "cats" / "word").write_text("from the set\n")
    settings = {"engines": ["process", "docker"], "data": {"words": str(offered)}}
    with dockerd() as engine, client_of(engine.host) as client, Stack(1, overrides=settings) as stack:
        (node,) = stack.nodes
        node.within = ("env", f"DOCKER_HOST={engine.host}")
        image = "lab/tool:1"
        layered_image(client, image, b"large", b"small")
        stack.start_all()
        read(node, "data", "add", "pictures", str(pictures))
        assert read(node, "data", "ls")["paths"] == {"words": str(offered)}
        until(lambda: mesh(node, "run", "--no-workdir", "--image", image, "--", "true").returncode == 0, "the image")
        script = 'cat "$MESH_DATA_WORDS/word" /data/x/cats/word && echo "at $MESH_DATA_PICTURES" && ! touch /data/x/n 2>/dev/null'
        options = ("--no-workdir", "--image", image, "--data", "pictures:/data/x", "--data", "words")
        done = mesh(node, "run", *options, "--", "sh", "-c", script)
        assert done.returncode == 0, done
        assert "plain directory\nfrom the set\nat /data/x\n" in done.stdout
        plain = 'cat "$MESH_DATA_WORDS/word" && ! touch "$MESH_DATA_WORDS/new"'
        assert mesh(node, "run", "--no-workdir", "--data", "words", "--", "sh", "-c", plain).returncode == 0
        assert list(offered.iterdir()) == [offered / "word"]
        for words, arguments in (
            ("add --image NAME", ("--data", "pictures:/data/x")),
            ("a plain path below /data", ("--image", image, "--data", "pictures:/etc")),
            ("two data sets would have the same", ("--data", "pictures", "--data", "pictures")),
            ("cannot be a data set's name", ("--data", "Pictures")),
            ("there is no data set nothing", ("--data", "nothing")),
        ):
            refused = mesh(node, "submit", "--no-workdir", *arguments, "--", "true")
            assert refused.returncode in {1, 2, 4, 6} and words in refused.stderr, refused


def noted(table: Path) -> bool:
    """Tell whether an add has noted which files its packs hold."""
    try:
        with closing(sqlite3.connect(f"file:{table}?mode=ro", uri=True)) as opened:
            return bool(opened.execute("SELECT COUNT(*) FROM entries").fetchone()[0])
    except sqlite3.OperationalError:  # not made yet
        return False


@pytest.mark.long
def test_killed_daemon_continues_an_add(make_stack: Callable[..., Stack], tmp_path: Path) -> None:
    stack = make_stack(1)
    (node,) = stack.nodes
    source = tmp_path / "source"
    source.write_bytes(os.urandom(600 << 20))
    settled = source.stat().st_ctime_ns + SETTLED_NS
    until(lambda: time.time_ns() > settled, "the file to count as unchanged")
    adding = start(node, "data", "add", "source", str(source))
    until(lambda: noted(node.where.data / "sources.sqlite"), "a pack, and what it holds, to be noted")
    send(signal.SIGKILL, node)
    adding.wait()
    stack.start(node)
    until(lambda: mesh(node, "status").returncode == 0, "the restarted daemon to answer")
    added = read(node, "data", "add", "source", str(source))
    assert added["read_bytes"] <= 400 << 20, "at most a pack is read again"
    assert "all are good" in ok(node, "data", "verify", "source")
