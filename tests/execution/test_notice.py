"""Notices: reacting guests get one, others are killed and do nothing after the last check."""

import math
from typing import cast

from mesh.execution.engine import Guest
from mesh.execution.notice import LOOKS, give_notice


class FakeGuest:
    """A guest that installs its handler after some looks while it may run, and stops some looks after the order."""

    def __init__(self, heeds_after: int, stops_after: int = 2) -> None:
        self.life = 0
        self.told: list[str] = []
        self._heeds_after, self._stops_after = heeds_after, stops_after
        self._until = math.inf

    async def terminate(self) -> bool:
        self._live()
        if self.life > self._heeds_after:
            self.told.append("TERM")
        return self.life > self._heeds_after

    async def stands_still(self) -> bool:
        self._live()
        return self._still

    def allow_until(self, boot_s: float) -> None:
        self._until = boot_s
        self.told.append("run" if boot_s else "stop")

    @property
    def _still(self) -> bool:
        return self._until == 0.0 and self._stops_after <= 0

    def _live(self) -> None:
        self._stops_after -= self._until == 0.0
        self.life += not self._still


async def notice(guest: FakeGuest, watches: bool = False) -> bool:
    return await give_notice(cast(Guest, guest), 7.0, lambda: watches)


async def test_reacting_guest_gets_notice_without_stop() -> None:
    guest = FakeGuest(heeds_after=0)
    assert await notice(guest) and guest.told == ["TERM"]
    watching = FakeGuest(heeds_after=99)
    assert await notice(watching, watches=True) and watching.told == []


async def test_late_handler_gets_notice_while_stopped() -> None:
    guest = FakeGuest(heeds_after=1)
    assert await notice(guest) and guest.told == ["stop", "TERM", "run"]


async def test_unresponsive_guest_stays_stopped() -> None:
    guest = FakeGuest(heeds_after=99)
    assert not await notice(guest) and guest.told == ["stop"]
    before = guest.life
    await guest.stands_still()
    assert guest.life == before, "the stopped guest does nothing"


async def test_unstoppable_guest_is_not_awaited_forever() -> None:
    guest = FakeGuest(heeds_after=10 * LOOKS, stops_after=10 * LOOKS)
    assert not await notice(guest)
