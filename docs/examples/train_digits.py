"""Train a small neural network on real handwritten digits, with checkpoints that survive any interruption.

The data are scikit-learn's 1,797 images. The model is two layers of plain numpy with a fixed seed, so an undisturbed run and one
that moved between machines end with the same weights, bit for bit. It runs alone:

    python train_digits.py --ckpt ckpts --out results

and under a mesh (`mesh run --ckpt ckpts -- python train_digits.py`), where it reads the MESH_* variables. It saves after each
epoch. On SIGTERM it saves after the present batch and exits with 85 ("saved, run me again").
"""

import argparse
import gzip
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import sys
from pathlib import Path

for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[threads] = "1"  # a fixed order of additions gives a fixed result
if "avx" in Path("/proc/cpuinfo").read_text():
    # The same kernel on all machines since 2011. "Haswell" ends with a segmentation fault in NumPy 2.5.5 on AVX-512 processors.
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"

import numpy as np  # noqa: E402

SEED = 7
HIDDEN, BATCH, RATE, MOMENTUM = 2048, 32, 0.02, 0.9
TRAIN_IMAGES = 1437  # the first 80 %; the rest is the test set
SHIFTS = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]  # each image in nine places
EXIT_SAVED = 85


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images (1797, 8, 8) in 0..1 and their labels, from scikit-learn's file; importing scikit-learn takes a second."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        sys.exit("train_digits: the digits come with scikit-learn: pip install scikit-learn")
    with gzip.open(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8) / 16.0, table[:, -1].astype(np.int64)


def shifted(images: np.ndarray) -> np.ndarray:
    """Return each image moved by up to one pixel in every direction: (9 n, 64)."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    moved = [padded[:, 1 + dy : 9 + dy, 1 + dx : 9 + dx] for dy, dx in SHIFTS]
    return np.concatenate(moved).reshape(-1, 64)


class Training:
    """Weights, momentum and the position in the run: everything that a checkpoint holds."""

    def __init__(self) -> None:
        draw = np.random.default_rng(SEED)
        shapes = {"w1": (64, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 10), "b2": (10,)}
        self.weights = {
            name: draw.standard_normal(shape) * (np.sqrt(2 / shape[0]) if len(shape) == 2 else 0)
            for name, shape in shapes.items()
        }
        self.momentum = {name: np.zeros(shape) for name, shape in shapes.items()}
        self.epoch = self.batch = 0

    def order(self, count: int) -> np.ndarray:
        """Return the order of images in the present epoch, equal on every machine."""
        return np.random.default_rng([SEED, self.epoch]).permutation(count)

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Train on one batch and return its mean loss."""
        w = self.weights
        hidden = np.maximum(images @ w["w1"] + w["b1"], 0)
        scores = hidden @ w["w2"] + w["b2"]
        scores -= scores.max(axis=1, keepdims=True)
        odds = np.exp(scores)
        odds /= odds.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -np.log(odds[rows, labels]).mean()
        odds[rows, labels] -= 1
        odds /= len(labels)
        back = (odds @ w["w2"].T) * (hidden > 0)
        gradients = {"w1": images.T @ back, "b1": back.sum(0), "w2": hidden.T @ odds, "b2": odds.sum(0)}
        for name, gradient in gradients.items():
            self.momentum[name] = MOMENTUM * self.momentum[name] - RATE * gradient
            w[name] += self.momentum[name]
        return float(loss)

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        w = self.weights
        scores = np.maximum(images @ w["w1"] + w["b1"], 0) @ w["w2"] + w["b2"]
        return float((scores.argmax(axis=1) == labels).mean())

    def save(self, directory: Path, step: int) -> None:
        """Save to a new directory that appears by rename, and keep the newest two."""
        final = directory / f"step-{step:08d}"
        if final.exists():
            return
        temporary = directory / f".{final.name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        arrays = {f"w_{k}": v for k, v in self.weights.items()} | {f"m_{k}": v for k, v in self.momentum.items()}
        with (temporary / "state.npz").open("wb") as file:
            np.savez(file, place=np.array([self.epoch, self.batch]), **arrays)
            file.flush()
            os.fsync(file.fileno())
        digest = hashlib.sha256((temporary / "state.npz").read_bytes()).hexdigest()
        (temporary / "sha256").write_text(digest)
        temporary.rename(final)
        for old in sorted(directory.glob("step-*"))[:-2]:
            shutil.rmtree(
                old.rename(directory / f".{old.name}.old"), ignore_errors=True
            )  # never half-deleted under its final name

    def load(self, directory: Path) -> bool:
        """Load the newest complete checkpoint, skip damaged ones with a message, and return whether one was loaded."""
        for path in sorted(directory.glob("step-*"), reverse=True):
            try:
                data = (path / "state.npz").read_bytes()
                if hashlib.sha256(data).hexdigest() != (path / "sha256").read_text():
                    raise ValueError("the file differs from its checksum")
                with np.load(path / "state.npz") as state:
                    self.epoch, self.batch = (int(number) for number in state["place"])
                    for name in self.weights:
                        self.weights[name], self.momentum[name] = state[f"w_{name}"], state[f"m_{name}"]
            except (OSError, ValueError, KeyError) as error:
                print(f"skipping checkpoint {path.name}: {error}", flush=True)
                continue
            return True
        return False

    def digest(self) -> str:
        return hashlib.sha256(self.payload()).hexdigest()

    def payload(self) -> bytes:
        return b"".join(self.weights[name].tobytes() for name in sorted(self.weights))


