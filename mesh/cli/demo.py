"""`mesh debug demo`: a training on real daemons loses three of its five nodes and ends with the same weights.

One node leaves cleanly (SIGTERM), the next is killed (SIGKILL), then the node that submitted the job leaves too. At the end the
weights are compared, by SHA-256, with those of an undisturbed run of the same program.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from mesh.cli.output import say, table
from mesh.cli.signals import cleaned_up
from mesh.daemon.stack import Stack, StackNode
from mesh.util.errors import ExitCode, MeshError
from mesh.util.text import plural

NODES = 5
LIMIT_S = 600.0  # it takes less than a minute on two idle cores, and three minutes on half a loaded core
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "train_digits.py"
POLL_S = 0.1
CHECKPOINT_LINES_EVERY_S = 4.0


@click.command()
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), metavar="FILE", help="Write the results to FILE as JSON."
)
@click.option("--engine", type=click.Choice(["process", "docker"]), default="process", show_default=True)
@click.option("--epochs", type=click.IntRange(5, 10_000), default=40, show_default=True, help="Length of the training.")
def demo(json_file: str | None, engine: str, epochs: int) -> None:
    """Watch a training survive three departures, and compare its result with an undisturbed run."""
    if not EXAMPLE.exists():
        raise MeshError("the demo runs from a checkout (docs/examples/train_digits.py): see README.md")
    for package in ("numpy", "sklearn"):
        if find_spec(package) is None:
            raise MeshError(f"the demo needs {package}, which is not installed: pip install numpy scikit-learn")
    facts = Demo(engine, epochs).run()
    if json_file is not None:
        Path(json_file).write_text(json.dumps(facts, indent=2) + "\n")
    if not facts["passed"]:
        sys.exit(int(ExitCode.ERROR))


class Demo:
    def __init__(self, engine: str, epochs: int) -> None:
        self._engine, self._epochs = engine, epochs
        self._begun = time.monotonic()
        self._committed: dict[int, set[int]] = {}  # checkpoints seen, by attempt
        self._event_ids: dict[str, int] = {}
        self._seen: set[tuple[str, str, int]] = set()
        self._last_steps: dict[int, int] = {}
        self._state: dict[str, Any] = {}
        self._quiet_until = 0.0

    def run(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {"slots": 1, "engines": [self._engine], "grace_s": 10.0}
        with cleaned_up() as cleanup:
            image = cleanup.enter_context(self._image())
            self._say(f"starting {NODES} nodes on this machine; they find each other and form a mesh")
            stack = self._stack = cleanup.enter_context(Stack(NODES, overrides=overrides))
            stack.start_all()
            submitter = stack.nodes[-1]
            # Its own slot stays free of the job, so that it can leave without being the job's host.
            submitter.client.post("/v1/pause", {"paused": True})
            self._wait(lambda: self._paused(submitter), "the submitter's pause")
            job = self._submit(submitter, image)
            self._say(
                f"{submitter.nick} submits job {job[:8]}: a training of {self._epochs} epochs that saves a checkpoint "
                "after each (docs/examples/train_digits.py)"
            )
            self._say("for comparison, the same training runs undisturbed outside the mesh")
            undisturbed = cleanup.enter_context(self._undisturbed(stack.directory, image))
            digest, output = self._departures(submitter, job)
            state = self._read(job)
            self._say("comparing the weights with those of the undisturbed training")
            expected = self._digest_of(undisturbed)
        return self._report(state, digest, output, expected)

    # --- the story

    def _departures(self, submitter: StackNode, job: str) -> tuple[str, str]:
        first = self._host(job, min_commits=2)
        self._say(f"1st departure: {first.nick} leaves cleanly (SIGTERM), so the job can save before it moves")
        self._signal(first, signal.SIGTERM)
        second = self._host(job, min_commits=2, after=first)
        self._remember_step(second, job)
        self._say(f"2nd departure: {second.nick} is killed (SIGKILL), as in a power failure")
        self._signal(second, signal.SIGKILL)
        self._remember_step(second, job)
        self._host(job, min_commits=1, after=second)
        self._say(f"3rd departure: {submitter.nick}, the submitter, leaves too; no node is in charge of the mesh")
        self._signal(submitter, signal.SIGTERM)
        self._say("the job continues without its submitter; waiting for its end")
        self._wait(lambda: self._read(job).get("outcome") is not None, "the job's end")
        reader = self._reader()
        target = self._stack.directory / "results"
        reader.client.post(f"/v1/jobs/{job}/pull", {"destination": str(target)}, timeout_s=60)
        digest = hashlib.sha256((target / "weights.bin").read_bytes()).hexdigest()
        return digest, self._output(job)

    def _submit(self, submitter: StackNode, image: str | None) -> str:
        order = {
            "argv": [sys.executable if image is None else "python", EXAMPLE.name, "--epochs", str(self._epochs)],
            "name": "digits",
            "workdir": str(EXAMPLE.parent),
            "ckpt": "ckpts",
            "ckpt_mode": "rename",
            "image": image,
            "engine": self._engine,
        }
        return str(submitter.client.post("/v1/jobs", order, timeout_s=60)["job"])

    @contextmanager
    def _undisturbed(self, directory: Path, image: str | None) -> Iterator[subprocess.Popen[str]]:
        """Run the same program without a mesh, at the same time: on two cores that costs no time."""
        command = [sys.executable, str(EXAMPLE), "--epochs", str(self._epochs)]
        if image is not None:
            mount = ["-v", f"{EXAMPLE.parent}:/mesh/work:ro", "-w", "/mesh/work", "--network", "none"]
            command = ["docker", "run", "--rm", *mount, image, "python", EXAMPLE.name, "--epochs", str(self._epochs)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd=directory
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    @staticmethod
    def _digest_of(process: subprocess.Popen[str]) -> str:
        output, errors = process.communicate(timeout=LIMIT_S)
        if process.returncode != 0:
            raise MeshError(f"the undisturbed training failed: {errors[-300:]}")
        return output.split("sha256 ")[1].split()[0]

    @contextmanager
    def _image(self) -> Iterator[str | None]:
        if self._engine != "docker":
            yield None
            return
        import docker
        import docker.errors

        from mesh.cli.demo_image import demo_image

        self._say("making a container image of this Python, numpy and the digits; it is removed at the end")
        try:
            client = docker.from_env()
        except docker.errors.DockerException as error:
            raise MeshError(f"no Docker engine answers: start it, or leave out --engine docker ({error})") from error
        with TemporaryDirectory(prefix="mesh-") as workspace, demo_image(client, Path(workspace)) as name:
            yield name

    # --- watching

    def _host(self, job: str, *, min_commits: int, after: StackNode | None = None) -> StackNode:
        """Wait until the job runs, on another node than `after`, and has committed so many checkpoints there."""

        def ready() -> bool:
            state = self._read(job)
            if state.get("outcome") is not None:
                reason = state["detail"] or state["state"]
                raise MeshError(f"the training ended too early: {reason}\n{self._output(job)[-1000:]}")
            if state.get("state") != "running" or (after is not None and state.get("node") == after.nick):
                return False
            attempt, commit = state["attempts"][-1], state["checkpoint"]
            if commit is None or (commit["step"] or 0) <= (attempt["resumed_step"] or 0):
                return False
            seen = self._committed.setdefault(attempt["number"], set())
            seen.add(commit["seq"])
            return len(seen) >= min_commits

        self._wait(ready, f"the job to run{f' on another node than {after.nick}' if after else ''}")
        return self._stack.node(self._read(job)["node"])

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        while not ready():
            if time.monotonic() - self._begun > LIMIT_S:
                raise MeshError(f"the demo waited too long for {what}")
            self._show_news()
            time.sleep(POLL_S)
        self._show_news()

    def _read(self, job: str) -> dict[str, Any]:
        self._state = self._stack.job(job)
        return self._state

    @staticmethod
    def _paused(submitter: StackNode) -> bool:
        rows = submitter.client.get("/v1/nodes")["nodes"]
        return any(row["me"] and not row["lending"] for row in rows)

    def _reader(self) -> StackNode:
        return next(node for node in self._stack.nodes if node.running)

    def _output(self, job: str) -> str:
        return b"".join(self._reader().client.stream(f"/v1/jobs/{job}/log")).decode(errors="replace")

    def _signal(self, node: StackNode, number: signal.Signals) -> None:
        assert node.process is not None
        os.kill(node.process.pid, number)
        if number == signal.SIGKILL:
            node.process.wait()
            return
        self._wait(lambda: not node.running, f"{node.nick} to leave")

    def _remember_step(self, node: StackNode, job: str) -> None:
        """Note the step that the guest of a killed node had reached, from its own disk: no other node knows it exactly."""
        for path in (node.where.jobs / job).glob("*/ctl/progress.json"):
            try:
                step = int(json.loads(path.read_text())["step"])
            except (OSError, ValueError, KeyError):
                continue
            if self._state.get("attempts"):
                self._last_steps[self._state["attempts"][-1]["number"]] = step

    # --- printing

    def _show_news(self) -> None:
        """Print the new events that matter here, each once."""
        for node in self._stack.nodes:
            if not node.running:
                continue
            try:
                events = node.client.get(f"/v1/events?after={self._event_ids.get(node.nick, 0)}", timeout_s=5)["events"]
            except MeshError:
                continue
            for event in events:
                self._event_ids[node.nick] = event["id"]
                name = event["job"], event["node"], event["seq"]  # witnesses keep the events of other nodes, too
                if event["job"] is not None and name not in self._seen and (text := self._news(event)):
                    self._say(text, event["actor"])
                self._seen.add(name)

    def _news(self, event: dict[str, Any]) -> str:
        match event["kind"], event["new"]:
            case "state", "running":
                self._quiet_until = 0.0
                return "resumes the job from its last checkpoint" if event["attempt"] else "runs the job"
            case "checkpoint", _ if time.monotonic() >= self._quiet_until:  # several come in a second
                self._quiet_until = time.monotonic() + CHECKPOINT_LINES_EVERY_S
                return f"checkpoint {event['number']} saved at step {event['step']}, with copies {event['reason']}"
            case "end", outcome:
                return f"the job has ended: {outcome}"
        return ""

    def _say(self, text: str, who: str = "demo") -> None:
        say(f"{time.monotonic() - self._begun:6.1f} s  {who:<6}  {text}")

    def _report(self, state: dict[str, Any], digest: str, output: str, undisturbed: str) -> dict[str, Any]:
        attempts = self._attempt_facts(state)
        accuracies = [line.split()[1] for line in output.splitlines() if line.startswith("accuracy ")]
        facts: dict[str, Any] = {
            "schema": 1,
            "engine": self._engine,
            "attempts": attempts,
            "accuracy": float(accuracies[-1]) if accuracies else None,
            "digest": digest,
            "undisturbed_digest": undisturbed,
            "passed": digest == undisturbed and len(attempts) >= 3,
            "seconds": round(time.monotonic() - self._begun, 1),
        }
        say()
        rows = [
            [
                attempt["node"],
                attempt["reason"],
                "-" if attempt["steps_lost"] is None else str(attempt["steps_lost"]),
                "-" if attempt["downtime_s"] is None else f"{attempt['downtime_s']:.1f} s",
            ]
            for attempt in attempts
        ]
        table(["RAN ON", "UNTIL", "STEPS REPEATED", "RESUMED AFTER"], rows)
        moves = plural(len(attempts) - 1, "move")
        say()
        say(f"accuracy on the test images: {facts['accuracy']}")
        say(f"{f'SHA-256 of the weights after {moves}:':<41} {digest}")
        say(f"SHA-256 of the weights without a mesh:    {undisturbed}")
        say(f"{'EQUAL' if facts['passed'] else 'NOT EQUAL'} after {facts['seconds']:.0f} s")
        return facts

    def _attempt_facts(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return for each attempt why it ended, how long the job then stood still, and how many steps it repeated."""
        facts = []
        attempts = state["attempts"]
        for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
            downtime = lost = None
            if following is not None:
                downtime = max(0.0, (following["running_unix_ms"] - attempt["ended_unix_ms"]) / 1000)
                reached = self._last_steps.get(attempt["number"], attempt["last_step"])
                lost = max(0, (reached or 0) - (following["resumed_step"] or 0))
            facts.append(
                {"node": attempt["node"], "reason": attempt["reason"], "downtime_s": downtime, "steps_lost": lost}
            )
        return facts
