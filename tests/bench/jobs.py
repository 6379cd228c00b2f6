"""Jobs on real daemons on this machine: time to start, time to resume, and the cost of departures.

`--rounds`, `--departures`, `--minutes`: number of rounds, number of noticed departures, length of the training.
`--returns`: number of owners who lend their machine again; `--commits`: number of checkpoints. 0 leaves a part out. Gossip runs
with its `local` timings and a lease of 4 s. What a job did, and when it ran again, is read from the trace that its guests write,
not from the job's record.
"""

import argparse
import asyncio
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from membership.identity import Identity  # noqa: E402
from mesh.consensus.effects import Send, decode_witness_record  # noqa: E402
from mesh.consensus.leader import Leader  # noqa: E402
from mesh.consensus.messages import Start  # noqa: E402
from mesh.consensus.proposer import Proposer  # noqa: E402
from mesh.consensus.runner import RENEWALS_PER_LEASE  # noqa: E402
from mesh.daemon.stack import Stack, StackNode  # noqa: E402
from mesh.execution.engine import Launch  # noqa: E402
from mesh.execution.process.engine import ProcessEngine  # noqa: E402
from mesh.model.record import JobRecord  # noqa: E402
from mesh.model.spec import parse_job, waiting_place  # noqa: E402
from placement.queue import Queue  # noqa: E402
from tests.bench.harness import not_run, row, save, write  # noqa: E402
from tests.bench.training import Beat, Trace  # noqa: E402
from tests.consensus.worlds import DISK, at, make_advert, make_spec, make_view, make_witness, voters  # noqa: E402
from tests.e2e.commands import PROJECT, count_digest  # noqa: E402

LEASE_S = 4.0
WAIT_S = 120.0
HOME_WITHIN_S = 30.0  # after the machine was lent again: the wait of 3 s, a notice, a start, and a margin
CLOCK = ("sh", "-c", "date +%s%N")
STARTED = 0  # the step that a guest traces at the start of its command
TRACED = ("sh", "-c", f'echo "$(date +%s.%N) $MESH_NODE $MESH_ATTEMPT {STARTED}" >> "$TRACE"; exec "$@"', "sh")
LOOK_S = 0.001  # between two looks at the disks of the witnesses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--departures", type=int, default=100)
    parser.add_argument("--returns", type=int, default=20)
    parser.add_argument("--commits", type=int, default=100)
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    parts = (
        lambda: starts(options.rounds),
        lambda: departures(options.departures),
        lambda: ends_of_hosts(options.kills),
        lambda: commits(options.commits),
        lambda: returns(options.returns),
        lambda: moves(options.minutes * 60),
        lambda: decisions(options.queued),
        lambda: queue(options.queued),
    )
    rows: list[dict[str, Any]] = []
    for part in parts:
        rows += part()
        save("jobs", rows)  # a later part may fail
    write("jobs", rows)


# --- submit -> running


def starts(rounds: int) -> list[dict[str, Any]]:
    """Measure the time from the order to the daemon until the command runs, beside the engine alone, in turns."""
    whole, more = "submit -> running", "submit -> running, over the engine's own start"
    if rounds == 0:
        return [not_run(whole, "ms", "none: told beside", "left out"), not_run(more, "ms", "<= 60 ms", "left out")]
    ours, engine = [], []
    with Stack(5, overrides={"slots": 2}) as stack, tempfile.TemporaryDirectory() as directory:
        stack.start_all()
        for number in range(rounds + 2):
            begun = time.time_ns()
            job = submit(stack.nodes[number % 5], list(CLOCK))
            wait_for(stack.nodes[number % 5], job, lambda state: state["outcome"])
            told = int(output(stack.nodes[number % 5], job).splitlines()[-1])
            alone = asyncio.run(engine_alone(Path(directory) / str(number)))
            if number >= 2:  # the first two rounds are warm-up
                ours.append((told - begun) / 1e6)
                engine.append(alone)
    over = [mine - alone for mine, alone in zip(ours, engine, strict=True)]
    met = statistics.median(over) <= 60
    return [
        row(
            whole,
            ours,
            "ms",
            goal="none: told beside",
            met=None,
            peer="engine alone, no fork server yet",
            peer_values=engine,
        ),
        row(more, over, "ms", goal="<= 60 ms", met=met),
    ]


