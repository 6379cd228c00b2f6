"""Egress policy of containers: no addresses (the default), the campus, or a list, enforced by the host's firewall.

With `none` a container has no network. Otherwise it is alone on its own bridge, whose rules exist before it starts: in Docker's
chain for them (DOCKER-USER) for traffic to other machines, and in INPUT for this machine, which it cannot reach at any address.
Permitted traffic returns to Docker's own rules, which separate bridges. The rules are removed with the guest; those of an earlier
run are removed at the next start, and rules that were flushed are restored.

`rules` and `Policy` are pure; `Firewall` does the I/O.
"""

import contextlib
import ipaddress
import os
import re
import shutil
import subprocess
import threading
from hashlib import blake2b
from typing import Literal

import msgspec

Kind = Literal["none", "campus", "list"]
CAMPUS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")  # RFC 1918
COMMAND_S = 10.0
ADMIN = "icmp-admin-prohibited"


class EgressError(RuntimeError):
    """The policy cannot be enforced here; the text says why."""


class Policy(msgspec.Struct, frozen=True):
    """The addresses that containers may reach. `allowed` are IPv4 networks; containers have no IPv6."""

    kind: Kind = "none"
    allowed: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return {"none": "no network", "campus": "the campus network only", "list": f"only {', '.join(self.allowed)}"}[
            self.kind
        ]


def policy_of(kind: Kind, listed: tuple[str, ...]) -> Policy:
    """Return the policy of the owner's settings; ValueError says what is wrong with them."""
    if kind == "list" and not listed:
        raise ValueError('egress = "list" needs egress_allow, a list of networks like "10.1.0.0/16"')
    for text in listed:
        try:
            ipaddress.IPv4Network(text)
        except ValueError as error:
            raise ValueError(f"egress_allow: {text!r} is not an IPv4 network ({error})") from error
    if kind != "list" and listed:
        raise ValueError('egress_allow is for egress = "list" only')
    return Policy(kind, {"none": (), "campus": CAMPUS, "list": listed}[kind])


def tag_of(node: str) -> str:
    """Return six letters and digits that identify a node's bridges."""
    return blake2b(node.encode(), digest_size=3).hexdigest()


def chain_of(bridge: str) -> str:
    return f"MESH-{bridge}"


def rules(bridge: str, policy: Policy) -> list[list[str]]:
    """Return the iptables arguments of each rule, in order; the last two lead packets into the chain."""
    chain, ours = chain_of(bridge), ["-i", bridge]
    answers = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"]
    others = ["-m", "conntrack", "!", "--ctstate", "RELATED,ESTABLISHED"]
    reject = ["-j", "REJECT", "--reject-with", ADMIN]
    return [
        [chain, *answers, "-j", "RETURN"],
        *([chain, "-d", network, "-j", "RETURN"] for network in policy.allowed),
        [chain, *reject],
        ["DOCKER-USER", *ours, "-j", chain],
        ["INPUT", *ours, *others, *reject],
    ]


class Firewall:
    """The firewall rules of one daemon's containers. Calls block; thread-safe."""

    def __init__(self, policy: Policy, tag: str) -> None:
        """`tag`: at most six lower-case letters and digits, unique among this machine's daemons."""
        self.policy = policy
        self._tag = tag
        self._bridges: set[str] = set()
        self._lock = threading.Lock()

    def problem(self) -> str:
        """Return why the policy cannot be enforced here; empty if it can."""
        if self.policy.kind == "none":
            return ""
        if shutil.which("iptables") is None:
            return "iptables, which enforces the egress policy, is not installed"
        try:
            self._call("-S", "DOCKER-USER")
        except EgressError as error:
            return str(error)
        return ""

    def bridge(self) -> str:
        """Return a new name for a bridge; the kernel allows 15 characters."""
        return f"m{self._tag}{os.urandom(4).hex()}"

    def shut(self, bridge: str) -> None:
        """Add the rules before anything is on the bridge. EgressError, and nothing is left, if that fails."""
        with self._lock:
            try:
                self._put(bridge)
            except EgressError:
                self._take(bridge)
                raise
            self._bridges.add(bridge)

    def open(self, bridge: str) -> None:
        """Remove the rules once nothing is on the bridge."""
        with self._lock:
            self._bridges.discard(bridge)
            self._take(bridge)

    @property
    def bridges(self) -> frozenset[str]:
        """Return the bridges that have rules now."""
        return frozenset(self._bridges)

    def repair(self) -> None:
        """Restore rules that were flushed. EgressError if that fails."""
        with self._lock:
            for bridge in self._bridges:
                if not all(self._holds("-C", *rule) for rule in rules(bridge, self.policy)):
                    self._take(bridge)
                    self._put(bridge)

    def sweep(self) -> None:
        """Remove what an earlier run left."""
        if shutil.which("iptables") is None or os.getuid() != 0:
            return
        with self._lock, contextlib.suppress(EgressError):
            for bridge in self.left():
                self._take(bridge)

    def left(self) -> list[str]:
        """Return bridges of an earlier run that still have rules. EgressError if they cannot be listed."""
        found = set(re.findall(rf"-N MESH-(m{self._tag}[0-9a-f]{{8}})\b", self._call("-S")))
        return sorted(found - self._bridges)

    def _put(self, bridge: str) -> None:
        self._call("-N", chain_of(bridge))
        for rule in rules(bridge, self.policy):
            self._call("-A" if rule[0] == chain_of(bridge) else "-I", *rule)

    def _take(self, bridge: str) -> None:
        for rule in rules(bridge, self.policy)[-2:]:
            while self._holds("-D", *rule):
                pass
        for verb in ("-F", "-X"):
            self._holds(verb, chain_of(bridge))

    def _holds(self, *words: str) -> bool:
        with contextlib.suppress(EgressError):
            self._call(*words)
            return True
        return False

    @staticmethod
    def _call(*words: str) -> str:
        try:
            done = subprocess.run(
                ["iptables", "-w", "5", *words], capture_output=True, text=True, check=False, timeout=COMMAND_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EgressError(f"iptables: {error}") from error
        if done.returncode:
            raise EgressError(f"iptables {' '.join(words)}: {done.stderr.strip()[:200] or done.returncode}")
        return done.stdout
