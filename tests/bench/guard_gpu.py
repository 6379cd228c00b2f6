"""The guard on a real GPU: `make bench-guard`'s questions that only a real driver answers, beside time slicing and MPS.

A share is what a job got done in a second, of what it gets done alone. Where there is no GPU, each line of the report says so.
`--python`: a Python that has PyTorch or CuPy. `--seconds`: of each measurement (15). About ten minutes.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cuda_guard.build import libraries  # noqa: E402
from cuda_guard.driver import find_driver  # noqa: E402
from cuda_guard.guard import Guard, GuardedJob  # noqa: E402
from cuda_guard.page import Quota  # noqa: E402
from tests.bench.harness import not_run, row, write  # noqa: E402

Row = dict[str, Any]
AGENT = Path(__file__).parent / "agents" / "gpu.py"
WORKLOADS = ("matmul training", "small kernels", "CUDA graphs", "Triton")
SHARES = (45.0, 30.0, 15.0)
SIZES_GIB = (1, 8, 64)
WAIT_S = 180.0


class Unable(Exception):
    """Why something cannot be measured here."""


class Machine:
    """A GPU, the Python that works on it, and the guard's pages."""

    def __init__(self, directory: Path, python: str, seconds: float) -> None:
        import pynvml

        driver = find_driver()
        if driver is None:
            raise Unable("no NVIDIA driver")
        try:
            pynvml.nvmlInit()
            self.device = pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError as error:
            raise Unable(f"no NVIDIA GPU: {error}") from None
        self.nvml, self.driver, self.python, self.seconds = pynvml, driver, python, seconds
        self.uuid = str(pynvml.nvmlDeviceGetUUID(self.device))
        self.guard = Guard(directory, libraries(ROOT / "build" / "guard"), driver, (self.uuid,))
        self._names = (f"job{n}" for n in range(10_000))
        self._alone: dict[str, dict[str, float]] = {}

    @contextmanager
    def job(self, share: float = 100, limit: float | None = None) -> Iterator[GuardedJob]:
        made = self.guard.admit(next(self._names), (Quota(self.uuid, share=share, limit=limit or share),), False)
        try:
            yield made
        finally:
            made.close()

    def start(self, workload: str, amount: float, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        words = [self.python, str(AGENT), workload, str(amount)]
        return subprocess.Popen(
            words,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, workload: str, envs: Sequence[dict[str, str]]) -> list[dict[str, float]]:
        """The workload in as many processes, begun together; what each did."""
        working = [self.start(workload, self.seconds, env) for env in envs]
        try:
            for process in working:
                expect(process)
            for process in working:
                assert process.stdin
                process.stdin.write("go\n")
                process.stdin.flush()
            return [json.loads(process.communicate(timeout=WAIT_S)[0].splitlines()[-1]) for process in working]
        finally:
            for process in working:
                process.kill()
                process.wait()

    def alone(self, workload: str) -> dict[str, float]:
        if workload not in self._alone:
            (self._alone[workload],) = self.run(workload, [{}])
        return self._alone[workload]

    def used(self) -> int:
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.device).used)

    def close(self) -> None:
        self.guard.close()


def expect(process: subprocess.Popen[str]) -> None:
    """Returns once it says that it is ready."""
    assert process.stdout and process.stderr
    for line in process.stdout:
        if line.strip() == "ready":
            return
    raise Unable((process.stderr.read().splitlines() or ["it ended without a word"])[-1][:200])


# --- arms: what stands between three jobs and the device


def slicing(machine: Machine, stack: ExitStack) -> list[dict[str, str]]:
    return [{} for _ in SHARES]


