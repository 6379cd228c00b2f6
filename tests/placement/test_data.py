"""Placement by missing data sets: nodes that have them come first, and the others lose a bounded part of their weight."""

from msgspec.structs import replace

from placement.advert import MAX_WEIGHT
from placement.filters import missing_mib, refusals
from placement.ranking import fetch_s, rank_nodes, with_data
from placement.request import Request, WantedData
from tests.consensus.worlds import A, B, make_advert

ID = b"s" * 8


def asked(mib: int, job: bytes = b"job", **more: object) -> Request:
    return Request(job, 0, "ada", data=(WantedData("ada/pictures", ID, mib),), **more)  # type: ignore[arg-type]


def test_weight_falls_with_missing_bytes_down_to_a_bound() -> None:
    lacks, has = make_advert(A), replace(make_advert(B), data_ids=(ID,))
    weights = [with_data(MAX_WEIGHT, asked(mib), lacks) for mib in (0, 10_000, 100_000, 10**6, 2**31 - 1)]
    assert weights[0] == MAX_WEIGHT and weights == sorted(weights, reverse=True) and weights[2] < MAX_WEIGHT
    assert weights[-1] == MAX_WEIGHT - MAX_WEIGHT // 8
    assert with_data(MAX_WEIGHT, asked(10**6), has) == MAX_WEIGHT and with_data(1, asked(10**6), lacks) == 1
    assert with_data(20, asked(2**31 - 1), lacks) == 17, "an eighth, rounded up"
    assert with_data(MAX_WEIGHT, asked(90_000, remaining_s=9000), lacks) == 59, "900 of 9900 seconds go into fetching"
    assert with_data(1, asked(10**6, remaining_s=0), lacks) == 1
    assert with_data(MAX_WEIGHT, asked(0, remaining_s=0), lacks) == MAX_WEIGHT
    assert (missing_mib(asked(5), lacks), missing_mib(asked(5), has)) == (5, 0)
    several = (WantedData("one", ID, 5), WantedData("two", b"t" * 8, 7), WantedData("three", b"u" * 8, 9))
    wanted = Request(b"job", 0, "ada", data=(*several, WantedData("a directory", mib=11)))
    assert (missing_mib(wanted, lacks), missing_mib(wanted, has)) == (21, 16), "a directory is not fetched"


def test_node_that_has_measured_its_fetches_loses_weight_by_that_speed() -> None:
    slow, usual, fast = (replace(make_advert(A), fetch_mib_s=speed) for speed in (10, 0, 1000))
    assert [fetch_s(asked(2000), node) for node in (slow, usual, fast)] == [200, 20, 2]
    weights = [with_data(MAX_WEIGHT, asked(100_000, remaining_s=36_000), node) for node in (slow, usual, fast)]
    assert weights == sorted(set(weights)), "each faster one has a greater weight"


def test_node_with_the_data_comes_first_and_the_other_is_not_starved() -> None:
    lacks, has = make_advert(A), replace(make_advert(B), data_ids=(ID,))
    first = [rank_nodes(asked(10**6, b"%d" % n), [lacks, has]).candidates[0].node for n in range(400)]
    plain = [rank_nodes(Request(b"%d" % n, 0, "ada"), [lacks, has]).candidates[0].node for n in range(400)]
    assert 150 < plain.count(B) < 250
    assert 320 < first.count(B) < 395, "about nine in ten; the rest goes to the other"
    full = replace(has, slots_free=0)
    assert rank_nodes(asked(10**6), [lacks, full]).candidates[0].node == A, (
        "it does not wait for the node with the data"
    )


def test_directory_that_is_offered_by_name_is_needed() -> None:
    request = Request(b"job", 0, "ada", data=(WantedData("imagenet"),))
    offers = replace(make_advert(A), data_paths=("imagenet",))
    assert refusals(request, offers) == []
    assert refusals(request, make_advert(A)) == ["does not offer data set imagenet ([data] in its config.toml)"]


def test_job_moves_from_a_node_that_lacks_the_data_to_a_better_one_that_has_them() -> None:
    has = replace(make_advert(B), data_ids=(ID,), weight=48)
    for weight, moves in ((41, True), (42, False)):
        found = rank_nodes(asked(2**31 - 1), [replace(make_advert(A), weight=weight), has]).settle(A)
        assert found is not None and (found.node == B) is moves
