"""`Checkpoint.snapshot`: the state of one step, written while later steps change it."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh import job
from mesh.checkpoints.commit_modes import committed_tree
from mesh.model.spec import Checkpointing

ROOT = Path(__file__).parents[1]
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_notice", job._File("notice.json", job._notice._decode))
    for name in [name for name in os.environ if name.startswith("MESH_")]:
        monkeypatch.delenv(name)


class Held:
    """A `write` function that blocks until `may` is set."""

    def __init__(self, write: Callable[[Path, Any], None] = job._dump) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        self._write = write

    def __call__(self, path: Path, state: Any) -> None:
        self.begun.set()
        assert self.may.wait(WAIT_S)
        self._write(path, state)

    def goes_on_when_waited_for(self, checkpoint: job.Checkpoint) -> None:
        finish = checkpoint.finish

        def waited_for() -> None:
            self.may.set()
            finish()

        checkpoint.finish = waited_for  # type: ignore[method-assign]


def loaded(directory: Path, step: int) -> Any:
    with (directory / f"step-{step:08d}" / "state.pkl").open("rb") as file:
        return pickle.load(file)


def run(program: str, cwd: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
    )


def make_state() -> dict[str, Any]:
    draw = np.random.default_rng(5)
    square = draw.standard_normal((64, 48))
    return {
        "weights": square,
        "turned": square.T,
        "every second": square[::2, 1::3],
        "backwards": square[::-1],
        "fortran": np.asfortranarray(square),
        "records": np.array([(1, 2.0), (3, 4.0)], dtype=[("n", "i4"), ("x", "f8")]),
        "objects": np.array([[1, 2], {"a": [3]}], dtype=object),
        "none of it": np.empty((0, 3)),
        "a number": np.array(7),
        "rest": (OrderedDict(b=[1, 2], a={3}), None, "x", 4.5, bytearray(b"bytes"), draw.bit_generator.state),
    }


def spoil(state: dict[str, Any]) -> None:
    """Change all values in place, as an optimizer does."""
    for value in state.values():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size:
            np.multiply(value, 3, out=value)
    state["records"]["x"] += 1
    state["objects"][1]["a"].append(9)
    state["a number"] += 1
    state["rest"][0]["b"].append(3)
    state["rest"][0]["a"].clear()
    state["rest"][4][:] = b"other"


def test_snapshot_keeps_its_step_while_training_changes_the_state(tmp_path: Path) -> None:
    checkpoint, state = job.Checkpoint(tmp_path), make_state()
    for step in (1, 2, 3):  # first into new memory, then into reused memory
        expected, held = pickle.dumps(state), Held()
        assert checkpoint.snapshot(step, state, held)
        spoil(state)
        assert pickle.dumps(state) != expected
        held.may.set()
        checkpoint.finish()
        wanted, found = pickle.loads(expected), loaded(tmp_path, step)
        assert wanted.keys() == found.keys() and wanted["rest"] == found["rest"]
        assert type(found["rest"][0]) is OrderedDict and wanted["objects"].tolist() == found["objects"].tolist()
        for name in wanted.keys() - {"rest", "objects"}:
            same = wanted[name].tobytes() == found[name].tobytes()
            assert same and wanted[name].dtype == found[name].dtype and wanted[name].shape == found[name].shape, name


def test_snapshot_reuses_its_buffers_and_frees_unused_ones(tmp_path: Path) -> None:
    checkpoint, seen = job.Checkpoint(tmp_path), []

    def note(path: Path, state: Any) -> None:
        seen.append({name: value.ctypes.data for name, value in state.items()})
        job._dump(path, state)

    state = {"a": np.ones(1000), "b": np.ones(1000), "c": np.ones(500)}
    for step in (1, 2):
        checkpoint.snapshot(step, state, note, wait=True)
    del state["c"]
    checkpoint.snapshot(3, state, note, wait=True)
    checkpoint.finish()
    assert set(seen[0].values()) == set(seen[1].values()) and len(set(seen[0].values())) == 3
    assert set(seen[2].values()) < set(seen[1].values())
    assert sum(len(kept) for kept in checkpoint._buffers._free.values()) == 2


def test_snapshot_preserves_shared_references(tmp_path: Path) -> None:
    weights: Any = np.ones(8)
    state: dict[str, Any] = {"head": weights, "embedding": weights, "list": [weights]}
    state["itself"] = state
    with job.Checkpoint(tmp_path) as checkpoint:
        checkpoint.snapshot(1, state)
    found = loaded(tmp_path, 1)
    assert found["head"] is found["embedding"] is found["list"][0] and found["itself"] is found


def test_snapshot_during_a_write_is_skipped_unless_it_may_wait(tmp_path: Path) -> None:
    checkpoint, held = job.Checkpoint(tmp_path), Held()
    assert checkpoint.snapshot(1, {"n": 1}, held)
    assert held.begun.wait(WAIT_S)
    assert checkpoint.snapshot(2, {"n": 2}) is False
    held.goes_on_when_waited_for(checkpoint)
    assert checkpoint.snapshot(3, {"n": 3}, wait=True)
    assert loaded(tmp_path, 1) == {"n": 1}, "the previous snapshot is on disk when the next begins"
    checkpoint.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_snapshot_after_vacate_notice_waits_for_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, held = job.Checkpoint(tmp_path / "ckpts"), Held()
    assert checkpoint.snapshot(1, {"n": 1}, held)
    notice = {"seq": 1, "kind": "vacate", "deadline_unix": 99.0, "grace_s": 30.0, "reason": "the owner"}
    (tmp_path / "notice.json").write_text(json.dumps(notice))
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path))
    assert held.begun.wait(WAIT_S)
    held.goes_on_when_waited_for(checkpoint)
    assert checkpoint.snapshot(2, {"n": 2})
    assert loaded(tmp_path / "ckpts", 1) == {"n": 1} and loaded(tmp_path / "ckpts", 2) == {"n": 2}

    def fail(path: Path, state: Any) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):  # so the program does not exit with EXIT_SAVED
        checkpoint.snapshot(3, {"n": 3}, fail)


def test_save_waits_for_the_snapshot_before_it(tmp_path: Path) -> None:
    checkpoint, held = job.Checkpoint(tmp_path), Held()
    checkpoint.snapshot(1, {"n": 1}, held)
    held.goes_on_when_waited_for(checkpoint)
    checkpoint.save(2, lambda path: (path / "before").write_text(str(loaded(tmp_path, 1))))
    assert (tmp_path / "step-00000002" / "before").read_text() == "{'n': 1}"


@pytest.mark.parametrize("way", ["snapshot", "save", "finish", "with"])
def test_background_error_is_raised_once_by_the_next_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    checkpoint = job.Checkpoint(tmp_path)
    checkpoint.snapshot(1, {"n": 1})

    def fail(path: Path, state: Any) -> None:
        (path / "half").write_text("h")
        raise OSError("disk full")

    calls: dict[str, Callable[[], object]] = {
        "snapshot": lambda: checkpoint.snapshot(3, {"n": 3}, wait=True),
        "save": lambda: checkpoint.save(3, lambda path: None),
        "finish": checkpoint.finish,
        "with": lambda: checkpoint.__exit__(None, None, None),
    }
    checkpoint.snapshot(2, {"n": 2}, fail, wait=True)
    with pytest.raises(OSError, match="disk full"):
        calls[way]()
    assert "step 2 was not saved" in capfd.readouterr().err
    latest = checkpoint.latest()
    assert latest is not None and latest.name == "step-00000001"
    assert checkpoint.snapshot(4, {"n": 4})
    checkpoint.finish()
    assert loaded(tmp_path, 4) == {"n": 4}


def test_uncopyable_state_raises_at_once(tmp_path: Path) -> None:
    checkpoint = job.Checkpoint(tmp_path)
    with pytest.raises(TypeError):
        checkpoint.snapshot(1, {"lock": threading.Lock()})
    assert checkpoint.latest() is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
@pytest.mark.parametrize("before", [0, job.WRITER_NICE + 5])
def test_snapshot_lowers_priority_of_writer_only(tmp_path: Path, before: int) -> None:
    seen: list[int] = []

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def train() -> None:  # in a thread of its own, which keeps its priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(before, priority()))
        with job.Checkpoint(tmp_path) as checkpoint:
            seen.append(priority())
            checkpoint.snapshot(1, {}, lambda path, state: seen.append(priority()))
        seen.append(priority())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    training, writer, after = seen
    assert training >= before and writer == max(training, job.WRITER_NICE) and after == training


AT_EXIT = """
import threading
from mesh import job

