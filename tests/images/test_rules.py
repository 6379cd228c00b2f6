"""May an image be run here: the owner first, then the mesh's list, by hash; and in words why not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.images.allowlist import ANYTHING, Entry, Image, ListedEntry, ListError, SignedList, merged
from mesh.images.rules import MAX_OWN, OwnRules, Rules, check_own, with_allowed, with_denied, without

A, B, C = (Image(bytes([n]) * 32) for n in b"ABC")
NAMES = ["pytorch", "jax", "tool", "@ada/tool"]
SIGNER = b"s" * 32


def listed(**said: Image | None) -> dict[str, ListedEntry]:
    words = [Entry(alias, 1, image is not None, image) for alias, image in said.items()]
    return merged({SIGNER: SignedList(1, tuple(words))})


lists = st.none() | st.dictionaries(st.sampled_from(NAMES), st.sampled_from([A, B, None])).map(
    lambda said: listed(**said)
)
owners = st.builds(
    OwnRules,
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from([A, B, C])),
    st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from([A.config, B.config, C.config])).map(tuple)),
)
asks = st.tuples(st.sampled_from(NAMES), st.none() | st.sampled_from([A.config, B.config, C.config]))


@given(lists, owners, asks)
def test_unlisted_image_is_refused(
    said: dict[str, ListedEntry] | None, own: OwnRules, ask: tuple[str, bytes | None]
) -> None:
    rules, (name, wanted) = Rules(said, own), ask
    verdict = rules.judge(name, wanted)
    if verdict.rule:
        assert name in verdict.words and verdict.image is None
        return
    assert name not in own.denied, "the owner comes first"
    if verdict.image is None:
        assert said is None and wanted is None
        return
    config = verdict.image.config
    assert wanted in {None, config} and config not in rules.denied_hashes
    on_list = {one.entry.image.config for one in (said or {}).values() if one.entry.image is not None}
    assert said is None or config in on_list or verdict.image in own.allowed.values()


@given(lists, owners)
def test_shared_images_are_listed_and_not_denied(said: dict[str, ListedEntry] | None, own: OwnRules) -> None:
    rules = Rules(said, own)
    on_list = {one.entry.image.config for one in (said or {}).values() if one.entry.image is not None}
    assert set(rules.shared) == (on_list - rules.denied_hashes)
    assert set(rules.shared) <= set(rules.images)


@pytest.mark.parametrize(
    ("own", "name", "wanted", "rule", "words"),
    [
        (OwnRules(), "pytorch", None, "", ""),
        (OwnRules(), "pytorch", A.config, "", ""),
        (OwnRules(), "sha256:" + A.config.hex(), None, "", ""),
        (OwnRules(), "sha256:" + C.config.hex(), None, "not listed", "not on the mesh's list"),
        (
            OwnRules(),
            "pytorch",
            C.config,
            "differs",
            "differs from the list's: that has 414141414141, not 434343434343",
        ),
        (OwnRules(), "tool", None, "not listed", "image tool is not on the mesh's list"),
        (OwnRules(), "jax", None, "not listed", "has been taken from the mesh's list"),
        (OwnRules(), "jax", C.config, "not listed", "not on the mesh's list"),
        (OwnRules(), "old name", A.config, "", ""),
        (OwnRules({}, {"pytorch": ()}), "pytorch", A.config, "denied here", "owner denies image pytorch"),
        (OwnRules({}, {"pytorch": ()}), "another", A.config, "denied here", "owner denies image another"),
        (OwnRules({"tool": C}), "tool", None, "", ""),
        (OwnRules({"tool": C}), "tool", B.config, "not listed", "not on the mesh's list"),
        (OwnRules({"pytorch": C}), "pytorch", A.config, "", ""),
        (OwnRules({"tool": C}, {"tool2": (C.config,)}), "tool", None, "denied here", "owner denies image tool"),
    ],
)
def test_refusal_names_rule(own: OwnRules, name: str, wanted: bytes | None, rule: str, words: str) -> None:
    verdict = Rules(listed(pytorch=A, jax=None), own).judge(name, wanted)
    assert verdict.rule == rule and words in verdict.words


def test_without_list_all_but_denied_run() -> None:
    tags = {"x:1": A.config, "y": B.config}
    assert Rules(None).names(tags) == ("x:1", "y")
    assert Rules(None, OwnRules({}, {"x:1": (A.config,)})).names(tags) == ("y",)
    assert Rules(listed(x=A)).names(tags) == ()
    assert Rules(listed(x=A), OwnRules({"y": B, "gone": C})).names(tags) == ("y",)
    anything = merged({SIGNER: SignedList(1, (Entry(ANYTHING, 1, True), Entry("x", 1, True, A)))})
    assert Rules(anything).names(tags) == ("x:1", "y") and Rules(anything).judge("whatever", None).rule == ""
    assert Rules(anything).judge("x", None).image == A
    taken_back = merged(
        {SIGNER: SignedList(1, (Entry(ANYTHING, 1, True),)), b"t" * 32: SignedList(1, (Entry(ANYTHING, 2, False),))}
    )
    assert Rules(taken_back).judge("whatever", None).rule == "not listed"


def test_owner_rules_can_change() -> None:
    own = with_denied(OwnRules(), "pytorch", frozenset({A.config}))
    rules = Rules(listed(pytorch=A), own)
    assert rules.judge("pytorch", None).rule == "denied here" and not rules.shared
    again = with_allowed(own, "pytorch", A)
    assert Rules(listed(pytorch=A), again).judge("pytorch", None).rule == ""
    assert Rules(listed(pytorch=A), without(own, "pytorch")).judge("pytorch", None).rule == ""
    assert with_denied(again, "pytorch", frozenset()).allowed == {}
    other = with_allowed(own, "same-content", A)
    assert Rules(None, other).judge("same-content", None).rule == "", "an allowed image is no longer denied"
    assert Rules(None, other).judge("pytorch", None).rule == "denied here"


def test_owner_rules_are_validated() -> None:
    for wrong in (
        OwnRules({"a b": A}),
        OwnRules({}, {"": ()}),
        OwnRules({"a": Image(b"short")}),
        OwnRules({}, {"a": (b"x",)}),
    ):
        with pytest.raises(ListError):
            check_own(wrong)
    with pytest.raises(ListError, match="at most"):
        check_own(OwnRules({}, {f"n{number}": () for number in range(MAX_OWN + 1)}))
