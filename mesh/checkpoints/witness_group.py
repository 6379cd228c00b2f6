"""Witness group: what a majority of a job's present witnesses say, as any node can ask them.

A group replaces another only with the consent of a majority of it. So a node that knows one group, at the least the one in the
job's signed description, finds the present one step by step, by the answers of a majority of each. The one exception is a
group that the job's user has named after most of the one before was lost.
"""

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import NamedTuple, cast

from membership.identity import NodeId
from membership.malformed import MALFORMED
from mesh.consensus.effects import WitnessRecord, decode_witness_record
from mesh.consensus.participant import Participant
from mesh.model.record import Config, Voter, Voters
from mesh.rpc.client import PeerClient, PeerError

ANSWER_S = 3.0
LATE_S = 0.3  # for the rest, once a majority has answered: a stopped node never does (own choice)
LATER_ASKED = 8  # nodes asked whether they are later witnesses (own choice)
GROUPS_FOLLOWED = 32  # groups followed from the one that replaced the known one (own choice)

Records = Mapping[NodeId, WitnessRecord]
Present = tuple[Config, Records]


class Words(NamedTuple):
    """What witnesses say of a job: the records of most of a group; or, with `few`, those of fewer, of which one may lie."""

    records: Records = MappingProxyType({})
    few: bool = False


def follow_groups(
    known: Config, recovered: Callable[[WitnessRecord], Config | None], heard: dict[NodeId, WitnessRecord]
) -> Generator[Config, Records, Present | None]:
    """Find the present group from a known one. Yield each group to ask, and be sent the records of those who answer.

    Return the present group and the records of a majority of it; None without one. `recovered`: see `WitnessGroup`. `heard`
    takes every answer: those of earlier groups prove who the later witnesses are.
    """
    config = known
    for _ in range(GROUPS_FOLLOWED):
        records = yield config
        heard.update(records)
        named = [group for group in map(recovered, records.values()) if group is not None]
        newer = max((config, *_known_by_most(config, records), *named), key=lambda group: group.order)
        if newer.order > config.order:
            config = newer
        elif 2 * len(counting := counted(config, records)) > len(config.nodes):
            return config, counting
        else:
            return None
    return None


def _known_by_most(config: Config, records: Records) -> Iterator[Config]:
    """Yield the newest group that a majority of these witnesses knows; during a change, of the old and of the new ones.

    Either may replace a group that is not in force: the old ones if they never agreed to it, the new ones later.
    """
    for part in filter(None, (config.members, config.previous)):
        nodes = {voter.node for voter in part}
        groups = sorted((records[node].config for node in nodes & records.keys()), key=lambda group: group.order)
        most = len(nodes) // 2 + 1
        if len(groups) >= most:
            yield groups[-most]


def counted(config: Config, records: Records) -> Records:
    """Return the records that count for a group: those of its voters.

    A node whose journal is an old copy votes no more (`disk_age.py`). Its record counts only for what stays true: that the job
    is over, or that there is a later group.
    """
    return {
        node: record
        for node, record in records.items()
        if Voter(node, record.disk) in config.everyone or record.final or record.config.order > config.order
    }


def is_outdated(present: Present) -> bool:
    """Tell whether a witness knows a later group: then most of those that agreed to it may have lost their disks since."""
    config, records = present
    return any(record.config.order > config.order for record in records.values())


def nodes_to_ask(present: Present | None, named: Iterable[NodeId], heard: Records) -> tuple[NodeId, ...]:
    """Return the nodes that may be later witnesses: those of groups that present ones know, then those that statuses name; but
    for those that were heard.
    """
    known = (node for record in (present[1].values() if present is not None else ()) for node in record.config.nodes)
    return tuple(node for node in dict.fromkeys([*known, *named]) if node not in heard)[:LATER_ASKED]


def last_words(present: Present | None, proven: Records, least: int, agreed: Set[Voters]) -> Words:
    """Return what witnesses say while most of the present group may have lost their disks, or cannot be asked.

    Those who are `proven` are witnesses. One former witness can have a group accepted alone that it made up, but not two nodes
    of it that say the same: a group of fewer than `least` nodes counts only if it is one of those `agreed` on.
    """
    latest = max((record.config for record in proven.values()), key=lambda group: group.order, default=None)
    if latest is not None:
        known = {node: proven[node] for node in latest.nodes if node in proven and proven[node].config == latest}
        records = counted(latest, known)
        if 2 * len(records) > len(latest.nodes) and (len(latest.members) >= least or latest.members in agreed):
            return Words(records)
    return Words({**(present[1] if present is not None else {}), **proven}, few=True)


class WitnessGroup:
    """`recovered` gives the group that the job's user has named in a recovery, by a witness's record."""

    def __init__(
        self,
        me: bytes,
        peers: PeerClient,
        participant: Participant,
        recovered: Callable[[WitnessRecord], Config | None] = lambda record: None,
    ) -> None:
        self._me, self._peers, self._participant, self._recovered = me, peers, participant, recovered

    async def present(
        self, job: bytes, known: Config, heard: dict[NodeId, WitnessRecord] | None = None
    ) -> Present | None:
        """Return the present group and the records of a majority of it, starting at a known group; None without one.

        `heard` takes all that witnesses answer.
        """
        walk = follow_groups(known, self._recovered, heard if heard is not None else {})
        try:
            config = next(walk)
            while True:
                config = walk.send(await self._records(job, config))
        except StopIteration as end:
            return cast(Present | None, end.value)

    async def _records(self, job: bytes, config: Config) -> Records:
        """Ask a group; once a majority has answered, the others are waited for a moment only."""
        own = self._participant.witnesses.get(job)
        records = {self._me: own.witness_record} if own is not None and self._me in config.nodes else {}
        path = f"/v1/jobs/{job.hex()}/witness-record"
        waiting = {
            asyncio.create_task(self._peers.call(node, "GET", path, timeout_s=ANSWER_S), name="ask a witness"): node
            for node in config.nodes
            if node != self._me
        }
        try:
            while waiting:
                enough = 2 * len(counted(config, records)) > len(config.nodes)
                timeout_s = LATE_S if enough else None
                done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                answers = {waiting.pop(task): _decoded(job, task) for task in done}
                records |= {node: record for node, record in answers.items() if record is not None}
                if enough and not done:
                    break
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return records


def _decoded(job: bytes, answer: asyncio.Task[bytes]) -> WitnessRecord | None:
    try:
        record = decode_witness_record(answer.result())
    except (PeerError, *MALFORMED):
        return None
    return record if record.job == job else None
