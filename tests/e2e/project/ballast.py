"""A small job with a large last checkpoint: saves little at first, much at a notice, and yields. Resumed, it says what it has."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

ckpt, control = Path(os.environ["MESH_CKPT_DIR"]), Path(os.environ["MESH_CTL_DIR"])
leaving = []
signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))


def save(step, data):
    (ckpt / f".{step}").write_bytes(data)
    (control / "progress.tmp").write_text(json.dumps({"step": step}))
    (control / "progress.tmp").rename(control / "progress.json")
    (ckpt / f".{step}").rename(ckpt / f"step-{step:06d}")
    print(f"saved {hashlib.sha256(data).hexdigest()}", flush=True)


if os.environ.get("MESH_RESUME"):
    print(f"back {hashlib.sha256(Path(os.environ['MESH_RESUME']).read_bytes()).hexdigest()}", flush=True)
    sys.exit(0)
save(1, os.urandom(100_000))
while not leaving:
    time.sleep(0.05)
save(2, os.urandom(int(sys.argv[1])))
sys.exit(85)
