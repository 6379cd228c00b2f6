"""Honest programs under the guard, on the fake driver with the profile `harsh`: none is paused, refused or changed."""

import os
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuda_guard.build import find_compiler
from tests.cuda_guard import zoo
from tests.cuda_guard.guests import Bench, Guest

pytestmark = pytest.mark.cc

PATIENCE_S = 10.0  # the programs need about a second
MEMORY = 4 << 30
WITHOUT_LAUNCHES = (zoo.expandable, zoo.refused_and_recovers)
SHARE = 60.0


@pytest.fixture
def machine(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench(devices=2, profile="harsh")


def result(guest: Guest) -> Any:
    """Return the guest's result; end it if it gives none."""
    if not select.select([guest._answer], [], [], PATIENCE_S)[0]:
        guest.kill(signal.SIGKILL)
        guest.wait()
        pytest.fail(f"the program hangs for {PATIENCE_S:g} s")
    return guest.result()


@pytest.mark.parametrize("program", zoo.PROGRAMS)
def test_program_computes_the_same(machine: Bench, program: zoo.Program) -> None:
    expected = result(machine.start(None, program))
    job = machine.job(memory=MEMORY, share=SHARE)
    assert result(machine.start(job, program)) == expected
    use = job.usage()[0]
    assert use.refused == (program is zoo.refused_and_recovers)
    assert use.launches > 0 or program in WITHOUT_LAUNCHES


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_c_program_computes_the_same(machine: Bench, tmp_path: Path, kind: str) -> None:
    program = zoo.compiled(tmp_path, kind, machine.world.fakes.cuda, find_compiler())
    job = machine.job(memory=MEMORY, share=SHARE)
    base = {**os.environ, **machine.environment(None), "LD_LIBRARY_PATH": str(machine.world.fakes.cuda.parent)}
    bare, guarded = (
        subprocess.run(
            [program], env={**base, **env}, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        ).stdout
        for env in ({}, job.process_env())
    )
    assert guarded == bare and job.usage()[0].launches == 300
