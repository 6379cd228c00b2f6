"""Vouching: asks a job's witnesses about its leader and its runner, on behalf of nodes that hold its checkpoints or run it.

A node that is no witness reads the job's signed description, and follows its witness group from there. While most witnesses
cannot be asked, nobody is vouched for: a store keeps what a provider brings and moves no fence, a start is taken on trust, and
a node becomes no witness.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain, zip_longest
from weakref import WeakValueDictionary

from ckptstore.manifest import Manifest
from membership.identity import NodeId
from membership.malformed import MALFORMED
from membership.trust import TrustStore
from mesh.checkpoints.pruning import needed_by_all
from mesh.checkpoints.witness_group import Present, WitnessGroup, Words, is_outdated, last_words, nodes_to_ask
from mesh.consensus.effects import WitnessRecord, decode_witness_record
from mesh.consensus.messages import Accept, Enlist, Introduce, MakeRoom, Start
from mesh.consensus.participant import Participant
from mesh.jobs.authority import (
    Authority,
    is_writer,
    may_ask_for_room,
    may_introduce,
    may_keep_workdir,
    may_seek_witness,
    may_start,
    runs,
)
from mesh.jobs.job_table import JobTable
from mesh.model.record import Config
from mesh.model.spec import JobSpec, SpecError
from mesh.rpc.client import PeerClient, PeerError
from mesh.util.remembered import Remembered

ANSWER_S = 3.0
REMEMBERED = 1024  # answers, groups and descriptions (own choice)
# Starts that wait for an answer, of one sender and of all; more are turned away (own choice).
WAITING_OF_ONE, MOST_WAITING = 32, 64
AT_ONCE_OF_ONE, AT_ONCE = 4, 16  # starts and manifests judged at the same time (own choice)
FOUND_WITHIN_S = 10.0  # the present witnesses: three groups in turn, each with one that does not answer
SPEC_ASKED = 3  # nodes asked for a description, besides the one that brings the manifest (own choice)

Asking = Start | Enlist | Accept | Introduce | MakeRoom  # what the cores cannot judge alone
Writer = tuple[bytes, int, NodeId, str]  # job, term, signer, user


class Refused(RuntimeError):
    """The store does not take this manifest; the text names the reason."""


class Vouching:
    def __init__(
        self,
        authority: Authority,
        trust: TrustStore,
        participant: Participant,
        group: WitnessGroup,
        peers: PeerClient,
        job_table: JobTable,
    ) -> None:
        self._authority, self._trust, self._participant = authority, trust, participant
        self._group, self._peers, self._job_table = group, peers, job_table
        self._writers = Remembered[Writer, None](REMEMBERED)
        self._specs = Remembered[bytes, JobSpec](REMEMBERED)
        self._groups = Remembered[bytes, Config](REMEMBERED)  # as witnesses have said
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._turns_of = WeakValueDictionary[NodeId, asyncio.Semaphore]()
        self._waiting = Counter[NodeId]()

    # --- manifests

    async def judge(self, sender: NodeId, identity: bytes, signer: NodeId, manifest: Manifest) -> bool:
        """Tell whether the witnesses vouch for the manifest's signer; Refused if they do not.

        False while most witnesses cannot be asked: a manifest of a known job is kept then, and moves no fence.
        """
        if manifest.kind == "workdir":
            if not may_keep_workdir(manifest, self._trust.credentials(signer, time.time())):
                raise Refused("a working directory is signed by a node of its user, who may submit")
            return True
        writer = (manifest.job, manifest.term, signer, manifest.user)
        if writer in self._writers:
            self._writers.keep(writer, None)
            return True
        async with self._turn(sender):
            spec = await self._spec(manifest.job, sender)
            if manifest.user != spec.user:
                raise Refused("the manifest names another user than its job")
            if not spec.allows(signer):
                raise Refused("the job's user does not let the manifest's signer run it")
            present = await self._present(manifest.job, spec)
        if present is None:
            if not self._authority.may_lend(signer):
                raise Refused("most of the job's witnesses cannot be asked, and its signer may not run jobs")
            return False
        config, records = present
        vouching = sum(is_writer(signer, manifest, identity, record) for record in records.values())
        if 2 * vouching <= len(config.nodes):
            raise Refused("the job's witnesses know no lease of its signer under this term")
        self._writers.keep(writer, None)
        return True

    # --- starts

    def enter(self, sender: NodeId) -> bool:
        """Count a request that waits to be judged, until `leave`; False if too many wait, of this sender or of all."""
        if self._waiting[sender] >= WAITING_OF_ONE or self._waiting.total() >= MOST_WAITING:
            return False
        self._waiting[sender] += 1
        return True

    def leave(self, sender: NodeId) -> None:
        self._waiting[sender] -= 1
        if not self._waiting[sender]:
            del self._waiting[sender]

    async def allows(self, sender: NodeId, message: Asking) -> bool:
        """Tell whether the witnesses say that the sender leads the job, runs it as it enlists a gang, has this node join
        their group, or asks for room for a job of theirs that waits.
        """
        job = message.wanted_by if isinstance(message, MakeRoom) else message.job
        try:
            spec, is_member = self._asked_for(job, message.spec or b"")
            if is_member and isinstance(message, Start) and message.config.number == 0:
                return may_start(sender, message, spec, None, ())
            async with self._turn(sender):
                present = await self._present(job, spec)
        except SpecError:
            return True  # the core refuses it, with the reason
        if present is None:
            return not isinstance(message, Accept)  # who would become a witness by it must know the group
        config, records = present[0], list(present[1].values())
        if not (is_member or self._authority.take_word(job, records)):
            return True
        if isinstance(message, MakeRoom):
            return may_ask_for_room(sender, config, records)
        if isinstance(message, Introduce):
            return may_seek_witness(sender, config, records)
        if isinstance(message, Accept):
            return may_introduce(sender, message, config, records)
        return may_start(sender, message, spec, config, records)

    def _asked_for(self, job: bytes, sealed: bytes) -> tuple[JobSpec, bool]:
        """Return a job's description, and whether its submitter is a member now; SpecError if it never could submit it."""
        try:
            return self._authority.open_spec(job, sealed), True
        except SpecError:
            return self._authority.read_ended_spec(job, sealed), False

    @asynccontextmanager
    async def _turn(self, sender: NodeId) -> AsyncIterator[None]:
        """Wait for a turn; a few at a time are one sender's, whose witnesses may be slow to answer."""
        own = self._turns_of.setdefault(sender, asyncio.Semaphore(AT_ONCE_OF_ONE))
        async with own, self._turns:
            yield

    # --- the witnesses

    async def _present(
        self, job: bytes, spec: JobSpec, heard: dict[NodeId, WitnessRecord] | None = None
    ) -> Present | None:
        """Ask the present witnesses, from a group that this node has found before, the first one, or its own; for a while."""
        witness = self._participant.witnesses.get(job)
        with suppress(TimeoutError):
            async with asyncio.timeout(FOUND_WITHIN_S):
                present = await self._group.present(job, self._groups.get(job, spec.first_group), heard)
                if present is None and witness is not None:
                    return await self._group.present(job, witness.witness_record.config, heard)
                if present is not None:
                    self._groups.keep(job, present[0])
                return present
        return None

    async def words(self, job: bytes) -> Words:
        """Return what a job's witnesses say: most of the present ones, or those that prove to be witnesses.

        The caller bounds about how many jobs it asks at a time. It takes no turn of those that a start waits for: any member
        can publish statuses which have this node ask silent nodes.
        """
        spec = await self.describe(job)
        if spec is None:
            return Words()
        heard: dict[NodeId, WitnessRecord] = {}
        present = await self._present(job, spec, heard)
        if job in self._groups and (present is None or is_outdated(present)):
            # The witnesses before the group that this node remembers prove who came later.
            present = await self._group.present(job, spec.first_group, heard) or present
        if present is not None and not is_outdated(present):
            return Words(present[1])
        heard |= await self._later_records(job, nodes_to_ask(present, self._named(job), heard))
        witnesses = self._authority.witnesses_by(heard.values(), spec)
        proven = {node: record for node, record in heard.items() if node in witnesses.nodes}
        return last_words(present, proven, len(spec.witnesses), witnesses.agreed)

    async def _later_records(self, job: bytes, nodes: Sequence[NodeId]) -> Mapping[NodeId, WitnessRecord]:
        """Return what these nodes answer, who may be no witnesses."""
        path = f"/v1/jobs/{job.hex()}/witness-record"
        calls = [self._peers.call(node, "GET", path, timeout_s=ANSWER_S) for node in nodes]
        answers = dict(zip(nodes, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        found = {node: _record(answer) for node, answer in answers.items()}
        return {node: record for node, record in found.items() if record is not None and record.job == job}

    def _named(self, job: bytes) -> list[NodeId]:
        """Return the witnesses that statuses of a job name, one of each status in turn: some statuses may be false."""
        views = self._job_table.views_of(job)
        lines = [random.sample(view.witnesses, len(view.witnesses)) for view in random.sample(views, len(views))]
        return [node for node in dict.fromkeys(chain(*zip_longest(*lines))) if node is not None]

    async def needed(self, job: bytes) -> Collection[int]:
        """Return the numbers of the checkpoints that a job needs, as most of its witnesses say, or none."""
        words = await self.words(job)
        return () if words.few else needed_by_all([known.record.needed for known in words.records.values()])

    async def relied_on(self, job: bytes, manifest: bytes) -> JobSpec | None:
        """Return the description of a job that goes on from this manifest, as a witness's record says; None otherwise."""
        spec = await self.describe(job)
        records = (await self.words(job)).records.values() if spec is not None else ()
        commits = (known.record.commit for known in records)
        named = any(commit is not None and commit.manifest == manifest for commit in commits)
        return spec if named else None

    async def read_by_runner(self, job: bytes, node: NodeId) -> JobSpec | None:
        """Return a job's description if a majority of its witnesses say that this node runs the job; None otherwise."""
        try:
            async with self._turn(node):
                spec = await self._spec(job, node)
                present = await self._present(job, spec)
        except Refused:
            return None
        if present is None:
            return None
        config, records = present
        running = sum(runs(node, record.holder, record.record) for record in records.values())
        return spec if 2 * running > len(config.nodes) else None

    async def runner_of(self, job: bytes) -> NodeId | None:
        """Return the node that runs a job, as a majority of its witnesses say; None otherwise."""
        try:
            spec = await self._spec(job)
        except Refused:
            return None
        present = await self._present(job, spec)
        if present is None:
            return None
        config, records = present
        [(node, count)] = Counter(record.holder for record in records.values()).most_common(1)
        return node if 2 * count > len(config.nodes) else None

    async def describe(self, job: bytes, first: NodeId | None = None) -> JobSpec | None:
        """Return the description of a job that others report, signed by its submitter; None if nobody gives it.

        `first`: the node that is asked first.
        """
        try:
            return await self._spec(job, first)
        except Refused:
            return None

    async def _spec(self, job: bytes, sender: NodeId | None = None) -> JobSpec:
        witness = self._participant.witnesses.get(job)
        known = witness.spec if witness is not None else self._specs.get(job)
        if known is None:
            known = await self._asked_spec(job, sender)
            self._specs.keep(job, known)
        return known

    async def _asked_spec(self, job: bytes, sender: NodeId | None) -> JobSpec:
        others = self._named(job)[:SPEC_ASKED]
        for node in dict.fromkeys((*((sender,) if sender is not None else ()), *others)):
            try:
                sealed = await self._peers.call(node, "GET", f"/v1/jobs/{job.hex()}/spec", timeout_s=ANSWER_S)
                return self._authority.read_members_spec(job, sealed)
            except (PeerError, SpecError):
                continue
        raise Refused("this node cannot get the job's description")


def _record(answer: bytes | BaseException) -> WitnessRecord | None:
    if isinstance(answer, bytes):
        with suppress(*MALFORMED):
            return decode_witness_record(answer)
    return None
