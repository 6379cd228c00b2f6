"""Orders about the membership of the mesh that are refused before anything is signed."""

from types import SimpleNamespace
from typing import Any

import pytest

from mesh.api.handlers.trust import TrustHandlers
from mesh.api.requests import InviteOrder
from mesh.util.errors import ExitCode, MeshError

YEAR_S = 365 * 86_400.0


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (InviteOrder(ttl_s=59.0), "from a minute to a year"),
        (InviteOrder(ttl_s=YEAR_S + 1), "from a minute to a year"),
        (InviteOrder(ttl_s=float("nan")), "from a minute to a year"),
        (InviteOrder(ttl_s=60.0, user="bob", mine=True), "not both"),
        (InviteOrder(ttl_s=YEAR_S, mine=True, uses=2), "its own invite"),
    ],
)
def test_invite_with_wrong_terms_is_refused(order: InviteOrder, words: str) -> None:
    nothing: Any = None
    with pytest.raises(MeshError, match=words) as refused:
        TrustHandlers(nothing, nothing, nothing).invite(order)
    assert refused.value.code == ExitCode.USAGE


@pytest.mark.parametrize("order", ["revoke", "promote"])
def test_beginning_of_a_nick_names_no_node_in_orders_that_cannot_be_taken_back(order: str) -> None:
    nothing: Any = None
    desk = SimpleNamespace(node_id=b"d" * 32, nick="desk", user="ada")
    membership: Any = SimpleNamespace(members=lambda: [desk])
    handlers = TrustHandlers(nothing, nothing, membership)
    with pytest.raises(MeshError, match="no node called 'des'") as refused:
        handlers.revoke("des", "it is lost") if order == "revoke" else handlers.promote("des")
    assert refused.value.code == ExitCode.NOT_FOUND
