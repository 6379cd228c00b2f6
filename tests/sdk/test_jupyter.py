"""Idleness of `mesh job jupyter` sessions; their program needs only the standard library."""

import ast
import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mesh.sdk.jupyter
from mesh.sdk.jupyter import Idleness, Lab, base_url, gpu_used

HOUR = 3600.0
NOW = 1e9


def test_idle_session_is_warned_once_and_then_ended() -> None:
    idleness = Idleness(HOUR, 0.0)
    told = [(at, idleness.look(at, 0.0)) for at in range(0, 3700, 30)]
    assert [(at, word) for at, word in told if word][:2] == [(3000, "warn"), (3600, "end")]


def test_use_restarts_the_idle_clock_and_the_warning() -> None:
    idleness = Idleness(HOUR, 0.0)
    assert idleness.look(3100.0, 0.0) == "warn"
    assert idleness.look(3200.0, 3150.0) == "" and idleness.look(6100.0, 3150.0) == ""
    assert idleness.look(6200.0, 3150.0) == "warn" and idleness.look(6750.0, 3150.0) == "end"


@given(st.lists(st.tuples(st.floats(0.1, 600), st.floats(-1e9, 1e9)), max_size=50))
def test_session_never_ends_unwarned_or_in_use(looks: list[tuple[float, float]]) -> None:
    idleness, now, warned = Idleness(HOUR, 0.0), 0.0, False
    for passed, used in looks:
        now += passed
        word = idleness.look(now, used)
        if now - 3000 < used <= now:
            assert word == ""
            warned = False
        warned = warned or word == "warn"
        assert word != "end" or warned or passed > HOUR / 6
        if word == "end":
            return


@pytest.mark.parametrize(
    ("kernels", "terminals", "used"),
    [
        ((200, [{"execution_state": "idle", "last_activity": "1970-01-01T00:01:40Z"}]), (404, {}), 100.0),
        ((200, [{"execution_state": "busy", "last_activity": "1970-01-01T00:01:40Z"}]), (200, []), NOW),
        ((200, []), (200, [{"last_activity": "1970-01-01T00:01:40Z"}]), 100.0),
        ((500, []), (200, []), NOW),
        ((404, []), (200, []), NOW),
        ((200, []), (403, []), NOW),
        ((200, "x"), (200, []), NOW),
    ],
)
def test_session_whose_state_is_unknown_is_in_use(
    kernels: tuple[int, Any], terminals: tuple[int, Any], used: float, tmp_path: Path
) -> None:
    """JupyterLab's API, by a server on a socket as it has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def serve() -> None:
            for status, content in (kernels, terminals)[: 1 + (kernels[0] == 200)]:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65_536)
                    body = json.dumps(content).encode()
                    connection.sendall(b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        lab = object.__new__(Lab)
        lab._path, lab._base, lab._token = str(tmp_path / "s"), "/mesh/x/", "token"
        assert lab.used(NOW) == used
        server.join(20)


def test_infinite_idle_limit_never_ends_a_session() -> None:
    assert Idleness(float("inf"), 0.0).look(1e12, 0.0) == ""


def test_jupyter_program_needs_only_python_38_and_its_standard_library() -> None:
    tree = ast.parse(Path(mesh.sdk.jupyter.__file__).read_text(), feature_version=(3, 8))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
    assert base_url("abcdefghijkl") == "/mesh/abcdefgh/"


@pytest.mark.parametrize(
    ("told", "used"),
    [
        ("GPU-mine, 0\nGPU-other, 90\n", False),
        ("GPU-mine, 3\n", True),
        ("nonsense\n,,,\nGPU-mine\n", False),
        ("", False),
    ],
)
def test_only_a_computing_gpu_of_the_job_counts_as_use(
    told: str, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"  # a fake of the driver's tool
    program.write_text(f"#!/bin/sh\nprintf '{told}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("MESH_GPU_UUIDS", "GPU-mine")
    assert gpu_used() is used
    monkeypatch.setenv("MESH_GPU_UUIDS", "")
    assert gpu_used() is False
