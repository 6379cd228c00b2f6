"""Removal of containers and networks that an earlier daemon of this node left on the container engine."""

import contextlib
import logging
from typing import Any

from mesh.execution.docker.watchdog import LABEL_NODE

log = logging.getLogger(__name__)


def containers_of(client: Any, node: str) -> list[Any]:
    """Return this node's containers, running or not, without asking about each: one may have gone since."""
    found: list[Any] = client.containers.list(all=True, filters={"label": f"{LABEL_NODE}={node}"}, sparse=True)
    return found


def sweep_containers(client: Any, node: str, live: frozenset[str] = frozenset()) -> None:
    """Remove this node's containers, running or not, except those whose ids are in `live`."""
    import docker.errors

    for container in containers_of(client, node):
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
