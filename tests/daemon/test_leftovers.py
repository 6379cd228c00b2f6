"""Leftovers of a killed daemon, with an engine, a firewall and directories in place of this machine's."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import docker.errors
import pytest
import requests

from membership.identity import Identity
from mesh.daemon import leftovers
from mesh.daemon.layout import Layout
from mesh.daemon.leftovers import Leftovers, find, remove
from mesh.execution.docker.watchdog import LABEL_NODE
from mesh.network.egress import EgressError


def test_leftovers_are_told_by_kind_and_number() -> None:
    all_kinds = Leftovers(("a", "b"), ("n",), ("chain",), "/run/edge", ("s",), ("m1", "m2"), ("t",))
    assert all_kinds.words == (
        "2 containers, 1 network, 1 chain of firewall rules, the network edge (/run/edge), secrets of jobs in memory, "
        "2 mounted data sets, 1 data set in the clear"
    )
    assert Leftovers().words == "" and Leftovers(trees=("a", "b")).words == "2 data sets in the clear"


class Machine:
    """What a killed daemon of this node has left, and what has been removed of it."""

    def __init__(self, root: Path) -> None:
        self.where, self.fails, self.open_clients = Layout(root), None, 0
        self.timeouts: list[float] = []
        root.mkdir(parents=True, exist_ok=True)
        Identity(b"k" * 32).save(self.where.key)
        self.node = leftovers._node(self.where)
        self.containers = [SimpleNamespace(short_id=name, node=self.node) for name in ("c2", "c1")]
        self.containers.append(SimpleNamespace(short_id="other", node="another node"))
        self.networks = [
            SimpleNamespace(name="net", node=self.node),
            SimpleNamespace(name="other", node="another node"),
        ]
        self.rules, self.edge, self.mounts = ["chain"], True, ["mount"]
        self.secrets, self.trees = ["secret"], ["tree"]

    def client(self, timeout: float) -> Any:
        self.timeouts.append(timeout)
        self.open_clients += 1

        def listed(kind: str) -> Any:
            def answer(filters: dict[str, str], **more: object) -> list[Any]:
                if self.fails:
                    raise self.fails
                assert more == ({"all": True, "sparse": True} if kind == "containers" else {})
                return [one for one in getattr(self, kind) if filters == {"label": f"{LABEL_NODE}={one.node}"}]

            return SimpleNamespace(list=answer)

        def close() -> None:
            self.open_clients -= 1

        return SimpleNamespace(
            containers=listed("containers"), networks=listed("networks"), close=close, ping=lambda: None
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    left = Machine(tmp_path / "state")

    def others(kind: str) -> list[Any]:
        return [one for one in getattr(left, kind) if one.node != left.node]

    def swept(kind: str) -> Any:
        return lambda client, node: setattr(left, kind, others(kind)) if node == left.node else None

    class Firewall:
        def __init__(self, policy: object, tag: str) -> None:
            assert tag == leftovers.tag_of(left.node)

        def left(self) -> list[str]:
            if left.rules is None:
                raise EgressError("not root")
            return left.rules

        def sweep(self) -> None:
            left.rules = []

    def clear(kind: str) -> None:
        setattr(left, kind, [])

    (tmp_path / "socket").touch()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/socket")
    monkeypatch.setattr(docker, "from_env", left.client)
    monkeypatch.setattr(leftovers, "sweep_containers", swept("containers"))
    monkeypatch.setattr(leftovers, "sweep_networks", swept("networks"))
    monkeypatch.setattr(leftovers, "Firewall", Firewall)
    monkeypatch.setattr(leftovers, "left_at", lambda place: left.edge)
    monkeypatch.setattr(
        leftovers,
        "SecretFiles",
        lambda node: SimpleNamespace(left=lambda: left.secrets, clear=lambda: clear("secrets")),
    )
    monkeypatch.setattr(leftovers.fuse, "mounts_below", lambda place: left.mounts)
    monkeypatch.setattr(leftovers.streams, "sweep", lambda place: clear("mounts"))
    monkeypatch.setattr(leftovers, "left_in_the_clear", lambda place: list(left.trees))
    monkeypatch.setattr(leftovers, "remove_tree", left.trees.remove)
    monkeypatch.setattr(
        leftovers, "Edge", lambda place, wanted: SimpleNamespace(open=lambda: setattr(left, "edge", wanted))
    )
    yield left
    assert not left.open_clients, "each client is closed"


def everything(machine: Machine) -> Leftovers:
    return Leftovers(("c1", "c2"), ("net",), ("chain",), str(machine.where.edge), ("secret",), ("mount",), ("tree",))


def test_what_this_node_left_is_found_and_removed_and_nothing_else(machine: Machine) -> None:
    assert find(machine.where) == everything(machine)
    assert remove(machine.where) == (everything(machine), Leftovers())
    assert [one.short_id for one in machine.containers] == [one.name for one in machine.networks] == ["other"]
    assert set(machine.timeouts) == {5.0}, "an engine that hangs holds up nobody"


def test_edge_that_is_not_there_is_left_alone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.edge = False
    monkeypatch.setattr(leftovers, "Edge", lambda place, wanted: pytest.fail("it opens the edge"))
    assert remove(machine.where)[0].edge == ""


@pytest.mark.parametrize("error", [docker.errors.DockerException("no"), requests.ConnectionError("no")])
def test_engine_that_fails_holds_up_nothing_else(machine: Machine, error: Exception) -> None:
    machine.fails = error
    found = find(machine.where)
    assert found.containers == found.networks == () and found.rules == ("chain",)
    remove(machine.where)
    assert not machine.rules and not machine.secrets


@pytest.mark.parametrize("host", ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:1"])
def test_engine_of_another_machine_or_none_is_not_asked(
    machine: Machine, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    assert find(machine.where).containers == () and not machine.timeouts


def test_what_cannot_be_checked_counts_as_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.rules = None  # type: ignore[assignment]
    assert find(machine.where).rules == () and find(machine.where).secrets == ("secret",)

    def refuses(timeout: float) -> Any:
        raise docker.errors.DockerException("no answer")

    monkeypatch.setattr(docker, "from_env", refuses)
    assert find(machine.where).containers == ()
    machine.where.key.unlink()
    assert find(machine.where) == Leftovers(edge=str(machine.where.edge), mounts=("mount",), trees=("tree",)), (
        "a directory without a key belongs to no node"
    )
