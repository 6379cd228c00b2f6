"""Checkpoint transfers between real stores on real connections: in the background, by a deadline, overtaken, cut off."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ckptstore.errors import CorruptChunk
from ckptstore.store import SavedManifest, Store
from mesh.checkpoints import replicator as replicator_module
from mesh.checkpoints import writer as writer_module
from mesh.checkpoints.loss_estimate import LossEstimate
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.checkpoints.replicator import Replicator
from mesh.checkpoints.save_schedule import SaveSchedule
from mesh.checkpoints.writer import CheckpointWriter
from mesh.consensus.effects import SaveCheckpoint
from mesh.consensus.status import Saving
from mesh.rpc.pacing import Wire
from mesh.util.boottime import boot_s
from tests.ckptstore.worlds import damage, fake_seal, open_store, save, write_tree
from tests.consensus.worlds import make_spec
from tests.rpc.nodes import Keeper, Link, client_of, leaving, node_named

MB = 10**6
PEER, OTHER = node_named("p").node_id, node_named("o").node_id


class World:
    def __init__(self, store: Store, keepers: dict[bytes, Keeper], directory: Path) -> None:
        self.store, self.keepers, self._directory = store, keepers, directory
        self.made = 0

    async def replicator(self, wire: Wire | None = None) -> Replicator:
        self.peers = await client_of({node: await keeper.serve() for node, keeper in self.keepers.items()}, wire)
        return Replicator(self.peers, self.store)

    def checkpoint(self, size: int) -> SavedManifest:
        self.made += 1
        write_tree(self._directory / str(self.made), {"noise": os.urandom(size)})
        return save(self.store, self._directory / str(self.made), seq=self.made, job=b"%016d" % self.made)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    keepers = {
        PEER: Keeper(tmp_path / "peer", identity=node_named("p")),
        OTHER: Keeper(tmp_path / "other", identity=node_named("o")),
    }
    store = open_store(tmp_path / "ours")
    world = World(store, keepers, tmp_path / "in")
    yield world
    await world.peers.close()
    for keeper in keepers.values():
        await keeper.close()
    store.close()


async def test_background_copy_keeps_to_the_budget(world: World) -> None:
    replicator = await world.replicator(Wire(10 * MB))
    saved = world.checkpoint(12 * MB)
    begun = time.monotonic()
    copies = await replicator.replicate(saved.id, [PEER], [], 1)
    assert copies.holders == (PEER,) and time.monotonic() - begun > 0.8, "12 MB at 10 MB/s"
    assert replicator.bandwidth.promised_bps(PEER) is None, "a limited copy does not measure the link"
    assert replicator.bandwidth.mean_bps([PEER]) is not None
    assert world.keepers[PEER].torn() == 0


async def test_save_reports_its_progress(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replicator, spec = await world.replicator(Wire(10 * MB)), make_spec()
    write_tree(tmp_path / "new", {"noise": os.urandom(8 * MB)})
    replica_policy, loss = ReplicaPolicy(0, 0, (PEER,)), LossEstimate(100, lambda text: None)
    save_schedule = SaveSchedule(spec, tmp_path, loss)
    writer = CheckpointWriter(
        b"j" * 16,
        spec,
        world.store,
        replicator,
        fake_seal,
        lambda: replica_policy,
        loss,
        save_schedule,
        lambda *said: None,
        {},
    )
    saving = asyncio.create_task(
        writer.checkpoint({"ckpt": tmp_path / "new"}, SaveCheckpoint(7, None, False), boot_s(), 3)
    )
    while not world.peers.wire.owners:
        assert writer.saving is None, "a quick save shows no progress"
        await asyncio.sleep(0.01)
    monkeypatch.setattr(writer_module, "SHOWN_AFTER_S", 0.0)
    seen: list[Saving] = []
    while not saving.done():
        seen += [writer.saving] if writer.saving is not None else []
        await asyncio.sleep(0.01)
    assert {(one.kind, one.seq) for one in seen} == {("checkpoint", 7)} and writer.saving is None
    sizes = [one.sent for one in seen]
    assert sizes == sorted(sizes) and any(0 < one.sent < one.size and one.nodes == 1 for one in seen)
    assert 8 * MB < seen[-1].size < 9 * MB and (await saving).holders == (PEER,)


async def test_copy_of_a_damaged_chunk_has_it_stored_again(world: World, tmp_path: Path) -> None:
    """Other nodes are not tried: none helps. The next save of the same bytes mends the chunk."""
    replicator = await world.replicator()
    saved = world.checkpoint(100_000)
    where = world.store.index.find(saved.manifest.chunks[0])
    assert where is not None
    damage(world.store.packs / f"{where.pack}.pack", where.offset + where.length - 5)
    again = save(world.store, tmp_path / "in" / "1", seq=2)
    with pytest.raises(CorruptChunk):
        await replicator.replicate(again.id, [PEER], [OTHER], 1)
    assert world.store.missing(saved.manifest.chunks) == [saved.manifest.chunks[0]]
    again = save(world.store, tmp_path / "in" / "1", seq=3)
    assert (await replicator.replicate(again.id, [PEER], [OTHER], 1)).holders == (PEER,)
    assert not world.keepers[OTHER].manifests


async def test_copy_limited_by_this_node_is_not_called_slow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator_module, "SLOW_AFTER_S", 0.4)
    monkeypatch.setattr(replicator_module, "SLOW_BYTES_S", 10**12)
    replicator = await world.replicator(Wire(10 * MB))
    copies = await replicator.replicate(world.checkpoint(12 * MB).id, [PEER], [OTHER], 1)
    assert copies.holders == (PEER,) and not world.keepers[OTHER].manifests


async def test_copy_with_a_deadline_ignores_the_budget(world: World) -> None:
    replicator = await world.replicator(Wire(1 * MB))
    saved = world.checkpoint(12 * MB)
    begun = time.monotonic()
    copies = await replicator.replicate(saved.id, [PEER], [OTHER], 2, loss=leaving(2.0))
    assert set(copies.holders) == {PEER, OTHER} and time.monotonic() - begun < 8, "within the budget it takes 24 s"


async def test_notice_speeds_up_a_running_copy(world: World) -> None:
    replicator = await world.replicator(Wire(1 * MB))
    saved, loss = world.checkpoint(24 * MB), LossEstimate(100, lambda text: None)
    begun = time.monotonic()
    copying = asyncio.create_task(replicator.replicate(saved.id, [PEER], [], 1, loss=loss))
    while not world.peers.wire.owners:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    loss.noticed(boot_s(), 2.0)
    assert (await copying).holders == (PEER,) and time.monotonic() - begun < 15, "within the budget it takes 24 s"
    assert world.keepers[PEER].torn() == 0


async def test_copy_unable_to_meet_deadline_is_reported_and_tried(world: World) -> None:
    told: list[str] = []
    replicator = await world.replicator()
    replicator.bandwidth.record(PEER, 10 * MB, 10.0)
    saved = world.checkpoint(12 * MB)
    copies = await replicator.replicate(saved.id, [PEER], [], 1, loss=leaving(3.0, warn=told.append))
    assert copies.holders == (PEER,) and len(told) == 1
    assert told[0].startswith("11.4 MiB cannot reach another node in ")
    assert told[0].endswith(" at 976.6 KiB/s; there is no earlier checkpoint. The transfer continues")


async def test_one_complete_copy_is_sent_when_time_is_short(world: World) -> None:
    link = Link(10 * MB)  # the port of the leaving node
    for keeper in world.keepers.values():
        keeper.link = link
    replicator = await world.replicator()
    for peer in (PEER, OTHER):
        replicator.bandwidth.record(peer, 10 * MB, 1.0)
    copies = await replicator.replicate(world.checkpoint(20 * MB).id, [PEER], [OTHER], 2, loss=leaving(3.0))
    assert len(copies.holders) == 1 and copies.short == "on 1 of 2 peers: there was no more time"
    assert all(keeper.torn() == 0 for keeper in world.keepers.values())


async def test_costlier_checkpoint_overtakes_a_running_copy(world: World) -> None:
    keeper = world.keepers[PEER]
    keeper.link = link = Link(20 * MB)
    replicator = await world.replicator()
    replicator.bandwidth.record(PEER, 20 * MB, 1.0)
    light, heavy = world.checkpoint(40 * MB), world.checkpoint(36 * MB)
    first = asyncio.create_task(replicator.replicate(light.id, [PEER], [], 1, loss=leaving(3.6)))
    while link.carried < 10 * MB:
        await asyncio.sleep(0.01)
    second = asyncio.create_task(replicator.replicate(heavy.id, [PEER], [], 1, loss=leaving(3.0, percent=100_000)))
    assert all(copies.holders == (PEER,) for copies in await asyncio.gather(first, second))
    assert keeper.manifests[heavy.id] < keeper.manifests[light.id] and keeper.torn() == 0


async def test_interrupted_copy_is_invisible_and_resumes(world: World) -> None:
    keeper = world.keepers[PEER]
    keeper.link = link = Link(1000 * MB)
    replicator = await world.replicator(Wire(10 * MB))
    saved = world.checkpoint(40 * MB)
    cut = asyncio.create_task(replicator.replicate(saved.id, [PEER], [], 1))
    while link.carried < 20 * MB:
        await asyncio.sleep(0.01)
    (copy,) = [task for task in asyncio.all_tasks() if task.get_name().startswith("copy to")]
    cut.cancel()
    await asyncio.gather(cut, copy, return_exceptions=True)
    assert copy.cancelled()
    async with asyncio.timeout(60):
        while len(keeper.store.missing(saved.manifest.chunks)) == len(saved.manifest.chunks):
            await asyncio.sleep(0.05)
    assert keeper.torn() == 0 and not keeper.manifests
    assert (await replicator.replicate(saved.id, [PEER], [], 1)).holders == (PEER,) and keeper.torn() == 0
