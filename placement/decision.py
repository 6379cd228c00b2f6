"""Ranking nodes for a job, choosing witnesses and replica holders, and explaining each choice.

A decision names the version of every advert it saw, so that anybody with those adverts gets the same one.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

import msgspec

from placement.advert import MAX_WEIGHT, Advert
from placement.allotment import untouched
from placement.filters import refusals
from placement.images import image_refusal
from placement.ranking import Ranking
from placement.rendezvous import best_first, draws, rank, weighed
from placement.request import Request

RULE = 2  # by which nodes are ranked: nodes of another rule may decide otherwise
MOST_PASSED = 8  # nodes told of those who declined, so that an event stays small; ours
NAMED = 4  # of the ranking, in a decision: the next ones if the first is gone; ours

_WEIGHED = tuple(weighed(weight) for weight in range(MAX_WEIGHT + 1))


class Decision(msgspec.Struct, frozen=True):
    """`order`: the first of the ranking; of each the node, the version of the advert that was seen, and its weight. `asked`: a
    hash of the request. Those who had `declined` were passed over; on those in `kept`, places were kept for others."""

    rule: int
    job: bytes
    attempt: int
    asked: bytes
    order: tuple[tuple[bytes, int, int], ...]
    declined: tuple[bytes, ...] = ()
    kept: tuple[bytes, ...] = ()

    @property
    def chosen(self) -> bytes:
        return self.order[0][0]

    @property
    def words(self) -> str:
        _, version, weight = self.order[0]
        return f"by its advert {version}, survival {weight}/{MAX_WEIGHT}, before {len(self.order) - 1} named after it"


def decide(
    request: Request, ranking: Ranking, declined: Collection[bytes] = (), kept: Collection[bytes] = ()
) -> Decision | None:
    """What comes of it; None if nobody can take the job."""
    order = tuple((c.node, c.advert_version, c.weight) for c in ranking.first(NAMED, declined))
    if not order:
        return None
    asked = blake2b(msgspec.msgpack.encode(request), digest_size=16).digest()
    passed, held = (tuple(sorted(nodes)[:MOST_PASSED]) for nodes in (declined, kept))
    return Decision(RULE, request.job, request.attempt, asked, order, passed, held)


def replay(decision: Decision, request: Request, ranking: Ranking) -> bool:
    """Whether this ranking gives this very decision: that of the same request, by adverts of the versions it names."""
    return decide(request, ranking, decision.declined, decision.kept) == decision


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
    job: bytes,
    adverts: Sequence[Advert],
    exclude: Collection[bytes],
    need_mib: int,
    holders: Collection[bytes] = (),
    most: int | None = None,
) -> list[bytes]:
    """Peers for a job's checkpoints, best first: with room, by survival, each zone once before any twice; those where there are
    `holders` have had their turns. No more than `most`: the first are found without ranking all."""
    fitting = [ad for ad in adverts if ad.store_free_mib > need_mib and ad.node not in exclude]
    turns = Counter([ad.zone for ad in adverts if ad.node in holders])
    first = min((turns[zone] for zone in {ad.zone for ad in fitting}), default=0)
    found = draws(job + b"replica", [ad.lane for ad in fitting])
    weights, nodes = [ad.weight for ad in fitting], [ad.node for ad in fitting]
    order: dict[int, list[bytes]] = {first: []}
    for place, _ in best_first(found, weights, nodes, _WEIGHED):
        zone = fitting[place].zone
        order.setdefault(turns[zone], []).append(nodes[place])
        turns[zone] += 1
        if most is not None and len(order[first]) >= most:
            break
    return [node for turn in sorted(order) for node in order[turn]][:most]


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
    if request.gpus and not most.gpus:
        return f"no node that lends has a GPU, and it needs {request.gpus}: see `mesh nodes`"
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
    if request.gpu_model:
        parts.append(request.gpu_model)
    if request.vram_mib:
        parts.append(f"{request.vram_mib} MiB each")
    if request.image:
        parts.append(f"image {request.image}")
    return ", ".join(parts)
