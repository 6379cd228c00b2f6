"""What would let a waiting job start: the smallest single changes of what it asks, and those of the campus, nearest first.

Each is a request and adverts that the same filters let through, so what is said is so. Nothing is foretold but what is given.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Literal

import msgspec

from placement.advert import Advert
from placement.filters import refusals
from placement.preemption import Stay, vacated
from placement.request import Request

TOLD = 3  # of each kind; ours


class Running(msgspec.Struct, frozen=True):
    """A job that has a place; `left_s`: how long it is likely to go on, if that is known."""

    stay: Stay
    name: str
    left_s: float | None = None


class Change(msgspec.Struct, frozen=True):
    """`of` the request or the campus; with it `request` fits `adverts`. `in_s`: when that is, if it is known; `loses`: of what
    was asked for, in thousandths."""

    of: Literal["request", "campus"]
    text: str
    request: Request
    adverts: tuple[Advert, ...]
    in_s: float | None = None
    loses: int = 0


def nearest(request: Request, adverts: Sequence[Advert], running: Iterable[Running], now_unix: float) -> list[Change]:
    """At most `TOLD` changes of each kind, the campus's first where their time is known. Empty if it fits already, or if no
    single change would do."""
    there = tuple(sorted(adverts, key=lambda advert: advert.node))
    if fits(request, there):
        return []
    asked = sorted(_asking_less(request, there), key=lambda change: (change.loses, change.text))
    waited = sorted(_waiting(request, there, running, now_unix), key=_soonest)
    return [*waited[:TOLD], *asked[:TOLD]]


def fits(request: Request, adverts: Iterable[Advert]) -> bool:
    return sum(not refusals(request, advert) for advert in adverts) >= request.nodes


def _soonest(change: Change) -> tuple[float, str]:
    return (inf if change.in_s is None else change.in_s, change.text)


# --- of the request


def _asking_less(request: Request, adverts: tuple[Advert, ...]) -> Iterator[Change]:
    room = [left for advert in adverts for left in advert.room]
    gpus = [gpu for advert in adverts for gpu in advert.gpus]
    numbers: list[tuple[str, int | None, Iterable[int], Callable[[int], str]]] = [
        ("gpus", request.gpus, range(1, request.gpus), lambda n: f"--gpus {n}"),
        ("nodes", request.nodes, range(1, request.nodes), lambda n: f"--nodes {n}"),
        ("gpu_share", request.gpu_share, (left.share for left in room), lambda n: f"--gpu-share {n}"),
        ("vram_mib", request.vram_mib, (left.vram_mib for left in room), lambda n: f"--vram {n}m"),
        ("memory_mib", request.memory_mib, (advert.memory_mib for advert in adverts), lambda n: f"--memory {n}m"),
        ("cpus", request.cpus, (advert.cpus for advert in adverts), lambda n: f"--cpus {n}"),
    ]
    for field, asked, offered, words in numbers:
        shares = field != "gpu_share" or request.is_share
        least = 0 if field == "vram_mib" and not request.is_share else 1
        for number in (
            sorted({n for n in offered if asked is not None and least <= n < asked}, reverse=True) if shares else ()
        ):
            smaller = msgspec.structs.replace(request, **{field: number})
            if fits(smaller, adverts):
                assert asked
                text = words(number) if number else "no --vram"
                yield Change("request", text, smaller, adverts, loses=1000 * (asked - number) // asked)
                break
    versions: list[tuple[str, list[tuple[int, ...]], str]] = [
        ("capability", [*sorted({gpu.capability for gpu in gpus}, reverse=True)], "--compute-capability"),
        ("driver", sorted({advert.driver for advert in adverts}, reverse=True), "--driver"),
    ]
    for field, offered_versions, option in versions:
        for version in offered_versions:
            smaller = msgspec.structs.replace(request, **{field: version})
            if version < getattr(request, field) and fits(smaller, adverts):
                yield Change("request", _version(option, version), smaller, adverts, loses=500)
                break
    yield from _asking_otherwise(request, adverts)


def _asking_otherwise(request: Request, adverts: tuple[Advert, ...]) -> Iterator[Change]:
    others: list[tuple[str, Request]] = []
    if request.zone is not None:
        names = sorted({advert.zone for advert in adverts} - {request.zone, ""})
        others += [(f"--zone {name}", msgspec.structs.replace(request, zone=name)) for name in names]
        others.append(("no --zone", msgspec.structs.replace(request, zone=None)))
    if request.engine is not None:
        names = sorted({name for advert in adverts for name in advert.engines} - {request.engine})
        others += [(f"--engine {name}", msgspec.structs.replace(request, engine=name)) for name in names]
    if request.gpu_model:
        names = sorted({gpu.model for advert in adverts for gpu in advert.gpus})
        others += [(f'--gpu-model "{name}"', msgspec.structs.replace(request, gpu_model=name)) for name in names]
    if request.interactive:
        others.append(("a job that nobody goes into", msgspec.structs.replace(request, interactive=False)))
    for text, other in others:
        if fits(other, adverts):
            yield Change("request", text, other, adverts, loses=500)


def _version(option: str, version: tuple[int, ...]) -> str:
    return f"{option} {'.'.join(map(str, version))}" if any(version) else f"no {option}"


# --- of the campus


def _waiting(
    request: Request, adverts: tuple[Advert, ...], running: Iterable[Running], now_unix: float
) -> Iterator[Change]:
    offers = {advert.node: advert for advert in adverts}
    for job in running:
        offer = offers.get(job.stay.node)
        if offer is not None and job.stay.job != request.job:
            about = "" if job.left_s is None else f" (about {_lasting(job.left_s)})"
            text = f"when {job.name} on {offer.nick} ends{about}"
            yield from _if_so(request, adverts, vacated(offer, job.stay), text, job.left_s)
    for offer in adverts:
        nick = offer.nick
        lent = msgspec.structs.replace(offer, lending=True, paused=False, held_by="", back_unix=0)
        if not offer.lending:
            yield from _if_so(request, adverts, lent, f"if {nick}'s owner lends it (`mesh up --lend` there)")
        elif offer.paused and offer.held_by == "hours":
            wait_s = max(0.0, offer.back_unix - now_unix) if offer.back_unix else None
            when = "" if wait_s is None else f" (in {_lasting(wait_s)})"
            yield from _if_so(request, adverts, lent, f"when {nick} is lent again{when}", wait_s)
        elif offer.paused and offer.held_by == "owner":
            yield from _if_so(request, adverts, lent, f"when {nick}'s owner has gone")
        elif offer.paused:
            yield from _if_so(request, adverts, lent, f"if {nick}'s owner resumes (`mesh resume` there)")
    for node in request.exclude:
        again = msgspec.structs.replace(request, exclude=tuple(other for other in request.exclude if other != node))
        if node in offers and fits(again, adverts):
            yield Change(
                "campus", f"once it is tried again on {offers[node].nick}, where it has failed", again, adverts
            )


def _if_so(
    request: Request, adverts: tuple[Advert, ...], changed: Advert, text: str, in_s: float | None = None
) -> Iterator[Change]:
    after = tuple(changed if advert.node == changed.node else advert for advert in adverts)
    if fits(request, after):
        yield Change("campus", text, request, after, in_s)


def _lasting(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"
