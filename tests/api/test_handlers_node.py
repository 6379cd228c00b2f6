"""What a node says about itself."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from membership.identity import short_id
from mesh.api.handlers import node as module
from mesh.api.handlers.node import NodeHandlers
from mesh.api.requests import DownOrder
from placement.advert import Gpu
from placement.allocation import all_free
from tests.placement.test_placement import advert


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


def member(number: int, nick: str, **fields: Any) -> Any:
    told = {"node_id": bytes([number]) * 32, "nick": nick, "user": f"{nick}'s", "state": "alive", "draining": False}
    return SimpleNamespace(**told | {"host": "10.0.0.7", "port": 7373, "since_unix": 1.23456, "present": True} | fields)


def node(members: list[Any], adverts: Sequence[Any] = (), jobs: dict[bytes, Any] | None = None) -> NodeHandlers:
    membership = SimpleNamespace(members=lambda: members, counters=Counter(heard=2))
    mesh_view = SimpleNamespace(adverts=lambda: adverts)
    parts = SimpleNamespace(
        mesh_view=mesh_view,
        job_table=SimpleNamespace(all=lambda: jobs or {}),
        participant=SimpleNamespace(refused=3, hosted=[b"j" * 16]),
        replicator=SimpleNamespace(refusals=SimpleNamespace(counters=Counter(chunks=1))),
    )
    made: Any = NodeHandlers.__new__(NodeHandlers)
    made._me, made._membership, made._jobs, made._refusals = b"\0" * 32, membership, parts, parts.replicator.refusals
    made._path = lambda node: None
    handlers: NodeHandlers = made
    return handlers


def test_row_of_a_node_says_whether_it_lends_now() -> None:
    members = [
        member(0, "here"),
        member(1, "lends", draining=True),
        member(2, "paused", state="dead", draining=True, port=0),
        member(3, "silent"),
    ]
    gpus = (Gpu("a", "A100", 1000), Gpu("b", "A100", 1000))
    offers = [
        advert(bytes([1]) * 32, gpus=gpus, free_portions=all_free(gpus[:1]), guards=True, gpu_pauses=True),
        advert(bytes([2]) * 32, paused=True, held_by="owner", back_unix=9, guards=True, gpu_sharing=False),
        advert(b"\0" * 32, lending=False, paused=True),
    ]
    runs = {bytes([1]): None, bytes([2]): "done"}
    jobs = {job: SimpleNamespace(runner=bytes([1]) * 32, outcome=outcome) for job, outcome in runs.items()}
    jobs[b"w"] = SimpleNamespace(runner=None, outcome=None)
    here, lends, paused, silent = node(members, offers, jobs).nodes()
    assert [row.me for row in (here, lends, paused, silent)] == [True, False, False, False]
    assert [row.state for row in (here, lends, paused, silent)] == ["alive", "draining", "dead", "alive"]
    assert [row.lending for row in (here, lends, paused, silent)] == [False, True, False, False]
    assert [row.paused for row in (here, lends, paused, silent)] == [False, False, True, False]
    assert (lends.gpus_free, len(lends.gpu_room), lends.gpu_shares, lends.gpu_pauses) == (1, 1, True, True)
    assert (paused.held_by, paused.back_unix, paused.gpu_shares, paused.address) == ("owner", 9, False, "")
    assert (lends.jobs, paused.jobs, lends.address, lends.since_unix) == (1, 0, "10.0.0.7:7373", 1.235)
    assert (silent.slots, silent.engines, silent.interactive, silent.weight) == (0, [], True, 0)


def test_refused_messages_are_counted_with_the_others() -> None:
    assert node([]).counters() == {"heard": 2, "chunks": 1, "refused_job_messages": 3}


def test_node_goes_down_as_it_was_asked() -> None:
    asked: list[Any] = []
    handlers: Any = node([])
    handlers._leave = lambda grace_s, now: asked.append((grace_s, now))
    handlers._lending = SimpleNamespace(notice_s=lambda grace_s: 30.0 if grace_s is None else grace_s)
    assert handlers.down(DownOrder()).guests == 1
    handlers.down(DownOrder(grace_s=5.0, now=True))
    assert asked == [(30.0, False), (5.0, True)]


def test_versions_are_those_of_nodes_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: Any = node([member(1, "den"), member(2, "gone", present=False), member(3, "mute"), member(4, "bad")])
    records = [SimpleNamespace(node=bytes([number]) * 32, body=f"{number}" * 50) for number in (1, 2, 4)]
    handlers._membership.records = lambda section: records
    monkeypatch.setattr(module, "decode_facts", lambda body: None if body[0] == "4" else SimpleNamespace(version=body))
    assert handlers._versions() == {"den": "1" * 40}


def test_status_counts_nodes_that_are_alive_and_lends_unless_barred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.schemas.mesh, "Status", lambda **fields: fields)
    handlers: Any = node([member(0, "here"), member(1, "den"), member(2, "gone", state="dead", present=False)])
    handlers._trust = MagicMock()
    handlers._open, handlers._api_port, handlers._engines, handlers._edge = False, 1, {}, MagicMock()
    handlers._inventory = SimpleNamespace(lending=SimpleNamespace(lending=True, paused=True))
    handlers._leaving = lambda: True
    known = handlers._membership
    handlers._membership = MagicMock(
        members=known.members, counters=known.counters, reached={}, address=("h", 1), problems={}
    )
    handlers._membership.records.return_value = []
    for barred in ("", "no role"):
        handlers._lending = SimpleNamespace(barred=barred, lend_state=lambda: None)
        told = handlers.status()
        assert (told["alive"], told["lending"], told["paused"], told["leaving"]) == (2, not barred, True, True)
        assert told["waiting"] == 0 and len(told["guests"]) == 1


def test_path_is_estimated_to_other_nodes_only() -> None:
    handlers: Any = node([])
    del handlers._path
    zone = SimpleNamespace(nodes=(b"\1" * 32,))
    asked: list[Any] = []

    def path(to: bytes, near: Any) -> Any:
        asked.append((to, near))
        fields = dict.fromkeys(module.schemas.mesh.Path.__struct_fields__, 0)
        return SimpleNamespace(**fields | {"bps": 1e6 + 0.4, "spread": 0.12345})

    handlers._jobs.mesh_view.last = SimpleNamespace(hierarchy=SimpleNamespace(zones=(zone,)))
    handlers._jobs.departure_planner = SimpleNamespace(path=path)
    assert handlers._path(handlers._me) is None and not asked
    with pytest.MonkeyPatch.context() as here:
        here.setattr(module, "zone_of", lambda node, zones: zone if node == b"\1" * 32 else None)
        near = handlers._path(b"\1" * 32)
        handlers._path(b"\2" * 32)
    assert (near.bps, near.spread) == (1_000_000, 0.123)
    assert asked == [(b"\1" * 32, zone.nodes), (b"\2" * 32, ())]
