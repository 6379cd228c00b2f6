"""Commands on jobs, with a daemon whose answers are functions: what they ask, print and exit with."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mesh.cli.jobs as jobs_module
from mesh.cli.main import cli

Answers = dict[str, Callable[[], Any]]
ARRAY = "arrayaaaaaaaaaaaaaaaaaaaaa"


class Daemon:
    """Answers by method and path, and keeps what was asked."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.asked = answers, list[str]()

    def get(self, path: str, **how: Any) -> Any:
        return self._answer(f"GET {path}")

    def post(self, path: str, body: Any = None, **how: Any) -> Any:
        return self._answer(f"POST {path}")

    def stream(self, path: str) -> Any:
        return self._answer(f"STREAM {path}")

    def _answer(self, asked: str) -> Any:
        self.asked.append(asked)
        return self.answers[asked]()


def state(job: str, name: str = "done", **more: Any) -> dict[str, Any]:
    outcome = None if name not in {"done", "failed", "cancelled"} else {"kind": name, "exit_code": 0}
    return {"job": job, "array": None, "state": name, "detail": "", "outcome": outcome, "saving": None, **more}


def member(index: int, name: str, **more: Any) -> dict[str, Any]:
    return state(f"member{index}", name, array={"array": ARRAY, "label": str(index)}, **more)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, Daemon]]:
    def run(answers: Answers, *words: str) -> tuple[Result, Daemon]:
        daemon = Daemon(answers)
        monkeypatch.setattr(jobs_module, "client", lambda ctx: daemon)
        return CliRunner().invoke(cli, words, prog_name="mesh"), daemon

    return run


def test_array_is_cancelled_with_one_question_for_all(run: Any) -> None:
    rows = [member(index, "cancelling", already=False) for index in (1, 2, 3)]
    ends = iter(["cancelling", "cancelled"])

    def ended() -> Any:
        now = next(ends)
        return {"jobs": [member(index, now) for index in (1, 2, 3)]}

    answers = {"POST /v1/jobs/sweep/cancel": lambda: {"jobs": rows}, f"GET /v1/jobs?fits={ARRAY}": ended}
    done, daemon = run(answers, "cancel", "sweep")
    assert done.stdout.splitlines() == [f"job arrayaaa_{index} cancelled" for index in (1, 2, 3)]
    assert len(daemon.asked) == 3


def test_wait_stays_with_the_job_that_its_name_meant(run: Any) -> None:
    answers = {
        "GET /v1/jobs?fits=train": lambda: {"jobs": [state("newer", "running")]},
        "GET /v1/jobs?fits=newer": lambda: {"jobs": [state("newer")]},
        "GET /v1/deliveries": lambda: {"deliveries": []},
    }
    done, _ = run(answers, "wait", "train")
    assert (done.exit_code, done.stdout) == (0, "newer done\n")


def test_wait_is_for_the_files_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"job": "joba", "directory": "/home/her/out", "problem": "", "over": False}
    steps = iter([[row], [row], []])
    answers = {
        "GET /v1/jobs?fits=joba": lambda: {"jobs": [state("joba")]},
        "GET /v1/deliveries": lambda: {"deliveries": next(steps)},
    }
    done, _ = run(answers, "wait", "joba")
    assert done.exit_code == 0 and next(steps, None) is None
    lost = [{**row, "problem": "the disk is full", "over": True}, {**row, "job": "another"}]
    done, _ = run({**answers, "GET /v1/deliveries": lambda: {"deliveries": lost}}, "wait", "joba")
    assert done.exit_code == 1 and "were not brought to /home/her/out: the disk is full" in done.stderr
    monkeypatch.setattr(jobs_module, "DELIVERY_S", 0.1)
    done, _ = run({**answers, "GET /v1/deliveries": lambda: {"deliveries": [row]}}, "wait", "joba")
    assert done.exit_code == 1 and "not in /home/her/out yet" in done.stderr


def test_moves_counts_no_attempt_that_never_ran() -> None:
    ran, failed = {"running_unix_ms": 1}, {"running_unix_ms": 0}
    kept = [{"number": number, **one} for number, one in enumerate([failed, ran, failed, failed, ran])]
    assert [jobs_module.moves(kept[:count]) for count in (0, 1, 2, 4, 5)] == [0, 0, 0, 0, 1]


def test_why_of_an_ended_job_is_its_end_and_attempts(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = {"number": 0, "node": "desk", "reason": "failed (exit 1)"}
    answer = {
        **state("joba", "failed", node=None, detail="failed (exit 1)"),
        "witnesses": ["desk"],
        "attempts": [attempt],
    }
    daemon = Daemon({"GET /v1/jobs/joba/why": lambda: answer})
    monkeypatch.setattr("mesh.cli.describe.client", lambda ctx: daemon)
    done = CliRunner().invoke(cli, ["why", "joba"], prog_name="mesh")
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == "  attempt 0 on desk: failed (exit 1)"


def test_run_reports_what_a_pending_job_waits_for(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each text, and with `mesh why` once."""
    monkeypatch.setattr(jobs_module, "PROGRESS_S", 0.01)
    details = iter(["no node fits"] * 3 + ["2 jobs are before it"] * 3)
    over = False

    def shown() -> Any:
        nonlocal over
        detail = next(details, None)
        over = detail is None
        return {"job": state("joba", "pending", detail=detail) if detail else state("joba", "running")}

    def output() -> Any:
        while not over:
            time.sleep(0.01)
        yield b"done\n"

    monkeypatch.setattr(jobs_module, "follow_log", lambda daemon, job, raw: [*output()])
    answers = {"GET /v1/jobs/joba": shown}
    monkeypatch.setattr(jobs_module, "submit_job", lambda *order: {"job": "joba"})
    monkeypatch.setattr(jobs_module, "exit_code", lambda state: 0)
    done, _ = run(answers, "run", "true")
    assert done.stderr.splitlines()[1:] == [
        "mesh: pending: no node fits (`mesh why joba` says more)",
        "mesh: pending: 2 jobs are before it",
    ]


def test_first_ctrl_c_ends_run_with_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*order: Any, **how: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs_module, "follow_log", interrupted)
    monkeypatch.setattr(jobs_module, "submit_job", lambda *order: {"job": "joba"})
    monkeypatch.setattr(jobs_module.time, "sleep", lambda s: None)
    done, _ = run({}, "run", "true")
    assert done.exit_code == 130 and "the job goes on" in done.stderr
