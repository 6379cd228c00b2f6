"""The images of a node: lists that other nodes publish, as the library takes them, and what its engine has."""

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest

from membership.records import Record
from mesh.api.handlers.images import how_far
from mesh.execution.engine import EngineError
from mesh.images import library as library_module
from mesh.images.allowlist import Entry, Image
from mesh.images.blobs import BlobStore, FetchFailed
from mesh.images.engine import StoredImage
from mesh.images.library import Library
from mesh.images.retention import Bounds
from mesh.util.shared_task import SharedTask
from tests.images.samples import index_of, manifest_of
from tests.images.test_catalogue import Campus, record

A, B = Image(b"a" * 32, b"m" * 32), Image(b"b" * 32, b"n" * 32)


class Membership:
    """A fake of the membership: it has one record."""

    known: Record | None = None

    def __init__(self) -> None:
        self.problems = dict[str, str]()

    def record(self, node: bytes, section: str) -> Record | None:
        return self.known


def library_of(campus: Campus, root: Path, membership: Membership, changes: list[str]) -> Library:
    library = Library(
        root,
        0,
        True,
        (),
        ("*",),
        0,
        Bounds(0, 0.0),
        campus.admitter,
        campus.trust(campus.admitter_chain),
        cast(Any, membership),
        cast(Any, None),
        lambda node, what: None,
        lambda: changes.append("changed"),
    )
    library.catalogue.load()
    return library


class Engine:
    """A fake engine that has images, and lists those that it had at the last look."""

    def __init__(self, store: BlobStore | None = None) -> None:
        self.has = set[bytes]()
        self.store, self.known = store, list[set[bytes]]()

    async def pull(self, manifest: bytes, tag: str) -> None:
        """Note what the node knows of the image by now."""
        assert self.store is not None
        self.known.append(self.store.reach(manifest))
        self.has.add(self.store.variant(manifest).blobs[0].hash)

    async def images(self) -> list[StoredImage]:
        return [StoredImage(one, (), 5) for one in self.has]

    async def find(self, name: str) -> StoredImage | None:
        digest = bytes.fromhex(name.removeprefix("sha256:"))
        return StoredImage(digest, (), 5) if digest in self.has else None


async def test_image_that_came_although_its_fetch_was_stopped_is_here(tmp_path: Path) -> None:
    """An engine may finish a pull whose caller is gone. A node that was asked for the image then said that it had failed."""
    campus, membership, engine = Campus(), Membership(), Engine()
    library = library_of(campus, tmp_path, membership, [])
    library._store, library._stores["docker"] = BlobStore(tmp_path, 1 << 20), cast(Any, engine)
    membership.known = record(campus.said(campus.founder, campus.founder_chain, 1, Entry("tool", 1, True, A)))
    library.hear(b"r" * 32, "images")
    await library.look("docker")
    pull = library.pulls[A.config] = SharedTask(asyncio.sleep(3600), "a fetch")
    await pull.end()
    assert how_far(library, A.config).words == "it was stopped"
    engine.has.add(A.config)
    assert await library.fetch(A, "tool") is None
    assert how_far(library, A.config).here


class Fetcher:
    """A fake fetcher of these manifests."""

    def __init__(self, store: BlobStore, *manifests: bytes) -> None:
        self.store, self.manifests = store, {sha256(one).digest(): one for one in manifests}

    async def bring(self, digest: bytes) -> None:
        if digest not in self.manifests:
            raise FetchFailed("nobody has it")
        self.store.keep(self.manifests[digest])

    def state(self, digest: bytes) -> tuple[int, str]:
        return 0, ""


async def test_manifests_are_here_before_the_engine_pulls(tmp_path: Path) -> None:
    """Regression: an engine keeps manifests for a while, and then asked only for blobs, which nothing said to be of the image."""
    library, store = library_of(Campus(), tmp_path, Membership(), []), BlobStore(tmp_path, 1 << 20)
    library._store, engine = store, Engine(store)
    library._stores["docker"] = library.engine = cast(Any, engine)
    manifest = manifest_of(b"config", ())
    index = index_of(amd64=manifest, arm64=manifest)
    whole = {sha256(one).digest() for one in (b"config", manifest, index)}
    image = Image(sha256(b"config").digest(), sha256(index).digest())
    library.fetcher = cast(Any, Fetcher(store, index))
    with pytest.raises(EngineError, match="nobody has it"):
        await library._pull(image, "tool")
    assert not engine.known
    library.fetcher = cast(Any, Fetcher(store, index, manifest))
    await library._pull(image, "tool")
    assert engine.known == [whole]


async def test_blob_of_no_listed_image_is_not_fetched(tmp_path: Path) -> None:
    library = library_of(Campus(), tmp_path, Membership(), [])
    library._store = BlobStore(tmp_path, 1 << 20)
    with pytest.raises(FetchFailed, match="not on the list"):
        library._origin(A.manifest, "")


async def test_list_that_cannot_be_written_counts_and_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a full disk ended the daemon."""
    monkeypatch.setattr(library_module, "AGAIN_S", 0.01)
    campus, membership = Campus(), Membership()
    library = library_of(campus, tmp_path, membership, [])
    blocked = tmp_path / "list" / f"{campus.founder.node_id.hex()}.new"
    blocked.mkdir()  # in place of the temporary file: fails for root, too
    membership.known = record(campus.said(campus.founder, campus.founder_chain, 1, Entry("tool", 1, True, A)))
    library.hear(b"r" * 32, "images")
    assert library.rules.judge("tool", None).image == A
    async with asyncio.timeout(20):
        while "images" not in membership.problems:
            await asyncio.sleep(0.01)
        assert "cannot be written" in membership.problems["images"]
        blocked.rmdir()
        while membership.problems:
            await asyncio.sleep(0.01)
    assert (tmp_path / "list" / campus.founder.node_id.hex()).exists()


async def test_lists_of_members_have_no_node_publish_its_advert(tmp_path: Path) -> None:
    campus, membership, changes = Campus(), Membership(), list[str]()
    library = library_of(campus, tmp_path, membership, changes)

    def hear(body: bytes) -> None:
        membership.known = record(body)
        library.hear(b"r" * 32, "images")

    for number, image in enumerate((A, B), 1):
        own = Entry("@eve/train", number, True, image)
        hear(campus.said(campus.guest, campus.guest_chain, number, own, personal=True))
        assert image.config in library.rules.shared and not changes
    hear(campus.said(campus.founder, campus.founder_chain, 1, Entry("tool", 1, True, A)))
    assert changes == ["changed"]
