"""The guard's code under sanitizers with many threads, and under the static analyzer."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cuda_guard import page
from cuda_guard.build import COMPILE, CUDA, HOST, NATIVE, NVML, find_compiler
from tests.cuda_guard.guests import CONTEXT, MIB, Bench

pytestmark = pytest.mark.cc

STRESS = Path(__file__).parent / "stress.c"
QUIET = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
SANITIZERS = {
    "address,undefined": ["-fno-sanitize-recover=all"],
    "thread": ["-Wno-error=tsan"],  # a fence between processes, not between threads
}


def compiled(directory: Path, sanitizer: str) -> Path:
    program = directory / "stress"
    sources = [str(NATIVE / name) for name in CUDA.sources]
    options = [*COMPILE, *SANITIZERS[sanitizer], f"-fsanitize={sanitizer}", f"-I{NATIVE}"]
    command = [*find_compiler(), *options, str(STRESS), *sources, "-ldl", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr:
        pytest.skip(f"the compiler has no sanitizer for {sanitizer}")
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sixty_four_threads_use_everything_at_once(
    make_bench: Callable[..., Bench], tmp_path: Path, sanitizer: str
) -> None:
    """Meanwhile the owner changes share and quota and closes the gate.

    At the end nothing is held or in flight, and each launch is counted.
    """
    program = compiled(tmp_path, sanitizer)
    machine = make_bench()
    job = machine.job(memory=CONTEXT + 512 * MIB, share=90, host_memory=8 * MIB)
    env = {**os.environ, **machine.environment(job), **QUIET}
    words = [program, "64", "12"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        done = threading.Event()

        def meddle() -> None:
            for share in (90, 60, 90, 80) * 1000:
                if done.wait(0.02):
                    return
                job.set_share(0, share, share)
                job.set_memory(0, CONTEXT + (512 if share == 90 else 384) * MIB)
                job.set_gate(closed=True)
                time.sleep(0.002)
                job.set_gate(closed=False)

        owner = threading.Thread(target=meddle)
        owner.start()
        assert process.stdout and process.stdin and process.stderr
        told = process.stdout.readline()
        done.set()
        owner.join()
        used, pinned = job.pages.memory_used(0), job.pages.memory_used(page.HOST)
        under_way = [slot.under_way[0] for slot in job.pages.job.table]
        process.stdin.close()
        assert process.wait(30) == 0 and told, process.stderr.read()[-5000:]
    assert 0.98 * int(told) <= job.usage()[0].launches <= int(told), (
        "a thread that closes another thread's batch may miss its last launch"
    )
    assert set(under_way) == {0} and 0 < job.pages.job.uses[page.HOST].peak <= 8 * MIB // page.UNIT
    assert pinned == 0
    pooled = used - CONTEXT
    assert 0 <= pooled <= 512 * MIB, "only memory kept by pools may be left"


def is_gcc() -> bool:
    if shutil.which("gcc") is None:
        return False
    return "Free Software" in subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=False).stdout


LISTS = {"meter.c"}  # gcc 12 loses track of marks that are linked into a lane, and calls them leaks


@pytest.mark.long
@pytest.mark.skipif(not is_gcc(), reason="only gcc has -fanalyzer")
def test_static_analyzer_finds_nothing() -> None:
    every = sorted({name for recipe in (CUDA, NVML, HOST) for name in recipe.sources if name.endswith(".c")})
    for name in every:
        leaks = ["-Wno-analyzer-malloc-leak"] if name in LISTS else []
        command = ["gcc", *COMPILE, "-fanalyzer", *leaks, "-c", str(NATIVE / name), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-5000:]
