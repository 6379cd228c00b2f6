"""Detection, dissemination, idle cost and false accusations of membership, beside serf and kinship in the same run.

Real processes, each system in its own network namespace, all at once; kills take turns. Needs root, `ip` and, for loss,
`iptables`. `--quick` runs the small sizes only.
"""

import argparse
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench import scenarios  # noqa: E402
from tests.bench.fleets import Fleet, available, wait  # noqa: E402
from tests.bench.harness import BUILD, not_run, row, write  # noqa: E402

DETECT_WITHIN_S = 60.0
SETTLE_S, IDLE_S = 30.0, 60.0  # until the messages of the start have ended
STALL_S, RUN_S = 8.0, 0.4  # stall and run times of a stalled node
SOAK_NODES = 40

Measured = dict[str, list[float]]  # seconds, bytes ... by measure; MISSED for a trial whose end did not come
Figures = dict[str, dict[int, Measured]]

MISSED = math.inf


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="10,30,60,120")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=10.0, help="of loss, and of stalls")
    parser.add_argument("--only", help="one system")
    parser.add_argument("--quick", action="store_true", help="small simulations")
    parser.add_argument("--no-scenarios", action="store_true", help="leave out the simulated rows")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("bench-membership makes network namespaces: run it as root")
    kinds, missing = available(BUILD)
    kinds = [kind for kind in kinds if options.only in {None, kind.name}]
    figures: Figures = {kind.name: {} for kind in kinds}
    sizes = [int(size) for size in options.sizes.split(",")]
    simulated = [] if options.no_scenarios else scenarios.rows(options.quick)
    with tempfile.TemporaryDirectory(prefix="mesh-bench-") as directory:
        for size in sizes:
            for kind in kinds:
                figures[kind.name][size] = {}
            fleets = [kind(size, Path(directory) / f"{kind.name}-{size}") for kind in kinds]
            try:
                measure(fleets, figures, options.kills)
            finally:
                for fleet in fleets:
                    fleet.close()
            report(
                figures, {}, missing, simulated, options
            )  # write the report early, so that a late failure does not lose an hour of work
        false = soak(kinds, Path(directory), options.minutes) if options.minutes else {}
    report(figures, false, missing, simulated, options)


def measure(fleets: list[Fleet], figures: Figures, kills: int) -> None:
    draw = random.Random(7)
    for fleet in fleets:
        mine = figures[fleet.name][fleet.size]
        for nick in fleet.nicks:
            fleet.start(nick)
        whole = wait(fleet.complete, 120)
        last = max(fleet.up_at.values(), default=0.0)
        seen = [at for nick in fleet.nicks for at in fleet.joined_at(nick)]
        mine["converge_s"] = [max(seen) - last if whole else MISSED]
    idle(fleets, figures)
    for _ in range(3):
        for fleet in fleets:
            late_join(fleet, figures[fleet.name][fleet.size])
    for number in range(kills):
        # All systems run at the same time on the same two cores, so that a slow moment hits all alike.
        nick, other = draw.sample(fleets[0].nicks[2:], 2)
        at_once(fleets, lambda fleet, nick=nick: one_kill(fleet, figures[fleet.name][fleet.size], nick))  # type: ignore[misc]
        at_once(fleets, lambda fleet, nick=other: one_leave(fleet, figures[fleet.name][fleet.size], nick))  # type: ignore[misc]
        print(f"N={fleets[0].size}: kill {number + 1} of {kills}", flush=True)


def at_once(fleets: list[Fleet], act: Callable[[Fleet], None]) -> None:
    with ThreadPoolExecutor(len(fleets)) as workers:
        list(workers.map(act, fleets))


def late_join(fleet: Fleet, mine: Measured) -> None:
    """Measure how long a new node takes to see a whole mesh."""
    nick = fleet.nicks[-1]
    fleet.leave(nick)
    wait(lambda: len(fleet.heard("left", nick, 0.0)) >= fleet.size - 1, 30)
    time.sleep(1.0)
    fleet.start(nick)
    whole = wait(fleet.complete, 60)
    mine.setdefault("join_s", []).append(max(fleet.joined_at(nick)) - fleet.up_at[nick] if whole else MISSED)


def idle(fleets: list[Fleet], figures: Figures) -> None:
    time.sleep(SETTLE_S)
    before = {fleet.name: (fleet.bytes_sent(), fleet.cpu_s()) for fleet in fleets}
    begun = time.monotonic()
    time.sleep(IDLE_S)
    for fleet in fleets:
        mine, took = figures[fleet.name][fleet.size], time.monotonic() - begun
        sent, cpu = before[fleet.name]
        mine["idle_bytes_per_node_s"] = [(fleet.bytes_sent() - sent) / took / fleet.size]
        mine["cpu_pct_per_node"] = [100 * (fleet.cpu_s() - cpu) / took / fleet.size]
        mine["rss_mb"] = fleet.rss_mb()


def one_kill(fleet: Fleet, mine: Measured, nick: str) -> None:
    at = fleet.kill(nick)
    others = len(fleet.processes)
    if not wait(lambda: len(fleet.heard("dead", nick, at)) >= others, DETECT_WITHIN_S):
        print(f"{fleet.name}: only {len(fleet.heard('dead', nick, at))} of {others} saw {nick} die", flush=True)
    times = fleet.heard("dead", nick, at)
    mine.setdefault("detect_first_s", []).append(times[0] - at if times else MISSED)
    mine.setdefault("detect_all_s", []).append(by_all(times, others, at))
    fleet.start(nick)
    wait(fleet.complete, 60)


