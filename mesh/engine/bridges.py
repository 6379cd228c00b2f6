"""A bridge for each container that may reach a network, with its owner's rules on it for as long as it is there."""

import contextlib
import logging
from typing import Any

import docker.errors
import requests

from mesh.edge.edge import Edge
from mesh.edge.tc import EdgeError
from mesh.engine.egress import EgressError, Firewall
from mesh.engine.engine import EngineError
from mesh.engine.leftovers import sweep_networks
from mesh.engine.warden import LABEL_NODE

log = logging.getLogger(__name__)


class Bridges:
    """Its calls block. `edge`: what can cut a bridge off, where the kernel lets us (docs/edge.md)."""

    def __init__(self, firewall: Firewall, node: str, edge: Edge | None = None) -> None:
        self._firewall, self._node, self._edge = firewall, node, edge

    @property
    def words(self) -> str:
        return self._firewall.policy.words

    def problem(self, engine: str) -> str:
        if self._firewall.policy.kind != "none" and engine != "Docker":
            return f"{engine} lets nobody's rules come before its own"
        return self._firewall.problem()

    def make(self, client: Any) -> str:
        """The name of a network for one container, "none" where it may have none. EngineError if nothing would keep it in."""
        if self._firewall.policy.kind == "none":
            return "none"
        name = self._firewall.bridge()
        try:
            problem = self._firewall.problem()
            if problem:
                raise EgressError(problem)
            self._firewall.shut(name)
        except EgressError as error:
            raise EngineError(f"nothing here would keep it to {self.words}: {error}") from error
        options = {
            "com.docker.network.bridge.name": name,
            "com.docker.network.bridge.enable_icc": "false",
            "com.docker.network.enable_ipv6": "false",  # the rules are IPv4's; from Docker 27 on daemon.json may say otherwise
        }
        try:
            client.networks.create(name, driver="bridge", options=options, labels={LABEL_NODE: self._node})
        except (docker.errors.APIError, requests.RequestException) as error:
            self._firewall.open(name)
            raise EngineError(f"Docker could not make a network for it: {error}") from error
        if self._edge is not None:
            try:
                self._edge.attach(name)
            except EdgeError as error:  # it is kept in all the same, but ends with its processes only
                log.info("the network %s cannot be cut off in the kernel: %s", name, error)
        return name

    def remove(self, client: Any, name: str) -> None:
        """Once its container is removed. Its rules stay if the bridge does: the next start removes both."""
        if name == "none":
            return
        if self._edge is not None:
            with contextlib.suppress(EdgeError):
                self._edge.detach(name)
        try:
            client.api.remove_network(name)
        except docker.errors.NotFound:
            pass
        except (docker.errors.APIError, requests.RequestException) as error:
            log.warning("the network %s stays for now: %s", name, error)
            return
        self._firewall.open(name)

    def repair(self) -> None:
        """EgressError if rules that were flushed cannot be put back."""
        self._firewall.repair()

    def sweep(self, client: Any) -> None:
        sweep_networks(client, self._node, self._firewall.bridges)
        self._firewall.sweep()
