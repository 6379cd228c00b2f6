"""The advert (what this node lends) and the facts (where its API is), kept up to date and published."""

import asyncio
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from ckptstore.store import Store
from membership.node import MembershipNode
from mesh.data.library import DataLibrary
from mesh.execution.engine import Availability
from mesh.gpus.guard import NodeGuard
from mesh.gpus.guarded_engine import GuardedEngine
from mesh.gpus.inventory import Inventory
from mesh.images.library import Library
from mesh.jobs.environments import find_uv, has_conda
from mesh.provider.attendance import Attendance
from mesh.provider.owner import Owner
from placement.advert import encode_advert
from placement.filters import IMAGE_ENGINES

FACTS_TTL_S = 3600.0
ADVERT_TTL_S = 3600.0  # changes are published at once, so it need not be repeated often
REFRESH_S = 1.0
ENGINES_EVERY_S = 15.0
NOT_NEEDED = "not offered: Docker or Podman is ready here, and isolates more"


class AdvertPublisher:
    """Collects what the advert says, and publishes it when that changes or the last one grows old.

    `root`: the directory whose disk the store is on. `engine_states`: of each engine, at the last look.
    """

    def __init__(
        self,
        membership: MembershipNode,
        inventory: Inventory,
        engines: Mapping[str, GuardedEngine],
        guard: NodeGuard,
        library: Library,
        data: DataLibrary,
        store: Store,
        attendance: Attendance,
        owner: Owner,
        root: Path,
        started_unix: float,
    ) -> None:
        self._membership, self._inventory, self._engines, self._guard = membership, inventory, engines, guard
        self._library, self._data, self._store = library, data, store
        self._attendance, self._owner = attendance, owner
        self._root, self._started_unix = root, started_unix
        self._published = (0, 0.0)  # version, when
        self.engine_states: dict[str, Availability] = {}
        self._looked = False

    async def run(self) -> None:
        engines_due = time.monotonic() + ENGINES_EVERY_S
        while True:
            await asyncio.sleep(REFRESH_S)
            if time.monotonic() >= engines_due:
                await self.look_at_engines()
                engines_due = time.monotonic() + ENGINES_EVERY_S
            self._inventory.image_offer = self._library.offer()  # it depends on what other nodes offer, too
            self.publish()

    async def look_at_engines(self) -> None:
        """Ask each engine whether it can run guests, and take over what it says."""
        for name, engine in self._engines.items():
            self.engine_states[name] = await engine.availability()
        self.engine_states = judged(self.engine_states)
        ready = tuple(name for name, state in self.engine_states.items() if state.ok)
        await self._library.look(next((name for name in ready if name in IMAGE_ENGINES), ""))
        self._inventory.engines, self._inventory.image_offer = ready, self._library.offer()
        self._inventory.uv = await asyncio.to_thread(find_uv) is not None
        self._inventory.conda = await asyncio.to_thread(has_conda)
        self._inventory.proxies = tuple(name for name in ready if self.engine_states[name].proxies)
        if "docker" in self.engine_states:
            self._inventory.system = self.engine_states["docker"].system
        self._looked = True

    def guard_changed(self, problem: str) -> None:
        """Publish at once whether GPUs are guarded; `problem`: why they are not."""
        self._inventory.guards = not problem
        if problem:
            self._membership.problems["guard"] = problem
        self.publish(force=True)

    def publish(self, force: bool = False) -> None:
        """Bring the advert up to date; publish it if it is another one or old, and with `force` in any case.

        Not before the first look at the engines: others would take it that this node has none, and refuse jobs for that.
        """
        if not self._looked:
            return
        inventory, attendance = self._inventory, self._attendance
        if force:
            inventory.image_offer = self._library.offer()
        inventory.data_offer = self._data.offer()
        attendance.until_unix = self._owner.opens_at() or 0.0
        inventory.weights = attendance.tick(time.time(), inventory.lends)
        inventory.gpu_pauses = bool(inventory.gpus) and not self._guard.pause_problem
        inventory.up_since_unix = int(attendance.since_unix or self._started_unix)
        free, room = shutil.disk_usage(self._root).free, self._store.remaining_quota()
        free_mib = (free if room is None else min(free, room)) >> 20
        inventory.store_free_mib = free_mib // 1024 * 1024  # whole GiB, so that small changes publish nothing
        advert, now = inventory.advert(), time.monotonic()
        version, published_at = self._published
        if force or advert.version != version or now - published_at > ADVERT_TTL_S / 4:
            self._published = (advert.version, now)
            self._membership.publish("advert", encode_advert(advert), ADVERT_TTL_S, urgent=force)


def judged(states: Mapping[str, Availability]) -> dict[str, Availability]:
    """Return the engines' states; Apptainer, which isolates less, is not offered where Docker or Podman is ready."""
    if "apptainer" in states and "docker" in states and states["docker"].ok:
        return {**states, "apptainer": Availability(ok=False, detail=NOT_NEEDED)}
    return dict(states)


async def publish_facts(membership: MembershipNode, facts: bytes) -> None:
    """Publish the facts now, and again before they expire, until cancelled."""
    while True:
        membership.publish("facts", facts, FACTS_TTL_S)
        await asyncio.sleep(FACTS_TTL_S / 4)