def one_leave(fleet: Fleet, mine: Measured, nick: str) -> None:
    at = fleet.leave(nick)
    others = len(fleet.processes)
    wait(lambda: len(fleet.heard("left", nick, at)) >= others, 30)
    mine.setdefault("leave_all_s", []).append(by_all(fleet.heard("left", nick, at), others, at))
    time.sleep(1.0)
    fleet.start(nick)
    wait(fleet.complete, 60)


def by_all(times: Sequence[float], others: int, at: float) -> float:
    """Return the seconds until all others had reported an event; MISSED if some never did."""
    return times[-1] - at if len(times) >= others else MISSED


def soak(kinds: list[type[Fleet]], directory: Path, minutes: float) -> dict[str, dict[str, int]]:
    """Count false deaths of healthy nodes: with 25 % packet loss, then with a tenth of the nodes stalled."""
    fleets = [kind(SOAK_NODES, directory / f"{kind.name}-soak") for kind in kinds]
    found: dict[str, dict[str, int]] = {fleet.name: {} for fleet in fleets}
    try:
        for fleet in fleets:
            for nick in fleet.nicks:
                fleet.start(nick)
            wait(fleet.complete, 120)
        since = time.monotonic()
        for fleet in fleets:
            fleet.drop(0.25)
        time.sleep(60 * minutes)
        for fleet in fleets:
            found[fleet.name]["false_dead_loss25"] = len(fleet.said("dead", since))
            fleet.drop(0.0)
        time.sleep(15.0)
        since, until = time.monotonic(), time.monotonic() + 60 * minutes
        stalled = fleets[0].nicks[-SOAK_NODES // 10 :]
        while time.monotonic() < until:
            for number, pause in ((signal.SIGSTOP, STALL_S), (signal.SIGCONT, RUN_S)):
                for fleet in fleets:
                    for nick in stalled:
                        fleet.processes[nick].send_signal(number)
                time.sleep(pause)
        for fleet in fleets:
            said = fleet.said("dead", since)
            healthy = [about for _, observer, about in said if about not in stalled and observer not in stalled]
            found[fleet.name]["false_dead_stall10"] = len(healthy)
    finally:
        for fleet in fleets:
            for process in fleet.processes.values():
                process.send_signal(signal.SIGCONT)
            fleet.close()
    return found


GOALS: list[tuple[str, int, str, str, float]] = [
    # measure, N, unit, goal as text, limit of the median
    ("detect_all_s", 60, "s", "<= 6 s", 6.0),
    ("leave_all_s", 120, "s", "<= 0.5 s", 0.5),
    ("idle_bytes_per_node_s", 120, "B/s", "<= 450 B/s", 450.0),
    ("cpu_pct_per_node", 120, "%", "<= 0.3 %", 0.3),
    ("rss_mb", 120, "MB", "<= 45 MB", 45.0),
    ("join_s", 120, "s", "<= 1 s", 1.0),
]


def report(
    figures: Figures,
    false: dict[str, dict[str, int]],
    missing: dict[str, str],
    simulated: list[dict[str, Any]],
    options: Any,
) -> None:
    rows: list[dict[str, Any]] = [*simulated, *_constant(figures)]
    for measure_name, size, unit, goal, limit in GOALS:
        values, missed = happened(figures.get("mesh", {}).get(size, {}).get(measure_name, []))
        if not values and not missed:
            rows.append(not_run(f"{measure_name} N={size}", unit, goal, "this size was not run"))
            continue
        peers = {
            name: theirs
            for name, of in figures.items()
            if name != "mesh" and (theirs := happened(of[size].get(measure_name, []))[0])
        }
        peer = ", ".join(f"{name} {statistics.median(of):.3g}" for name, of in peers.items())
        best = min(peers.values(), key=statistics.median, default=[])
        met = bool(values) and statistics.median(values) <= limit
        rows.append(
            row(
                f"{measure_name} N={size}", values, unit, goal=goal, met=met, missed=missed, peer=peer or "none",
                peer_values=best,
            )
        )  # fmt: skip
    for key in ("false_dead_loss25", "false_dead_stall10"):
        if key not in false.get("mesh", {}):
            rows.append(not_run(key, "events", "0", "not run (--minutes 0)"))
            continue
        peer = ", ".join(f"{name} {of[key]}" for name, of in false.items() if name != "mesh")
        values = [float(false["mesh"][key])]
        line = row(key, values, "events", goal=f"0 in {options.minutes:g} min", met=not values[0], peer=peer)
        rows.append(line)
    for name, by_size in figures.items():
        for size, measured in by_size.items():
            for key, found in sorted(measured.items()):
                values, missed = happened(found)
                unit = key.rpartition("_")[2]
                rows.append(row(f"{name} N={size} {key}", values, unit, goal="-", met=None, missed=missed))
    for name, why in missing.items():
        rows.append(not_run(name, "", "-", why))
    write("membership", rows)


def happened(found: Sequence[float]) -> tuple[list[float], int]:
    """Return the values of the trials that ended, and the number of those that did not."""
    values = [value for value in found if value != MISSED]
    return values, len(found) - len(values)


def _constant(figures: Figures) -> list[dict[str, Any]]:
    """Test whether the idle traffic of a node depends on the number of nodes."""
    idle = {
        size: of["idle_bytes_per_node_s"]
        for size, of in figures.get("mesh", {}).items()
        if "idle_bytes_per_node_s" in of
    }
    if len(idle) < 2:
        return []
    ratio = statistics.median(idle[max(idle)]) / statistics.median(idle[min(idle)])
    name = f"idle bytes at N={max(idle)} over those at N={min(idle)}"
    return [row(name, [ratio], "x", goal="constant in N (<= 1.5)", met=ratio <= 1.5)]


if __name__ == "__main__":
    main()
