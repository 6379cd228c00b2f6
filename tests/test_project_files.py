"""Files for contributors and releases: changelog, pre-commit hooks, release script."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_changelog_has_unreleased_and_dated_versions() -> None:
    unreleased, *released = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert unreleased == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in released)
    assert any(heading.startswith(f"[{VERSION}]") for heading in released)


def test_precommit_hooks_are_the_linters_of_make_lint() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    linters = re.findall(r"\.venv/bin/([a-z-]+(?: (?:check|format))?)", recipe[1])
    hooks = re.findall(
        r"entry: \.venv/bin/([a-z-]+(?: (?:check|format))?)", (ROOT / ".pre-commit-config.yaml").read_text()
    )
    assert linters and hooks == linters


BUILD = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from mesh.cli.debug import completion_script
from mesh.cli.manual import page
from mesh.daemon.systemd import template
print(len(page()), *[len(completion_script(shell)) for shell in ("bash", "zsh", "fish")], len(template()))
"""


def test_wheel_is_built_with_what_the_build_requires() -> None:
    """A build has its requirements alone, and makes the manual page and the completions of the commands (mesh/packaging.py)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [
        {canonicalize_name(Requirement(line).name) for line in lines}
        for lines in (project["build-system"]["requires"], project["project"]["dependencies"])
    ]
    absent = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if {canonicalize_name(owner) for owner in owners} & (names[1] - names[0])
    }
    assert {"blake3", "aiohttp"} <= absent and not absent & {"click", "msgspec", "nacl"}
    done = subprocess.run([sys.executable, "-c", BUILD, *absent], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and all(map(int, done.stdout.split())), done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone whose HEAD holds the release script and the changelog of this tree."""
    done = subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clone"], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    for name in (".ci/release", "CHANGELOG.md", "pyproject.toml"):
        (tmp_path / "clone" / name).write_bytes((ROOT / name).read_bytes())
    commit(tmp_path / "clone")
    return tmp_path / "clone"


def commit(tree: Path) -> None:
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *author, "commit", "--quiet", "--all", "--allow-empty", "-m", "test"], cwd=tree, check=True)


def refusal(tree: Path) -> str:
    done = subprocess.run(["bash", ".ci/release"], cwd=tree, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_release_refuses_uncommitted_changes(clone: Path) -> None:
    (clone / "README.md").write_text("changed")
    assert "not committed" in refusal(clone)


def test_release_refuses_version_without_dated_changelog_entry(clone: Path) -> None:
    (clone / "CHANGELOG.md").write_text(CHANGELOG.replace(f"## [{VERSION}] - ", f"## [{VERSION}] "))
    commit(clone)
    assert f"no dated entry for {VERSION}" in refusal(clone)


def test_release_refuses_existing_tag_on_other_commit(clone: Path) -> None:
    subprocess.run(["git", "tag", "--force", f"v{VERSION}"], cwd=clone, check=True)
    commit(clone)
    assert f"v{VERSION} names another commit" in refusal(clone)


def locked() -> dict[str, list[tuple[Requirement, int]]]:
    """Return the pinned versions of each package with the number of their hashes."""
    found: dict[str, list[tuple[Requirement, int]]] = {}
    for block in re.split(r"\n(?=\S)", (ROOT / ".ci/requirements.lock").read_text().strip()):
        requirement = Requirement(block.partition(" \\\n")[0])
        found.setdefault(canonicalize_name(requirement.name), []).append(
            (requirement, len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block)))
        )
    return found


def test_lock_pins_every_dependency_with_hashes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in ("api", "joblib", "top") for each in extras(project, extra)),
    ]
    pins = locked()
    assert len(pins) > 30 and all(hashes for versions in pins.values() for _, hashes in versions)
    for text in wanted:
        requirement = Requirement(text)
        for pin, _ in pins[canonicalize_name(requirement.name)]:
            (specifier,) = pin.specifier
            assert specifier.operator == "==" and requirement.specifier.contains(specifier.version), (text, str(pin))


def test_lock_pins_what_the_dependencies_need() -> None:
    pins = locked()
    for name in pins:
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in pins, f"{name} needs {requirement}: run `make lock`"


def extras(project: dict[str, Any], name: str) -> list[str]:
    return [each for each in project["optional-dependencies"][name] if not each.startswith("campus-mesh")]
