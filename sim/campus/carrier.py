"""Which flow belongs to which job, so that a departure breaks off those it must."""

from collections.abc import Callable, Sequence

from sim.campus.fabric import SERVER
from sim.campus.guest import Host, Job
from sim.campus.network import Flow, Link, Network


class Carrier:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._jobs: dict[Flow, Job] = {}

    def send(
        self, job: Job, path: Sequence[tuple[Link, float]], count: float, done: Callable[[], None], yields: bool
    ) -> Flow:
        """`done` is called when it is there, unless it was dropped."""

        def arrived() -> None:
            self._jobs.pop(flow, None)
            done()

        flow = self._network.start(path, count, arrived, yields)
        self._jobs[flow] = job
        return flow

    def drop(self, flow: Flow) -> None:
        if self._jobs.pop(flow, None) is not None:
            self._network.stop(flow)

    def job_of(self, flow: Flow) -> Job | None:
        return self._jobs.get(flow)


def numbers(targets: Sequence[Host]) -> tuple[int, ...]:
    """Where a path leads: to these machines, or else to the file server."""
    return tuple(host.number for host in targets) or (SERVER,)
