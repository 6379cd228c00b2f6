"""Authority: decides who may do what, from signatures, certificates and witness records alone.

One function for each question; docs/reference/authority.md lists them with the place of each check and its test.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from ckptstore.cipher import is_proof
from ckptstore.manifest import Manifest
from membership.core import Sealer
from membership.envelope import EnvelopeError
from membership.identity import NodeId
from membership.lengths import Id
from membership.malformed import MALFORMED
from membership.trust import (
    CLOCK_GRACE_S,
    PROVIDER,
    USER,
    Credentials,
    TrustError,
    TrustStore,
)
from mesh.consensus.effects import MOST_EARLIER, WitnessRecord
from mesh.consensus.forced_reconfiguration import ForcedReconfiguration, decode_reconfiguration
from mesh.consensus.messages import MOST_WARRANTS, Accept, Enlist, Start
from mesh.data.manifest import DataManifest, Members, nobody
from mesh.model.record import FIRST_TERM, Config, JobRecord, Voters
from mesh.model.spec import NO_JOB, JobSpec, SpecError, decode_spec, job_id

LEAST_VOUCHERS = 2  # for a job whose submitter's certificate has ended: one witness alone may lie (own choice)
REMEMBERED = 1024  # jobs taken on by the word of their witnesses (own choice)


def is_user(caller: Credentials, user_key: bytes) -> bool:
    """Tell whether a node belongs to the user with this key: what a job writes and saves is for the nodes of its user."""
    return caller.user_key == user_key


def may_enter(caller: Credentials, user_key: bytes) -> bool:
    """Tell whether a node may run commands beside a job of this user, and connect to its ports."""
    return is_user(caller, user_key) and USER in caller.roles


def may_order_image(caller: Credentials, own: Credentials, accepts: tuple[str, ...]) -> bool:
    """Tell whether a node may have this node fetch an image: its user could submit a job that does."""
    return is_user(caller, own.user_key) or "*" in accepts or caller.user in accepts


def may_read_data(
    caller: Credentials,
    versions: Sequence[DataManifest],
    identity: bytes,
    running: JobSpec | None = None,
    members: Members = nobody,
) -> bool:
    """Tell whether a node may have the content of a data set: its user may, or it runs a job of a user who may and who asked for
    that data set. `versions`: the one it asks for and the newest known one; a user may if both say so. `running`: the job that
    the node runs, as its witnesses say. `members`: of a group, by its newest known version."""
    if all(one.may_read(caller.user_key, members) for one in versions):
        return True
    if running is None or not all(one.may_read(running.user_key, members) for one in versions):
        return False
    return any(need.manifest == identity for need in running.data)


def runs(caller: NodeId, holder: NodeId | None, record: JobRecord) -> bool:
    """Tell whether a node holds the job's lease, or is a member of the gang of the node that does."""
    attempt = record.open_attempt if holder is not None else None
    return caller == holder or (attempt is not None and caller in {node for node, _ in attempt.gang})


def may_give_share(caller: Credentials, known: WitnessRecord, spec: JobSpec) -> bool:
    """Tell whether a node may give a witness a share of the job's key."""
    return known.holder == caller.node_id or is_user(caller, spec.user_key)


def may_give_secrets_share(caller: Credentials, known: WitnessRecord, spec: JobSpec) -> bool:
    """Tell whether a node may give a witness a share of the key of the job's secrets: it runs the job."""
    return known.holder == caller.node_id


def may_read_secrets(node: NodeId, spec: JobSpec) -> bool:
    """Tell whether the submitter lets a node read the job's secrets while it runs the job."""
    return spec.secrets is not None and (not spec.secrets.readers or node in spec.secrets.nodes)


def may_report(writer: Credentials, known: WitnessRecord, spec: JobSpec) -> bool:
    """Tell whether a witness keeps a node's events of a job: it witnesses the job, runs or has run it, or is its user's."""
    ran = any(writer.node_id in {one.node, *(node for node, _ in one.gang)} for one in known.record.attempts)
    return ran or writer.node_id in {known.holder, *known.config.nodes} or is_user(writer, spec.user_key)


