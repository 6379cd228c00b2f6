"""Docker engines for single tests, each with its own images, beside the one that DOCKER_HOST names."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cleanup import cleanup

WAIT_S = 60.0


class Dockerd:
    """A running dockerd; `host` is its DOCKER_HOST. With `live`, its containers continue while it is stopped.

    Containers have no network. The engine has its own bridge, because without one it would remove `docker0`; it shares the
    network namespace, to reach registries on loopback.
    """

    def __init__(self, live: bool = False, *options: str, within: tuple[str, ...] = ()) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="dk-", dir="/tmp"))
        self._root.chmod(0o711)  # for an engine that maps users
        self._live, self._options, self._within = live, options, within
        self._bridge = f"dk{os.urandom(5).hex()}"
        address = f"10.{os.urandom(1)[0]}.{os.urandom(1)[0]}.1/28"
        subprocess.run(["ip", "link", "add", self._bridge, "type", "bridge"], check=True)
        subprocess.run(["ip", "address", "add", address, "dev", self._bridge], check=True)
        unmount = f"grep -o ' {self._root}/[^ ]*' /proc/mounts | sort -r | xargs -r umount -l"
        cleanup().undo("sh", "-c", f"{unmount}; rm -rf {self._root}; ip link delete {self._bridge}")
        self.host = f"unix://{self._root}/s"
        self.start()

    def start(self) -> None:
        root = self._root
        places = ["--data-root", f"{root}/data", "--exec-root", f"{root}/exec", "--pidfile", f"{root}/pid"]
        alone = [
            f"--bridge={self._bridge}",
            "--iptables=false",
            "--ip6tables=false",
            *(["--live-restore"] if self._live else ()),
        ]
        alone += self._options
        temporary = root / "tmp"  # temporary files of the engine, removed with it
        temporary.mkdir(exist_ok=True)
        with (root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._within, "dockerd", "-H", self.host, *places, *alone],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(temporary)},
            )
        deadline = time.monotonic() + WAIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"dockerd did not start: {(root / 'log').read_text()[-1000:]}")
            time.sleep(0.1)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            with client_of(self.host) as client:
                if self._live:
                    for container in client.containers.list(all=True, ignore_removed=True):
                        container.remove(force=True)
                client.networks.prune()  # their bridges would outlive the engine
            self.stop()
        _end_shims(self._root)
        _unmount(self._root)
        shutil.rmtree(self._root, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", self._bridge], check=False)

    def _answers(self) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(self.host.removeprefix("unix://"))
            client.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b"200 OK" in client.recv(4096)
        return False


@contextmanager
def dockerd(*options: str, live: bool = False, within: tuple[str, ...] = ()) -> Iterator[Dockerd]:
    """Start an engine, by the command `within` if one is given, and close it in the end."""
    engine = Dockerd(live, *options, within=within)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def dockerd_with_store(containerd: bool) -> Iterator[Dockerd]:
    """Start an engine with the image store of containerd, or with Docker's own; skip the test if this Docker lacks the former."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        settings = Path(place) / "daemon.json"
        settings.write_text(json.dumps({"features": {"containerd-snapshotter": containerd}}))
        with dockerd("--config-file", str(settings)) as engine:
            with client_of(engine.host) as client:
                found = ["driver-type", "io.containerd.snapshotter.v1"] in client.info()["DriverStatus"]
            if found != containerd:
                pytest.skip("this Docker has no image store of containerd")
            yield engine


@contextmanager
def client_of(host: str) -> Iterator[Any]:
    import docker

    client = docker.DockerClient(base_url=host, timeout=WAIT_S)
    try:
        yield client
    finally:
        client.close()


def _end_shims(root: Path) -> None:
    """End shims and control groups that a restarted engine forgets: those of containers killed while it hung."""
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (process / "cmdline").read_text(errors="replace").split("\0")
            if "containerd-shim" in words[0] and f"{root}/exec/containerd/containerd.sock" in words:
                os.kill(int(process.name), signal.SIGKILL)
                for group in Path("/sys/fs/cgroup").glob(f"*/docker/{words[words.index('-id') + 1]}"):
                    group.rmdir()


def _unmount(root: Path) -> None:
    """Unmount what a killed daemon left mounted."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    for mount in sorted((line.split()[1] for line in lines if line.split()[1].startswith(str(root))), reverse=True):
        subprocess.run(["umount", "-l", mount], check=False)
