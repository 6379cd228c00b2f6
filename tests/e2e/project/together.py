"""A job on several nodes that follows the job contract: each step sums the parts of all nodes; the first node checkpoints.

Its last line is a hash over all steps, which does not depend on the number of nodes. With `fail N`, the last node fails at
step N. With a file named by UNTIL, it ends once the file exists, as count.py does.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

STEPS, EVERY, PACE_S, PARTS = int(sys.argv[1]), 10, float(sys.argv[2]), 6
UNTIL = os.environ.get("UNTIL")
FAILS_AT = int(sys.argv[3]) if len(sys.argv) > 3 else 0
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
ckpt, control = (Path(os.environ[f"MESH_{name}_DIR"]) for name in ("CKPT", "CTL"))
leaving = []
signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))


def part(step):
    """This node's share of the step's sum."""
    mine = range(rank, PARTS, size)
    return sum(int(hashlib.sha256(f"{step}/{shard}".encode()).hexdigest()[:8], 16) for shard in mine)


def write(path, fields):
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(fields))
    temporary.rename(path)


def lead():
    step, digest = 0, ""
    if os.environ.get("MESH_RESUME"):
        state = json.loads(Path(os.environ["MESH_RESUME"]).read_text())
        step, digest = state["step"], state["digest"]
    print(f"attempt {os.environ['MESH_ATTEMPT']}: {size} of us, from step {step}", flush=True)
    with socket.create_server(address) as server:
        mates = [server.accept()[0].makefile("rw") for _ in range(size - 1)]
    while step < STEPS and not (UNTIL and Path(UNTIL).exists()):
        step += 1
        for mate in mates:
            print(step, file=mate, flush=True)
        total = part(step) + sum(int(mate.readline()) for mate in mates)  # an empty line: somebody is gone
        digest = hashlib.sha256(f"{digest}{total}".encode()).hexdigest()
        write(control / "progress.json", {"step": step, "of": STEPS})
        if step % EVERY == 0 or leaving:
            write(ckpt / f"step-{step:06d}", {"step": step, "digest": digest})
        if leaving:
            sys.exit(85)
        time.sleep(PACE_S)
    for mate in mates:
        print("", file=mate, flush=True)
    if UNTIL:
        print(f"counted {step}")
    print(f"digest {digest}", flush=True)


def follow():
    deadline = time.monotonic() + 20
    while True:
        try:
            leader = socket.create_connection(address).makefile("rw")
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    while line := leader.readline().strip():
        if int(line) == FAILS_AT and rank == size - 1:
            sys.exit(3)
        print(part(int(line)), file=leader, flush=True)


lead() if rank == 0 else follow()
