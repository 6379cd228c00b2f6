"""Ranking nodes for a job, choosing witnesses and replica holders, and explaining each choice.

A decision names the version of every advert it saw, so that anybody with those adverts gets the same one.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

import msgspec

from placement.advert import WHOLE, Advert
from placement.allotment import allot, untouched
from placement.filters import refusals
from placement.images import image_refusal, lacks
from placement.rendezvous import rank
from placement.request import Request


class Candidate(msgspec.Struct, frozen=True):
    node: bytes
    nick: str
    score: int
    weight: int
    advert_version: int


class Refusal(msgspec.Struct, frozen=True):
    node: bytes
    nick: str
    reasons: tuple[str, ...]


class Ranking(msgspec.Struct, frozen=True):
    """`candidates` best first; everybody else with the reason."""

    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]


class Decision(msgspec.Struct, frozen=True):
    job: bytes
    attempt: int
    chosen: bytes
    order: tuple[tuple[bytes, int, int], ...]  # node, advert version, score
    digest: bytes


def rank_nodes(request: Request, adverts: Iterable[Advert]) -> Ranking:
    """The same adverts give the same ranking on every node, in whatever order they come. A share goes first to where it breaks
    no whole GPU, since those who need one have nowhere else to go; and before that, a container to where its image is."""
    by_node = {advert.node: advert for advert in adverts}
    eligible: list[Advert] = []
    refused: list[Refusal] = []
    for advert in by_node.values():
        reasons = refusals(request, advert)
        if reasons:
            refused.append(Refusal(advert.node, advert.nick, tuple(reasons)))
        else:
            eligible.append(advert)
    ordered = rank(request.key, [(advert.node, advert.weight) for advert in eligible])
    breaks = {advert.node: _broken(request, advert) for advert in eligible}
    fetch = {advert.node: lacks(request, advert) for advert in eligible}
    ordered.sort(
        key=lambda pair: (pair[0] != request.prefer, pair[0] in request.avoid, fetch[pair[0]], breaks[pair[0]])
    )
    candidates = tuple(
        Candidate(node, by_node[node].nick, points, by_node[node].weight, by_node[node].version)
        for node, points in ordered
    )
    return Ranking(candidates, tuple(sorted(refused, key=lambda refusal: refusal.node)))


def _broken(request: Request, advert: Advert) -> int:
    """How many whole GPUs a share would leave in parts here."""
    if not request.is_share:
        return 0
    given = {portion.uuid for portion in allot(request, advert.gpus, advert.room)}
    return sum(left.uuid in given and left.share == WHOLE for left in advert.room)


def decide(request: Request, ranking: Ranking) -> Decision:
    order = tuple((c.node, c.advert_version, c.score) for c in ranking.candidates)
    digest = blake2b(msgspec.msgpack.encode((request, order)), digest_size=16).digest()
    return Decision(request.job, request.attempt, order[0][0], order, digest)


def replay(decision: Decision, request: Request, adverts: Iterable[Advert]) -> bool:
    """Whether these adverts give this very decision."""
    ranking = rank_nodes(request, adverts)
    return bool(ranking.candidates) and decide(request, ranking) == decision


def explain(request: Request, ranking: Ranking) -> list[str]:
    """Why the job is where it is, or waits: one plain line each, the most telling first."""
    found = len(ranking.candidates)
    if 0 < found < request.nodes:
        some = "; ".join(f"{r.nick}: {'; '.join(r.reasons)}" for r in ranking.refused[:REFUSALS_TOLD])
        return [f"{found} of the {request.nodes} nodes it needs could take it now" + (f" ({some})" if some else "")]
    if ranking.candidates:
        best = ranking.candidates[0]
        return [f"{best.nick} is first of {len(ranking.candidates)} nodes that could run it"]
    if not ranking.refused:
        return ["no node of this mesh offers anything yet"]
    # The refusal closest to being none tells most: fewest reasons, then the commonest first reason.
    nearest = min(len(refusal.reasons) for refusal in ranking.refused)
    lines = [f"{r.nick}: {'; '.join(r.reasons)}" for r in ranking.refused if len(r.reasons) == nearest]
    head = f"no node can run it now ({_summary(request)})"
    return [f"{head}; {lines[0]}" + (f"; and {len(lines) - 1} more" if len(lines) > 1 else ""), *lines[1:]]


def witness_order(job: bytes, adverts: Iterable[Advert], nodes: Collection[bytes]) -> tuple[bytes, ...]:
    """All nodes, best witness of this job first: rendezvous by survival; a node without an advert weighs least."""
    weights = dict.fromkeys(nodes, 1) | {ad.node: ad.weight for ad in adverts if ad.node in nodes}
    return tuple(node for node, _ in rank(job + b"witness", weights.items()))


def replica_order(
    job: bytes, adverts: Sequence[Advert], exclude: Collection[bytes], need_mib: int, holders: Collection[bytes] = ()
) -> list[bytes]:
    """Peers for a job's checkpoints, best first: with room, by survival, each zone once before any twice; those where there are
    `holders` have had their turns."""
    fitting = {ad.node: ad for ad in adverts if ad.node not in exclude and ad.store_free_mib > need_mib}
    ordered = [node for node, _ in rank(job + b"replica", [(ad.node, ad.weight) for ad in fitting.values()])]
    seen = Counter(ad.zone for ad in adverts if ad.node in holders)
    turns: dict[bytes, int] = {}
    for node in ordered:
        zone = fitting[node].zone
        turns[node], seen[zone] = seen[zone], seen[zone] + 1
    return sorted(ordered, key=lambda node: turns[node])


def cannot_ever(request: Request, adverts: Sequence[Advert]) -> str | None:
    """Why no lending node could run it even when idle, or None: told at submission, not after a day of waiting.

    A mesh where nobody lends yet, or where all have paused, may change its mind: then the job waits.
    """
    lenders = [_idle(advert) for advert in adverts if advert.lending]
    refused = {advert.nick: refusals(request, advert) for advert in lenders}
    if not lenders:
        return None
    able = sum(not reasons for reasons in refused.values())
    if able and able < request.nodes:
        return f"{able} of the nodes could run it, and it needs {request.nodes}: ask for fewer with --nodes, or see `mesh nodes`"
    if able:
        return None
    most = max(lenders, key=lambda advert: len(advert.gpus))
    if len(most.gpus) < request.gpus:
        return (
            f"no node has {request.gpus} GPUs; the largest, {most.nick}, has {len(most.gpus)}. "
            "Ask for fewer with --gpus, or see `mesh nodes`."
        )
    if request.image is not None and all(image_refusal(request, advert) for advert in lenders):
        if request.image_id is None:
            return f"no lending node has image {request.image}: load it on one (`docker pull`, `docker load`)"
        told = [f"{advert.nick}: {image_refusal(request, advert)}" for advert in lenders[:REFUSALS_TOLD]]
        return f"no lending node can run image {request.image} ({'; '.join(told)}). See `mesh image ls`"
    told = [f"{nick} {', '.join(reasons)}" for nick, reasons in list(refused.items())[:REFUSALS_TOLD]]
    more = f"; and {len(refused) - REFUSALS_TOLD} more" if len(refused) > REFUSALS_TOLD else ""
    return f"no node could run it: {'; '.join(told)}{more}"


REFUSALS_TOLD = 3


def _idle(advert: Advert) -> Advert:
    """The same machine with nobody on it."""
    return msgspec.structs.replace(advert, paused=False, room=untouched(advert.gpus), slots_free=advert.slots)


def _summary(request: Request) -> str:
    parts = [f"{request.gpus} GPUs" if request.gpus else "one slot"]
    if request.is_share:
        parts = [f"{request.gpu_share} % of {parts[0]}"]
    if request.vram_mib:
        parts.append(f"{request.vram_mib} MiB each")
    if request.image:
        parts.append(f"image {request.image}")
    return ", ".join(parts)
