"""Admission: invites, join requests, allow lists and open meshes; roles; certificate renewal."""

import json
import re
import time
from pathlib import Path

import pytest

from membership.identity import Identity
from membership.trust import TrustStore, found_mesh
from mesh.daemon.layout import Layout, save_membership
from tests.chains import admitted
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


def test_join_request_waits_for_approval_on_any_admitting_node(home: Path, founder: Path) -> None:
    ok(founder, "up", *LOCAL)
    second, third = home / "b", home / "c"
    ok(second, "join", ok(founder, "member", "invite", "bob").strip(), "--nick", "rack")
    ok(second, "up", *LOCAL)
    until(lambda: alive(founder) == {"desk", "rack"}, "both nodes to see each other")
    # The request goes to a node that may not admit; the founder sees it.
    knocking = start(third, "join", address(second), "--nick", "mallory", "--user", "root")
    until(lambda: read(founder, "member", "pending")["pending"], "the founder to list the join request")
    (row,) = read(founder, "member", "pending")["pending"]
    assert row["nick"] == "mallory" and row["node"] == ok(third, "member", "key").strip()
    assert "1 join request pending" in ok(founder, "status")
    refused = mesh(second, "member", "approve", "mallory")
    assert refused.returncode == 5 and "may not admit" in refused.stderr
    assert mesh(founder, "member", "approve", "nobody").returncode == 4
    told = ok(founder, "member", "approve", row["node"][:9], "--nick", "laptop", "--user", "cyd", "--role", "user")
    assert told.startswith("admitted laptop (user cyd")
    out, err = knocking.communicate(timeout=WAIT_S)
    assert knocking.returncode == 0 and "joined mesh 'lab'" in out and row["node"][:7] in err
    ok(third, "up", *LOCAL)
    until(lambda: alive(founder) == {"desk", "rack", "laptop"}, "all nodes to see each other")
    assert read(founder, "member", "pending")["pending"] == []
    rows = {row["nick"]: row for row in read(founder, "member", "ls")["members"]}
    assert rows["laptop"]["user"] == "cyd" and rows["laptop"]["roles"] == ["user"] and rows["laptop"]["ends_unix"]
    assert rows["desk"]["founder"] and not rows["rack"]["can_admit"]
    # It leaves for good, and joins anew with another key.
    kept = Path(json.loads(ok(third, "leave", "--yes", "--json"))["state"])
    assert (kept / "node.key").exists() and not third.exists()
    until(lambda: "laptop" not in alive(founder), "the founder to see that the laptop has left")
    assert {node["state"] for node in read(founder, "nodes")["nodes"] if node["nick"] == "laptop"} == {"left"}
    ok(third, "join", ok(founder, "member", "invite", "dan").strip(), "--nick", "laptop")
    ok(third, "up", *LOCAL)
    until(lambda: "laptop" in alive(founder), "the laptop to be there again")


def test_interrupted_join_request_resumes_with_the_same_key(home: Path, founder: Path) -> None:
    import signal

    ok(founder, "up", *LOCAL)
    second = home / "b"
    knocking = start(second, "join", address(founder), "--nick", "rack")
    until(lambda: read(founder, "member", "pending")["pending"], "the join request")
    knocking.send_signal(signal.SIGINT)
    _, err = knocking.communicate(timeout=WAIT_S)
    assert knocking.returncode == 5 and "the request stays" in err
    ok(founder, "member", "approve", "rack")
    assert "joined mesh 'lab'" in ok(second, "join", address(founder), "--nick", "rack")


