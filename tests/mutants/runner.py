"""Apply faults one at a time to a copy of the tree, and run the tests that should notice."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import msgspec

from tests.mutants.catalogue import ROOT, Mutant

LIMIT_S = 120.0  # of the tests of one fault: ten times the slowest ones
SIM_LIMIT_S = 1800.0  # of the seeds of one fault
SEEDS = 300  # within which the simulator finds a fault of the protocol
FAILED = 1  # pytest's exit status when tests ran and some failed

FOUND, SURVIVED, BROKEN, LEFT_OUT = "found", "survived", "broken", "left out"


class Outcome(msgspec.Struct, frozen=True):
    """What became of a fault. `by`: the test that found it, or what is wrong. `left out`: a tier is missing, so no test ran."""

    name: str
    area: str
    result: str
    by: str
    seconds: float


class Run(msgspec.Struct, frozen=True):
    """The end of a pytest process; `status` is None if it had to be ended."""

    status: int | None
    output: str

    @property
    def first(self) -> str:
        """The first test that failed. The log that pytest shows has lines with `ERROR` too."""
        lines = (line.split(" - ")[0].partition(" ") for line in self.output.splitlines())
        return next((test for word, _, test in lines if word in {"FAILED", "ERROR"} and test.startswith("tests/")), "")

    @property
    def none_ran(self) -> bool:
        """True if every test was skipped."""
        last = self.output.strip().rpartition("\n")[2]
        return self.status == 0 and "skipped" in last and "passed" not in last


class Tree:
    """A copy of the working tree, with an environment in which its packages are imported and no others of their names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
        packages = next((root / ".venv" / "lib").glob("python*")) / "site-packages"
        paths = [str(root), *(path for path in sys.path if "site-packages" in path and Path(path).is_dir())]
        (packages / "tree.pth").write_text("\n".join(paths) + "\n")

    @contextmanager
    def broken_by(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.file
        before = path.read_bytes()
        mutant.apply(self.root)
        try:
            yield
        finally:
            path.write_bytes(before)
            self._forget_compiled(mutant)

    def _forget_compiled(self, mutant: Mutant) -> None:
        """Delete what Python keeps by second and size, which a fault need not change."""
        path = self.root / mutant.file
        for kept in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            kept.unlink()

    def run(self, tests: Iterable[str], limit_s: float = LIMIT_S, seeds: int | None = None) -> Run:
        """Run these tests until the first fails."""
        options = ["-q", "-x", "-rfE", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
        if seeds is not None:
            environment["MESH_SIM_SEEDS"] = str(seeds)
        process = subprocess.Popen(
            [self.root / ".venv" / "bin" / "python", "-m", "pytest", *options, *tests],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # tests/cleanup.py ends what it started elsewhere
            output, _ = process.communicate()
            return Run(None, output)
        return Run(process.returncode, output)


def judge(tree: Tree, mutant: Mutant) -> Outcome:
    """Return whether the tests of this fault notice it."""
    began = time.monotonic()

    def outcome(result: str, by: str) -> Outcome:
        return Outcome(mutant.name, mutant.area, result, by, round(time.monotonic() - began, 1))

    with tree.broken_by(mutant):
        run = tree.run(mutant.tests) if mutant.tests else None
        simulated = bool(mutant.sim) and (run is None or run.status == 0)
        if run is None or simulated:
            run = tree.run([mutant.sim], SIM_LIMIT_S, SEEDS)
    if simulated and run.status == FAILED and tree.run([run.first], SIM_LIMIT_S, SEEDS).status != 0:
        return outcome(BROKEN, f"{run.first} fails without the fault too")
    if run.status == FAILED and run.first:  # else pytest itself has failed
        return outcome(FOUND, run.first)
    if run.none_ran:
        return outcome(LEFT_OUT, run.output.strip().rpartition("\n")[2])
    if run.status is None:
        return outcome(FOUND, "no end in time") if mutant.hangs else outcome(SURVIVED, "the tests did not end in time")
    if run.status == 0:
        return outcome(SURVIVED, "")
    return outcome(BROKEN, f"pytest ended with {run.status}: {run.output[-2000:]}")


def judge_all(
    mutants: list[Mutant], jobs: int, report: Callable[[Outcome], None], unbroken: bool = True
) -> list[Outcome]:
    """Judge these faults in `jobs` copies at a time.

    With `unbroken`, the tests must pass without a fault first: RuntimeError otherwise.
    """
    with TemporaryDirectory(prefix="mutants-") as directory:
        Path(directory).chmod(0o755)  # some tests run programs of the copy as another user
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(min(jobs, len(mutants))):
            trees.put(Tree(Path(directory) / str(number)))
        tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests) if unbroken else {}
        tree = trees.get()
        whole = tree.run(tests, LIMIT_S * len(mutants)) if tests else Run(0, "")
        trees.put(tree)
        if whole.status != 0:
            raise RuntimeError(f"the tests fail without a fault:\n{whole.output[-4000:]}")

        def one(mutant: Mutant) -> Outcome:
            tree = trees.get()
            try:
                found = judge(tree, mutant)
            finally:
                trees.put(tree)
            report(found)
            return found

        with ThreadPoolExecutor(max(1, jobs)) as pool:
            return list(pool.map(one, mutants))
