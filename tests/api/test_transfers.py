"""Checkpoints on their way between real stores on real connections: in the background, by a deadline, overtaken, cut off."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ckptstore.store import SavedManifest, Store
from mesh.api.wire import Wire
from mesh.engine.alarm import boot_s
from mesh.jobs import courier as courier_module
from mesh.jobs import deposits as deposits_module
from mesh.jobs.cadence import Cadence
from mesh.jobs.courier import Courier
from mesh.jobs.custody import Custody
from mesh.jobs.deposits import Deposits
from mesh.jobs.effects import SaveCheckpoint
from mesh.jobs.stake import Stake
from mesh.jobs.status import Saving
from tests.api.nodes import Keeper, Link, client_of, leaving
from tests.ckptstore.worlds import fake_seal, open_store, save, write_tree
from tests.jobs.worlds import make_spec

MB = 10**6
PEER, OTHER = b"p" * 32, b"o" * 32


class World:
    def __init__(self, store: Store, keepers: dict[bytes, Keeper], directory: Path) -> None:
        self.store, self.keepers, self._directory = store, keepers, directory
        self.made = 0

    async def courier(self, wire: Wire | None = None) -> Courier:
        self.peers = await client_of({node: await keeper.serve() for node, keeper in self.keepers.items()}, wire)
        return Courier(self.peers, self.store)

    def checkpoint(self, size: int) -> SavedManifest:
        self.made += 1
        write_tree(self._directory / str(self.made), {"noise": os.urandom(size)})
        return save(self.store, self._directory / str(self.made), seq=self.made, job=b"%016d" % self.made)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    keepers = {PEER: Keeper(tmp_path / "peer"), OTHER: Keeper(tmp_path / "other")}
    store = open_store(tmp_path / "ours")
    world = World(store, keepers, tmp_path / "in")
    yield world
    await world.peers.close()
    for keeper in keepers.values():
        await keeper.close()
    store.close()


async def test_a_copy_in_the_background_keeps_to_the_budget_and_promises_nothing(world: World) -> None:
    courier = await world.courier(Wire(10 * MB))
    saved = world.checkpoint(12 * MB)
    begun = time.monotonic()
    copies = await courier.replicate(saved.id, [PEER], [], 1)
    assert copies.holders == (PEER,) and time.monotonic() - begun > 0.8, "12 MB at 10 MB/s"
    assert courier.bandwidth.promised_bps(PEER) is None, "the link may carry more"
    assert courier.bandwidth.mean_bps([PEER]) is not None
    assert world.keepers[PEER].torn() == 0


async def test_who_saves_is_told_how_far_it_is(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    courier, spec = await world.courier(Wire(10 * MB)), make_spec()
    write_tree(tmp_path / "new", {"noise": os.urandom(8 * MB)})
    custody, stake = Custody(0, 0, (PEER,)), Stake(100, lambda text: None)
    cadence = Cadence(spec, tmp_path, stake)
    deposits = Deposits(
        b"j" * 16, spec, world.store, courier, fake_seal, lambda: custody, stake, cadence, lambda *said: None
    )
    saving = asyncio.create_task(
        deposits.checkpoint({"ckpt": tmp_path / "new"}, SaveCheckpoint(7, None, False), boot_s(), 3)
    )
    while not world.peers.wire.owners:
        assert deposits.saving is None, "what is kept at once is no news"
        await asyncio.sleep(0.01)
    monkeypatch.setattr(deposits_module, "TOLD_AFTER_S", 0.0)
    seen: list[Saving] = []
    while not saving.done():
        seen += [deposits.saving] if deposits.saving is not None else []
        await asyncio.sleep(0.01)
    assert {(one.kind, one.seq) for one in seen} == {("checkpoint", 7)} and deposits.saving is None
    sizes = [one.sent for one in seen]
    assert sizes == sorted(sizes) and any(0 < one.sent < one.size and one.nodes == 1 for one in seen)
    assert 8 * MB < seen[-1].size < 9 * MB and (await saving).holders == (PEER,)


async def test_a_copy_that_this_node_holds_back_is_not_called_slow(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier_module, "SLOW_AFTER_S", 0.4)
    monkeypatch.setattr(courier_module, "SLOW_BYTES_S", 10**12)
    courier = await world.courier(Wire(10 * MB))
    copies = await courier.replicate(world.checkpoint(12 * MB).id, [PEER], [OTHER], 1)
    assert copies.holders == (PEER,) and not world.keepers[OTHER].manifests


async def test_a_checkpoint_with_a_deadline_does_not_care_for_the_budget(world: World) -> None:
    courier = await world.courier(Wire(1 * MB))
    saved = world.checkpoint(12 * MB)
    begun = time.monotonic()
    copies = await courier.replicate(saved.id, [PEER], [OTHER], 2, stake=leaving(2.0))
    assert set(copies.holders) == {PEER, OTHER} and time.monotonic() - begun < 8, "it would be 24 s"


async def test_notice_hurries_a_checkpoint_that_is_on_its_way(world: World) -> None:
    courier = await world.courier(Wire(1 * MB))
    saved, stake = world.checkpoint(24 * MB), Stake(100, lambda text: None)
    begun = time.monotonic()
    copying = asyncio.create_task(courier.replicate(saved.id, [PEER], [], 1, stake=stake))
    while not world.peers.wire.owners:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    stake.noticed(boot_s(), 2.0)
    assert (await copying).holders == (PEER,) and time.monotonic() - begun < 15, "it would be 24 s"
    assert world.keepers[PEER].torn() == 0


async def test_what_cannot_be_in_time_is_told_and_tried(world: World) -> None:
    told: list[str] = []
    courier = await world.courier()
    courier.bandwidth.saw(PEER, 10 * MB, 10.0)
    saved = world.checkpoint(12 * MB)
    copies = await courier.replicate(saved.id, [PEER], [], 1, stake=leaving(3.0, warn=told.append))
    assert copies.holders == (PEER,) and len(told) == 1
    assert told[0].startswith("11.4 MiB cannot reach another node in ")
    assert told[0].endswith(" at 976.6 KiB/s; there is no earlier checkpoint. It is tried all the same")


async def test_one_whole_copy_leaves_when_there_is_no_time_for_two(world: World) -> None:
    link = Link(10 * MB)  # the port of the node that leaves
    for keeper in world.keepers.values():
        keeper.link = link
    courier = await world.courier()
    for peer in (PEER, OTHER):
        courier.bandwidth.saw(peer, 10 * MB, 1.0)
    copies = await courier.replicate(world.checkpoint(20 * MB).id, [PEER], [OTHER], 2, stake=leaving(3.0))
    assert len(copies.holders) == 1 and copies.short == "on 1 of 2 peers: there was no more time"
    assert all(keeper.torn() == 0 for keeper in world.keepers.values())


async def test_the_heavier_checkpoint_overtakes_one_that_is_on_its_way(world: World) -> None:
    keeper = world.keepers[PEER]
    keeper.link = link = Link(20 * MB)
    courier = await world.courier()
    courier.bandwidth.saw(PEER, 20 * MB, 1.0)
    light, heavy = world.checkpoint(40 * MB), world.checkpoint(36 * MB)
    first = asyncio.create_task(courier.replicate(light.id, [PEER], [], 1, stake=leaving(3.6)))
    while link.carried < 10 * MB:
        await asyncio.sleep(0.01)
    second = asyncio.create_task(courier.replicate(heavy.id, [PEER], [], 1, stake=leaving(3.0, percent=100_000)))
    assert all(copies.holders == (PEER,) for copies in await asyncio.gather(first, second))
    assert keeper.manifests[heavy.id] < keeper.manifests[light.id] and keeper.torn() == 0


async def test_of_a_copy_that_is_cut_off_nothing_shows_and_the_next_try_goes_on(world: World) -> None:
    keeper = world.keepers[PEER]
    keeper.link = link = Link(1000 * MB)
    courier = await world.courier(Wire(10 * MB))
    saved = world.checkpoint(40 * MB)
    cut = asyncio.create_task(courier.replicate(saved.id, [PEER], [], 1))
    while link.carried < 20 * MB:
        await asyncio.sleep(0.01)
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    async with asyncio.timeout(60):
        while len(keeper.store.missing(saved.manifest.chunks)) == len(saved.manifest.chunks):
            await asyncio.sleep(0.05)
    assert keeper.torn() == 0 and not keeper.manifests
    assert (await courier.replicate(saved.id, [PEER], [], 1)).holders == (PEER,) and keeper.torn() == 0
