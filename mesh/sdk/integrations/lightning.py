"""Lightning as a job: it saves now and then, saves and goes at a notice, and goes on elsewhere as if nothing had happened.

    trainer = Trainer(..., callbacks=[..., Yield()])
    trainer.fit(model, ResumableLoader(dataset, shuffle=True, ...), ckpt_path=resume_from())

Lightning keeps neither the state of the random generators nor the place in an epoch's data: `Yield` adds the one to the
checkpoint and `ResumableLoader` the other. Checkpoints appear in MESH_CKPT_DIR by rename (`--ckpt-mode rename`). Needs this file
and `mesh/job.py`, nothing else of the mesh; without a mesh nothing is saved.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from mesh import job

PROGRESS_S = 1.0  # least time between two progress files (own choice)
FILE = "lightning.ckpt"


class Yield(Callback):
    """Saves every `every_n_steps` optimizer steps and when the mesh says so, and at a notice, and then leaves.

    Where no mesh says when, it saves every `every_s` seconds.

    Leaving is exit 85 out of `fit()`, so that what a program does after it is done only with a fully trained model. With
    `exits=False` it sets `trainer.should_stop` instead. The newest `keep` checkpoints stay in MESH_CKPT_DIR.

    It saves within an epoch, after an optimizer step that no validation follows, or at the epoch's end if there is no such step,
    and when training is over. Callbacks listed after this one, and `LightningModule.on_train_batch_end`, run after the save of
    their step: list it last.
    """

    def __init__(
        self, *, every_n_steps: int | None = None, every_s: float | None = 600.0, keep: int = 2, exits: bool = True
    ) -> None:
        self.every_n_steps = every_n_steps
        self.every_s = every_s
        self.keep = keep
        self.exits = exits
        self._random: dict[str, Any] | None = None  # of the checkpoint, until training starts
        self._leaving = self._ended = False
        self._epoch_settled = True  # whether this epoch has had a point to save at
        self._saved_step = 0
        self._told_s = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"random": _random_state(), "ended": self._ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._random, self._ended = state_dict["random"], state_dict["ended"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """RuntimeError with several processes."""
        if self._random is not None:
            _set_random_state(self._random)
            self._random = None
        self._leaving = False
        if "MESH_CKPT_DIR" not in os.environ:
            return
        if trainer.world_size > 1:
            raise RuntimeError("mesh: several processes would not agree on the step to leave at; use one")
        trainer.should_stop |= self._ended  # Lightning does not restore an early stop
        self._saved_step = trainer.global_step
        self._tell(trainer)
        _heed_notices_instead_of_sigterm()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() - self._told_s >= PROGRESS_S:
            self._tell(trainer)
        if _is_settled(trainer, batch_idx):
            self._epoch_settled = True
            if self._due(trainer):
                self._save(trainer)
                self._leave(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_settled = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Else Lightning leaves out the step of a scheduler that follows a metric at the end of a resumed epoch.
        trainer.fit_loop._restarting = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Schedulers and callbacks that follow metrics move only after this: the last resort.
        if not self._epoch_settled and self._due(trainer):
            self._save(trainer)
            self._leave(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ended = not self._leaving
        if self._ended and trainer.global_step > self._saved_step:
            self._save(trainer)  # run again, it ends at once

    def _due(self, trainer: Trainer) -> bool:
        steps = trainer.global_step - self._saved_step
        return steps > 0 and (
            job.should_yield()
            or (self.every_n_steps is not None and steps >= self.every_n_steps)
            or job.should_checkpoint(self.every_s)
        )

    def _save(self, trainer: Trainer) -> None:
        if "MESH_CKPT_DIR" not in os.environ:
            return
        self._tell(trainer)
        job.Checkpoint(keep=self.keep).save(trainer.global_step, lambda path: trainer.save_checkpoint(path / FILE))
        self._saved_step = trainer.global_step

    def _leave(self, trainer: Trainer) -> None:
        if job.should_yield():
            if self.exits:
                raise SystemExit(job.EXIT_SAVED)
            self._leaving = trainer.should_stop = True

    def _tell(self, trainer: Trainer) -> None:
        self._told_s = time.monotonic()
        total = trainer.estimated_stepping_batches
        job.progress(trainer.global_step, int(total) if total < float("inf") else 0)


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that, resumed in the middle of an epoch, gives the very batches that were left, in their order.

    It draws the epoch's order anew and passes over what was taken, so a resumption loads that once more. TypeError for an
    IterableDataset, whose place cannot be told; ValueError for persistent workers, whose random states no checkpoint has.
    """

    def __init__(self, dataset: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(dataset, IterableDataset):
            raise TypeError("a resumable loader needs a dataset with a length and an index")
        super().__init__(dataset, *arguments, **options)
        if self.persistent_workers:
            raise ValueError("a resumable loader starts its workers anew each epoch: leave out persistent_workers")
        self._drawn_from: dict[str, Any] | None = None  # the random state before this epoch's order was drawn
        self._taken = self._to_skip = 0

    def state_dict(self) -> dict[str, Any]:
        return {"drawn_from": self._drawn_from, "taken": self._taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._drawn_from = state_dict["drawn_from"]
        self._to_skip = state_dict["taken"]

    def __iter__(self) -> Iterator[Any]:
        # As a generator it draws nothing before the first batch, when a resumed run has its random state back.
        now = _random_state()
        self._taken, self._to_skip = self._to_skip, 0
        if self._taken and self._drawn_from is not None:
            _set_random_state(self._drawn_from)
        else:
            self._drawn_from = now
        batches = super().__iter__()
        for _ in range(self._taken):
            next(batches)
        if self._taken:
            _set_random_state(now)
        for batch in batches:
            self._taken += 1
            yield batch


def resume_from() -> str | None:
    """Return the value of `ckpt_path`: the newest checkpoint at MESH_RESUME, or None for a fresh start.

    MESH_RESUME may name one checkpoint or, if the job was submitted without `--ckpt-mode rename`, the directory of them.
    """
    named = job.resume_path()
    if named is None:
        return None
    newest = max(named.glob(f"step-*/{FILE}"), default=named / FILE)
    return str(newest) if newest.exists() else None


def _is_settled(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether a checkpoint made now is complete: not with pending gradients or a pending validation."""
    if trainer.is_last_batch or (batch_idx + 1) % trainer.accumulate_grad_batches:
        return False
    if not trainer.enable_validation or not isinstance(trainer.val_check_batch, int):
        return True
    counted = trainer.fit_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
    return (counted + 1) % trainer.val_check_batch != 0


def _heed_notices_instead_of_sigterm() -> None:
    """Replace Lightning's SIGTERM handler, which would end without a save."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    def terminated(number: int, frame: FrameType | None) -> None:
        if not job.should_yield() and callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, terminated)  # Lightning puts back what was there before it when training ends


def _random_state() -> dict[str, Any]:
    """Return the states of all random generators, in types that `torch.load(weights_only=True)` reads."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