async def engine_alone(root: Path) -> float:
    """Return the milliseconds until the same command runs with the engine alone, which starts its fork server first.

    A daemon that lends has one.
    """
    for name in ("work", "ckpt", "out", "ctl"):
        (root / name).mkdir(parents=True)
    places = {f"{name}_dir": str(root / name) for name in ("work", "ckpt", "out", "ctl")}
    launch = Launch(
        job="j" * 26, attempt=0, argv=CLOCK, env={}, log_path=str(root / "log"), node="n", grace_s=1.0, **places
    )
    begun = time.time_ns()
    guest = await ProcessEngine().start(launch)
    await guest.wait()
    return (int((root / "log").read_text()) - begun) / 1e6


# --- departures with notice


@dataclass
class Survived:
    """What the trace of a job's guests shows of its departures. `missed`: departures that moved it nowhere."""

    lost_steps: list[float] = field(default_factory=list)  # negative: steps that nobody did
    away_s: list[float] = field(default_factory=list)  # until its command ran again
    missed: int = 0

    def add(self, other: "Survived") -> None:
        self.lost_steps += other.lost_steps
        self.away_s += other.away_s
        self.missed += other.missed

    @property
    def whole(self) -> int:
        """Return how many departures went on with the next step."""
        return sum(lost == 0 for lost in self.lost_steps)


def survived(beats: Sequence[Beat], departed: Sequence[float]) -> Survived:
    """Judge departures, by their Unix times, from what the guests did: each must be followed by an attempt on another node
    that takes a step.
    """
    ordered = sorted(beats, key=lambda beat: (beat.attempt, beat.at))
    found, used = Survived(), set()
    for left_at in departed:
        first = next((beat for beat in ordered if beat.at > left_at and beat.step == STARTED), None)
        before = [beat for beat in ordered if first is not None and beat.attempt < first.attempt]
        after = [b.step for b in ordered if first is not None and b.attempt == first.attempt and b.step != STARTED]
        if first is None or first.attempt in used or not before or not after or before[-1].node == first.node:
            found.missed += 1
            continue
        used.add(first.attempt)
        found.lost_steps.append(float(max(beat.step for beat in before) - (after[0] - 1)))
        found.away_s.append(first.at - left_at)
    return found


def departures(trials: int) -> list[dict[str, Any]]:
    """Reclaim the host of one long job again and again; the job must continue with the next step each time."""
    if trials == 0:
        return departed(Survived())
    noticed = []
    with lenders(4) as (stack, directory):
        user, trace = stack.nodes[0], Trace(directory / "trace")
        job = count(user, 10_000_000, 0.02, trace, home="none")
        for number in range(trials):
            state = wait_for(user, job, lambda s, number=number: runs_since(s, number))  # type: ignore[misc]
            takes_a_step(trace, state)
            host = stack.node(state["node"])
            wait(lambda host=host: host.client.get("/v1/status")["guests"], "its host to know it")  # type: ignore[misc]
            noticed.append(time.time())
            host.client.post("/v1/reclaim", {"grace_s": 10.0, "now": False}, timeout_s=60)
            state = wait_for(user, job, lambda s, number=number: runs_since(s, number + 1))  # type: ignore[misc]
            host.client.post("/v1/pause", {"paused": False})
        takes_a_step(trace, state)
        found = survived(trace.beats(), noticed)
        user.client.post(f"/v1/jobs/{job}/cancel")
    return departed(found)


def departed(found: Survived) -> list[dict[str, Any]]:
    """Return the rows of noticed departures."""
    names = ("noticed departures continued with the next step", "steps lost at a noticed departure")
    away, goal = "notice -> running elsewhere", "<= 2 s + transfer"
    trials = len(found.lost_steps) + found.missed
    if trials == 0:
        return [not_run(names[0], "%", "100 %", "left out"), not_run(names[1], "steps", "0", "left out")]
    share, lost = 100.0 * found.whole / trials, found.lost_steps
    fast = bool(found.away_s) and statistics.median(found.away_s) <= 2.0
    return [
        {**row(names[0], [share], "%", goal="100 % (GPUnion 94 %)", met=share == 100), "n": trials},
        row(names[1], lost, "steps", goal="0", met=not any(lost), missed=found.missed),
        row(away, found.away_s, "s", goal=goal, met=fast, missed=found.missed),
    ]


