"""The firewall of containers with a fake iptables: what passes, and what is left after failures and kills."""

import ipaddress
import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.network import egress
from mesh.network.egress import EgressError, Firewall, Policy, chain_of, policy_of, rules, tag_of

TAG = "abc123"
LIST = policy_of("list", ("10.1.0.0/16", "192.0.2.7/32"))


class Iptables:
    """Chains of rules, with the verbs that the firewall uses. `fails` tells which calls fail."""

    def __init__(self) -> None:
        self.chains: dict[str, list[list[str]]] = {"INPUT": [["-j", "RETURN"]], "DOCKER-USER": [["-j", "RETURN"]]}
        self.calls: list[str] = []
        self.fails: Callable[[list[str]], bool] = lambda words: False

    def run(self, words: list[str], **how: Any) -> Any:
        assert words[:3] == ["iptables", "-w", "5"], "it waits for other programs that change rules"
        assert how["timeout"] > 5
        verb, *rest = words[3:]
        self.calls.append(verb)
        done = not self.fails(words[3:]) and self._do(verb, *rest)
        return SimpleNamespace(returncode=0 if done else 1, stdout=self._listed(), stderr="")

    def _do(self, verb: str, chain: str = "", *rule: str) -> bool:
        there, words = self.chains.get(chain), list(rule)
        if verb == "-N" and there is None:
            self.chains[chain] = []
        elif there is None:
            return verb == "-S" and not chain
        elif verb == "-A":
            there.append(words)
        elif verb == "-I":
            there.insert(0, words)
        elif verb in {"-C", "-D"} and words in there:
            if verb == "-D":
                there.remove(words)
        elif verb == "-F":
            there.clear()
        elif verb == "-X" and not there and not any(chain in one for some in self.chains.values() for one in some):
            del self.chains[chain]
        else:
            return verb == "-S"
        return True

    def _listed(self) -> str:
        return "".join(f"-N {chain}\n" for chain in self.chains)

    def passes(self, chain: str, bridge: str, to: str, state: str = "NEW") -> bool:
        """Tell whether a packet of a connection in this state passes this chain from a bridge."""
        for rule in self.chains[chain]:
            value = dict(pairwise(rule))
            if value.get("-i", bridge) != bridge:
                continue
            if "-d" in value and ipaddress.ip_address(to) not in ipaddress.ip_network(value["-d"]):
                continue
            if "--ctstate" in value and (state in value["--ctstate"].split(",")) == ("!" in rule):
                continue
            if value["-j"] in {"RETURN", "REJECT"}:
                return value["-j"] == "RETURN"
            if not self.passes(value["-j"], bridge, to, state):
                return False
        return True


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iptables:
    tables = Iptables()
    monkeypatch.setattr(subprocess, "run", tables.run)
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    return tables


def test_container_reaches_the_allowed_networks_and_answers_alone(tables: Iptables) -> None:
    firewall = Firewall(LIST, TAG)
    bridge, other = firewall.bridge(), firewall.bridge()
    assert len(bridge) <= 15 and bridge != other, "the kernel takes no longer name"
    firewall.shut(bridge)
    reached = [
        to for to in ("10.1.2.3", "10.2.0.1", "192.0.2.7", "192.0.2.8") if tables.passes("DOCKER-USER", bridge, to)
    ]
    assert reached == ["10.1.2.3", "192.0.2.7"]
    assert not tables.passes("INPUT", bridge, "10.1.0.1")
    for answer in ("ESTABLISHED", "RELATED"):
        assert tables.passes("DOCKER-USER", bridge, "10.2.0.1", answer)
        assert tables.passes("INPUT", bridge, "10.1.0.1", answer)
    assert tables.passes("INPUT", other, "10.1.0.1") and tables.passes("DOCKER-USER", other, "10.2.0.1")
    assert firewall.bridges == {bridge}


def test_campus_is_the_private_networks(tables: Iptables) -> None:
    firewall = Firewall(policy_of("campus", ()), TAG)
    firewall.shut("m1")
    inside = ("10.0.0.0", "10.255.255.255", "172.16.0.0", "172.31.255.255", "192.168.0.0", "192.168.255.255")
    outside = ("9.255.255.255", "11.0.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255", "192.169.0.0", "8.8.8.8")
    assert all(tables.passes("DOCKER-USER", "m1", to) for to in inside)
    assert not any(tables.passes("DOCKER-USER", "m1", to) for to in outside)


def test_rules_change_under_one_lock(tables: Iptables) -> None:
    """A bridge that is opened while another thread repairs the rules would get them back."""
    firewall, locked = Firewall(LIST, TAG), list[bool]()
    tables.fails = lambda words: locked.append(firewall._lock.locked()) is not None
    firewall.shut("m1")
    del tables.chains["INPUT"][0]
    firewall.repair()
    firewall.open("m1")
    firewall.sweep()
    assert locked and all(locked)