def mps(machine: Machine, stack: ExitStack) -> list[dict[str, str]]:
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        raise Unable("nvidia-cuda-mps-control is not installed")
    home = stack.enter_context(tempfile.TemporaryDirectory())
    env = {"CUDA_MPS_PIPE_DIRECTORY": home, "CUDA_MPS_LOG_DIRECTORY": home}
    started = subprocess.run([program, "-d"], env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if started.returncode:
        raise Unable(f"the MPS daemon does not start: {started.stderr.strip()[:100]}")
    stack.callback(subprocess.run, [program], input="quit\n", env={**os.environ, **env}, text=True, check=False)
    return [{**env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share:g}"} for share in SHARES]


def hard(machine: Machine, stack: ExitStack) -> list[dict[str, str]]:
    return [stack.enter_context(machine.job(share)).process_env() for share in SHARES]


def elastic(machine: Machine, stack: ExitStack) -> list[dict[str, str]]:
    return [stack.enter_context(machine.job(share, 90)).process_env() for share in SHARES]


ARMS = {"time slicing": slicing, "MPS": mps, "ours hard": hard, "ours elastic": elastic}


def shares(machine: Machine, arm: str, workload: str) -> list[Row]:
    """Mean error of the shares 45/30/15 that all three of them got."""
    solo = machine.alone(workload)["rate"]
    with ExitStack() as stack:
        told = machine.run(workload, ARMS[arm](machine, stack))
    errors = [abs(one["rate"] / solo * 100 - share) for one, share in zip(told, SHARES, strict=True)]
    goal, met = "", None
    if arm.startswith("ours"):
        goal, met = "<= 0.3 points (mean)", statistics.mean(errors) <= 0.3
    return [{**row(f"shares 45/30/15, {workload}, {arm}", errors, "points", goal=goal, met=met),
             "value": round(statistics.mean(errors), 4)}]  # fmt: skip


def overhead(machine: Machine, workload: str) -> list[Row]:
    """Of a job that has the whole device, and what a launch takes; in turns."""
    plain, guarded = [], []
    with machine.job() as job:
        for _ in range(3):
            plain += machine.run(workload, [{}])
            guarded += machine.run(workload, [job.process_env()])
    most = 0.5 if workload == "matmul training" else 1.0
    loss = [(1 - ours["rate"] / theirs["rate"]) * 100 for ours, theirs in zip(guarded, plain, strict=True)]
    ours, theirs = ([one["latency_us"] for one in told] for told in (guarded, plain))
    met = statistics.median(loss) <= most
    return [
        row(f"overhead at 100 %, {workload}", loss, "%", goal=f"<= {most:g} %", met=met, peer="native, per s",
            peer_values=[one["rate"] for one in plain]),
        row(f"launch, {workload}", ours, "us", goal="", met=None, peer="native", peer_values=theirs),
    ]  # fmt: skip


# --- the checklist of the first run on a real GPU


def identity(machine: Machine) -> list[Row]:
    """Whether what cuGetProcAddress gives out is an export, and ours where it is hooked."""
    from tests.cuda_guard.test_routes import pairs

    if not pairs():
        raise Unable("nvidia-cuda-runtime, which has the header, is not installed")
    program = (
        "import sys; from pathlib import Path; from tests.fake.client import Driver\n"
        "from tests.cuda_guard.test_routes import misresolved\n"
        "print(len({pair[:2] for pair in misresolved(Driver(sys.argv[1]), Path(sys.argv[2]))}))"
    )
    with machine.job() as job:
        env = {**os.environ, "MESH_GUARD_DIR": str(job.pages.directory), "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", program, str(machine.guard.libraries.cuda), str(machine.driver.cuda)]
        wrong = int(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
    good = len(pairs()) - wrong
    return [row(IDENTITY, [good], "pairs", goal=f"all of cuda.h's ({len(pairs())})", met=wrong == 0)]


def queue_depth(machine: Machine) -> list[Row]:
    return [row(DEPTH, [machine.alone("small kernels")["depth"]], "launches", goal="", met=None)]


def killed(machine: Machine) -> list[Row]:
    """From SIGKILL until NVML no longer counts what the process held."""
    taken = []
    for _ in range(5):
        before, process = machine.used(), machine.start("hold", 1)
        try:
            expect(process)
            process.send_signal(signal.SIGKILL)
            begun = time.perf_counter()
            while machine.used() > before + (64 << 20) and time.perf_counter() - begun < 10:
                time.sleep(0.001)
            taken.append((time.perf_counter() - begun) * 1000)
        finally:
            process.kill()
            process.wait()
    return [row(KILLED, taken, "ms", goal="", met=None)]


def checkpoint(machine: Machine, gib: int) -> list[Row]:
    """The driver's own checkpoint of another process, and back."""
    cuda = ctypes.CDLL(str(machine.driver.cuda))
    if not hasattr(cuda, "cuCheckpointProcessLock"):
        raise Unable("the driver is older than 570")
    if cuda.cuInit(0):
        raise Unable("the driver does not start")
    if machine.nvml.nvmlDeviceGetMemoryInfo(machine.device).free < (gib + 2) << 30:
        raise Unable("the device has too little memory")
    process = machine.start("hold", gib)
    taken = {}
    try:
        expect(process)
        for name in ("Lock", "Checkpoint", "Restore", "Unlock"):
            begun = time.perf_counter()
            code = getattr(cuda, f"cuCheckpointProcess{name}")(process.pid, None)
            if code:
                raise Unable(f"cuCheckpointProcess{name} gave {code}")
            taken[name] = time.perf_counter() - begun
        process.communicate("go\n", timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    away, back = taken["Lock"] + taken["Checkpoint"], taken["Restore"] + taken["Unlock"]
    names = checkpoint_names(gib)
    return [row(name, [value], "s", goal="", met=None) for name, value in zip(names, (away, back), strict=True)]


# --- the report

IDENTITY = "(name, version) pairs resolved right, by the real driver"
DEPTH = "launches that the driver takes before one waits"
KILLED = "SIGKILL, memory free"


def checkpoint_names(gib: int) -> tuple[str, str]:
    return (
        f"driver's checkpoint of {gib} GiB: lock and checkpoint",
        f"driver's checkpoint of {gib} GiB: restore and unlock",
    )


Part = tuple[Sequence[tuple[str, str, str]], Callable[[Machine], list[Row]]]


def parts() -> Iterator[Part]:
    """Lines of the report (measure, unit, goal), and what measures them."""
    yield [(IDENTITY, "pairs", "all of cuda.h's")], identity
    for workload in WORKLOADS:
        most = "<= 0.5 %" if workload == "matmul training" else "<= 1 %"
        lines = [(f"overhead at 100 %, {workload}", "%", most), (f"launch, {workload}", "us", "")]
        yield lines, lambda machine, workload=workload: overhead(machine, workload)
        for arm in ARMS:
            goal = "<= 0.3 points (mean)" if arm.startswith("ours") else ""
            line = (f"shares 45/30/15, {workload}, {arm}", "points", goal)
            yield [line], lambda machine, arm=arm, workload=workload: shares(machine, arm, workload)
    yield [(DEPTH, "launches", "")], queue_depth
    yield [(KILLED, "ms", "")], killed
    for gib in SIZES_GIB:
        lines = [(name, "s", "") for name in checkpoint_names(gib)]
        yield lines, lambda machine, gib=gib: checkpoint(machine, gib)


def measure(machine: Machine) -> Iterator[Row]:
    for lines, work in parts():
        try:
            yield from work(machine)
        except (Unable, AssertionError, OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            yield from (not_run(*line, str(error)) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    venv = ROOT / ".venv-frameworks" / "bin" / "python"
    parser.add_argument("--python", default=str(venv) if venv.is_file() else sys.executable)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        try:
            machine = Machine(Path(directory) / "pages", options.python, options.seconds)
        except Unable as error:
            print(f"{error}: nothing is measured")
            rows = [not_run(*line, str(error)) for lines, _ in parts() for line in lines]
        else:
            rows = list(measure(machine))
            machine.close()
    write("guard-gpu", rows)


if __name__ == "__main__":
    main()
