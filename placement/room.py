"""Machines that leave together: those of one room, which is a zone."""

from placement.factors import ROOM_HALF_LIFE_S, SHARE_HALF_LIFE_S, WEEK, Factor, Fading, share_level

ROOM_PRIOR = 30.0  # departures that the prior counts for; chosen as the others (docs/survival.md)
WEEK_PRIOR = 5.0  # likewise, of each hour of its week: less costs more where rooms leave at random hours
TOGETHER_S = 300.0  # departures of one room within this are one; ours
TOGETHER_PRIOR = (0.2, 4.0)  # a fifth, worth four departures; ours


class Room:
    """Machines that leave together: a zone. Its departures of late against what was expected, how much of it is lent, and its
    timetable: departures by the hour of the week, from the epoch's first (a Thursday's)."""

    __slots__ = (
        "at",
        "departures",
        "last_departure",
        "level",
        "regime",
        "share",
        "together",
        "usual",
        "week",
    )

    def __init__(self, now: float) -> None:
        self.regime = Fading(ROOM_PRIOR, ROOM_HALF_LIFE_S, now)
        self.at, self.share, self.usual = now, 1.0, 0.0
        self.level = share_level(1.0, 1.0)
        self.last_departure = float("-inf")
        self.departures = self.together = 0.0
        self.week = Factor(len(WEEK), WEEK_PRIOR)

    def see(self, lent: int, members: int, now: float) -> None:
        """So many of its machines are lent."""
        share = lent / members if members else 0.0
        if self.usual == 0.0:
            self.usual = share
        elif now > self.at:
            kept = 0.5 ** ((now - self.at) / SHARE_HALF_LIFE_S)
            self.usual = self.usual * kept + self.share * (1 - kept)
        self.at, self.share = max(now, self.at), share
        self.level = share_level(share, self.usual)

    def depart(self, now: float) -> None:
        self.departures += 1
        self.together += now - self.last_departure <= TOGETHER_S
        self.last_departure = now

    @property
    def common(self) -> float:
        """The part of its departures that came with another one's."""
        part, worth = TOGETHER_PRIOR
        return (self.together + part * worth) / (self.departures + worth)
