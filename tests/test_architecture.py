"""Rules that import-linter cannot check: cores do no I/O, and nothing unexpected is tracked at the top."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["mesh", "sim", "placement", "ckptstore", "membership", "cuda_guard"]
FORBIDDEN_IN_CORES = {
    "time",
    "asyncio",
    "socket",
    "os",
    "uuid",
    "datetime",
    "threading",
    "subprocess",
    "pathlib",
    "sqlite3",
}
CORES = [
    *(
        f"membership/{name}.py"
        for name in (
            "config",
            "effects",
            "bootstrap",
            "clock_skew",
            "member",
            "probe",
            "ratelimit",
            "reconcile",
            "records",
        )
    ),
    *(f"membership/{name}.py" for name in ("bootstrap", "clock_skew", "config", "effects", "member", "probe")),
    *(
        f"membership/{name}.py"
        for name in ("ratelimit", "reconcile", "records", "rumours", "suspicion", "swim", "wire")
    ),
    *(f"ckptstore/{name}.py" for name in ("bandwidth", "deadline", "fetch", "manifest", "pacing", "replication")),
    *(
        path.relative_to(ROOT).as_posix()
        for package in ("consensus", "model")
        for path in sorted((ROOT / "mesh" / package).glob("*.py"))
    ),
    "mesh/checkpoints/loss_estimate.py",
    *(f"mesh/checkpoints/{name}.py" for name in ("pruning", "repair_plan", "replica_policy")),
    "mesh/jobs/destinations.py",
    "mesh/network/client_hello.py",
    *(f"mesh/rehearsal/{name}.py" for name in ("evaluation", "observations")),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "placement").glob("*.py"))),
    "sim/kernel.py",
    *(
        f"sim/campus/{name}.py"
        for name in ("campus", "checkpoints", "churn", "claims", "distributions", "evacuation", "forecast")
    ),
    *(
        f"sim/campus/{name}.py"
        for name in ("metrics", "network", "observation", "placement", "policies", "replication", "schedules")
    ),
    *(f"sim/campus/{name}.py" for name in ("state", "statistics", "topology")),
    *(f"cuda_guard/{name}.py" for name in ("auditor",)),
    *(f"mesh/provider/{name}.py" for name in ("hours", "policy", "presence")),
    "mesh/gpus/receipts.py",
    "mesh/util/duration.py",
    "mesh/execution/ceilings.py",
    "mesh/execution/session_framing.py",
    "mesh/rpc/frames.py",
    *(f"mesh/network/{name}.py" for name in ("elf", "shaping")),
    *(f"mesh/images/{name}.py" for name in ("allowlist", "oci", "messages", "rules")),
]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


@pytest.mark.parametrize("name", CORES)
def test_cores_do_no_io(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    tops = {module.split(".")[0] for module in imported(ROOT / name)}
    assert not tops & FORBIDDEN_IN_CORES
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(alias.name != "random" for alias in node.names), (
                "a core takes a Random and does not import the module"
            )
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            assert [alias.name for alias in node.names] == ["Random"]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "hash"}, f"{name}:{node.lineno}"


def test_import_checker_finds_all_imports(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import time\nfrom mesh.daemon.daemon import Daemon\n")
    assert imported(bad) == {"time", "mesh.daemon.daemon"}


def test_no_unexpected_top_level_path_is_tracked() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    tops = {line.split("/")[0] for line in listed.stdout.splitlines()}
    wanted = {
        *PACKAGES,
        "tests",
        "docs",
        "pyproject.toml",
        "README.md",
        "Makefile",
        "mkdocs.yml",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        ".pre-commit-config.yaml",
        ".ci",
        ".gitignore",
    }
    assert tops <= wanted
