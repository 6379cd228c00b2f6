"""`mesh job rehearse` with real daemons and small real programs, correct and flawed. Each run removes its files."""

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.rehearsal.evaluation import EXIT_CODES
from tests.container_images import busybox_image
from tests.e2e.commands import descendants, mesh, start, until

pytestmark = pytest.mark.e2e
CKPT = ("--ckpt", "ckpts", "--ckpt-mode", "rename")


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Redirect temporary files to a directory that must be empty afterwards. Its path is short, since it holds sockets."""
    temporary = Path(tempfile.mkdtemp(prefix="rehearse-"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield temporary
    left = list(temporary.iterdir())
    shutil.rmtree(temporary)
    assert not left, left


def rehearse(*arguments: str) -> tuple[int, str, str]:
    done = mesh(None, "job", "rehearse", *arguments, timeout_s=240)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def flawed(flaw: str, *options: str, steps: int = 90, pace_s: float = 0.04) -> dict[str, Any]:
    """Rehearse a program with a flaw; again, as the answer advises, while the machine is too busy for a verdict."""
    command = (sys.executable, "flawed.py", flaw, str(steps), str(pace_s))
    for _ in range(3):
        code, text, _ = rehearse(*CKPT, *options, "--json", "--", *command)
        answer: dict[str, Any] = json.loads(text)
        assert answer["schema"] == 1 and answer["exit_code"] == code and answer["seconds"] > 0
        if answer["result"] != "inconclusive":
            break
    return answer


def test_job_that_follows_the_contract_resumes_with_departure_costs() -> None:
    for _ in range(3):
        code, text, news = rehearse(*CKPT, "--", sys.executable, "count.py", "80", "0.05")
        if code != EXIT_CODES["inconclusive"] and "warning" not in text:  # as while the machine is too busy
            break
    assert code == 0, text + news
    assert text.startswith("RESUMES: a noticed departure cost ") and "; a sudden departure cost " in text
    assert "and 0 steps;" in text, "a noticed departure must lose no step"
    for what in ("published files", "last checkpoint", "last line of output"):
        assert f"  {what}: equal" in text
    assert "not checked" not in text and "warning" not in text and "next:" not in text
    for word in ("gives notice", "is killed (SIGKILL)", "it resumed at step", "undisturbed"):
        assert word in news


@pytest.mark.long
def test_job_that_ignores_notices_and_is_random_resumes_with_a_warning() -> None:
    answer = flawed("deaf")
    assert answer["result"] == "resumes" and answer["exit_code"] == 0, answer
    levels = {finding["level"]: finding["text"] for finding in answer["findings"]}
    assert "does not catch SIGTERM" in levels["warning"] and "not deterministic" in levels["note"]
    assert [restart["kind"] for restart in answer["restarts"]] == ["resumed", "resumed"], (
        "restarts must be judged by checkpoint names"
    )
    differs = {compared["what"]: compared["differs"] for compared in answer["compared"]}
    assert differs["published files"] == ["total.txt"] and differs["last checkpoint"] == []
    noticed, sudden = answer["costs"]
    assert noticed["left_s"] < 15 and sudden["left_s"] is None and sudden["lost_s"] > 0 and sudden["back_s"] > 1


@pytest.mark.parametrize(
    ("flaw", "limits", "result", "code", "word", "then"),
    [
        ("starts-over", (), "does not resume", 10, "it starts over: attempt 1", "MESH_RESUME"),
        ("fails", (), "does not resume", 10, "fails after a restart: attempt 1 ended with exit 1", "by hand"),
        ("outside", ("2s", "10s", "50s"), "never checkpoints", 11, "model.json", "MESH_CKPT_DIR"),
    ],
)
def test_flaw_is_reported_with_the_next_step(
    flaw: str, limits: tuple[str, ...], result: str, code: int, word: str, then: str
) -> None:
    """A clear verdict ends the rehearsal early; a full run would exceed the time limit of the test.

    If only a limit ends the rehearsal, it gives a slow machine enough time to start the job and observe its writes.
    """
    for limit in limits or ("",):
        answer = flawed(flaw, *(("--limit", limit) if limit else ()), steps=5000)
        if answer["result"] == result and word in answer["findings"][0]["text"]:
            break
    assert (answer["result"], answer["exit_code"]) == (result, code)
    fault = answer["findings"][0]
    assert fault["level"] == "fault" and word in fault["text"] and then in fault["next"]
    if flaw == "fails":
        assert fault["said"][-1] == "KeyError: 'momentum'"


def test_interrupted_rehearsal_leaves_nothing(nothing_left: Path) -> None:
    process = start(None, "job", "rehearse", *CKPT, "--", sys.executable, "count.py", "10000")
    assert process.stderr is not None
    line = ""
    while "runs it" not in line:
        line = process.stderr.readline()
        assert line, "the rehearsal ended early"
    daemons = [pid for pid, words in descendants(process.pid) if "mesh.daemon.entry" in words]
    assert len(daemons) >= 3 and list(nothing_left.iterdir())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    until(lambda: not [pid for pid in daemons if Path(f"/proc/{pid}").exists()], "the daemons of the rehearsal to end")


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
def test_bad_options_are_refused_with_a_message(arguments: tuple[str, ...], code: int, word: str) -> None:
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


@pytest.mark.long
@pytest.mark.docker
def test_container_is_rehearsed_like_a_process() -> None:
    code, text, news = rehearse(*CKPT, "--no-workdir", "--image", busybox_image(), "--", "sh", "-c", SHELL)
    assert code == 0 and "published files: equal" in text and "warning" not in text, text + news
