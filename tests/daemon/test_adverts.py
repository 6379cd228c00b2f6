"""The advert of a node: what it says, and when it is published."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.daemon import adverts as module
from mesh.daemon.adverts import ADVERT_TTL_S, AdvertPublisher, judged, publish_facts
from mesh.execution.engine import Availability
from mesh.gpus.inventory import Inventory, Lending
from placement.advert import HORIZONS_S, Advert, Gpu, SystemCheckpoints, decode_advert
from placement.filters import DataOffer, ImageOffer

NODE = b"n" * 32
GPU = Gpu("GPU-1", "fake", 8192)
READY = Availability(True, "")


class Publisher:
    """A publisher of one node with the parts that it asks."""

    def __init__(self, root: Path, engines: dict[str, Availability], gpus: tuple[Gpu, ...] = ()) -> None:
        self.published: list[Advert] = []
        self.urgent: list[bool] = []
        self.looked: list[str] = []
        self.membership = SimpleNamespace(publish=self._publish, problems={})
        self.inventory = Inventory(NODE, "n", "ada", b"a" * 32, "", gpus, 1, ("*",), (), Lending(lending=True), 0)
        self.engines = engines
        self.guard = SimpleNamespace(pause_problem="")
        self.store = SimpleNamespace(remaining_quota=lambda: None)
        self.attendance = SimpleNamespace(tick=lambda now, lends: (64,) * len(HORIZONS_S), since_unix=0, until_unix=0)
        self.owner = SimpleNamespace(opens_at=lambda: None)
        parts: Any = (
            self.membership,
            self.inventory,
            {name: SimpleNamespace(availability=lambda name=name: self._availability(name)) for name in engines},
            self.guard,
            SimpleNamespace(offer=ImageOffer, look=self._look),
            SimpleNamespace(offer=DataOffer),
            self.store,
            self.attendance,
            self.owner,
        )
        self.adverts = AdvertPublisher(*parts, root, 100.0)

    def _publish(self, section: str, body: bytes, ttl_s: float, urgent: bool) -> None:
        assert (section, ttl_s) == ("advert", ADVERT_TTL_S)
        self.published.append(decode_advert(NODE, body))
        self.urgent.append(urgent)

    async def _availability(self, name: str) -> Availability:
        return self.engines[name]

    async def _look(self, engine: str) -> None:
        self.looked.append(engine)
        self.adverts.publish(force=True)  # what the library finds is told at once


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_conda", lambda: False)
    monkeypatch.setattr(module, "find_uv", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10 * 2**30 + 2**29))


async def test_node_publishes_no_advert_before_it_has_looked_at_its_engines(tmp_path: Path) -> None:
    """Others would take it that it has none, and refuse jobs that only it could run."""
    node = Publisher(tmp_path, {"process": READY})
    node.adverts.publish()
    node.adverts.guard_changed("")
    await node.adverts.look_at_engines()
    assert not node.published and node.looked == [""]
    node.adverts.publish()
    assert [advert.engines for advert in node.published] == [("process",)]


async def test_advert_has_only_engines_that_are_ready_and_what_those_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = SystemCheckpoints(platform="x86, Linux 6")
    docker = Availability(True, "", system=system, proxies=True)
    node = Publisher(tmp_path, {"process": READY, "docker": docker, "apptainer": READY})
    monkeypatch.setattr(module, "find_uv", lambda: "/usr/bin/uv")
    await node.adverts.look_at_engines()
    node.adverts.publish()
    assert node.published[-1].engines == ("process", "docker") and node.looked == ["docker"]
    assert node.published[-1].proxies == ("docker",) and node.published[-1].system == system
    assert (node.published[-1].uv, node.published[-1].conda) == (True, False)
    monkeypatch.setattr(module, "find_uv", lambda: None)
    monkeypatch.setattr(module, "has_conda", lambda: True)
    node.engines["docker"] = Availability(False, "it does not run", proxies=True)
    await node.adverts.look_at_engines()
    node.adverts.publish()
    assert node.published[-1].engines == ("process", "apptainer") and node.looked[-1] == "apptainer"
    assert node.published[-1].proxies == ()
    assert (node.published[-1].uv, node.published[-1].conda) == (False, True)


def test_apptainer_is_offered_where_docker_is_not_ready_only() -> None:
    for ready in (True, False):
        states = judged({"docker": Availability(ready, ""), "apptainer": READY})
        assert states["apptainer"].ok is not ready
    assert judged({"process": READY, "apptainer": READY})["apptainer"].ok


async def test_advert_is_published_when_it_changes_or_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    node = Publisher(tmp_path, {"process": READY})
    await node.adverts.look_at_engines()
    node.adverts.publish()
    node.adverts.publish()
    assert len(node.published) == 1 and node.urgent == [False], "nothing has changed"
    node.inventory.draining = True
    node.adverts.publish()
    assert len(node.published) == 2 and node.published[-1].paused
    now += ADVERT_TTL_S / 2
    node.adverts.publish()
    assert len(node.published) == 3, "others must not see it expire"
    node.adverts.publish(force=True)
    assert len(node.published) == 4 and node.urgent == [False, False, False, True]


async def test_advert_says_whether_gpus_are_guarded_and_can_be_freed(tmp_path: Path) -> None:
    node = Publisher(tmp_path, {"process": READY}, (GPU,))
    await node.adverts.look_at_engines()
    node.adverts.guard_changed("")
    assert node.published[-1].guards and node.published[-1].gpu_pauses and node.urgent == [True]
    assert "guard" not in node.membership.problems
    node.guard.pause_problem = "the driver is too old"
    node.adverts.guard_changed("no compiler")
    assert not node.published[-1].guards and not node.published[-1].gpu_pauses
    assert node.membership.problems["guard"] == "no compiler"
    bare = Publisher(tmp_path, {"process": READY})
    await bare.adverts.look_at_engines()
    bare.adverts.publish()
    assert not bare.published[-1].gpu_pauses, "it has no GPU"


async def test_advert_offers_the_room_that_disk_and_quota_leave(tmp_path: Path) -> None:
    node = Publisher(tmp_path, {"process": READY})
    await node.adverts.look_at_engines()
    for quota, room_mib in ((None, 10 * 1024), (3 * 2**30, 3 * 1024), (20 * 2**30, 10 * 1024), (2**30 - 1, 0)):
        node.store.remaining_quota = lambda quota=quota: quota
        node.adverts.publish(force=True)
        assert node.published[-1].store_free_mib == room_mib, quota


async def test_advert_says_since_when_the_node_lends_and_its_owner_when_it_ends(tmp_path: Path) -> None:
    node = Publisher(tmp_path, {"process": READY})
    await node.adverts.look_at_engines()
    node.adverts.publish()
    assert node.published[-1].up_since_unix == 100 and node.attendance.until_unix == 0
    node.attendance.since_unix = 500.0
    node.owner.opens_at = lambda: 900.0
    node.adverts.publish()
    assert node.published[-1].up_since_unix == 500 and node.attendance.until_unix == 900.0


async def test_facts_are_published_again_before_they_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []
    rests: list[float] = []

    class Enough(Exception):
        pass

    async def sleep(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 2:
            raise Enough

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    membership: Any = SimpleNamespace(publish=lambda *what: told.append(what))
    with pytest.raises(Enough):
        await publish_facts(membership, b"facts")
    assert told == [("facts", b"facts", module.FACTS_TTL_S)] * 2 and max(rests) < module.FACTS_TTL_S / 2
