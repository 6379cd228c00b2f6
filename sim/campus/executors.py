"""Where replications are computed: in this process, in several on this machine, or on a Dask cluster. All give the same results.

Each is a `concurrent.futures.Executor`, or none for this process; a study knows no more of it (`study.perform`).
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
HOW_TO_INSTALL = "Dask is not installed: pip install 'campus-mesh[dask]', here and on the machines that compute"
ADDRESS = re.compile(r"(?:[a-z]+://)?[^\s/:]+:\d{1,5}|(?:[a-z]+://)?\[[0-9a-fA-F:]+\]:\d{1,5}")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ANSWERS_S = 10.0  # that a Dask scheduler has to answer in; Dask's own default is 30


class ExecutorError(ValueError):
    """There is nobody to compute: the text says why, and what to do."""


@contextmanager
def executor(
    kind: Kind, workers: int | None = None, address: str | None = None, most: int = 1
) -> Iterator[Executor | None]:
    """`workers`: processes on this machine, by default one for each core, and no more than `most`. `address`: of a running Dask
    scheduler; without it, Dask computes on this machine. At the end, what has not begun is not computed any more."""
    if address is not None and kind != "dask":
        raise ExecutorError(f"an address is of a Dask scheduler, and the executor is {kind}: add --executor dask")
    count = min(workers or os.cpu_count() or 1, max(1, most))
    if kind == "dask":
        with _dask(count, address) as found:
            yield found
    elif kind == "serial" or count < 2:
        yield None
    else:
        pool = ProcessPoolExecutor(count, initializer=_end_with, initargs=(os.getpid(),))
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _end_with(reader: int) -> None:
    """A worker says nothing of Ctrl-C: the process that reads its results does. If that is killed, the worker would wait for more
    to do for ever; on Linux it ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != reader:  # it was before that
            os._exit(1)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started now never hear Ctrl-C: whoever started them ends them."""
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
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what goes wrong comes back as an exception
    if address is not None and not ADDRESS.fullmatch(address):
        raise ExecutorError(
            f"{address!r} is no address of a Dask scheduler: write tcp://HOST:PORT, as it prints when it starts"
        )
    cluster = None
    try:
        if address is None:
            with _deaf():
                cluster = LocalCluster(
                    n_workers=count,
                    threads_per_worker=1,
                    dashboard_address=None,
                    host="127.0.0.1",
                    silence_logs=logging.CRITICAL,
                )
        client = Client(cluster or address, timeout=ANSWERS_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        if cluster is not None:
            cluster.close()
        raise ExecutorError(f"no Dask scheduler answers at {address}: {str(error)[:200]}") from error
    try:
        found: Executor = client.get_executor(pure=False)
        try:
            yield found
        finally:
            found.shutdown(wait=False)  # what runs is given up: nobody waits for it
    finally:
        client.close()
        if cluster is not None:
            cluster.close()
