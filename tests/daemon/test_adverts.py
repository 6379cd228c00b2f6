"""The advert of a node that starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mesh.daemon.adverts import AdvertPublisher
from mesh.execution.engine import Availability
from mesh.gpus.inventory import Inventory, Lending
from placement.advert import HORIZONS_S, decode_advert
from placement.filters import DataOffer, ImageOffer


async def test_node_publishes_no_advert_before_it_has_looked_at_its_engines(tmp_path: Path) -> None:
    """Others would take it that it has none, and refuse jobs that only it could run."""
    published: list[Any] = []

    async def ready() -> Availability:
        return Availability(True, "")

    async def look(engine: str) -> None:
        adverts.publish(force=True)  # what the library finds is told at once

    adverts = AdvertPublisher(
        SimpleNamespace(publish=lambda section, body, ttl_s, urgent: published.append(decode_advert(b"n" * 32, body))),  # type: ignore[arg-type]
        Inventory(b"n" * 32, "n", "ada", b"a" * 32, "", (), 1, ("*",), (), Lending(lending=True), 0),
        {"process": SimpleNamespace(availability=ready)},  # type: ignore[dict-item]
        SimpleNamespace(pause_problem=""),  # type: ignore[arg-type]
        SimpleNamespace(offer=ImageOffer, look=look),  # type: ignore[arg-type]
        SimpleNamespace(offer=DataOffer),  # type: ignore[arg-type]
        SimpleNamespace(remaining_quota=lambda: None),  # type: ignore[arg-type]
        SimpleNamespace(tick=lambda now, lends: (64,) * len(HORIZONS_S), since_unix=0, until_unix=0),  # type: ignore[arg-type]
        SimpleNamespace(opens_at=lambda: None),  # type: ignore[arg-type]
        tmp_path,
        0.0,
    )
    adverts.publish()
    adverts.guard_changed("")
    await adverts.look_at_engines()
    assert not published
    adverts.publish()
    assert [advert.engines for advert in published] == [("process",)]
