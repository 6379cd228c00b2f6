"""The guard on a real GPU, beside time slicing, MPS and HAMi-core: the questions of `make bench-guard` that need a real driver.

A share is the work of a job in a second, counted in iterations, relative to its work alone in the same round. All arms of a
comparison run in turn, round after round; intervals are bootstrapped over rounds. A workload that does not fill the GPU alone
is not compared. Without a GPU, each row gives the reason. The report is written after each part, so it can be interrupted.
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
from contextlib import ExitStack, contextmanager, suppress
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
from tests.bench.agents.spin import PER_US_ENV  # noqa: E402
from tests.bench.guard_harsh import bootstrap, late_steps  # noqa: E402
from tests.bench.harness import not_run, row, save, write  # noqa: E402

Row = dict[str, Any]
AREA = "guard-gpu"
AGENTS = Path(__file__).parent / "agents"
WORKLOADS = (
    "small kernels",
    "long kernels",
    "CUDA graphs",
    "PyTorch eager",
    "PyTorch compiled",
    "Triton",
    "CuPy",
    "JAX",
    "C with a static cudart",
)
MIXES = ("one of 2 is 10 times longer", "one of 8 is 50 times longer", "one of 5 is 100 times longer", "fills")
SHARES = (45.0, 30.0, 15.0)
HALF = 50.0
SIZES_GIB = (1, 8, 64)
QUOTA = 2 << 30
HAMI_LOCKS = Path("/tmp/vgpulock")  # HAMi-core needs it
CLOSINGS = 100
PRIMITIVE_TURNS = 3
HONEST, HONEST_SHARE = "honest", 60.0
FULL = 95.0  # per cent: work that fills less of the GPU alone says nothing about shares
CLOCKS_ALIKE = 0.01
LOCKED = 0.7  # of the highest clock: held under any load (an H200's base clock is 0.69 of it)
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

    def __init__(
        self,
        directory: Path,
        python: str,
        seconds: float,
        rounds: int,
        full: float = FULL,
        lock: bool = False,
        hami: Path | None = None,
    ) -> None:
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
        self.directory, self.rounds, self.full, self.hami = directory, rounds, full, hami
        self.clocks: list[int] = []  # MHz, at each measurement
        self._locked = lock
        self.about["clock"] = self._lock() if lock else "not locked"
        try:
            self.guard = Guard(directory / "pages", libraries(ROOT / "build" / "guard"), driver, (self.uuid,))
        except (BuildError, OSError) as error:
            raise Unable(str(error)) from None
        self._env: dict[str, str] = {}  # of all agents
        self._env[PER_US_ENV] = str(self.once("per_us")["per_us"])
        self.unknown: set[str] = set()  # calls that programs looked up
        self._names = (f"job{n}" for n in range(10_000))
        self._filled: dict[str, list[float]] = {}

    def _lock(self) -> str:
        """Lock the clock if this user may; return what it is."""
        nvml = self.nvml
        try:
            most = nvml.nvmlDeviceGetMaxClockInfo(self.device, nvml.NVML_CLOCK_SM)
            nvml.nvmlDeviceSetGpuLockedClocks(self.device, round(most * LOCKED), round(most * LOCKED))
        except nvml.NVMLError as error:
            return f"not locked: {error}"
        return f"locked at {round(most * LOCKED)} MHz"

    @contextmanager
    def job(
        self, share: float = 100, limit: float | None = None, window_ms: float = WINDOW_MS, **more: Any
    ) -> Iterator[GuardedJob]:
        quota = Quota(self.uuid, share=share, limit=limit or share, window_ms=window_ms, **more)
        made = self.guard.admit(next(self._names), (quota,), False)
        try:
            yield made
        finally:
            self.unknown.update(made.pages.audited())
            made.close()

    def start(
        self, *words: str, env: dict[str, str] | None = None, before: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start an agent; `before` is a command that runs the command after it."""
        agent = [self.python, str(AGENTS / "gpu.py")]
        if words[0] == HONEST:
            agent, words = [self.python, str(AGENTS / "honest.py")], words[1:]
        elif words[-1] == "C with a static cudart":
            agent, words = [str(self._static())], ()
        return subprocess.Popen(
            [*before, *agent, *words],
            env={**os.environ, **self._env, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _static(self) -> Path:
        """Return the C program, compiled once with a cudart that is linked statically."""
        path, compiler = self.directory / "cudart", shutil.which("nvcc")
        if compiler is None:
            raise Unable("nvcc is not installed")
        if not path.exists():
            words = [compiler, "-O2", "-cudart", "static", "-o", path, AGENTS / "cudart.cu"]
            subprocess.run(words, check=True, capture_output=True, timeout=WAIT_S)
        return path

    @contextmanager
    def agents(
        self, workload: str, envs: Sequence[dict[str, str]], before: Sequence[str] = ()
    ) -> Iterator[list["Agent"]]:
        """Start agents of a workload; they wait for their word."""
        processes = [self.start("work", workload, env=env, before=before) for env in envs]
        try:
            yield [Agent(process) for process in processes]
        finally:
            for process in processes:
                end(process)

    def measure(self, agents: Sequence["Agent"], seconds: float | None = None) -> list[dict[str, Any]]:
        """Let the agents work side by side; return their results."""
        for agent in agents:
            agent.wait()
        for agent in agents:
            agent.say(str(seconds or self.seconds))
        time.sleep((seconds or self.seconds) / 2)
        self.clocks.append(int(self.nvml.nvmlDeviceGetClockInfo(self.device, self.nvml.NVML_CLOCK_SM)))
        return [agent.told() for agent in agents]

    def once(self, *words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Return what an agent tells at its end."""
        process = self.start(*words, env=env)
        try:
            return told(process)
        finally:
            end(process)

    def require_full(self, workload: str) -> None:
        """Raise Unable if the workload alone does not fill the GPU: if two of it do more in the same time."""
        if workload not in self._filled:
            parts = []
            with self.agents(workload, [{}, {}]) as both:
                for _ in range(self.rounds):
                    (alone,) = self.measure(both[:1])
                    parts.append(alone["rate"] / sum(one["rate"] for one in self.measure(both)) * 100)
            self._filled[workload] = parts
        part = statistics.median(self._filled[workload])
        if part < self.full:
            raise Unable(f"alone it fills {part:.0f} % of the GPU, which says nothing about shares")

    def used(self) -> int:
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.device).used)

    def close(self) -> None:
        self.guard.close()
        if self._locked:
            with suppress(self.nvml.NVMLError):  # this user may not
                self.nvml.nvmlDeviceResetGpuLockedClocks(self.device)


class Agent:
    """A process that works when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._ready = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self) -> None:
        """Return when it is ready to work."""
        if not self._ready:
            expect(self.process)
        self._ready = True

    def say(self, word: str) -> None:
        say(self.process, word)

    def told(self) -> dict[str, Any]:
        assert self.process.stdout and self.process.stderr
        line = self.process.stdout.readline()
        if not line.strip():
            raise Unable(reason(self.process, self.process.stderr.read()))
        return dict(json.loads(line))


def spread(measure: str, values: Sequence[float], unit: str, **more: Any) -> Row:
    """Return a row with the 95 % interval of its median."""
    low, high = bootstrap(values)
    return {**row(measure, values, unit, **more), "ci95": [round(low, 4), round(high, 4)]}


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


def hami(machine: Machine, stack: ExitStack) -> list[dict[str, str]]:
    """Return the environments of HAMi-core, whose library the user has built: one region file for each job, as in a container."""
    if machine.hami is None:
        raise Unable("--hami names no library of HAMi-core")
    home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    HAMI_LOCKS.mkdir(exist_ok=True)
    common = {"LD_PRELOAD": str(machine.hami), "GPU_CORE_UTILIZATION_POLICY": "FORCE", "LIBCUDA_LOG_LEVEL": "0"}
    return [
        {**common, "CUDA_DEVICE_SM_LIMIT": f"{share:g}", "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(home / f"{share:g}")}
        for share in SHARES
    ]


ARMS = {"time slicing": slicing, "MPS": mps, "HAMi-core": hami, "ours hard": hard, "ours elastic": elastic}


def compare(machine: Machine, workload: str) -> list[Row]:
    """Measure the mean error of three jobs' shares of 45, 30 and 15 % in each arm, by turns with the workload alone."""
    machine.require_full(workload)
    rows, errors, by = [], {}, ""
    with ExitStack() as stack:
        (solo,) = stack.enter_context(machine.agents(workload, [{}]))
        there: dict[str, list[Agent]] = {}
        for arm, prepare in ARMS.items():
            try:
                there[arm] = stack.enter_context(machine.agents(workload, prepare(machine, stack)))
            except Unable as error:
                rows.append(not_run(share_name(workload, arm), "points", "", str(error)))
        solo.wait()
        for arm in list(there):  # they start side by side
            try:
                for agent in there[arm]:
                    agent.wait()
            except Unable as error:
                rows.append(not_run(share_name(workload, arm), "points", "", str(error)))
                del there[arm]
        for _ in range(machine.rounds):
            (alone,) = machine.measure([solo])
            by = alone["by"]
            for arm, agents in there.items():
                did = machine.measure(agents)
                parts = [abs(one["rate"] / alone["rate"] * 100 - share) for one, share in zip(did, SHARES, strict=True)]
                errors.setdefault(arm, []).append(statistics.mean(parts))
    for arm, values in errors.items():
        ours = arm.startswith("ours")
        goal, met = ("<= 1 point (mean)", statistics.median(values) <= 1) if ours else ("", None)
        rows.append({**spread(share_name(workload, arm), values, "points", goal=goal, met=met), "by": by})
    return rows


def share_name(workload: str, arm: str) -> str:
    return f"shares 45/30/15, {workload}, {arm}"


def filled(machine: Machine, workload: str) -> list[Row]:
    """Assert that the workload alone fills the GPU: that two of it do no more in the same time."""
    try:
        machine.require_full(workload)
    except Unable:
        if workload not in machine._filled:
            raise
    values = machine._filled[workload]
    met = statistics.median(values) >= FULL
    return [spread(filled_name(workload), values, "%", goal=f">= {FULL:g} %", met=met)]


def filled_name(workload: str) -> str:
    return f"part of the GPU that {workload} fills alone"


def alone(machine: Machine, workload: str) -> list[Row]:
    """Measure a job with the whole device and one with half of it, each alone, by turns with the driver without the guard.

    Half of the time is more than half of the work where the device's clock is higher, because it uses less power.
    """
    charged, clocks = [], []
    with (
        machine.job(window_ms=ALONE_WINDOW_MS) as whole,
        machine.job(HALF) as half,
        machine.agents(workload, [{}, whole.process_env(), half.process_env()]) as agents,
    ):
        turns = []
        for _ in range(machine.rounds):
            paid = half.usage()[0].gpu_s
            turns.append([machine.measure([agent])[0] for agent in agents])
            charged.append(half.usage()[0].gpu_s - paid)
            clocks.append(machine.clocks[-3:])
    loss = [(1 - ours["rate"] / bare["rate"]) * 100 for bare, ours, _ in turns]
    parts = [ours["rate"] / bare["rate"] * 100 for bare, _, ours in turns]
    over = [paid * bare["rate"] / ours["all_units"] for paid, (bare, _, ours) in zip(charged, turns, strict=True)]
    alike = statistics.median(abs(ours / bare - 1) for bare, _, ours in clocks) <= CLOCKS_ALIKE
    share, ratio = statistics.median(parts), statistics.median(over)
    of_time = {"by": turns[0][0]["by"], "clocks": clocks, **({} if alike else {"why": "the clock was another"})}
    lines = (
        spread(overhead_name(workload), loss, "%", goal="<= 1 %", met=statistics.median(loss) <= 1, peer="native, per s",
               peer_values=[bare["rate"] for bare, _, _ in turns]),
        {**spread(half_name(workload), parts, "%", goal="47.5 to 52.5 %", met=47.5 <= share <= 52.5 if alike else None),
         **of_time},
        {**spread(charged_name(workload), over, "", goal="0.97 to 1.03", met=0.97 <= ratio <= 1.03 if alike else None),
         **of_time},
    )  # fmt: skip
    return list(lines)


def job_of_three(machine: Machine) -> list[Row]:
    """Measure what three processes of one job with 30 % do together, by turns with one alone."""
    machine.require_full("small kernels")
    with machine.job(30) as job, machine.agents("small kernels", [{}, *[job.process_env()] * 3]) as (solo, *three):
        parts = []
        for _ in range(machine.rounds):
            (alone,) = machine.measure([solo])
            parts.append(sum(one["rate"] for one in machine.measure(three)) / alone["rate"] * 100)
    return [spread(THREE, parts, "%", goal="28.5 to 31.5 %", met=28.5 <= statistics.median(parts) <= 31.5)]


def nccl(machine: Machine) -> list[Row]:
    """Measure all-reduces of two processes on two GPUs, guarded over bare."""
    if int(machine.nvml.nvmlDeviceGetCount()) < 2:
        raise Unable("there is one GPU")
    uuids = tuple(
        str(machine.nvml.nvmlDeviceGetUUID(machine.nvml.nvmlDeviceGetHandleByIndex(number))) for number in range(2)
    )
    guard = Guard(machine.directory / "gang", machine.guard.libraries, machine.driver, uuids)
    try:
        job = guard.admit("gang", tuple(Quota(uuid, window_ms=ALONE_WINDOW_MS) for uuid in uuids), False)
        ranks = [{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} for rank in range(2)]
        bare = [{**rank, "MASTER_PORT": "29511"} for rank in ranks]
        ours = [{**rank, "MASTER_PORT": "29512", **job.process_env()} for rank in ranks]
        with machine.agents("NCCL", bare) as plain, machine.agents("NCCL", ours) as guarded:
            loss = []
            for _ in range(machine.rounds):
                native = min(one["rate"] for one in machine.measure(plain))
                loss.append((1 - min(one["rate"] for one in machine.measure(guarded)) / native) * 100)
        job.close()
    finally:
        guard.close()
    return [spread(NCCL, loss, "%", goal="<= 1 %", met=statistics.median(loss) <= 1)]


# --- what went wrong with guards before


def mix(machine: Machine, what: str) -> list[Row]:
    """Measure what a job with 30 % gets when its kernels vary, or when it only fills and copies memory."""
    machine.require_full(what)
    with machine.job(30) as job, machine.agents(what, [{}, job.process_env()]) as (solo, ours):
        pairs = [(machine.measure([solo])[0], machine.measure([ours])[0]) for _ in range(machine.rounds)]
    parts = [guarded["rate"] / alone["rate"] * 100 for alone, guarded in pairs]
    return [spread(mix_name(what), parts, "%", goal="28.5 to 31.5 %", met=28.5 <= statistics.median(parts) <= 31.5)]


def mix_name(what: str) -> str:
    return f"share of 30 %, {what}"


def steps(machine: Machine) -> list[Row]:
    """Measure a job that works in steps beside one that borrows what it leaves."""
    machine.require_full("small kernels")
    kept, got = [], []
    with machine.job(45, 90) as one, machine.job(45, 90) as other, ExitStack() as stack:
        alone, stepping = stack.enter_context(machine.agents("steps", [{}, one.process_env()]))
        solo, borrowing = stack.enter_context(machine.agents("small kernels", [{}, other.process_env()]))
        for _ in range(machine.rounds):
            (steps_alone,), (all_alone,) = machine.measure([alone]), machine.measure([solo])
            step, borrow = machine.measure([stepping, borrowing])
            kept.append(step["rate"] / steps_alone["rate"] * 100)
            got.append(borrow["rate"] / all_alone["rate"] * 100)
    return [
        spread(STEPPER, kept, "%", goal=">= 67 %", met=statistics.median(kept) >= 67),  # 3 points of 9
        spread(BORROWER, got, "%", goal=">= 66 %", met=statistics.median(got) >= 66),
    ]


def gated(machine: Machine) -> list[Row]:
    """Measure work that is queued behind the host. A guard that waits for completions hangs."""
    bare = machine.once("gated")["s"]
    with machine.job(window_ms=ALONE_WINDOW_MS) as job:
        ours = machine.once("gated", env=job.process_env())["s"]
    ratios = [took / statistics.median(bare) for took in ours]
    return [spread(GATED, ratios, "times", goal="<= 1.2 times", met=statistics.median(ratios) <= 1.2, peer="bare, s",
                   peer_values=bare)]  # fmt: skip


def first(machine: Machine) -> list[Row]:
    """Count the slow steps after the one that loads the kernels."""
    usual = machine.once("first")["usual_s"]
    late = []
    for _ in range(machine.rounds):
        with machine.job(window_ms=ALONE_WINDOW_MS) as job:
            late.append(late_steps(machine.once("first", env=job.process_env())["s"][1:], usual))
    return [spread(FIRST, late, "steps", goal="<= 3 steps", met=max(late) <= 3)]


def held_by(machine: Machine, pid: int) -> int:
    """Return the bytes that NVML counts for a process."""
    listed = machine.nvml.nvmlDeviceGetComputeRunningProcesses(machine.device)
    used = [one.usedGpuMemory for one in listed if one.pid == pid]
    if not used or used[0] is None:
        raise Unable("NVML reports no memory by process")
    return int(used[0])


def quota(machine: Machine) -> list[Row]:
    """Measure by how much NVML's account of a process exceeds its job's quota of 2 GiB, the context included."""
    process = machine.start("hold", "0.001")
    try:
        expect(process)
        context = held_by(machine, process.pid)  # the daemon learns it from NVML likewise
    finally:
        end(process)
    with machine.job(memory=QUOTA, context_bytes=context) as job:
        process = machine.start("quota", env=job.process_env())
        try:
            expect(process)
            held = held_by(machine, process.pid)
            say(process, "go")
            taken = told(process)["bytes"]
        finally:
            end(process)
    over = max(0, held - QUOTA)
    return [{**row(OVER, [over], "bytes", goal="0", met=over == 0), "allocated": taken, "nvml": held}]


def primitives(machine: Machine) -> list[Row]:
    """Measure what the guard's own calls cost, and when an event that is recorded after a wait is ready."""
    turns: list[tuple[dict[str, Any], dict[str, Any]]] = []
    with machine.job(window_ms=ALONE_WINDOW_MS) as job:
        for _ in range(PRIMITIVE_TURNS):
            turns.append((machine.once("primitives"), machine.once("primitives", env=job.process_env())))
    rows = []
    for name in turns[0][0]["calls"]:
        native, ours = ([value for turn in turns for value in turn[way]["calls"][name]] for way in range(2))
        rows.append(spread(f"{PRIMITIVE}, {name}", ours, "us", goal="", met=None, peer="native", peer_values=native))
    ready = spread(READY, [value for bare, _ in turns for value in bare["ready_us"]], "us", goal="", met=None)
    return [*rows, {**ready, "at_once": statistics.mean(bare["at_once"] for bare, _ in turns)}]


def clocks(machine: Machine) -> list[Row]:
    return [row(CLOCKS, machine.clocks, "MHz", goal="", met=None)]


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
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, PAGES_ENV: str(job.pages.directory), "PYTHONPATH": path}
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


def honest(machine: Machine) -> list[Row]:
    """Check that honest programs compute the same with the guard, on all its paths: see tests/cuda_guard/zoo.py."""
    from tests.cuda_guard import zoo

    ways: list[dict[str, str]] = [{}]
    found: dict[str, list[subprocess.Popen[str]]] = {}
    with ExitStack() as stack:
        ways.append(stack.enter_context(machine.job(HONEST_SHARE)).process_env())
        for program in zoo.PROGRAMS:
            name = program.__name__
            found[name] = [machine.start(HONEST, name, env=env) for env in ways]
            for process in found[name]:
                stack.callback(end, process)
        bare, guarded = ({name: result(both[way]) for name, both in found.items()} for way in range(2))
    unable = {name: said for name, said in bare.items() if isinstance(said, str)}
    changed = {name: [bare[name], guarded[name]] for name in bare if name not in unable and bare[name] != guarded[name]}
    line = row(CHANGED, [len(changed)], f"programs of {len(bare) - len(unable)}", goal="0", met=not changed)
    return [{**line, "names": changed, "left_out": unable}]


def result(process: subprocess.Popen[str]) -> Any:
    """Return what a program computed, or why it gave nothing."""
    try:
        out, errors = process.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"it hung for {WAIT_S:g} s"
    return json.loads(out) if process.returncode == 0 else reason(process, errors)


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
            with machine.agents("small kernels", [{PAGES_ENV: str(job.pages.directory)}], before) as agents:
                (did,) = machine.measure(agents)
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
        process = machine.start("gate", env=job.process_env())
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
    return [row(DEPTH, [machine.once("depth")["depth"]], "launches", goal="", met=None)]


def killed(machine: Machine) -> list[Row]:
    """Measure the time from SIGKILL until the job's lock falls, and until NVML no longer counts its memory."""
    unlocked, freed = [], []
    for _ in range(5):
        with machine.job() as job:
            before, process = machine.used(), machine.start("hold", "1", env=job.process_env())
            try:
                expect(process)
                process.send_signal(signal.SIGKILL)
                begun = time.perf_counter()
                unlocked.append(ms_until(lambda: not job.charges(), begun))
                freed.append(ms_until(lambda most=before + (64 << 20): machine.used() <= most, begun))
            finally:
                end(process)
    return [row(UNLOCKED, unlocked, "ms", goal="", met=None), row(KILLED, freed, "ms", goal="", met=None)]


def ms_until(is_so: Callable[[], bool], begun: float) -> float:
    """Return the ms from `begun` (of time.perf_counter) until it is so, at most 10 s."""
    while not is_so() and time.perf_counter() - begun < 10:
        time.sleep(0.001)
    return (time.perf_counter() - begun) * 1000


def checkpoint(machine: Machine, gib: int) -> list[Row]:
    """Measure a pause in place and its end, as the daemon does them."""
    problem = available(machine.driver.cuda)
    if problem:
        raise Unable(problem)
    if machine.nvml.nvmlDeviceGetMemoryInfo(machine.device).free < (gib + 2) << 30:
        raise Unable("the device has too little memory")
    pause, process = Pause(machine.driver.cuda), machine.start("hold", str(gib))
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
CHANGED = "honest programs that the guard stops, refuses or changes"
THREE = "share of 30 %, three processes of one job"
NCCL = "overhead at 100 %, NCCL on two GPUs"
STEPPER = "work of a job in steps beside a borrower, of its work alone"
BORROWER = "work of the borrower beside the job in steps, of its work alone"
GATED = "work queued behind the host, over bare"
FIRST = "slow steps after the first launches"
OVER = "memory over a quota of 2 GiB, by NVML"
PRIMITIVE = "cost of a call under the guard"
READY = "an event recorded after a wait is ready"
CLOCKS = "clock of the multiprocessors while measuring"
GATE = "gate closed -> last kernel done, kernels of 250 us"
DEPTH = "launches that the driver queues"
UNLOCKED, KILLED = "SIGKILL -> lock free", "SIGKILL -> memory free"


def overhead_name(workload: str) -> str:
    return f"overhead at 100 %, {workload}"


def half_name(workload: str) -> str:
    return f"share of {HALF:g} %, {workload}"


def charged_name(workload: str) -> str:
    return f"charged time over that of the same work without the guard, {workload}"


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
    yield [(UNLOCKED, "ms", ""), (KILLED, "ms", "")], killed
    for gib in SIZES_GIB:
        lines = [(name, "s", "") for name in checkpoint_names(gib)]
        yield lines, lambda machine, gib=gib: checkpoint(machine, gib)
    yield [(MOUNTED, "launches", "> 0")], mounted
    yield [(CHANGED, "programs", "0")], honest
    yield [(PRIMITIVE, "us", ""), (READY, "us", "")], primitives
    yield [(OVER, "bytes", "0")], quota
    yield [(GATED, "times", "<= 1.2 times")], gated
    yield [(FIRST, "steps", "<= 3 steps")], first
    for what in MIXES:
        yield [(mix_name(what), "%", "28.5 to 31.5 %")], lambda machine, what=what: mix(machine, what)
    yield [(STEPPER, "%", ">= 67 %"), (BORROWER, "%", ">= 66 %")], steps
    yield [(THREE, "%", "28.5 to 31.5 %")], job_of_three
    yield [(NCCL, "%", "<= 1 %")], nccl
    for workload in WORKLOADS:
        yield [(filled_name(workload), "%", f">= {FULL:g} %")], lambda machine, w=workload: filled(machine, w)
        lines = [
            (overhead_name(workload), "%", "<= 1 %"),
            (half_name(workload), "%", "47.5 to 52.5 %"),
            (charged_name(workload), "", "0.97 to 1.03"),
        ]
        yield lines, lambda machine, w=workload: alone(machine, w)
        lines = [
            (share_name(workload, arm), "points", "<= 1 point (mean)" if arm.startswith("ours") else "") for arm in ARMS
        ]
        yield lines, lambda machine, w=workload: compare(machine, w)
    yield [(ASKED, "calls", "0")], asked
    yield [(CLOCKS, "MHz", "")], clocks


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


def summary(rows: Sequence[Row]) -> list[str]:
    """Return what the report means, in sentences."""
    ran, missed = [one for one in rows if one["value"] is not None], [one for one in rows if one["met"] is False]
    found = {one["measure"]: one for one in ran}
    text = [f"{len(ran)} of {len(rows)} rows could be measured; {len(missed)} of those with a goal miss it."]
    for workload in WORKLOADS:
        ours, theirs = (found.get(share_name(workload, arm)) for arm in ("ours hard", "time slicing"))
        if ours and theirs:
            text.append(
                f"{workload}: jobs that were promised 45, 30 and 15 % of the GPU were off by {ours['value']:.2f} points on "
                f"average (95 % interval {ours['ci95'][0]:.2f} to {ours['ci95'][1]:.2f}), without the guard by "
                f"{theirs['value']:.2f}."
            )
        if cost := found.get(overhead_name(workload)):
            text.append(
                f"{workload}: a job with the whole GPU loses {cost['value']:.2f} % of its speed under the guard."
            )
    if late := found.get(GATE):
        text.append(f"After the owner's order the GPU was idle within {late['p99']:g} ms in 99 of 100 cases.")
    if over := found.get(OVER):
        text.append(f"A job with a quota of 2 GiB held {over['value']:g} bytes more than that.")
    return [
        *text,
        *(f"Goal missed: {one['measure']} ({one['value']} {one['unit']}; goal {one['goal']})." for one in missed),
    ]


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
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (%(default)g)")
    parser.add_argument("--rounds", type=int, default=10, help="(%(default)d)")
    parser.add_argument("--full", type=float, default=FULL, help="per cent of the GPU that a workload must fill alone")
    parser.add_argument("--lock-clocks", action="store_true", help="lock the clocks; the GPU must be yours alone")
    parser.add_argument("--hami", type=Path, help="the library that HAMi-core's build makes, to measure beside")
    parser.add_argument("--python", help="one with frameworks for GPUs; rows that need another one are left out")
    parser.add_argument("--only", action="append", help="run rows with these words")
    options = parser.parse_args()
    wanted = options.only or [""]
    todo = [part for part in parts() if any(words in line[0] for line in part[0] for words in wanted)]
    if not todo:
        parser.error(f"no row of the report contains {' or '.join(wanted)}")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        try:
            python = options.python or usable_python()
            machine = Machine(
                Path(directory),
                python,
                options.seconds,
                options.rounds,
                options.full,
                options.lock_clocks,
                options.hami,
            )
        except Unable as error:
            print(f"{error}: nothing is measured")
            write(AREA, [not_run(*line, str(error)) for lines, _ in todo for line in lines])
        else:
            rows = measure(machine, todo)
            write(AREA, rows, **machine.about, summary="\n".join(summary(rows)))
            print("\n".join(summary(rows)))
            machine.close()


if __name__ == "__main__":
    main()
