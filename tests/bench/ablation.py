"""Ablation of the survival estimate: the log-loss and Brier score without each of its parts, on the same questions.

A part is switched off by its constants: a factor with a prior of 1e12 departures has rate 1. The change is in per cent of the
full estimate's score, over all questions after the cut and over all before it; positive means that the part pays.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from mesh.forecast.evaluation import cut_at, parts
from mesh.forecast.questions import answer, ask, cut_into_bins
from mesh.forecast.scores import brier, log_loss
from placement.availability import Trace
from placement.factors import AGES
from tests.bench.harness import row
from tests.placement.campuses import campus

HORIZONS = (60, 240)
OFF = 1e12
PARTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "age": {"survival.AGE_PRIOR": OFF, "factors.AGE_SHAPE": (1.0,) * AGES},
    "Weibull prior of the age": {"factors.AGE_SHAPE": (1.0,) * AGES},
    "hour of the day": {"survival.HOUR_PRIOR": OFF},
    "node": {"survival.NODE_PRIOR": OFF},
    "(node, age)": {"survival.OWN_AGE_PRIOR": OFF},
    "(node, hours)": {"survival.OWN_BLOCK_PRIOR": OFF},
    "zone now": {"survival.RECENT_PRIOR": OFF},
    "share of the zone lent": {"survival.SHARE_PRIOR": OFF},
    "reversion of both": {"survival.RECENT_MEMORY_S": OFF},
    "zone's week": {"survival.WEEK_PRIOR": OFF},
    "calibration slope": {
        "calibration.KAPPA": 1.0,
        "calibration.KAPPA_PRIOR": OFF,
        "calibration.MOST_INFORMATION": OFF,
    },
    "frailty": {"calibration.THETA": 1e-3, "calibration.THETA_PRIOR": OFF, "calibration.MOST_INFORMATION": OFF},
    "learning the frailty": {"calibration.THETA_PRIOR": OFF, "calibration.MOST_INFORMATION": OFF},
    "forgetting in 40 days": {"factors.HALF_LIFE_S": OFF},
    "a shorter half-life for the node": {"factors.NODE_HALF_LIFE_S": 40 * 86_400.0},
}
CAMPUSES = ("lectures", "timetable", "habits", "unlike", "busy", "steady")  # synthetic campuses
DAYS, NODES, SEED = 28, 8, 1


def rows(traces: Sequence[tuple[str, Trace, float]], fit: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each trace, horizon and part."""
    made_up = [(f"made-up campus {kind!r}", campus(kind, SEED, DAYS, nodes=NODES), 0.0) for kind in CAMPUSES]
    for name, trace, offset_s in (*traces, *made_up):
        full: dict[int, list[float]] = {}
        for part, changes in PARTS.items():
            for horizon, scores in _scores(trace, offset_s, fit, changes).items():
                base = full.setdefault(horizon, scores)
                change = [round(100 * (score / before - 1), 2) for score, before in zip(scores, base, strict=True)]
                measure = f"log_loss without {part}: {name}, {horizon} min"
                found = row(measure, [scores[0]], "nats", goal="-", met=None) | {"brier": scores[1]}
                names = ("log_loss", "brier", "log_loss before the cut", "brier before the cut")
                yield found | {"change_percent": dict(zip(names, change, strict=True))}
                print(f"{measure}: {change[0]:+.2f} % ({change[2]:+.2f} % before the cut)", flush=True)


def _scores(trace: Trace, offset_s: float, fit: float, changes: dict[str, Any]) -> dict[int, list[float]]:
    """Return for each horizon the log-loss and the Brier score after the cut, then those before it."""
    bins = cut_into_bins(trace)
    questions = ask(bins, HORIZONS, offset_s)
    with ExitStack() as stack:
        for constant, value in changes.items():
            stack.enter_context(patch(f"placement.{constant}", value))
        chances = answer(bins, questions, offset_s, float("inf"))
    found: dict[int, list[float]] = {}
    for horizon in HORIZONS:
        for places in reversed(parts(questions, horizon, cut_at(trace, fit))):
            p = [chances[horizon][place] for place in places]
            stayed = [bool(questions.stayed[horizon][place]) for place in places]
            found.setdefault(horizon, []).extend((log_loss(p, stayed), brier(p, stayed)))
    return found
