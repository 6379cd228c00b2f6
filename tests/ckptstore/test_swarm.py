"""Nodes that fetch the same chunks at once and give each other what they have; each divides its upload fairly; virtual time."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.fetch import ASK_AGAIN_S, PLACES, VAIN, WINDOW_BYTES, Ask, Cancel, Fetch, FetchEnded, Request

SEED = b"seed"
CHUNK, RATE = 4 << 20, 12.5e6  # bytes; bytes a second that a node sends
ANNOUNCED_S = 2.0  # until the others hear that a node fetches


@dataclass
class Transfer:
    request: Request
    left: float


@dataclass
class Swarm:
    """`count` nodes that begin to fetch `chunks` within a second. `gives`: whether they give on what they have before the end."""

    count: int
    chunks: int
    gives: bool = True
    shuffles: bool = True  # whether each has an order of its own
    awaited: bool = False
    now: float = 0.0
    ahead: float = 0.0  # most bytes that one had after the first that it lacked
    sent: Counter[bytes] = field(default_factory=Counter)
    ended: dict[bytes, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(1)
        self.ids = [number.to_bytes(4, "big") for number in range(self.chunks)]
        self.have: dict[bytes, set[bytes]] = {b"node %d" % number: set() for number in range(self.count)}
        self.plans: dict[bytes, Fetch] = {}
        self.transfers: dict[tuple[bytes, bytes], Transfer] = {}  # (who fetches, from whom)
        self.asks: list[tuple[float, bytes, Ask]] = []
        self.begins = {node: self.random.random() for node in self.have}

    def run(self) -> None:
        for node in sorted(self.begins, key=lambda node: self.begins[node]):
            self._until(self.begins[node])
            self.plans[node] = Fetch(
                dict.fromkeys(self.ids, CHUNK), [SEED], self.awaited, self.random if self.shuffles else None
            )
            self._do(node, self.plans[node].start(self.now))
        while len(self.ended) < self.count:
            self._until(self.now + 0.25)
            for node, plan in self.plans.items():
                if self.gives and node not in self.ended:
                    self._do(node, plan.join(self._coming(node), self.now))

    def _coming(self, node: bytes) -> list[bytes]:
        others = [other for other in self.plans if other != node and other not in self.ended]
        return [other for other in others if self.now > self.begins[other] + ANNOUNCED_S]

    def _do(self, node: bytes, actions: list[object]) -> None:
        for action in actions:
            match action:
                case FetchEnded(problem=problem):
                    assert not problem and self.have[node] == set(self.ids)
                    self.ended[node] = self.now
                case Request(source=source, ids=ids):
                    assert (node, source) not in self.transfers
                    assert source == SEED or self.have[source].issuperset(ids), "only what it has is requested of it"
                    self.transfers[node, source] = Transfer(action, len(ids) * CHUNK)
                case Ask(delay_s=delay_s):
                    self.asks.append((self.now + delay_s, node, action))
                case Cancel(source=source):
                    del self.transfers[node, source]

    def _until(self, then: float) -> None:
        while True:
            senders = Counter(source for _, source in self.transfers)
            rates = {key: RATE / senders[key[1]] for key in self.transfers}
            due = min((self.now + one.left / rates[key] for key, one in self.transfers.items()), default=then)
            due = max(self.now, min([due, then, *(at for at, _, _ in self.asks)]))
            for key, one in self.transfers.items():
                moved = min(one.left, rates[key] * (due - self.now))
                one.left -= moved
                self.sent[key[1]] += moved
            self.now = due
            if answered := [ask for ask in self.asks if ask[0] <= self.now]:
                at, node, ask = answered[0]
                self.asks.remove((at, node, ask))
                if node not in self.ended:
                    here = self.have[ask.source].intersection(ask.ids)
                    self._do(node, self.plans[node].told(ask.source, here, self.now))
            elif arrived := [key for key, one in self.transfers.items() if one.left < 1]:
                node, source = arrived[0]
                request = self.transfers.pop(arrived[0]).request
                self.have[node].update(request.ids)
                first = next((at for at, one in enumerate(self.ids) if one not in self.have[node]), self.chunks)
                last = max(self.ids.index(one) for one in request.ids)
                self.ahead = max(self.ahead, (last - first) * CHUNK)
                self._do(node, self.plans[node].arrived(source, request.ids, self.now))
            elif self.now >= then:
                return


@pytest.mark.parametrize("count", [2, 4, 8])
def test_nodes_that_fetch_at_once_take_little_more_than_one_copy_from_the_seed(count: int) -> None:
    swarm = Swarm(count, 240)
    swarm.run()
    alone_s = 240 * CHUNK / RATE
    assert max(swarm.ended.values()) < 1.3 * alone_s + 10 * ASK_AGAIN_S
    assert swarm.sent[SEED] < 1.3 * 240 * CHUNK


@pytest.mark.parametrize("count", [2, 4, 8])
def test_what_is_awaited_comes_nearly_in_order_and_nearly_as_fast(count: int) -> None:
    swarm = Swarm(count, 240, awaited=True)
    swarm.run()
    assert swarm.sent[SEED] < 1.7 * 240 * CHUNK
    assert swarm.ahead <= 2 * WINDOW_BYTES < 240 * CHUNK


def test_without_each_other_they_share_what_the_seed_sends() -> None:
    """The checker sees the fault that the swarm removes."""
    swarm = Swarm(4, 240, gives=False)
    swarm.run()
    assert swarm.sent[SEED] == pytest.approx(4 * 240 * CHUNK, rel=0.01)
    assert max(swarm.ended.values()) > 3.9 * 240 * CHUNK / RATE


def test_without_an_order_of_their_own_they_ask_the_seed_for_the_same() -> None:
    swarm = Swarm(4, 240, shuffles=False)
    swarm.run()
    assert swarm.sent[SEED] > 2 * 240 * CHUNK


@given(st.integers(1, 30), st.sampled_from([0, 1, 3, PLACES + 1]), st.data())
def test_fetch_completes_with_one_honest_source_whatever_partial_ones_do(
    chunks: int, count: int, data: st.DataObject
) -> None:
    ids = {bytes([n]): 1 + 100_000 * (n % 7) for n in range(chunks)}
    partial = [bytes([200 + n]) for n in range(count)]
    fetch, got, now = Fetch(ids, [SEED], awaited=data.draw(st.booleans())), set[bytes](), 0.0
    actions = fetch.start(now) + fetch.join(partial, now)
    running: dict[bytes, Request | Ask] = {}
    for _ in range(2000):
        assert len({*running}.intersection(partial)) <= PLACES
        for action in actions:
            match action:
                case FetchEnded(problem=problem):
                    assert problem == "" and got == set(ids)
                    return
                case Request(source=source) | Ask(source=source):
                    assert source not in running and source not in fetch.dropped, "one thing at a time"
                    running[source] = action
                case Cancel(source=source):
                    assert got >= set(running.pop(source).ids)
        source = data.draw(st.sampled_from(sorted(running)))
        now += data.draw(st.floats(0, 3))
        match running.pop(source):
            case Ask(ids=asked):
                claimed = data.draw(st.lists(st.sampled_from([*asked, b"?"])))
                actions = (
                    fetch.told(source, claimed, now) if data.draw(st.booleans()) else fetch.failed(source, "", now)
                )
            case Request(ids=wanted):
                come = wanted if source == SEED or data.draw(st.booleans()) else wanted[1:]
                got.update(come)
                actions = fetch.arrived(source, come, now)
        actions += fetch.join(partial, now)
    raise AssertionError("never ended")


def test_partial_sources_that_get_nothing_are_given_up() -> None:
    fetch = Fetch({b"1": 1, b"2": 1}, [])
    actions = fetch.join([b"a"], 0.0)
    for delay_s in (0.0, *[ASK_AGAIN_S] * VAIN):
        assert actions == [Ask(b"a", (b"1", b"2"), delay_s)]
        actions = fetch.told(b"a", [], 0.0)
    (ended,) = actions
    assert isinstance(ended, FetchEnded) and "has nothing that is missing" in ended.problem


def test_partial_source_is_kept_while_another_source_sends() -> None:
    fetch = Fetch({b"1": 1, b"2": 1}, [SEED])
    sent, ask = fetch.join([b"a"], 0.0)
    assert isinstance(sent, Request) and isinstance(ask, Ask)
    for _ in range(2 * VAIN):
        (ask,) = fetch.told(b"a", [], 0.0)
    assert isinstance(ask, Ask) and not fetch.dropped


def test_partial_sources_that_have_nothing_keep_no_other_from_being_asked() -> None:
    """As many nodes as there are places only say that they fetch, and come first."""
    idle, honest = [b"idle %d" % n for n in range(PLACES)], [b"honest %d" % n for n in range(3)]
    fetch = Fetch({bytes([n]): 1 for n in range(100)}, [SEED])
    asks, asked, given = [one for one in fetch.join(idle, 0.0) if isinstance(one, Ask)], set[bytes](), set[bytes]()
    fetch.join([*idle, *honest], 0.0)
    for _ in range(3 * PLACES):
        ask = asks.pop(0)
        assert ask.delay_s == (ASK_AGAIN_S if ask.source in asked else 0.0), "nobody is asked again at once"
        asked.add(ask.source)
        has = [bytes([97 + honest.index(ask.source)])] if ask.source in honest else []
        actions = fetch.told(ask.source, has, 0.0)
        asks += [one for one in actions if isinstance(one, Ask)]
        given |= {one.source for one in actions if isinstance(one, Request)}
        assert len(asks) + len(given) == PLACES
    assert given == set(honest)


def test_what_a_partial_source_has_is_requested_of_it_and_nothing_else() -> None:
    fetch = Fetch({bytes([n]): 1 for n in range(4)}, [])
    (ask,) = fetch.join([b"a"], 0.0)
    assert ask == Ask(b"a", (b"\0", b"\1", b"\2", b"\3"), 0.0) and fetch.join([b"a"], 0.0) == []
    (request,) = fetch.told(b"a", [b"\2", b"not asked for"], 0.0)
    assert request == Request(b"a", (b"\2",))
    (ask,) = fetch.arrived(b"a", [b"\2"], 1.0)
    assert ask == Ask(b"a", (b"\0", b"\1", b"\3"), ASK_AGAIN_S)