# --- owners who reclaim their machine and lend it again


def returns(trials: int) -> list[dict[str, Any]]:
    """Run one job for each owner, who reclaims its first machine and lends it again when the job runs elsewhere."""
    share, whole = (
        "migrate-back: share of jobs back on their first machine after its return",
        "migrate-back: steps lost",
    )
    if trials == 0:
        return [not_run(share, "%", ">= 90 %", "left out"), not_run(whole, "steps", "0", "left out")]
    took, found, back = [], Survived(), 0
    with lenders(4) as (stack, directory):
        user = stack.nodes[0]
        for number in range(trials):
            trace = Trace(directory / f"trace-{number}")
            job = count(user, 10_000_000, 0.02, trace, home="first")
            state = wait_for(user, job, lambda s: runs_since(s, 0) and s["checkpoint"] and s["step"])
            home = stack.node(state["node"])
            wait(lambda home=home: home.client.get("/v1/status")["guests"], "its host to know it")  # type: ignore[misc]
            left = [time.time()]
            home.client.post("/v1/reclaim", {"grace_s": 10.0, "now": False}, timeout_s=60)
            takes_a_step(trace, wait_for(user, job, lambda s: runs_since(s, 1)))
            home.client.post("/v1/pause", {"paused": False})
            begun, state = time.monotonic(), shown(user, job)
            left.append(time.time())
            while time.monotonic() - begun < HOME_WITHIN_S and not is_back(state, home.nick):
                time.sleep(0.05)
                state = shown(user, job)
            if is_back(state, home.nick):
                back += 1
                took.append(time.monotonic() - begun)
                takes_a_step(trace, state)
            found.add(survived(trace.beats(), left))
            user.client.post(f"/v1/jobs/{job}/cancel")
            wait_for(user, job, lambda s: s["outcome"])
    percent = 100.0 * back / trials
    lost = found.lost_steps
    rows = [
        {**row(share, [percent], "%", goal=">= 90 % (GPUnion 67 %)", met=percent >= 90), "n": trials},
        row(whole, lost, "steps", goal="0", met=not any(lost), missed=found.missed),
    ]
    if took:
        goal = "none; the wait is 3 s here, 60 s by default"
        rows.append(row("machine lent again -> job runs there", took, "s", goal=goal, met=None))
    return rows


def is_back(state: dict[str, Any], home: str) -> bool:
    return runs_since(state, 2) and state["attempts"][-1]["node"] == home


# --- hosts that die or leave


def ends_of_hosts(times: int) -> list[dict[str, Any]]:
    """Kill the daemon of a job's host, or stop it, each in a mesh of its own and at a random time between two renewals of its
    lease: what is waited for first comes with one.
    """
    died, left, detected, draw = Survived(), Survived(), [], Random("ends of hosts")
    for how in ("kill", "leave") * times:
        with lenders(5) as (stack, directory):
            user, trace = stack.nodes[0], Trace(directory / "trace")
            job = count(user, 10_000_000, 0.02, trace)
            state = wait_for(user, job, lambda s: runs_since(s, 0) and s["checkpoint"] and s["step"])
            host = stack.node(state["node"])
            assert host.process is not None
            time.sleep(draw.uniform(0.0, LEASE_S / RENEWALS_PER_LEASE))
            at, begun = time.time(), time.monotonic()
            host.process.kill() if how == "kill" else host.process.terminate()
            if how == "kill":
                wait(lambda user=user, host=host: dead(user, host), "its death to be detected")  # type: ignore[misc]
                detected.append(time.monotonic() - begun)
            takes_a_step(trace, wait_for(user, job, lambda s: runs_since(s, 1)))
            (died if how == "kill" else left).add(survived(trace.beats(), [at]))
            user.client.post(f"/v1/jobs/{job}/cancel")
    return ended(died, left, detected)


