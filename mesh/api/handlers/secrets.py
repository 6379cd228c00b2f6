"""The user's secrets on this node: names out, values in, never values out; and their sealing for a job."""

import asyncio
from collections.abc import Sequence

import msgspec

from ckptstore.cipher import StateCipher
from membership.events import MemberView
from membership.node import MembershipNode
from mesh.api import schemas
from mesh.api.handlers.lookup import find_node
from mesh.api.requests import RemoveSecrets, SetSecret, SubmitOrder
from mesh.checkpoints.secrets import seal_secrets
from mesh.jobs.secret_vault import SecretVault
from mesh.model.secrets import SecretError, Use, check_uses, parse_use
from mesh.model.spec import JobSpec
from mesh.util.errors import ExitCode, MeshError
from mesh.util.processes import no_core_dumps

MINE, TRUSTED = "mine", "trusted"


class SecretHandlers:
    """`trusted`: the users and nodes of `--secret-nodes trusted`."""

    def __init__(self, vault: SecretVault, membership: MembershipNode, trusted: Sequence[str]) -> None:
        self._vault, self._membership, self._trusted = vault, membership, trusted

    async def all(self) -> schemas.secrets.Secrets:
        kept = await asyncio.to_thread(self._vault.all)
        return schemas.secrets.Secrets(
            secrets=[schemas.secrets.Secret(name=one.name, changed_unix=one.changed_unix) for one in kept]
        )

    async def set(self, order: SetSecret) -> schemas.secrets.SecretSet:
        no_core_dumps()
        try:
            replaced = await asyncio.to_thread(self._vault.set, order.name, order.value)
        except SecretError as error:
            raise MeshError(str(error), ExitCode.USAGE) from error
        return schemas.secrets.SecretSet(name=order.name, replaced=replaced)

    async def remove(self, order: RemoveSecrets) -> schemas.secrets.SecretsRemoved:
        there = {one.name for one in await asyncio.to_thread(self._vault.all)}
        for name in order.names:
            if name not in there:
                raise MeshError(f"there is no secret {name!r} on this node: see `mesh secret ls`", ExitCode.NOT_FOUND)
        for name in order.names:
            await asyncio.to_thread(self._vault.remove, name)
        return schemas.secrets.SecretsRemoved(removed=order.names)

    async def sealed(self, specs: list[JobSpec], order: SubmitOrder) -> list[JobSpec]:
        """Return the specs with the secrets that the order names. MeshError if they cannot be had."""
        if not order.secrets:
            if order.secret_nodes:
                raise MeshError("--secret-nodes is for a job with --secret NAME", ExitCode.USAGE)
            return specs
        no_core_dumps()
        try:
            uses = [parse_use(text) for text in order.secrets]
            check_uses(uses)
            readers = self._readers(order.secret_nodes)
            return await asyncio.to_thread(self._sealed, specs, uses, readers)
        except SecretError as error:
            raise MeshError(str(error), ExitCode.USAGE) from error

    def _sealed(self, specs: list[JobSpec], uses: list[Use], readers: list[bytes]) -> list[JobSpec]:
        values = self._vault.values(uses)
        # Each job of an array has its own key, so that a node that runs one cannot open another's.
        return [
            msgspec.structs.replace(spec, secrets=seal_secrets(spec, StateCipher.generate(), uses, values, readers))
            for spec in specs
        ]

    def _readers(self, words: Sequence[str]) -> list[bytes]:
        """Return the nodes that `--secret-nodes` names, of the members that are known now; empty for all nodes."""
        found: dict[bytes, None] = {}
        for word in words:
            nodes = [member.node_id for member in self._membership.members() if self._fits(word, member)]
            if word not in {MINE, TRUSTED}:
                nodes = [find_node(self._membership, word).node_id]
            elif not nodes:
                hint = "" if word == MINE else ": `mesh config set trusted USER NODE ...` names them"
                raise MeshError(f"no node is {word}{hint}", ExitCode.USAGE)
            found |= dict.fromkeys(nodes)
        return list(found)

    def _fits(self, word: str, member: MemberView) -> bool:
        if member.state == "revoked":
            return False
        if word == MINE:
            return member.user_key == self._membership.credentials.user_key
        return word == TRUSTED and (member.user in self._trusted or member.nick in self._trusted)
