"""GPU workloads by PyTorch, JAX, CuPy or the driver API alone, as a process that `guard_gpu.py` measures.

gpu.py work WORKLOAD   warms up, prints "ready"; for each line with a number of seconds, works a moment longer and prints what it
                       did in these seconds
gpu.py hold GIGABYTES  holds this much memory until it reads a line
gpu.py gate            launches all the time; at each line, prints when its last work before the closed gate ended
gpu.py NAME            prints the result of `per_us`, `depth`, `primitives`, `quota`, `gated` or `first`
"""

import ctypes
import importlib.util
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

from spin import Spinner

QUIET_S = 0.02  # without a launch, the gate counts as closed
SLOW_S = 125e-6  # half of the running kernel's time: the launch waited for it
MOST_LAUNCHES = 4096
CALLS, BATCHES = 200, 15  # primitive calls are timed in batches
WARM_UP = 20  # steps
QUEUED_S = 0.05  # of work is queued before a wait: little, so that a measurement ends in time, and enough that waits cost nothing
LEAD_S = 0.25  # worked before it counts: longer than saved shares last
LOADED = 100  # functions whose first launch is measured
PAUSE_S = 0.05
Step = Callable[[], Any]  # does some work and returns how much, or None for one unit


class Missing(Exception):
    """The workload needs something that this Python lacks."""


def torch_steps(workload: str) -> tuple[Step, Step]:
    """Return a function that does one unit of work, and one that waits for the device."""
    import torch

    if not torch.cuda.is_available():
        raise Missing("PyTorch finds no GPU (it may be built without CUDA)")
    if workload == "NCCL":
        return nccl(torch), torch.cuda.synchronize
    x = torch.randn(8192, 4096, device="cuda")  # fills an H200: 64 tiles of 128 x 256 for each of its layers' products
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def graph() -> Step:
        train()
        torch.cuda.synchronize()
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made):
            for _ in range(4):
                model(x)
        return made.replay

    if workload == "CUDA graphs":
        return graph(), torch.cuda.synchronize
    if workload == "PyTorch eager":
        return train, torch.cuda.synchronize
    if importlib.util.find_spec("triton") is None:
        raise Missing("no Triton")
    if workload == "PyTorch compiled":
        return torch.compile(train), torch.cuda.synchronize
    reduce = torch.compile(lambda: torch.relu(x * 2 + 1).sum(1))
    return lambda: reduce() is None, torch.cuda.synchronize  # Triton


def nccl(torch: Any) -> Step:
    """Reduce 256 MiB over all ranks; the environment says which this is."""
    torch.cuda.set_device(int(os.environ["RANK"]))
    torch.distributed.init_process_group("nccl")
    tensor = torch.ones(64 << 20, device="cuda")
    return lambda: torch.distributed.all_reduce(tensor) and None


def jax_steps(workload: str) -> tuple[Step, Step]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else one process takes most of the memory
    import jax

    x = jax.numpy.ones((8192, 8192), dtype="bfloat16")
    multiply = jax.jit(lambda a: a @ a)
    last = [multiply(x)]

    def step() -> None:
        last[0] = multiply(x)

    def wait() -> None:
        last[0].block_until_ready()

    return step, wait


def cupy_steps(workload: str) -> tuple[Step, Step]:
    import cupy

    a = cupy.ones((8192, 8192), dtype=cupy.float32)
    return (lambda: cupy.add(a, 1, out=a) is None), cupy.cuda.Device().synchronize


def mixed(spinner: Spinner, every: int, times: int) -> Step:
    short, long, rng = spinner.kernel(20), spinner.kernel(20 * times), Random(7)

    def step() -> int:
        return long() if rng.randrange(every) == 0 else short()

    return step


def stepped(spinner: Spinner) -> Step:
    """Launch 5 ms of work, wait for it by asking, and rest."""
    launch = spinner.kernel(100)

    def step() -> int:
        for _ in range(50):
            launch()
        while not spinner.is_idle():
            time.sleep(0.0002)
        time.sleep(PAUSE_S)
        return 5000

    return step