def test_allow_list_admits_its_entries_and_a_broken_list_admits_nobody(home: Path, founder: Path) -> None:
    second, third = home / "b", home / "c"
    listed = ok(second, "member", "key").strip()
    (founder / "allow").write_text(f"# the lab\n{listed} nick=rack user=bob roles=provider\n")
    ok(founder, "up", *LOCAL)
    ok(second, "join", address(founder), "--nick", "whatever", "--user", "root")
    ok(second, "up", *LOCAL, "--lend")
    until(lambda: alive(founder) == {"desk", "rack"}, "both nodes to see each other")
    refused = mesh(second, "submit", "--no-workdir", "--", "true")
    assert refused.returncode == 5 and "not submit" in refused.stderr
    (founder / "allow").write_text("what is this\n")
    knocking = start(third, "join", address(founder), "--nick", "laptop")
    until(lambda: "allow" in read(founder, "status")["problem"], "the broken allow list to be reported")
    assert "line 1" in read(founder, "status")["problem"] and read(founder, "member", "pending")["pending"]
    knocking.kill()
    knocking.communicate()
    ok(founder, "down")
    failed = mesh(founder, "up", *LOCAL)
    assert failed.returncode == 1 and "line 1" in failed.stderr, "a broken allow list must prevent the start"


def test_open_mesh_announces_itself_and_admits_everybody(home: Path, founder: Path) -> None:
    assert "OPEN MESH" in mesh(founder, "up", *LOCAL, "--open").stderr
    second = home / "b"
    assert "joined mesh 'lab'" in ok(second, "join", address(founder), "--nick", "rack")
    assert "OPEN MESH" in mesh(founder, "status").stderr
    status = read(founder, "status")
    other = mesh(home / "c", "join", address(founder), "--mesh-id", "ffff")
    assert other.returncode == 5 and status["mesh_id"] in other.stderr


def test_join_reports_an_unreachable_or_malformed_address(home: Path) -> None:
    for text, code, words in (
        ("127.0.0.1:1", 1, "cannot reach"),
        ("???:x", 2, "neither an invite"),
        ("mesh1-AAAA", 2, "damaged"),
    ):
        done = mesh(home / "x", "join", text)
        assert done.returncode == code and words in done.stderr, text


def test_invite_assigns_user_and_role_and_admits_once(home: Path, founder: Path) -> None:
    """The newcomer cannot choose the name, and the invite admits one machine (finding 1)."""
    ok(founder, "up", *LOCAL)
    text = ok(founder, "member", "invite", "bob", "--role", "user").strip()
    refused = mesh(home / "b", "join", text, "--user", "eve")
    assert refused.returncode == 5 and "for user 'bob'" in refused.stderr
    (home / "invite").write_text(text + "\n")
    joined = ok(home / "b", "join", "--file", str(home / "invite"), "--nick", "rack")
    assert "joined mesh 'lab' as bob" in joined
    again = mesh(home / "c", "join", "-", "--nick", "second", input_text=text)
    assert again.returncode == 5 and "bob is a user already" in again.stderr
    up = mesh(home / "b", "up", *LOCAL, "--lend")
    barred = "not lending: your certificate has no role provider"
    assert up.returncode == 0 and barred in up.stdout and barred in ok(home / "b", "status")
    lend = mesh(home / "b", "lend")
    assert lend.returncode == 5 and barred in lend.stderr and not read(home / "b", "status")["lending"]
    until(lambda: alive(founder) == {"desk", "rack"}, "both nodes to see each other")
    rows = {row["nick"]: row for row in read(founder, "nodes")["nodes"]}
    assert not rows["rack"]["lending"] and not rows["rack"]["engines"], (
        "a node without the provider role must lend nothing"
    )
    assert read(home / "b", "status")["roles"] == ["user"] and read(home / "b", "status")["user"] == "bob"
    taken = mesh(founder, "member", "invite", "bob")
    assert taken.returncode == 5 and "bob is a user already" in taken.stderr and "--mine" in taken.stderr


def test_invite_of_several_uses_gives_each_newcomer_their_own_name(home: Path, founder: Path) -> None:
    ok(founder, "up", *LOCAL)
    text = ok(founder, "member", "invite", "ml", "--uses", "2").strip()
    assert "as ml-bob" in ok(home / "b", "join", text, "--user", "bob")
    assert "as ml-bob-2" in ok(home / "c", "join", text, "--user", "bob")
    over = mesh(home / "d", "join", text, "--user", "eve")
    assert over.returncode == 5 and "2 uses of the invite are used up" in over.stderr


