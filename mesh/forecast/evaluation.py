"""`mesh survive eval`: our estimate and others on one trace, asked the same questions after the cut."""

from array import array
from collections.abc import Callable, Sequence

import msgspec

from mesh.forecast import boosting, rivals
from mesh.forecast.questions import Questions, answer, ask, cut_into_bins
from mesh.forecast.scores import auc, brier, ece, log_loss
from placement.stays import Trace, TraceError

OURS = "mesh"
FROZEN = "mesh-frozen"
CLIMATOLOGY, CONSTANT, WEEKLY, BOOSTING = (
    "climatology",
    "constant-hazard",
    "hour-of-week-gamma-poisson",
    "gradient-boosting",
)


class Row(msgspec.Struct, frozen=True):
    """One model's scores at one horizon. `auc` is None where nobody left, or all did."""

    model: str
    horizon_min: int
    n: int
    log_loss: float
    brier: float
    auc: float | None
    ece: float


class Outcome(msgspec.Struct, frozen=True):
    """`chances[model, horizon]` and `stayed[horizon]` are of the questions `asked[horizon]`; `notes` say what was left out."""

    questions: Questions
    cut: float
    asked: dict[int, tuple[int, ...]]
    stayed: dict[int, tuple[bool, ...]]
    chances: dict[tuple[str, int], Sequence[float]]
    notes: tuple[str, ...]

    def rows(self) -> list[Row]:
        rows = []
        for (model, horizon), p in self.chances.items():
            stayed = self.stayed[horizon]
            rank = auc(p, stayed)
            rows.append(
                Row(
                    model,
                    horizon,
                    len(p),
                    round(log_loss(p, stayed), 6),
                    round(brier(p, stayed), 6),
                    None if rank is None else round(rank, 6),
                    round(ece(p, stayed), 6),
                )
            )
        return rows


def cut_at(trace: Trace, until: float) -> float:
    """Unix seconds of the cut: `until` up to 1 is the part of the trace's time before it."""
    return trace.first + until * (trace.last - trace.first) if until <= 1 else until


def evaluate(
    trace: Trace,
    horizons_min: tuple[int, ...],
    train_until: float,
    utc_offset_s: float = 0.0,
    boosted: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Ask all models; TraceError if nothing lies before the cut, or nothing after it."""
    cut = cut_at(trace, train_until)
    bins = cut_into_bins(trace)
    tell(f"cutting {len(trace.nodes)} nodes' trace into questions")
    questions = ask(bins, horizons_min, utc_offset_s)
    ours = answer(bins, questions, utc_offset_s, float("inf"), lambda day: tell(f"{day} by {OURS}"))
    frozen = answer(bins, questions, utc_offset_s, cut, lambda day: tell(f"{day} by {FROZEN}"))
    tell("the simple models")
    counts = rivals.Counts(bins, cut, utc_offset_s)
    chances: dict[tuple[str, int], Sequence[float]] = {}
    asked: dict[int, tuple[int, ...]] = {}
    truth: dict[int, tuple[bool, ...]] = {}
    missing = boosting.available() if boosted else "it was not asked for"
    notes = [f"{BOOSTING} is left out: {missing}"] if missing else []
    for horizon in horizons_min:
        train, test = _parts(questions, horizon, cut)
        if not train or not test:
            side = "before" if not train else "after"
            raise TraceError(f"no question for {horizon} minutes lies {side} the cut at unix {cut:.0f}")
        stayed = questions.stayed[horizon]
        asked[horizon], truth[horizon] = tuple(test), tuple(bool(stayed[place]) for place in test)

        def pick(all_of: "array[float]", places: Sequence[int] = test) -> list[float]:
            return [all_of[place] for place in places]

        chances[OURS, horizon] = pick(ours[horizon])
        chances[FROZEN, horizon] = pick(frozen[horizon])
        base = rivals.climatology([stayed[place] for place in train])
        chances[CLIMATOLOGY, horizon] = [base] * len(test)
        chances[CONSTANT, horizon] = [rivals.constant(counts, horizon)] * len(test)
        chances[WEEKLY, horizon] = rivals.hour_of_week(counts, questions, test, horizon)
        if not missing:
            tell(f"{BOOSTING} for {horizon} minutes, of {len(train)} questions")
            chances[BOOSTING, horizon], words = boosting.boosted(questions, train, test, horizon)
            notes.append(f"{BOOSTING} at {horizon} min: {words}")
    return Outcome(questions, cut, asked, truth, chances, tuple(notes))


def _parts(questions: Questions, horizon_min: int, cut: float) -> tuple[list[int], list[int]]:
    """Questions to learn from, whose answer is known at the cut, and those that are put after it."""
    train, test = [], []
    for place, number in enumerate(questions.bin):
        if questions.stayed[horizon_min][place] < 0:
            continue
        now = questions.time(number)
        if now + horizon_min * 60 <= cut:
            train.append(place)
        elif now >= cut:
            test.append(place)
    return train, test
