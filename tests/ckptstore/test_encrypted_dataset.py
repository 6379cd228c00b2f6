"""Encrypted data sets: holders keep and verify what they cannot read; only changes are stored; every chunk has the set's key."""

import random
from pathlib import Path

import pytest

from ckptstore import dataset
from ckptstore.checker import check_packs
from ckptstore.cipher import StateCipher
from ckptstore.dataset_adder import Added, Adder
from ckptstore.dataset_store import DataSets
from ckptstore.errors import CorruptChunk, MissingKey
from tests.ckptstore.test_dataset import age, same
from tests.ckptstore.worlds import CIPHER, damage, feed

ID, OTHER_ID = b"\1" * 32, b"\2" * 32
OTHER = StateCipher(b"another key of 32 bytes........!")
SECRET, SECRET_NAME = b"a face that nobody may see. " * 40, "name-of-a-patient"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with small files, compressible and not, a large file that has a list of chunks, and a hole."""
    monkeypatch.setattr(dataset, "OWN_REFS", 2)
    root, rng = tmp_path / "source", random.Random(1)
    (root / "inner").mkdir(parents=True)
    for number in range(100):
        (root / "inner" / f"{number}.jpg").write_bytes(rng.randbytes(2000))
    (root / "inner" / SECRET_NAME).write_bytes(SECRET)
    with (root / "large").open("wb") as file:
        file.write(rng.randbytes(9 << 20))
        file.seek(12 << 20)
        file.write(SECRET)
    age(root)
    return root


@pytest.fixture
def store(tmp_path: Path) -> DataSets:
    return DataSets(tmp_path / "data")


def add(store: DataSets, source: Path, cipher: StateCipher | None = CIPHER) -> Added:
    return Adder(store, cipher=cipher).add(source)


def given(store: DataSets, added: Added, cipher: StateCipher | None, to: DataSets, realm: bytes) -> None:
    """Give all chunks of a data set to another node, as nodes do."""
    receiver = to.receive(1 << 30, realm)
    try:
        for data in store.stream(list(dict.fromkeys(one for one, _ in store.chunks(added.root, cipher)))):
            feed(receiver, data)
        receiver.finish()
    finally:
        receiver.abort()


def test_holder_keeps_verifies_and_gives_what_it_cannot_read(store: DataSets, source: Path, tmp_path: Path) -> None:
    added = add(store, source)
    store.publish(ID, b"sealed", added.root, CIPHER)
    holder = DataSets(tmp_path / "holder")
    given(store, added, CIPHER, holder, CIPHER.realm)
    holder.publish(ID, b"sealed", added.root, CIPHER)
    for path in (*(tmp_path / "holder").rglob("*"), *(tmp_path / "data").rglob("*.pack")):
        found = path.read_bytes() if path.is_file() else b""
        assert SECRET[:28] not in found and SECRET_NAME.encode() not in found and CIPHER.key not in found, path
    for cipher in (None, OTHER):
        with pytest.raises(MissingKey):
            holder.make_tree(ID, added.root, cipher=cipher)
        with pytest.raises(MissingKey):
            holder.enter(OTHER_ID, added.root, cipher)
    assert list(holder.trees.iterdir()) == []

    # Damage is found, and what is intact is kept, without the key.
    pack = max(holder.packs.iterdir(), key=lambda path: path.stat().st_size)
    damage(pack, pack.stat().st_size // 2)
    assert check_packs(holder, lambda words: None).bad_chunks == 1
    lost = holder.missing_of(ID)
    assert len(lost) == 1 < len(holder.members.of(ID))
    receiver = holder.receive(1 << 30, CIPHER.realm)
    for data in store.stream([lost[0][0]]):
        feed(receiver, data)
    receiver.finish()
    assert not holder.missing_of(ID) and same(source, holder.make_tree(ID, added.root, cipher=CIPHER))


def test_only_changes_are_encrypted_anew_until_the_key_changes(store: DataSets, source: Path) -> None:
    first = add(store, source)
    again = add(store, source)
    assert (again.root, again.read_bytes, again.new_bytes) == (first.root, 0, 0)
    (source / "inner" / "new").write_bytes(b"x" * 3000)
    changed = add(store, source)
    assert changed.read_bytes == 3000 and changed.new_bytes < 50_000
    rekeyed = add(store, source, OTHER)
    assert rekeyed.read_bytes == first.read_bytes + 3000
    old, new = ({one for one, _ in store.chunks(a.root, c)} for a, c in ((changed, CIPHER), (rekeyed, OTHER)))
    assert not old & new
    with pytest.raises(MissingKey):
        store.make_tree(ID, rekeyed.root, cipher=CIPHER)


def test_set_that_becomes_private_has_no_chunk_of_the_public_one(store: DataSets, source: Path) -> None:
    public = add(store, source, None)
    private = add(store, source)
    assert private.read_bytes == public.read_bytes, "what the public one had read is read again"
    store.publish(ID, b"sealed", private.root, CIPHER)
    shared = {one for one, _ in store.chunks(public.root)} & {one for one, _ in store.chunks(private.root, CIPHER)}
    assert not shared and same(source, store.make_tree(ID, private.root, cipher=CIPHER))
    assert add(store, source, None).read_bytes == add(store, source).read_bytes == 0
    for cipher in (None, CIPHER):
        with pytest.raises((MissingKey, CorruptChunk)):
            store.make_tree(OTHER_ID, private.root if cipher is None else public.root, cipher=cipher)


@pytest.mark.parametrize(
    ("cipher", "realm"),
    [(None, CIPHER.realm), (OTHER, CIPHER.realm), (CIPHER, b"")],
    ids=["in the clear", "with another key", "encrypted in a public set"],
)
def test_chunk_of_another_key_is_not_received(
    store: DataSets, tmp_path: Path, cipher: StateCipher | None, realm: bytes
) -> None:
    """The owner of another data set could name chunks of a private one, to have a node that can read them show them."""
    (tmp_path / "file").write_bytes(SECRET)
    added, holder = add(store, tmp_path / "file", cipher), DataSets(tmp_path / "holder")
    with pytest.raises(CorruptChunk, match="with another key than what it belongs to"):
        given(store, added, cipher, holder, realm)
    assert holder.stored_bytes() == 0
