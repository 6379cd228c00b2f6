"""A tiny BERT on synthetic data with the real Trainer. Its last line is a hash of the final weights.

It has all that a resumed run could get wrong: dropout, shuffling, a schedule, gradient accumulation, an uneven last batch, and
if asked, evaluation that picks the best model.
"""

import argparse
import hashlib
import os
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"  # a fixed order of additions, so a reproducible result

import mishaps
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import ExportableState

from mesh.sdk.integrations.hf import Yield, resume_from


class Mishaps(TrainerCallback, ExportableState):
    def __init__(self, options):
        self.options = options
        self.step = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.step = state.global_step
        if self.step == self.options.notice_at:
            mishaps.notice()
        time.sleep(0 if os.environ.get("MESH_RESUME") else self.options.pace)

    def state(self):
        """Return the state; called within a save, after the weights and before the position are written."""
        if self.step and self.step == self.options.die_in_save:
            mishaps.kill()
        return {"args": {"options": None}, "attributes": {}}


def examples(count, seed):
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 50, (count, 8), generator=draw)
    return [{"input_ids": row, "labels": row[0] % 2} for row in words]


def train(arguments):
    """Return the hash of the final weights and the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pace", type=float, default=0.0, help="seconds more for each step of a fresh start")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--save", default="steps", choices=["steps", "epoch"])
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--best", action="store_true", help="end with the best model, not the last")
    parser.add_argument("--stays", action="store_true", help="return from train() at a notice")
    parser.add_argument("--notice-at", type=int)
    parser.add_argument("--die-in-save", type=int)
    parser.add_argument("--die-in-publish", type=int)
    options = parser.parse_args(arguments)
    if options.die_in_publish:
        mishaps.kill_when_published(options.die_in_publish)
    set_seed(7)
    torch.use_deterministic_algorithms(True)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="out",
            num_train_epochs=options.epochs,
            max_steps=options.max_steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            lr_scheduler_type="linear" if options.max_steps < 0 else "constant",
            save_strategy=options.save,
            save_steps=options.every,
            eval_strategy=options.save if options.best else "no",
            eval_steps=options.every,
            save_total_limit=2,
            load_best_model_at_end=options.best,
            greater_is_better=True,  # of losses: the best is early, long before the end of a resumed run
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=examples(62, 1),
        eval_dataset=examples(60, 2),
        callbacks=[Mishaps(options), Yield(exits=not options.stays)],
    )
    resumed = resume_from()
    print(f"resuming from {resumed}", flush=True)
    trainer.train(resume_from_checkpoint=resumed)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest(), trainer.state.global_step


if __name__ == "__main__":
    digest, step = train(sys.argv[1:])
    print(f"ended at step {step}")
    print(f"digest {digest}")
