"""Nodes that an option lists by words."""

from types import SimpleNamespace
from typing import Any

import pytest

from mesh.api.handlers.lookup import NodeLookup
from mesh.util.errors import MeshError


@pytest.mark.parametrize(
    ("trusted", "words"),
    [
        ((), "`mesh config set trusted USER NODE ...` names them, from the next start of the daemon on"),
        (("alice", "lab"), "`trusted` names alice, lab, and no member has such a name"),
    ],
)
def test_word_that_means_no_node_says_why(trusted: tuple[str, ...], words: str) -> None:
    desk = SimpleNamespace(node_id=b"d" * 32, nick="desk", user="ada", state="alive")
    membership: Any = SimpleNamespace(members=lambda: [desk])
    with pytest.raises(MeshError, match="no node is trusted") as refused:
        NodeLookup(membership, trusted).named(["trusted"])
    assert words in str(refused.value)
    assert NodeLookup(membership, [*trusted, "ada"]).named(["trusted"]) == [desk.node_id]
