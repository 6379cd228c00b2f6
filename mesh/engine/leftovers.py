"""What a daemon that was killed has left on its machine: containers, their networks and rules, the network edge.

The next start removes it. Where none is to come, `mesh down` does, and `mesh doctor` tells of it.
"""

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from membership.identity import Identity, IdentityError, format_id
from mesh.api.errors import MeshError
from mesh.edge.edge import Edge, left_at
from mesh.engine.egress import EgressError, Firewall, Policy, tag_of
from mesh.engine.warden import LABEL_NODE
from mesh.layout import Layout

ASK_S = 5.0  # for an engine to say what it has; ours

log = logging.getLogger(__name__)


class Leftovers(msgspec.Struct, frozen=True):
    """`rules`: chains of the host's firewall. `edge`: where the switch of the network edge is."""

    containers: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    edge: str = ""

    @property
    def words(self) -> str:
        """Empty if nothing is left."""
        parts = [
            _several(len(self.containers), "container"),
            _several(len(self.networks), "network"),
            _several(len(self.rules), "chain") + " of firewall rules" if self.rules else "",
            f"the network edge ({self.edge})" if self.edge else "",
        ]
        return ", ".join(filter(None, parts))


def find(where: Layout) -> Leftovers:
    """Of this node, whose daemon does not run. What cannot be looked at (an engine that does not answer, rules without root) is
    taken to be none."""
    node = _node(where)
    containers: list[Any] = []
    networks: list[Any] = []
    rules: list[str] = []
    if node:
        with _engine() as client:
            if client is not None:
                containers, networks = _of_engine(client, node)
        with contextlib.suppress(EgressError):
            rules = Firewall(Policy(), tag_of(node)).left()
    return Leftovers(
        tuple(sorted(found.short_id for found in containers)),
        tuple(sorted(found.name for found in networks)),
        tuple(sorted(rules)),
        str(where.edge) if left_at(where.edge) else "",
    )


def remove(where: Layout) -> tuple[Leftovers, Leftovers]:
    """What was there, and what still is: another user's, or its engine does not answer. MeshError if a daemon has come."""
    with where.lock.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MeshError(f"a daemon starts or ends with {where.root} just now: try again") from error
        before = find(where)
        node = _node(where)
        if node:
            with _engine() as client:
                if client is not None:
                    sweep_containers(client, node)
                    sweep_networks(client, node)
            Firewall(Policy(), tag_of(node)).sweep()
        if before.edge:
            Edge(where.edge, wanted=False).open()
        return before, find(where)


def sweep_containers(client: Any, node: str, live: frozenset[str] = frozenset()) -> None:
    """Remove this node's containers, running or not, but those that are `live`."""
    import docker.errors

    mine = {"label": f"{LABEL_NODE}={node}"}
    for container in client.containers.list(all=True, filters=mine, ignore_removed=True):
        if container.id not in live:
            log.info("removing a container that an earlier run left: %s", container.short_id)
            with contextlib.suppress(docker.errors.APIError):
                container.remove(force=True)


def sweep_networks(client: Any, node: str, live: frozenset[str] = frozenset()) -> None:
    import docker.errors

    for network in client.networks.list(filters={"label": f"{LABEL_NODE}={node}"}):
        if network.name not in live:
            with contextlib.suppress(docker.errors.APIError):
                network.remove()


def _of_engine(client: Any, node: str) -> tuple[list[Any], list[Any]]:
    mine = {"label": f"{LABEL_NODE}={node}"}
    return client.containers.list(all=True, filters=mine, ignore_removed=True), client.networks.list(filters=mine)


@contextlib.contextmanager
def _engine() -> Any:
    """A client of this machine's engine; None if there is none, or it does not answer."""
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not host.startswith("unix://") or not Path(host.removeprefix("unix://")).exists():
        yield None
        return
    import docker
    import docker.errors
    import requests

    try:
        client = docker.from_env(timeout=ASK_S)
        client.ping()
    except (docker.errors.DockerException, requests.RequestException, OSError):
        yield None
        return
    try:
        yield client
    except (docker.errors.DockerException, requests.RequestException) as error:
        log.warning("the container engine: %s", error)
    finally:
        client.close()


def _node(where: Layout) -> str:
    with contextlib.suppress(IdentityError, OSError):
        return format_id(Identity.load(where.key).node_id)
    return ""


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}" if count else ""