def driver_steps(workload: str) -> tuple[Step, Step]:
    spinner = Spinner()
    steps: dict[str, Callable[[], Step]] = {
        "small kernels": lambda: spinner.kernel(20),
        "long kernels": lambda: spinner.kernel(2000),
        "CUDA graphs": spinner.graph,
        "fills": spinner.fill,
        "steps": lambda: stepped(spinner),
    }
    if workload.startswith("one of "):  # "one of 8 is 50 times longer"
        every, times = (int(word) for word in workload.split() if word.isdigit())
        steps[workload] = lambda: mixed(spinner, every, times)
    if workload not in steps:
        raise Missing(f"the driver alone does no {workload}")
    return steps[workload](), spinner.wait


MAKERS: tuple[tuple[str, Callable[[str], tuple[Step, Step]], tuple[str, ...]], ...] = (
    ("torch", torch_steps, ("CUDA graphs", "PyTorch eager", "PyTorch compiled", "Triton", "NCCL")),
    ("jax", jax_steps, ("JAX",)),
    ("cupy", cupy_steps, ("CuPy",)),
)


def steps_of(workload: str) -> tuple[Step, Step, str]:
    """Return the functions of a workload, and the name of the framework that runs it."""
    why = []
    for name, make, workloads in MAKERS:
        if workload not in workloads:
            continue
        if importlib.util.find_spec(name) is None:
            why.append(f"no {name} in {sys.executable}")
            continue
        try:
            return *make(workload), name
        except Missing as error:
            why.append(str(error))
    try:
        return *driver_steps(workload), "the driver"
    except Missing as error:
        raise Missing("; ".join([*why, str(error)])) from None


def work(workload: str) -> None:
    step, wait, by = steps_of(workload)
    for _ in range(WARM_UP):
        step()
    wait()
    print("ready", flush=True)
    steps = 1  # between two waits

    def spend(seconds: float) -> tuple[int, float]:
        """Work so long; return how much was done, and the seconds that it took."""
        nonlocal steps
        units, begun = 0, time.perf_counter()
        now = begun
        while now - begun < seconds:
            waited = now
            for _ in range(steps):
                units += step() or 1
            wait()
            now = time.perf_counter()
            if now - waited < QUEUED_S / 2:
                steps *= 2
            elif now - waited > QUEUED_S * 2 and steps > 1:
                steps //= 2
        return units, now - begun

    for line in sys.stdin:
        before, _ = spend(LEAD_S)
        units, took = spend(float(line))
        done = {"units": units, "took": took, "all_units": before + units, "rate": units / took, "by": by}
        print(json.dumps(done), flush=True)


def gate() -> None:
    spinner, launched = Spinner(), 0
    launch = spinner.kernel(250)

    def launches() -> None:
        nonlocal launched
        spinner.driver.cuCtxSetCurrent(spinner.context)
        while True:
            launch()
            launched += 1

    threading.Thread(target=launches, daemon=True).start()
    print("ready", flush=True)
    for _ in sys.stdin:
        ended, before = 0, -1
        while launched != before or not ended or time.monotonic_ns() - ended < QUIET_S * 1e9:
            if launched != before or not spinner.is_idle():
                ended, before = 0, launched
            elif not ended:
                ended = time.monotonic_ns()
        print(ended, flush=True)


def per_us() -> dict[str, Any]:
    return {"per_us": Spinner().per_us}


def depth() -> dict[str, Any]:
    """Return how many launches the driver accepts before one has to wait; the maximum tried if none waits."""
    spinner = Spinner()
    launch, slow, count = spinner.kernel(250), 0, 0
    launch()
    spinner.wait()
    while count < MOST_LAUNCHES and slow < 2:  # a single slow launch may have waited for the CPU
        begun = time.perf_counter()
        launch()
        slow = slow + 1 if time.perf_counter() - begun > SLOW_S else 0
        count += 1
    return {"depth": count - slow}