def test_nothing_is_left_of_a_bridge_that_is_opened(tables: Iptables) -> None:
    firewall = Firewall(LIST, TAG)
    before = str(tables.chains)
    firewall.shut("m1")
    firewall.shut("m2")
    tables.chains["INPUT"].append(rules("m1", LIST)[-1][1:])  # once more, by hand
    firewall.open("m1")
    assert chain_of("m1") not in tables.chains and "m1" not in str(tables.chains) and firewall.bridges == {"m2"}
    shut = firewall.bridges
    for _ in range(2):
        firewall.open("m2")
    assert shut == {"m2"} and str(tables.chains) == before and firewall.bridges == frozenset()


@pytest.mark.parametrize("at", range(7))
def test_bridge_that_cannot_be_shut_is_refused_and_leaves_nothing(tables: Iptables, at: int) -> None:
    firewall, before = Firewall(LIST, TAG), str(tables.chains)
    tables.fails = lambda words: words[0] in {"-N", "-A", "-I"} and len(tables.calls) == at + 1
    with pytest.raises(EgressError, match=r"iptables -[NAI] .*: 1"):
        firewall.shut("m1")
    assert str(tables.chains) == before and firewall.bridges == frozenset()


def test_rules_that_were_flushed_are_restored_once(tables: Iptables) -> None:
    firewall = Firewall(LIST, TAG)
    firewall.shut("m1")
    whole = str(tables.chains)
    firewall.repair()
    assert str(tables.chains) == whole and tables.calls[-1] == "-C", "nothing is changed"
    for chain in ("INPUT", "DOCKER-USER", chain_of("m1")):
        del tables.chains[chain][0]
        firewall.repair()
        assert str(tables.chains) == whole
    firewall.shut("m2")
    for bridge in ("m1", "m2"):
        tables.chains[chain_of(bridge)].clear()
    firewall.repair()
    assert not any(tables.passes("DOCKER-USER", bridge, "10.2.0.1") for bridge in ("m1", "m2"))
    firewall.open("m2")
    tables.chains.pop(chain_of("m1"))
    tables.fails = lambda words: words[0] == "-N"
    with pytest.raises(EgressError):
        firewall.repair()
    assert firewall.bridges == {"m1"}, "it is tried again"


def test_rules_of_an_earlier_run_of_this_node_are_swept(tables: Iptables, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, now, foreign = (Firewall(LIST, tag) for tag in (TAG, TAG, "fff000"))
    for firewall in (earlier, earlier, now, foreign):
        firewall.shut(firewall.bridge())
    left = sorted(earlier.bridges)
    assert now.left() == left and len(left) == 2 and Firewall(LIST, TAG[:-1]).left() == []
    for name, answer in (("getuid", lambda: 1000), ("which", lambda name: None)):
        with monkeypatch.context() as there:
            there.setattr(os if name == "getuid" else shutil, name, answer)
            called = len(tables.calls)
            now.sweep()
            assert len(tables.calls) == called
    now.sweep()
    assert now.left() == [] and not any(bridge in str(tables.chains) for bridge in left)
    assert all(bridge in str(tables.chains) for bridge in now.bridges | foreign.bridges)
    tables.fails = lambda words: True
    now.sweep()


def test_what_keeps_a_policy_from_being_enforced_is_told(tables: Iptables, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Firewall(LIST, TAG).problem() == ""
    del tables.chains["DOCKER-USER"]
    assert Firewall(LIST, TAG).problem() == "iptables -S DOCKER-USER: 1"
    assert Firewall(Policy(), TAG).problem() == "", "no network needs no rules"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "is not installed" in Firewall(LIST, TAG).problem() and Firewall(Policy(), TAG).problem() == ""


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("iptables", 10), FileNotFoundError("iptables")])
def test_iptables_that_does_not_answer_enforces_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: object, **how: object) -> None:
        raise error

    monkeypatch.setattr(egress.subprocess, "run", fail)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert Firewall(LIST, TAG).problem().startswith("iptables: ")


def test_policies_tell_what_they_allow() -> None:
    assert Policy().words == policy_of("none", ()).words == "no network"
    assert policy_of("campus", ()).words == "the campus network only"
    assert LIST.words == "only 10.1.0.0/16, 192.0.2.7/32"
    assert Policy() == policy_of("none", ()) and LIST.allowed == ("10.1.0.0/16", "192.0.2.7/32")
    for kind in ("campus", "none"):
        with pytest.raises(ValueError, match="is for egress"):
            policy_of(kind, ("10.1.0.0/16",))
    with pytest.raises(ValueError, match="needs egress_allow"):
        policy_of("list", ())
    for wrong in ("10.1.2.3/16", "2001:db8::/32", "campus", "10.0.0.0/33"):
        with pytest.raises(ValueError, match=f"{wrong!r} is not an IPv4 network"):
            policy_of("list", ("10.1.0.0/16", wrong))
    assert len(tag_of("node")) == 6 and tag_of("node") != tag_of("other")
