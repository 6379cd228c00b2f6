"""A small job with a fault of the kind that `mesh job rehearse` is to find: flawed.py FLAW STEPS PACE_S.

starts-over   does not look at MESH_RESUME
outside        writes its checkpoint beside the checkpoint directory
deaf          does not catch SIGTERM, reports no steps, and draws a number that no seed fixes
fails         cannot read its own checkpoint
forgets       does not save all of its state
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

flaw, steps, pace_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ckpt, control, out = (Path(os.environ[f"MESH_{name}_DIR"]) for name in ("CKPT", "CTL", "OUT"))
leaving = []
if flaw != "deaf":
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))


def write(path, value):
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value))
    temporary.rename(path)


step, total = 0, 0
resume = os.environ["MESH_RESUME"]
if resume and flaw != "starts-over":
    state = json.loads(Path(resume).read_text())
    step, total = state["step"], state["momentum" if flaw == "fails" else "total"]
    if flaw == "forgets":
        total = 0
while step < steps:
    step += 1
    total += step
    print(f"step {step} of {steps}", flush=True)
    if flaw != "deaf":
        write(control / "progress.json", {"step": step, "of": steps})
    if step % 10 == 0 or leaving:
        write(Path("model.json") if flaw == "outside" else ckpt / f"step-{step}", {"step": step, "total": total})
    if leaving:
        sys.exit(85)
    time.sleep(pace_s)
if flaw == "deaf":
    total += random.random()
(out / "total.txt").write_text(f"{total}\n")
print(f"total {total}", flush=True)
