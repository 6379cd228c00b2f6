"""Cost of a save for a training: `mesh.job`'s background snapshots beside torch's async_save and a plain torch.save.

The same small GPT trains on the CPU in turns, block after block: without a save, and with one by each method. The extra time of
a block with a save is its cost: the stall, and the CPU time that the writer takes from the training. The overhead is that cost
divided by the interval between saves. Many short blocks are more precise than a few long ones under other load. Takes four
minutes and needs a Python with torch (`make frameworks`).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.harness import not_run, row, write  # noqa: E402

INTERVAL_S = 10.0  # between two saves; shorter than usual (own choice)
PAIRS = 4  # pairs of blocks in a round
OVERHEAD, PEER = "overhead of background snapshots", "async_save with a persistent stager"
STALL = "training stall for a snapshot"


def rows(python: str, place: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of the report; data goes to a temporary directory in `place`."""
    agent = Path(__file__).parent / "agents" / "snapshots.py"
    try:
        with TemporaryDirectory(prefix="bench-snapshot-", dir=place) as directory:
            arguments = [python, str(agent), directory, str(rounds * PAIRS)]
            done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return [
            not_run(OVERHEAD, "of the time", "<= 0.035", str(error)),
            not_run(STALL, "s", "<= 1.0 x async_save", str(error)),
        ]
    return report(json.loads(done.stdout.splitlines()[-1]))


def report(found: dict[str, Any]) -> list[dict[str, Any]]:
    totals, stalls = found["totals"], found["stalls"]
    overheads = {
        name: [(saved - plain) / INTERVAL_S for saved, plain in zip(values, totals["nothing"], strict=True)]
        for name, values in totals.items()
    }
    what = f": {found['bytes'] / 1e6:.0f} MB every {INTERVAL_S:g} s"
    made = row(
        OVERHEAD + what,
        overheads["ours"],
        "of the time",
        goal="<= 0.035",
        met=None,
        peer=PEER,
        peer_values=overheads[PEER],
    )
    lines = [{**made, "met": made["value"] <= 0.035}]
    for peer, times in (("async_save", 1.0), (PEER, 1.0), ("torch.save", 0.1)):
        made = row(
            STALL + what,
            stalls["ours"],
            "s",
            goal=f"<= {times} x {peer}",
            met=None,
            peer=peer,
            peer_values=stalls[peer],
        )
        lines.append({**made, "met": made["value"] <= times * made["peer_value"]})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--on", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--torch", default=str(ROOT / ".venv-frameworks" / "bin" / "python"))
    options = parser.parse_args()
    write("snapshot", rows(options.torch, options.on, options.rounds))


if __name__ == "__main__":
    main()
