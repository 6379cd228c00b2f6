"""Two stores that save, send, abort, forget, collect, get damaged and reopen, compared with a plain dictionary."""

import shutil
import tempfile
import time
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptstore.checker import verify
from ckptstore.cipher import StateCipher
from ckptstore.errors import StoreError
from ckptstore.store import Store
from tests.ckptstore.worlds import CIPHER, JOB, damage, feed, open_store, read_tree, save, stream, write_tree

NAMES = ("ours", "theirs")
BLOCK = 5000


class Stores(RuleBasedStateMachine):
    """`held`: what each store must be able to restore; `seq` only grows, as a runner's does."""

    @initialize(cipher=st.sampled_from([None, CIPHER]))
    def begin(self, cipher: StateCipher | None) -> None:
        self.cipher = cipher
        self.root = Path(tempfile.mkdtemp(prefix="ckptstore-"))
        self.blocks = [Random(number).randbytes(BLOCK) for number in range(4)]
        self.stores: dict[str, Store] = {name: open_store(self.root / name) for name in NAMES}
        self.held: dict[str, dict[bytes, dict[str, bytes]]] = {name: {} for name in NAMES}
        self.sealed: dict[bytes, bytes] = {}
        self.seq = 0
        self.now = time.time()

    def teardown(self) -> None:
        if hasattr(self, "root"):
            for store in self.stores.values():
                store.close()
            shutil.rmtree(self.root)

    @rule(name=st.sampled_from(NAMES), files=st.lists(st.integers(0, 3), min_size=1, max_size=3), moved=st.booleans())
    def save(self, name: str, files: list[int], moved: bool) -> None:
        """Save some files, unchanged or each changed a little."""
        if moved:
            for number in files:
                changed = bytearray(self.blocks[number])
                changed[self.seq % BLOCK] ^= 1 + self.seq % 255
                self.blocks[number] = bytes(changed)
        self.seq += 1
        tree = {"abcd"[number]: self.blocks[number] for number in files}
        directory = self.root / f"in-{self.seq}"
        write_tree(directory, tree)
        parent = next(reversed(self.held[name]), None)
        saved = save(self.stores[name], directory, seq=self.seq, parent=parent, cipher=self.cipher)
        self.held[name][saved.id] = tree
        self.sealed[saved.id] = saved.sealed

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), breaks_at=st.one_of(st.none(), st.integers(0, 3 * BLOCK)))
    def send(self, data: st.DataObject, breaks_at: int | None) -> None:
        source = data.draw(st.sampled_from([name for name in NAMES if self.held[name]]))
        target = next(name for name in NAMES if name != source)
        identity = data.draw(st.sampled_from(list(self.held[source])))
        ours, theirs = self.stores[source], self.stores[target]
        sent = b"".join(bytes(frame) for frame in stream(ours, theirs, identity))
        receiver = theirs.receive(10**7)
        if breaks_at is not None and breaks_at < len(sent):
            feed(receiver, sent[:breaks_at])
            receiver.keep()
            return
        feed(receiver, sent)
        receiver.finish()
        theirs.accept_manifest(self.sealed[identity])
        self.held[target][identity] = self.held[source][identity]

    @rule(name=st.sampled_from(NAMES), keep=st.integers(1, 2), later=st.sampled_from([10**4, 0]))
    def make_room(self, name: str, keep: int, later: int) -> None:
        for identity in self.stores[name].forget_old(JOB, needed=range(self.seq - keep + 1, self.seq + 1)):
            del self.held[name][identity]
        self.stores[name].collect(min_age_s=900, now_unix=time.time() + later)

    @rule(name=st.sampled_from(NAMES), without_index=st.booleans())
    def reopen(self, name: str, without_index: bool) -> None:
        self.stores[name].close()
        if without_index:
            for path in (self.root / name).glob("index.sqlite*"):
                path.unlink()
        self.stores[name] = open_store(self.root / name)

    @rule(name=st.sampled_from(NAMES), place=st.integers(0, 10**6), bit=st.integers(0, 7))
    def damage(self, name: str, place: int, bit: int) -> None:
        """`verify` reports exactly the checkpoints that cannot be restored; the others are intact."""
        packs = sorted((self.root / name / "packs").iterdir(), key=Path.read_bytes)  # their names are random
        if not packs:
            return
        pack = packs[place % len(packs)]
        damage(pack, place % pack.stat().st_size, 1 << bit)
        told = set(verify(self.stores[name]).damaged_manifests)
        self.held[name] = {identity: tree for identity, tree in self.held[name].items() if identity not in told}
        for identity in told:
            self.stores[name].forget(identity)

    @invariant()
    def gives_back_exactly_what_it_holds(self) -> None:
        for name in NAMES if hasattr(self, "root") else ():
            store, out = self.stores[name], self.root / "out"
            assert {info.id for info in store.manifests()} == set(self.held[name])
            for identity, tree in self.held[name].items():
                try:
                    store.restore(identity, out, prefix="ckpt", cipher=self.cipher)
                except StoreError as error:
                    raise AssertionError(f"{name} cannot give back what it holds: {error}") from error
                assert read_tree(out) == tree
                shutil.rmtree(out)
            for identity in (chunk for info in store.manifests() for chunk in store.manifest(info.id).chunks):
                where = store.index.find(identity)
                base = store.index.find(where.base) if where is not None and where.base is not None else None
                assert base is None or base.base is None, "I5: no delta chains"


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=40, stateful_step_count=25, suppress_health_check=list(HealthCheck))
