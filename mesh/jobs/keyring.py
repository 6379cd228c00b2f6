"""Keys of jobs on this node: its user's own, and those of jobs that it runs, collected from the jobs' witnesses (`shares.py`).

A witness gives its share to the node whose lease it keeps, to that node's mates in a gang, and to the nodes of the job's user.
One that was replaced follows the groups that came after it, each by the word of most of the one before, and so learns whose the
lease is now. Whoever runs the job gives shares to witnesses that have come since.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from ckptstore.vault import KEY_BYTES, Vault
from membership.identity import Identity, NodeId, short_id
from membership.trust import Standing
from mesh.api.peer import PeerClient, PeerError
from mesh.jobs.effects import Cell, decode_cell
from mesh.jobs.journal import Journal
from mesh.jobs.ledger import Config, Ledger, Seat
from mesh.jobs.lock import Lock
from mesh.jobs.participant import Participant
from mesh.jobs.runner import Runner
from mesh.jobs.shares import Held, Share, decode_held, decode_share, encode_share, opened, shared
from mesh.jobs.spec import JobSpec, format_job

ANSWER_S = 3.0
GROUPS_FOLLOWED = 32  # from one that replaced this node to the present one; ours
LOTS_KEPT = 3  # of shares for one job: the last ones may not have reached most of their group

log = logging.getLogger(__name__)


class NoKey(RuntimeError):
    """What a job has saved cannot be opened here; the text says who was asked."""


class Keyring:
    """`others` gives the nodes that can be asked."""

    def __init__(
        self,
        identity: Identity,
        peers: PeerClient,
        journal: Journal,
        participant: Participant,
        others: Callable[[], Collection[NodeId]],
    ) -> None:
        self._identity, self._me = identity, identity.node_id
        self._peers, self._journal, self._participant, self._others = peers, journal, participant, others
        self._vaults: dict[bytes, Vault] = {}
        self._shares: dict[bytes, tuple[Share, ...]] = {}  # of jobs that this node has come to be a witness of
        self._shared: dict[bytes, frozenset[Seat]] = {}
        self._sharing: dict[bytes, asyncio.Task[None]] = {}

    async def restore(self) -> None:
        self._vaults = {vault.realm: vault for vault in map(Vault, await self._journal.keys())}
        self._shares = {job: tuple(map(decode_share, found)) for job, found in (await self._journal.shares()).items()}

    async def close(self) -> None:
        for task in self._sharing.values():
            task.cancel()
        await asyncio.gather(*self._sharing.values(), return_exceptions=True)

    # --- for this node

    async def fresh(self) -> Vault:
        """A new key, on disk."""
        return await self._keep(Vault.fresh())

    def known(self, realm: bytes) -> Vault | None:
        return self._vaults.get(realm)

    async def vault(self, job: bytes, spec: JobSpec, group: Iterable[NodeId] = ()) -> Vault | None:
        """The key of what the job saves, None if it saves openly; NoKey if too few can be reached who have a part in it."""
        lock = spec.lock
        if lock is None:
            return None
        known = self._vaults.get(lock.realm)
        if known is not None:
            return known
        shares = list(self._own(job))
        near = dict.fromkeys([*group, *(seat.node for seat in spec.witnesses), spec.submitter])
        far = [node for node in self._others() if node not in near]
        asked: dict[NodeId, str] = {}
        for nodes in (list(near), far):
            found = opened(lock.realm, shares) or await self._ask(job, lock, nodes, shares, asked)
            if found is not None:
                return await self._keep(found)
        reasons = "; ".join(dict.fromkeys(asked.values()))
        raise NoKey(f"the key of job {format_job(job)[:8]} cannot be had: most of its witnesses are needed ({reasons})")

    async def _ask(
        self, job: bytes, lock: Lock, nodes: Sequence[NodeId], shares: list[Share], asked: dict[NodeId, str]
    ) -> Vault | None:
        calls = {
            asyncio.create_task(self._peers.call(node, "GET", f"/v1/jobs/{job.hex()}/key", timeout_s=ANSWER_S)): node
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
                    whole = Vault(held.key) if len(held.key) == KEY_BYTES else None
                    found = whole if whole is not None and whole.realm == lock.realm else opened(lock.realm, shares)
                    if found is not None:
                        return found
            return None
        finally:
            for call in waiting:
                call.cancel()

    async def _keep(self, vault: Vault) -> Vault:
        if vault.realm not in self._vaults:
            await self._journal.save_key(vault.realm, vault.key)
            self._vaults[vault.realm] = vault
        return vault

    # --- for others

    async def held_for(self, job: bytes, caller: Standing) -> Held | None:
        """What this node has of the key, None if that is not for them."""
        witness, runner = self._participant.witnesses.get(job), self._participant.runners.get(job)
        spec = witness.spec if witness is not None else runner.spec if runner is not None else None
        if spec is None or spec.lock is None:
            return None
        allowed = caller.user == spec.user or (runner is not None and _runs(self._me, runner.ledger, caller.node_id))
        if not allowed and witness is not None:
            allowed = await self._has_lease(witness.cell, caller.node_id)
        if not allowed:
            return None
        vault = self._vaults.get(spec.lock.realm)
        return Held(tuple(self._own(job)), vault.key if vault is not None else b"")

    async def take(self, job: bytes, caller: Standing, share: Share) -> bool:
        """A share from the job's runner or its user; durable on return. False if it is not theirs to give."""
        witness = self._participant.witnesses.get(job)
        if witness is None or not (witness.cell.holder == caller.node_id or caller.user == witness.spec.user):
            return False
        kept = (*self._shares.get(job, ()), share)[-LOTS_KEPT:]
        await self._journal.save_shares(job, [encode_share(one) for one in kept])
        self._shares[job] = kept
        return True

    def follow(self, job: bytes, runner: Runner | None) -> None:
        """See to it that the witnesses there are now have shares, while the job runs here."""
        if runner is None or runner.spec.lock is None:
            self._shared.pop(job, None)
            return
        config, before = runner.config, self._shared.get(job, frozenset(runner.spec.witnesses))
        vault = self._vaults.get(runner.spec.lock.realm)
        if vault is None or config.previous or job in self._sharing or before == set(config.members):
            return
        task = asyncio.create_task(self.share(job, vault, config), name=f"share {format_job(job)[:8]}")
        self._sharing[job] = task
        task.add_done_callback(lambda _: self._sharing.pop(job))

    async def share(self, job: bytes, vault: Vault, config: Config) -> None:
        """Give each of this group a share of the key. Whom it does not reach is tried again."""
        calls = [self._give(job, node, share) for node, share in shared(vault, config.nodes).items()]
        if all(await asyncio.gather(*calls)):
            self._shared[job] = frozenset(config.members)

    async def _give(self, job: bytes, node: NodeId, share: Share) -> bool:
        if node == self._me:
            return True  # it has the whole
        try:
            await self._peers.call(node, "PUT", f"/v1/jobs/{job.hex()}/share", encode_share(share), ANSWER_S)
        except PeerError as error:
            log.info("job %s: its new witness has no share of its key yet: %s", format_job(job)[:8], error)
            return False
        return True

    def _own(self, job: bytes) -> Iterable[Share]:
        """This node's shares: that of the job's description, and those it was given later."""
        witness = self._participant.witnesses.get(job)
        lock = witness.spec.lock if witness is not None else None
        if witness is not None and lock is not None:
            for seat, sealed in zip(witness.spec.witnesses, lock.shares, strict=True):
                if seat.node == self._me:
                    try:
                        yield decode_share(self._identity.unsealed(sealed))
                    except ValueError as error:
                        log.info("job %s: its share for this node is of no use: %s", format_job(job)[:8], error)
        yield from self._shares.get(job, ())

    # --- whose the lease is

    async def _has_lease(self, cell: Cell, caller: NodeId) -> bool:
        if _runs(cell.holder, cell.ledger, caller):
            return True
        config = cell.config
        for _ in range(GROUPS_FOLLOWED):
            cells = await self._cells(cell.job, config)
            if 2 * len(cells) <= len(config.nodes):
                return False
            # The newest group that most of this one have taken part in.
            newer = sorted((one.config for one in cells), key=lambda one: one.order)[-(len(config.nodes) // 2 + 1)]
            if newer.order <= config.order:
                return 2 * sum(_runs(one.holder, one.ledger, caller) for one in cells) > len(config.nodes)
            config = newer
        return False

    async def _cells(self, job: bytes, config: Config) -> list[Cell]:
        own = self._participant.witnesses.get(job)
        others = [node for node in config.nodes if node != self._me]
        answers = await asyncio.gather(
            *(self._peers.call(node, "GET", f"/v1/jobs/{job.hex()}/cell", timeout_s=ANSWER_S) for node in others),
            return_exceptions=True,
        )
        cells = [own.cell] if own is not None and self._me in config.nodes else []
        for answer in answers:
            if isinstance(answer, bytes):
                try:
                    cells.append(decode_cell(answer))
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue
        return [cell for cell in cells if cell.job == job]


def _runs(holder: NodeId | None, ledger: Ledger, caller: NodeId) -> bool:
    """Whether it is the holder of the lease who asks, or a mate of it."""
    attempt = ledger.open_attempt if holder is not None else None
    return caller == holder or (attempt is not None and caller in {node for node, _ in attempt.mates})
