"""System checkpoints: nodes that can make them, and platforms that can restore them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import MAX_LINE, Advert, AdvertError, SystemCheckpoints, decode_advert, encode_advert
from placement.decision import cannot_ever
from placement.filters import refusals
from placement.request import Request
from tests.placement.test_placement import advert, gpu

NODE, OTHER = b"\1" * 32, b"\2" * 32
REQUEST = Request(b"j" * 16, 0, "ada", image="tool", system=True)
LINES = st.sampled_from(["", "x86_64 a, Linux 6.1", "x86_64 b, Linux 6.1", "x86_64 a, Linux 6.18"])


def offering(node: bytes, system: SystemCheckpoints) -> Advert:
    return advert(node, engines=("process", "docker"), images=("tool",), system=system)


@given(LINES, LINES)
def test_only_equal_platform_can_restore(platform: str, own: str) -> None:
    request = msgspec.structs.replace(REQUEST, platform=platform)
    told = refusals(request, offering(NODE, SystemCheckpoints(platform=own, problem="criu is not installed")))
    assert (not told) == (own != "" and platform in {"", own})
    if own == "":
        assert told == ["makes no system checkpoints: criu is not installed"]
    elif told:
        assert told == [f"cannot restore a system checkpoint made on {platform}; this node is {own}"]
    plain = msgspec.structs.replace(request, system=False)
    assert not refusals(plain, offering(NODE, SystemCheckpoints(platform=own))), "other jobs are not refused"


def test_gpu_jobs_have_own_platform() -> None:
    system = SystemCheckpoints(platform="a", gpu_problem="GPU jobs need driver 570 or newer, it has 550.1")
    offer = msgspec.structs.replace(offering(NODE, system), gpus=(gpu(0, 1000),))
    told = refusals(msgspec.structs.replace(REQUEST, gpus=1), offer)
    assert told[0] == f"makes no system checkpoints of jobs with GPUs: {system.gpu_problem}"


def test_job_that_no_node_can_save_is_refused_at_submission() -> None:
    nobody = [offering(NODE, SystemCheckpoints()), offering(OTHER, SystemCheckpoints(problem="criu is not installed"))]
    told = cannot_ever(REQUEST, nobody)
    assert told is not None and "n1: makes no system checkpoints: it does not offer them" in told
    assert "n2: makes no system checkpoints: criu is not installed" in told
    assert cannot_ever(REQUEST, [*nobody, offering(b"\3" * 32, SystemCheckpoints(platform="a"))]) is None


@given(st.text(max_size=MAX_LINE + 10))
def test_advert_with_unprintable_text_is_refused(words: str) -> None:
    sent = encode_advert(advert(NODE, system=SystemCheckpoints(problem=words)))
    if len(words) <= MAX_LINE and words.isprintable():
        assert decode_advert(NODE, sent).system.problem == words
    else:
        with pytest.raises(AdvertError, match="not one printable line"):
            decode_advert(NODE, sent)


def test_advert_of_older_node_offers_no_system_checkpoints() -> None:
    fields = msgspec.to_builtins(advert(NODE), builtin_types=(bytes,))
    del fields["system"]
    assert decode_advert(NODE, msgspec.msgpack.encode(fields)).system == SystemCheckpoints()
