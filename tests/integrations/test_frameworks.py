"""The real Hugging Face Trainer and Lightning on the CPU: stops and kills do not change the final weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.consensus.contract import ExitFacts, judge
from tests.integrations.trainings import SHORT, TIMEOUT_S, Attempt, digest_of, reports, run

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(2 * TIMEOUT_S)]
Undisturbed = Callable[..., str]
PROGRAMS = ["train_hf.py", "train_lightning.py"]
SLOW = pytest.mark.slow


# Stops are early, within an epoch (of 8 steps by default), at its end, and where a validation follows. Each case takes ten
# seconds of computation, so `make test` has one of each framework.
@pytest.mark.parametrize(
    ("program", "options", "stops"),
    [
        pytest.param("train_hf", "", [1, 4, 8, 17], id="hf"),
        pytest.param("train_hf", "--best", [3, 7, 16], id="hf-best-model", marks=SLOW),
        pytest.param(
            "train_hf",
            "--best --save epoch --max-steps 20",
            [5, 8, 19],
            id="hf-by-epoch-and-cut-off",
            marks=SLOW,
        ),
        pytest.param("train_lightning", "", [1, 4, 8, 17], id="lightning"),
        pytest.param(
            "train_lightning",
            "--validate-every 5",
            [2, 5, 13, 16],
            id="lightning-validation-within",
            marks=SLOW,
        ),
        pytest.param(
            "train_lightning",
            "--max-steps 13 --workers 2",
            [3, 8, 11],
            id="lightning-workers-and-cut-off",
            marks=SLOW,
        ),
        pytest.param(
            "train_lightning",
            "--epochs 20 --patience 0",
            [5, 16],
            id="lightning-early-stopping",
            marks=SLOW,
        ),
        pytest.param(
            "train_lightning",
            "--batch 62 --accumulate 1 --epochs 100 --max-steps 8 --no-validation",
            [1, 3, 6],
            id="lightning-epochs-of-one-step",
            marks=SLOW,
        ),
    ],
)
def test_stopped_training_resumed_elsewhere_ends_with_the_same_weights(
    project: Path, tmp_path: Path, program: str, options: str, stops: list[int]
) -> None:
    done = run(project, "stops.py", program, ",".join(map(str, stops)), *options.split(), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    said = {report.pop("what"): report for report in reports(done.stdout)}
    whole = said["undisturbed"]
    assert whole["code"] == 0 and whole["saved"] == whole["step"] > max(stops)
    for stop in stops:
        for stopped in (said[f"stopped at {stop}"], said[f"on the way stopped at {stop}"]):
            assert stopped["code"] == 85 and stopped["saved"] in {stop, stop + 1}, (stop, stopped)
        assert said[f"resumed from {stop}"] == whole
    assert said["resumed after all"] == whole
    assert said["run again after its end"] == whole
    assert said["stayed"]["code"] == 0 and said["stayed"]["saved"] in {stops[-1], stops[-1] + 1}
    assert said["stayed"]["step"] < whole["step"] and said["resumed after it stayed"] == whole
    exit_0_at_a_notice = ExitFacts(
        code=0, oom=False, vacating=True, has_checkpoints=True, forced_done=False, on_exit_0="resume"
    )
    assert judge(exit_0_at_a_notice) == "vacated"


@pytest.mark.parametrize("program", PROGRAMS)
def test_training_killed_during_a_save_resumes_from_the_previous_one(
    tmp_path: Path, killed_in_save: Callable[[str], Attempt], undisturbed: Undisturbed, program: str
) -> None:
    killed = killed_in_save(program)
    torn = {"train_hf.py": "out/checkpoint-12", "train_lightning.py": "ckpts/.step-00000012.tmp"}[program]
    assert (killed.directory / torn).is_dir() and killed.committed() == "step-00000006"
    second = killed.elsewhere(tmp_path / "second").run(*SHORT)
    assert second.returncode == 0, second.stderr[-2000:]
    assert "step-00000006" in second.stdout.splitlines()[0]
    assert digest_of(second.stdout) == undisturbed(program, *SHORT)


@pytest.mark.parametrize("program", PROGRAMS)
def test_training_killed_before_the_rename_keeps_the_previous_checkpoint(
    project: Path, tmp_path: Path, program: str
) -> None:
    """Also check that the checkpoint of the schedule is made once, beside those of every sixth step (with Lightning, the sixth
    after the last checkpoint)."""
    killed, whole, torn = Attempt(tmp_path, project, program), *((6, 12) if "hf" in program else (7, 13))
    (tmp_path / "ctl" / "schedule.json").write_text('{"number": 1, "due_unix": 0}')
    assert killed.run(*SHORT, "--die-in-publish", str(torn)).returncode == -9
    assert (killed.ckpts / f".step-{torn:08d}.tmp").is_dir() and killed.committed() == f"step-{whole:08d}"
    assert sorted(path.name for path in killed.ckpts.glob("step-*")) == ["step-00000001", f"step-{whole:08d}"]
    assert (tmp_path / "ctl" / "stall.json").exists()


def test_training_never_resumes_from_an_incomplete_folder(
    project: Path, tmp_path: Path, killed_in_save: Callable[[str], Attempt]
) -> None:
    shutil.copytree(killed_in_save("train_hf.py").directory, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "out" / "checkpoint-6", tmp_path / "out" / "checkpoint-9")
    (tmp_path / "out" / "checkpoint-9" / "checkpoint-is-incomplete.txt").write_text("in progress...")
    ask = """
