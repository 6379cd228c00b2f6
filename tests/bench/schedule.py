"""The checkpoint rule (`placement/schedule.py`) beside Young's fixed interval with the true mean rate: time lost and stalled.

Both meet the same departures (common random numbers). Results are ratios of sums, with 95 % intervals from resampled runs, or
nodes of a trace. On synthetic hazards, the rule gets the true rate, or the survival estimator's after observing a campus with
that hazard; on a trace, the estimator knows only the past. Jobs that share a link are simulated checkpoint by checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from math import exp, gcd, inf, log, sqrt
from random import Random
from typing import Any

import msgspec

from placement.availability import Stay, Trace
from placement.schedule import (
    LEAST_S,
    MOST_S,
    Cost,
    Cover,
    Rates,
    Upload,
    next_due,
    shares,
    upload_weight,
)
from placement.survival import Estimator
from tests.bench.harness import row

Row = dict[str, Any]
Hazard = Callable[[float], float]  # departures a second
Next = Callable[[float, float], float]  # (start of the stay, start of unsaved work) -> start of the next checkpoint
Spent = tuple[float, float]  # seconds lost, seconds stalled

HOUR_S, DAY_S = 3600.0, 86_400.0
MONDAY_S = 4 * DAY_S  # in Unix time
STALL_S = 20.0
RUNS, DAYS = 40, 60.0
FIT = 0.7  # share of a trace's time
BUSY, QUIET = 1.0 / HOUR_S, 0.1 / HOUR_S  # from 8:00 to 18:00, and at other times
MACHINES, LEARNT_S, AWAY_S, TICK_S = 20, 28 * DAY_S, 60.0, 900.0  # an observed campus
CAMPUSES = 4
COVERED = 0.6  # share of departures with a sufficient notice; the testbed's share of noticed ones
DRAWS = 2000  # bootstrap resamples
NODES, STAYS = 100, 40  # that share a link
# Hours of a working day of students' machines, as in the worlds of `mesh debug sim`; a twentieth at weekends.
STUDENTS = (
    *(0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.05, 0.2, 0.59, 1.19, 1.78, 2.97),
    *(2.97, 2.77, 2.77, 2.57, 1.98, 1.58, 1.19, 0.79, 0.3, 0.1, 0.05, 0.02),
)
STUDENTS_A_DAY, WEEKEND = 1.5, 0.05


def rows(traces: Sequence[tuple[str, Trace, float]]) -> list[Row]:
    """Return the rows; `traces` are pairs of a name and its UTC offset."""
    found = [*made(), noticed(), *shared()]
    return found + [replayed(name, trace, offset_s) for name, trace, offset_s in traces]


# --- one job


def play(next_at: Next, departures: Sequence[float], upload_s: float = 0.0, covered: Sequence[bool] = ()) -> Spent:
    """Simulate an endless job that continues at once after each departure; the last departure is the end and loses nothing.

    A departure in `covered` loses nothing.
    """
    lost = stalled = begun = 0.0
    for number, departs in enumerate(departures):
        resumed, stood = begun, 0.0
        saves = [(begun, begun, 0.0)]  # (time it is safe, time of its state, stalled seconds until then)
        while (at := next_at(begun, resumed)) + STALL_S <= departs:
            resumed, stood = at + STALL_S, stood + STALL_S
            saves.append((resumed + upload_s, resumed, stood))
        stood += max(0.0, departs - at)
        stalled += stood
        if number + 1 < len(departures) and not (covered and covered[number]):
            _, since, before = next(save for save in reversed(saves) if save[0] <= departs)
            lost += departs - since - (stood - before)
        begun = departs
    return lost, stalled


def by_rule(rates: Rates, upload_s: float = 0.0, lossy: float = 1.0) -> Next:
    cost = Cost(STALL_S, upload_s)
    return lambda began, since: next_due(since, since, cost, lossy, rates).at


def by_young(rate: float) -> Next:
    every = min(MOST_S, max(LEAST_S, sqrt(2 * STALL_S / rate)))
    return lambda began, since: since + every


def by_learnt(estimator: Estimator, node: bytes, base: float, upload_s: float = 0.0) -> Next:
    """Return the rule for this machine with present knowledge; `base` is the estimator's time at 0."""
    cost = Cost(STALL_S, upload_s)

    def rates(start: float) -> Iterator[tuple[float, float]]:
        for until, rate in estimator.rates(node, base + start):
            yield until - base, rate

    def next_at(began: float, since: float) -> float:
        estimator.nodes[node].since = base + began
        return next_due(since, since, cost, 1.0, rates).at

    return next_at