def ended(died: Survived, left: Survived, detected: Sequence[float]) -> list[dict[str, Any]]:
    """Return the rows of hosts that were killed, and of those that left."""
    killed, leaves, lost = (
        "host killed -> running elsewhere",
        "host leaves -> running elsewhere",
        "steps lost when a host leaves",
    )
    goals = {killed: f"<= 4.0 s, with a lease of {LEASE_S:g} s", leaves: "<= 2 s + transfer", lost: "0"}
    if not detected:
        return [not_run(name, "steps" if name == lost else "s", goal, "left out") for name, goal in goals.items()]
    soon = bool(died.away_s) and statistics.median(died.away_s) <= 4.0
    orderly = bool(left.away_s) and statistics.median(left.away_s) <= 2.0
    return [
        row(killed, died.away_s, "s", goal=goals[killed], met=soon, missed=died.missed),
        row("host killed -> detected by the submitter", detected, "s", goal="none: told beside", met=None),
        row(leaves, left.away_s, "s", goal=goals[leaves], met=orderly, missed=left.missed),
        row(lost, left.lost_steps, "steps", goal=goals[lost], met=not any(left.lost_steps), missed=left.missed),
    ]


def dead(user: StackNode, host: StackNode) -> bool:
    return any(
        r["nick"] == host.nick and r["state"] in {"dead", "unreachable"} for r in user.client.get("/v1/nodes")["nodes"]
    )


# --- the time of a commit


class Witnesses:
    """The disks of a job's witnesses and stores, read from outside: when each commit was saved and settled.

    Saved: the last of its holders has renamed the manifest (the kernel's time, which lags by up to a tick). Settled: a majority
    of the witnesses has the commit in its journal, where SQLite shows it after the fsync.
    """

    def __init__(self, nodes: Sequence[StackNode], job: str) -> None:
        self._job = parse_job(job)
        self._nodes = {Identity.load(node.where.key).node_id: node for node in nodes}
        self._journals = {
            identity: sqlite3.connect(f"file:{node.where.journal}?mode=ro", uri=True)
            for identity, node in self._nodes.items()
        }
        self._versions: dict[bytes, int] = {}
        self._saved_s: dict[int, float] = {}
        self._seen: dict[int, set[bytes]] = {}
        self.latency_s: dict[int, float] = {}  # by the commit's number

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()

    def look(self) -> None:
        for identity, journal in self._journals.items():
            version = journal.execute("PRAGMA data_version").fetchone()[0]
            if self._versions.get(identity) == version:
                continue
            self._versions[identity] = version
            found = journal.execute("SELECT record FROM witness_records WHERE job = ?", [self._job]).fetchone()
            if found is None:
                continue
            witness = decode_witness_record(found[0])
            commit, config = witness.record.commit, witness.config
            if commit is None or commit.seq in self.latency_s:
                continue
            now, seen = time.time(), self._seen.setdefault(commit.seq, set())
            if not seen:
                files = [self._nodes[node].where.store / "manifests" / commit.manifest.hex() for node in commit.holders]
                self._saved_s[commit.seq] = max((file.stat().st_ctime_ns / 1e9 for file in files), default=now)
            seen.add(identity)
            groups = [[voter.node for voter in group] for group in (config.members, config.previous) if group]
            if all(2 * sum(node in seen for node in group) > len(group) for group in groups):
                self.latency_s[commit.seq] = now - self._saved_s[commit.seq]


def commits(number: int) -> list[dict[str, Any]]:
    """Measure the time from a checkpoint on the disks of its holders until it is on those of a majority of the witnesses."""
    name, goal = "checkpoint saved -> settled, loopback", "<= 30 ms"
    if number == 0:
        return [not_run(name, "ms", goal, "left out")]
    with lenders(4) as (stack, directory):
        user = stack.nodes[0]
        job = count(user, 10_000_000, 0.03, Trace(directory / "trace"), home="none")
        wait_for(user, job, lambda s: runs_since(s, 0) and s["checkpoint"])
        with closing(Witnesses(stack.nodes, job)) as witnesses:
            witnesses.look()  # the first ones may be older than this look
            old, deadline = set(witnesses.latency_s), time.monotonic() + WAIT_S + number
            while len(witnesses.latency_s) < len(old) + 1 + number and time.monotonic() < deadline:
                witnesses.look()
                time.sleep(LOOK_S)
            taken = [1000 * took for seq, took in sorted(witnesses.latency_s.items()) if seq not in old][1:]
        user.client.post(f"/v1/jobs/{job}/cancel")
    fast = bool(taken) and statistics.median(taken) <= 30
    return [row(name, taken, "ms", goal=goal, met=fast, missed=number - len(taken))]


