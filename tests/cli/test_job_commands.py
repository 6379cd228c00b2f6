"""Commands on jobs, with a daemon whose answers are functions: what they ask, print and exit with."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mesh.cli.jobs as jobs_module
from mesh.cli.main import cli
from mesh.util.errors import ExitCode, MeshError

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


def state(job: str, stage: str = "done", **more: Any) -> dict[str, Any]:
    outcome = None if stage not in {"done", "failed", "cancelled"} else {"kind": stage, "exit_code": 0}
    return {
        "job": job,
        "array": None,
        "state": stage,
        "detail": "",
        "attempts": [],
        "outcome": outcome,
        "saving": None,
        **more,
    }


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


@pytest.mark.parametrize(
    ("stage", "words", "code"),
    [
        ("cancelled", "cancelled", 0),
        ("done", "had ended already: done", 0),
        ("failed", "had ended already: failed", 0),
        ("cancelling", "will end when a majority of its witnesses can be reached: `mesh describe joba`", 1),
    ],
)
def test_cancel_tells_how_the_job_has_ended(
    run: Any, monkeypatch: pytest.MonkeyPatch, stage: str, words: str, code: int
) -> None:
    monkeypatch.setattr(jobs_module, "CANCEL_S", 0.2)
    answers = {
        "POST /v1/jobs/joba/cancel": lambda: {"jobs": [{**state("joba", "cancelling"), "already": False}]},
        "GET /v1/jobs?fits=joba": lambda: {"jobs": [state("joba", stage)]},
    }
    done, _ = run(answers, "cancel", "joba")
    assert (done.exit_code, done.stdout) == (code, f"job joba {words}\n")
    done, _ = run(answers, "cancel", "--json", "joba")
    assert done.exit_code == code


def test_cancel_tries_each_job_and_reports_each(run: Any) -> None:
    def refused(text: str, code: ExitCode) -> Callable[[], Any]:
        def refuse() -> Any:
            raise MeshError(text, code)

        return refuse

    answers = {
        "POST /v1/jobs/nope/cancel": refused("no job 'nope'", ExitCode.NOT_FOUND),
        "POST /v1/jobs/joba/cancel": lambda: {"jobs": [{**state("joba", "cancelling"), "already": False}]},
        "POST /v1/jobs/hers/cancel": refused("another user's", ExitCode.REFUSED),
        "GET /v1/jobs?fits=joba": lambda: {"jobs": [state("joba", "cancelled")]},
    }
    done, _ = run(answers, "cancel", "nope", "joba", "hers")
    assert (done.exit_code, done.stdout) == (4, "job joba cancelled\n")
    assert done.stderr.splitlines() == ["mesh: no job 'nope'", "mesh: another user's"]
    gone = {**answers, "POST /v1/jobs/joba/cancel": refused("no daemon answers", ExitCode.NO_DAEMON)}
    done, daemon = run(gone, "cancel", "joba", "hers")
    assert done.exit_code == 3 and len(daemon.asked) == 1


def test_wait_stays_with_the_job_that_its_name_meant(run: Any) -> None:
    answers = {
        "GET /v1/jobs?fits=train": lambda: {"jobs": [state("newer", "running")]},
        "GET /v1/jobs?fits=newer": lambda: {"jobs": [state("newer")]},
        "GET /v1/deliveries": lambda: {"deliveries": []},
    }
    done, _ = run(answers, "wait", "train")
    assert (done.exit_code, done.stdout) == (0, "newer done\n")


@pytest.mark.parametrize(("name", "asked"), [("sweep", f"{ARRAY}_1-2"), ("sweep_1-25", ARRAY)])
def test_wait_stays_with_some_jobs_of_an_array(run: Any, name: str, asked: str) -> None:
    """A name may look like an array's name with indices, and its beginning too."""
    answers = {
        "GET /v1/jobs?fits=sweep_1-2": lambda: {
            "jobs": [{**member(index, "running"), "name": name} for index in (1, 2)]
        },
        f"GET /v1/jobs?fits={asked}": lambda: {"jobs": [member(index, "done") for index in (1, 2)]},
        "GET /v1/deliveries": lambda: {"deliveries": []},
    }
    done, daemon = run(answers, "wait", "sweep_1-2")
    assert done.exit_code == 0 and f"GET /v1/jobs?fits={asked}" in daemon.asked


def test_wait_is_for_the_files_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"job": "joba", "directory": "/home/her/out", "caches": [], "problem": "", "over": False}
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
    cached = {**row, "directory": "", "caches": ["pip", "torch"], "problem": "the disk is full"}
    for over, words in ((False, "is not written back yet: the disk is full"), (True, "was not written back")):
        late = [{**cached, "over": over}]
        done, _ = run({**answers, "GET /v1/deliveries": lambda late=late: {"deliveries": late}}, "wait", "joba")
        assert done.exit_code == 1 and f"has added to cache pip, torch {words}" in done.stderr


