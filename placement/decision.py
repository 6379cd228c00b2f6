"""Decisions: the node of a job, its witnesses and its checkpoint holders, each with an explanation.

A decision names the version of every advert it used, so every node with those adverts can recompute it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec

from membership.lengths import MOST_LISTED, Id, Ids
from placement.advert import MAX_WEIGHT, Advert
from placement.allocation import all_free
from placement.filters import image_refusal, refusals
from placement.ranking import Ranking
from placement.rendezvous import best_first, draws, rank, weighed
from placement.request import Request

RULE = 2  # version of the ranking rule: nodes with another version may decide otherwise
MOST_PASSED = 8  # nodes that a decision lists as declined or reserved, so that an event stays small (own choice)
NAMED = 4  # candidates that a decision lists: fall-backs if the first is gone (own choice)

_WEIGHED = tuple(weighed(weight) for weight in range(MAX_WEIGHT + 1))


class Decision(msgspec.Struct, frozen=True):
    """A placement decision. `order`: the first candidates, each with its node, the version of its advert and its weight. `asked`:
    a hash of the request. Nodes in `declined` had refused the job; on nodes in `kept`, places were reserved for other jobs."""

    rule: int
    job: Id
    attempt: int
    asked: Id
    order: Annotated[tuple[tuple[Id, int, int], ...], msgspec.Meta(max_length=MOST_LISTED)]
    declined: Ids = ()
    kept: Ids = ()

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
    """Return the decision for this ranking; None if no node can take the job."""
    order = tuple((c.node, c.advert_version, c.weight) for c in ranking.first(NAMED, declined))
    if not order:
        return None
    asked = blake2b(msgspec.msgpack.encode(request), digest_size=16).digest()
    passed, held = (tuple(sorted(nodes)[:MOST_PASSED]) for nodes in (declined, kept))
    return Decision(RULE, request.job, request.attempt, asked, order, passed, held)


def replay(decision: Decision, request: Request, ranking: Ranking) -> bool:
    """Return True if this ranking gives this decision again."""
    return decide(request, ranking, decision.declined, decision.kept) == decision


def explain(request: Request, ranking: Ranking) -> list[str]:
    """Explain the job's place, or why it waits: one line per reason, the most informative first."""
    found = len(ranking.candidates)
    if 0 < found < request.nodes:
        some = "; ".join(f"{r.nick}: {'; '.join(r.reasons)}" for r in ranking.refused[:REFUSALS_SHOWN])
        return [f"{found} of the {request.nodes} nodes it needs could take it now" + (f" ({some})" if some else "")]
    if ranking.candidates:
        best = ranking.candidates[0].nick
        return [
            f"{best} is first of {found} nodes that could run it"
            if found > 1
            else f"{best} is the only node that could run it"
        ]
    if not ranking.refused:
        return ["no node of this mesh offers anything yet"]
    # The node with the fewest reasons is the closest to a fit.
    nearest = min(len(refusal.reasons) for refusal in ranking.refused)
    lines = [f"{r.nick}: {'; '.join(r.reasons)}" for r in ranking.refused if len(r.reasons) == nearest]
    head = f"no node can run it now ({_summary(request)})"
    return [f"{head}; {lines[0]}" + (f"; and {len(lines) - 1} more" if len(lines) > 1 else ""), *lines[1:]]


def witness_order(job: bytes, adverts: Iterable[Advert], nodes: Collection[bytes]) -> tuple[bytes, ...]:
    """Return all nodes, the best witness of this job first: rendezvous by survival. A node without an advert has weight 1."""
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
    """Return peers for a job's checkpoints, best first, at most `most`.

    Only nodes with `need_mib` of free space, by survival, each zone once before any comes twice. A zone of one of the `holders`
    counts as used already.
    """
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
    """Explain why no lending node could run the job even when idle; None if one could. Checked at submission.

    None also if no node lends at the moment, of those that it names: owners may resume, so the job waits.
    """
    named = [advert for advert in adverts if advert.node in request.on] if request.on else adverts
    lenders = [_idle(advert) for advert in named if advert.lending]
    refused = [(advert.nick, refusals(request, advert)) for advert in lenders]  # two nodes may have one nick
    if not lenders:
        return None
    able = sum(not reasons for _, reasons in refused)
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
        texts = [f"{advert.nick}: {image_refusal(request, advert)}" for advert in lenders[:REFUSALS_SHOWN]]
        return f"no lending node can run image {request.image} ({'; '.join(texts)}). See `mesh image ls`"
    texts = [f"{nick}: {', '.join(reasons)}" for nick, reasons in refused[:REFUSALS_SHOWN]]
    more = f"; and {len(refused) - REFUSALS_SHOWN} more" if len(refused) > REFUSALS_SHOWN else ""
    return f"no node could run it: {'; '.join(texts)}{more}"


REFUSALS_SHOWN = 3


def _idle(advert: Advert) -> Advert:
    """Return the advert as it is with no job on the node."""
    return msgspec.structs.replace(advert, paused=False, free_portions=all_free(advert.gpus), slots_free=advert.slots)


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
