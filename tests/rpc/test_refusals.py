"""Refusals are counted every time and reported at the first, tenth, hundredth."""

from mesh.rpc.refusals import PEERS_KEPT, Refusals
from tests.consensus.worlds import A, B


def test_refusals_are_reported_at_powers_of_ten() -> None:
    told: list[str] = []
    refusals = Refusals(told.append)
    for _ in range(120):
        refusals.count("chunks", A, "it sent wrong bytes")
    refusals.count("chunks", B, "it sent wrong bytes")
    refusals.count("malformed", A, "it sent nonsense")
    assert refusals.counters == {"refused_chunks": 121, "refused_malformed": 1}
    assert [text.partition(": ")[0].split("refused")[1] for text in told] == ["", " (10 times)", " (100 times)", "", ""]
    assert all("it sent" in text for text in told)


def test_refusal_memory_is_bounded() -> None:
    refusals = Refusals(lambda text: None)
    for number in range(2 * PEERS_KEPT):
        refusals.count("chunks", number.to_bytes(32, "big"), "")
    assert refusals.counters["refused_chunks"] == 2 * PEERS_KEPT and len(refusals._by_peer) <= PEERS_KEPT