def test_member_adds_a_machine_of_their_own(home: Path, founder: Path) -> None:
    """A member that may not admit endorses its user's next machine, and the founder admits it."""
    ok(founder, "up", *LOCAL)
    second, third = home / "b", home / "c"
    ok(second, "join", ok(founder, "member", "invite", "bob").strip(), "--nick", "rack")
    ok(second, "up", *LOCAL)
    until(lambda: alive(founder) == {"desk", "rack"}, "both nodes to see each other")
    refused = mesh(second, "member", "invite", "cyd")
    assert refused.returncode == 5 and "--mine" in refused.stderr
    assert "as bob" in ok(third, "join", ok(second, "member", "invite", "--mine").strip(), "--nick", "shelf")
    ok(third, "up", *LOCAL)
    until(lambda: alive(founder) == {"desk", "rack", "shelf"}, "all nodes to see each other")
    rows = {row["nick"]: row for row in read(founder, "nodes")["nodes"]}
    assert rows["shelf"]["user"] == "bob"


def test_member_that_lost_its_certificate_joins_again_with_its_key(home: Path, founder: Path) -> None:
    ok(founder, "up", *LOCAL)
    second = home / "b"
    ok(second, "join", ok(founder, "member", "invite", "bob").strip(), "--nick", "rack")
    ok(second, "up", *LOCAL)
    until(lambda: alive(founder) == {"desk", "rack"}, "both nodes to see each other")
    ok(second, "down")
    (second / "genesis").unlink()
    assert "as bob" in ok(second, "join", address(founder), "--user", "eve")


def test_invite_waits_for_the_node_that_made_it(home: Path, founder: Path) -> None:
    """Another node passes the request on; nobody but the issuer admits, and a stopped issuer admits nobody."""
    ok(founder, "up", *LOCAL)
    second, third = home / "b", home / "c"
    ok(second, "join", ok(founder, "member", "invite", "bob").strip(), "--nick", "rack")
    ok(second, "up", *LOCAL)
    until(lambda: alive(founder) == {"desk", "rack"}, "both nodes to see each other")
    text = ok(founder, "member", "invite", "cyd").strip()
    ok(founder, "down")
    waiting = start(third, "join", text, "--nick", "shelf")
    assert waiting.stderr is not None
    line = waiting.stderr.readline()
    assert "waiting for desk" in line and "mesh up" in line, line
    ok(founder, "up", *LOCAL)
    out, err = waiting.communicate(timeout=WAIT_S)
    assert waiting.returncode == 0 and "joined mesh 'lab' as cyd" in out, err


def test_invite_without_a_name_waits_for_approval(home: Path, founder: Path) -> None:
    ok(founder, "up", *LOCAL)
    text = ok(founder, "member", "invite").strip()
    asking = start(home / "b", "join", text, "--nick", "rack", "--user", "ada")
    until(lambda: read(founder, "member", "pending")["pending"], "the join request")
    refused = mesh(founder, "member", "approve", "rack")
    assert refused.returncode == 5 and "ada is a user already: add --existing" in refused.stderr
    ok(founder, "member", "approve", "rack", "--user", "bob")
    out, err = asking.communicate(timeout=WAIT_S)
    assert asking.returncode == 0 and "joined mesh 'lab' as bob" in out, err


def test_open_mesh_gives_nobody_a_name_that_is_taken(home: Path, founder: Path) -> None:
    ok(founder, "up", *LOCAL, "--open")
    refused = mesh(home / "b", "join", address(founder), "--nick", "rack", "--user", "ada")
    assert refused.returncode == 5 and "ada is a user already" in refused.stderr and "--user" in refused.stderr


def test_admitting_node_renews_a_certificate(home: Path, founder: Path) -> None:
    day, old = 86_400, time.time() - 61 * 86_400
    identity = Identity.load(Layout(founder).key)
    genesis, chain = found_mesh(identity, "lab", "desk", "ada", old)
    (founder / "genesis").write_bytes(genesis)
    (founder / "chain").write_bytes(chain)
    second = Layout(home / "b")
    ok(second.root, "member", "key")
    node = Identity.load(second.key).node_id
    own = admitted(identity, genesis, chain, node, "rack", "bob", old)
    ok(founder, "up", *LOCAL)
    save_membership(second, genesis, own, (address(founder),))
    ok(second.root, "up", *LOCAL)
    until(
        lambda: read(second.root, "status")["certificate_ends_unix"] > time.time() + 80 * day,
        "the certificate to be renewed",
    )
    assert second.chain.read_bytes() != own, "the renewed certificate must be on disk"
    before, after = (TrustStore(genesis).read_chain(one) for one in (own, second.chain.read_bytes()))
    assert after.binding == before.binding and after.roles == before.roles
    ok(second.root, "down")
    ok(second.root, "up", *LOCAL)
    assert read(second.root, "status")["certificate_ends_unix"] > time.time() + 80 * day
    rows = {row["nick"]: row for row in read(founder, "member", "ls")["members"]}
    assert rows["rack"]["ends_unix"] > time.time() + 80 * day


