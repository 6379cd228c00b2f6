"""Evaluation on a trace (`mesh debug survive eval`): the survival estimate and other models on the same questions."""

from array import array
from collections.abc import Callable, Sequence

import msgspec

from mesh.forecast import baselines, boosting
from mesh.forecast.questions import Questions, answer, ask, cut_into_bins
from mesh.forecast.scores import auc, brier, ece, log_loss
from placement.availability import Trace, TraceError

OURS = "mesh"
FROZEN = "mesh-frozen"
CLIMATOLOGY, CONSTANT, WEEKLY, BOOSTING = (
    "climatology",
    "constant-hazard",
    "hour-of-week-gamma-poisson",
    "gradient-boosting",
)


class Row(msgspec.Struct, frozen=True):
    """The scores of one model at one horizon. `auc` is None if all outcomes are equal."""

    model: str
    horizon_min: int
    n: int
    log_loss: float
    brier: float
    auc: float | None
    ece: float


class Outcome(msgspec.Struct, frozen=True):
    """The forecasts `chances[model, horizon]` and outcomes `stayed[horizon]` of the questions `asked[horizon]`. `notes`: models
    that were left out, and chosen settings."""

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
    """Return the Unix time of the cut. `until` is a Unix time, or up to 1 the part of the trace before the cut."""
    return trace.first + until * (trace.last - trace.first) if until <= 1 else until


def evaluate(
    trace: Trace,
    horizons_min: tuple[int, ...],
    train_until: float,
    utc_offset_s: float = 0.0,
    boosted: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Evaluate all models. Raises TraceError if there is no question before the cut, or none after it."""
    cut = cut_at(trace, train_until)
    bins = cut_into_bins(trace)
    progress(f"cutting {len(trace.nodes)} nodes' trace into questions")
    questions = ask(bins, horizons_min, utc_offset_s)
    ours = answer(bins, questions, utc_offset_s, float("inf"), lambda day: progress(f"{day} by {OURS}"))
    frozen = answer(bins, questions, utc_offset_s, cut, lambda day: progress(f"{day} by {FROZEN}"))
    progress("the simple models")
    counts = baselines.Counts(bins, cut, utc_offset_s)
    chances: dict[tuple[str, int], Sequence[float]] = {}
    asked: dict[int, tuple[int, ...]] = {}
    truth: dict[int, tuple[bool, ...]] = {}
    missing = boosting.problem() if boosted else "not requested"
    notes = [f"{BOOSTING} is left out: {missing}"] if missing else []
    for horizon in horizons_min:
        train, test = parts(questions, horizon, cut)
        if not train or not test:
            side = "before" if not train else "after"
            raise TraceError(f"no question for {horizon} minutes lies {side} the cut at unix {cut:.0f}")
        stayed = questions.stayed[horizon]
        asked[horizon], truth[horizon] = tuple(test), tuple(bool(stayed[place]) for place in test)

        def pick(all_of: "array[float]", places: Sequence[int] = test) -> list[float]:
            return [all_of[place] for place in places]

        chances[OURS, horizon] = pick(ours[horizon])
        chances[FROZEN, horizon] = pick(frozen[horizon])
        base = baselines.climatology([stayed[place] for place in train])
        chances[CLIMATOLOGY, horizon] = [base] * len(test)
        chances[CONSTANT, horizon] = [baselines.constant(counts, horizon)] * len(test)
        chances[WEEKLY, horizon] = baselines.hour_of_week(counts, questions, test, horizon)
        if not missing:
            progress(f"{BOOSTING} for {horizon} minutes, of {len(train)} questions")
            chances[BOOSTING, horizon], words = boosting.boosted(questions, train, test, horizon)
            notes.append(f"{BOOSTING} at {horizon} min: {words}")
    return Outcome(questions, cut, asked, truth, chances, tuple(notes))


def parts(questions: Questions, horizon_min: int, cut: float) -> tuple[list[int], list[int]]:
    """Return the questions whose outcome is known at the cut, and those asked after it."""
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
