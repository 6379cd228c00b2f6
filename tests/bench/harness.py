"""Shared parts of the benchmarks: interleaved timing of whole commands, and build/bench/<area>.json."""

import hashlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "bench"


def machine() -> str:
    """Describe the machine, as readers need it to compare figures."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    usable = len(os.sched_getaffinity(0))
    return f"{model}, {usable} cores, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"


def commit(root: Path = ROOT) -> str:
    """Return the commit of a tree. A tree that differs from its commit gets a hash of the difference in its name."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, check=False).stdout

    name = git("describe", "--always", "--dirty").decode().strip() or "unknown"
    added = git("ls-files", "--others", "--exclude-standard", "-z").decode().split("\0")[:-1]
    if not added and not name.endswith("-dirty"):
        return name
    difference = hashlib.sha256(git("diff", "HEAD", "--binary"))
    for path in added:
        difference.update(path.encode() + b"\0" + (root / path).read_bytes())
    return f"{name.removesuffix('-dirty')}-dirty-{difference.hexdigest()[:12]}"


def interleave(subjects: Mapping[str, Callable[[], None]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Time each subject in turn, round after round, so that a slow moment of the machine hits all alike; return seconds."""
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(warmup + rounds):
        for name, subject in subjects.items():
            begun = time.perf_counter()
            subject()
            if number >= warmup:
                taken[name].append(time.perf_counter() - begun)
    return taken


def installed() -> dict[str, str]:
    """Return the environment of an installed command, which has bytecode.

    A developer's setting may disable bytecode in this tree; each start would then compile the sources again.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def command(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> Callable[[], None]:
    """Run a whole process, which must succeed."""
    environment = {**installed(), **(env or {})}

    def run() -> None:
        subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True, env=environment)

    return run


def cpu_s(pid: int) -> float:
    """Return the user and system time of a process (fields 14 and 15 of proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process, shared libraries included (proc_pid_statm(5))."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def row(
    measure: str,
    values: Sequence[float],
    unit: str,
    *,
    goal: str,
    met: bool | None,
    missed: int = 0,
    peer: str = "",
    peer_values: Sequence[float] = (),
) -> dict[str, Any]:
    """Return one row of the report: the median with its spread.

    `missed` trials gave no value, because what they waited for did not happen. They count in `n`, and the goal is not met.
    """
    return {
        "measure": measure,
        "value": round(statistics.median(values), 4) if values else None,
        "min": round(min(values), 4) if values else None,
        "max": round(max(values), 4) if values else None,
        "n": len(values) + missed,
        "missed": missed,
        "unit": unit,
        "peer": peer,
        "peer_value": round(statistics.median(peer_values), 4) if peer_values else None,
        "goal": goal,
        "met": False if missed and met is not None else met,
    }


def not_run(measure: str, unit: str, goal: str, why: str) -> dict[str, Any]:
    """Return a row for a measure that could not run, with the reason."""
    return {
        "measure": measure,
        "value": None,
        "min": None,
        "max": None,
        "n": 0,
        "missed": 0,
        "unit": unit,
        "peer": "",
        "peer_value": None,
        "goal": goal,
        "met": None,
        "why": why,
    }


def save(area: str, rows: Sequence[Mapping[str, Any]], **about: str) -> Path:
    """Write the report of an area, with more details about its machine."""
    BUILD.mkdir(parents=True, exist_ok=True)
    report = {"area": area, "commit": commit(), "machine": machine(), **about, "rows": list(rows)}
    path = BUILD / f"{area}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path


def write(area: str, rows: Sequence[Mapping[str, Any]], **about: str) -> None:
    """Write the report of an area and print it."""
    path = save(area, rows, **about)
    for line in rows:
        verdict = {True: "met", False: "NOT MET", None: "-" if line["n"] else "not run"}[line["met"]]
        beside = f", {line['missed']} missed" if line["missed"] else ""
        beside += f", {line['peer']} {line['peer_value']}" if line["peer_value"] is not None else ""
        print(
            f"{line['measure']}: {line['value']} {line['unit']} ({line['min']} to {line['max']}, n={line['n']}{beside}); "
            f"goal {line['goal']}: {verdict}"
        )
    print(os.path.relpath(path, ROOT))
