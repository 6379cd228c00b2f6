"""Work for a real GPU, by PyTorch or else CuPy, in whatever Python has one: the process that `guard_gpu.py` measures.

gpu.py WORKLOAD SECONDS   warms up, says "ready", waits for a line, works for so long, and tells what it did as JSON
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from typing import Any

Step = Callable[[], Any]


class Missing(Exception):
    """What this Python lacks for the workload."""


def torch_steps(workload: str) -> tuple[Step, Step]:
    """One unit of the work, and a wait for the device."""
    import torch

    if not torch.cuda.is_available():
        raise Missing("PyTorch finds no GPU")
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


def steps_of(workload: str) -> tuple[Step, Step]:
    for name, make in (("torch", torch_steps), ("cupy", cupy_steps)):
        if importlib.util.find_spec(name) is not None:
            return make(workload)
    raise Missing("neither PyTorch nor CuPy is installed")


def hold(gigabytes: float) -> Any:
    """Memory that stays."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        return torch.ones(int(gigabytes * 2**30), dtype=torch.uint8, device="cuda")
    import cupy

    return cupy.ones(int(gigabytes * 2**30), dtype=cupy.uint8)


def depth(step: Step, wait: Step) -> int:
    """How many launches the driver takes before one has to wait for room."""
    count, longest = 0, 0.0
    wait()
    while count < 20_000 and longest < 0.002:
        begun = time.perf_counter()
        step()
        longest = time.perf_counter() - begun
        count += 1
    return count


def main() -> None:
    workload, seconds = sys.argv[1], float(sys.argv[2])
    if workload == "hold":
        kept = hold(seconds)
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps({"bytes": kept.nbytes}))
        return
    step, wait = steps_of(workload)
    for _ in range(100):
        step()
    wait()
    begun = time.perf_counter()
    for _ in range(200):
        step()
    latency_us = (time.perf_counter() - begun) / 200 * 1e6
    deep = depth(step, wait)
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
    print(json.dumps({"rate": units / took, "latency_us": latency_us, "depth": deep}))


if __name__ == "__main__":
    try:
        main()
    except Missing as error:
        sys.exit(str(error))