def write(path, state):
    threading.main_thread().join()  # the program has ended
    (path / "state").write_text(str(state))

job.Checkpoint("ckpts").snapshot(7, [1, 2], write)
raise SystemExit(85)
"""


def test_program_exit_waits_for_the_write(tmp_path: Path) -> None:
    done = run(AT_EXIT, tmp_path)
    assert done.returncode == 85, done.stderr
    assert (tmp_path / "ckpts" / "step-00000007" / "state").read_text() == "[1, 2]"


KILLED = f"""
import os, threading
from mesh import job

checkpoint = job.Checkpoint("ckpts")
checkpoint.snapshot(1, {{"n": 1}})
checkpoint.finish()

def half(path, state):
    (path / "first").write_text("whole")
    (path / "second").write_bytes(b"ha")
    os.kill(os.getpid(), {signal.SIGKILL})

checkpoint.snapshot(2, {{"n": 2}}, half)
threading.Event().wait()
"""


def test_kill_during_a_write_keeps_previous_snapshot(tmp_path: Path) -> None:
    assert run(KILLED, tmp_path).returncode == -signal.SIGKILL
    assert (tmp_path / "ckpts" / ".step-00000002.tmp" / "second").read_bytes() == b"ha"
    tree = committed_tree(tmp_path / "ckpts", Checkpointing(mode="rename"), 0.0, ended=True)
    assert tree is not None and tree.resume == "step-00000001" and list(tree.roots) == ["ckpt/step-00000001"]
    assert job.Checkpoint(tmp_path / "ckpts").latest() == tmp_path / "ckpts" / "step-00000001"


ALONE = """
import builtins
import job