def primitives() -> dict[str, Any]:
    """Return us of calls that the guard makes, and of an event from its record after a wait until it is ready."""
    spinner = Spinner()
    driver, stream = spinner.driver, spinner.stream
    event, pool = driver.record(stream), driver.out("cuDeviceGetDefaultMemPool", 0)
    value, pointer = ctypes.c_uint64(), ctypes.c_void_p()
    spinner.wait()
    calls: dict[str, Step] = {
        "nothing (the cost of asking from Python)": lambda: driver.cuDriverGetVersion(ctypes.byref(value)),
        "cuCtxGetCurrent": lambda: driver.cuCtxGetCurrent(ctypes.byref(pointer)),
        "cuCtxGetDevice": lambda: driver.cuCtxGetDevice(ctypes.byref(value)),
        "cuEventRecord": lambda: driver.cuEventRecord(event, stream),
        "cuEventQuery": lambda: driver.cuEventQuery(event),
        "cuStreamQuery": lambda: driver.cuStreamQuery(stream),
        "cuEventElapsedTime": lambda: driver.elapsed_ms(event, event),
        "cuMemPoolGetAttribute": lambda: driver.cuMemPoolGetAttribute(pool, 5, ctypes.byref(value)),
        "cuLaunchKernel": spinner.kernel(1),
    }
    found: dict[str, list[float]] = {}
    for name, call in calls.items():
        for _ in range(BATCHES):
            spinner.wait()
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            found.setdefault(name, []).append((time.perf_counter() - begun) / CALLS * 1e6)
            spinner.wait()
    ready, at_once = [], 0
    for _ in range(CALLS):
        spinner.kernel(20)()
        spinner.wait()
        begun = time.perf_counter()
        driver.cuEventRecord(event, stream)
        at_once += driver.code("cuEventQuery", event) == 0
        while driver.code("cuEventQuery", event):
            pass
        ready.append((time.perf_counter() - begun) * 1e6)
    return {"calls": found, "ready_us": ready, "at_once": at_once / CALLS}


def quota() -> dict[str, Any]:
    """Allocate until the driver or the guard refuses; hold it until a line is read."""
    spinner, taken = Spinner(calibrate=False), 0
    pointer = ctypes.c_uint64()
    for size in (256 << 20, 32 << 20, 2 << 20):
        while spinner.driver.code("cuMemAlloc_v2", ctypes.byref(pointer), size) == 0:
            taken += size
            if taken >= 8 << 30:
                break
    print("ready", flush=True)
    sys.stdin.readline()
    return {"bytes": taken}


def gated() -> dict[str, Any]:
    """Return the seconds of 40 ms of work queued behind a function that this thread lets return only afterwards."""
    spinner = Spinner()
    launch, taken = spinner.kernel(1000), []
    function_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    for _ in range(10):
        go = threading.Event()
        function = function_type(lambda _, go=go: go.wait() and None)
        begun = time.perf_counter()
        spinner.driver.cuLaunchHostFunc(spinner.stream, function, None)
        for _ in range(40):
            launch()
        go.set()
        spinner.wait()
        taken.append(time.perf_counter() - begun)
    return {"s": taken}


def first() -> dict[str, Any]:
    """Return the seconds of steps that launch each of many functions once; the first one loads them."""
    spinner = Spinner()
    launches, taken = [spinner.kernel(10, spinner.load()) for _ in range(LOADED)], []
    for _ in range(60):
        begun = time.perf_counter()
        for launch in launches:
            launch()
        spinner.wait()
        taken.append(time.perf_counter() - begun)
    return {"s": taken, "usual_s": statistics.median(taken[-20:])}


def main() -> None:
    what = sys.argv[1]
    if what == "work":
        work(sys.argv[2])
    elif what == "gate":
        gate()
    elif what == "hold":
        Spinner(calibrate=False).hold(int(float(sys.argv[2]) * 2**30))
        print("ready", flush=True)
        sys.stdin.readline()
        print("{}")
    else:
        results = (per_us, depth, primitives, quota, gated, first)
        print(json.dumps(next(result for result in results if result.__name__ == what)()))


if __name__ == "__main__":
    try:
        main()
    except Missing as error:
        sys.exit(str(error))
    except Exception as error:  # frameworks raise anything; report it in one line
        sys.exit(f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}")
