"""`mesh up`, `down`, `status`, `nodes`, and `describe`: what they start, stop and say."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mesh.api.no_daemon import hangs, none_runs
from mesh.cli import describe, nodes
from mesh.cli.main import cli
from mesh.daemon import leftovers
from mesh.util.errors import ConfigError, ExitCode
from tests.cli.test_lend import answer as lent

STATUS: dict[str, Any] = {"nick": "desk", "mesh": "lab", "address": "10.0.0.7:7373", "open": False, "may_admit": True}
STATUS |= {"problems": {}, "lend": lent()}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the settings that the daemon is started with; none runs before."""
    given: list[Any] = []
    monkeypatch.setattr(nodes, "client", lambda ctx: SimpleNamespace(alive=lambda: False))
    monkeypatch.setattr(nodes, "start_daemon", lambda where, overrides: given.append(overrides))
    monkeypatch.setattr(nodes, "wait_ready", lambda where, process: STATUS | {"lend": lent()})
    return given


def run(root: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--state", str(root), *words], prog_name="mesh")


def test_only_options_that_are_given_stand_above_the_file(tmp_path: Path, started: list[Any]) -> None:
    assert run(tmp_path, "up").exit_code == 0 and started == [{}]
    done = run(tmp_path, "up", "--lend", "--no-mdns", "--open", "--allow-process-guests", "--port", "7")
    assert started[1] == {"lend": True, "mdns": False, "open": True, "process_engine_for": "all", "port": 7}
    assert "without a sandbox" in done.stderr
    assert done.stdout == "desk is up in mesh 'lab' at 10.0.0.7:7373, lending\n"


def test_second_daemon_is_not_started(tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "client", lambda ctx: SimpleNamespace(alive=lambda: True))
    done = run(tmp_path, "up")
    assert done.exit_code == ExitCode.ERROR and "a daemon runs here already" in done.stderr and not started


@pytest.mark.parametrize(
    ("error", "words"),
    [(ConfigError("it is ada's"), "it is ada's"), (OSError(28, "No space left"), "cannot write .*No space")],
)
def test_start_that_fails_says_why(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fails(where: object, overrides: object) -> None:
        raise error

    monkeypatch.setattr(nodes, "start_daemon", fails)
    done = run(tmp_path, "up")
    assert done.exit_code == ExitCode.ERROR and words.partition(" .*")[0] in done.stderr


def test_open_mesh_is_warned_of_at_each_start(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = STATUS | {"lend": lent(), "open": True, "problems": {"nick": "config.toml says another name"}}
    monkeypatch.setattr(nodes, "wait_ready", lambda where, process: told)
    done = run(tmp_path, "up")
    assert "OPEN MESH" in done.stderr and "may not admit" not in done.stderr
    assert "mesh: config.toml says another name" in done.stderr
    told["may_admit"] = False
    assert "so --open has no effect here" in run(tmp_path, "up").stderr


def stopped(monkeypatch: pytest.MonkeyPatch, post: Any) -> None:
    monkeypatch.setattr(nodes, "client", lambda ctx: SimpleNamespace(post=post))


def test_down_waits_for_the_end_of_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    with subprocess.Popen(["sleep", "0.3"]) as daemon:
        told = {"pid": daemon.pid, "guests": 2}
        stopped(monkeypatch, lambda path, body: asked.append((path, body)) or told)
        done = run(tmp_path, "down", "--grace", "5s")
        assert daemon.poll() is not None or Path(f"/proc/{daemon.pid}/stat").read_text().split()[2] == "Z"
    assert done.stdout == "down\n" and "2 guests save and move on ..." in done.stderr
    assert asked == [("/v1/down", {"grace_s": 5.0, "now": False})]
    told["guests"] = 1
    assert "1 guest is killed ..." in run(tmp_path, "down", "--now").stderr and asked[1][1]["now"]


def test_leftovers_of_a_killed_daemon_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(path: str, body: object) -> None:
        raise none_runs(tmp_path)

    stopped(monkeypatch, none)
    assert run(tmp_path, "down").exit_code == ExitCode.NO_DAEMON, "it belongs to no mesh"
    (tmp_path / "genesis").touch()
    left = [SimpleNamespace(words="1 container"), SimpleNamespace(words="")]
    monkeypatch.setattr(leftovers, "remove", lambda where: left)
    assert "removed what a killed daemon had left: 1 container" in run(tmp_path, "down").stderr
    assert json.loads(run(tmp_path, "down", "--json").stdout)["removed"] == "1 container"
    left[1].words = "1 container"
    done = run(tmp_path, "down")
    assert done.exit_code == ExitCode.ERROR and "not removed: 1 container" in done.stderr
    left[:] = [SimpleNamespace(words="")] * 2
    assert run(tmp_path, "down").stdout == "this node is not running\n"

    def busy(path: str, body: object) -> None:
        raise hangs(7)

    stopped(monkeypatch, busy)
    monkeypatch.setattr(leftovers, "remove", lambda where: pytest.fail("its guests live"))
    assert run(tmp_path, "down").exit_code == ExitCode.NO_DAEMON


def test_log_of_a_node_that_never_ran_is_missed(tmp_path: Path) -> None:
    assert "there is no log yet" in run(tmp_path, "status", "--log").stderr
    (tmp_path / "daemon.log").write_text("".join(f"line {number}\n" for number in range(nodes.LOG_LINES + 5)))
    assert len(run(tmp_path, "status", "--log").stdout.splitlines()) == nodes.LOG_LINES
    assert run(tmp_path, "status", "--log", "-w").exit_code == ExitCode.USAGE


def test_list_of_nodes_says_what_is_free(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    base = {"nick": "desk", "me": True, "state": "alive", "since_unix": 0, "lending": True, "gpus": [1, 2], "slots": 2}
    base |= {"slots_free": 1, "jobs": 3, "engines": [], "interactive": False, "user": "ada", "address": ""}
    base |= {"gpu_room": [{"share": 50, "vram_mib": 1}, {"share": 100, "vram_mib": 0}]}
    away = base | {"nick": "den", "me": False, "lending": False, "paused": True, "back_unix": 0, "held_by": "owner"}
    nodes._draw_nodes({"nodes": [base, away | {"engines": ["apptainer"], "interactive": True}]})
    told = capsys.readouterr()
    _, own, other = told.out.splitlines()
    assert own.startswith("desk *") and "0.5/2 GPUs, 1/2 slots" in own and "- (no sessions)" in own
    assert other.startswith("den ") and "owner present" in other and "apptainer " in other and "(no" not in other
    assert "engine apptainer is" in told.err


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpus": 0}, "-"),
        ({}, "1 whole"),
        ({"vram_mib": 600}, "1 whole, of 600 MiB at least"),
        ({"gpu_share": 30, "gpu_share_limit": 30, "vram_mib": 600}, "30 % and 600 MiB of 1"),
        (
            {"gpu_share": 30, "gpu_share_limit": 80, "vram_mib": 600, "vram_limit_mib": 900},
            "30 % and 600 MiB of 1, up to 80 % while others leave it idle, up to 900 MiB while no other job needs it",
        ),
        ({"gpu_portions": [{"uuid": "a"}, {"uuid": "b"}]}, "1 whole: a, b"),
    ],
)
def test_gpus_of_a_job_are_those_asked_for_and_given(fields: dict[str, Any], words: str) -> None:
    base = {"gpus": 1, "gpu_share": 100, "gpu_share_limit": 100, "vram_mib": 0, "vram_limit_mib": 0, "gpu_portions": []}
    assert describe._gpus(base | fields) == words


def test_decision_says_whether_it_can_be_recomputed() -> None:
    def row(nick: str, now: int | None) -> dict[str, Any]:
        return {"nick": nick, "advert_version": 3, "advert_now": now}

    def told(*rows: dict[str, Any]) -> str:
        return describe._decision({"by": "lab", "attempt": 2, "order": rows})

    assert told(row("desk", 3)) == (
        "lab placed attempt 2 on desk; no advert has changed since, so any node can recompute it"
    )
    words = told(row("desk", 3), row("den", 4), row("old", None))
    assert "on desk (ranked first of 3: then den, old)" in words and "the adverts of den, old changed since" in words
    assert "the advert of den changed" in told(row("desk", 3), row("den", 4))


def test_attempt_says_how_long_it_ran() -> None:
    base = {"number": 1, "node": "den", "started_unix_ms": 0, "running_unix_ms": 5_000, "ended_unix_ms": 65_000}
    base |= {"seen_unix_ms": 0, "resumed_step": None, "last_step": 0, "reason": ""}
    assert describe._attempt(base)[3:] == ["1m", "-", "0", "running"]
    assert describe._attempt(base | {"ended_unix_ms": 0, "seen_unix_ms": 15_000, "reason": "lost"})[3::3] == [
        "10s",
        "lost",
    ]
    assert describe._attempt(base | {"running_unix_ms": 0})[3] == "-"
    assert describe._attempt(base | {"ended_unix_ms": 1_000})[3] == "0s"


def test_checkpoint_of_a_job_says_where_it_is_and_when_the_next_is_due() -> None:
    kept = {"seq": 3, "step": 7, "at_risk": True, "wanted": 2, "holders": ["den"], "created_unix_ms": 0}
    told = describe._checkpoint({"checkpoint": kept})
    assert told.startswith("number 3 at step 7, ") and told.endswith(", on den (at risk: 2 wanted)")
    told = describe._checkpoint({"checkpoint": kept | {"step": None, "at_risk": False, "holders": []}})
    assert "step" not in told and told.endswith(", on its host only")
    assert describe._checkpoint({"checkpoint": None}) == describe._next({"next_checkpoint": None}) == "-"
    due = {"due_unix": 0, "why": "asked", "loss_s": 1.26}
    assert describe._next({"next_checkpoint": due}).endswith("as its user asks; expected loss until then 1.3 s of work")
