"""Secrets of an attempt: opened with the key that its lease gives, in memory and on tmpfs, and removed when its guest ends."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from ckptstore.cipher import StateCipher
from membership.identity import Identity
from mesh.checkpoints.secrets import open_secrets
from mesh.data.keys import open_key
from mesh.execution.secret_files import VARIABLES, GuestSecrets, SecretFiles, shell_lines
from mesh.model.secrets import SecretError, is_file
from mesh.model.spec import DataNeed, JobSpec
from mesh.util.processes import no_core_dumps


class AttemptSecrets:
    """`container`: its variables go by a file; `cipher` collects the key from the job's witnesses, `forget` drops it."""

    def __init__(
        self,
        spec: JobSpec,
        name: str,
        container: bool,
        identity: Identity,
        files: SecretFiles,
        cipher: Callable[[], Awaitable[StateCipher | None]],
        forget: Callable[[], None],
    ) -> None:
        self._container = container
        self._spec, self._name, self._identity, self._files = spec, name, identity, files
        self._cipher, self._forget = cipher, forget
        self._putting: asyncio.Future[Path] | None = None

    async def open(self) -> GuestSecrets:
        """Return the guest's secrets, none for a job without. NoKey, SecretError or OSError if they cannot be had here."""
        secrets = self._spec.secrets
        if secrets is None or not secrets.uses:
            return GuestSecrets()
        no_core_dumps()
        cipher = await self._cipher()
        assert cipher is not None
        values = dict(
            zip((target for _, target in secrets.uses), open_secrets(secrets, cipher, self._identity), strict=True)
        )
        try:
            variables = {target: value.decode() for target, value in values.items() if not is_file(target)}
        except UnicodeDecodeError as error:
            raise SecretError("a secret for a variable is not UTF-8") from error
        files = {Path(target).name: value for target, value in values.items() if is_file(target)}
        if variables and self._container:
            files[VARIABLES] = shell_lines(variables)
        if not files:
            return GuestSecrets(variables)
        self._putting = asyncio.ensure_future(asyncio.to_thread(self._files.put, self._name, files))
        return GuestSecrets(variables, str(await asyncio.shield(self._putting)))

    async def data_key(self, need: DataNeed) -> bytes:
        """Return the key of a data set that the job brings, empty if it brings none. NoKey, or FetchFailed if it is damaged."""
        return open_key(await self._cipher(), need) if need.key else b""

    async def close(self) -> None:
        """Remove all of them here. The memory that they took is free, not overwritten."""
        self._forget()
        putting, self._putting = self._putting, None
        if putting is not None:
            await asyncio.wait([putting])  # a thread goes on when its attempt is cancelled
            await asyncio.to_thread(self._files.remove, self._name)
