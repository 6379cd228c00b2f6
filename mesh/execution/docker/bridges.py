"""One bridge network per container that may reach a network, with the owner's firewall rules while it exists."""

import contextlib
import logging
from typing import Any

import docker.errors
import requests

from mesh.execution.docker.sweep import sweep_networks
from mesh.execution.docker.watchdog import LABEL_NODE
from mesh.execution.engine import EngineError
from mesh.network.edge import Edge
from mesh.network.egress import EgressError, Firewall
from mesh.network.tc import EdgeError

log = logging.getLogger(__name__)


class Bridges:
    """The bridges of one node. Calls block. `edge` can cut a bridge off in the kernel (docs/explanation/edge.md)."""

    def __init__(self, firewall: Firewall, labels: dict[str, str], edge: Edge | None = None) -> None:
        self._firewall, self._labels, self._edge = firewall, labels, edge

    @property
    def words(self) -> str:
        return self._firewall.policy.words

    def problem(self, engine: str) -> str:
        if self._firewall.policy.kind != "none" and engine != "Docker":
            return f"{engine} allows no rules before its own"
        return self._firewall.problem()

    def make(self, client: Any) -> str:
        """Make a network for one container; return its name, or "none". EngineError if the policy could not be enforced."""
        if self._firewall.policy.kind == "none":
            return "none"
        name = self._firewall.bridge()
        try:
            problem = self._firewall.problem()
            if problem:
                raise EgressError(problem)
            self._firewall.shut(name)
        except EgressError as error:
            raise EngineError(f"its network could not be limited to {self.words}: {error}") from error
        options = {
            "com.docker.network.bridge.name": name,
            "com.docker.network.bridge.enable_icc": "false",
            "com.docker.network.enable_ipv6": "false",  # the rules are IPv4's; from Docker 27 on daemon.json may say otherwise
        }
        try:
            client.networks.create(name, driver="bridge", options=options, labels=self._labels)
        except (docker.errors.APIError, requests.RequestException) as error:
            self._firewall.open(name)
            raise EngineError(f"Docker could not make a network for it: {error}") from error
        if self._edge is not None:
            try:
                self._edge.attach(name)
            except EdgeError as error:  # the firewall still holds; traffic stops only with its processes
                log.info("the network %s cannot be cut off in the kernel: %s", name, error)
        return name

    def remove(self, client: Any, name: str) -> None:
        """Remove a network after its container. If the bridge stays, its rules stay too: the next start removes both."""
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
        """Restore rules that were flushed. EgressError if that fails."""
        self._firewall.repair()

    def sweep(self, client: Any) -> None:
        sweep_networks(client, self._labels[LABEL_NODE], self._firewall.bridges)
        self._firewall.sweep()
