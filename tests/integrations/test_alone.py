"""An integration imports the standard library, its framework and `mesh.job` only; the rest of mesh imports no framework."""

import sys
from pathlib import Path

import pytest

from tests.test_architecture import ROOT, imported

FRAMEWORKS = {"torch", "transformers", "lightning", "accelerate", "joblib"}
MODULES = sorted((ROOT / "mesh").rglob("*.py"))
OWN = {"hf": {"transformers"}, "lightning": {"lightning", "torch", "numpy"}}


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def test_only_integrations_import_a_framework() -> None:
    for path in MODULES:
        if path.parent.name != "integrations":
            assert not tops(path) & FRAMEWORKS, path


@pytest.mark.parametrize("name", OWN)
def test_integration_imports_only_its_framework_and_mesh_job(name: str) -> None:
    path = next(path for path in MODULES if path.parts[-2:] == ("integrations", f"{name}.py"))
    assert tops(path) - sys.stdlib_module_names == OWN[name] | {"mesh"}
    assert [line for line in path.read_text().splitlines() if "mesh import" in line] == ["from mesh import job"]
    job = next(path for path in MODULES if path.parts[-2:] == ("mesh", "job.py"))
    assert tops(job) <= sys.stdlib_module_names
