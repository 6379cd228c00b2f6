"""What the job cores see of the mesh: who is there, who leaves, and what each present provider offers."""

from typing import Any

import msgspec
import pytest

from membership.events import MemberView
from membership.records import Record
from membership.trust import PROVIDER, USER
from mesh.jobs import mesh_view
from mesh.jobs.job_table import JobTable
from mesh.jobs.mesh_view import MeshView
from mesh.rpc.client import Facts
from placement.advert import HORIZONS_S, encode_advert
from placement.observed import Caps
from tests.placement.test_placement import advert

A, B, C, D, E = (bytes([letter]) * 32 for letter in b"abcde")


def member(node: bytes, state: str = "alive", **fields: Any) -> MemberView:
    told = {"user": f"user {node[:1].decode()}", "roles": (USER, PROVIDER), "user_key": node, **fields}
    return MemberView(node, node[:1].decode(), state=state, since_unix=0.0, **told)


def record(node: bytes, body: bytes, section: str = "advert", version: int = 1) -> Record:
    return Record(node, 1, version, section, 0, body, 0, len(body))


class World:
    """A mesh as its membership describes it."""

    def __init__(self) -> None:
        self.present: list[MemberView] = [member(node) for node in (A, B, C)]
        self.sections = {"advert": [record(node, encode_advert(advert(node))) for node in (A, B, C)], "facts": []}
        self.caps: dict[bytes, Caps] = {}
        membership: Any = self
        self.view = MeshView(A, membership, JobTable(), lambda: self.caps)

    def members(self) -> list[MemberView]:
        return self.present

    def records(self, section: str) -> list[Record]:
        return self.sections[section]

    @property
    def offering(self) -> set[bytes]:
        return {one.node for one in self.view.adverts()}


@pytest.fixture
def world() -> World:
    return World()


def test_view_tells_who_is_there_who_leaves_and_who_has_left(world: World) -> None:
    world.present = [
        member(A),
        member(B, "suspect", draining=True),
        member(C, "unreachable"),
        member(D, "left"),
        member(E, "dead"),
    ]
    view = world.view.look()
    assert (view.me, view.alive, view.leaving, view.left) == (A, {A, B, C}, {B}, {D})
    assert world.view.last is view and world.view.hierarchy().leaving == {B}


@pytest.mark.parametrize("state", ["unreachable", "dead", "left", "revoked"])
def test_only_nodes_that_can_be_reached_offer_something(world: World, state: str) -> None:
    world.present[1] = member(B, state)
    assert world.offering == {A, C}


def test_node_that_may_not_lend_offers_nothing(world: World) -> None:
    world.present[1] = member(B, roles=(USER,))
    assert world.offering == {A, C}
    world.present.pop(2)  # the record outlives its author's membership
    assert world.offering == {A}


def test_owner_is_the_one_that_the_certificate_names(world: World) -> None:
    """Its nick, too: a long one would stand in the records of gangs, which no witness could read then."""
    forged = msgspec.structs.replace(advert(B), nick="n" * 2000, user="ada", user_key=b"k" * 32)
    world.sections["advert"][1] = record(B, encode_advert(forged))
    (found,) = [one for one in world.view.adverts() if one.node == B]
    assert (found.nick, found.user, found.user_key) == ("b", "user b", B)
    world.present[1] = member(B, user="bob", user_key=b"2" * 32)
    (found,) = [one for one in world.view.adverts() if one.node == B]
    assert (found.user, found.user_key) == ("bob", b"2" * 32), "read again for its new owner"


def test_claims_about_stays_are_capped_as_soon_as_a_cap_is_known(world: World) -> None:
    assert {one.weight for one in world.view.adverts()} == {32}
    world.caps = {B: tuple(4 for _ in HORIZONS_S)}
    assert {one.node: one.weight for one in world.view.adverts()} == {A: 32, B: 4, C: 32}


def test_newer_advert_counts_and_a_malformed_one_offers_nothing(world: World) -> None:
    assert world.offering == {A, B, C}
    first = world.view.look()
    assert world.view.look().adverts is first.adverts
    world.sections["advert"][1] = record(B, encode_advert(advert(B, slots_free=0)), version=2)
    (found,) = [one for one in world.view.look().adverts if one.node == B]
    assert found.slots_free == 0
    world.sections["advert"][1] = record(B, b"nonsense", version=3)
    world.sections["advert"][2] = record(C, encode_advert(advert(A)), version=2)  # another node's
    assert world.offering == {A}


def test_view_names_the_disks_that_are_known(world: World) -> None:
    facts = msgspec.msgpack.encode(Facts(1, "1.0", b"d" * 8))
    bare = msgspec.msgpack.encode(Facts(1, "1.0"))
    world.sections["facts"] = [record(A, facts, "facts"), record(B, bare, "facts"), record(C, b"\xff", "facts")]
    assert world.view.look().disks == {A: b"d" * 8}


def test_advert_that_this_program_cannot_handle_hides_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = mesh_view.decode_advert

    def faulty(node: bytes, body: bytes) -> Any:
        if node == B:
            raise IndexError("a fault")
        return real(node, body)

    monkeypatch.setattr(mesh_view, "decode_advert", faulty)
    assert {one.node for one in world.view.look().adverts} == {A, C} and caplog.text.count("ignored") == 1
    world.view.look()
    assert caplog.text.count("ignored") == 1, "each advert is read once"
