"""A small job that keeps the contract: counts, checkpoints by rename every few steps, saves and yields at a notice.

Its last line is a hash over every step, so that a step that was lost or done twice shows. With a file named by UNTIL it ends
once that is there, however far it is, and says before its last line how far that was.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS, EVERY, PACE_S = int(sys.argv[1]), 10, float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
UNTIL = os.environ.get("UNTIL")
ckpt, control, out = (os.environ.get(f"MESH_{name}_DIR") for name in ("CKPT", "CTL", "OUT"))
leaving = []
signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))


def save(step, digest):
    path = Path(ckpt) / f"step-{step:06d}"
    if path.exists():
        return
    temporary = Path(ckpt) / f".{path.name}"
    temporary.write_text(json.dumps({"step": step, "digest": digest}))
    temporary.rename(path)
    for old in sorted(Path(ckpt).glob("step-*"))[:-2]:
        old.unlink()


def tell(step):
    temporary = Path(control) / "progress.tmp"
    temporary.write_text(json.dumps({"step": step, "of": STEPS}))
    temporary.rename(Path(control) / "progress.json")
    if os.environ.get("TRACE"):  # a benchmark wants to know who did which step when
        with Path(os.environ["TRACE"]).open("a") as file:
            file.write(f"{time.time()} {os.environ['MESH_NODE']} {os.environ['MESH_ATTEMPT']} {step}\n")


step, digest = 0, ""
if os.environ.get("MESH_RESUME"):
    state = json.loads(Path(os.environ["MESH_RESUME"]).read_text())
    step, digest = state["step"], state["digest"]
print(f"attempt {os.environ['MESH_ATTEMPT']} on {os.environ['MESH_NODE']} from step {step}", flush=True)
while step < STEPS and not (UNTIL and Path(UNTIL).exists()):
    step += 1
    digest = hashlib.sha256(f"{digest}{step}".encode()).hexdigest()
    tell(step)
    if step % EVERY == 0 or leaving:
        save(step, digest)
    if leaving:
        print(f"saved at step {step}", flush=True)
        sys.exit(85)
    time.sleep(PACE_S)
Path(out, "digest.txt").write_text(digest)
if UNTIL:
    print(f"counted {step}")
print(f"digest {digest}", flush=True)
