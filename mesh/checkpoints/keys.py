"""Keyring: keys of jobs on this node, of its user's jobs and of jobs it runs; the latter are collected from witnesses.

A job has up to two keys: of what it saves, and of its secrets. A witness gives its share (`key_shares.py`) to the node that
holds the lease, and to the members of that node's gang; of what the job saves also to the nodes of the job's user. The key of
secrets is never on a disk, and in memory only while the job runs here.

A key that was collected stays while the job runs here, or something that it opens is in the store; one that was created here
stays.

A witness that was replaced follows the groups that came after it, each by the answers of a majority of the one before, and so
finds the present holder. The runner gives shares to witnesses that joined later.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence, Set

import msgspec

from ckptstore.cipher import KEY_BYTES, StateCipher
from membership.identity import Identity, NodeId, short_id
from membership.trust import Credentials
from mesh.checkpoints.key_shares import Held, Share, combine_shares, decode_held, decode_share, encode_share, split_key
from mesh.checkpoints.witness_group import WitnessGroup
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.participant import Participant
from mesh.consensus.runner import Runner
from mesh.journal import Journal
from mesh.model.record import Config, JobRecord, Voter
from mesh.model.secrets import Lock
from mesh.model.spec import JobSpec, format_job
from mesh.rpc.client import PeerClient, PeerError
from mesh.util.remembered import Remembered

ANSWER_S = 3.0
CIPHERS = 256  # kept ready in memory, of the keys that were used last; a cipher takes 3 KiB (own choice)
SPLITS_KEPT = 3  # of one job: the latest may not have reached a majority

log = logging.getLogger(__name__)


class NoKey(RuntimeError):
    """The job's key cannot be had here; the text tells which nodes were asked."""


class KeyRules(msgspec.Struct, frozen=True):
    """The questions of `mesh/jobs/authority.py` that a keyring asks."""

    is_user: Callable[[Credentials, bytes], bool]
    runs: Callable[[NodeId, NodeId | None, JobRecord], bool]
    may_give_share: Callable[[Credentials, WitnessRecord, JobSpec], bool]
    may_read: Callable[[NodeId, JobSpec], bool] = lambda node, spec: True


class KeyKind(msgspec.Struct, frozen=True):
    """One of a job's keys: its lock, and the calls for the key and for a share. `kept`: on the disk of the nodes that have it."""

    lock: Callable[[JobSpec], Lock | None]
    key_call: str
    share_call: str
    kept: bool


STATE_KEY = KeyKind(lambda spec: spec.lock, "key", "share", kept=True)
SECRETS_KEY = KeyKind(
    lambda spec: None if spec.secrets is None else spec.secrets.lock, "secrets-key", "secrets-share", kept=False
)