def is_writer(signer: NodeId, manifest: Manifest, identity: bytes, known: WitnessRecord) -> bool:
    """Tell whether a witness's record vouches for a checkpoint or a result: its signer had that term, or it is committed."""
    commit, outcome = known.record.commit, known.record.outcome
    kept = {commit.manifest if commit is not None else None, outcome.manifest if outcome is not None else None}
    holds = known.holder == signer and known.promised == manifest.term
    had = any((attempt.node, attempt.term) == (signer, manifest.term) for attempt in known.record.attempts)
    return holds or had or identity in kept


def may_keep_workdir(manifest: Manifest, signer: Credentials | None) -> bool:
    """Tell whether a working directory, which is saved before there is a job, is one of its signer's user."""
    no_job = manifest.job == NO_JOB and (manifest.config, manifest.term, manifest.seq) == (0, 0, 0)
    return no_job and signer is not None and signer.user == manifest.user and USER in signer.roles


def may_start(
    sender: NodeId, message: Start | Enlist, spec: JobSpec, config: Config | None, records: Sequence[WitnessRecord]
) -> bool:
    """Tell whether a node may start a job on another, or enlist it for its gang.

    The first group is the one in the job's description. What a later one says is in the records of its majority: the leader
    has won the term there, and a runner has the lease.
    """
    if config is None:
        first = isinstance(message, Start) and message.config.members == spec.witnesses
        return first and any(voter.node == sender for voter in spec.witnesses)
    if isinstance(message, Enlist):
        having = [record.holder == sender and record.promised == message.term for record in records]
    else:
        having = [sender in config.nodes and record.promised == message.term for record in records]
    return 2 * sum(having) > len(config.nodes)


def may_seek_witness(sender: NodeId, config: Config, records: Sequence[WitnessRecord]) -> bool:
    """Tell whether a node may ask another to be a witness of the job: it leads the job, or runs it."""
    return sender in config.nodes or 2 * sum(record.holder == sender for record in records) > len(config.nodes)


def may_ask_for_room(sender: NodeId, config: Config, records: Sequence[WitnessRecord]) -> bool:
    """Tell whether a node may ask for another job's place: it witnesses a job that is not over and that nobody runs."""
    waiting = [not record.final and record.holder is None for record in records]
    return sender in config.nodes and 2 * sum(waiting) > len(config.nodes)


def may_introduce(sender: NodeId, message: Accept, config: Config, records: Sequence[WitnessRecord]) -> bool:
    """Tell whether a node that does not know the job becomes its witness: in the present group, or the next one, by the word of
    who leads or runs the job.
    """
    named = config.members in {message.config.members, message.config.previous}
    return named and may_seek_witness(sender, config, records)


def may_propose(
    sender: NodeId,
    message: Accept,
    known: WitnessRecord,
    spec: JobSpec,
    created: bool,
    warrants: Callable[[bytes, bytes, int, NodeId], NodeId | None],
    may_lend: Callable[[NodeId], bool],
) -> bool:
    """Tell whether a witness may accept this from the sender, who neither recovers the job nor has too low a term.

    The submission, an empty record for the group in the job's description, may come from any node. After that, witnesses of
    the job propose without a lease, and the node to which one of them has given the term proposes with it. `created`: the
    witness knows only what this message says, so it takes the group that it names: the first one as the description has it,
    and a later one once other witnesses have vouched for the sender. A lease is only for a lender that the job's user lets run
    it: a witness may give the term to itself.
    """
    if message.config.number == 0 and msgspec.structs.replace(message.config, term=0) != spec.first_group:
        return False
    if message.term < FIRST_TERM:
        return False
    if message.holder is None and sender in known.config.nodes:
        return True
    if message.term == FIRST_TERM and message.holder is None and message.record == JobRecord():
        return message.config == (spec.first_group if created else known.config)
    if sender == known.holder and message.term == known.promised:
        return True
    givers = (warrants(one, message.job, message.term, sender) for one in message.warrants)
    may_run = message.holder is None or (spec.allows(sender) and may_lend(sender))
    return may_run and any(giver in known.config.nodes for giver in givers)


