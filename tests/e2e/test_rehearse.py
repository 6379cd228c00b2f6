"""`mesh rehearse` with real daemons and small real programs, good and flawed. Each leaves nothing behind."""

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import descendants, mesh, start, until
from tests.images import busybox_image

pytestmark = pytest.mark.e2e
CKPT = ("--ckpt", "ckpts", "--ckpt-mode", "rename")


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Everything temporary goes below a directory that must be empty again; short, since sockets are in it."""
    temporary = Path(tempfile.mkdtemp(prefix="rehearse-"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield temporary
    left = list(temporary.iterdir())
    shutil.rmtree(temporary)
    assert not left, left


def rehearse(*arguments: str) -> tuple[int, str, str]:
    done = mesh(None, "rehearse", *arguments, timeout_s=240)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def flawed(flaw: str, *options: str, steps: int = 90, pace_s: float = 0.04) -> dict[str, Any]:
    command = (sys.executable, "flawed.py", flaw, str(steps), str(pace_s))
    code, text, _ = rehearse(*CKPT, *options, "--json", "--", *command)
    facts: dict[str, Any] = json.loads(text)
    assert facts["schema"] == 1 and facts["exit_code"] == code and facts["seconds"] > 0
    return facts


def test_a_job_that_keeps_the_contract_resumes_and_is_told_what_departures_cost() -> None:
    code, text, news = rehearse(*CKPT, "--", sys.executable, "count.py", "80", "0.05")
    assert code == 0, text + news
    assert text.startswith("RESUMES: a noticed departure cost ") and "; a sudden departure cost " in text
    assert "and 0 steps;" in text, "a noticed one loses no step"
    for what in ("published files", "last checkpoint", "last line of output"):
        assert f"  {what}: equal" in text
    assert "not checked" not in text and "warning" not in text and "next:" not in text
    for word in ("gives notice", "is killed (SIGKILL)", "it went on with step", "undisturbed"):
        assert word in news


def test_a_job_that_is_deaf_and_draws_lots_resumes_with_a_warning_and_a_note() -> None:
    facts = flawed("deaf")
    assert facts["verdict"] == "resumes" and facts["exit_code"] == 0, facts
    levels = {finding["level"]: finding["text"] for finding in facts["findings"]}
    assert "does not catch SIGTERM" in levels["warning"] and "not deterministic" in levels["note"]
    assert [restart["kind"] for restart in facts["restarts"]] == ["resumed", "resumed"], (
        "by the names of its checkpoints"
    )
    differs = {compared["what"]: compared["differs"] for compared in facts["compared"]}
    assert differs["published files"] == ["total.txt"] and differs["last checkpoint"] == []
    noticed, sudden = facts["costs"]
    assert noticed["left_s"] < 15 and sudden["left_s"] is None and sudden["lost_s"] > 0 and sudden["back_s"] > 1


@pytest.mark.parametrize(
    ("flaw", "limits", "verdict", "code", "word", "then"),
    [
        ("starts-over", (), "does not resume", 10, "it starts over: attempt 1", "MESH_RESUME"),
        ("fails", (), "does not resume", 10, "fails after a restart: attempt 1 ended with exit 1", "by hand"),
        ("strays", ("2s", "10s", "50s"), "never checkpoints", 11, "model.json", "MESH_CKPT_DIR"),
    ],
)
def test_a_flaw_is_named_with_what_to_do(
    flaw: str, limits: tuple[str, ...], verdict: str, code: int, word: str, then: str
) -> None:
    """What is clear is not played to the end: that takes longer than it may. One that has only its limit has one in which a slow
    machine can start it and see it write."""
    for limit in limits or ("",):
        facts = flawed(flaw, *(("--limit", limit) if limit else ()), steps=5000)
        if facts["verdict"] == verdict and word in facts["findings"][0]["text"]:
            break
    assert (facts["verdict"], facts["exit_code"]) == (verdict, code)
    fault = facts["findings"][0]
    assert fault["level"] == "fault" and word in fault["text"] and then in fault["next"]
    if flaw == "fails":
        assert fault["said"][-1] == "KeyError: 'momentum'"


def test_one_that_is_interrupted_leaves_nothing_behind(nothing_left: Path) -> None:
    process = start(None, "rehearse", *CKPT, "--", sys.executable, "count.py", "10000")
    assert process.stderr is not None
    line = ""
    while "runs it" not in line:
        line = process.stderr.readline()
        assert line, "it ended early"
    daemons = [pid for pid, words in descendants(process.pid) if "mesh.entry" in words]
    assert len(daemons) >= 3 and list(nothing_left.iterdir())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    until(lambda: not [pid for pid in daemons if Path(f"/proc/{pid}").exists()], "its daemons to end")


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ((), 2, "COMMAND"),
        (("--", "true"), 2, "--ckpt DIR"),
        ((*CKPT, "--checkpoints", "0", "--", "true"), 2, "0"),
        ((*CKPT, "--after", "soon", "--", "true"), 2, "30s"),
        ((*CKPT, "--limit", "0", "--", "true"), 2, "--limit"),
        ((*CKPT, "--replicas", "2", "--", "true"), 2, "--replicas"),
        ((*CKPT, "--env", "NOEQUALS", "--", "true"), 2, "KEY=VALUE"),
        ((*CKPT, "--gpus", "99", "--", "true"), 6, "what this machine has"),
    ],
)
def test_bad_options_are_refused_in_words(arguments: tuple[str, ...], code: int, word: str) -> None:
    returned, text, news = rehearse(*arguments)
    assert returned == code and word in news and text == ""


SHELL = """
n=$(cat "$MESH_RESUME" 2>/dev/null || echo 0)
save() { echo $n > $MESH_CKPT_DIR/.part; mv $MESH_CKPT_DIR/.part $MESH_CKPT_DIR/step-$n; }
trap 'save; exit 85' TERM
while [ $n -lt 40 ]; do
  n=$((n + 1)); echo "{\\"step\\": $n, \\"of\\": 40}" > $MESH_CTL_DIR/.part; mv $MESH_CTL_DIR/.part $MESH_CTL_DIR/progress.json
  [ $((n % 5)) = 0 ] && save
  sleep 0.1
done
echo $n > $MESH_OUT_DIR/count
"""


@pytest.mark.docker
def test_a_container_is_rehearsed_alike() -> None:
    code, text, news = rehearse(*CKPT, "--no-workdir", "--image", busybox_image(), "--", "sh", "-c", SHELL)
    assert code == 0 and "published files: equal" in text and "warning" not in text, text + news
