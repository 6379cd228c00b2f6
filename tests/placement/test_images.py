"""Images in placement: who has one, who can fetch it, who may not run it; and adverts that stay small."""

from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import MAX_IMAGES, Advert, AdvertError, decode_advert, encode_advert
from placement.decision import cannot_ever, explain
from placement.images import SHORT, ImageOffer, image_refusal, lacks
from placement.ranking import rank_nodes
from placement.request import Request
from placement.zones import homes, zones
from tests.placement.test_placement import JOB, NODES, advert

A, B = b"a" * 32, b"b" * 32
BY_HASH = Request(JOB, 0, "user", image="tool", image_id=A)
BY_NAME = Request(JOB, 0, "user", image="tool")
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
            "image tool (616161616161) is not on this node, and it can fetch it from nobody",
        ),
        (BY_HASH, {"images": ("tool",)}, "not on this node"),
        (BY_HASH, {**HAS, "image_denials": ("tool",)}, "its owner denies image tool (`mesh image deny`)"),
        (BY_HASH, {**HAS, "image_denials": (A[:SHORT].hex(),)}, "its owner denies image tool"),
        (BY_HASH, {**HAS, "image_denials": (B[:SHORT].hex(), "jax")}, None),
        (BY_NAME, {"images": ("tool",)}, None),
        (BY_NAME, {"images": ("tool",), "image_list": True}, None),
        (BY_NAME, {}, "has no image tool"),
        (BY_NAME, HAS, "image tool is not on the mesh's list, and the node's owner has not allowed it there"),
    ],
)
def test_a_refusal_says_which_rule_it_was(request_: Request, changes: dict[str, object], words: str | None) -> None:
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
def test_who_has_it_comes_first_whatever_its_weight(kinds: list[tuple[str, int]], attempt: int) -> None:
    states = {"has": HAS, "fetches": FETCHES, "neither": {"image_list": True}}
    adverts = [node(place, weight=weight, **states[kind]) for place, (kind, weight) in enumerate(kinds)]
    request = msgspec.structs.replace(BY_HASH, attempt=attempt)
    by_node = {one.node: one for one in adverts}
    for ranking in (rank_nodes(request, adverts), rank_nodes(request, adverts, homes(zones(adverts, {})))):
        order = [lacks(request, by_node[candidate.node]) for candidate in ranking.candidates]
        assert order == sorted(order)
        assert len(order) == sum(kind != "neither" for kind, _ in kinds)
    flat = rank_nodes(request, adverts)
    for other in list(permutations(adverts))[:6]:
        assert rank_nodes(request, other) == flat


def test_where_its_user_wants_it_comes_before_where_its_image_is() -> None:
    prefer = msgspec.structs.replace(BY_HASH, prefer=NODES[1])
    assert rank_nodes(prefer, [node(0, **HAS), node(1, **FETCHES)]).candidates[0].node == NODES[1]


def test_what_no_node_could_ever_run_is_told_at_submission() -> None:
    nobody = str(cannot_ever(BY_HASH, [node(0, image_list=True), node(1, image_list=True, image_denials=("tool",))]))
    assert (
        "no lending node can run image tool" in nobody
        and "n2: its owner denies" in nobody
        and "mesh image ls" in nobody
    )
    assert cannot_ever(BY_HASH, [node(0), node(1, **FETCHES)]) is None
    assert "`docker load`" in str(cannot_ever(BY_NAME, [node(0)]))
    assert "has no docker engine" in str(cannot_ever(BY_HASH, [advert(NODES[0], **HAS)]))


def test_an_advert_with_a_whole_list_fits_into_its_section() -> None:
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
