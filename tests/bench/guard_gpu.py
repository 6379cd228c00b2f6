"""The guard on a real GPU, beside time slicing and MPS: the questions of `make bench-guard` that need a real driver.

A share is the work of a job in a second, relative to its work alone. Without a GPU, each row gives the reason. `--python`
is a Python with PyTorch or CuPy for GPUs; without one, the driver API alone launches kernels, and rows that need a framework
are left out. `--seconds` of each measurement (15; with 5 it takes about ten minutes). `--only WORDS` runs rows with these
words. The report is written after each part, so a run can be interrupted.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cuda_guard.build import BuildError, libraries  # noqa: E402
from cuda_guard.driver import CUDA, NVML, Driver, find_driver  # noqa: E402
from cuda_guard.guard import PAGES_ENV, Guard, GuardedJob  # noqa: E402
from cuda_guard.page import ALONE_WINDOW_MS, WINDOW_MS, Quota  # noqa: E402
from cuda_guard.pause import Pause, PauseError, Step, available  # noqa: E402
from cuda_guard.symbols import missing_in_guard  # noqa: E402
from tests.bench.harness import not_run, row, save, write  # noqa: E402

Row = dict[str, Any]
AREA = "guard-gpu"
AGENT = Path(__file__).parent / "agents" / "gpu.py"
WORKLOADS = ("matmul training", "small kernels", "CUDA graphs", "Triton")
SHARES = (45.0, 30.0, 15.0)
SIZES_GIB = (1, 8, 64)
CLOSINGS = 100
WAIT_S = 180.0
HAS_GPU = """
try:
    import torch
    assert torch.cuda.is_available()
except Exception:
    import cupy
    cupy.zeros(1)
"""


class Unable(Exception):
    """The reason why something cannot be measured here."""


class Machine:
    """A GPU, the Python that works on it, and the guard's pages in `directory`."""

    def __init__(self, directory: Path, python: str, seconds: float) -> None:
        driver = find_driver()
        if driver is None:
            raise Unable("no NVIDIA driver")
        try:
            import pynvml
        except ImportError:
            raise Unable("nvidia-ml-py is not installed") from None
        try:
            pynvml.nvmlInit()
            self.device = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.uuid = str(pynvml.nvmlDeviceGetUUID(self.device))
            version = int(pynvml.nvmlSystemGetCudaDriverVersion())
            self.about = {
                "gpu": str(pynvml.nvmlDeviceGetName(self.device)),
                "driver": str(pynvml.nvmlSystemGetDriverVersion()),
                "cuda": f"{version // 1000}.{version % 1000 // 10}",
            }
        except pynvml.NVMLError as error:
            raise Unable(f"no NVIDIA GPU: {error}") from None
        if has_mig(pynvml, self.device):
            raise Unable("the GPU is in MIG mode (`nvidia-smi -mig 0` disables it)")
        self.nvml, self.driver, self.python, self.seconds = pynvml, driver, python, seconds
        self.directory = directory
        try:
            self.guard = Guard(directory / "pages", libraries(ROOT / "build" / "guard"), driver, (self.uuid,))
        except (BuildError, OSError) as error:
            raise Unable(str(error)) from None
        self.unknown: set[str] = set()  # calls that programs looked up
        self._names = (f"job{n}" for n in range(10_000))
        self._alone: dict[str, dict[str, Any]] = {}

    @contextmanager
    def job(self, share: float = 100, limit: float | None = None, window_ms: float = WINDOW_MS) -> Iterator[GuardedJob]:
        quota = Quota(self.uuid, share=share, limit=limit or share, window_ms=window_ms)
        made = self.guard.admit(next(self._names), (quota,), False)
        try:
            yield made
        finally:
            self.unknown.update(made.pages.audited())
            made.close()

    def start(
        self, workload: str, amount: float, env: dict[str, str] | None = None, before: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start the workload; `before` is a command that runs the command after it."""
        return subprocess.Popen(
            [*before, self.python, str(AGENT), workload, str(amount)],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, workload: str, envs: Sequence[dict[str, str]], before: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Run the workload in several processes that start together; return their results."""
        working = [self.start(workload, self.seconds, env, before) for env in envs]
        try:
            for process in working:
                expect(process)
            for process in working:
                say(process, "go")
            return [told(process) for process in working]
        finally:
            for process in working:
                end(process)

    def alone(self, workload: str) -> dict[str, Any]:
        if workload not in self._alone:
            (self._alone[workload],) = self.run(workload, [{}])
        return self._alone[workload]

    def used(self) -> int:
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.device).used)

    def close(self) -> None:
        self.guard.close()


def has_mig(pynvml: Any, device: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(device)[0])
    except pynvml.NVMLError:  # a device without support for it
        return False


# --- talking to the agents