# --- a training that moves


def moves(seconds: float) -> list[dict[str, Any]]:
    """Run the same count four times at once: undisturbed, and moved 2, 3 and 4 times by its user."""
    if seconds == 0:
        return [not_run("training with moves: more time, same result", "%", "<= 5 %, bit-identical", "left out")]
    pace = 0.1
    steps = int(seconds / pace)
    with lenders(5, slots=4, paused=0) as (stack, directory):
        user = stack.nodes[0]
        begun = time.monotonic()
        traces = {times: Trace(directory / f"trace-{times}") for times in (0, 2, 3, 4)}
        jobs = {times: count(user, steps, pace, trace) for times, trace in traces.items()}
        ended: dict[int, float] = {}
        due = sorted((seconds * (n + 1) / (times + 1), times) for times in (2, 3, 4) for n in range(times))
        asked: dict[int, list[float]] = {times: [] for times in jobs}
        while len(ended) < len(jobs):
            if due and time.monotonic() - begun > due[0][0]:
                _, times = due.pop(0)
                asked[times].append(time.time())
                user.client.post(f"/v1/jobs/{jobs[times]}/migrate", {})
            for times, job in jobs.items():
                if times not in ended and shown(user, job)["outcome"]:
                    ended[times] = time.monotonic() - begun
            time.sleep(0.2)
        right = f"digest {count_digest(steps)}"
        undisturbed = len(traces[0].attempts()) == 1
        return [
            moved(
                f"{seconds / 60:g} min of training, moved {times} times: more time, same result",
                100 * (ended[times] / ended[0] - 1),
                undisturbed and output(user, jobs[times]).splitlines()[-1] == right,
                survived(traces[times].beats(), asked[times]),
            )
            for times in (2, 3, 4)
        ]


def moved(name: str, more: float, same: bool, found: Survived) -> dict[str, Any]:
    """Return the row of one training; each move has to be in its trace."""
    good = more <= 5 and same and not found.missed
    return row(name, [more], "%", goal="<= 5 %, bit-identical, every move made", met=good)


# --- many waiting jobs


def decisions(jobs: int, nodes: int = 20, rounds: int = 10) -> list[dict[str, Any]]:
    """Run the production leaders of many waiting jobs in one process, without sending or storing anything.

    Each decides whether it is its job's turn and where the job goes, with one free slot on every node.
    """
    name = f"{jobs} queued jobs on {nodes} nodes: decisions of one process"
    if jobs == 0:
        return [not_run(name, "1/s", ">= 200 a second", "left out")]
    ids = [number.to_bytes(32, "big") for number in range(1, nodes + 1)]
    adverts = tuple(make_advert(node, version=1) for node in ids)
    leaders, waiting = [], []
    for number in range(jobs):
        spec = make_spec(
            created_unix_ms=number, priority=number % 100, user=f"user{number % 7}", witnesses=voters(*ids[:3])
        )
        witness = make_witness(tuple(ids[:3]), spec)
        witness.witness_record = msgspec.structs.replace(witness.witness_record, job=number.to_bytes(16, "big"))
        leaders.append(Leader(witness, spec, Random(number)))
        waiting.append(waiting_place(spec, leaders[-1].request(JobRecord(), at(0))))
    rates = []
    for _ in range(rounds):
        for leader in leaders:
            leader.state, leader._proposer = "waiting", leader_proposer(leader)
        begun = time.perf_counter()
        queued = Queue(waiting, {}, adverts, 1000)
        view = make_view(ids[0], tuple(ids), adverts=adverts, queue=queued, disks=dict.fromkeys(ids, DISK))
        outputs = [leader.observe(view, at(1000)) for leader in leaders]
        rates.append(jobs / (time.perf_counter() - begun))
        starts = sum(isinstance(e, Send) and isinstance(e.message, Start) for out in outputs for e in out)
        assert starts == nodes, f"{starts} jobs placed on {nodes} nodes"
    return [row(name, rates, "1/s", goal=">= 200 a second", met=statistics.median(rates) >= 200)]


