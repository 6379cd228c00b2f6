"""joblib on the mesh, and with it scikit-learn: each batch of calls is a job. docs/how-to/executors.md.

mesh.sdk.integrations.joblib.register()
with joblib.parallel_config(backend="mesh", memory="4g"):
    joblib.Parallel()(joblib.delayed(train)(seed) for seed in range(20))
"""

import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Unpack

from joblib.parallel import AutoBatchingMixin, ParallelBackendBase, register_parallel_backend

from mesh.sdk.futures import Client, Executor
from mesh.sdk.payload import Terms
from mesh.util.errors import MeshError

LEAST = 2  # places that n_jobs=-1 comes to: joblib makes calls here, without any backend, where there is one


class Backend(AutoBatchingMixin, ParallelBackendBase):
    """A joblib backend that submits jobs with these terms, through `client` or this user's daemon."""

    default_n_jobs = -1
    supports_retrieve_callback = True
    # Seconds from a batch's submission to its result, between which joblib makes batches of calls that are shorter.
    MIN_IDEAL_BATCH_DURATION = 10.0  # a job itself costs about one second (own choice)
    MAX_IDEAL_BATCH_DURATION = 60.0  # work repeated after a lost node (own choice)

    def __init__(self, nesting_level: int | None = None, client: Client | None = None, **terms: Unpack[Terms]) -> None:
        super().__init__(nesting_level=nesting_level)
        self._client, self._terms = client or Client(), terms
        self._n_jobs = LEAST
        self._executor: Executor | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of jobs: -1 means as many as there are free places, -2 one fewer, as in joblib."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        if n_jobs < 0:
            return max(LEAST, sum(places(row, self._terms) for row in self._client.nodes()) + 1 + n_jobs)
        return n_jobs

    def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
        self._n_jobs = super().configure(n_jobs, parallel, **options)
        return self._n_jobs

    def start_call(self) -> None:
        self._executor = Executor(self._client, max_workers=self._n_jobs, **self._terms)

    def submit(self, func: Any, callback: Callable[[Future[Any]], object] | None = None) -> Future[Any]:
        """Submit a batch of calls as one job."""
        assert self._executor is not None
        first = func.items[0][0]
        things = [thing for function, args, kwargs in func.items for thing in (function, *args, *kwargs.values())]

        def batch(*_: Any) -> Any:  # travels by value, as every closure: nodes need joblib, but not this module
            return func()

        batch.__name__ = getattr(first, "__name__", "batch")
        batch.func = first  # type: ignore[attr-defined]  # as functools.partial has it: what this is a run of
        future: Future[Any]
        try:
            future = self._executor.submit(batch, *things)
        except Exception as error:  # joblib may have called this where nobody would hear of it, and would wait for ever
            future = Future()
            future.set_exception(error)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel the jobs after a failed call or Ctrl-C."""
        if self._executor is None:
            return
        try:
            self._executor.shutdown(wait=False, cancel_futures=True)
        except MeshError as error:
            warnings.warn(f"jobs of this call go on: {error}", stacklevel=2)

    def terminate(self) -> None:
        self.reset_batch_stats()


def register() -> None:
    """Register `backend="mesh"` with joblib in this process."""
    register_parallel_backend("mesh", Backend)


def places(row: dict[str, Any], terms: Terms) -> int:
    """Return how many jobs with these terms a node could start now, by its free GPUs, shares or slots."""
    if row["state"] != "alive" or not row["lending"]:
        return 0
    if share := terms.get("gpu_share"):
        return sum(left["share"] // share for left in row["gpu_room"])
    match terms.get("gpus", 0):
        case 0:
            return int(row["slots_free"])
        case "auto":
            return int(row["gpus_free"])
        case gpus:
            return int(row["gpus_free"] // gpus)
