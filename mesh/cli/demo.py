"""`mesh demo`: a real training on real daemons, which loses three of its five nodes and must end with the very same weights.

One host leaves in order (SIGTERM), the next is killed (SIGKILL), the node that submitted the job is stopped too. Then the weights
are compared, by SHA-256, with those of an undisturbed run of the same program.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

from mesh.api.errors import ExitCode, MeshError
from mesh.cli.terminal import table
from mesh.stack import Stack, StackNode

NODES = 5
LIMIT_S = 600.0  # the whole of it takes a minute on two cores, three on half a core that others want too; then something is wrong
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "train_digits.py"
POLL_S = 0.1
CHECKPOINTS_TOLD_EVERY_S = 4.0


@click.command()
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), metavar="FILE", help="Write the facts to FILE as JSON."
)
@click.option("--engine", type=click.Choice(["process", "docker"]), default="process", show_default=True)
@click.option("--epochs", type=click.IntRange(5, 10_000), default=75, show_default=True, help="Length of the training.")
def demo(json_file: str | None, engine: str, epochs: int) -> None:
    """Watch a training survive three departures, and check its result. Takes about a minute."""
    if not EXAMPLE.exists():
        raise MeshError("the demo runs from a checkout (docs/examples/train_digits.py): see README.md")
    for package in ("numpy", "sklearn"):
        if find_spec(package) is None:
            raise MeshError("the demo needs numpy and scikit-learn: pip install 'campus-mesh[demo]'")
    show = Demo(engine, epochs)
    facts = show.run()
    if json_file is not None:
        Path(json_file).write_text(json.dumps(facts, indent=2) + "\n")
    if not facts["passed"]:
        sys.exit(int(ExitCode.ERROR))


class Demo:
    def __init__(self, engine: str, epochs: int) -> None:
        self._engine, self._epochs = engine, epochs
        self._begun = time.monotonic()
        self._told: dict[str, Any] = {}
        self._event_ids: dict[str, int] = {}
        self._seen: set[tuple[str, str, int]] = set()
        self._last_steps: dict[int, int] = {}
        self._live = _Live() if sys.stdout.isatty() else None
        self._stack: Stack | None = None
        self._quiet_until = 0.0

    def run(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {"slots": 1, "engines": [self._engine], "grace_s": 10.0}
        with ExitStack() as cleanup:
            if self._live is not None:
                cleanup.callback(self._live.close)
            image = cleanup.enter_context(self._image())
            stack = self._stack = cleanup.enter_context(Stack(NODES, overrides=overrides))
            self._say(f"starting {NODES} daemons; they find each other by mDNS on loopback")
            stack.start_all()
            self._say("all see each other: " + ", ".join(node.nick for node in stack.nodes))
            submitter = stack.nodes[-1]
            # The submitter only submits: its own slot stays out of the way, so that its stop is a third departure.
            submitter.client.post("/v1/pause", {"paused": True})
            self._wait(lambda: self._paused(submitter), "the submitter's pause to spread")
            job = self._submit(submitter, image)
            self._say(
                f"job {job[:8]} submitted on {submitter.nick}: docs/examples/train_digits.py, {self._epochs} epochs"
            )
            digest, out = self._depart(stack, submitter, job)
            state = self._state(stack, job)
            local = self._undisturbed(stack.directory, image)
        return self._report(state, digest, out, local)

    # --- the play

    def _depart(self, stack: Stack, submitter: StackNode, job: str) -> tuple[str, str]:
        first = self._running_on(stack, job, min_commits=2)
        self._say(f"{first.nick} runs it; now {first.nick} leaves in order (SIGTERM)")
        self._signal(first, signal.SIGTERM)
        second = self._running_on(stack, job, min_commits=2, after=first)
        self._remember_step(second, job)
        self._say(f"{second.nick} has taken over; now {second.nick} is killed (SIGKILL)")
        self._signal(second, signal.SIGKILL)
        self._remember_step(second, job)
        third = self._running_on(stack, job, min_commits=1, after=second)
        self._say(f"{third.nick} has taken over; now the submitter, {submitter.nick}, is stopped too (SIGTERM)")
        self._signal(submitter, signal.SIGTERM)
        self._say(f"the job goes on without the node that submitted it; waiting for its {self._epochs} epochs")
        self._wait(lambda: self._state(stack, job).get("outcome") is not None, "the job's end")
        reader = self._reader(stack.nodes)
        target = stack.directory / "results"
        reader.client.post(f"/v1/jobs/{job}/pull", {"destination": str(target)}, timeout_s=60)
        digest = hashlib.sha256((target / "weights.bin").read_bytes()).hexdigest()
        text = b"".join(reader.client.stream(f"/v1/jobs/{job}/log")).decode(errors="replace")
        return digest, text

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
        answer: dict[str, Any] = submitter.client.post("/v1/jobs", order, timeout_s=60)
        return str(answer["job"])

    def _undisturbed(self, directory: Path, image: str | None) -> str:
        """The digest of the same program, run alone."""
        self._say("the same training once more, undisturbed, for comparison")
        command = [sys.executable, str(EXAMPLE), "--epochs", str(self._epochs)]
        if image is not None:
            mount = ["-v", f"{EXAMPLE.parent}:/mesh/work:ro", "-w", "/mesh/work", "--network", "none"]
            command = ["docker", "run", "--rm", *mount, image, "python", EXAMPLE.name, "--epochs", str(self._epochs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
        if done.returncode != 0:
            raise MeshError(f"the undisturbed run failed: {done.stderr[-300:]}")
        return done.stdout.split("sha256 ")[1].split()[0]

    @contextmanager
    def _image(self) -> Iterator[str | None]:
        if self._engine != "docker":
            yield None
            return
        import docker
        import docker.errors

        from mesh.engine.image import demo_image

        self._say("making a container image from this Python, numpy and the digits; it is removed at the end")
        try:
            client = docker.from_env()
        except docker.errors.DockerException as error:
            raise MeshError(
                f"no Docker engine answers here: start one, or leave out --engine docker ({error})"
            ) from error
        with TemporaryDirectory(prefix="mesh-") as workspace, demo_image(client, Path(workspace)) as name:
            yield name

    # --- watching

    def _running_on(self, stack: Stack, job: str, *, min_commits: int, after: StackNode | None = None) -> StackNode:
        """Wait until the job runs (on another node than `after`) and has committed so many checkpoints there."""

        def there() -> bool:
            state = self._state(stack, job)
            if state.get("outcome") is not None:
                log = b"".join(self._reader(stack.nodes).client.stream(f"/v1/jobs/{job}/log")).decode(errors="replace")
                raise MeshError(f"the training ended too early: {state['detail'] or state['state']}\n{log[-1000:]}")
            if state.get("state") != "running" or (after is not None and state.get("node") == after.nick):
                return False
            attempts = state["attempts"]
            resumed = attempts[-1]["resumed_step"] or 0
            commit = state["checkpoint"]
            return commit is not None and (commit["step"] or 0) > resumed and self._commits(state) >= min_commits

        self._wait(there, f"the job to run{f' elsewhere than on {after.nick}' if after else ''}")
        return stack.node(self._state(stack, job)["node"])

    def _commits(self, state: dict[str, Any]) -> int:
        """Checkpoints committed in the present attempt, counted as they are seen."""
        key = f"commits-{state['attempts'][-1]['number']}"
        seen: set[int] = self._told.setdefault(key, set())
        seen.add(state["checkpoint"]["seq"])
        return len(seen)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        while not ready():
            if time.monotonic() - self._begun > LIMIT_S:
                raise MeshError(f"the demo waited too long for {what}")
            self._show_news()
            time.sleep(POLL_S)
        self._show_news()

    def _state(self, stack: Stack, job: str) -> dict[str, Any]:
        self._told["job"] = best = stack.job(job)
        return best

    @staticmethod
    def _paused(submitter: StackNode) -> bool:
        rows = submitter.client.get("/v1/nodes")["nodes"]
        return any(row["me"] and not row["lending"] for row in rows)

    @staticmethod
    def _reader(nodes: list[StackNode]) -> StackNode:
        return next(node for node in nodes if node.running)

    def _signal(self, node: StackNode, number: signal.Signals) -> None:
        assert node.process is not None
        os.kill(node.process.pid, number)
        self._told[f"gone {node.nick}"] = number.name
        if number == signal.SIGKILL:
            node.process.wait()
            return
        self._wait(lambda: not node.running, f"{node.nick} to leave")

    def _remember_step(self, node: StackNode, job: str) -> None:
        """How far the guest of a node that is being killed had come, from its own disk: nobody else can know exactly."""
        state = self._told.get("job", {})
        for path in (node.where.jobs / job).glob("*/ctl/progress.json"):
            try:
                step = int(json.loads(path.read_text())["step"])
            except (OSError, ValueError, KeyError):
                continue
            if state.get("attempts"):
                self._last_steps[state["attempts"][-1]["number"]] = step

    # --- telling

    def _show_news(self) -> None:
        """New events of the nodes that run, one line each; a live table where there is a terminal."""
        assert self._stack is not None
        for node in self._stack.nodes:
            if not node.running:
                continue
            try:
                events = node.client.get(f"/v1/events?after={self._event_ids.get(node.nick, 0)}", timeout_s=5)["events"]
            except MeshError:
                continue
            for event in events:
                self._event_ids[node.nick] = event["id"]
                name = event["job"], event["node"], event["seq"]  # witnesses keep what a runner said, too
                if event["job"] is not None and name not in self._seen and self._is_news(event["text"]):
                    self._say(event["text"], event["actor"])
                self._seen.add(name)
        if self._live is not None:
            self._live.draw(self._stack, self._told.get("job", {}))

    def _is_news(self, text: str) -> bool:
        """Checkpoints come several a second: between other news, one in a while is enough."""
        if not text.startswith("checkpoint "):
            self._quiet_until = 0.0
            return not text.startswith("starting: taking")
        now = time.monotonic()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + CHECKPOINTS_TOLD_EVERY_S
        return True

    def _say(self, text: str, who: str = "demo") -> None:
        line = f"{time.monotonic() - self._begun:6.1f} s  {who:<6}  {text}"
        if self._live is not None:
            self._live.say(line)
        else:
            click.echo(line)

    def _report(self, state: dict[str, Any], digest: str, text: str, undisturbed: str) -> dict[str, Any]:
        attempts = self._attempt_facts(state)
        accuracies = [line.split()[1] for line in text.splitlines() if line.startswith("accuracy ")]
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
        click.echo("")
        rows = [
            [
                str(number),
                attempt["node"],
                attempt["reason"],
                "-" if attempt["downtime_s"] is None else f"{attempt['downtime_s']:.1f} s",
                "-" if attempt["steps_lost"] is None else str(attempt["steps_lost"]),
            ]
            for number, attempt in enumerate(attempts)
        ]
        table(
            ["ATTEMPT", "NODE", "DOWNTIME AFTER", "STEPS LOST", "ENDED"], [[r[0], r[1], r[3], r[4], r[2]] for r in rows]
        )
        click.echo(f"\naccuracy on the test images  {facts['accuracy']}")
        click.echo(f"sha256 after {len(attempts) - 1} moves        {digest}")
        click.echo(f"sha256 of an undisturbed run {undisturbed}")
        click.echo(f"{'EQUAL' if facts['passed'] else 'NOT EQUAL'}, {facts['seconds']:.0f} s in all")
        return facts

    def _attempt_facts(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Per attempt: why it ended, how long the job stood still after it, how many steps had to be done again."""
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


class _Live:
    """On a terminal: the lines so far, and below them a table that follows the nodes and the job."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def say(self, line: str) -> None:
        self._live.console.print(line, highlight=False, markup=False)

    def draw(self, stack: Stack, job: dict[str, Any]) -> None:
        from rich.table import Table

        grid = Table(box=None)
        for column in ("node", "state", "job", "step", "checkpoint"):
            grid.add_column(column)
        commit = job.get("checkpoint")
        kept = f"{commit['seq']} at step {commit['step']} on {', '.join(commit['holders'])}" if commit else ""
        for node in stack.nodes:
            here = job.get("node") == node.nick
            step = f"{job.get('step') or 0}/{job.get('of') or '?'}" if here else ""
            grid.add_row(
                node.nick,
                "up" if node.running else "gone",
                str(job.get("state", "")) if here else "",
                step,
                kept if here else "",
            )
        self._live.update(grid, refresh=True)

    def close(self) -> None:
        self._live.stop()
