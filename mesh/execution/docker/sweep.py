"""Removal of containers and networks that an earlier daemon of this node left on the container engine."""

import contextlib
import logging
from typing import Any

from mesh.execution.docker.watchdog import LABEL_NODE

log = logging.getLogger(__name__)


def sweep_containers(client: Any, node: str, live: frozenset[str] = frozenset()) -> None:
    """Remove this node's containers, running or not, except those whose ids are in `live`."""
    import docker.errors

    mine = {"label": f"{LABEL_NODE}={node}"}
    for container in client.containers.list(
        all=True, filters=mine, sparse=True
    ):  # asks nothing of one that has gone since
        if container.id not in live:
            log.info("removing a container that an earlier run left: %s", container.short_id)
            with contextlib.suppress(docker.errors.APIError):
                container.remove(force=True, v=True)


def sweep_networks(client: Any, node: str, live: frozenset[str] = frozenset()) -> None:
    import docker.errors

    for network in client.networks.list(filters={"label": f"{LABEL_NODE}={node}"}):
        if network.name not in live:
            with contextlib.suppress(docker.errors.APIError):
                network.remove()