def _check_submitter(credentials: Credentials, spec: JobSpec) -> None:
    named = credentials.node_id == spec.submitter and credentials.user == spec.user
    if not named or not is_user(credentials, spec.user_key):
        raise SpecError("the job carries the certificate of another user")


def _check_may_submit(credentials: Credentials) -> None:
    if USER not in credentials.roles:
        raise SpecError(f"{credentials.nick} may lend, but not submit")


def _check_lock_is_own(spec: JobSpec) -> None:
    """Raise SpecError for the lock of another job: its witnesses would give that job's key to the user of this one."""
    if spec.lock is not None and not is_proof(spec.lock.realm, spec.author, spec.lock.proof):
        raise SpecError(
            "the job does not prove that its key is its own: it is copied from another job, or its submitter's release is "
            "too old"
        )


class Warrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A witness's statement that `node` gets this term of the job, with the group of this hash."""

    job: Id
    term: int
    node: Id
    group: Id

    def gives(self, job: bytes, term: int, node: NodeId) -> bool:
        """Tell whether the node gets this term of the job."""
        return (self.job, self.term, self.node) == (job, term, node)

    def names(self, job: bytes, config: Config) -> bool:
        """Tell whether it is given with this group of the job."""
        return (self.job, self.group) == (job, _group_hash(config))


_decode_warrant = msgspec.msgpack.Decoder(Warrant).decode


def encode_warrant(job: bytes, term: int, node: NodeId, config: Config) -> bytes:
    return msgspec.msgpack.encode(Warrant(job, term, node, _group_hash(config)))


def _group_hash(config: Config) -> bytes:
    return blake2b(msgspec.msgpack.encode(config), digest_size=16).digest()


def decode_warrant(payload: bytes) -> Warrant | None:
    """Decode a warrant; None for anything else."""
    try:
        return _decode_warrant(payload)
    except MALFORMED:
        return None


class Witnesses(NamedTuple):
    """Nodes that prove to be witnesses of a job, and the groups on which most of the group before, or the job's user, agreed."""

    nodes: set[NodeId]
    agreed: set[Voters]