def expect(process: subprocess.Popen[str]) -> None:
    """Wait until the agent prints that it is ready."""
    assert process.stdout and process.stderr
    patience = threading.Timer(WAIT_S, process.kill)
    patience.start()
    try:
        for line in process.stdout:
            if line.strip() == "ready":
                return
    finally:
        patience.cancel()
    raise Unable(reason(process, process.stderr.read()))


def say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the agent's final result."""
    out, errors = process.communicate(timeout=WAIT_S)
    if process.returncode or not out.strip():
        raise Unable(reason(process, errors))
    return dict(json.loads(out.splitlines()[-1]))


def reason(process: subprocess.Popen[str], errors: str) -> str:
    """Return why the agent ended: its last line, and earlier messages of the guard."""
    process.wait()
    lines = [line for line in errors.splitlines() if line.strip()]
    said = [line for line in lines[:-1] if line.startswith("mesh guard:")] + lines[-1:]
    return " / ".join(said)[:300] or f"it ended with {process.returncode} and without a word"


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


# --- arms: guard, time slicing, MPS


def slicing(machine: Machine, stack: ExitStack) -> list[dict[str, str]]:
    return [{} for _ in SHARES]


def mps(machine: Machine, stack: ExitStack) -> list[dict[str, str]]:
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        raise Unable("nvidia-cuda-mps-control is not installed")
    home = stack.enter_context(tempfile.TemporaryDirectory())
    env = {"CUDA_MPS_PIPE_DIRECTORY": home, "CUDA_MPS_LOG_DIRECTORY": home}
    words = Path(home) / "words"  # no pipe, because the daemon would keep it open

    def control(*options: str, order: str = "") -> int:
        with words.open("w") as file:
            done = subprocess.run(
                [program, *options],
                env={**os.environ, **env},
                input=order,
                stdout=file,
                stderr=file,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
        return done.returncode

    if control("-d"):
        raise Unable(f"the MPS daemon did not start: {words.read_text().strip()[:100]}")
    stack.callback(control, order="quit\n")
    return [{**env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share:g}"} for share in SHARES]


def hard(machine: Machine, stack: ExitStack) -> list[dict[str, str]]:
    return [stack.enter_context(machine.job(share)).process_env() for share in SHARES]


def elastic(machine: Machine, stack: ExitStack) -> list[dict[str, str]]:
    return [stack.enter_context(machine.job(share, 90)).process_env() for share in SHARES]


ARMS = {"time slicing": slicing, "MPS": mps, "ours hard": hard, "ours elastic": elastic}


def shares(machine: Machine, arm: str, workload: str) -> list[Row]:
    """Measure the mean error of three jobs' shares of 45, 30 and 15 %."""
    solo = machine.alone(workload)["rate"]
    with ExitStack() as stack:
        did = machine.run(workload, ARMS[arm](machine, stack))
    errors = [abs(one["rate"] / solo * 100 - share) for one, share in zip(did, SHARES, strict=True)]
    mean, goal, met = statistics.mean(errors), "", None
    if arm.startswith("ours"):
        goal, met = "<= 0.3 points (mean)", mean <= 0.3
    line = row(f"shares 45/30/15, {workload}, {arm}", errors, "points", goal=goal, met=met)
    return [{**line, "value": round(mean, 4), "by": did[0]["by"]}]


def one_to_nine(machine: Machine) -> list[Row]:
    with machine.job(10) as small, machine.job(90) as large:
        little, much = machine.run("small kernels", [small.process_env(), large.process_env()])
    ratio = much["rate"] / little["rate"]
    return [{**row(RATIO, [ratio], "to 1", goal="8.7 to 9.3", met=8.7 <= ratio <= 9.3), "by": much["by"]}]


def overhead(machine: Machine, workload: str) -> list[Row]:
    """Measure the overhead for a job with the whole device, and the time of a launch, in turns."""
    plain, guarded = [], []
    with machine.job(window_ms=ALONE_WINDOW_MS) as job:
        for _ in range(3):
            plain += machine.run(workload, [{}])
            guarded += machine.run(workload, [job.process_env()])
    most = 0.5 if workload == "matmul training" else 1.0
    loss = [(1 - ours["rate"] / theirs["rate"]) * 100 for ours, theirs in zip(guarded, plain, strict=True)]
    ours, theirs = ([one["latency_us"] for one in some] for some in (guarded, plain))
    met, goal, by = statistics.median(loss) <= most, f"<= {most:g} %", {"by": plain[0]["by"]}
    rates, names = [one["rate"] for one in plain], overhead_names(workload)
    return [
        {**row(names[0], loss, "%", goal=goal, met=met, peer="native, per s", peer_values=rates), **by},
        {**row(names[1], ours, "us", goal="", met=None, peer="native", peer_values=theirs), **by},
    ]


# --- the checklist of the first run on a real GPU


def identity(machine: Machine) -> list[Row]:
    """Check that the functions from cuGetProcAddress are exports, and the guard's own where they are hooked."""
    from tests.cuda_guard.resolution import pairs

    if not pairs():
        raise Unable("nvidia-cuda-runtime, which has the header, is not installed")
    program = (
        "import json, sys; from pathlib import Path; from tests.fake.client import Driver\n"
        "from tests.cuda_guard.resolution import misresolved\n"
        "print(json.dumps(sorted({pair[:2] for pair in misresolved(Driver(sys.argv[1]), Path(sys.argv[2]))})))"
    )
    with machine.job() as job:
        env = {**os.environ, PAGES_ENV: str(job.pages.directory), "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", program, str(machine.guard.libraries.cuda), str(machine.driver.cuda)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    if done.returncode:
        raise Unable((done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1][:300])
    wrong, goal = json.loads(done.stdout), f"all of cuda.h's ({len(pairs())})"
    line = row(IDENTITY, [len(pairs()) - len(wrong)], "pairs", goal=goal, met=not wrong)
    return [{**line, "names": [f"{name} {version}" for name, version in wrong]}]


def exports(machine: Machine) -> list[Row]:
    """Check that looking up a hooked name fails clearly: `python -m cuda_guard.symbols --write LIBRARY` adds missing ones."""
    names = missing_in_guard(machine.driver.cuda)
    return [{**row(EXPORTS, [len(names)], "calls", goal="0", met=not names), "names": names}]


def asked(machine: Machine) -> list[Row]:
    """Return the calls of all programs so far that look like memory or work and that the guard does not know."""
    names = sorted(machine.unknown)
    return [{**row(ASKED, [len(names)], "calls", goal="0", met=not names), "names": names}]


def mounted(machine: Machine) -> list[Row]:
    """Check the guard mounted over the driver, as in a container, without a variable that names it."""
    if os.geteuid() or shutil.which("unshare") is None:
        raise Unable("needs root and unshare")
    ours, driver = machine.guard.libraries, machine.driver
    over = f"mount --bind '{ours.cuda}' '{driver.cuda}' && mount --bind '{ours.nvml}' '{driver.nvml}'"
    with tempfile.TemporaryDirectory() as aside:
        real = Driver(Path(aside) / CUDA, Path(aside) / NVML)
        shutil.copyfile(driver.cuda, real.cuda)
        shutil.copyfile(driver.nvml, real.nvml)
        guard = Guard(machine.directory / "mounted", ours, real, (machine.uuid,))
        try:
            job = guard.admit("mounted", (Quota(machine.uuid),), False)
            before = ["unshare", "-m", "sh", "-c", f'{over} && exec "$@"', "sh"]
            (did,) = machine.run("small kernels", [{PAGES_ENV: str(job.pages.directory)}], before)
            launches = job.usage()[0].launches
            machine.unknown.update(job.pages.audited())
            job.close()
        finally:
            guard.close()
    return [{**row(MOUNTED, [launches], "launches", goal="> 0", met=launches > 0), "by": did["by"]}]


def gate(machine: Machine) -> list[Row]:
    """Measure the time from the owner's order until the device is idle."""
    taken = []
    with machine.job() as job:
        process = machine.start("gate", 0, job.process_env())
        try:
            expect(process)
            assert process.stdout and process.stderr
            for _ in range(CLOSINGS):
                time.sleep(0.02)  # let it work
                begun = time.monotonic_ns()
                job.set_gate(True)
                say(process, "closed")
                line = process.stdout.readline()
                if not line.strip():
                    raise Unable(reason(process, process.stderr.read()))
                taken.append((int(line) - begun) / 1e6)
                job.set_gate(False)
        finally:
            end(process)
    late, most = sorted(taken)[int(len(taken) * 0.99)], WINDOW_MS + 0.25 + 1
    line = row(GATE, taken, "ms", goal=f"<= {most:g} ms (99th percentile)", met=late <= most)
    return [{**line, "p99": round(late, 3)}]


def queue_depth(machine: Machine) -> list[Row]:
    process = machine.start("depth", 0)
    try:
        return [row(DEPTH, [told(process)["depth"]], "launches", goal="", met=None)]
    finally:
        end(process)


def killed(machine: Machine) -> list[Row]:
    """Measure the time from SIGKILL until NVML no longer counts the process's memory."""
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
            end(process)
    return [row(KILLED, taken, "ms", goal="", met=None)]


def checkpoint(machine: Machine, gib: int) -> list[Row]:
    """Measure a pause in place and its end, as the daemon does them."""
    problem = available(machine.driver.cuda)
    if problem:
        raise Unable(problem)
    if machine.nvml.nvmlDeviceGetMemoryInfo(machine.device).free < (gib + 2) << 30:
        raise Unable("the device has too little memory")
    pause, process = Pause(machine.driver.cuda), machine.start("hold", gib)
    try:
        expect(process)
        before = machine.used()
        away = pause.suspend((process.pid,), WAIT_S)
        freed = before - machine.used()
        back = pause.resume((process.pid,), WAIT_S)
        say(process, "go")
        told(process)
    finally:
        end(process)
    names = checkpoint_names(gib)
    return [
        {**row(names[0], [duration_s(away)], "s", goal="", met=None), "freed_bytes": freed},
        row(names[1], [duration_s(back)], "s", goal="", met=None),
    ]


def duration_s(steps: Sequence[Step]) -> float:
    return sum(step["ms"] for step in steps) / 1000


# --- the report

IDENTITY = "(name, version) pairs resolved correctly, by the real driver"
EXPORTS = "calls that the driver exports and the guard does not"
ASKED = "calls that programs looked up and the guard does not know"
MOUNTED = "launches counted by the guard, mounted over the driver"
RATIO = "10 and 90 %, small kernels"
GATE = "gate closed -> last kernel done, kernels of 250 us"
DEPTH = "launches that the driver queues"
KILLED = "SIGKILL -> memory free"


def overhead_names(workload: str) -> tuple[str, str]:
    return f"overhead at 100 %, {workload}", f"launch, {workload}"


def checkpoint_names(gib: int) -> tuple[str, str]:
    return (
        f"driver's checkpoint of {gib} GiB: lock and checkpoint",
        f"driver's checkpoint of {gib} GiB: restore and unlock",
    )


Part = tuple[Sequence[tuple[str, str, str]], Callable[[Machine], list[Row]]]


def parts() -> Iterator[Part]:
    """Return the rows of the report (measure, unit, goal) with their functions, the quick ones first."""
    yield [(IDENTITY, "pairs", "all of cuda.h's")], identity
    yield [(EXPORTS, "calls", "0")], exports
    yield [(DEPTH, "launches", "")], queue_depth
    yield [(GATE, "ms", "window + kernel + 1 ms")], gate
    yield [(KILLED, "ms", "")], killed
    for gib in SIZES_GIB:
        lines = [(name, "s", "") for name in checkpoint_names(gib)]
        yield lines, lambda machine, gib=gib: checkpoint(machine, gib)
    yield [(MOUNTED, "launches", "> 0")], mounted
    yield [(RATIO, "to 1", "8.7 to 9.3")], one_to_nine
    for workload in WORKLOADS:
        most = "<= 0.5 %" if workload == "matmul training" else "<= 1 %"
        names = overhead_names(workload)
        yield [(names[0], "%", most), (names[1], "us", "")], lambda machine, w=workload: overhead(machine, w)
        for arm in ARMS:
            goal = "<= 0.3 points (mean)" if arm.startswith("ours") else ""
            line = (f"shares 45/30/15, {workload}, {arm}", "points", goal)
            yield [line], lambda machine, arm=arm, w=workload: shares(machine, arm, w)
    yield [(ASKED, "calls", "0")], asked


def measure(machine: Machine, todo: Sequence[Part]) -> list[Row]:
    """Measure the parts in turn. A part that cannot be measured says why, and the others continue."""
    rows: list[Row] = []
    for number, (lines, work) in enumerate(todo, 1):
        print(f"{number} of {len(todo)}: {lines[0][0]}", file=sys.stderr, flush=True)
        try:
            rows += work(machine)
        except (Unable, PauseError, AssertionError, OSError, ValueError, subprocess.SubprocessError) as error:
            rows += [not_run(*line, str(error)) for line in lines]
            print(f"  not run: {error}", file=sys.stderr, flush=True)
        save(AREA, rows, **machine.about)
    return rows


def usable_python() -> str:
    """Return the first Python that has a GPU framework, else the one that runs this."""
    for candidate in (str(ROOT / ".venv-frameworks" / "bin" / "python"), sys.executable, shutil.which("python3") or ""):
        try:
            done = subprocess.run([candidate, "-c", HAS_GPU], capture_output=True, timeout=WAIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return candidate
    return sys.executable


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--python")
    parser.add_argument("--only", action="append")
    options = parser.parse_args()
    wanted = options.only or [""]
    todo = [part for part in parts() if any(words in line[0] for line in part[0] for words in wanted)]
    if not todo:
        parser.error(f"no row of the report contains {' or '.join(wanted)}")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        try:
            machine = Machine(Path(directory), options.python or usable_python(), options.seconds)
        except Unable as error:
            print(f"{error}: nothing is measured")
            write(AREA, [not_run(*line, str(error)) for lines, _ in todo for line in lines])
        else:
            write(AREA, measure(machine, todo), **machine.about)
            machine.close()


if __name__ == "__main__":
    main()
