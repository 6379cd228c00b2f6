"""Caches on real daemons: filled by jobs on other people's nodes, and found there by later jobs of the same user alone."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from membership.identity import Identity
from mesh.daemon.layout import save_membership
from mesh.daemon.stack import Stack, StackNode
from mesh.data.cache_files import MAX_ENTRIES
from tests.chains import admitted
from tests.container_images import layered_image
from tests.dockerd import client_of, dockerd
from tests.e2e.commands import finished, mesh, ok, read, until
from tests.e2e.test_data import row
from tests.e2e.test_kill_points import KILLED_S
from tests.e2e.test_secrets import found_in
from tests.kill_points import killed_before
from tests.tiers import FRAMEWORKS_PYTHON

pytestmark = pytest.mark.e2e


@pytest.fixture
def lenders(tmp_path: Path) -> Iterator[Stack]:
    """Three nodes of three users: only those of bob and carol lend."""
    sees = [str(path) for path in (tmp_path, FRAMEWORKS_PYTHON.parents[1]) if path.exists()]
    overrides = {"slots": 2, "process_engine_for": "all", "process_sees": sees}
    with Stack(3, overrides=overrides) as stack:
        stack.found()
        owner, *others = stack.nodes
        founder, genesis = Identity.load(owner.where.key), owner.where.genesis.read_bytes()
        for node, user in zip(others, ("bob", "carol"), strict=True):
            identity, chain = Identity.load(node.where.key), owner.where.chain.read_bytes()
            made = admitted(founder, genesis, chain, identity.node_id, user, user, time.time())
            save_membership(node.where, genesis, made, ())
        stack.start_all()
        ok(owner, "pause")
        until(lambda: len(read(owner, "nodes")["nodes"]) == 3, "all nodes to be known")
        yield stack


def run(node: StackNode, script: str, *options: str, cache: str = "huggingface") -> dict[str, Any]:
    """Run a script with a cache to its end, and until that is written back."""
    job = ok(node, "submit", "--no-workdir", "--cache", cache, *options, "--", "sh", "-ec", script).strip()
    mesh(node, "wait", job)
    state = finished(node, job)
    return {**state, "log": ok(node, "logs", job), "events": events(node, job)}


def events(node: StackNode, job: str) -> list[str]:
    return [event["new"] for event in read(node, "job", "events", job)["events"]]


DOWNLOAD = """
test "$HF_HOME" = "$MESH_CACHE_HUGGINGFACE"; cd "$HF_HOME"; test -z "$(ls -A)"
mkdir -p blobs snapshots/main; printf '%s-%s' "$ONE" "$TWO" > blobs/weights; chmod 000 blobs/weights
printf 'a\\nb' > "$(printf 'two\\nlines')"
ln -s ../../blobs/weights snapshots/main/model; ln -s "$HF_HOME/blobs" absolute
ln -s /etc/passwd leads-out; ln -s ../pip up; mkfifo pipe; truncate -s 1G sparse
"""
FIND = """
cd "$HF_HOME"; test "$(cat snapshots/main/model)" = "$ONE-$TWO"; test "$(cat absolute/weights)" = "$ONE-$TWO"
test "$(wc -c < sparse)" = 1073741824; test "$(cat two*)" = "$(printf 'a\\nb')"
! test -e pipe; ! test -L leads-out; ! test -L up
echo changed > blobs/weights; rm -r sparse; echo more > more
"""


def test_cache_filled_on_one_node_is_found_on_another_by_jobs_of_its_user_alone(lenders: Stack) -> None:
    owner, bob, carol = lenders.nodes
    user, one, two = read(owner, "status")["user"], os.urandom(12).hex(), os.urandom(12).hex()
    told = ("--env", f"ONE={one}", "--env", f"TWO={two}")
    first = run(owner, DOWNLOAD, "--on", "bob", *told)
    assert first["outcome"]["kind"] == "done" and first["attempts"][-1]["node"] == "bob", first
    assert "written back" in first["events"] and "left out" in first["events"]
    known = row(owner, f"{user}/huggingface")
    assert known["cache"] and known["encrypted"] and known["readers"] == [] and not known["everybody"]
    assert "owner (cache)" in ok(owner, "data", "ls")

    second = run(owner, FIND, "--on", "carol", *told)
    assert second["outcome"]["kind"] == "done" and second["attempts"][-1]["node"] == "carol", second
    third = run(
        owner, 'cd "$HF_HOME"; test "$(cat snapshots/main/model)" = changed; test -e sparse; cat more', "--on", "bob"
    )
    assert third["outcome"]["kind"] == "done" and "more" in third["log"], third
    assert "written back" not in third["events"], "nothing was new"

    # Another user's cache of this name is another one. Its owner cannot sign a version of this one.
    other = run(bob, 'test -z "$(ls -A "$HF_HOME")"; echo other > "$HF_HOME/more"', "--on", "carol")
    assert other["outcome"]["kind"] == "done", other
    assert row(bob, "bob/huggingface")["mine"] and not row(bob, f"{user}/huggingface")["readable"]
    refused = mesh(bob, "submit", "--no-workdir", "--cache", f"{user}/huggingface", "--", "true")
    assert refused.returncode == 2 and "cannot be a data set's name" in refused.stderr
    assert run(owner, 'test "$(cat "$HF_HOME/more")" = more', "--on", "carol")["outcome"]["kind"] == "done"

    # What a failed job has left counts for nothing.
    before = row(owner, f"{user}/huggingface")["id"]
    failed = run(owner, 'echo bad > "$HF_HOME/more"; exit 3', "--on", "carol")
    assert failed["outcome"]["kind"] == "failed" and row(owner, f"{user}/huggingface")["id"] == before

    # No lender keeps it in the clear; on the owner's node it is only in the packs.
    for node in (bob, carol):
        until(lambda node=node: not list(node.where.jobs.glob("*/*")), "the attempts to be removed")  # type: ignore[misc]
        assert not found_in(node.where.root, [f"{one}-{two}".encode()])
    assert not list((owner.where.data / "trees").iterdir())


def test_two_jobs_at_once_add_to_one_cache(lenders: Stack, tmp_path: Path) -> None:
    owner = lenders.nodes[0]
    script, go = (
        'cd "$PIP_CACHE_DIR"; echo "$1" | tee "$1" both; until [ -e "$2" ]; do sleep 0.1; done',
        tmp_path / "go",
    )
    options = ("--no-workdir", "--cache", "pip")
    jobs = {
        name: ok(owner, "submit", *options, "--on", name, "--", "sh", "-ec", script, "sh", name, str(go)).strip()
        for name in ("bob", "carol")
    }
    until(lambda: all(name in ok(owner, "logs", job) for name, job in jobs.items()), "both to have begun")
    go.touch()
    for job in jobs.values():
        ok(owner, "wait", job)
    found = run(owner, 'cd "$PIP_CACHE_DIR"; echo "has $(echo *)"; cat bob carol', cache="pip")
    assert "has bob both carol\nbob\ncarol\n" in found["log"], found


def test_name_of_a_data_set_is_no_cache_and_a_removed_cache_begins_anew(lenders: Stack, tmp_path: Path) -> None:
    owner, user = lenders.nodes[0], read(lenders.nodes[0], "status")["user"]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("mine")
    read(owner, "data", "add", "pictures", str(tmp_path / "source"))
    refused = mesh(owner, "submit", "--no-workdir", "--cache", "pictures", "--", "true")
    assert refused.returncode == 2 and "choose another name for the cache" in refused.stderr
    for arguments, words in (
        (("--cache", "torch", "--nodes", "2"), "several copies of a cache"),
        (("--cache", "torch", "--env", "TORCH_HOME=/x"), "set by --cache"),
        (("--cache", "torch", "--cache", "torch"), "the same variable"),
    ):
        refused = mesh(owner, "submit", "--no-workdir", *arguments, "--", "true")
        assert refused.returncode and words in refused.stderr, refused
    assert run(owner, 'echo one > "$TORCH_HOME/one"', cache="torch")["outcome"]["kind"] == "done"
    until(lambda: row(owner, f"{user}/torch"), "the first version")
    read(owner, "data", "rm", "torch")
    assert run(owner, 'test -z "$(ls -A "$TORCH_HOME")"', cache="torch")["outcome"]["kind"] == "done"


@pytest.mark.dockerd
def test_container_fills_its_cache() -> None:
    with (
        dockerd() as engine,
        client_of(engine.host) as client,
        Stack(1, overrides={"engines": ["process", "docker"]}) as stack,
    ):
        (node,) = stack.nodes
        node.within = ("env", f"DOCKER_HOST={engine.host}")
        image = "lab/tool:1"
        layered_image(client, image, b"large", b"small")
        stack.start_all()
        options = ("--no-workdir", "--image", image, "--cache", "huggingface", "--", "sh", "-ec")
        until(lambda: mesh(node, "run", "--no-workdir", "--image", image, "--", "true").returncode == 0, "the image")
        script = (
            'test "$HF_HOME" = /mesh/cache/huggingface; echo hello > $HF_HOME/word; ln -s $HF_HOME/word $HF_HOME/link'
        )
        assert (done := mesh(node, "run", *options, script)).returncode == 0, done
        done = mesh(node, "run", *options, "cat $HF_HOME/link; echo again >> $HF_HOME/word; rm $HF_HOME/link")
        assert done.returncode == 0 and "hello" in done.stdout, done
        done = mesh(node, "run", "--no-workdir", "--cache", "huggingface", "--", "sh", "-ec", 'cat "$HF_HOME/link"')
        assert done.returncode == 0 and "hello\nagain\n" in done.stdout, done


@pytest.mark.long
def test_what_cannot_be_kept_of_a_cache_costs_the_job_nothing_else(lenders: Stack) -> None:
    owner, user = lenders.nodes[0], read(lenders.nodes[0], "status")["user"]
    assert run(owner, 'echo one > "$PIP_CACHE_DIR/one"', cache="pip")["outcome"]["kind"] == "done"
    before = row(owner, f"{user}/pip")["id"]
    for script, words in (
        (f"seq {MAX_ENTRIES} | xargs touch", "more than 100000 files"),
        ("touch \"$(printf '\\377')\"", "not UTF-8"),
        ("for n in $(seq 300); do mkdir d; cd d; done; touch deep", "nested more than 256 levels"),
    ):
        state = run(owner, f'echo kept > "$MESH_OUT_DIR/file"; cd "$PIP_CACHE_DIR"; {script}', cache="pip")
        assert state["outcome"]["kind"] == "done" and "its caches are not kept" in state["events"], state
        told = [event["reason"] for event in read(owner, "job", "events", state["job"])["events"]]
        assert any(words in reason for reason in told), told
        assert ok(owner, "cp", f"{state['job']}:out/file", "-") == "kept\n"
        assert row(owner, f"{user}/pip")["id"] == before


@pytest.mark.strace
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["packs", "sets"])
def test_daemon_killed_in_a_write_back_does_it_again(lenders: Stack, place: str) -> None:
    """Before the first chunk of the new version is durable; and when the version is there, but its request still stands."""
    owner, user = lenders.nodes[0], read(lenders.nodes[0], "status")["user"]
    assert run(owner, 'echo one > "$TORCH_HOME/one"', cache="torch")["outcome"]["kind"] == "done"
    first = row(owner, f"{user}/torch")["id"]
    assert owner.process is not None
    with killed_before(owner.process.pid, "fsync", owner.where.data / place):
        script = 'echo two > "$TORCH_HOME/two"'
        job = ok(owner, "submit", "--no-workdir", "--cache", "torch", "--", "sh", "-ec", script).strip()
        until(lambda: not owner.running, "the daemon to be killed", KILLED_S)
    sets = {path.name for path in (owner.where.data / "sets").iterdir()}
    assert first in sets and len(sets) == (1 if place == "packs" else 2)
    lenders.start(owner)
    until(lambda: mesh(owner, "wait", job).returncode == 0, "the write-back")
    assert row(owner, f"{user}/torch")["id"] != first
    assert not list((owner.where.data / "trees").iterdir())
    found = run(owner, 'cd "$TORCH_HOME"; cat one two', cache="torch")
    assert "one\ntwo\n" in found["log"], found
    assert place == "packs" or row(owner, f"{user}/torch")["id"] in sets, "there is no third version"
