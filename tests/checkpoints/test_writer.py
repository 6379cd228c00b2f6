"""Checkpoint writer: what is asked of other nodes, when a checkpoint may be committed, and what counts as saved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptstore.bandwidth import Bandwidth
from ckptstore.cipher import StateCipher
from ckptstore.errors import StoreError
from ckptstore.store import Store
from mesh.checkpoints import writer as module
from mesh.checkpoints.loss_estimate import LossEstimate
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.checkpoints.replicator import Replicated
from mesh.checkpoints.save_schedule import SaveSchedule
from mesh.checkpoints.writer import RESULT_REPLICAS, CheckpointWriter
from mesh.consensus.effects import SaveCheckpoint, SaveResult
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
        self.policy = ReplicaPolicy(0, 0, (B,))
        self.bandwidth = Bandwidth()
        self.store: Store = open_store(root / "store")
        self.loss = LossEstimate(100, lambda text: None)
        spec = make_spec(checkpointing=Checkpointing(to=(A,), replicas=2))
        schedule = SaveSchedule(spec, root, self.loss)
        replicator: Any = self
        self.writer = CheckpointWriter(
            b"j" * 16,
            spec,
            self.store,
            replicator,
            fake_seal,
            lambda: self.policy,
            self.loss,
            schedule,
            lambda *said: None,
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
        holders = tuple(node for node in (*chosen, *fallback) if node in self.takes)[:want]
        return Replicated(holders, "" if holders else "they are full", ())

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
