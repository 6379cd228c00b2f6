"""Suggestions for a waiting job: the smallest single changes of its request or of the campus that let it start.

Each suggestion is checked: it holds a request and adverts that pass the filters.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Literal

import msgspec

from placement.advert import Advert
from placement.filters import refusals
from placement.preemption import RunningJob, without_job
from placement.request import Request

MOST = 3  # suggestions of each kind (own choice)


class NamedJob(msgspec.Struct, frozen=True):
    """A running job with its display name. `left_s`: its expected remaining run time, if known."""

    job: RunningJob
    name: str
    left_s: float | None = None


class Change(msgspec.Struct, frozen=True):
    """A change `of` the request or of the campus, after which `request` fits `adverts`. `in_s`: seconds until it happens, if
    known; `loses`: thousandths of the request that it gives up."""

    of: Literal["request", "campus"]
    text: str
    request: Request
    adverts: tuple[Advert, ...]
    in_s: float | None = None
    loses: int = 0


def suggest(request: Request, adverts: Sequence[Advert], running: Iterable[NamedJob], now_unix: float) -> list[Change]:
    """Return at most `MOST` changes of each kind, those of the campus first, soonest first. Empty if the request fits already,
    or if no single change is enough."""
    present = tuple(sorted(adverts, key=lambda advert: advert.node))
    if fits(request, present):
        return []
    asked = sorted(_smaller_requests(request, present), key=lambda change: (change.loses, change.text))
    waited = sorted(_campus_changes(request, present, running, now_unix), key=_time_and_text)
    return [*waited[:MOST], *asked[:MOST]]


def fits(request: Request, adverts: Iterable[Advert]) -> bool:
    return sum(not refusals(request, advert) for advert in adverts) >= request.nodes


def _time_and_text(change: Change) -> tuple[float, str]:
    return (inf if change.in_s is None else change.in_s, change.text)


# --- changes of the request


def _smaller_requests(request: Request, adverts: tuple[Advert, ...]) -> Iterator[Change]:
    free = [left for advert in adverts for left in advert.free_portions]
    gpus = [gpu for advert in adverts for gpu in advert.gpus]
    numbers: list[tuple[str, int | None, Iterable[int], Callable[[int], str]]] = [
        ("gpus", request.gpus, range(1, request.gpus), lambda n: f"--gpus {n}"),
        ("nodes", request.nodes, range(1, request.nodes), lambda n: f"--nodes {n}"),
        ("gpu_share", request.gpu_share, (left.share for left in free), lambda n: f"--gpu-share {n}"),
        ("vram_mib", request.vram_mib, (left.vram_mib for left in free), lambda n: f"--vram {n}m"),
        ("memory_mib", request.memory_mib, (advert.memory_mib for advert in adverts), lambda n: f"--memory {n}m"),
        ("cpus", request.cpus, (advert.cpus for advert in adverts), lambda n: f"--cpus {n}"),
    ]
    for field, asked, offered, flag in numbers:
        shares = field != "gpu_share" or request.is_share
        least = 0 if field == "vram_mib" and not request.is_share else 1
        for number in (
            sorted({n for n in offered if asked is not None and least <= n < asked}, reverse=True) if shares else ()
        ):
            smaller = msgspec.structs.replace(request, **{field: number})
            if fits(smaller, adverts):
                assert asked
                text = flag(number) if number else "no --vram"
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
    yield from _other_requests(request, adverts)


def _other_requests(request: Request, adverts: tuple[Advert, ...]) -> Iterator[Change]:
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
    if request.on:
        others.append(("no --on", msgspec.structs.replace(request, on=())))
    if request.not_on:
        others.append(("no --not-on", msgspec.structs.replace(request, not_on=())))
    if request.interactive:
        others.append(("a job without interactive sessions", msgspec.structs.replace(request, interactive=False)))
    for text, other in others:
        if fits(other, adverts):
            yield Change("request", text, other, adverts, loses=500)


def _version(option: str, version: tuple[int, ...]) -> str:
    return f"{option} {'.'.join(map(str, version))}" if any(version) else f"no {option}"


# --- changes of the campus


def _campus_changes(
    request: Request, adverts: tuple[Advert, ...], running: Iterable[NamedJob], now_unix: float
) -> Iterator[Change]:
    offers = {advert.node: advert for advert in adverts}
    for named in running:
        offer = offers.get(named.job.node)
        if offer is not None and named.job.job != request.job:
            about = "" if named.left_s is None else f" (about {_duration(named.left_s)})"
            text = f"when {named.name} on {offer.nick} ends{about}"
            yield from _if_fits(request, adverts, without_job(offer, named.job), text, named.left_s)
    for offer in adverts:
        nick = offer.nick
        lent = msgspec.structs.replace(offer, lending=True, paused=False, held_by="", back_unix=0)
        if not offer.lending:
            yield from _if_fits(request, adverts, lent, f"if {nick}'s owner lends it (`mesh up --lend` there)")
        elif offer.paused and offer.held_by == "hours":
            wait_s = max(0.0, offer.back_unix - now_unix) if offer.back_unix else None
            when = "" if wait_s is None else f" (in {_duration(wait_s)})"
            yield from _if_fits(request, adverts, lent, f"when {nick} is lent again{when}", wait_s)
        elif offer.paused and offer.held_by == "owner":
            yield from _if_fits(request, adverts, lent, f"when {nick}'s owner leaves")
        elif offer.paused:
            yield from _if_fits(request, adverts, lent, f"if {nick}'s owner resumes (`mesh lend` there)")
    for node in request.exclude:
        again = msgspec.structs.replace(request, exclude=tuple(other for other in request.exclude if other != node))
        if node in offers and fits(again, adverts):
            yield Change("campus", f"when {offers[node].nick}, where it has failed, is tried again", again, adverts)


def _if_fits(
    request: Request, adverts: tuple[Advert, ...], changed: Advert, text: str, in_s: float | None = None
) -> Iterator[Change]:
    after = tuple(changed if advert.node == changed.node else advert for advert in adverts)
    if fits(request, after):
        yield Change("campus", text, request, after, in_s)


def _duration(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"
