"""The fake driver answers as a real one did: NVIDIA's on an H100, asked by `tests/bench/agents/facts.py`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake.world import World

pytestmark = pytest.mark.cc

ROOT = Path(__file__).parents[2]
OURS = {  # answers by the settings and traits of the double
    ("ended", "cuEventElapsedTime after their stream, us"),  # kernels take longer at times
    ("granularity", "a second context"),  # `context_bytes`
    ("identities", "cuMemAlloc at 3020 is the export"),  # the guard must find calls by other addresses too
}


def flat(answers: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return each answer by its fact and question."""
    return {
        (fact, *([question] if question else [])): answer
        for fact, found in answers.items()
        for question, answer in (found.items() if isinstance(found, dict) else [("", found)])
        if (fact, question) not in OURS
    }


def test_double_answers_as_a_real_driver(make_world: Callable[..., World]) -> None:
    real = json.loads((ROOT / "tests" / "fake" / "h100.json").read_text())
    about = [real.pop(name) for name in ("gpu", "driver", "cuda")]
    real["captures"] = {
        f"{way}, {call}": codes for way, calls in real["captures"].items() for call, codes in calls.items()
    }
    world = make_world(profile="harsh")
    env = {**os.environ, **world.environment(), "LD_LIBRARY_PATH": str(world.fakes.cuda.parent)}
    words = [sys.executable, str(ROOT / "tests" / "bench" / "agents" / "facts.py"), *real]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert flat(json.loads(done.stdout)) == flat(real), about
