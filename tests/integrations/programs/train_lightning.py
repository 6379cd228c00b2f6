"""A tiny network on synthetic data with the real Lightning. Its last line is a hash of the final weights.

It has all that a resumed run could get wrong: dropout, batch normalization, shuffling, a schedule by step and one that follows
a metric, gradient accumulation, an uneven last batch, and if asked, early stopping.
"""

import argparse
import hashlib
import os
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"  # a fixed order of additions, so a reproducible result

import mishaps
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mesh.sdk.integrations.lightning import ResumableLoader, Yield, resume_from


class Mishaps(Callback):
    def __init__(self, options):
        self.options = options

    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step == self.options.notice_at:
            mishaps.notice()
        time.sleep(0 if os.environ.get("MESH_RESUME") else self.options.pace)


class FilesThatEndEarly(TorchCheckpointIO):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        if checkpoint["global_step"] == self.step:
            os.truncate(path, path.stat().st_size // 2)
            mishaps.kill()


class Network(LightningModule):
    def __init__(self, follows_metric):
        super().__init__()
        self.follows_metric = follows_metric
        self.register_buffer(
            "validations", torch.zeros(())
        )  # part of the hash, so a lost or repeated validation changes it
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.validations += 1

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedules = [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97), "interval": "step"}]
        if self.follows_metric:
            # No loss improves by this threshold, so the schedule lowers the rate at the end of each epoch.
            following = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.8, patience=0, threshold=0.9)
            schedules.append({"scheduler": following, "monitor": "loss", "interval": "epoch"})
        return [optimizer], schedules


def examples(count, seed):
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 8, generator=draw)
    return TensorDataset(values, (values.sum(1) > 0).long())


def train(arguments):
    """Return the hash of the final weights and the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pace", type=float, default=0.0, help="seconds more for each batch of a fresh start")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--validate-every", type=int, help="batches; else an epoch")
    parser.add_argument("--no-validation", action="store_true")
    parser.add_argument("--patience", type=int, help="stop early after so many epochs that were no better")
    parser.add_argument("--stays", action="store_true", help="return from fit() at a notice")
    parser.add_argument("--notice-at", type=int)
    parser.add_argument("--die-in-save", type=int)
    parser.add_argument("--die-in-publish", type=int)
    options = parser.parse_args(arguments)
    if options.die_in_publish:
        mishaps.kill_when_published(options.die_in_publish)
    seed_everything(7, verbose=False)
    torch.use_deterministic_algorithms(True)
    network = Network(follows_metric=not options.no_validation)
    stopping = [EarlyStopping("loss", patience=options.patience)] if options.patience is not None else []
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=options.epochs,
        max_steps=options.max_steps,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=options.validate_every,
        limit_val_batches=0 if options.no_validation else 1.0,
        callbacks=[*stopping, Mishaps(options), Yield(every_n_steps=options.every, exits=not options.stays)],
        plugins=[FilesThatEndEarly(options.die_in_save)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    resumed = resume_from()
    print(f"resuming from {resumed}", flush=True)
    loader = ResumableLoader(examples(62, 1), options.batch, shuffle=True, num_workers=options.workers)
    trainer.fit(network, loader, DataLoader(examples(60, 2), 30), ckpt_path=resumed)
    weights = b"".join(value.numpy().tobytes() for value in network.state_dict().values())
    return hashlib.sha256(weights).hexdigest(), trainer.global_step


if __name__ == "__main__":
    digest, step = train(sys.argv[1:])
    print(f"ended at step {step}")
    print(f"digest {digest}")
