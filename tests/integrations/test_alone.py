"""What an integration needs: the standard library, its framework and `mesh.job`. What a mesh needs: no framework."""

import sys
from pathlib import Path

import pytest

from tests.test_architecture import imported, modules

FRAMEWORKS = {"torch", "transformers", "lightning", "accelerate", "joblib"}
OWN = {"hf": {"transformers"}, "lightning": {"lightning", "torch", "numpy"}}


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def test_only_the_integrations_import_a_framework() -> None:
    for path in modules("mesh"):
        if path.parent.name != "integrations":
            assert not tops(path) & FRAMEWORKS, path


@pytest.mark.parametrize("name", OWN)
def test_an_integration_needs_its_framework_and_one_file_of_the_mesh(name: str) -> None:
    path = next(path for path in modules("mesh") if path.parts[-2:] == ("integrations", f"{name}.py"))
    assert tops(path) - sys.stdlib_module_names == OWN[name] | {"mesh"}
    assert [line for line in path.read_text().splitlines() if "mesh import" in line] == ["from mesh import job"]
    job = next(path for path in modules("mesh") if path.parts[-2:] == ("mesh", "job.py"))
    assert tops(job) <= sys.stdlib_module_names
