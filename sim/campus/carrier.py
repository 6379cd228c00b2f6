"""Which flow belongs to which job, so that a departure breaks off those it must."""

from collections.abc import Callable, Sequence
from typing import cast

from sim.campus.fabric import SERVER
from sim.campus.guest import Host, Job
from sim.campus.network import Flow, Network, Path


class Carrier:
    def __init__(self, network: Network) -> None:
        self._network = network

    def send(self, job: Job, path: Path, count: float, done: Callable[[], None], yields: bool) -> Flow:
        """`done` is called when it is there, unless it was dropped."""
        return self._network.start(path, count, done, yields, job)

    def drop(self, flow: Flow) -> None:
        if not flow.over:
            self._network.stop(flow)

    def job_of(self, flow: Flow) -> Job | None:
        return None if flow.over else cast("Job", flow.owner)


def numbers(targets: Sequence[Host]) -> tuple[int, ...]:
    """Where a path leads: to these machines, or else to the file server."""
    return tuple([host.number for host in targets]) or (SERVER,)
