"""Count, and log each step with a tracker, as docs/how-to/track-experiments.md has it.

`track.py wandb|mlflow|tensorboard UNTIL [PORT]`: until the file UNTIL exists; TensorBoard itself answers at PORT.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mesh import job

KIND, UNTIL = sys.argv[1], Path(sys.argv[2])
RUNS = Path("runs")  # files of the tracker


def nothing() -> None:
    pass


def links(directory: str, names: list[str]) -> set[str]:
    """Leave W&B's links out: a checkpoint takes no link out of itself."""
    return {name for name in names if Path(directory, name).is_symlink()}


def with_wandb() -> tuple[Callable[[int], None], Callable[[], None], Callable[[], None]]:
    import wandb

    run = wandb.init(project="counting", dir=RUNS, mode="offline")
    return lambda step: run.log({"loss": 1 / step}, step=step), nothing, run.finish


def with_mlflow() -> tuple[Callable[[int], None], Callable[[], None], Callable[[], None]]:
    import mlflow

    mlflow.set_experiment("counting")
    mine = os.environ["MESH_JOB_ID"]
    found = mlflow.search_runs(filter_string=f"tags.`mesh.job` = '{mine}'", output_format="list")
    mlflow.start_run(run_id=found[0].info.run_id if found else None, tags={"mesh.job": mine})
    return lambda step: mlflow.log_metric("loss", 1 / step, step=step), nothing, nothing


def with_tensorboard() -> tuple[Callable[[int], None], Callable[[], None], Callable[[], None]]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer: Any = EventFileWriter(str(RUNS))
    serve = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(RUNS),
        "--host",
        "127.0.0.1",
        "--port",
        sys.argv[3],
    ]
    subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def log(step: int) -> None:
        value = Summary.Value(tag="loss", simple_value=1 / step)
        writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))

    return log, writer.flush, writer.close


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # a program that catches it keeps it from W&B's helper process
    step, checkpoints, before = 0, job.Checkpoint(), job.resume_path()
    if before is not None:
        step = int((before / "step").read_text())
        shutil.copytree(before / "runs", RUNS)
    RUNS.mkdir(exist_ok=True)
    log, flush, close = {"wandb": with_wandb, "mlflow": with_mlflow, "tensorboard": with_tensorboard}[KIND]()

    def write(directory: Path) -> None:
        (directory / "step").write_text(str(step))
        shutil.copytree(RUNS, directory / "runs", ignore=links)

    while not UNTIL.exists():
        step += 1
        log(step)
        job.progress(step, 10**6)
        if job.should_yield():
            close()
            checkpoints.save(step, write)
            sys.exit(job.EXIT_SAVED)
        if step % 20 == 0:
            flush()
            checkpoints.save(step, write)
        time.sleep(0.02)
    close()
    shutil.copytree(RUNS, Path(os.environ["MESH_OUT_DIR"]) / "runs", ignore=links)
    print("counted", step)


if __name__ == "__main__":
    main()
