"""Rows of `make bench-placement`: cost of a placement, movement of jobs as survival drifts, agreement of all nodes."""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from placement.advert import MAX_WEIGHT, Advert, Gpu
from placement.allocation import all_free, reserve
from placement.decision import decide
from placement.ranking import rank_nodes
from placement.request import Request
from placement.zones import TWO_LEVEL_PAST
from tests.bench.harness import row

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]

SIZES = ((54, 40.0), (1000, 700.0))  # nodes, and the limit in microseconds
ROUNDS, JOBS = 5, 100
STEPS = 4 * 96  # quarter hours
KEYS = 540


def campus(count: int, seed: int) -> list[Advert]:
    """Return machines with one to eight GPUs, some in use, some paused, in twelve zones."""
    random = Random(seed)
    return [_machine(number, random) for number in range(count)]


def _machine(number: int, random: Random) -> Advert:
    gpus = tuple(
        Gpu(f"GPU-{number}-{place}", "NVIDIA RTX A6000", 49_140, (8, 6))
        for place in range(random.choice((1, 1, 1, 2, 4, 8)))
    )
    taken, slots = random.randint(0, 1), 4
    return Advert(
        version=random.randint(1, 99),
        node=random.randbytes(32),
        nick=f"n{number}",
        user=f"owner{number % 7}",
        zone=f"zone {number % 12}",
        weight=random.randrange(4, MAX_WEIGHT + 1, 4),
        up_since_unix=0,
        lending=True,
        paused=random.random() < 0.1,
        gpus=gpus,
        free_portions=all_free(gpus)[taken:],
        guards=True,
        gpu_sharing=True,
        slots=slots,
        slots_free=random.randint(0, slots),
        cpus=16,
        memory_mib=65_536,
        engines=("process", "docker"),
        own_only=(),
        images=(),
        accepts=("*",),
        store_free_mib=1 << 20,
    )


def rows() -> list[Row]:
    return [*costs(), *movement(), agreement()]


def costs() -> list[Row]:
    """Measure the CPU time of one placement: request, filters, ranking, decision. `known`: adverts have cached this request."""
    found: list[Row] = []
    for count, most in SIZES:
        adverts = campus(count, 1)
        homes = {advert.node: advert.zone for advert in adverts}
        kinds: list[tuple[str, dict[str, Any], dict[bytes, str] | None]] = [
            ("a GPU", {"gpus": 1, "vram_mib": 20_000}, None),
            ("a slot", {}, None),
            ("a GPU, by zone first", {"gpus": 1, "vram_mib": 20_000}, homes),
        ][: 3 if count > TWO_LEVEL_PAST else 2]
        for name, asks, where in kinds:
            ours = _each(partial(_placed, adverts, where), asks)
            peer = _each(partial(_floating, adverts), asks)
            found.append(
                row(
                    f"one placement among {count} nodes: {name}",
                    ours,
                    "us",
                    goal=f"<= {most:g}",
                    met=statistics.median(ours) <= most,
                    peer="weighted rendezvous in floating point, without filters",
                    peer_values=peer,
                )
            )
        fresh = []
        for number in range(ROUNDS):
            new = campus(count, 1)
            request = Request(b"%d" % number, 0, "ada", gpus=1, vram_mib=20_000)
            begun = time.process_time()
            decide(request, rank_nodes(request, new))
            fresh.append((time.process_time() - begun) * 1e6)
        found.append(row(f"the first of its shape among {count} new nodes", fresh, "us", goal="-", met=None))
    return found


def _each(place: Callable[[Request], object], asks: dict[str, Any]) -> list[float]:
    """Return the microseconds of a placement, by round."""
    place(Request(b"first", 0, "ada", **asks))
    taken = []
    for number in range(ROUNDS):
        requests = [Request(b"%d %d" % (number, job), 0, "ada", **asks) for job in range(JOBS)]
        begun = time.process_time()
        for request in requests:
            place(request)
        taken.append((time.process_time() - begun) / JOBS * 1e6)
    return taken


def _placed(adverts: Sequence[Advert], homes: dict[bytes, str] | None, request: Request) -> object:
    return decide(request, rank_nodes(request, adverts, homes))