def tell_progress(step: int, total: int) -> None:
    control = os.environ.get("MESH_CTL_DIR")
    if control:
        temporary = Path(control) / "progress.tmp"
        temporary.write_text(json.dumps({"step": step, "of": total}))
        temporary.rename(Path(control) / "progress.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=75)
    parser.add_argument("--ckpt", default=os.environ.get("MESH_CKPT_DIR"), help="where checkpoints go")
    parser.add_argument("--out", default=os.environ.get("MESH_OUT_DIR"), help="where weights.bin goes")
    options = parser.parse_args()
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))

    images, labels = load_digits()
    train, train_labels = shifted(images[:TRAIN_IMAGES]), np.tile(labels[:TRAIN_IMAGES], len(SHIFTS))
    test, test_labels = images[TRAIN_IMAGES:].reshape(-1, 64), labels[TRAIN_IMAGES:]
    batches = len(train) // BATCH
    total = options.epochs * batches
    training = Training()
    checkpoints = Path(options.ckpt) if options.ckpt else None
    if checkpoints is not None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        if training.load(checkpoints):
            print(f"resuming at epoch {training.epoch}, batch {training.batch}", flush=True)

    while training.epoch < options.epochs:
        order, losses = training.order(len(train)), []
        while training.batch < batches:
            chosen = order[training.batch * BATCH : (training.batch + 1) * BATCH]
            losses.append(training.step(train[chosen], train_labels[chosen]))
            training.batch += 1
            if training.batch % 50 == 0:
                tell_progress(training.epoch * batches + training.batch, total)
            if leaving:
                if checkpoints is not None:
                    training.save(checkpoints, training.epoch * batches + training.batch)
                    print(f"saved at epoch {training.epoch}, batch {training.batch}", flush=True)
                sys.exit(EXIT_SAVED if os.environ.get("MESH") else 143)
        training.epoch, training.batch = training.epoch + 1, 0
        accuracy = training.accuracy(test, test_labels)
        loss = f"{np.mean(losses):.4f}" if losses else "-"
        print(f"epoch {training.epoch}/{options.epochs} loss {loss} accuracy {accuracy:.4f}", flush=True)
        tell_progress(training.epoch * batches, total)
        if checkpoints is not None:
            training.save(checkpoints, training.epoch * batches)

    if options.out:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        (Path(options.out) / "weights.bin").write_bytes(training.payload())
    print(f"accuracy {training.accuracy(test, test_labels):.4f}", flush=True)
    print(f"sha256 {training.digest()}", flush=True)


if __name__ == "__main__":
    main()
