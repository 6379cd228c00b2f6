"""Train undisturbed; then, for each step, stop there by a notice and resume from the checkpoint in a fresh directory.

    python stops.py train_hf|train_lightning STEP,STEP,... [OPTION...]

All in one process, since starting one takes longer than the training. Prints each result as a line of JSON.
"""

import importlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from mesh import job

program, stops, options = importlib.import_module(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")], sys.argv[3:]


def run(resume, *more):
    """Run once in a fresh directory; return the newest checkpoint and the output."""
    where = Path(tempfile.mkdtemp(dir=top))
    (where / "ctl").mkdir()
    if resume is not None:
        shutil.copytree(resume, where / "ckpts" / resume.name)
    os.chdir(where)
    os.environ["MESH_CTL_DIR"] = str(where / "ctl")
    os.environ["MESH_CKPT_DIR"] = str(where / "ckpts")
    os.environ["MESH_RESUME"] = str(where / "ckpts" / resume.name) if resume is not None else ""
    job._notice = job._File("notice.json", job._notice._decode)
    code, digest, step = 0, None, None
    try:
        digest, step = program.train([*options, *more])
    except SystemExit as left:
        code = left.code
    saved = max((where / "ckpts").glob("step-*"))
    return saved, {"code": code, "digest": digest, "step": step, "saved": int(saved.name[5:])}


def report(what, outcome):
    print(json.dumps({"what": what, **outcome}), flush=True)


with tempfile.TemporaryDirectory() as top:
    last, undisturbed = run(None)
    report("undisturbed", undisturbed)
    report("run again after its end", run(last)[1])
    for stop in stops:
        saved, stopped = run(None, "--notice-at", str(stop))
        report(f"stopped at {stop}", stopped)
        report(f"resumed from {stop}", run(saved)[1])
    saved = None
    for stop in stops:
        saved, stopped = run(saved, "--notice-at", str(stop))
        report(f"on the way stopped at {stop}", stopped)
    report("resumed after all", run(saved)[1])
    saved, stayed = run(None, "--notice-at", str(stops[-1]), "--stays")
    report("stayed", stayed)
    report("resumed after it stayed", run(saved)[1])
    os.chdir("/")
