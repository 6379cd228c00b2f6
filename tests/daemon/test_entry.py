"""The start of a daemon: what it leaves of its environment, and what it does not load."""

import os
import subprocess
import sys

import pytest

RARE = {"cryptography", "h11", "numpy", "packaging", "pathspec", "rich", "zeroconf"}
START = f"""
import os, sys
from mesh.daemon.entry import load
load()
print(os.environ.get("SSL_CERT_FILE"))
print(*sorted({RARE} & set(sys.modules)))
"""


@pytest.mark.parametrize("authorities", [None, "/etc/lab.pem"])
def test_start_keeps_environment_and_loads_no_library_that_few_nodes_need(authorities: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    if authorities is not None:
        environment["SSL_CERT_FILE"] = authorities
    loaded = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert loaded.stdout.splitlines() == [str(authorities), ""], loaded.stderr