def test_moves_counts_no_attempt_that_never_ran() -> None:
    ran, failed = {"running_unix_ms": 1}, {"running_unix_ms": 0}
    kept = [{"number": number, **one} for number, one in enumerate([failed, ran, failed, failed, ran])]
    assert [jobs_module.moves(kept[:count]) for count in (0, 1, 2, 4, 5)] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("columns", ["200", "80", "24"])
def test_ps_shows_time_last_node_command_and_reason(run: Any, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    now = int(time.time() * 1000)
    ran = {
        "number": 0,
        "node": "desk",
        "running_unix_ms": now - 90_000,
        "ended_unix_ms": now - 30_000,
        "seen_unix_ms": 0,
    }
    rest: dict[str, Any] = {"name": "n" * 60, "user": "ada", "node": None, "gang": [], "step": None, "checkpoint": None}
    rest |= {"at_risk_s": 0, "command": "python3 train.py", "attempts": [], "created_unix_ms": now - 3_600_000}
    failed = state("joba", "failed", **rest | {"attempts": [ran], "detail": "failed (exit 1)"})
    rows = [failed, state("jobb", "pending", **rest)]
    done, _ = run({"GET /v1/jobs?over=true": lambda: {"jobs": rows, "archived": 0}}, "ps", "-a")
    head, first, second = done.stdout.splitlines()
    assert max(map(len, (head, first, second))) <= int(columns) + (30 if columns == "24" else 0)
    assert head.split()[0] == "JOB" and head.split()[-1] == "DETAIL" and first.split()[0] == "joba"
    if columns == "200":
        assert first.split()[2:5] == ["ada", "failed", "1m"] and " desk " in first
        assert first.endswith("python3 train.py  failed (exit 1)")
        assert second.split()[3:6] == ["pending", "1h", "-"]


def test_ps_shows_jobs_of_an_array_that_wait_in_a_row_in_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rest: dict[str, Any] = {"name": "", "user": "ada", "node": None, "gang": [], "step": None, "checkpoint": None}
    rest |= {"at_risk_s": 0, "command": "true", "attempts": [], "created_unix_ms": 0, "detail": ""}

    def job(index: int, phase: str = "pending", array: str = ARRAY, batch: int = 1, **more: Any) -> dict[str, Any]:
        label = str(index) if batch == 1 else f"{index}-{index + batch - 1}"
        place = {"array": array, "index": index, "batch": batch, "label": label}
        return {**state(f"{array}{index}", phase), **rest, "array": place, **more}

    tried = {"number": 0, "node": "desk", "running_unix_ms": 0, "ended_unix_ms": 0, "seen_unix_ms": 0}
    other = "other000"
    jobs = [
        *(job(index, "running") for index in (1, 2)),
        *(job(index) for index in (3, 4, 5)),
        job(6, attempts=[tried]),  # it has its own history
        *(job(index) for index in (7, 9, 10)),  # the 8th is over
        *(job(index, array=other, batch=25) for index in (1, 26)),
        {**state("single"), **rest, "state": "pending"},
    ]
    done, _ = run({"GET /v1/jobs?over=false": lambda: {"jobs": jobs, "archived": 0}}, "ps")
    shown = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    spans = ["1", "2", "3-5", "6", "7", "9-10"]
    assert shown == [*(f"{ARRAY[:8]}_{span}" for span in spans), "other000_1-50", "single"]
    done, _ = run({"GET /v1/jobs?over=false": lambda: {"jobs": jobs, "archived": 0}}, "ps", "-q")
    assert done.stdout.split() == [one["job"] for one in jobs]


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


@pytest.mark.parametrize(("warm", "has"), [(False, ""), (True, ", and has its last checkpoint")])
def test_why_of_a_running_job_says_what_its_standby_is_for(
    run: Any, monkeypatch: pytest.MonkeyPatch, warm: bool, has: str
) -> None:
    answer = {
        **state("joba", "running", node="desk", standby="lab", warm=warm, submitted_by=""),
        "witnesses": ["desk"],
        "attempts": [],
        "placement": {"zone": None},
        "decision": None,
        "explanation": ["desk is first of 1"],
        "candidates": [],
        "refused": [],
        "would": None,
    }
    monkeypatch.setattr("mesh.cli.describe.client", lambda ctx: Daemon({"GET /v1/jobs/joba/why": lambda: answer}))
    done = CliRunner().invoke(cli, ["why", "joba"], prog_name="mesh")
    assert f"  standby: lab would take over if its node were lost{has}" in done.stdout.splitlines()


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
    monkeypatch.setattr(jobs_module, "input_waits", lambda: False)  # of the tests, which may be a pipe of their runner
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


@pytest.mark.parametrize("command", ["run", "submit"])
def test_ctrl_c_during_the_submission_says_that_the_job_may_run(run: Any, command: str) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    done, _ = run({"POST /v1/jobs": interrupted}, command, "true")
    assert done.exit_code == 130 and "the job may have been submitted: `mesh ps` lists it" in done.stderr
