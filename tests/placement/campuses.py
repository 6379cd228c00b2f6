"""Synthetic campuses: machines that are lent and reclaimed with a known hazard."""

from math import exp
from random import Random

from placement.availability import Span, Trace, trace_of_lent

DAY_S = 86_400.0
STEP_S = 300.0
LESSONS = {0: (9, 14), 1: (10,), 2: (13, 16), 3: (8, 11), 4: (15,)}  # by day of the week, from Monday on


def campus(kind: str, seed: int, days: float, nodes: int = 12) -> Trace:
    """Return a synthetic trace of a kind.

    `steady`: a constant hazard; `ageing`: one that falls with age; `lectures`: a room that leaves at ten on working days, with
    quiet nights; `unlike`: half of the nodes leave ten times as often; `bursts`: hours in which everybody leaves, at random;
    `timetable`: one that leaves at other hours on each working day; `busy`: stays are short; `habits`: each owner comes at an
    hour of their own on working days."""
    random = Random(f"{kind} {seed}")
    last = days * DAY_S
    bursts = {hour for hour in range(int(days * 24) + 1) if random.random() < 0.05}
    lent: dict[str, list[Span]] = {f"n{number}": [] for number in range(nodes)}
    for number, spans in enumerate(lent.values()):
        now = random.expovariate(1 / 3600)
        while now < last:
            end = now
            while end < last and random.random() > 1 - exp(
                -_rate(kind, number, end - now, end, bursts) * STEP_S / 3600
            ):
                end += STEP_S
            spans.append((now, min(last, end)))
            now = end + random.lognormvariate(7.5, 1.0)
    return trace_of_lent(lent, 0.0, last)


def _rate(kind: str, node: int, age_s: float, now: float, bursts: set[int]) -> float:
    """Return the hazard per hour."""
    hour, weekend = now // 3600 % 24, (now // DAY_S + 3) % 7 >= 5
    if kind == "ageing":
        return 0.1 * ((age_s + STEP_S) / 14_400) ** -0.43
    if kind == "lectures":
        return 3.0 if hour == 10 and not weekend else 0.02 if hour < 8 or weekend else 0.1
    if kind == "timetable":
        return 6.0 if hour in LESSONS.get(int(now // DAY_S + 3) % 7, ()) else 0.03
    if kind == "habits":
        return 2.0 if hour == (7 + 3 * node) % 24 and not weekend else 0.05
    if kind == "busy":
        return 1.0
    if kind == "unlike":
        return 0.5 if node % 2 else 0.05
    if kind == "bursts":
        return 2.0 if now // 3600 in bursts else 0.03
    return 0.15
