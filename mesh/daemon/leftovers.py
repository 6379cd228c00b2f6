"""Leftovers of a daemon that was killed: containers, their networks and rules, the network edge, mounted data sets, files of
encrypted ones.

The next start removes it. Where none is to come, `mesh down` does, and `mesh doctor` tells of it.
"""

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from ckptstore.dataset_store import remove_tree
from membership.identity import Identity, IdentityError, format_id, parse_id
from mesh.daemon.layout import Layout
from mesh.data import fuse, streams
from mesh.data.holdings import left_in_the_clear
from mesh.execution.docker.sweep import containers_of, sweep_containers, sweep_networks
from mesh.execution.docker.watchdog import LABEL_NODE
from mesh.execution.secret_files import SecretFiles
from mesh.network.edge import Edge, left_at
from mesh.network.egress import EgressError, Firewall, Policy, tag_of
from mesh.util.errors import MeshError
from mesh.util.text import plural

ASK_S = 5.0  # for an engine to answer (own choice)

log = logging.getLogger(__name__)


class Leftovers(msgspec.Struct, frozen=True):
    """`rules`: chains of the host's firewall. `edge`: where the switch of the network edge is. The last three are directories."""

    containers: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    edge: str = ""
    secrets: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Return the leftovers as text; empty if there are none."""
        parts = [
            _several(len(self.containers), "container"),
            _several(len(self.networks), "network"),
            _several(len(self.rules), "chain") + " of firewall rules" if self.rules else "",
            f"the network edge ({self.edge})" if self.edge else "",
            "secrets of jobs in memory" if self.secrets else "",
            _several(len(self.mounts), "mounted data set"),
            _several(len(self.trees), "data set in the clear", "data sets in the clear"),
        ]
        return ", ".join(filter(None, parts))


def find(where: Layout) -> Leftovers:
    """Find the leftovers of this node, whose daemon does not run. What cannot be checked (an engine that does not answer, rules
    without root) counts as none."""
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
        tuple(map(str, SecretFiles(parse_id(node)).left())) if node else (),
        tuple(map(str, fuse.mounts_below(where.data / streams.PLACE))),
        tuple(map(str, left_in_the_clear(where.data))),
    )


def remove(where: Layout) -> tuple[Leftovers, Leftovers]:
    """Remove the leftovers; return what was there and what still is. MeshError if a daemon has started meanwhile."""
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
            SecretFiles(parse_id(node)).clear()
        streams.sweep(where.data / streams.PLACE)
        for tree in left_in_the_clear(where.data):
            remove_tree(tree)
        if before.edge:
            Edge(where.edge, wanted=False).open()
        return before, find(where)


def _of_engine(client: Any, node: str) -> tuple[list[Any], list[Any]]:
    return containers_of(client, node), client.networks.list(filters={"label": f"{LABEL_NODE}={node}"})


@contextlib.contextmanager
def _engine() -> Any:
    """A client of this machine's engine; None if there is none, or it does not answer."""
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not Path(host.removeprefix("unix://")).exists():
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


def _several(count: int, *what: str) -> str:
    return plural(count, *what) if count else ""
