"""The images of this node for the `apptainer` engine: directories that `apptainer build` unpacks from the node's registry.

images/apptainer/HASH   the root file system of the image whose manifest has this SHA-256
A running guest holds a shared lock of its directory (`flock`), which keeps it from removal.
"""

import asyncio
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mesh.execution.disk_usage import tree_bytes
from mesh.execution.engine import EngineError
from mesh.images.engine import FETCHED, SILENT_S, Registry, StoredImage
from mesh.images.oci import ManifestError, digest_hash, digest_text

PART, GONE = ".part", ".gone"  # endings of a directory that is being unpacked, and removed
SAID = 400  # characters of Apptainer's error to pass on (own choice)


class ApptainerImages:
    """The images in one directory. EngineError if Apptainer fails."""

    def __init__(self, root: Path, registry: Callable[[], Registry]) -> None:
        self._root, self._registry = root, registry
        self._sizes: dict[bytes, int] = {}

    def close(self) -> None:
        """Do nothing: no connection is open."""

    async def images(self) -> list[StoredImage]:
        return await asyncio.to_thread(self._images)

    async def find(self, name: str) -> StoredImage | None:
        """Find an image by `sha256:...`; images here have no names."""
        try:
            digest = digest_hash(name)
        except ManifestError:
            return None
        return await asyncio.to_thread(self._stored, digest)

    async def remove(self, image: StoredImage) -> bool:
        """Remove an image; return whether it is gone. An image that a guest uses stays."""
        return await asyncio.to_thread(self._remove, image.id)

    async def pull(self, manifest: bytes, tag: str) -> None:
        """Unpack an image from this node's registry. It needs no tag here."""
        place = self._place(manifest)
        part = place.with_suffix(PART)
        await asyncio.to_thread(self._make_way)
        source = f"docker://{self._registry().address}/{FETCHED}@{digest_text(manifest)}"
        await self._build(part, source)
        await asyncio.to_thread(part.rename, place)

    async def push(self, image: StoredImage, tag: str) -> None:
        raise EngineError("Apptainer cannot push an image: `mesh image push` needs Docker or Podman")

    async def _build(self, part: Path, source: str) -> None:
        words = ("apptainer", "build", "--sandbox", "--no-https", "--disable-cache", "--fix-perms", str(part), source)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("APPTAINER", "SINGULARITY"))}
        try:
            build = await asyncio.create_subprocess_exec(
                *words,
                env=env | {"APPTAINER_TMPDIR": str(self._root)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"Apptainer does not start: {error}") from error
        try:
            async with asyncio.timeout(SILENT_S):
                _, said = await build.communicate()
        except TimeoutError as error:
            raise EngineError(f"Apptainer did not unpack the image within {SILENT_S:g} s") from error
        finally:
            if build.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(build.pid, 9)
                await build.wait()
        if build.returncode:
            raise EngineError(f"Apptainer did not unpack the image: {said.decode(errors='replace')[-SAID:].strip()}")

    # --- in threads

    def _place(self, digest: bytes) -> Path:
        return self._root / digest.hex()

    def _images(self) -> list[StoredImage]:
        found = list[StoredImage]()
        for place in self._root.iterdir() if self._root.is_dir() else ():
            with suppress(ManifestError):
                stored = self._stored(digest_hash(f"sha256:{place.name}"))
                found += [stored] if stored is not None else []
        return found

    def _stored(self, digest: bytes) -> StoredImage | None:
        place = self._place(digest)
        if place.is_symlink() or not place.is_dir():
            return None
        if digest not in self._sizes:
            self._sizes[digest] = tree_bytes(place)
        return StoredImage(digest, (), self._sizes[digest], fetched=True)

    def _make_way(self) -> None:
        """Make the directory, and remove what an earlier run left unfinished; one image is unpacked at a time."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self._root.iterdir():
            if left.suffix in {PART, GONE}:
                shutil.rmtree(left, ignore_errors=True)

    def _remove(self, digest: bytes) -> bool:
        place = self._place(digest)
        try:
            held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except OSError as error:
            raise EngineError(f"{place} cannot be removed: {error}") from error
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = place.rename(place.with_suffix(GONE))
            shutil.rmtree(gone, ignore_errors=True)  # the next pull tries again
        except BlockingIOError:
            return False
        except OSError as error:
            raise EngineError(f"{place} cannot be removed: {error}") from error
        finally:
            os.close(held)
        self._sizes.pop(digest, None)
        return True