def join_waiting(state: Path, host: Path, nick: str, user: str, approver: Path, *options: str) -> None:
    asking = start(state, "join", address(host), "--nick", nick, "--user", user)
    until(lambda: nick in ok(approver, "member", "pending"), f"the join request of {nick}")
    ok(approver, "member", "approve", nick, *options)
    out, err = asking.communicate(timeout=WAIT_S)
    assert asking.returncode == 0, out + err


@pytest.mark.long
def test_machines_of_a_revoked_admitter_return_by_a_new_approval(home: Path, founder: Path) -> None:
    """They keep their key and user; the running daemon asks again by itself (finding 16)."""
    ok(founder, "up", *LOCAL)
    second, third = home / "b", home / "c"
    join_waiting(second, founder, "rack", "bob", founder, "--admit")
    ok(second, "up", *LOCAL)
    until(lambda: alive(founder) == {"desk", "rack"}, "both nodes to see each other")
    ok(third, "join", ok(second, "member", "invite", "cyd").strip(), "--nick", "shelf")
    ok(third, "up", *LOCAL)
    until(lambda: alive(founder) == {"desk", "rack", "shelf"}, "all nodes to see each other")
    told = mesh(founder, "member", "revoke", "rack", "--yes")
    assert told.returncode == 0 and "1 member that it admitted, added or renewed" in told.stderr
    (again,) = re.findall(r"^  mesh --state \S+ (member approve \w{7})  # shelf, user cyd$", told.stderr, re.MULTILINE)
    until(lambda: alive(founder) == {"desk"}, "both to be dropped")
    until(lambda: "renewed 'shelf' was revoked" in read(third, "status")["problem"], "the machine to say why")
    assert "approve shelf" in ok(founder, "member", "ls")
    ok(founder, *again.split())
    until(lambda: alive(founder) == {"desk", "shelf"}, "the machine to return")
    until(lambda: "revoked" not in read(third, "status")["problem"], "the problem to be over")
    assert read(third, "status")["user"] == "cyd"


def test_two_of_three_founders_revoke(home: Path) -> None:
    first, second, third = home / "a", home / "b", home / "c"
    keys = [ok(state, "member", "key").strip() for state in (second, third)]
    ok(
        first,
        "init",
        "lab",
        "--nick",
        "one",
        "--founder",
        keys[0],
        "--founder",
        keys[1],
        "--quorum",
        "2",
        "--user",
        "ada",
    )
    ok(first, "up", *LOCAL)
    assert "as bob" in ok(second, "join", address(first), "--nick", "two", "--user", "bob")
    ok(second, "up", *LOCAL)
    long = time.time() + 3000 * 86_400
    until(lambda: read(second, "status")["certificate_ends_unix"] > long, "the founder to sign its own certificate")
    victim = home / "d"
    ok(victim, "join", ok(first, "member", "invite", "eve").strip(), "--nick", "victim")
    ok(victim, "up", *LOCAL)
    until(lambda: alive(second) == {"one", "two", "victim"}, "all nodes to see each other")
    alone = mesh(first, "member", "revoke", "victim", "--yes")
    assert alone.returncode == 0 and "not revoked yet: 1 of 2 founders" in alone.stdout
    assert "another founder's node" in alone.stderr and alive(first) == {"one", "two", "victim"}
    ok(second, "member", "revoke", "victim", "--yes")  # before or after it has heard of the first one's signature
    until(lambda: alive(first) == {"one", "two"}, "the revocation to take effect")