import inspect, json, os
from transformers import trainer_jit_checkpoint
from transformers.trainer_utils import get_last_checkpoint
from mesh.sdk.integrations.hf import SENTINEL, resume_from
found = [get_last_checkpoint("out")]
for named in ("", "out", "out/checkpoint-12", "out/checkpoint-9", "out/checkpoint-6", "ckpts", "ctl"):
    os.environ["MESH_RESUME"] = named
    found.append(resume_from())
print(json.dumps([found, SENTINEL in inspect.getsource(trainer_jit_checkpoint)]))
"""
    answer = run(project, "-c", ask, cwd=tmp_path, PYTHONPATH=str(project))
    assert answer.returncode == 0, answer.stderr[-2000:]
    (theirs, *ours), sentinel_is_theirs = json.loads(answer.stdout)
    assert theirs == "out/checkpoint-12", "transformers itself would resume from the incomplete checkpoint"
    assert ours == [None, *["out/checkpoint-6"] * 4, "ckpts/step-00000006", None]
    assert sentinel_is_theirs


def test_lightning_resumes_from_a_checkpoint_or_the_newest_in_a_directory(project: Path, tmp_path: Path) -> None:
    for name in ("step-00000009", "step-00000010", ".step-00000011.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lightning.ckpt").touch()
    (tmp_path / "empty").mkdir()
    ask = """
import json, os
from mesh.sdk.integrations.lightning import resume_from
found = []
for named in ("", "empty", "step-00000009", "."):
    os.environ["MESH_RESUME"] = named
    found.append(resume_from())
print(json.dumps(found))
"""
    answer = run(project, "-c", ask, cwd=tmp_path, PYTHONPATH=str(project))
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert json.loads(answer.stdout) == [
        None,
        None,
        "step-00000009/lightning.ckpt",
        "step-00000010/lightning.ckpt",
    ]


REFUSED_BY_HF = """
from types import SimpleNamespace
from mesh.sdk.integrations.hf import Yield
os.environ["MESH_CKPT_DIR"] = "ckpts"
for output_dir, processes in (("ckpts", 1), ("ckpts/out", 1), ("out", 2)):
    attempt(lambda: Yield().on_train_begin(SimpleNamespace(output_dir=output_dir, world_size=processes), None, None))
"""
REFUSED_BY_LIGHTNING = """
from types import SimpleNamespace
from torch.utils.data import IterableDataset
from mesh.sdk.integrations.lightning import ResumableLoader, Yield
class Stream(IterableDataset):
    def __iter__(self): return iter(())
os.environ["MESH_CKPT_DIR"] = "ckpts"
attempt(lambda: ResumableLoader(Stream()))
attempt(lambda: ResumableLoader([1, 2], num_workers=1, persistent_workers=True))
attempt(lambda: Yield().on_train_start(SimpleNamespace(world_size=2), None))
"""


@pytest.mark.parametrize(
    ("ask", "errors"),
    [
        pytest.param(REFUSED_BY_HF, ["ValueError", "ValueError", "RuntimeError"], id="hf"),
        pytest.param(REFUSED_BY_LIGHTNING, ["TypeError", "ValueError", "RuntimeError"], id="lightning"),
    ],
)
def test_integrations_refuse_settings_without_exact_resume(project: Path, ask: str, errors: list[str]) -> None:
    begin = """
import os
def attempt(what):
    try: what()
    except Exception as error: print(type(error).__name__)
    else: print("taken")
"""
    done = run(project, "-c", begin + ask)
    assert done.stdout.split() == errors, done.stderr[-2000:]
