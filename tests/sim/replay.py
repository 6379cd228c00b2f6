"""Replay of one run in two processes with different hash seeds."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def digests(*arguments: str) -> set[str]:
    """Return the digests of `python -m sim` under two hash seeds; one if the run is deterministic."""
    found = set()
    for hash_seed in ("0", "4242"):
        done = subprocess.run(
            [sys.executable, "-m", "sim", *arguments],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith(f"SEED={arguments[arguments.index('--seed') + 1]}\n")
        found.add(done.stdout.split("digest ")[1])
    return found
