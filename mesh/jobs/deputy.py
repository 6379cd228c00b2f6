"""Brings jobs to witnesses that do not answer yet, for this node's user and for others: the shell around `errands.Errands`.

What it keeps is on disk before it says so, and it goes on after a restart. Two may bring one job: a witness takes it in once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from membership.identity import NodeId, short_id
from membership.node import MembershipNode
from mesh.api.peer import PeerClient, PeerError
from mesh.jobs.errands import Around, Entrust, Errand, Errands, GiveUp, Told, Try, errand_of, line
from mesh.jobs.journal import Journal
from mesh.jobs.service import JobService, instant
from mesh.jobs.spec import JobSpec, SpecError, format_job

SECTION, TTL_S, REPEAT_S = "errands", 3600.0, 900.0
JOBS_TOLD = 64
LOOK_S = 1.0
ASK_WITHIN_S = 3.0  # a peer that is asked to keep a job answers after one fsync
AT_ONCE = 64

log = logging.getLogger(__name__)


class Refused(RuntimeError):
    """This node does not keep the job for another; the text says why."""


class Deputy:
    def __init__(
        self,
        me: NodeId,
        membership: MembershipNode,
        journal: Journal,
        jobs: JobService,
        peers: PeerClient,
        open_spec: Callable[[bytes, bytes], JobSpec],
        note: Callable[[bytes, str], object],
    ) -> None:
        self.errands = Errands(me)
        self._me, self._membership, self._journal = me, membership, journal
        self._jobs, self._peers = jobs, peers
        self._open_spec, self._note = open_spec, note
        self._busy: dict[tuple[str, bytes], asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._told: tuple[Told, float] = (Told(0, ()), 0.0)
        self._leaving = False

    async def restore(self) -> None:
        for data in await self._journal.errands():
            with suppress(msgspec.MsgspecError):
                self.errands.keep(_decoder.decode(data))

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._busy.values():
                task.cancel()

    # --- for this node's user

    async def submit(self, spec: JobSpec) -> tuple[bytes, str]:
        """Hand a job to its witnesses: its id, and what its user is to know if they have not got it yet."""
        job, sealed, problem = await self._jobs.submit(spec)
        if problem is None:
            return job, ""
        errand = await self._keep(errand_of(job, sealed, spec))
        await self._entrust(errand, line(errand, self._me, self._around()))
        return job, self.words(job)

    def words(self, job: bytes) -> str:
        """Who brings it to its witnesses, as far as this node knows; empty if they have it."""
        errand = self.errands.get(job)
        if errand is not None and errand.submitter == self._me:
            if not errand.deputy:
                return (
                    "no majority of its witnesses answers, and no other node keeps it for them; this node submits it "
                    "when they do, while it is up"
                )
            return f"no majority of its witnesses answers; {self.deputy_of(errand)}, submits it when they do"
        told = [self._nick(node) for node, news in self.told().items() if job in news.jobs]
        return (
            f"no majority of its witnesses answers; {', '.join(sorted(told))} submits it when they do" if told else ""
        )

    def deputy_of(self, errand: Errand) -> str:
        zone = next((zone for zone in self._around().zones if zone.name == errand.zone), None)
        role = "coordinator" if zone is not None and zone.coordinator == errand.deputy else "next in line"
        return f"{self._nick(errand.deputy)}, {role} of zone {errand.zone or '(none)'}"

    async def withdraw(self, job: bytes) -> None:
        """Its user has cancelled it: nobody is to bring it any more, as far as they can be told."""
        errand = self.errands.get(job)
        if errand is None:
            return
        await self._drop(errand)
        if errand.deputy:
            with suppress(PeerError):
                await self._peers.call(errand.deputy, "DELETE", _path(job), timeout_s=ASK_WITHIN_S)

    # --- for others

    async def take(self, sender: NodeId, job: bytes, sealed: bytes) -> None:
        """Keep a job for its submitter; durable when this returns. Refused or SpecError otherwise."""
        spec = self._open_spec(job, sealed)
        errand = errand_of(job, sealed, spec)
        if self._leaving:
            raise Refused("this node leaves")
        if time.time() * 1000 >= errand.ends_unix_ms:
            raise Refused("it was submitted too long ago")
        if self.errands.get(job) is None:
            if self.errands.full:
                raise Refused("this node keeps enough jobs for others")
            await self._keep(errand)
            self._note(job, f"kept for {self._nick(sender)}, until a majority of its witnesses has it")

    async def release(self, sender: NodeId, job: bytes) -> None:
        """Its submitter does not want it brought any more."""
        errand = self.errands.get(job)
        if errand is not None and errand.submitter == sender:
            await self._drop(errand)

    def told(self) -> dict[NodeId, Told]:
        """What every node says of what it brings for others."""
        found = {}
        for record in self._membership.records(SECTION):
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                found[record.node] = _told_decoder.decode(record.body)
        return found

    async def leave(self, timeout_s: float) -> None:
        """Before leaving: let others keep what this node keeps."""
        self._leaving = True
        around = self._around()
        kept = self.errands.for_others
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._ask(errand, line(errand, self._me, around)) for errand in kept))

    # --- doing it

    def _around(self) -> Around:
        members = self._membership.members()
        reached = frozenset(m.node_id for m in members if m.state in {"alive", "suspect"})
        staying = reached - {m.node_id for m in members if m.draining}
        return Around(reached, staying, self._jobs.outlook.hierarchy().zones)

    def _look(self) -> None:
        self._tell()
        if not self.errands.any or self._leaving:
            return
        at = instant()
        for action in self.errands.due(self._around(), at.now, at.unix_ms):
            match action:
                case Try(errand=errand):
                    self._spawn("try", errand, self._bring(errand))
                case Entrust(errand=errand, line=whom):
                    self._spawn("entrust", errand, self._entrust(errand, whom))
                case GiveUp(errand=errand):
                    self._note(errand.job, "given up: no majority of its witnesses answered for a day")
                    self._spawn("give up", errand, self._drop(errand))

    async def _bring(self, errand: Errand) -> None:
        async with self._turns:
            try:
                spec = self._open_spec(errand.job, errand.spec)
            except SpecError as error:
                self._note(errand.job, f"not submitted any more: {error}")
                await self._drop(errand)
                return
            if await self._jobs.submit_sealed(errand.job, errand.spec, spec) is None:
                self._note(errand.job, "a majority of its witnesses has it now")
                await self._drop(errand)

    async def _entrust(self, errand: Errand, whom: Sequence[tuple[NodeId, str]]) -> None:
        async with self._turns:
            found = await self._ask(errand, whom)
        kept = self.errands.entrusted(errand.job, *found) if found is not None else None
        if kept is not None:
            await self._journal.save_errand(kept.job, _encode(kept))
            self._note(kept.job, self.words(kept.job))

    async def _ask(self, errand: Errand, whom: Sequence[tuple[NodeId, str]]) -> tuple[NodeId, str] | None:
        """The first of these that keeps it too."""
        for node, zone in whom:
            try:
                await self._peers.call(node, "PUT", _path(errand.job), errand.spec, timeout_s=ASK_WITHIN_S)
            except PeerError as error:
                log.info("%s does not keep job %s: %s", short_id(node), format_job(errand.job)[:8], error)
                continue
            return node, zone
        return None

    async def _keep(self, errand: Errand) -> Errand:
        await self._journal.save_errand(errand.job, _encode(errand))
        return self.errands.keep(errand)

    async def _drop(self, errand: Errand) -> None:
        self.errands.drop(errand.job)
        await self._journal.drop_errand(errand.job)

    def _tell(self) -> None:
        told, now = self.errands.told(JOBS_TOLD), time.monotonic()
        before, at = self._told
        if told == before and (not told.count or now - at < REPEAT_S):
            return
        self._told = (told, now)
        if told.count:
            self._membership.publish(SECTION, msgspec.msgpack.encode(told), TTL_S)
        else:
            self._membership.withdraw(SECTION)

    def _spawn(self, what: str, errand: Errand, work: Coroutine[Any, Any, None]) -> None:
        key = (what, errand.job)
        if key in self._busy:
            work.close()
            return
        task = asyncio.create_task(work, name=f"{what} {format_job(errand.job)[:8]}")
        self._busy[key] = task
        task.add_done_callback(lambda done: self._done(key, done))

    def _done(self, key: tuple[str, bytes], task: asyncio.Task[None]) -> None:
        self._busy.pop(key, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())

    def _nick(self, node: NodeId) -> str:
        nicks = {member.node_id: member.nick for member in self._membership.members()}
        return nicks.get(node, short_id(node))


_decoder = msgspec.msgpack.Decoder(Errand)
_told_decoder = msgspec.msgpack.Decoder(Told)


def _encode(errand: Errand) -> bytes:
    return msgspec.msgpack.encode(errand)


def _path(job: bytes) -> str:
    return f"/v1/errands/{job.hex()}"
