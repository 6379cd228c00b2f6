"""GPU workloads by PyTorch, CuPy or the driver API alone, as a process that `guard_gpu.py` measures.

gpu.py WORKLOAD SECONDS   warms up, prints "ready", waits for a line, works that long, prints its result as JSON
gpu.py hold GIGABYTES     holds this much memory until it reads a line
gpu.py depth 0            prints how many launches the driver queues
gpu.py gate 0             launches all the time; at each line, prints when its last work before the closed gate ended
"""

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from spin import Spinner

QUIET_S = 0.02  # without a launch, the gate counts as closed
SLOW_S = 125e-6  # half of the running kernel's time: the launch waited for it
MOST_LAUNCHES = 4096
Step = Callable[[], Any]


class Missing(Exception):
    """The workload needs something that this Python lacks."""


def torch_steps(workload: str) -> tuple[Step, Step]:
    """Return a function that does one unit of work, and one that waits for the device."""
    import torch

    if not torch.cuda.is_available():
        raise Missing("PyTorch finds no GPU (it may be built without CUDA)")
    x = torch.randn(4096, 1024, device="cuda")

    def matmul() -> Step:
        layers = [torch.nn.Linear(1024, 1024) for _ in range(8)]
        model = torch.nn.Sequential(*layers).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def train() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return train

    def small() -> Step:
        y = torch.zeros(1 << 14, device="cuda")
        return lambda: y.add_(1)

    def graphs() -> Step:
        one, graph = small(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(50):
                one()
        return graph.replay

    def triton() -> Step:
        if importlib.util.find_spec("triton") is None:
            raise Missing("no Triton")
        return torch.compile(lambda: torch.relu(x * 2 + 1).sum(1))

    steps = {"matmul training": matmul, "small kernels": small, "CUDA graphs": graphs, "Triton": triton}
    return steps[workload](), torch.cuda.synchronize


def cupy_steps(workload: str) -> tuple[Step, Step]:
    import cupy

    wait = cupy.cuda.Device().synchronize
    if workload == "matmul training":
        a = cupy.ones((4096, 4096), dtype=cupy.float32)
        return (lambda: a @ a), wait
    if workload == "small kernels":
        y = cupy.zeros(1 << 14, dtype=cupy.float32)
        return (lambda: cupy.add(y, 1, out=y)), wait
    raise Missing(f"CuPy does no {workload}")


def driver_steps(workload: str) -> tuple[Step, Step]:
    spinner = Spinner()
    if workload == "small kernels":
        return spinner.kernel("k_20us"), spinner.wait
    if workload == "CUDA graphs":
        return spinner.graph(), spinner.wait
    raise Missing(f"the driver alone does no {workload}")


def steps_of(workload: str) -> tuple[Step, Step, str]:
    """Return the functions of a workload, and the name of the framework that runs it."""
    why = []
    for name, make in (("torch", torch_steps), ("cupy", cupy_steps), ("", driver_steps)):
        if name and importlib.util.find_spec(name) is None:
            why.append(f"no {name} in {sys.executable}")
            continue
        try:
            return *make(workload), name or "the driver"
        except Missing as error:
            why.append(str(error))
    raise Missing("; ".join(why))


def gate() -> None:
    spinner, launched = Spinner(), 0
    launch = spinner.kernel("k_250us")

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


def depth() -> int:
    """Return how many launches the driver accepts before one has to wait; the maximum tried if none waits."""
    spinner = Spinner()
    launch, slow, count = spinner.kernel("k_250us"), 0, 0
    launch()
    spinner.wait()
    while count < MOST_LAUNCHES and slow < 2:  # a single slow launch may have waited for the CPU
        begun = time.perf_counter()
        launch()
        slow = slow + 1 if time.perf_counter() - begun > SLOW_S else 0
        count += 1
    return count - slow


def main() -> None:
    workload, seconds = sys.argv[1], float(sys.argv[2])
    if workload == "gate":
        gate()
        return
    if workload == "hold":
        Spinner().hold(int(seconds * 2**30))
        print("ready", flush=True)
        sys.stdin.readline()
        print("{}")
        return
    if workload == "depth":
        print(json.dumps({"depth": depth()}))
        return
    step, wait, by = steps_of(workload)
    for _ in range(100):
        step()
    wait()
    begun = time.perf_counter()
    for _ in range(200):
        step()
    latency_us = (time.perf_counter() - begun) / 200 * 1e6
    wait()
    print("ready", flush=True)
    sys.stdin.readline()
    units, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for _ in range(20):
            step()
        units += 20
        if units % 200 == 0:
            wait()
    wait()
    took = time.perf_counter() - begun
    print(json.dumps({"rate": units / took, "latency_us": latency_us, "by": by}))


if __name__ == "__main__":
    try:
        main()
    except Missing as error:
        sys.exit(str(error))
    except Exception as error:  # frameworks raise anything; report it in one line
        sys.exit(f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}")
