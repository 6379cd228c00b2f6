"""The user's secrets on this node: names out, values in, never values out; and their sealing for a job."""

import asyncio
from collections.abc import Mapping

import msgspec

from ckptstore.cipher import StateCipher
from mesh.api import schemas
from mesh.api.handlers.lookup import NodeLookup
from mesh.api.requests import RemoveSecrets, SetSecret, SubmitOrder
from mesh.checkpoints.secrets import seal_secrets
from mesh.data.keys import seal_key
from mesh.jobs.secret_vault import SecretVault
from mesh.model.secrets import SecretError, Use, check_uses, parse_use
from mesh.model.spec import JobSpec
from mesh.util.errors import ExitCode, MeshError
from mesh.util.processes import no_core_dumps


class SecretHandlers:
    def __init__(self, vault: SecretVault, nodes: NodeLookup) -> None:
        self._vault, self._nodes = vault, nodes

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

    async def sealed(
        self, specs: list[JobSpec], order: SubmitOrder, keys: Mapping[bytes, StateCipher]
    ) -> list[JobSpec]:
        """Return the specs with the secrets that the order names, and the keys of encrypted data sets by their versions.

        MeshError if they cannot be had.
        """
        if not order.secrets and order.secret_nodes:
            raise MeshError("--secret-nodes is for a job with --secret NAME", ExitCode.USAGE)
        if not order.secrets and not keys:
            return specs
        no_core_dumps()
        try:
            uses = [parse_use(text) for text in order.secrets]
            check_uses(uses)
            readers = self._nodes.named(order.secret_nodes)
            return await asyncio.to_thread(self._sealed, specs, uses, readers, keys)
        except SecretError as error:
            raise MeshError(str(error), ExitCode.USAGE) from error

    def _sealed(
        self, specs: list[JobSpec], uses: list[Use], readers: list[bytes], keys: Mapping[bytes, StateCipher]
    ) -> list[JobSpec]:
        values, sealed = self._vault.values(uses), []
        for spec in specs:
            # Each job of an array has its own key, so that a node that runs one cannot open another's.
            cipher = StateCipher.generate()
            secrets = seal_secrets(spec, cipher, uses, values, readers)
            data = tuple(seal_key(cipher, n, keys[n.manifest]) if n.manifest in keys else n for n in spec.data)
            sealed.append(msgspec.structs.replace(spec, secrets=secrets, data=data))
        return sealed
