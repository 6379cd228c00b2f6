"""`mesh job rehearse`: refusals, output and exit codes."""

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mesh.cli import rehearse as module
from mesh.cli.main import cli
from mesh.rehearsal import evaluation as evaluations
from mesh.rehearsal import private_mesh, rehearsal
from mesh.rehearsal.evaluation import Cost, Restart
from mesh.util.errors import ExitCode


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["job", "rehearse", *words], prog_name="mesh")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--", "true"), "name their directory with --ckpt DIR"),
        (("--ckpt", "c", "--ckpt-mode", "system", "--", "true"), "there is nothing to rehearse"),
        (("--ckpt", "c", "--limit", "0", "--", "true"), "must be longer than 0 s"),
        (("--ckpt", "c"), "Missing argument"),
        (("--ckpt", "c", "--checkpoints", "0", "--", "true"), "0"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_a_mesh_starts(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(private_mesh, "PrivateMesh", lambda engine: pytest.fail("a mesh starts"))
    done = run(*words)
    assert done.exit_code == ExitCode.USAGE and said in done.stderr


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Give the signals back their handlers, which the clean-up of a command ignores; later programs would inherit that."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("options", "engine", "grace_s"),
    [
        ((), "process", 30.0),
        (("--image", "torch"), "docker", 30.0),
        (("--image", "torch", "--engine", "apptainer", "--grace", "5s"), "apptainer", 5.0),
    ],
)
def test_rehearsal_ends_its_mesh_and_exits_with_the_result(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], engine: str, grace_s: float
) -> None:
    steps: list[Any] = []

    class Mesh:
        def __init__(self, engine: str) -> None:
            steps.append(engine)

        def open(self) -> None:
            steps.append("open")

        def close(self) -> None:
            steps.append("close")

    def rehearse(mesh: Mesh, order: dict[str, Any], plan: Any, report: Any, waiting: Any) -> Any:
        steps.append((order["grace_s"], plan.after_s, plan.checkpoints, plan.limit_s, plan.grace_s))
        return SimpleNamespace(run=lambda: "seen")

    monkeypatch.setattr(private_mesh, "PrivateMesh", Mesh)
    monkeypatch.setattr(rehearsal, "Rehearsal", rehearse)
    monkeypatch.setattr(evaluations, "evaluate", lambda seen: SimpleNamespace(exit_code=11))
    monkeypatch.setattr(module, "_show", lambda evaluation: steps.append("shown"))
    done = run("--ckpt", "c", "--no-workdir", "--after", "7s", *options, "--", "true")
    assert done.exit_code == 11, done.output
    assert steps == [engine, "open", (grace_s, 7.0, 1, 600.0, grace_s), "close", "shown"]


def test_costs_are_told_with_where_the_job_went_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    costs = [Cost("noticed", 0, 1.5, 0.0, None, 2.0, 0.5), Cost("sudden", 1, None, 30.0, 1, 15.0, 100.0)]
    restarts = [Restart("resumed", step=7, attempt=1), Restart("started over", attempt=2)]
    kept = SimpleNamespace(bytes=2**20, interval_s=None)
    module._show_costs(SimpleNamespace(costs=costs, restarts=restarts, checkpoints=kept))  # type: ignore[arg-type]
    _, noticed, sudden, size, later = capsys.readouterr().out.splitlines()
    assert noticed.split()[:3] == ["noticed", "1.5", "s"] and noticed.endswith("at step 7")
    assert (
        sudden.split()[:2] == ["sudden", "-"] and "30.0 s, 1 step" in sudden and sudden.endswith("from its beginning")
    )
    assert size == "a checkpoint has 1.0 MiB" and later == module.LATER
    kept.interval_s = 120.4
    module._show_costs(SimpleNamespace(costs=costs[:1], restarts=restarts, checkpoints=kept))  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines()[-1] == "a checkpoint has 1.0 MiB, one every 120 s"


def test_comparison_names_the_files_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    def told(**fields: Any) -> list[str]:
        compared: Any = SimpleNamespace(
            **{"what": "result", "name": "", "equal": False, "count": 9, "differs": ()} | fields
        )
        module._show_compared(compared)
        return capsys.readouterr().out.splitlines()

    assert told(equal=True, count=1) == ["  result: equal (1 file)"]
    assert told(differs=tuple("abcdefg"), name="x") == ["  result (x): 7 of 9 files differ: a, b, c, d, e and 2 more"]
    assert told(differs=tuple("abcde")) == ["  result: 5 of 9 files differ: a, b, c, d, e"]
    lines = told(what="last line of output", differs=("one", "two"))
    assert lines == ["  last line of output: differs", "    disturbed    one", "    undisturbed  two"]


def test_headline_says_the_cost_of_a_job_that_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    finding = SimpleNamespace(level="warning", text="a save is slow", said=("x",), next="a faster disk")
    shown: Any = SimpleNamespace(result="resumes", exit_code=0, findings=(finding,), compared=(), unchecked=("GPUs",))
    shown.costs = (Cost("noticed", 0, 1.5, 4.0, 2, 2.0, 0.5),)
    shown.restarts, shown.checkpoints = (Restart("resumed", attempt=1),), None
    module._show(shown)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("RESUMES: a noticed departure cost ") and out[0].endswith("and 2 steps")
    assert out[1:4] == ["warning: a save is slow", "  | x", "  next: a faster disk"] and out[-1] == "  GPUs"
    shown.exit_code, shown.result = 10, "does not resume"
    module._show(shown)
    assert capsys.readouterr().out.splitlines()[0] == "DOES NOT RESUME"
