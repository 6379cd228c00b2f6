"""The house rules that a machine can check: which room may import which, that cores do no I/O, how long a module may be."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ["mesh", "sim", "placement", "ckptstore", "membership", "cuda_guard"]
# sim sits beside mesh and drives its job cores; mesh never imports sim.
EXTRA = {("sim", "mesh")}
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
    *(f"membership/{name}.py" for name in ("config", "effects", "health", "member", "reconcile", "records")),
    *(f"membership/{name}.py" for name in ("rumours", "suspicion", "swim", "wire")),
    *(f"ckptstore/{name}.py" for name in ("bandwidth", "deadline", "fetch", "manifest", "pacing", "replication")),
    *(
        f"mesh/jobs/{name}.py"
        for name in ("contract", "custody", "destinations", "effects", "errands", "events", "gang", "ledger")
    ),
    *(f"mesh/jobs/{name}.py" for name in ("messages", "onward", "participant")),
    *(
        f"mesh/jobs/{name}.py"
        for name in ("proposer", "runner", "spec", "stake", "status", "steward", "view", "witness")
    ),
    *(f"mesh/rehearsal/{name}.py" for name in ("comparison", "cost", "facts", "restart", "sight", "verdict")),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "placement").glob("*.py"))),
    "sim/kernel.py",
    *(
        f"sim/campus/{name}.py"
        for name in ("campus", "carrier", "chance", "churn", "demand", "fabric", "forecast", "guest")
    ),
    *(
        f"sim/campus/{name}.py"
        for name in ("headline", "leaving", "network", "observation", "placing", "policies", "replication", "saving")
    ),
    *(f"sim/campus/{name}.py" for name in ("schedules", "statistics", "tally")),
    *(f"cuda_guard/{name}.py" for name in ("auditor", "trim")),
    *(f"mesh/provider/{name}.py" for name in ("hours", "policy", "presence", "receipts")),
    "mesh/duration.py",
    *(f"mesh/engine/{name}.py" for name in ("ceilings", "frames", "sessionwire")),
    *(f"mesh/edge/{name}.py" for name in ("elf", "shaping")),
    *(f"mesh/images/{name}.py" for name in ("allowlist", "docket", "questions", "rules")),
]


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_dependencies_point_down(room: str) -> None:
    allowed = set(ROOMS[ROOMS.index(room) :]) - ({"sim"} if room == "mesh" else set())
    for path in modules(room):
        rooms = {name.split(".")[0] for name in imported(path)} & set(ROOMS)
        wrong = {other for other in rooms - allowed if (room, other) not in EXTRA}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("name", CORES)
def test_cores_do_no_io(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    tops = {module.split(".")[0] for module in imported(ROOT / name)}
    assert not tops & FORBIDDEN_IN_CORES
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(alias.name != "random" for alias in node.names), "take a Random, do not import the module"
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            assert [alias.name for alias in node.names] == ["Random"]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "hash"}, f"{name}:{node.lineno}"


@pytest.mark.parametrize("room", ROOMS)
def test_modules_are_one_noun_of_bounded_length(room: str) -> None:
    for path in modules(room):
        assert path.stem not in {"utils", "util", "helpers", "common", "manager", "misc"}, path
        lines = len(path.read_text().splitlines())
        assert lines <= 600, f"{path.relative_to(ROOT)} has {lines} lines: two nouns in one room?"


def test_this_checker_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import time\nfrom mesh.daemon import Daemon\n")
    assert imported(bad) == {"time", "mesh.daemon"}


def test_nothing_unwanted_is_tracked() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    tops = {line.split("/")[0] for line in listed.stdout.splitlines()}
    wanted = {
        *ROOMS,
        "tests",
        "docs",
        "pyproject.toml",
        "README.md",
        "Makefile",
        "mkdocs.yml",
        "LICENSE",
        "CHANGELOG.md",
        ".ci",
        ".gitignore",
    }
    assert tops <= wanted