def _floating(adverts: Sequence[Advert], request: Request) -> bytes:
    """Return the textbook choice: the node with the largest -w / ln(u), with u a keyed hash of the node."""
    start = blake2b(request.key, digest_size=8)
    best, chosen = -1.0, b""
    for advert in adverts:
        state = start.copy()
        state.update(advert.node)
        score = -advert.weight / math.log((int.from_bytes(state.digest(), "big") + 1) / 18_446_744_073_709_551_617)
        if score > best:
            best, chosen = score, advert.node
    return chosen


def movement() -> list[Row]:
    """Count the jobs that move in a quarter hour, over four days of survival that changes with the day and at random.

    Each job asks at every step where it should run.
    """
    found = []
    for where, low, high in (("as in the survey", 0.1, 0.9), ("of surer nodes", 0.4, 0.95)):
        random = Random(1)
        nodes = [(random.uniform(low, high), random.random() * 2 * math.pi) for _ in range(54)]
        slots = KEYS  # enough slots for all
        adverts = [
            msgspec.structs.replace(_machine(n, random), paused=False, slots=slots, slots_free=slots) for n in range(54)
        ]
        at: dict[int, int] = {}
        number_of = {advert.node: number for number, advert in enumerate(adverts)}
        moved, chosen, worst = 0, 0.0, 0.0
        for step in range(STEPS):
            stays = [
                min(0.99, max(0.02, mean + 0.2 * math.sin(2 * math.pi * step / 96 + phase) + random.gauss(0, 0.02)))
                for mean, phase in nodes
            ]
            adverts = [
                msgspec.structs.replace(advert, weight=max(1, round(MAX_WEIGHT * stay)))
                for advert, stay in zip(adverts, stays, strict=True)
            ]
            for job in range(KEYS):
                request, now = Request(b"%d" % job, 0, "ada"), at.get(job)
                best = rank_nodes(request, adverts).settle(None if now is None else adverts[now].node)
                assert best is not None
                new = number_of[best.node]
                if new != now:
                    adverts[new] = reserve(adverts[new], request)
                    if now is not None:
                        free = adverts[now].slots_free + 1
                        adverts[now] = msgspec.structs.replace(adverts[now], slots_free=free)
                        moved += 1
                    at[job] = new
            chosen += sum(stays[node] for node in at.values()) / KEYS / STEPS
            worst = max(worst, max(slots - advert.slots_free for advert in adverts) * 54 / KEYS)
        share = 100 * moved / KEYS / (STEPS - 1)
        mean = statistics.fmean(mean for mean, _ in nodes)
        reachable = statistics.fmean(sorted((mean for mean, _ in nodes), reverse=True)[:27])
        goal = "<= 2.5, at survival >= 0.75, max/mean <= 2"
        met = share <= 2.5 and chosen >= 0.75 and worst <= 2
        found.append(
            row(f"jobs that move in 15 min as survival drifts, 54 nodes {where}", [share], "%", goal=goal, met=met)
            | {"survival_of_chosen": chosen, "survival_of_all": mean, "max_over_mean_load": worst}
            | {"survival_of_the_better_half": reachable, "jobs": KEYS, "steps": STEPS}
        )
    return found


PROGRAM = """
import sys
from random import Random
import msgspec
from placement.decision import decide
from placement.ranking import rank_nodes
from placement.request import Request
from tests.bench.rankings import campus
adverts = campus(200, 5)
Random(int(sys.argv[1])).shuffle(adverts)
for number in range(1000):
    asks = {"gpus": number % 3, "vram_mib": 10_000 * (number % 2)}
    request = Request(b"%d" % number, number % 3, "ada", **asks)
    homes = {advert.node: advert.zone for advert in adverts} if number % 2 else None
    print(msgspec.msgpack.encode(decide(request, rank_nodes(request, adverts, homes))).hex())
"""


def agreement() -> Row:
    """Compare a thousand decisions, byte for byte, in eight processes with other hash seeds and orders of adverts."""
    told = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(seed)],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in range(8)
    ]
    same = sum(len(set(answers)) == 1 for answers in zip(*told, strict=True))
    share = 100 * same / len(told[0])
    return row("equal decisions in 8 processes with the same adverts", [share], "%", goal="100", met=share == 100) | {
        "decisions": len(told[0])
    }