# --- synthetic hazards


def stepped(time: float) -> float:
    return BUSY if 8 <= time % DAY_S / HOUR_S < 18 else QUIET


def students(time: float) -> float:
    day, hour = divmod(time % (7 * DAY_S), DAY_S)
    return STUDENTS_A_DAY / DAY_S * STUDENTS[int(hour // HOUR_S)] * (WEEKEND if day >= 5 else 1.0)


def hourly(hazard: Hazard) -> Rates:
    def rates(start: float) -> Iterator[tuple[float, float]]:
        while True:
            found = hazard(start)
            start = (start // HOUR_S + 1) * HOUR_S
            yield start, found

    return rates


def drawn(hazard: Hazard, length_s: float, random: Random) -> list[float]:
    """Return departures of a Poisson process, by thinning, and the end."""
    most = max(hazard(hour * HOUR_S) for hour in range(168))
    found, now = [], 0.0
    while (now := now - log(1 - random.random()) / most) < length_s:
        if random.random() * most < hazard(now):
            found.append(now)
    return [*found, length_s]


def learnt(hazard: Hazard, seed: int) -> Estimator:
    """Return an estimator that observed machines for four weeks, with absences of one minute."""
    estimator, random = Estimator(MONDAY_S), Random(seed)
    gone = [drawn(hazard, LEARNT_S, random)[:-1] for _ in range(MACHINES)]
    happened = [(time, 0, number) for number, times in enumerate(gone) for time in times]
    happened += [(time + AWAY_S, 1, number) for number, times in enumerate(gone) for time in [-AWAY_S, *times]]
    happened += [(tick * TICK_S, 2, number) for tick in range(1, int(LEARNT_S / TICK_S)) for number in range(MACHINES)]
    for time, kind, number in sorted(happened):
        node = b"machine %d" % number
        known = estimator.nodes.get(node)
        if kind == 0:
            estimator.record_end(node, MONDAY_S + time)
        elif kind == 1 or (known is not None and known.since is not None):
            estimator.record_lent(node, MONDAY_S + time)
    return estimator


def made() -> list[Row]:
    mean = sum(stepped(hour * HOUR_S) for hour in range(24)) / 24
    found: list[Row] = []
    for name, hazard, limit in (
        ("day-shaped hazard, 1/h from 8 to 18 h, else 0.1/h", stepped, 0.87),
        ("hazard of students' machines", students, 0.87),
        ("constant hazard, 0.475/h", lambda time: mean, 1.02),
    ):
        rates = [hazard(hour * HOUR_S) for hour in range(168)]
        average = sum(rates) / len(rates)
        bound = sum(sqrt(rate) for rate in rates) / len(rates) / sqrt(average)
        campuses = [learnt(hazard, 1000 + seed) for seed in range(CAMPUSES)]
        node, base = b"machine 0", MONDAY_S + LEARNT_S
        for knows, upload_s in (("the rate", 0.0), ("what was learnt", 0.0), ("the rate, 2 min to upload", 120.0)):
            ours: list[Spent] = []
            young: list[Spent] = []
            for seed in range(RUNS):
                gone = drawn(hazard, DAYS * DAY_S, Random(seed))
                rule = by_rule(hourly(hazard), upload_s)
                if knows == "what was learnt":
                    rule = by_learnt(campuses[seed % CAMPUSES], node, base, upload_s)
                ours.append(play(rule, gone, upload_s))
                young.append(play(by_young(average), gone, upload_s))
            measure = f"lost and stalled, relative to fixed Young's: {name}; knows {knows}"
            # Late uploads cost both the same, and are not part of this goal.
            goal = limit if upload_s == 0 or limit > 1 else None
            found.append(compared(measure, ours, young, goal) | {"limit_of_small_stalls": round(bound, 4)})
    return found


def noticed() -> Row:
    """Compare with notices: Young's interval counts every departure; the rule knows the share that a notice covers."""
    ours: list[Spent] = []
    young: list[Spent] = []
    for seed in range(RUNS):
        random = Random(seed)
        gone = drawn(stepped, DAYS * DAY_S, random)
        covered = [random.random() < COVERED for _ in gone]
        cover = Cover()
        for one in covered[:100]:  # from other days
            cover = cover.after(one)
        average = sum(stepped(hour * HOUR_S) for hour in range(24)) / 24
        ours.append(play(by_rule(hourly(stepped), lossy=cover.lossy), gone, covered=covered))
        young.append(play(by_young(average), gone, covered=covered))
    return compared(
        "lost and stalled, relative to fixed Young's: day-shaped hazard, 60 % of departures covered", ours, young
    )


# --- a trace


def replayed(name: str, trace: Trace, offset_s: float) -> Row:
    """Run a job through each stay of the last 30 % of the time; Young's interval uses the mean rate of these stays."""
    trace = finer(trace)
    cut = trace.first + FIT * (trace.last - trace.first)
    estimator = Estimator(trace.first, offset_s)
    late = [stay for stays in trace.nodes.values() for stay in stays if stay.start >= cut]
    mean = sum(stay.ended for stay in late) / sum(stay.end - stay.start for stay in late)
    happened: list[tuple[float, bool, str, Stay]] = []
    for node, stays in trace.nodes.items():
        for stay in stays:
            ticks = range(int((stay.end - stay.start) / TICK_S) + 1)
            happened += [(stay.start + tick * TICK_S, True, node, stay) for tick in ticks]
            happened.append((stay.end, False, node, stay))
    spent: dict[str, list[tuple[Spent, Spent]]] = {}
    begun: dict[str, list[float]] = {}  # checkpoints of the present stay
    for time, lent, node, stay in sorted(happened, key=lambda event: event[:3]):
        key, counts = node.encode(), stay.start >= cut
        if lent:
            estimator.record_lent(key, time, stay.start)
        if counts:
            settle(estimator, key, begun.setdefault(node, []), stay.start, time)
        if not lent:
            estimator.record_end(key, time, reclaimed=stay.ended)
            if counts:
                length = stay.end - stay.start
                gone = [length, length] if stay.ended else [length]
                young = play(by_young(mean), gone)
                spent.setdefault(node, []).append((play(listed(begun.pop(node), stay.start), gone), young))
    sums = [
        [(sum(one[side][0] for one in of_node), sum(one[side][1] for one in of_node)) for of_node in spent.values()]
        for side in (0, 1)
    ]
    measure = f"lost and stalled, relative to fixed Young's: the last 30 % of {name}, forecast online"
    return compared(measure, *sums, 0.87) | {"departures": sum(stay.ended for stay in late)}


def finer(trace: Trace) -> Trace:
    """Draw the time of departures between two samples of a coarse trace."""
    random, ends = Random(7), [stay.end for stays in trace.nodes.values() for stay in stays]
    grain_s = gcd(*(round(end - trace.first) for end in ends))
    drawn = {
        node: tuple(Stay(stay.start, stay.end - random.random() * grain_s * stay.ended, stay.ended) for stay in stays)
        for node, stays in trace.nodes.items()
    }
    return Trace(trace.first, trace.last, drawn)


def settle(estimator: Estimator, node: bytes, begun: list[float], start: float, now: float) -> None:
    """Take all checkpoints due before `now`, with the knowledge of shortly before."""
    while True:
        since = begun[-1] + STALL_S if begun else start
        at = next_due(since, since, Cost(STALL_S), 1.0, lambda begin: estimator.rates(node, begin)).at
        if at > now:
            return
        begun.append(at)


def listed(begun: Sequence[float], start: float) -> Next:
    """Return a rule with these times and no more."""
    times = iter(begun)
    return lambda began, since: next(times, inf) - start


# --- a shared link


class Job(msgspec.Struct):
    """A job on a node; `share` is its share of the link while it sends."""

    upload: Upload
    every_s: float
    share: float
    since: float = 0.0  # computes from then on; end of the last copy
    safe: float = 0.0  # time up to which work is safe
    stood: float = 0.0  # stalled seconds since the last safe checkpoint
    due: float = 0.0
    left: float = 0.0  # bytes of the checkpoint in transfer
    sent: tuple[float, float] = (0.0, 0.0)  # of that checkpoint: time of its state, stalled seconds before


def shared() -> list[Row]:
    """Simulate nodes with two to six jobs whose checkpoints together need 1.2 to 8 times the link's capacity."""
    random = Random(5)
    spent: dict[str, list[Spent]] = {"ours": [], "parts": [], "equal": []}
    for _ in range(NODES):
        jobs, budget = drawn_node(random)
        found = shares(jobs, budget)
        turns = [upload_weight(job) for job in jobs]
        young = [sqrt(2 * job.stall_s / job.rate) for job in jobs]
        ways = {
            "ours": ([job.bytes / bps for job, bps in zip(jobs, found.bps, strict=True)], turns, True),
            "parts": (
                [max(y, len(jobs) * job.bytes / budget) for y, job in zip(young, jobs, strict=True)],
                None,
                False,
            ),
            "equal": (young, None, True),
        }
        stays = [-log(1 - random.random()) / jobs[0].rate for _ in range(STAYS)]
        for name, (every, part, lends) in ways.items():
            lost = stalled = 0.0
            for stay in stays:
                one = [
                    Job(job, least, share)
                    for job, least, share in zip(jobs, every, part or [1.0] * len(jobs), strict=True)
                ]
                more = one_stay(one, budget, stay, lends)
                lost, stalled = lost + more[0], stalled + more[1]
            spent[name].append((lost, stalled))
    words = "GPU-seconds lost and stalled by jobs that share a link"
    return [
        compared(f"{words}, relative to equal shares", spent["ours"], spent["parts"], 0.9),
        compared(f"{words}, relative to equal turns and Young's intervals", spent["ours"], spent["equal"], 0.9),
    ]


def drawn_node(random: Random) -> tuple[list[Upload], float]:
    """Draw the job mix of the research testbed: median state 4 GiB, 5 to 30 % changed; nine in ten have one GPU."""
    rate = exp(random.uniform(log(0.5 / DAY_S), log(0.5 / HOUR_S)))
    jobs = []
    for _ in range(random.randint(2, 6)):
        gib = min(40.0, max(0.5, 4 * exp(random.gauss(0, 1))))
        gpus = random.choices([1, 2, 4, 8], [90, 4, 4, 2])[0]
        jobs.append(Upload(gib * 2**30 * random.uniform(0.05, 0.3), 1 + gib, rate, float(gpus)))
    wanted = sum(job.bytes * sqrt(job.rate / (2 * job.stall_s)) for job in jobs)
    return jobs, wanted / exp(random.uniform(log(1.2), log(8)))


def one_stay(jobs: Sequence[Job], budget: float, departs: float, lends: bool) -> Spent:
    """Simulate one stay and return its loss. With `lends`, unused shares of the link go to other jobs."""
    now = stalled = 0.0
    for job in jobs:
        job.due = job.every_s
    while True:
        sending = [job for job in jobs if job.left > 0]
        whole = sum(job.share for job in (sending if lends else jobs))
        speeds = [budget * job.share / whole for job in sending]
        ready = min((job.due for job in jobs if job.left <= 0), default=inf)
        done = min((now + job.left / speed for job, speed in zip(sending, speeds, strict=True)), default=inf)
        then = min(max(now, ready), done, departs)
        for job, speed in zip(sending, speeds, strict=True):
            job.left -= speed * (then - now)
            if job.left <= 1e-6 * job.upload.bytes:
                job.left = 0.0
                job.safe, before = job.sent
                job.stood -= before
        now = then
        if now >= departs:
            break
        for job in jobs:
            if job.left <= 0 and job.due <= now:
                # The transfer overlaps the copy; the stall counts, and nothing waits for its end.
                held = min(job.upload.stall_s, departs - now)
                stalled += held * job.upload.weight
                job.stood += held
                job.sent, job.left = (now + held, job.stood), job.upload.bytes
                job.due = now + held + job.every_s
    return sum(job.upload.weight * max(0.0, departs - job.safe - job.stood) for job in jobs), stalled


# --- comparing


def compared(measure: str, ours: Sequence[Spent], theirs: Sequence[Spent], limit: float | None = None) -> Row:
    """Return the ratio of time lost and stalled, with its interval; `limit` is the goal."""
    sums = [(sum(one), sum(other)) for one, other in zip(ours, theirs, strict=True)]
    random, ratios = Random(1), []
    for _ in range(DRAWS):
        chosen = random.choices(sums, k=len(sums))
        ratios.append(sum(one for one, _ in chosen) / sum(other for _, other in chosen))
    ratios.sort()
    ratio = sum(one for one, _ in sums) / sum(other for _, other in sums)
    print(f"{measure}: {ratio:.4f}", flush=True)
    found = row(
        measure, [ratio], "ratio", goal=f"<= {limit:g}" if limit else "-", met=ratio <= limit if limit else None
    )
    return found | {
        "n": len(sums),
        "ci95": [round(ratios[int(part * (DRAWS - 1))], 4) for part in (0.025, 0.975)],
        "lost_s": [round(sum(lost for lost, _ in spent)) for spent in (ours, theirs)],
        "stalled_s": [round(sum(stood for _, stood in spent)) for spent in (ours, theirs)],
    }
