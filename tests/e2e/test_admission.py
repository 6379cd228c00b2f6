"""Getting in without an invite: knocking and approval, allow lists, open meshes; roles; certificates that are renewed."""

import time
from pathlib import Path

import pytest

from membership.identity import Identity
from membership.trust import accept_invite, parse_invite
from mesh.layout import Layout, save_membership
from tests.e2e.commands import WAIT_S, mesh, ok, read, start, until
from tests.e2e.test_joining import LOCAL, alive

pytestmark = pytest.mark.e2e


@pytest.fixture
def founder(home: Path) -> Path:
    state = home / "a"
    ok(state, "init", "lab", "--nick", "desk", "--user", "ada")
    return state


def address(state: Path) -> str:
    return str(read(state, "status")["address"])


def test_whoever_knocks_waits_until_somebody_approves_on_any_node_that_may(home: Path, founder: Path) -> None:
    ok(founder, "up", *LOCAL)
    second, third = home / "b", home / "c"
    ok(second, "join", ok(founder, "invite").strip(), "--nick", "rack", "--user", "bob")
    ok(second, "up", *LOCAL)
    until(lambda: alive(founder) == {"desk", "rack"}, "both to see each other")
    # It knocks at a node that may not admit; the founder sees it.
    knocking = start(third, "join", address(second), "--nick", "mallory", "--user", "root")
    until(lambda: read(founder, "pending")["pending"], "the founder to hear of it")
    (row,) = read(founder, "pending")["pending"]
    assert row["nick"] == "mallory" and row["node"] == ok(third, "key", "show").strip()
    assert "1 wait to be let in" in ok(founder, "status")
    refused = mesh(second, "approve", "mallory")
    assert refused.returncode == 5 and "may not admit" in refused.stderr
    assert mesh(founder, "approve", "nobody").returncode == 4
    told = ok(founder, "approve", row["node"][:9], "--nick", "laptop", "--user", "cyd", "--role", "user")
    assert told.startswith("let in laptop (user cyd")
    out, err = knocking.communicate(timeout=WAIT_S)
    assert knocking.returncode == 0 and "joined mesh 'lab'" in out and row["node"][:7] in err
    ok(third, "up", *LOCAL)
    until(lambda: alive(founder) == {"desk", "rack", "laptop"}, "all to see all")
    assert read(founder, "pending")["pending"] == []
    rows = {row["nick"]: row for row in read(founder, "trust", "ls")["members"]}
    assert rows["laptop"]["user"] == "cyd" and rows["laptop"]["roles"] == ["user"] and rows["laptop"]["ends_unix"]
    assert rows["desk"]["founder"] and not rows["rack"]["can_admit"]


def test_an_interrupted_knock_goes_on_with_the_same_key(home: Path, founder: Path) -> None:
    import signal

    ok(founder, "up", *LOCAL)
    second = home / "b"
    knocking = start(second, "join", address(founder), "--nick", "rack")
    until(lambda: read(founder, "pending")["pending"], "the knock")
    knocking.send_signal(signal.SIGINT)
    _, err = knocking.communicate(timeout=WAIT_S)
    assert knocking.returncode == 5 and "still waits" in err
    ok(founder, "approve", "rack")
    assert "joined mesh 'lab'" in ok(second, "join", address(founder), "--nick", "rack")


def test_an_allow_list_lets_in_who_is_on_it_and_a_mistake_in_it_nobody(home: Path, founder: Path) -> None:
    second, third = home / "b", home / "c"
    listed = ok(second, "key", "show").strip()
    (founder / "allow").write_text(f"# the lab\n{listed} nick=rack user=bob roles=provider\n")
    ok(founder, "up", *LOCAL)
    ok(second, "join", address(founder), "--nick", "whatever", "--user", "root")
    ok(second, "up", *LOCAL, "--lend")
    until(lambda: alive(founder) == {"desk", "rack"}, "both to see each other")
    refused = mesh(second, "submit", "--no-workdir", "--", "true")
    assert refused.returncode == 5 and "not submit" in refused.stderr
    (founder / "allow").write_text("what is this\n")
    knocking = start(third, "join", address(founder), "--nick", "laptop")
    until(lambda: "allow" in read(founder, "status")["problem"], "the mistake to be told")
    assert "line 1" in read(founder, "status")["problem"] and read(founder, "pending")["pending"]
    knocking.kill()
    knocking.communicate()
    ok(founder, "down")
    failed = mesh(founder, "up", *LOCAL)
    assert failed.returncode == 1 and "line 1" in failed.stderr, "at a start, a mistake is an error"


def test_an_open_mesh_says_so_and_lets_in_everybody(home: Path, founder: Path) -> None:
    assert "OPEN MESH" in mesh(founder, "up", *LOCAL, "--open").stderr
    second = home / "b"
    assert "joined mesh 'lab'" in ok(second, "join", address(founder), "--nick", "rack")
    assert "OPEN MESH" in mesh(founder, "status").stderr
    status = read(founder, "status")
    other = mesh(home / "c", "join", address(founder), "--mesh-id", "ffff")
    assert other.returncode == 5 and status["mesh_id"] in other.stderr


def test_joining_where_nobody_is_or_with_nonsense_is_told(home: Path) -> None:
    for text, code, words in (
        ("127.0.0.1:1", 1, "cannot reach"),
        ("???:x", 2, "neither an invite"),
        ("mesh1-AAAA", 5, "damaged"),
    ):
        done = mesh(home / "x", "join", text)
        assert done.returncode == code and words in done.stderr, text


def test_an_invite_can_be_for_one_user_and_one_role(home: Path, founder: Path) -> None:
    ok(founder, "up", *LOCAL)
    text = ok(founder, "invite", "--user", "bob", "--role", "user").strip()
    refused = mesh(home / "b", "join", text, "--user", "eve")
    assert refused.returncode == 5 and "for user 'bob'" in refused.stderr
    ok(home / "b", "join", text, "--nick", "rack")
    up = mesh(home / "b", "up", *LOCAL, "--lend")
    assert up.returncode == 0 and "may not lend" in up.stderr
    until(lambda: alive(founder) == {"desk", "rack"}, "both to see each other")
    rows = {row["nick"]: row for row in read(founder, "nodes")["nodes"]}
    assert not rows["rack"]["lending"] and not rows["rack"]["engines"], "its offer counts for nothing"
    assert read(home / "b", "status")["roles"] == ["user"] and read(home / "b", "status")["user"] == "bob"


def test_a_certificate_is_renewed_by_whoever_may_admit_and_outlives_its_invite(home: Path, founder: Path) -> None:
    ok(founder, "up", *LOCAL)
    invite = parse_invite(ok(founder, "invite", "--ttl", "1m").strip(), time.time())
    second = Layout(home / "b")
    second.root.mkdir()
    identity = Identity.generate()
    identity.save(second.key)
    chain = accept_invite(invite, identity.node_id, "rack", "bob", time.time())
    save_membership(second, identity, invite.genesis, chain, invite.seeds)
    ok(second.root, "up", *LOCAL)
    day = 86_400
    until(
        lambda: read(second.root, "status")["certificate_ends_unix"] > time.time() + 80 * day,
        "its certificate's renewal",
    )
    assert second.chain.read_bytes() != chain, "and kept on disk"
    ok(second.root, "down")
    ok(second.root, "up", *LOCAL)
    assert read(second.root, "status")["certificate_ends_unix"] > time.time() + 80 * day
    rows = {row["nick"]: row for row in read(founder, "trust", "ls")["members"]}
    assert rows["rack"]["ends_unix"] > time.time() + 80 * day
