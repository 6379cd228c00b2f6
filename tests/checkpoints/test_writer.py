"""Checkpoint writer: what is asked of other nodes, when a checkpoint may be committed, and what counts as saved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptstore.bandwidth import Bandwidth
from ckptstore.cipher import StateCipher
from ckptstore.errors import CorruptChunk, StoreError
from ckptstore.store import Store
from mesh.checkpoints import writer as module
from mesh.checkpoints.loss_estimate import LossEstimate
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.checkpoints.replicator import Replicated, Sent, Substitute
from mesh.checkpoints.save_schedule import SaveSchedule
from mesh.checkpoints.writer import RESULT_REPLICAS, CheckpointWriter
from mesh.consensus.effects import SaveCheckpoint, SaveResult
from mesh.consensus.status import Saving
from mesh.model.spec import Checkpointing
from mesh.util.boottime import boot_s
from tests.ckptstore.worlds import fake_seal, open_store, write_tree
from tests.consensus.worlds import A, B, C, make_spec

ORDER = SaveCheckpoint(1, None, False)


class Desk:
    """A writer whose replicator records what it is asked, and takes copies only where `takes` says so."""

    def __init__(self, root: Path) -> None:
        self.root, self.asked = root, []  # type: tuple[Path, list[tuple[Any, ...]]]
        self.takes: set[bytes] = {B, C}
        self.short, self.substitutes = "", ()  # type: tuple[str, tuple[Substitute, ...]]
        self.shown: list[Saving | None] = []  # while other nodes take copies
        self.noted: list[tuple[Any, ...]] = []
        self.policy = ReplicaPolicy(0, 0, (B,))
        self.bandwidth = Bandwidth()
        self.store: Store = open_store(root / "store")
        self.loss = LossEstimate(100, lambda text: None)
        spec = make_spec(checkpointing=Checkpointing(to=(A,), replicas=2))
        self.schedule = SaveSchedule(spec, root, self.loss)
        replicator: Any = self
        self.writer = CheckpointWriter(
            b"j" * 16,
            spec,
            self.store,
            replicator,
            fake_seal,
            lambda: self.policy,
            self.loss,
            self.schedule,
            lambda *said: self.noted.append(said),
            {"/mesh/ckpt": "ckpt"},
        )
        write_tree(root / "in", {"state": b"secret state" * 1000})

    async def replicate(
        self,
        manifest: bytes,
        chosen: Sequence[bytes],
        fallback: Sequence[bytes],
        want: int,
        gone: Mapping[bytes, str] | None = None,
        loss: LossEstimate | None = None,
        tell: Any = None,
    ) -> Replicated:
        self.asked.append((chosen, fallback, want))
        tell(Sent(10, 100, 2))
        self.shown.append(self.writer.saving)
        holders = tuple(node for node in (*chosen, *fallback) if node in self.takes)[:want]
        return Replicated(holders, self.short if holders else "they are full", self.substitutes)

    async def save(self, since_s: float = 5.0) -> tuple[bytes, ...]:
        return (await self.writer.checkpoint({"ckpt": self.root / "in"}, ORDER, since_s, 30)).holders


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(module, "RETRY_EVERY_S", 0.01)
    return Desk(tmp_path)


async def test_copies_go_where_the_user_wants_them_and_as_many(desk: Desk) -> None:
    assert await desk.save() == (B,) and desk.asked == [((A,), (B,), 2)]
    _, holders = await desk.writer.result({"log": desk.root / "in"}, SaveResult(2, None))
    assert holders == (B,) and desk.asked[1:] == [((A,), (B,), RESULT_REPLICAS)]


async def test_checkpoint_without_a_copy_is_not_committed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_FOR_S", 0.0)
    desk.takes = set()
    desk.loss.began(1.0, False, None)
    with pytest.raises(StoreError, match="no other node took it"):
        await desk.save()
    assert desk.loss.lost(11.0, None).seconds == 10.0, "what it saved would be lost"


async def test_copy_is_tried_again_with_the_nodes_of_then(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_FOR_S", 60.0)
    desk.takes, real = {C}, desk.replicate

    async def replicate(*asked: Any, **more: Any) -> Replicated:
        desk.policy = ReplicaPolicy(0, 0, (C,))
        return await real(*asked, **more)

    desk.replicate = replicate  # type: ignore[method-assign]
    assert await desk.save() == (C,) and [fallback for _, fallback, _ in desk.asked] == [(B,), (C,)]


async def test_nothing_is_tried_past_the_deadline_of_a_notice(desk: Desk) -> None:
    desk.takes = set()
    desk.loss.noticed(boot_s() - 10.0, 1.0)
    with pytest.raises(StoreError, match="no other node took it"):
        await desk.save()
    assert len(desk.asked) == 1


async def test_work_counts_as_saved_from_the_begin_of_the_save(desk: Desk) -> None:
    desk.loss.began(1.0, False, None)
    await desk.save(since_s=5.0)
    assert desk.loss.lost(11.0, None).seconds == 6.0


async def test_state_is_encrypted_in_the_store(desk: Desk) -> None:
    desk.writer.cipher = StateCipher.generate()
    await desk.save()
    assert not any(b"secret state" in pack.read_bytes() for pack in desk.store.packs.iterdir())
    (info,) = desk.store.manifests()
    with pytest.raises(StoreError):
        desk.store.restore(info.id, desk.root / "out", prefix="ckpt")
    desk.store.restore(info.id, desk.root / "out", prefix="ckpt", cipher=desk.writer.cipher)


async def test_save_that_takes_long_is_shown_until_it_ends(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.save()
    assert desk.shown == [None], "it was fast"
    monkeypatch.setattr(module, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(module, "RETRY_FOR_S", 0.0)
    await desk.save()
    await desk.writer.result({"log": desk.root / "in"}, SaveResult(2, None))
    assert [(one.kind, one.seq, one.sent, one.size, one.nodes) for one in desk.shown[1:] if one is not None] == [
        ("checkpoint", 1, 10, 100, 2),
        ("result", 2, 10, 100, 2),
    ]
    desk.takes = set()
    with pytest.raises(StoreError):
        await desk.save()
    assert desk.writer.saving is None
    desk.writer._sends(Sent(10, 100, 2))
    assert desk.writer.saving is None, "the report of a transfer that ended late"


async def test_planner_learns_what_a_save_took(desk: Desk) -> None:
    desk.policy, desk.takes = ReplicaPolicy(0, 0, (B, C)), {B, C}
    desk.writer._compression.saved = 0.9  # it pays
    await desk.save()
    assert desk.writer.last_save is not None and desk.writer.state_bytes == len(b"secret state" * 1000)
    stored, seconds = desk.writer.last_save
    assert 0 < stored < desk.writer.state_bytes and 0 < seconds < 60
    assert desk.schedule.bytes.value == 2 * stored, "two nodes took it"
    write_tree(desk.root / "in", {"state": b"other state" * 1000})
    desk.takes = set()
    desk.policy = ReplicaPolicy(0, 0, ())
    await desk.save()
    assert desk.writer.last_save[0] > 0, "a save that no other node is to take is one, too"


@pytest.mark.parametrize("pays", [False, True])
async def test_save_is_compressed_if_that_pays_towards_the_last_holders(desk: Desk, pays: bool) -> None:
    asked, learnt = list[Any](), list[tuple[int, int]]()

    class Policy:
        def should_compress(self, link_bps: float | None, idle_cores: float) -> bool:
            asked.append(link_bps)
            return pays

        def learn(self, raw_bytes: int, stored_bytes: int, seconds: float, cores: float) -> None:
            learnt.append((raw_bytes, stored_bytes))

    desk.writer._compression = Policy()  # type: ignore[assignment]
    desk.bandwidth.mean_bps = lambda peers: float(len(peers)) or None  # type: ignore[assignment, method-assign, return-value]
    await desk.save()
    size = len(b"secret state" * 1000)
    assert desk.writer.last_save is not None
    if pays:
        assert desk.writer.last_save[0] < size / 10 and learnt == [(size, desk.writer.last_save[0])]
    else:
        assert desk.writer.last_save[0] >= size and not learnt
    await desk.save()
    assert asked == [None, 1.0]


async def test_user_is_told_once_that_another_node_stands_in(desk: Desk) -> None:
    desk.policy = ReplicaPolicy(0, 0, (B,), nicks={A: "ann", B: "bob"})
    desk.substitutes, desk.short = (Substitute(B, A, "it is away"),), "one holder is missing"
    text = "bob holds checkpoints in place of ann: it is away"
    for _ in range(2):
        await desk.save()
        assert desk.writer.note == f"{text}; one holder is missing"
    assert desk.noted == [(text, "stand-in")]
    desk.substitutes, desk.short = (), ""
    for _ in range(2):
        await desk.save()
        assert desk.writer.note == ""
    assert desk.noted[1:] == [("the nodes chosen for checkpoints hold them again", "stand-in")]


async def test_user_is_told_once_of_a_link_that_cannot_be_saved(desk: Desk) -> None:
    (desk.root / "in" / "latest").symlink_to("/mesh/ckpt/state")
    (desk.root / "in" / "data").symlink_to("/srv/data")
    for _ in range(2):
        await desk.save()
    assert desk.noted == [("ckpt/data is not saved: a link out of its directory, a socket or a pipe", "left out")]


async def test_manifest_says_how_to_resume(desk: Desk) -> None:
    for resume in (None, "--from step-30"):
        stored = await desk.writer.checkpoint({"ckpt": desk.root / "in"}, ORDER, 5.0, 30, resume)
        note = desk.store.manifest(stored.manifest).open(None).note
        assert note == ({"resume": resume} if resume else {})


async def test_what_proves_damaged_while_it_is_copied_is_stored_again(desk: Desk) -> None:
    """The program presents bytes that the store has already, but cannot read any more."""
    real, found = desk.replicate, list[bytes]()

    async def replicate(manifest: bytes, *asked: Any, **more: Any) -> Replicated:
        found.append(manifest)
        if len(found) % 2:
            raise CorruptChunk("a chunk is damaged")
        return await real(manifest, *asked, **more)

    desk.replicate = replicate  # type: ignore[method-assign]
    assert await desk.save() == (B,) and len(found) == 2
    _, holders = await desk.writer.result({"log": desk.root / "in"}, SaveResult(2, None))
    assert holders == (B,) and len(found) == 4
