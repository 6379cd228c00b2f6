"""Debian's docker-registry, as another registry beside the node's."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 60.0


@contextmanager
def docker_registry() -> Iterator[str]:
    """Start a registry; yield its address."""
    with tempfile.TemporaryDirectory() as root:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        settings = Path(root) / "config.yml"
        storage = f"storage:\n  filesystem:\n    rootdirectory: {root}/data\n"
        settings.write_text(f"version: 0.1\n{storage}http:\n  addr: 127.0.0.1:{port}\n")
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(["docker-registry", "serve", str(settings)], stdout=quiet, stderr=quiet)
        try:
            deadline = time.monotonic() + WAIT_S
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert process.poll() is None and time.monotonic() < deadline, "docker-registry did not start"
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(WAIT_S)