with job.Checkpoint("ckpts") as checkpoint:
    for step in (1, 2):
        assert checkpoint.snapshot(step, {"weights": [1.5, step]}, wait=True)
import sys
assert not {"numpy", "torch", "mesh"} & sys.modules.keys()
"""


def test_job_module_alone_works_without_numpy_and_torch(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_bytes(Path(job.__file__).read_bytes())
    done = run("import sys; sys.path.insert(0, '')\n" + ALONE, tmp_path, "-I", "-S")
    assert done.returncode == 0, done.stderr
    assert loaded(tmp_path / "ckpts", 2) == {"weights": [1.5, 2]}


TRAINING = """
import os, pickle, sys
import numpy as np
from mesh import job

checkpoint, stop = job.Checkpoint("ckpts", keep=2), int(sys.argv[1])
state = {"step": 0, "weights": np.zeros(500), "draw": np.random.default_rng(1).bit_generator.state}
if checkpoint.latest():
    state = pickle.loads((checkpoint.latest() / "state.pkl").read_bytes())
print(state["step"])
draw = np.random.default_rng()
draw.bit_generator.state = state["draw"]
while state["step"] < 40:
    state["weights"] *= 0.9
    state["weights"] += draw.standard_normal(500)
    state["step"] += 1
    state["draw"] = draw.bit_generator.state
    if state["step"] % 3 == 0:
        must = state["step"] in (3, 15)  # so that there is one to go on from
        checkpoint.snapshot(state["step"], state, wait=must)
        if must:
            checkpoint.finish()
    if state["step"] == stop:
        sys.stdout.flush()
        os._exit(9)
checkpoint.finish()
print(state["weights"].tobytes().hex())
"""


def test_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    program = "import runpy, sys; sys.argv = ['train.py', '{}']; runpy.run_path('train.py')"
    (tmp_path / "whole").mkdir()
    whole = run(program.format(0).replace("'train.py')", "'../train.py')"), tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    attempts = [run(program.format(stop), tmp_path) for stop in (10, 29, 0)]
    assert [attempt.returncode for attempt in attempts] == [9, 9, 0], attempts
    began = [int(attempt.stdout.split()[0]) for attempt in attempts]
    assert began[0] == 0 and began[1] >= 3 and began[2] >= 15
    assert attempts[-1].stdout.split()[1] == whole.stdout.split()[1]
