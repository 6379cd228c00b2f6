"""Executors of replications: this process, several processes, or a Dask cluster. All give the same results.

Each is a `concurrent.futures.Executor`, or None for this process; `study.perform` needs nothing else.
"""

import ctypes
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Literal

Kind = Literal["serial", "process", "dask"]
KINDS: tuple[Kind, ...] = ("serial", "process", "dask")
HOW_TO_INSTALL = "Dask is not installed: run pip install distributed here and on the machines that compute"
ADDRESS = re.compile(r"(?:[a-z]+://)?[^\s/:]+:\d{1,5}|(?:[a-z]+://)?\[[0-9a-fA-F:]+\]:\d{1,5}")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
CONNECT_TIMEOUT_S = 10.0  # Dask's default is 30 s


class ExecutorError(ValueError):
    """No executor can be started; the text says why and what to do."""


@contextmanager
def executor(
    kind: Kind, workers: int | None = None, address: str | None = None, tasks: int = 1
) -> Iterator[Executor | None]:
    """Provide an executor; leaving the context cancels tasks that have not started.

    `workers` is the number of local processes, by default one for each core, and at most `tasks`. `address` is that of a
    running Dask scheduler; without it, Dask runs on this machine.
    """
    if address is not None and kind != "dask":
        raise ExecutorError(f"--dask ADDRESS is for Dask, but the executor is {kind}: add --executor dask")
    count = min(workers or os.cpu_count() or 1, max(1, tasks))
    if kind == "dask":
        with _dask(count, address) as found:
            yield found
    elif kind == "serial" or count < 2:
        yield None
    else:
        pool = ProcessPoolExecutor(count, initializer=_prepare_worker, initargs=(os.getpid(),))
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _prepare_worker(parent: int) -> None:
    """Make a worker end silently on Ctrl-C, and on Linux when its parent dies: it would wait for tasks for ever."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C inside this context; their parent ends them."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _dask(count: int, address: str | None) -> Iterator[Executor]:
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise ExecutorError(HOW_TO_INSTALL) from error
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors come back as exceptions
    if address is not None and not ADDRESS.fullmatch(address):
        raise ExecutorError(
            f"{address!r} is not the address of a Dask scheduler: write tcp://HOST:PORT, as the scheduler prints it"
        )
    cluster = None
    try:
        if address is None:
            with _ignoring_interrupts():
                cluster = LocalCluster(
                    n_workers=count,
                    threads_per_worker=1,
                    dashboard_address=None,
                    host="127.0.0.1",
                    silence_logs=logging.CRITICAL,
                )
        client = Client(cluster or address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        if cluster is not None:
            cluster.close()
        raise ExecutorError(f"no Dask scheduler answers at {address}: {str(error)[:200]}") from error
    try:
        found: Executor = client.get_executor(pure=False)
        try:
            yield found
        finally:
            found.shutdown(wait=False)  # nobody waits for the tasks that still run
    finally:
        client.close()
        if cluster is not None:
            cluster.close()