class Keyring:
    """`others` gives the nodes that can be asked."""

    def __init__(
        self,
        identity: Identity,
        peers: PeerClient,
        journal: Journal,
        participant: Participant,
        others: Callable[[], Collection[NodeId]],
        rules: KeyRules,
        group: WitnessGroup,
        kind: KeyKind = STATE_KEY,
    ) -> None:
        self._rules, self._group, self._kind = rules, group, kind
        self._identity, self._me = identity, identity.node_id
        self._peers, self._journal, self._participant, self._others = peers, journal, participant, others
        self._keys: dict[bytes, bytes] = {}  # by realm
        self._collected: set[bytes] = set()  # realms of keys that witnesses gave
        self._ciphers = Remembered[bytes, StateCipher](CIPHERS)
        self._shares: dict[bytes, tuple[Share, ...]] = {}  # of jobs that this node witnesses since later
        self._shared: dict[bytes, frozenset[Voter]] = {}
        self._sharing: dict[bytes, asyncio.Task[None]] = {}

    async def restore(self) -> None:
        if self._kind.kept:
            self._keys, self._collected = await self._journal.keys(), await self._journal.collected_keys()
        shares = await self._journal.shares(self._kind.share_call)
        self._shares = {job: tuple(map(decode_share, found)) for job, found in shares.items()}

    async def close(self) -> None:
        for task in self._sharing.values():
            task.cancel()
        await asyncio.gather(*self._sharing.values(), return_exceptions=True)

    # --- for this node

    async def create(self) -> StateCipher:
        """Create a key, and write it to disk."""
        return await self._keep(StateCipher.generate())

    def known(self, realm: bytes) -> StateCipher | None:
        cipher, key = self._ciphers.get(realm), self._keys.get(realm)
        if cipher is None and key is not None:
            cipher = StateCipher(key)
            self._ciphers.keep(realm, cipher)
        return cipher

    def forget(self, spec: JobSpec) -> None:
        """Forget the key of a job that does not run here any more, unless it is kept."""
        lock = self._kind.lock(spec)
        if lock is not None and not self._kind.kept:
            self._keys.pop(lock.realm, None)
            self._ciphers.pop(lock.realm, None)

    async def tidy(self, realms: Callable[[], Set[bytes]]) -> None:
        """Remove what jobs have left that are over: collected keys that open nothing of the store, which has these `realms`, and
        in memory the shares of jobs that were deleted.
        """
        part, collected = self._participant, self._collected - self._hosted
        gone = collected - await asyncio.to_thread(realms) if collected else set()
        gone -= self._hosted  # a job may have come meanwhile
        for realm in gone:
            self._collected.discard(realm)
            self._keys.pop(realm, None)
            self._ciphers.pop(realm, None)
        await self._journal.remove_keys(gone)
        known = part.witnesses.keys() | part.archived | part.forgotten
        self._shares = {job: shares for job, shares in self._shares.items() if job in known}

    @property
    def _hosted(self) -> set[bytes]:
        """Return the realms of the jobs that have a guest here, or a place for one."""
        part = self._participant
        specs = [runner.spec for runner in part.runners.values()] + [member.spec for member in part.members.values()]
        locks = map(self._kind.lock, specs)
        return {lock.realm for lock in locks if lock is not None}

    async def cipher(self, job: bytes, spec: JobSpec, group: Iterable[NodeId] = ()) -> StateCipher | None:
        """Return the key, None if the job has no such key; NoKey if too few holders of shares can be reached."""
        lock = self._kind.lock(spec)
        if lock is None:
            return None
        known = self.known(lock.realm)
        if known is not None:
            return known
        shares = list(self._own(job))
        near = dict.fromkeys([*group, *(voter.node for voter in spec.witnesses), spec.submitter])
        far = [node for node in self._others() if node not in near]
        asked: dict[NodeId, str] = {}
        found = await asyncio.to_thread(combine_shares, lock.realm, shares)
        for nodes in (list(near), far):
            found = found or await self._ask(job, lock, nodes, shares, asked)
            if found is not None:
                return await self._keep(found, collected=True)
        reasons = "; ".join(dict.fromkeys(asked.values()))
        raise NoKey(f"the key of job {format_job(job)[:8]} cannot be had: most of its witnesses are needed ({reasons})")

    async def _ask(
        self, job: bytes, lock: Lock, nodes: Sequence[NodeId], shares: list[Share], asked: dict[NodeId, str]
    ) -> StateCipher | None:
        path = f"/v1/jobs/{job.hex()}/{self._kind.key_call}"
        calls = {
            asyncio.create_task(self._peers.call(node, "GET", path, timeout_s=ANSWER_S)): node
            for node in nodes
            if node != self._me
        }
        waiting = set(calls)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    try:
                        held = decode_held(call.result())
                    except (PeerError, ValueError) as error:
                        asked[calls[call]] = str(error)
                        continue
                    asked[calls[call]] = f"node {short_id(calls[call])} has no part that fits"
                    shares += held.shares
                    found = StateCipher(held.key) if len(held.key) == KEY_BYTES else None
                    if found is None or found.realm != lock.realm:
                        splits = {share.split_id for share in held.shares}
                        fit = [share for share in shares if share.split_id in splits]  # the others were tried
                        found = await asyncio.to_thread(combine_shares, lock.realm, fit)
                    if found is not None:
                        return found
            return None
        finally:
            for call in waiting:
                call.cancel()

    async def _keep(self, cipher: StateCipher, collected: bool = False) -> StateCipher:
        if cipher.realm not in self._keys:
            if self._kind.kept:
                await self._journal.save_key(cipher.realm, cipher.key, collected)
                self._collected |= {cipher.realm} if collected else set()
            self._keys[cipher.realm] = cipher.key
        return cipher

    # --- for others

    async def held_for(self, job: bytes, caller: Credentials) -> Held | None:
        """Return what this node has of the key, None if the caller may not have it.

        A share goes to the lease holder in this witness's own record; the whole key only to the lease holder of a majority.
        """
        witness, runner = self._participant.witnesses.get(job), self._participant.runners.get(job)
        spec = witness.spec if witness is not None else runner.spec if runner is not None else None
        lock = self._kind.lock(spec) if spec is not None else None
        if spec is None or lock is None or not self._rules.may_read(caller.node_id, spec):
            return None
        node, cipher = caller.node_id, self.known(lock.realm)
        whole = Held(tuple(self._own(job)), cipher.key if cipher is not None else b"")
        if self._rules.is_user(caller, spec.user_key):
            return whole
        if runner is not None and self._rules.runs(node, self._me, runner.record):
            return whole
        if witness is None:
            return None
        known = witness.witness_record
        if cipher is None and self._rules.runs(node, known.holder, known.record):
            return whole
        return whole if await self._has_lease(known, node) else None

    async def store_share(self, job: bytes, caller: Credentials, share: Share) -> bool:
        """Store a share from the job's runner or its user; it is on disk on return. False if the caller may not give it."""
        witness = self._participant.witnesses.get(job)
        if witness is None or not self._rules.may_give_share(caller, witness.witness_record, witness.spec):
            return False
        kept = (*self._shares.get(job, ()), share)[-SPLITS_KEPT:]
        await self._journal.save_shares(job, [encode_share(one) for one in kept], self._kind.share_call)
        self._shares[job] = kept
        return True

    def share_with_new_witnesses(self, job: bytes, runner: Runner | None) -> None:
        """See to it that the job's present witnesses have shares while the job runs here."""
        lock = self._kind.lock(runner.spec) if runner is not None else None
        if runner is None or lock is None:
            self._shared.pop(job, None)
            return
        config, before = runner.config, self._shared.get(job, frozenset(runner.spec.witnesses))
        cipher = self.known(lock.realm)
        if cipher is None or config.previous or job in self._sharing or before == set(config.members):
            return
        task = asyncio.create_task(self.share_with_witnesses(job, cipher, config), name=f"share {format_job(job)[:8]}")
        self._sharing[job] = task
        task.add_done_callback(lambda _: self._sharing.pop(job))

    async def share_with_witnesses(self, job: bytes, cipher: StateCipher, config: Config) -> None:
        """Give each member of this group a share of the key; members that were not reached are tried again."""
        calls = [self._send_share(job, node, share) for node, share in split_key(cipher, config.nodes).items()]
        if all(await asyncio.gather(*calls)):
            self._shared[job] = frozenset(config.members)

    async def _send_share(self, job: bytes, node: NodeId, share: Share) -> bool:
        if node == self._me:
            return True  # this node has the whole key
        try:
            path = f"/v1/jobs/{job.hex()}/{self._kind.share_call}"
            await self._peers.call(node, "PUT", path, encode_share(share), ANSWER_S)
        except PeerError as error:
            log.info("job %s: its new witness has no share of its key yet: %s", format_job(job)[:8], error)
            return False
        return True

    def _own(self, job: bytes) -> Iterable[Share]:
        """Yield this node's shares: the one in the job's spec, and those it received later."""
        witness = self._participant.witnesses.get(job)
        lock = self._kind.lock(witness.spec) if witness is not None else None
        if witness is not None and lock is not None:
            for voter, sealed in zip(witness.spec.witnesses, lock.shares, strict=True):
                if voter.node == self._me:
                    try:
                        yield decode_share(self._identity.decrypt(sealed))
                    except ValueError as error:
                        log.info("job %s: its share for this node is of no use: %s", format_job(job)[:8], error)
        yield from self._shares.get(job, ())

    # --- whose the lease is

    async def _has_lease(self, known: WitnessRecord, caller: NodeId) -> bool:
        """Tell whether a majority of the present group says that the caller has the lease."""
        present = await self._group.present(known.job, known.config)
        if present is None:
            return False
        config, records = present
        return 2 * sum(self._rules.runs(caller, one.holder, one.record) for one in records.values()) > len(config.nodes)
