"""System checkpoints: who can make them, and who can go on from one."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import Advert, AdvertError, decode_advert, encode_advert
from placement.decision import cannot_ever
from placement.filters import refusals
from placement.likeness import MAX_WORDS, SystemCheckpoints
from placement.request import Request
from tests.placement.test_placement import advert, gpu

NODE, OTHER = b"\1" * 32, b"\2" * 32
REQUEST = Request(b"j" * 16, 0, "ada", image="tool", system=True)
LINES = st.sampled_from(["", "x86_64 a, Linux 6.1", "x86_64 b, Linux 6.1", "x86_64 a, Linux 6.18"])


def offering(node: bytes, system: SystemCheckpoints) -> Advert:
    return advert(node, engines=("process", "docker"), images=("tool",), system=system)


@given(LINES, LINES)
def test_only_equals_go_on_from_one(like: str, own: str) -> None:
    request = msgspec.structs.replace(REQUEST, like=like)
    told = refusals(request, offering(NODE, SystemCheckpoints(like=own, problem="criu is not installed")))
    assert (not told) == (own != "" and like in {"", own})
    if own == "":
        assert told == ["makes no system checkpoints: criu is not installed"]
    elif told:
        assert told == [f"is too unlike the node that made its system checkpoint: that was {like}; this is {own}"]
    plain = msgspec.structs.replace(request, system=False)
    assert not refusals(plain, offering(NODE, SystemCheckpoints(like=own))), "other jobs are nobody's concern"


def test_gpu_jobs_have_a_likeness_of_their_own() -> None:
    system = SystemCheckpoints(like="a", gpu_problem="GPU jobs need driver 570 or newer, it has 550.1")
    offer = msgspec.structs.replace(offering(NODE, system), gpus=(gpu(0, 1000),))
    told = refusals(msgspec.structs.replace(REQUEST, gpus=1), offer)
    assert told[0] == f"makes no system checkpoints of jobs with GPUs: {system.gpu_problem}"


def test_who_can_never_be_saved_is_told_at_submission() -> None:
    nobody = [offering(NODE, SystemCheckpoints()), offering(OTHER, SystemCheckpoints(problem="criu is not installed"))]
    told = cannot_ever(REQUEST, nobody)
    assert told is not None and "n1 makes no system checkpoints: it does not offer them" in told
    assert "n2 makes no system checkpoints: criu is not installed" in told
    assert cannot_ever(REQUEST, [*nobody, offering(b"\3" * 32, SystemCheckpoints(like="a"))]) is None


@given(st.text(max_size=MAX_WORDS + 10))
def test_words_of_an_advert_are_plain_or_refused(words: str) -> None:
    sent = encode_advert(advert(NODE, system=SystemCheckpoints(problem=words)))
    if len(words) <= MAX_WORDS and words.isprintable():
        assert decode_advert(NODE, sent).system.problem == words
    else:
        with pytest.raises(AdvertError, match="no plain line"):
            decode_advert(NODE, sent)


def test_an_older_node_s_advert_offers_none() -> None:
    fields = msgspec.to_builtins(advert(NODE), builtin_types=(bytes,))
    del fields["system"]
    assert decode_advert(NODE, msgspec.msgpack.encode(fields)).system == SystemCheckpoints()
