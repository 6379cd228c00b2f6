"""Podman services for single tests, each with storage of its own: as root with runc, or rootless, as Podman is by default."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 60.0
OF_ROOT = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


class Podman:
    """A running service; `host` is its DOCKER_HOST."""

    def __init__(self, rootless: bool) -> None:
        self._rootless = rootless
        self._root = root = Path(tempfile.mkdtemp(prefix="mesh-podman-"))
        self.host = f"unix://{root}/s"
        self._command = ["podman", "--root", f"{root}/root", "--runroot", f"{root}/run"]
        self._env = dict(os.environ)
        if not rootless:
            (root / "containers.conf").write_text(OF_ROOT)
            self._env["CONTAINERS_CONF"] = f"{root}/containers.conf"
        service = [*self._command, "system", "service", "--time=0", self.host]
        with (root / "log").open("wb") as log:
            self._process = subprocess.Popen(
                service, stdout=log, stderr=log, env=self._env, cwd=root, start_new_session=True
            )
        deadline = time.monotonic() + WAIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"podman did not start: {(root / 'log').read_text()[-1000:]}")
            time.sleep(0.1)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Stop the service: rootless, it is a child in a namespace of users, in the same process group."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        remove = [*self._command, "rm", "--all", "--force", "--time", "0"]
        subprocess.run(remove, env=self._env, capture_output=True, check=False)
        self._process.terminate()
        self._process.wait(WAIT_S)
        for mounted in () if self._rootless else (self._root / "root" / "overlay", self._root / "root"):
            subprocess.run(["umount", "-l", mounted], capture_output=True, check=False)
        if self._rootless:  # its files belong to the user's other ids
            subprocess.run(["podman", "unshare", "rm", "-rf", self._root], capture_output=True, check=False)
        shutil.rmtree(self._root, ignore_errors=True)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(self.host.removeprefix("unix://"))
            client.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b"200 OK" in client.recv(4096)
        return False


@contextmanager
def podman_service(rootless: bool) -> Iterator[Podman]:
    service = Podman(rootless)
    try:
        yield service
    finally:
        service.close()
