"""Cost and stability of placement, and quality of the survival estimate on real traces.

The estimate is compared with climatology, a constant hazard, hours of the week and boosted trees. The traces lie outside the
project: `--traces DIR` (docs/explanation/survival-evaluation.md names them; $MESH_TRACES, else ../shared/data). Rows of missing
traces say so. All randomness is seeded; costs are CPU time. Takes about a minute.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mesh.forecast.evaluation import (  # noqa: E402
    BOOSTING,
    CLIMATOLOGY,
    CONSTANT,
    FROZEN,
    OURS,
    WEEKLY,
    Outcome,
    evaluate,
)
from mesh.forecast.scores import losses  # noqa: E402
from mesh.forecast.tracefiles import files_of, read_traces  # noqa: E402
from placement.availability import Trace, kaplan_meier, nelson_aalen, trace_of_lent  # noqa: E402
from placement.survival import Estimator  # noqa: E402
from placement.traces import read_swf  # noqa: E402
from tests.bench import ablation, rankings, schedule  # noqa: E402
from tests.bench.harness import not_run, row, write  # noqa: E402

Row = dict[str, Any]

HORIZONS = (60, 240)
FIT = 0.7  # share of the time
DAY_S = 86_400
DRAWS = 1000  # of the block bootstrap
SETS = (
    ("wagap", "wagap-2013-node-jobs.csv", "swf-nodes", 3600.0, 1.0),
    ("spot 2022-10", "spot-2022-10", "spot-json", 0.0, 1.02),
)
RIVALS = (CLIMATOLOGY, CONSTANT, WEEKLY, BOOSTING)


def main() -> None:
    parser = argparse.ArgumentParser()
    default = os.environ.get("MESH_TRACES", str(ROOT.parent / "shared" / "data"))
    parser.add_argument("--traces", type=Path, default=Path(default))
    parser.add_argument(
        "--ablation", action="store_true", help="also score the survival estimate without each of its parts"
    )
    arguments = parser.parse_args()
    directory = arguments.traces
    rows = [*rankings.rows(), *costs(), *curves(directory)]
    traces: list[tuple[str, Trace, float]] = []
    for name, file, kind, offset_s, allowed in SETS:
        path = directory / file
        if not path.exists():
            rows.append(
                not_run(f"survival on {name}", "nats", f"<= {allowed:g} x gradient boosting", f"{path} does not exist")
            )
            continue
        trace = read_traces(files_of([path]), kind, offset_s)
        rows += forecasts(name, trace, offset_s, allowed)
        rows += early(name, trace, offset_s)
        traces.append((name, trace, offset_s))
    rows += schedule.rows(traces)
    if arguments.ablation:
        rows += ablation.rows(traces, FIT)
    write("placement", rows)


def forecasts(name: str, trace: Trace, offset_s: float, allowed: float) -> list[Row]:
    """Return log-loss, Brier, AUC and ECE after the cut, with intervals of the log-loss and of its difference to boosting."""
    outcome = evaluate(trace, HORIZONS, FIT, offset_s, progress=lambda what: print(f"{name}: {what}", flush=True))
    scores = {(score.model, score.horizon_min): score for score in outcome.rows()}
    rows: list[Row] = []
    for horizon in HORIZONS:
        ours, peer = scores[OURS, horizon], scores.get((BOOSTING, horizon))
        where = f"{name}, {horizon} min"
        for measure in ("log_loss", "brier"):
            value = getattr(ours, measure)
            other = None if peer is None else getattr(peer, measure)
            goal = f"<= {allowed:g} x gradient boosting" if allowed != 1 else "<= gradient boosting"
            interval = bootstrap(outcome, horizon, measure)
            rows.append(
                row(
                    f"{measure} of survival: {where}",
                    [value],
                    "nats" if measure == "log_loss" else "squared",
                    goal=goal,
                    met=None if other is None else value <= allowed * other,
                    peer=BOOSTING,
                    peer_values=[] if other is None else [other],
                )
                | {"n": ours.n, "ci95": interval[OURS], "blocks": interval["blocks"]}
                | {"difference_to_peer_ci95": interval.get("difference")}
            )
        rows.append(
            row(
                f"calibration error: {where}",
                [ours.ece],
                "",
                goal="<= 0.02" if name == "wagap" else "-",
                met=ours.ece <= 0.02 if name == "wagap" else None,
                peer=BOOSTING,
                peer_values=[] if peer is None else [peer.ece],
            )
            | {"n": ours.n}
        )
        rows.append(
            row(
                f"AUC: {where}",
                [ours.auc or 0.0],
                "",
                goal="-",
                met=None,
                peer=BOOSTING,
                peer_values=[] if peer is None else [peer.auc or 0.0],
            )
            | {"n": ours.n}
        )
        for model in (FROZEN, CLIMATOLOGY, CONSTANT, WEEKLY):
            score = scores[model, horizon]
            rows.append(
                row(f"log_loss of {model}: {where}", [score.log_loss], "nats", goal="-", met=None)
                | {"n": score.n, "brier": score.brier, "auc": score.auc, "ece": score.ece}
            )
    return rows


def bootstrap(outcome: Outcome, horizon: int, measure: str) -> dict[str, Any]:
    """Return 95 % intervals from whole node-days drawn with replacement, because close moments are not independent."""
    stayed = outcome.stayed[horizon]
    costs_of: dict[str, list[float]] = {}
    for model in (OURS, BOOSTING):
        if (model, horizon) in outcome.chances:
            p = outcome.chances[model, horizon]
            costs_of[model] = (
                losses(p, stayed)
                if measure == "log_loss"
                else [(chance - there) ** 2 for chance, there in zip(p, stayed, strict=True)]
            )
    questions = outcome.questions
    blocks: dict[tuple[int, int], list[int]] = {}
    for number, place in enumerate(outcome.asked[horizon]):
        day = int(questions.time(questions.bin[place]) // DAY_S)
        blocks.setdefault((questions.node[place], day), []).append(number)
    sums = [
        (len(members), [sum(costs[number] for number in members) for costs in costs_of.values()])
        for members in blocks.values()
    ]
    random = Random(1)
    drawn: list[list[float]] = []
    for _ in range(DRAWS):
        chosen = random.choices(sums, k=len(sums))
        count = sum(size for size, _ in chosen)
        drawn.append([sum(parts[model] for _, parts in chosen) / count for model in range(len(costs_of))])
    found: dict[str, Any] = {"blocks": len(blocks), OURS: _interval([values[0] for values in drawn])}
    if len(costs_of) == 2:
        found["difference"] = _interval([values[0] - values[1] for values in drawn])
    return found


def _interval(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [round(ordered[int(part * (len(ordered) - 1))], 5) for part in (0.025, 0.975)]


def early(name: str, trace: Trace, offset_s: float) -> list[Row]:
    """Return the log-loss beside climatology's with little data before the cut, over windows three days apart."""
    rows = []
    for days in (0.5, 1.0, 2.0, 3.0):
        cost = {OURS: 0.0, CLIMATOLOGY: 0.0}
        count, begin = 0, trace.first
        while begin + (days + 2) * DAY_S <= trace.last:
            lent = {node: [(stay.start, stay.end) for stay in stays] for node, stays in trace.nodes.items()}
            part = trace_of_lent(lent, begin, begin + (days + 2) * DAY_S)
            for score in evaluate(part, HORIZONS, begin + days * DAY_S, offset_s, boosted=False).rows():
                if score.model in cost:
                    cost[score.model] += score.n * score.log_loss
                    count += score.n
            begin += 3 * DAY_S
        ratio = cost[OURS] / cost[CLIMATOLOGY]
        rows.append(
            row(
                f"log_loss with {days:g} days of data over climatology's: {name}",
                [ratio],
                "ratio",
                goal="<= 1.02",
                met=ratio <= 1.02,
            )
            | {"n": count // 2}
        )
    return rows


def costs() -> list[Row]:
    """Measure one update, and the survival of 500 nodes."""
    random, estimator = Random(3), Estimator(0.0)
    nodes = [b"node %d" % number for number in range(500)]
    updates: list[float] = []
    for step in range(60):
        now = 300.0 * step
        begun = time.process_time()
        for node in nodes:
            if random.random() < 0.02:
                estimator.record_end(node, now)
            else:
                estimator.record_lent(node, now)
        updates.append((time.process_time() - begun) / len(nodes) * 1e6)
    rows = [row("one update", updates[1:], "us", goal="< 20", met=statistics.median(updates[1:]) < 20)]
    for minutes in HORIZONS:
        taken = []
        for _ in range(50):
            begun = time.process_time()
            estimator.survivals(nodes, now, minutes * 60)
            taken.append((time.process_time() - begun) * 1e3)
        rows.append(
            row(f"survival of 500 nodes, {minutes} min", taken, "ms", goal="< 5", met=statistics.median(taken) < 5)
        )
    lines = [f"{n} {n * 60} 5 600 4 -1 -1 4 -1 -1 1 7 1 1 1 1 -1 -1 {{n{n % 40},n{n % 40}}}" for n in range(20_000)]
    text, taken = "\n".join(lines), []
    for _ in range(3):
        begun = time.process_time()
        assert len(read_swf(text)) == len(lines)
        taken.append(time.process_time() - begun)
    rows.append(row("read a workload of 20,000 jobs", taken, "s", goal="< 1", met=statistics.median(taken) < 1))
    return rows


def curves(directory: Path) -> list[Row]:
    """Compare the Kaplan-Meier and Nelson-Aalen curves of real stays with lifelines'."""
    measure, goal = "largest difference to lifelines' curves", "< 1e-9"
    try:
        import lifelines
    except ImportError:
        return [not_run(measure, "", goal, "lifelines is not installed: pip install 'campus-mesh[bench]'")]
    path = directory / SETS[0][1]
    if not path.exists():
        return [not_run(measure, "", goal, f"{path} does not exist")]
    trace = read_traces([path], "swf-nodes", 3600.0)
    stays = [(stay.end - stay.start, stay.ended) for stays in trace.nodes.values() for stay in stays]
    lengths, ended = [length for length, _ in stays], [end for _, end in stays]
    worst = 0.0
    for curve, theirs in (
        (kaplan_meier(stays), lifelines.KaplanMeierFitter().fit(lengths, ended).survival_function_),
        (nelson_aalen(stays), lifelines.NelsonAalenFitter().fit(lengths, ended).cumulative_hazard_),
    ):
        worst = max(worst, *(abs(ours - it) for (_, ours), it in zip(curve, theirs.iloc[:, 0], strict=True)))
    return [row(measure, [worst], "", goal=goal, met=worst < 1e-9) | {"value": worst, "n": len(stays)}]


if __name__ == "__main__":
    main()
