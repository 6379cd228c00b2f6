"""Guests with the network of a proxy alone: processes and containers, and no engine that cannot do it."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mesh.execution.docker.engine import DockerEngine
from mesh.execution.engine import EngineError
from mesh.execution.guest_network import PORT
from mesh.execution.process.engine import ProcessEngine
from mesh.network.egress import policy_of
from mesh.util.other_network import listen_in
from mesh.util.processes import process_of
from tests.container_images import busybox_image
from tests.execution.bench import Bench
from tests.execution.network_guest import CURL, see_that_it_goes_on, see_what_it_reaches


async def test_guest_reaches_its_hosts_alone(bench: Bench) -> None:
    engine = bench.engine
    if not (await engine.availability()).proxies:
        assert isinstance(engine, ProcessEngine) and not engine._namespaces
        with pytest.raises(EngineError, match="kept from the network"):
            await bench.shell("true", proxy=lambda listener: listener.close())
        return
    if engine.name == "apptainer":
        pytest.skip("its image has no curl")
    await see_what_it_reaches(bench, busybox_image(CURL) if bench.image else None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", PORT), 5)  # nobody else has the job's proxy


async def test_guest_that_asks_for_nothing_starts_and_ends(bench: Bench) -> None:
    if (await bench.engine.availability()).proxies:
        await see_that_it_goes_on(bench)


@pytest.mark.docker
async def test_container_has_no_bridge_beside_its_proxy(tmp_path: Path) -> None:
    """An owner may allow containers a network; a job that names hosts gets these alone."""
    bench = Bench(DockerEngine(f"wide-{os.getpid()}", policy=policy_of("list", ("127.0.0.0/8",))), tmp_path, None)
    try:
        assert (await bench.engine.availability()).ok
        await see_what_it_reaches(bench, busybox_image(CURL))
    finally:
        await bench.engine.close()


@pytest.mark.docker
async def test_container_waits_for_its_proxy(bench: Bench) -> None:
    """Its command must not run before its proxy listens: with a proxy that is never there, it does not run at all."""
    if not bench.image:
        return

    def refuse(listener: socket.socket) -> None:
        time.sleep(1)  # a command that waits for nothing would have ended by now
        listener.close()
        raise OSError("no proxy")

    with pytest.raises(EngineError, match="no proxy"):
        await bench.shell("echo ran > $MESH_OUT_DIR/file", proxy=refuse)
    assert not (bench.root / "out" / "file").exists()


def test_this_machines_network_is_never_listened_in() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        process = process_of(child.pid)
        assert process is not None
        with pytest.raises(OSError, match="the network of this machine"):
            listen_in(process, PORT)
        with pytest.raises(OSError, match="has ended"):
            listen_in(process._replace(started=process.started + 1), PORT)
    finally:
        child.communicate(b"\n")
