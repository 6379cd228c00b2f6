"""Images in placement: present, fetchable or denied; and the size of adverts."""

from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import MAX_IMAGES, Advert, AdvertError, decode_advert, encode_advert
from placement.decision import cannot_ever, explain
from placement.filters import SHORT, ImageOffer, image_refusal, lacks_image, refusals
from placement.ranking import rank_nodes
from placement.request import Request
from placement.zones import homes, zones
from tests.placement.test_placement import JOB, NODES, advert

A, B = b"a" * 32, b"b" * 32
BY_HASH = Request(JOB, 0, "user", image="tool", image_id=A)
BY_NAME = Request(JOB, 0, "user", image="tool")
OF_USER = Request(JOB, 0, "user", image="@bob/image tool", image_id=A)
HAS = {"image_list": True, "image_ids": (A[:SHORT],)}
FETCHES = {"image_list": True, "image_fetches": (A[:SHORT],)}


def node(number: int, **changes: object) -> Advert:
    return advert(NODES[number], engines=("docker",), **changes)


@pytest.mark.parametrize(
    ("request_", "changes", "words"),
    [
        (BY_HASH, HAS, None),
        (BY_HASH, FETCHES, None),
        (
            BY_HASH,
            {"image_list": True},
            "image tool (616161616161) is not on this node, and no node that it can fetch from has it",
        ),
        (BY_HASH, {"images": ("tool",)}, "not on this node"),
        (BY_HASH, {**HAS, "image_denials": ("tool",)}, "its owner denies image tool (`mesh image deny`)"),
        (BY_HASH, {**HAS, "image_denials": (A[:SHORT].hex(),)}, "its owner denies image tool"),
        (BY_HASH, {**HAS, "image_denials": (B[:SHORT].hex(), "jax")}, None),
        (OF_USER, {"image_list": True}, "has it, or its owner does not run images of that user"),
        (BY_NAME, {"images": ("tool",)}, None),
        (BY_NAME, {"images": ("tool",), "image_list": True}, None),
        (BY_NAME, {}, "has no image tool"),
        (BY_NAME, HAS, "image tool is not on the mesh's list, and the node's owner has not allowed it there"),
    ],
)
def test_image_refusal_names_rule(request_: Request, changes: dict[str, object], words: str | None) -> None:
    ranking = rank_nodes(request_, [node(0, **changes)])
    if words is None:
        assert ranking.candidates
        return
    assert words in ranking.refused[0].reasons[0]
    assert words in str(cannot_ever(request_, [node(0, **changes)])) or request_.image_id is None
    assert "image tool" in explain(request_, ranking)[0]


@given(
    st.lists(st.tuples(st.sampled_from(["has", "fetches", "neither"]), st.integers(1, 64)), min_size=1, max_size=6),
    st.integers(0, 50),
)
def test_node_with_image_ranks_first(kinds: list[tuple[str, int]], attempt: int) -> None:
    states = {"has": HAS, "fetches": FETCHES, "neither": {"image_list": True}}
    adverts = [node(place, weight=weight, **states[kind]) for place, (kind, weight) in enumerate(kinds)]
    request = msgspec.structs.replace(BY_HASH, attempt=attempt)
    by_node = {one.node: one for one in adverts}
    for ranking in (rank_nodes(request, adverts), rank_nodes(request, adverts, homes(zones(adverts, {})))):
        order = [by_node[candidate.node].image_ids != HAS["image_ids"] for candidate in ranking.candidates]
        assert order == sorted(order)
        assert len(order) == sum(kind != "neither" for kind, _ in kinds)
    flat = rank_nodes(request, adverts)
    for other in list(permutations(adverts))[:6]:
        assert rank_nodes(request, other) == flat


def test_node_lacks_an_image_that_it_can_fetch() -> None:
    assert [lacks_image(BY_HASH, node(0, **state)) for state in (HAS, FETCHES, {})] == [False, True, True]
    assert not lacks_image(BY_NAME, node(0))


def test_all_reasons_against_an_image_are_told() -> None:
    saved = msgspec.structs.replace(BY_HASH, system=True)
    reasons = refusals(saved, node(0, image_list=True))
    assert len(reasons) == 2 and "not on this node" in reasons[0] and "makes no system checkpoints" in reasons[1]


def test_preferred_node_ranks_before_node_with_image() -> None:
    prefer = msgspec.structs.replace(BY_HASH, prefer=NODES[1])
    assert rank_nodes(prefer, [node(0, **HAS), node(1, **FETCHES)]).candidates[0].node == NODES[1]


def test_image_that_no_node_can_run_is_refused_at_submission() -> None:
    nobody = str(cannot_ever(BY_HASH, [node(0, image_list=True), node(1, image_list=True, image_denials=("tool",))]))
    assert (
        "no lending node can run image tool" in nobody
        and "n2: its owner denies" in nobody
        and "mesh image ls" in nobody
    )
    assert cannot_ever(BY_HASH, [node(0), node(1, **FETCHES)]) is None
    assert cannot_ever(BY_HASH, [node(1, **FETCHES), node(0, nick="n2")]) is None, "two nodes may have one nick"
    assert "`docker load`" in str(cannot_ever(BY_NAME, [node(0)]))
    assert "has no docker engine" in str(cannot_ever(BY_HASH, [advert(NODES[0], **HAS)]))


def test_advert_with_full_image_list_fits_section() -> None:
    ids = tuple(bytes([number]) * SHORT for number in range(100))
    offer = ImageOffer(("own",), True, ids[:50], ids[50:], ("denied",))
    full = node(0, **msgspec.structs.asdict(offer))
    assert decode_advert(NODES[0], encode_advert(full)) == full
    assert len(encode_advert(full)) - len(encode_advert(node(0))) < 1100
    assert image_refusal(msgspec.structs.replace(BY_HASH, image_id=ids[70] * 4), full) is None
    for name in ("images", "image_denials", "image_ids", "image_fetches"):
        many = ("x",) * (MAX_IMAGES + 1) if name in {"images", "image_denials"} else (b"x",) * (MAX_IMAGES + 1)
        with pytest.raises(AdvertError):
            decode_advert(NODES[0], encode_advert(node(0, **{name: many})))
