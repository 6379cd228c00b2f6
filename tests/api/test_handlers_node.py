"""What a node says about itself."""

from types import SimpleNamespace
from typing import Any

from membership.identity import short_id
from mesh.api.handlers.node import NodeHandlers


def test_node_names_others_with_its_nick() -> None:
    def problems(*nicks: str) -> dict[str, str]:
        members = [SimpleNamespace(node_id=bytes([number]) * 32, nick=nick) for number, nick in enumerate(nicks)]
        membership = SimpleNamespace(credentials=SimpleNamespace(nick="desk"), members=lambda: members)
        handlers: Any = SimpleNamespace(_membership=membership, _me=bytes(32))
        return NodeHandlers._namesakes(handlers)

    assert problems("desk", "lab") == {}
    (words,) = problems("desk", "lab", "desk").values()
    assert (
        words.startswith(f"1 other node called desk ({short_id(bytes([2]) * 32)}): commands need") and "--nick" in words
    )
