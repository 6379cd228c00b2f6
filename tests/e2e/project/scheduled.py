"""A job that saves when the mesh says so, and at no other time. Beside it lies a copy of `mesh/job.py`."""

import sys
import time

import job

with job.Checkpoint() as checkpoint:
    for step in range(1, int(sys.argv[1]) + 1):
        job.progress(step, int(sys.argv[1]))
        if (leaving := job.should_yield()) or job.should_checkpoint():
            checkpoint.save(step, lambda path, step=step: (path / "step").write_text(str(step)))
            print(f"saved {step}", flush=True)
        if leaving:
            sys.exit(job.EXIT_SAVED)
        time.sleep(0.02)
