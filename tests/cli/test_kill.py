"""`mesh killall` and `mesh reclaim --now`: reports, exit codes, and the pause afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mesh.cli import kill
from mesh.cli.main import cli
from mesh.daemon.layout import Layout
from mesh.execution.process_killer import KillResult
from mesh.gpus.inventory import Lending, load_lending
from mesh.util.errors import ExitCode

GONE = KillResult("j" * 26, "process", 2, 3.0)
STUCK = KillResult("k" * 26, "process", 1, 3.0, (7,), "could not be killed: not permitted")
EMPTY = KillResult("e" * 26, "process", 0, 0.0)


def test_result_counts_guests_that_had_a_live_process() -> None:
    assert (
        kill.outcome([GONE, EMPTY], "by the daemon", 0.126) == "yours again after 0.13 s; 1 guest killed by the daemon"
    )
    assert kill.outcome([EMPTY], "by the daemon", 1) == "yours again after 1.00 s; no guest was running"
    assert kill.outcome([GONE, STUCK], "x", 1) == "1 guest could not be killed; 1 guest killed x"
    assert kill.outcome([STUCK], "x", 1) == "1 guest could not be killed; no guest was running"


def test_guest_is_counted_once_whoever_killed_it() -> None:
    assert kill._merged([GONE], [GONE, STUCK]) == [GONE, STUCK]
    assert kill._merged([KillResult(GONE.job, "process", 0, 0.0)], [GONE])[1:] == [GONE], "here it was seen no more"


def test_pause_keeps_the_rest_of_the_owners_order(tmp_path: Path) -> None:
    where = Layout(tmp_path)
    assert kill._pause(where) == [] and load_lending(where.lending, True) == Lending(True, paused=True)
    where.lending.write_text('{"lending":true,"withheld":["GPU-a"]}')
    kill._pause(where)
    assert load_lending(where.lending, False) == Lending(True, paused=True, withheld=("GPU-a",))
    where.lending.write_text("{")
    kill._pause(where)
    assert load_lending(where.lending, False).paused
    where.lending.unlink()
    where.lending.mkdir()
    (problem,) = kill._pause(where)
    assert problem.startswith("the pause is not stored (") and "`mesh pause` after the next `mesh up`" in problem


@pytest.mark.parametrize(
    ("killed", "code", "advice"),
    [
        ([GONE, EMPTY], 0, ""),
        ([GONE, STUCK], ExitCode.ERROR, "run this as the daemon's user, or as root"),
        (
            [KillResult("k" * 26, "process", 1, 3.0, (7,), "still runs")],
            ExitCode.ERROR,
            "a process hangs in the kernel",
        ),
    ],
)
def test_guest_that_stays_is_an_error_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: list[KillResult], code: int, advice: str
) -> None:
    monkeypatch.setattr(kill, "kill_guests", lambda where: (killed, ["the pause is not stored"], "by the daemon"))
    command = ["--state", str(tmp_path), "reclaim", "--now"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == code and advice in done.stderr and "mesh: the pause is not stored" in done.stderr
    assert ("next:" in done.stderr) == bool(advice) and EMPTY.job[:8] not in done.output
    told = json.loads(CliRunner().invoke(cli, [*command, "--json"]).stdout)
    assert told["reclaimed"] == sorted({one.job for one in killed if one.processes}) and told["by"] == "by the daemon"
    assert told["problems"] == ["the pause is not stored"]


def test_killall_kills_first_and_then_presses_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    answers: list[Any] = [[STUCK], None]

    class Switch:
        def __init__(self, where: Layout) -> None:
            steps.append("switch")

        def killed(self, within_s: float) -> Any:
            return answers.pop(0)

        def close(self) -> None:
            steps.append("closed")

    monkeypatch.setattr(kill, "_kill_guests", lambda where: (steps.append("kill"), ([GONE], []))[1])
    monkeypatch.setattr(kill, "_pause", lambda where: (steps.append("pause"), [])[1])
    monkeypatch.setattr(kill, "KillSwitchClient", Switch)
    command = ["--state", str(tmp_path), "killall"]
    assert CliRunner().invoke(cli, command).exit_code == ExitCode.ERROR
    assert steps == ["kill", "switch", "closed"], "the daemon itself pauses"
    steps.clear()
    assert CliRunner().invoke(cli, command).exit_code == 0
    assert steps == ["kill", "switch", "closed", "pause"]
    missing = CliRunner().invoke(cli, ["--state", str(tmp_path / "no"), "killall"])
    assert missing.exit_code == ExitCode.NO_DAEMON and "does not exist" in missing.stderr


def test_node_that_never_ran_has_nothing_to_kill(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["--state", str(tmp_path), "reclaim", "--now"])
    assert done.exit_code == ExitCode.NO_DAEMON and not list(tmp_path.iterdir()), "no pause is stored"
