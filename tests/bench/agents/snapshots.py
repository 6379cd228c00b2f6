"""A GPT's training on the CPU that saves now and then, with one method after another. Runs in a Python that has torch.

    python snapshots.py DIRECTORY ROUNDS

Prints a line of JSON: for each method the seconds of each round (a block of steps with one save, waited for at its end), and
the seconds for which several calls stalled the training.
"""

import json
import math
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[3]))

from mesh import job
from tests.bench.checkpoints import BATCH, CONTEXT, Gpt, text

WIDTH, BLOCKS = 384, 4  # 161 MB with AdamW's state
THREADS = 2
STALLS = 8  # of each method
BLOCK_S = 3.0  # several times the duration of a write
FIRST = 2  # the step that is saved; early, so that the write ends well before the block

Begin = Callable[
    [], Callable[[], object]
]  # a save up to the point where training may continue; the returned function waits for the rest


class Training:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model, self.data, self.choose = Gpt(WIDTH, BLOCKS), text(), torch.Generator().manual_seed(7)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)

    def step(self) -> None:
        starts = torch.randint(len(self.data) - CONTEXT - 1, (BATCH,), generator=self.choose)
        rows = torch.stack([self.data[start : start + CONTEXT + 1] for start in starts])
        loss = functional.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def steps(self, count: int, begin: Begin | None) -> float:
        """Return the seconds of this many steps, with a save near the start."""
        begun, finish = time.perf_counter(), None
        for number in range(count):
            self.step()
            if number == FIRST and begin is not None:
                finish = begin()
        if finish is not None:
            finish()
        return time.perf_counter() - begun


def ways(training: Training, place: Path) -> dict[str, Begin]:
    theirs = place / "theirs"
    checkpoint, stager = job.Checkpoint(place / "ours"), DefaultStager(StagingOptions(*[False] * 4))
    number = iter(range(999))

    def ours() -> Callable[[], object]:
        assert checkpoint.snapshot(next(number), training.state())
        return checkpoint.finish

    def peer(stager: DefaultStager | None) -> Callable[[], object]:
        step = next(number)
        done = dcp.async_save(training.state(), checkpoint_id=theirs / f"{step:08d}", async_stager=stager, no_dist=True)
        done.add_done_callback(
            lambda _: [shutil.rmtree(old) for old in sorted(theirs.iterdir())[:-2]]
        )  # as mesh.job does
        return done.result

    def waiting() -> Callable[[], object]:
        checkpoint.save(next(number), lambda path: torch.save(training.state(), path / "state.pt"))
        return lambda: None

    return {
        "ours": ours,
        "async_save with a persistent stager": lambda: peer(stager),
        "async_save": lambda: peer(None),
        "torch.save": waiting,
    }


def main() -> None:
    place, rounds = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(THREADS)
    training = Training()
    found = ways(training, place)
    for begin in found.values():  # the first save of each method touches its memory
        training.steps(FIRST + 1, begin)
    count = math.ceil(BLOCK_S / min(training.steps(1, None) for _ in range(20)))
    subjects = {"nothing": None, **{name: found[name] for name in ("ours", "async_save with a persistent stager")}}
    totals, stalls = defaultdict(list), defaultdict(list)
    for turn in range(rounds):
        for name in list(subjects)[:: 1 if turn % 2 == 0 else -1]:
            totals[name].append(training.steps(count, subjects[name]))
            print(f"{name}: {totals[name][-1]:.2f} s for {count} steps", file=sys.stderr, flush=True)
    for _ in range(STALLS):
        for name, begin in found.items():
            training.step()
            begun = time.perf_counter()
            finish = begin()
            stalls[name].append(time.perf_counter() - begun)
            finish()
    size = (max((place / "ours").iterdir()) / "state.pt").stat().st_size
    print(json.dumps({"bytes": size, "steps": count, "totals": totals, "stalls": stalls}))


if __name__ == "__main__":
    main()
