"""Witness group: what a majority of a job's present witnesses say, as any node can ask them.

A group replaces another only with the consent of a majority of it. So a node that knows one group, at the least the one in the
job's signed description, finds the present one step by step, by the answers of a majority of each. The one exception is a
group that the job's user has named after most of the one before was lost.
"""

import asyncio
from collections.abc import Callable

from membership.malformed import MALFORMED
from mesh.consensus.effects import WitnessRecord, decode_witness_record
from mesh.consensus.participant import Participant
from mesh.model.record import Config
from mesh.rpc.client import PeerClient, PeerError

ANSWER_S = 3.0
LATE_S = 0.3  # for the rest, once a majority has answered: a stopped node never does (own choice)
GROUPS_FOLLOWED = 32  # groups followed from the one that replaced the known one (own choice)


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

    async def present(self, job: bytes, known: Config) -> tuple[Config, list[WitnessRecord]] | None:
        """Return the present group and the records of a majority of it, starting at a known group; None without one."""
        config = known
        for _ in range(GROUPS_FOLLOWED):
            records = await self._records(job, config)
            named = [
                group for group in map(self._recovered, records) if group is not None and group.order > config.order
            ]
            if named:
                config = max(named, key=lambda group: group.order)
                continue
            if 2 * len(records) <= len(config.nodes):
                return None
            # The newest group that a majority of this one knows.
            newer = sorted((one.config for one in records), key=lambda one: one.order)[-(len(config.nodes) // 2 + 1)]
            if newer.order <= config.order:
                return config, records
            config = newer
        return None

    async def _records(self, job: bytes, config: Config) -> list[WitnessRecord]:
        """Ask a group; once a majority has answered, the others are waited for a moment only."""
        own = self._participant.witnesses.get(job)
        records = [own.witness_record] if own is not None and self._me in config.nodes else []
        path = f"/v1/jobs/{job.hex()}/witness-record"
        waiting = {
            asyncio.create_task(self._peers.call(node, "GET", path, timeout_s=ANSWER_S), name="ask a witness")
            for node in config.nodes
            if node != self._me
        }
        try:
            while waiting:
                enough = 2 * len(records) > len(config.nodes)
                timeout_s = LATE_S if enough else None
                done, waiting = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                records += [record for record in (_decoded(job, task) for task in done) if record is not None]
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