class Authority:
    """`sealer` signs as this node. `advertises` tells whether a node offers itself to jobs now; `clock` is Unix time."""

    def __init__(
        self,
        sealer: Sealer,
        trust: TrustStore,
        advertises: Callable[[NodeId], bool] = lambda node: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sealer, self._me = sealer, sealer.node_id
        self._trust, self._advertises, self._clock = trust, advertises, clock
        self._accepted_before = OrderedDict[bytes, None]()  # jobs that their witnesses have vouched for

    # --- descriptions of jobs

    def open_spec(self, job: bytes, sealed: bytes) -> JobSpec:
        """Return the spec of a job that this node takes on: its submitter, a member now, has signed it. SpecError otherwise.

        "Now" is by this node's clock, and by what it knows: a certificate that has ended signs nothing anew, whatever time the
        job claims. A renewed certificate of the submitter counts. A job that this node has taken on is not judged again
        (`read_spec`), nor is one that its witnesses accepted while the certificate was valid (`take_word`).
        """
        if job in self._accepted_before:
            return self.read_ended_spec(job, sealed)
        spec = self.read_spec(job, sealed)
        now = self._clock()
        if spec.created_unix_ms / 1000 > now + CLOCK_GRACE_S:
            raise SpecError("the job's creation time is in the future: check the clocks of both nodes")
        try:
            # The chain in the spec is for nodes that have never met the submitter.
            credentials = self._trust.credentials(spec.submitter, now) or self._trust.check_chain(spec.chain, now)
        except TrustError as error:
            raise SpecError(f"the job's submitter is not a member of this mesh: {error}") from error
        _check_submitter(credentials, spec)
        _check_may_submit(credentials)
        _check_lock_is_own(spec)
        return spec

    def read_spec(self, job: bytes, sealed: bytes) -> JobSpec:
        """Return the spec of a job that was admitted before; SpecError if the signature does not match."""
        try:
            signer, payload = self._sealer.open("job", sealed)
        except EnvelopeError as error:
            raise SpecError(f"the job's description is not signed by a node of this mesh: {error}") from error
        spec = decode_spec(payload)
        if signer != spec.submitter or job_id(payload) != job:
            raise SpecError("the job's description is not the one its submitter signed")
        return spec

    def read_members_spec(self, job: bytes, sealed: bytes) -> JobSpec:
        """Return the spec of a job whose submitter was a member at some time, under the user's name; SpecError otherwise."""
        return self._read_with_chain(job, sealed)[0]

    def _read_with_chain(self, job: bytes, sealed: bytes) -> tuple[JobSpec, Credentials]:
        spec = self.read_spec(job, sealed)
        try:
            credentials = self._trust.read_chain(spec.chain)
        except TrustError as error:
            raise SpecError(f"the job's submitter is not a member of this mesh: {error}") from error
        _check_submitter(credentials, spec)
        return spec, credentials

    def read_ended_spec(self, job: bytes, sealed: bytes) -> JobSpec:
        """Return the spec of a job that its submitter could submit when it was created, if its witnesses say that it was.

        SpecError also if the submitter or its admitter is revoked, if the user's name belongs to another user now, and on the
        user's own machines, where the job could do what its user can.
        """
        spec, credentials = self._read_with_chain(job, sealed)
        now, created = self._clock(), spec.created_unix_ms / 1000
        own, holder = self._trust.credentials(self._me, now), self._trust.holder(spec.user, now)
        if not credentials.not_before - CLOCK_GRACE_S <= created <= credentials.not_after:
            raise SpecError("the certificate of the job's submitter was not valid when the job was created")
        _check_may_submit(credentials)
        _check_lock_is_own(spec)
        if holder is not None and holder.key != spec.user_key:
            raise SpecError(f"the name {spec.user!r} belongs to another user now")
        if own is None or is_user(own, spec.user_key):
            raise SpecError(
                "the certificate of the job's submitter has ended: a machine of its user does not take it on"
            )
        return spec

    def take_word(self, job: bytes, records: Sequence[WitnessRecord]) -> bool:
        """Take a job on by the word of its present witnesses, which have these records, although its submitter's certificate
        has ended since. False if they are too few.
        """
        if len(records) < LEAST_VOUCHERS:
            return False
        self._accepted_before[job] = None
        while len(self._accepted_before) > REMEMBERED:
            self._accepted_before.popitem(last=False)
        return True

    # --- orders of the job's user

    def may_cancel(self, sender: NodeId, user: str, spec: JobSpec) -> bool:
        """Tell whether the sender is a node of the user who submitted the job."""
        credentials = self._trust.credentials(sender, self._clock())
        ordered = credentials is not None and user == spec.user and is_user(credentials, spec.user_key)
        return sender == self._me or ordered

    def read_recovery(self, order: bytes, job: bytes, spec: JobSpec) -> ForcedReconfiguration | None:
        """Return the group and term that the job's user, on any of their nodes, has signed; None if they have not."""
        try:
            signer, payload = self._sealer.open("recovery", order)
        except EnvelopeError:
            return None
        stated = decode_reconfiguration(payload)
        return stated if stated is not None and stated.job == job and self._is_order(signer, spec) else None

    def recovered_group(self, known: WitnessRecord) -> Config | None:
        """Return the group that the job's user has named in a recovery, if this record has their word for it."""
        if not known.reconfiguration:
            return None
        try:
            spec = self.read_spec(known.job, known.spec)
        except SpecError:
            return None
        stated = self.read_recovery(known.reconfiguration, known.job, spec)
        return stated.config if stated is not None else None

    def _is_order(self, signer: NodeId, spec: JobSpec) -> bool:
        credentials = self._trust.credentials(signer, self._clock())
        return credentials is not None and is_user(credentials, spec.user_key) and USER in credentials.roles

    # --- terms and leases

    def warrant(self, job: bytes, term: int, node: NodeId, config: Config) -> bytes:
        """Seal that a node gets a term with this group, which this node has won or accepted."""
        return self._sealer.seal("warrant", encode_warrant(job, term, node, config))

    def warrants(self, warrant: bytes, job: bytes, term: int, node: NodeId) -> NodeId | None:
        """Return the member that gave the node this term; None if none did."""
        giver, stated = self._open_warrant(warrant)
        return giver if stated is not None and stated.gives(job, term, node) else None

    def warrants_group(self, warrant: bytes, job: bytes, config: Config) -> NodeId | None:
        """Return the member that has accepted this group of the job; None if none did."""
        giver, stated = self._open_warrant(warrant)
        return giver if stated is not None and stated.names(job, config) else None

    def witnesses_by(self, records: Collection[WitnessRecord], spec: JobSpec) -> Witnesses:
        """Return the witnesses of a job, in any of its groups, as far as these records of it prove them together.

        The first group is in the job's description. A later one has a warrant by a member of one before, or is the one that the
        job's user has named in a recovery. A witness that joined late has no proof of the first changes: others have.
        """
        named = [group for group in map(self.recovered_group, records) if group is not None]
        nodes = {voter.node for voter in spec.witnesses}.union(*(group.nodes for group in named))
        agreed = {spec.witnesses, *(group.members for group in named)}
        accepted: dict[Config, set[NodeId]] = {}  # by group, the members that have accepted it
        for record in records:
            for group, warrants in (*record.earlier[:MOST_EARLIER], (record.config, record.warrants)):
                givers = {self.warrants_group(one, record.job, group) for one in warrants[:MOST_WARRANTS]}
                accepted.setdefault(group, set()).update(giver for giver in givers if giver is not None)
        for group, members in sorted(accepted.items(), key=lambda one: one[0].order):
            if members & nodes:
                nodes |= set(group.nodes)
            before = {voter.node for voter in group.previous}
            if group.previous in agreed and 2 * len(members & before) > len(before):
                agreed.add(group.members)
        return Witnesses(nodes, agreed)

    def records_of_witnesses(
        self, job: bytes, records: Mapping[NodeId, WitnessRecord]
    ) -> Mapping[NodeId, WitnessRecord]:
        """Return the records of the job that its witnesses keep, as far as these prove them; if none is proven, all of them.

        Those whose witnesses are lost may prove none, and are all that its user has left.
        """
        read: dict[NodeId, WitnessRecord] = {}
        for node, record in records.items():
            with suppress(SpecError):
                spec = self.read_spec(job, record.spec)
                read[node] = record
        if not read:
            return read
        proven = self.witnesses_by(read.values(), spec).nodes
        return {node: record for node, record in read.items() if node in proven} or read

    def _open_warrant(self, warrant: bytes) -> tuple[NodeId | None, Warrant | None]:
        try:
            giver, payload = self._sealer.open("warrant", warrant)
        except EnvelopeError:
            return None, None
        return giver, decode_warrant(payload)

    def may_lend(self, node: NodeId) -> bool:
        """Tell whether a node may take a lease: a member with the role, whose advert is current."""
        credentials = self._trust.credentials(node, self._clock())
        return credentials is not None and PROVIDER in credentials.roles and self._advertises(node)

    def may_propose(self, sender: NodeId, message: Accept, known: WitnessRecord, spec: JobSpec, created: bool) -> bool:
        return may_propose(sender, message, known, spec, created, self.warrants, self.may_lend)
