"""Promises to owners: how fast guests are off the network, and whether the owner's traffic is undisturbed by checkpoints.

Needs root, namespaces, tc, clang, and a Docker engine (its own, and the one of DOCKER_HOST). A row without one gives the reason.
`--rows NAME ...` runs some rows of ROWS, and keeps other rows of an earlier run of the same tree. `--trials N` takes each
measure N times, to check that everything runs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench import edge, foreign, seize, start  # noqa: E402
from tests.bench.harness import BUILD, commit, write  # noqa: E402

Row = dict[str, Any]
ROWS: dict[str, Callable[[int | None], Sequence[Row]]] = {
    "cut": edge.cut,
    "background": edge.background,
    "start": start.start,
    "reclaim": seize.seize,
    "escapes": seize.escapes,
    "presence": foreign.foreign,
}


def kept(names: Sequence[str]) -> list[Row]:
    """Return the rows of an earlier run of this very tree that are not run now."""
    path = BUILD / "provider.json"
    if not path.exists():
        return []
    report = json.loads(path.read_text())
    return [row for row in report["rows"] if row.get("row") not in names] if report["commit"] == commit() else []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--trials", type=int, help="of each measure, instead of as many as its figure is made of")
    arguments = parser.parse_args()
    chosen = arguments.rows
    rows = kept(chosen)
    for name in chosen:
        begun = time.monotonic()
        rows += [{**row, "row": name} for row in ROWS[name](arguments.trials)]
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    write("provider", rows)


if __name__ == "__main__":
    main()