def leader_proposer(leader: Leader) -> Proposer:
    witness_record = leader.witness.witness_record
    return Proposer(witness_record.job, witness_record.spec, 1, witness_record.config, JobRecord(), None)


def queue(jobs: int) -> list[dict[str, Any]]:
    names = (f"{jobs} queued empty jobs on 20 daemons of this machine: jobs done", "mesh ps with them")
    if jobs == 0:
        return [
            not_run(names[0], "1/s", "none: told beside", "left out"),
            not_run(names[1], "ms", "<= 300 ms", "left out"),
        ]
    with Stack(20, overrides={"slots": 1}) as stack:
        stack.start_all(timeout_s=120)
        user = stack.nodes[0]
        for node in stack.nodes:
            node.client.post("/v1/pause", {"paused": True})
        for number in range(jobs):
            submit(stack.nodes[number % 20], ["true"])
        asked = []
        for _ in range(10):
            begun = time.monotonic()
            user.client.get("/v1/jobs", timeout_s=60)
            asked.append((time.monotonic() - begun) * 1000)
        for node in stack.nodes:
            node.client.post("/v1/pause", {"paused": False})
        begun = time.monotonic()
        wait(
            lambda: all(job["outcome"] for job in user.client.get("/v1/jobs", timeout_s=60)["jobs"]), "all to end", 900
        )
        rate = jobs / (time.monotonic() - begun)
    return [
        row(names[0], [rate], "1/s", goal="none: told beside", met=None),
        row(names[1], asked, "ms", goal="<= 300 ms", met=statistics.median(asked) <= 300),
    ]


# --- small things


def submit(node: StackNode, argv: list[str], **order: Any) -> str:
    answer = node.client.post("/v1/jobs", {"argv": argv, **order}, timeout_s=60)
    return str(answer["job"])


@contextmanager
def lenders(nodes: int, *, slots: int = 1, paused: int = 1) -> Iterator[tuple[Stack, Path]]:
    """Start a mesh whose first `paused` nodes lend nothing, and a directory in which its guests write traces."""
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="mesh-bench-")))
        overrides = {"slots": slots, "grace_s": 10.0, "process_home": "shared"}
        stack = opened.enter_context(Stack(nodes, overrides=overrides))
        stack.start_all()
        for node in stack.nodes[:paused]:
            node.client.post("/v1/pause", {"paused": True})
        yield stack, directory


def count(node: StackNode, steps: int, pace_s: float, trace: Trace, **order: Any) -> str:
    """Submit a counting job that traces its starts and steps."""
    argv = [*TRACED, sys.executable, "count.py", str(steps), str(pace_s)]
    env = {"TRACE": str(trace.path)}
    return submit(node, argv, workdir=str(PROJECT), ckpt="ckpts", ckpt_mode="rename", env=env, **order)


def takes_a_step(trace: Trace, state: dict[str, Any]) -> None:
    """Wait until the attempt that a state names, or a later one, has taken a step."""
    attempt = state["attempts"][-1]["number"]
    wait(lambda: (b := trace.newest()) and b.attempt >= attempt and b.step != STARTED, f"a step of attempt {attempt}")


def shown(node: StackNode, job: str) -> dict[str, Any]:
    state: dict[str, Any] = node.client.get(f"/v1/jobs/{job}", timeout_s=60)["job"]
    return state


def output(node: StackNode, job: str) -> str:
    return b"".join(node.client.stream(f"/v1/jobs/{job}/log")).decode()


def runs_since(state: dict[str, Any], attempt: int) -> bool:
    last = state["attempts"][-1] if state["attempts"] else None
    return last is not None and last["number"] >= attempt and bool(last["running_unix_ms"]) and not last["reason"]


def wait(ready: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := ready()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.01)
    return value


def wait_for(node: StackNode, job: str, ready: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    state: dict[str, Any] = wait(lambda: (s := shown(node, job)) and ready(s) and s, f"job {job[:8]}")
    return state


if __name__ == "__main__":
    main()
