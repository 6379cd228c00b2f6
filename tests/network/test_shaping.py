"""Traffic classes, their rates, and the parser of tc's output."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.network.shaping import (
    BULK,
    FLOOR_SHARE,
    GUEST,
    HOST,
    OWNER_SHARE,
    URGENT,
    USABLE,
    Command,
    Filter,
    Qdisc,
    ReportError,
    build,
    detach,
    hooked,
    rates,
    read_filters,
    read_qdiscs,
    reserved,
    root_of,
    whose,
    worth,
)

LINK = 1e9
QUEUES = (
    '[{"kind":"noqueue","handle":"0:","dev":"lo","root":true,"refcnt":2,"options":{}},'
    '{"kind":"mq","handle":"0:","dev":"eth0","root":true,"options":{}},'
    '{"kind":"fq_codel","handle":"0:","dev":"eth0","parent":":1","options":{"limit":10240}},'
    '{"kind":"htb","handle":"6d65:","dev":"eth1","root":true,"options":{"r2q":10,"default":"0x10"}},'
    '{"kind":"clsact","handle":"ffff:","dev":"eth1","parent":"ffff:fff1","options":{}},'
    '{"kind":"fq","handle":"8001:","dev":"eth2","root":true,"options":{}}]'
)


def rate_of(commands: list[Command], classid: str, word: str = "rate") -> float:
    (words,) = [c.words for c in commands if "classid" in c.words and c.words[c.words.index("classid") + 1] == classid]
    return float(words[words.index(word) + 1].removesuffix("bit"))


def test_queue_owner_is_recognised() -> None:
    queues = read_qdiscs(QUEUES)
    assert whose(root_of(queues, "eth0")) == "nobody", "the kernel's own"
    assert whose(root_of(queues, "eth1")) == "ours"
    assert whose(root_of(queues, "eth2")) == "another"
    assert whose(root_of(queues, "lo")) == whose(root_of(queues, "none")) == "nobody"
    assert whose(Qdisc("htb", "1:", "eth0", True)) == whose(Qdisc("fq", "6d65:", "eth0", True)) == "another"
    assert hooked(queues, "eth1") == "clsact" and hooked(queues, "eth0") == ""


def test_filters_are_matched_by_handle_and_name() -> None:
    text = (
        '[{"protocol":"all","pref":1,"kind":"bpf","chain":0},{"protocol":"all","pref":1,"kind":"bpf","chain":0,"options":'
        '{"handle":"0xdeadbee","bpf_name":"mesh_guest:[*fsobj]","direct-action":true,"prog":{"id":9}}},'
        '{"protocol":"ip","pref":7,"kind":"u32","chain":0,"options":{"fh":"800:"}}]'
    )
    (found,) = read_filters(text, "egress")
    assert found == Filter(1, 0xDEADBEE, "mesh_guest", "egress")
    assert " ".join(detach("g0", found).words) == "filter del dev g0 egress pref 1 handle 0xdeadbee protocol all bpf"


@given(
    st.text()
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda s: (
            st.lists(s)
            | st.dictionaries(st.sampled_from(["kind", "handle", "dev", "options", "pref", "bpf_name"]) | st.text(), s)
        ),
    ).map(json.dumps)
)
def test_unexpected_tc_output_is_an_error(text: str) -> None:
    for read in (read_qdiscs, lambda said: read_filters(said, "egress")):
        try:
            read(text)
        except ReportError as error:
            assert "not understood" in str(error)


@pytest.mark.parametrize("need", [0.0, 1e5, 1e7, 1e12, math.inf])
def test_owner_keeps_half_of_link(need: float) -> None:
    given_bps = reserved(need, LINK)
    commands = rates("eth0", LINK, given_bps, "add")
    shares = [rate_of(commands, band.classid) for band in (HOST, URGENT, BULK, GUEST)]
    assert sum(shares) <= USABLE * LINK + 1
    assert shares[0] >= (OWNER_SHARE - 2 * FLOOR_SHARE) * USABLE * LINK - 1
    assert all(share >= FLOOR_SHARE * USABLE * LINK - 1 for share in shares)
    if math.isfinite(need) and need < 1e9 / 16:
        assert shares[1] >= need * 8, "the deadline is met, with what each packet costs besides"
    assert {rate_of(commands, band.classid, "ceil") for band in (HOST, URGENT, BULK, GUEST)} == {USABLE * LINK}


def test_spare_bandwidth_goes_to_host_first() -> None:
    order = sorted((HOST, URGENT, BULK, GUEST), key=lambda band: band.prio)
    assert order[:2] == [HOST, URGENT] and BULK.prio == GUEST.prio
    assert HOST.priority == 0x6D650010 and URGENT.classid == "6d65:20"


def test_default_queue_stays_in_host_class() -> None:
    assert not build("eth0", LINK, "fq_codel")[-1].must
    assert build("eth0", LINK, "fq_codel")[-1].words == ("qdisc", "add", "dev", "eth0", "parent", "6d65:10", "fq_codel")
    assert all(command.must for command in build("eth0", LINK, "pfifo_fast"))
    assert build("eth0", LINK, "")[0].words[-3:] == ("htb", "default", "10"), "who says nothing is the machine's own"


def test_rates_change_only_when_worthwhile() -> None:
    assert not worth(0, 0, LINK) and worth(0, 1e6, LINK) and worth(1e6, 0, LINK)
    assert not worth(1e8, 1.1e8, LINK) and not worth(1e8, 0.9e8, LINK)
    assert worth(1e8, 1.2e8, LINK) and worth(1e8, 0.8e8, LINK)


@given(st.lists(st.floats(0, 1e12) | st.just(math.inf), max_size=30))
def test_reserved_rate_tracks_need(needs: list[float]) -> None:
    given_bps = 0.0
    for need in needs:
        wanted = reserved(need, LINK)
        if worth(given_bps, wanted, LINK):
            given_bps = wanted
        assert abs(given_bps - wanted) <= 0.15 * given_bps and (given_bps > 0) == (wanted > 0)


def test_rates_of_a_gigabit_link() -> None:
    made = [one.words for one in rates("eth0", 1e9, 2e8, "add")]
    found = {words[words.index("classid") + 1]: words[words.index("rate") + 1] for words in made}
    assert found == {
        HOST.classid: "760400000bit",
        URGENT.classid: "200000000bit",
        BULK.classid: "9800000bit",
        GUEST.classid: "9800000bit",
    }
    for words in made:
        assert words[words.index("ceil") + 1] == "980000000bit" and words[words.index("quantum") + 1] == "60000"
        assert words[words.index("cburst") + 1] == "188036b", "64 KiB, and a millisecond of its rate"
    assert {words[words.index("burst") + 1] for words in made} == {"160586b", "90536b", "66761b"}
    assert reserved(1e6, 1e9) == pytest.approx(8.48e6) and reserved(math.inf, 1e9) == pytest.approx(0.49e9)


def test_queue_of_the_machine_is_that_of_another_program_unless_it_is_a_default() -> None:
    queues = [
        Qdisc("fq", "8001:", "eth0"),
        Qdisc("mq", "0:", "eth0", root=True),
        Qdisc("htb", "6d65:", "eth1", root=True),
    ]
    assert root_of(queues, "eth0") == queues[1] and root_of(queues, "eth2") is None
    kinds = [None, queues[1], queues[2], Qdisc("noqueue", "8001:"), Qdisc("htb", "1:"), Qdisc("fq", "6d65:")]
    assert [whose(one) for one in kinds] == ["nobody", "nobody", "ours", "nobody", "another", "another"]
