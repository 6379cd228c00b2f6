"""A Docker engine of a test's own, with its own images, beside the one that DOCKER_HOST names: two nodes need two."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

WAIT_S = 60.0


class Engine(NamedTuple):
    """`host`: its DOCKER_HOST; `pid`: of dockerd itself."""

    host: str
    pid: int


@contextmanager
def dockerd() -> Iterator[str]:
    """Its DOCKER_HOST, while it runs."""
    with dockerd_of() as engine:
        yield engine.host


@contextmanager
def dockerd_of() -> Iterator[Engine]:
    """Containers on it have no network, so that it touches nothing of this machine's."""
    root = Path(tempfile.mkdtemp(prefix="dk-", dir="/tmp"))
    host = f"unix://{root}/s"
    options = ["--data-root", f"{root}/data", "--exec-root", f"{root}/exec", "--pidfile", f"{root}/pid"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            ["dockerd", "-H", host, *options, "--bridge=none", "--iptables=false", "--ip6tables=false"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait(process, host, root)
        yield Engine(host, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _unmount(root)
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def client_of(host: str) -> Iterator[Any]:
    import docker

    client = docker.DockerClient(base_url=host, timeout=WAIT_S)
    try:
        yield client
    finally:
        client.close()


def _wait(process: "subprocess.Popen[bytes]", host: str, root: Path) -> None:
    import docker.errors

    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            with client_of(host) as client:
                client.ping()
                return
        except (docker.errors.DockerException, OSError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"dockerd did not start: {(root / 'log').read_text()[-1000:]}") from error
            time.sleep(0.1)


def _unmount(root: Path) -> None:
    """What a daemon that was killed has left mounted."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    for mount in sorted((line.split()[1] for line in lines if line.split()[1].startswith(str(root))), reverse=True):
        subprocess.run(["umount", "-l", mount], check=False)
