"""Hugging Face Trainer as a job: it saves and goes at a notice, and goes on elsewhere as if nothing had happened.

    trainer = Trainer(..., callbacks=[Yield()])
    trainer.train(resume_from_checkpoint=resume_from())

The Trainer writes `checkpoint-N` file by file in its `output_dir`, sometimes over one of the same name, and deletes old ones
there: nobody can tell from outside when such a folder is whole. So each is copied once it is, and the copy appears in
MESH_CKPT_DIR by rename (`--ckpt-mode rename`). Needs this file and `mesh/job.py`, nothing else of the mesh; without a mesh it
does nothing.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mesh import job

PROGRESS_S = 1.0  # least time between two progress files (own choice)
BEST = "best"  # directory of the best checkpoint inside another one
SENTINEL = "checkpoint-is-incomplete.txt"  # the Trainer's JIT checkpointing leaves it, and never looks for it


class Yield(TrainerCallback):
    """Publishes every checkpoint that the Trainer makes; at a notice has it save at the end of the step, and leaves.

    Leaving is exit 85 out of `train()`, once the Trainer has wound up: what a program does after it is done only with a fully
    trained model. With `exits=False`, `train()` returns instead. The newest `keep` checkpoints stay in MESH_CKPT_DIR. There is
    one when the mesh says so, and as often as the Trainer's `save_strategy` has it. An evaluation that is due at the step is done
    before its save.
    """

    def __init__(self, *, keep: int = 2, exits: bool = True) -> None:
        self.keep = keep
        self.exits = exits
        self._leaving = self._due = False
        self._told_s = self._stepped_s = 0.0
        self._final: dict[str, Any] | None = None  # the weights of a run that ended before it was resumed

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """ValueError if `output_dir` is in MESH_CKPT_DIR, where its folders would count; RuntimeError with several processes."""
        self._leaving = self._due = False
        directory = os.environ.get("MESH_CKPT_DIR")
        if directory is None:
            return
        if Path(args.output_dir).resolve().is_relative_to(Path(directory).resolve()):
            raise ValueError(f"mesh: output_dir {args.output_dir} must be outside of the checkpoint directory")
        if args.world_size > 1:
            raise RuntimeError("mesh: several processes would not agree on the step to leave at; use one")
        _bring_back_best(args, state)
        self._tell(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A run that max_steps ended within an epoch gets one step more from the Trainer when it is resumed: undone below.
        if state.global_step >= state.max_steps:
            self._final = {name: value.to("cpu", copy=True) for name, value in kwargs["model"].state_dict().items()}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._final is not None:
            kwargs["model"].load_state_dict(self._final)
            self._final = None
            state.global_step = state.max_steps
            control.should_save = control.should_evaluate = control.should_log = False
            return
        if time.monotonic() - self._told_s >= PROGRESS_S:
            self._tell(state)
        # What an epoch, or all of it, ends with comes right after its last step, and belongs into the checkpoint.
        self._stepped_s = time.monotonic()
        self._due |= job.should_checkpoint()
        if _ends_epoch(state) or state.global_step >= state.max_steps:
            return
        if job.should_yield():
            self._leaving = control.should_save = control.should_training_stop = True
        elif self._due:
            control.should_save = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stepped_s = time.monotonic()  # a save begins after the step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._leaving:  # in the middle of the epoch, which the Trainer takes for its end
            control.should_save = control.should_evaluate = control.should_log = False
        elif job.should_yield():
            self._leaving = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True
        elif self._due:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if "MESH_CKPT_DIR" not in os.environ:
            return
        saved, best = Path(args.output_dir) / f"checkpoint-{state.global_step}", state.best_model_checkpoint

        def copy(path: Path) -> None:
            shutil.copytree(saved, path, dirs_exist_ok=True)
            if args.load_best_model_at_end and best is not None and Path(best).name != saved.name:
                shutil.copytree(best, path / BEST)

        self._tell(state)
        self._due = False
        job.Checkpoint(keep=self.keep).save(state.global_step, copy)
        job.stalled(time.monotonic() - self._stepped_s)  # what the Trainer itself has written counts too

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tell(state)
        if self._leaving and self.exits:
            raise SystemExit(job.EXIT_SAVED)

    def _tell(self, state: TrainerState) -> None:
        self._told_s = time.monotonic()
        job.progress(state.global_step, state.max_steps)


def resume_from() -> str | None:
    """Return the value of `resume_from_checkpoint`: the newest whole checkpoint at MESH_RESUME, or None for a fresh start.

    MESH_RESUME may name one checkpoint or a directory of them. One that was left half-written, which the Trainer itself would
    resume from, is passed over for the one before it.
    """
    named = job.resume_path()
    if named is None:
        return None
    return next((str(path) for path in _candidates(named) if _is_whole(path)), None)


def _candidates(named: Path) -> Iterator[Path]:
    yield named
    for directory in (named, named.parent):
        numbered = [path for path in directory.glob("*-*") if re.fullmatch(r"(checkpoint|step)-\d+", path.name)]
        yield from sorted(numbered, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def _is_whole(path: Path) -> bool:
    try:
        json.loads((path / "trainer_state.json").read_text())  # written last by the Trainer
    except (OSError, ValueError):
        return False
    return not (path / SENTINEL).exists()


def _ends_epoch(state: TrainerState) -> bool:
    return state.epoch is not None and float(state.epoch).is_integer()


def _bring_back_best(args: TrainingArguments, state: TrainerState) -> None:
    """The best checkpoint so far was made on another machine: put its copy where the Trainer will look for it."""
    resumed = resume_from()
    if resumed is None or not args.load_best_model_at_end or not state.best_global_step:
        return
    copy = Path(resumed) if state.best_global_step == state.global_step else Path(resumed) / BEST
    if copy.is_dir():
        best = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
        shutil.copytree(copy, best, dirs_exist_ok=True, ignore=shutil.ignore_patterns(BEST))
        state.best_model_checkpoint = str(best)
