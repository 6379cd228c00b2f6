"""When a `mesh jupyter` session is idle, and that its program is of the standard library alone."""

import ast
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mesh.notebook
from mesh.notebook import Idleness, base_url, gpu_used

HOUR = 3600.0


def test_it_is_warned_once_and_ends_then() -> None:
    idleness = Idleness(HOUR, 0.0)
    told = [(at, idleness.look(at, 0.0)) for at in range(0, 3700, 30)]
    assert [(at, word) for at, word in told if word][:2] == [(3000, "warn"), (3600, "end")]


def test_what_is_used_begins_it_anew_and_is_warned_of_again() -> None:
    idleness = Idleness(HOUR, 0.0)
    assert idleness.look(3100.0, 0.0) == "warn"
    assert idleness.look(3200.0, 3150.0) == "" and idleness.look(6100.0, 3150.0) == ""
    assert idleness.look(6200.0, 3150.0) == "warn" and idleness.look(6750.0, 3150.0) == "end"


@given(st.lists(st.tuples(st.floats(0.1, 600), st.floats(-1e9, 1e9)), max_size=50))
def test_it_never_ends_without_a_warning_or_while_it_is_used(looks: list[tuple[float, float]]) -> None:
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


def test_for_ever_is_for_ever() -> None:
    assert Idleness(float("inf"), 0.0).look(1e12, 0.0) == ""


def test_its_program_runs_by_any_python_and_is_no_more_than_the_standard_library() -> None:
    tree = ast.parse(Path(mesh.notebook.__file__).read_text(), feature_version=(3, 8))
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
def test_a_gpu_of_the_job_that_computes_is_used(
    told: str, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"  # the double of a driver's tool, where there is no GPU
    program.write_text(f"#!/bin/sh\nprintf '{told}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("MESH_GPU_UUIDS", "GPU-mine")
    assert gpu_used() is used
    monkeypatch.setenv("MESH_GPU_UUIDS", "")
    assert gpu_used() is False
