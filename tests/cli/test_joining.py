"""`mesh join`: which certificates it takes."""

import time
from pathlib import Path

import pytest

from membership.admission import JoinAnswer
from membership.identity import Identity
from membership.trust import TrustStore, User, found_mesh
from mesh.cli import member
from mesh.daemon.layout import Layout
from mesh.util.errors import MeshError
from tests.chains import admitted

ROOT, OWN, OTHER = (Identity(bytes([number]) * 32) for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("expected", "got", "key", "joins"),
    [
        ("carol", "bob", OTHER, False),  # another person's programs would run here without a container
        ("carol", "carol", OTHER, True),  # one more machine of carol
        ("carol", "cyd", OWN, True),  # an approval under another name; the user has no other machine
        ("ml", "ml-carol", OWN, True),  # an invite for a class
        ("", "bob", OTHER, True),  # `member invite --mine` of 0.1.0
    ],
)
def test_join_takes_no_certificate_of_a_user_that_it_did_not_ask_for(
    expected: str, got: str, key: Identity, joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    genesis, chain = found_mesh(ROOT, "lab", "root", "ada", now)
    granted = admitted(ROOT, genesis, chain, OWN.node_id, "desk", User(got, key.node_id, int(now) + 1), now)
    answer = JoinAnswer(1, "admitted", genesis, chain, granted)
    monkeypatch.setattr(member, "_ask_any", lambda asked: (("h", 1), ROOT.node_id, TrustStore(genesis), answer))
    where = Layout(tmp_path)
    request = member._Request(OWN, "desk", "login", expected, (("h", 1),), "")
    if joins:
        assert member._ask_until_admitted(where, request) == ("lab", got)
    else:
        with pytest.raises(MeshError, match="a machine of bob, not of carol"):
            member._ask_until_admitted(where, request)
    assert where.genesis.exists() == joins
