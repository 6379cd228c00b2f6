"""User jobs through the real command line, on a real mesh of four nodes."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.stack import Stack
from mesh.util.errors import MeshError
from tests.e2e.commands import (
    PROJECT,
    WAIT_S,
    command,
    count_digest,
    exact,
    finished,
    job_state,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    start,
    submit_count,
    submit_endless,
    suggestion,
    until,
)

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


def test_run_passes_output_and_exit_code_through(shared: Stack) -> None:
    done = mesh(shared.nodes[0], "run", "--no-workdir", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert done.returncode == 7
    assert sorted(done.stdout.split()) == ["err", "out"], "standard output must hold only the job's output"
    assert "submitted" in done.stderr and "failed (exit 7)" in done.stderr
    done = mesh(shared.nodes[1], "run", "--no-workdir", "--", "sh", "-c", "printf done")
    assert (done.returncode, done.stdout) == (0, "done")


def test_any_node_submits_and_any_node_shows_the_job(shared: Stack) -> None:
    job = submit_count(shared.nodes[2], 30, "--name", "counting")
    for node in shared.nodes:
        state = finished(node, job)
        assert (
            state["state"] == "done" and state["name"] == "counting" and state["command"].endswith("count.py 30 0.02")
        )
        assert ok(node, "logs", job[:10]).splitlines()[-1] == f"digest {count_digest(30)}"
    assert len(state["witnesses"]) == 3 and state["attempts"][0]["exit_code"] == 0


def test_results_are_pulled_once_into_a_new_directory(shared: Stack, tmp_path: Path) -> None:
    job = submit_count(shared.nodes[0], 12)
    finished(shared.nodes[3], job)
    client, order = shared.nodes[3].client, {"destination": str(tmp_path / "out")}
    assert client.post(f"/v1/jobs/{job}/pull", order)["files"] == 1
    assert (tmp_path / "out" / "digest.txt").read_text() == count_digest(12)
    with pytest.raises(MeshError, match="name a new directory"):
        client.post(f"/v1/jobs/{job}/pull", order)
    answer = read(shared.nodes[3], "cp", f"{job}:out/", str(tmp_path / "copy"))
    assert answer["files"] == 1 and (tmp_path / "copy" / "digest.txt").read_text() == count_digest(12)


def test_run_fetches_published_files(shared: Stack, tmp_path: Path) -> None:
    script = "echo result > $MESH_OUT_DIR/result.txt"
    ok(shared.nodes[0], "run", "--no-workdir", "--out", str(tmp_path / "out"), "--", "sh", "-c", script)
    assert (tmp_path / "out" / "result.txt").read_text() == "result\n"


def test_working_directory_is_sent_without_ignored_files(shared: Stack, tmp_path: Path) -> None:
    for name in ("main.sh", "big.bin", ".meshignore"):
        (tmp_path / name).write_text("*.bin\n" if name == ".meshignore" else "x")
    text = ok(shared.nodes[0], "run", "--", "sh", "-c", "ls -a", cwd=tmp_path)
    assert "main.sh" in text and "big.bin" not in text


def test_job_receives_its_environment_and_name(shared: Stack) -> None:
    arguments = ("--no-workdir", "--name", "greeting", "--env", "WORD=hello", "--env", "EMPTY=")
    assert ok(shared.nodes[0], "run", *arguments, "--", "sh", "-c", 'echo "$WORD[$EMPTY]"') == "hello[]\n"
    assert ok(shared.nodes[0], "logs", "greeting") == "hello[]\n"


def test_submit_prints_only_the_id_or_json(shared: Stack) -> None:
    done = mesh(shared.nodes[0], "submit", "--no-workdir", "--", "true")
    assert len(done.stdout.split()) == 1 and " logs -f" in done.stderr
    answer = json.loads(ok(shared.nodes[0], "submit", "--no-workdir", "--json", "--", "true"))
    assert answer["schema"] == 1 and answer["witnesses"] == 3 and answer["warning"] == ""


def test_ps_shows_running_jobs_and_with_all_finished_jobs(shared: Stack) -> None:
    job = submit_count(shared.nodes[0], 2000, "--name", "long")
    assert running_with_checkpoint(shared.nodes[1], job)["checkpoint"]["step"] >= 10
    state = until(lambda: (s := job_state(shared.nodes[1], job))["of"] and s, "the progress to be reported")
    assert state["of"] == 2000 and state["step"] >= 10
    table = ok(shared.nodes[1], "ps")
    assert job[:8] in table and "running" in table and "/2000" in table
    ok(shared.nodes[1], "cancel", job)
    assert job[:8] not in ok(shared.nodes[1], "ps") and job[:8] in ok(shared.nodes[1], "ps", "-a")


def test_logs_follow_a_remote_job_until_its_end(shared: Stack) -> None:
    job = submit_count(shared.nodes[0], 60)
    state = until(lambda: (s := job_state(shared.nodes[0], job)).get("state") == "running" and s, "the job to run")
    elsewhere = next(node for node in shared.nodes if node.nick != state["node"])
    done = mesh(elsewhere, "logs", "-f", job)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("attempt 0 on ") and lines[-1] == f"digest {count_digest(60)}" and len(lines) == 2
    assert ok(elsewhere, "logs", "--attempt", "0", "-f", job) == done.stdout
    assert mesh(elsewhere, "logs", "--attempt", "1", job).returncode == 4


def test_cancel_ends_a_job_from_any_node_of_its_user(shared: Stack) -> None:
    job = submit_count(shared.nodes[0], 100_000)
    running_with_checkpoint(shared.nodes[0], job)
    assert "cancelled" in ok(shared.nodes[3], "cancel", job[:12])
    assert finished(shared.nodes[1], job)["outcome"]["kind"] == "cancelled"
    finished(shared.nodes[2], job)  # wait until this node knows the outcome
    assert "already" in ok(shared.nodes[2], "cancel", job)
    until(lambda: not any(row["jobs"] for row in read(shared.nodes[0], "nodes")["nodes"]), "the guest to be gone")


def test_why_ranks_all_nodes_with_the_same_reasons_on_each_node(shared: Stack) -> None:
    job = submit_count(shared.nodes[0], 100_000, "--name", "explained")
    state = running_with_checkpoint(shared.nodes[0], job)
    text = ok(shared.nodes[0], "why", job)
    assert f"is running on {state['node']}" in text and "attempt 0" in text and "SURVIVAL" in text

    def ranking(node: object) -> list[str]:
        return [row["nick"] for row in read(node, "why", job)["candidates"]]  # type: ignore[arg-type]

    until(lambda: len({tuple(ranking(node)) for node in shared.nodes}) == 1, "all nodes to give the same ranking")
    assert sorted(ranking(shared.nodes[0])) == ["node1", "node2", "node3", "node4"]
    assert ranking(shared.nodes[0])[0] == state["node"]

    decision = until(lambda: read(shared.nodes[2], "why", job)["decision"], "the signed decision to be shown")
    assert decision["order"][0]["nick"] == state["node"] and decision["rule"] == 2 and len(decision["order"]) == 4
    assert f"placed attempt 0 on {state['node']} (ranked first of" in ok(shared.nodes[0], "why", job)
    assert "it could start now" in ok(shared.nodes[1], "why", job, "--would")
    assert read(shared.nodes[1], "why", job, "--would")["would"] == []
    ok(shared.nodes[0], "cancel", job)


def test_checkpoints_are_stored_on_the_nodes_that_the_user_chose(shared: Stack) -> None:
    job = submit_count(shared.nodes[0], 100_000, "--ckpt-to", "node2,node4")
    state = running_with_checkpoint(shared.nodes[0], job)
    chosen = {"node2", "node4"} - {state["node"]}

    def there() -> bool:
        """Return True if the chosen nodes hold the checkpoint. Another node may temporarily replace a slow one."""
        holders = set(job_state(shared.nodes[0], job)["checkpoint"]["holders"])
        return holders == chosen if len(chosen) == 2 else holders >= chosen

    until(there, "the checkpoints to be on the chosen nodes")
    ok(shared.nodes[0], "cancel", job)


def test_mesh_unaware_program_is_checkpointed_while_its_files_are_stable(shared: Stack) -> None:
    script = "mkdir -p ckpts; echo weights > ckpts/model.pt; sleep 600"
    job = ok(shared.nodes[0], "submit", "--no-workdir", "--ckpt", "ckpts", "--", "sh", "-c", script).strip()
    state = until(lambda: (s := job_state(shared.nodes[0], job)).get("checkpoint") and s, "a checkpoint")
    assert state["checkpoint"]["seq"] == 1 and len(state["checkpoint"]["holders"]) == 2
    ok(shared.nodes[0], "cancel", job)


def test_failed_job_is_retried_within_its_budget(shared: Stack) -> None:
    done = mesh(shared.nodes[0], "run", "--no-workdir", "--retries", "1", "--", "sh", "-c", "echo try; exit 3")
    assert done.returncode == 3 and done.stdout == "try\ntry\n"


def test_missing_command_fails_at_once_with_a_message(shared: Stack) -> None:
    done = mesh(shared.nodes[0], "run", "--no-workdir", "--retries", "5", "--", "no-such-command")
    assert done.returncode == 127 and "no-such-command" in done.stderr


def test_events_show_the_history_of_the_node(shared: Stack) -> None:
    job = submit_count(shared.nodes[0], 20)
    state = finished(shared.nodes[0], job)
    host = shared.node(state["attempts"][0]["node"])
    texts = [event["text"] for event in read(host, "job", "events", job)["events"]]
    assert any(text.startswith("running") for text in texts) and any("committed" in text for text in texts)
    until(
        lambda: ok(host, "job", "events", job).count("\n") == len(read(host, "job", "events", job)["events"]),
        "as many lines as events",
    )


def test_nodes_and_status_show_the_lent_resources(shared: Stack) -> None:
    def all_lend() -> list[dict[str, Any]]:
        """Return the rows once all slots are free, after the effects of earlier tests."""
        rows: list[dict[str, Any]] = read(shared.nodes[0], "nodes")["nodes"]
        return rows if all(row["lending"] and row["slots_free"] == 4 for row in rows) else []

    rows = until(all_lend, "all nodes to lend all their slots")
    assert sorted(row["nick"] for row in rows) == ["node1", "node2", "node3", "node4"]
    assert all(row["state"] == "alive" and row["engines"] == ["process"] for row in rows)
    assert [row["nick"] for row in rows if row["me"]] == ["node1"]
    table = ok(shared.nodes[0], "nodes")
    assert "node1 *" in table and "4/4 slots" in table
    status = read(shared.nodes[0], "status")
    assert status["schema"] == 1 and status["alive"] == 4 and status["mesh"] == "devstack"
    assert "no sandbox" in status["engines"]["process"]["isolation"]
    shown = ok(shared.nodes[0], "status")
    assert "4 nodes alive" in shown and "engine process: ready" in shown and "no sandbox" in shown
    with shared.nodes[0].where.log.open("a") as log:
        log.write(
            "a long\x1b[2J line " * 50_000 + "\nbefore\nthe last line\n"
        )  # a daemon that is well may have written none
    shown = ok(shared.nodes[0], "status", "--log")
    assert shown.endswith("\nbefore\nthe last line\n") and "\x1b" not in shown and len(shown) < 1 << 17


def interrupted(shared: Stack, times: int) -> tuple[subprocess.Popen[str], str, str]:
    process = start(shared.nodes[0], "run", "--ckpt", "ckpts", "--", sys.executable, "count.py", "100000")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("attempt 0")
    heard = ""
    for number in range(times):
        process.send_signal(signal.SIGINT)
        if number == 0:
            while "Ctrl-C once more" not in heard:
                line = process.stderr.readline()
                assert line, heard
                heard += line
    rest = process.stderr.read()
    process.wait(WAIT_S)
    process.stdout.close()
    process.stderr.close()
    return process, heard, rest


def test_first_ctrl_c_leaves_the_job_running(shared: Stack) -> None:
    process, heard, _ = interrupted(shared, 1)
    job = heard.split("job ")[1].split()[0]
    full = next(row["job"] for row in read(shared.nodes[0], "ps")["jobs"] if row["job"].startswith(job))
    assert process.returncode == 130 and job_state(shared.nodes[0], full)["state"] == "running"
    ok(shared.nodes[0], "cancel", full)


@pytest.mark.parametrize("attached", [False, True])
def test_closed_output_leaves_the_job_running_and_says_so(shared: Stack, attached: bool) -> None:
    node, program = shared.nodes[0], "while :; do echo x; sleep 0.1; done"
    order = ["run", "--no-workdir", "--", "sh", "-c", program]
    if attached:
        order = ["job", "attach", ok(node, "submit", *order[1:]).strip()]
    process = start(node, *order)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "x\n"
    process.stdout.close()
    heard = process.stderr.read()
    again = suggestion(node, "logs -f ")
    assert process.wait(WAIT_S) == 141 and f"mesh: the job goes on: {again}" in heard
    assert "Traceback" not in heard and "Exception" not in heard
    short = heard.split(again)[1].split("`")[0]
    (row,) = read(node, "ps", short)["jobs"]
    assert row["state"] == "running"
    ok(node, "cancel", row["job"])
    process.stderr.close()


def test_run_warns_of_input_that_no_job_gets(shared: Stack, tmp_path: Path) -> None:
    warned = "mesh: a job has no standard input"
    (tmp_path / "input").write_text("hello\n")
    order, full = command(shared.nodes[0], "run", "--no-workdir", "--", "cat"), subprocess.PIPE
    for given, expected in ({"input": "hello\n"}, True), ({"input": ""}, False), ({"stdin": subprocess.DEVNULL}, False):
        done = subprocess.run(order, stdout=full, stderr=full, text=True, timeout=WAIT_S, check=False, **given)
        assert (done.returncode, done.stdout, warned in done.stderr) == (0, "", expected)
    with (tmp_path / "input").open() as file:
        done = subprocess.run(order, stdin=file, stdout=full, stderr=full, text=True, timeout=WAIT_S, check=False)
    assert warned in done.stderr and done.returncode == 0


def test_wait_exits_with_the_first_nonzero_code(shared: Stack) -> None:
    node = shared.nodes[0]
    good = ok(node, "submit", "--no-workdir", "--", "true").strip()
    bad = ok(node, "submit", "--no-workdir", "--", "sh", "-c", "exit 7").strip()
    done = mesh(node, "wait", good, bad)
    assert done.returncode == 7 and f"{good[:8]} done" in done.stdout and f"{bad[:8]} failed" in done.stdout
    assert mesh(node, "wait", good).returncode == 0
    slow = ok(node, "submit", "--no-workdir", "--", "sleep", "60").strip()
    late = mesh(node, "wait", slow, "--timeout", "0.5s", "--json")
    assert late.returncode == 124 and json.loads(late.stdout)["jobs"][0]["outcome"] is None
    ok(node, "cancel", slow)
    assert mesh(node, "wait", slow).returncode == 125


def test_move_sends_a_job_to_the_chosen_node_without_losing_steps(shared: Stack, tmp_path: Path) -> None:
    user = shared.nodes[0]
    job = submit_endless(user, tmp_path / "end")
    before = running_with_checkpoint(user, job)
    there = next(node.nick for node in shared.nodes if node.nick not in {user.nick, before["node"]})
    assert "already" in mesh(user, "job", "migrate", job, "--to", before["node"]).stderr
    told = ok(user, "job", "migrate", job, "--to", there)
    assert f"left {before['node']} and runs on {there} from step" in told
    running_with_checkpoint(user, job)
    (tmp_path / "end").touch()
    end = finished(user, job)
    assert end["state"] == "done" and exact(user, job)
    assert [attempt["node"] for attempt in end["attempts"]] == [before["node"], there]
    assert end["attempts"][0]["reason"] == "vacated: moved by its user"
    assert end["attempts"][0]["last_step"] == end["attempts"][1]["resumed_step"], "no step may run twice"
    assert "does not run now" in mesh(user, "job", "migrate", job).stderr


def test_move_refuses_a_job_without_checkpoints_by_default(shared: Stack) -> None:
    node = shared.nodes[0]
    job = ok(node, "submit", "--no-workdir", "--", "sleep", "60").strip()
    until(lambda: job_state(node, job).get("state") == "running", "the job to run")
    refused = mesh(node, "job", "migrate", job)
    assert refused.returncode == 1 and "start over" in refused.stderr and "--force" in refused.stderr
    moved = json.loads(ok(node, "job", "migrate", job, "--force", "--json"))
    assert moved["moved"] and moved["state"]["attempts"][-1]["node"] != moved["from"]
    ok(node, "cancel", job)


def test_dependent_job_waits_for_the_first_job_and_fails_with_it(shared: Stack) -> None:
    node, other = shared.nodes[:2]
    first = ok(node, "submit", "--no-workdir", "--", "sleep", "2").strip()
    second = ok(other, "submit", "--no-workdir", "--after", first, "--", "true").strip()
    until(lambda: job_state(node, second).get("detail") == f"after {first[:8]}", "the job to report its dependency")
    assert mesh(node, "wait", second).returncode == 0 and job_state(node, first)["state"] == "done"
    slow = ok(node, "submit", "--no-workdir", "--", "sleep", "60").strip()
    third = ok(node, "submit", "--no-workdir", "--after", slow, "--after", first, "--", "true").strip()
    report = ok(other, "submit", "--no-workdir", "--after", f"any:{slow}", "--", "true").strip()
    until(lambda: job_state(node, report).get("detail") == f"after {slow[:8]}", "the report to wait, too")
    ok(node, "cancel", slow)
    assert "which it comes after, was cancelled" in finished(node, third)["outcome"]["detail"]
    assert mesh(node, "wait", report).returncode == 0, "it runs however the other ends"
    refused = mesh(node, "submit", "--no-workdir", "--after", slow, "--", "true")
    assert refused.returncode == 1 and "not well" in refused.stderr
    assert mesh(node, "run", "--no-workdir", "--after", f"any:{slow}", "--", "true").returncode == 0


def test_array_is_addressed_by_one_name(shared: Stack) -> None:
    node, other = shared.nodes[:2]
    command = 'test "$MESH_ARRAY_INDEX" != 6 && echo "$MESH_ARRAY_INDEX of $MESH_ARRAY_COUNT"'
    array = ok(node, "submit", "--no-workdir", "--array", "2-6:2%2", "--", "sh", "-c", command).strip()
    done = mesh(other, "wait", array)
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 3
    rows = read(other, "ps", array)["jobs"]
    assert [(row["array"]["index"], row["state"]) for row in rows] == [(2, "done"), (4, "done"), (6, "failed")]
    first, second = (row["attempts"][0] for row in rows[1:])
    assert second["started_unix_ms"] >= min(row["attempts"][0]["ended_unix_ms"] for row in rows[:2]), (
        "at most two elements may run at a time"
    )
    assert first["number"] == 0
    assert ok(other, "logs", f"{array[:10]}_4") == "4 of 3\n"
    ambiguous = mesh(node, "logs", array)
    assert ambiguous.returncode == 2 and f"3 jobs, 2, 4, 6: name one of them, as {array[:8]}_2" in ambiguous.stderr
    gap = mesh(node, "submit", "--no-workdir", "--array", "1,3", "--batch", "2", "--", "true")
    assert gap.returncode == 2 and "without gaps, as 1-100" in gap.stderr
    many = mesh(node, "submit", "--no-workdir", "--array", "1-1500", "--", "true")
    assert many.returncode == 2 and "--batch 2 makes larger jobs" in many.stderr
    slow = ok(node, "submit", "--no-workdir", "--array", "1-3", "--", "sleep", "60").strip()
    cancelled = ok(node, "cancel", slow)
    assert [f"job {slow[:8]}_{index} cancelled" in cancelled for index in (1, 2, 3)] == [True] * 3
    follower = mesh(node, "submit", "--no-workdir", "--after", array, "--", "true")
    assert follower.returncode == 1 and "not well" in follower.stderr


def test_batch_of_an_array_runs_its_indices_in_one_job(shared: Stack, tmp_path: Path) -> None:
    node, other = shared.nodes[:2]
    command = 'echo "$MESH_ARRAY_INDEX of $MESH_ARRAY_COUNT"; touch "$MESH_OUT_DIR/$MESH_ARRAY_INDEX"; '
    command += 'test "$MESH_ARRAY_INDEX" != 9'
    order = ("submit", "--no-workdir", "--array", "5-9", "--batch", "3", "--out", str(tmp_path))
    array = ok(node, *order, "--", "sh", "-c", command).strip()
    assert mesh(other, "wait", array).returncode == 1
    rows = read(other, "ps", array)["jobs"]
    assert [(row["array"]["label"], row["state"]) for row in rows] == [("5-7", "done"), ("8-9", "failed")]
    assert f"{array[:8]}_8-9" in ok(other, "ps", array)
    assert ok(other, "logs", f"{array[:8]}_6") == "5 of 5\n6 of 5\n7 of 5\n"
    assert "mesh: index 9 ended with exit code 1" in ok(other, "logs", f"{array[:8]}_8-9")
    until(lambda: {file.name for file in tmp_path.glob("5-7/*")} == {"5", "6", "7"}, "the files of the first to arrive")
    home = tmp_path / "home"
    job = ok(
        node, "submit", "--no-workdir", "--out", str(home), "--", "sh", "-c", 'echo 1 > "$MESH_OUT_DIR/one"'
    ).strip()
    assert mesh(node, "wait", job).returncode == 0 and (home / "one").read_text() == "1\n", "wait is for the files, too"


def test_deadline_and_retried_exit_codes(shared: Stack) -> None:
    node = shared.nodes[0]
    late = ok(node, "submit", "--no-workdir", "--deadline", "2s", "--", "sleep", "60").strip()
    assert "deadline has passed" in finished(node, late)["outcome"]["detail"]
    retry = ("--retries", "3", "--retry-on", "9", "--no-workdir", "--")
    job = ok(node, "submit", *retry, "sh", "-c", 'exit "$((9 - MESH_ATTEMPT))"').strip()
    state = finished(node, job)
    assert [attempt["exit_code"] for attempt in state["attempts"]] == [9, 8] and state["outcome"]["exit_code"] == 8


def test_second_ctrl_c_cancels_the_job(shared: Stack) -> None:
    process, heard, rest = interrupted(shared, 2)
    assert process.returncode == 130 and "cancelled" in rest
    job = heard.split("job ")[1].split()[0]
    full = next(row["job"] for row in read(shared.nodes[0], "ps", "-a")["jobs"] if row["job"].startswith(job))
    assert finished(shared.nodes[0], full)["outcome"]["kind"] == "cancelled"


def test_job_saves_on_checkpoint_requests(shared: Stack, tmp_path: Path) -> None:
    """Two jobs: one asks for a checkpoint each second; for the other, the automatic interval has not passed yet."""
    for source in (ROOT / "mesh" / "job.py", PROJECT / "scheduled.py"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    node = shared.nodes[0]
    order = ("submit", "--ckpt", "ckpts", "--ckpt-mode", "rename")
    program = ("--", sys.executable, "scheduled.py", "20000")
    timed = ok(node, *order, "--ckpt-every", "1s", *program, cwd=tmp_path).strip()
    ruled = ok(node, *order, "--ckpt-every", "auto", *program, cwd=tmp_path).strip()

    def third() -> dict[str, Any] | None:
        """Return the state once the job has three checkpoints and its host has published the next due time."""
        state = job_state(node, timed)
        return state if (state["checkpoint"] or {}).get("seq", 0) >= 3 and state["next_checkpoint"] else None

    state = until(third, "three checkpoints and the next due time")
    assert state["next_checkpoint"]["why"] == "asked" and state["next_checkpoint"]["interval_s"] < 10
    assert "as its user asks" in ok(node, "describe", timed)
    due = until(lambda: job_state(node, ruled).get("next_checkpoint"), "the due time of the automatic interval")
    assert due["why"] == "hazard" and due["interval_s"] > 60 and 0 < due["loss_s"] < due["interval_s"]
    assert job_state(node, ruled)["checkpoint"] is None, "no save may be requested before the interval"
    for job in (timed, ruled):
        ok(node, "cancel", job)
        finished(node, job)
    saved = [line for line in ok(node, "logs", timed).splitlines() if line.startswith("saved")]
    assert len(saved) == len(set(saved)) >= 3 and "saved" not in ok(node, "logs", ruled)
    wrong = mesh(node, "submit", "--ckpt-every", "auto", "--", "true")
    assert wrong.returncode == 2 and "--ckpt DIR" in wrong.stderr


def test_job_runs_where_its_user_wants_it(shared: Stack) -> None:
    user, other = shared.nodes[:2]
    rest = [node.nick for node in shared.nodes if node is not other]
    for options, wanted in [
        (("--on", other.nick), {other.nick}),
        (("--not-on", ",".join(rest)), {other.nick}),
        (("--on", "mine", "--not-on", other.nick), set(rest)),
    ]:
        shown = ok(user, "run", "--no-workdir", *options, "--", "sh", "-c", "echo $MESH_NODE")
        assert shown.splitlines()[-1] in wanted, options
    job = ok(user, "submit", "--no-workdir", "--on", other.nick, "--", "true").strip()
    assert read(user, "describe", job)["asked"]["on"] == [other.nick]
    unknown = mesh(user, "run", "--no-workdir", "--on", "nowhere", "--", "true")
    assert unknown.returncode != 0 and "nowhere" in unknown.stderr
    never = mesh(user, "run", "--no-workdir", "--on", other.nick, "--not-on", other.nick, "--", "true")
    assert never.returncode != 0 and "--not-on" in never.stderr, never.stderr


def test_job_of_a_revoked_machine_runs_on_until_its_user_cancels_it(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    """A lost laptop must not cost its user the work; a stolen one's jobs end by an order of the same user."""
    founder, host, lost = make_stack(3).nodes
    job = submit_endless(lost, tmp_path / "end", "--on", host.nick)
    running_with_checkpoint(founder, job)
    ok(founder, "member", "revoke", "--yes", lost.nick)
    gone = lambda: lost.nick not in {row["nick"] for row in read(host, "nodes")["nodes"] if row["state"] == "alive"}  # noqa: E731
    until(gone, "its host to hear of the revocation")
    step = job_state(host, job)["step"] or 0
    until(lambda: (job_state(founder, job)["step"] or 0) > step, "the job to go on")
    assert job_state(founder, job)["state"] == "running"
    ok(founder, "cancel", job)
    assert finished(founder, job)["outcome"]["kind"] == "cancelled"
