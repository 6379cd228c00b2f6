"""Whether this machine's owner is there, and what guests feel of it. Pure: what was seen and a clock in, how things stand out.

Each thing that says so (a *cause*) has its own clocks (`policy.py`); each *scope*, the machine or one of its GPUs, has the causes
that concern it, and stands at one level:

    lend --seen for `after`--> suspend --`suspend` is over--> vacate
      ^                           |                              |
      |                        gone for `resume`                 |
      |                           v                              |
      +------gone for `idle`---- calm                            |
      +----------------------------------------gone for `idle`---+

Guests run at `lend` and `calm`, stand still at `suspend`, leave at `vacate`; new ones are taken at `lend` only. The vocabulary
(suspend, vacate) and the separate clocks are HTCondor's; a GPU as a scope is ours.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from mesh.provider.policy import Clocks, Policy, Source

MACHINE = ""  # the scope of what concerns all of it; a GPU's is its UUID
TYPING_S = 10.0  # input within this time is one and the same; terminals tell of it in steps of 8 s (`tty_update_time`)

Level = Literal["lend", "calm", "suspend", "vacate"]

WORDS: dict[Source, str] = {
    "gpu": "a program of its owner's runs on its GPU",
    "keyboard": "somebody is at its keyboard",
    "load": "its owner's programs need its processors",
    "calendar": "its hours of lending are over",
}


class Seen(msgspec.Struct, frozen=True):
    """One look. `foreign`: of each GPU, whether a program of the owner's is on it. `typed_s`: how long ago somebody typed or
    moved the mouse. `load`: cores that others than guests use. What cannot be seen now is None, or not there."""

    foreign: Mapping[str, bool | None] = {}
    typed_s: float | None = None
    load: float | None = None
    open: bool = True  # by the calendar


class Stand(msgspec.Struct, frozen=True):
    """How a scope stands. `causes`: why it is not lent. `pressing`: one of them is there now, or was just now. `next_s`: seconds
    until the next level if all stays as it is; None if it would stay too."""

    level: Level = "lend"
    causes: tuple[Source, ...] = ()
    pressing: bool = False
    next_s: float | None = None

    @property
    def why(self) -> str:
        return " and ".join(WORDS[cause] for cause in self.causes)


class Memory(msgspec.Struct, frozen=True):
    """What one cause knows of the past that a look does not show, in seconds of CLOCK_BOOTTIME. `vacating`: its scope was left
    already."""

    scope: str
    source: Source
    presses: bool
    holds: bool
    vacating: bool
    pressed_at: float
    active_since: float | None
    quiet_since: float | None

    def moved(self, by_s: float) -> "Memory":
        """The same on a clock that shows so much more."""
        times = {"pressed_at": self.pressed_at, "active_since": self.active_since, "quiet_since": self.quiet_since}
        return msgspec.structs.replace(self, **{name: at and at + by_s for name, at in times.items()})


class Cause:
    """One thing that says that the owner is there: with hysteresis, from both sides."""

    def __init__(self, source: Source, clocks: Clocks) -> None:
        self.source, self.clocks = source, clocks
        self.presses = self.holds = False
        self.pressed_at = 0.0
        self._active_since: float | None = None
        self._quiet_since: float | None = None

    def step(self, active: bool | None, now: float, quiet_s: float = 0.0) -> None:
        """`quiet_s`: for how long it is known to have been quiet. Of what cannot be seen nothing changes."""
        if active:
            self._quiet_since = None
            self._active_since = now if self._active_since is None else self._active_since
            if not self.presses and now - self._active_since >= self.clocks.after:
                self.presses = self.holds = True
                self.pressed_at = now
        elif active is not None:
            self._active_since = None
            since = now - quiet_s
            self._quiet_since = since if self._quiet_since is None else min(since, self._quiet_since)
            self.presses = self.presses and now - self._quiet_since < min(self.clocks.resume, self.clocks.idle)
            self.holds = self.holds and now - self._quiet_since < self.clocks.idle

    def memory(self, scope: str, vacating: bool) -> Memory | None:
        """None where there is nothing to remember."""
        if not self.holds and self._active_since is None:
            return None
        times = (self.pressed_at, self._active_since, self._quiet_since)
        return Memory(scope, self.source, self.presses, self.holds, vacating, *times)

    def remember(self, memory: Memory) -> None:
        self.presses, self.holds, self.pressed_at = memory.presses, memory.holds, memory.pressed_at
        self._active_since, self._quiet_since = memory.active_since, memory.quiet_since

    @property
    def vacates_at(self) -> float:
        return self.pressed_at + self.clocks.suspend if self.presses else math.inf

    @property
    def lends_at(self) -> float | None:
        """If it stays quiet; None while it is not."""
        return None if self._quiet_since is None else self._quiet_since + self.clocks.idle


class Scope:
    def __init__(self) -> None:
        self.causes: dict[Source, Cause] = {}
        self.vacating = False

    def step(self, now: float) -> Stand:
        pressing = [cause for cause in self.causes.values() if cause.presses]
        holding = [cause for cause in self.causes.values() if cause.holds]
        vacates_at = min((cause.vacates_at for cause in pressing), default=math.inf)
        self.vacating = bool(holding) and (self.vacating or now >= vacates_at)
        if not holding:
            return Stand()
        names = tuple(cause.source for cause in pressing or holding)
        if not self.vacating and pressing:
            return Stand("suspend", names, True, vacates_at - now)
        ends = [cause.lends_at for cause in holding]
        known = [end for end in ends if end is not None]
        left_s = max(0.0, max(known) - now) if len(known) == len(ends) else None
        return Stand("vacate" if self.vacating else "calm", names, bool(pressing), left_s)


class Presence:
    """`gpus`: their UUIDs."""

    def __init__(self, policy: Policy, gpus: tuple[str, ...]) -> None:
        self._gpus = gpus
        self._scopes = {scope: Scope() for scope in (MACHINE, *gpus)}
        self.stands = dict.fromkeys(self._scopes, Stand())
        self.policy = policy
        self.take(policy)

    def take(self, policy: Policy) -> None:
        """Another policy, from the next step on: what is not watched any more holds nothing back."""
        self.policy = policy
        watched: dict[Source, tuple[str, ...]] = {
            "gpu": self._gpus if policy.gpu else (),
            "keyboard": (MACHINE,) if policy.keyboard != "off" else (),
            "load": (MACHINE,) if policy.load is not None else (),
            "calendar": (MACHINE,),
        }
        for source, scopes in watched.items():
            for name, scope in self._scopes.items():
                if name not in scopes:
                    scope.causes.pop(source, None)
                elif source in scope.causes:
                    scope.causes[source].clocks = policy.clocks(source)
                else:
                    scope.causes[source] = Cause(source, policy.clocks(source))

    def memories(self) -> tuple[Memory, ...]:
        """What is to outlast this process."""
        found = (
            cause.memory(name, scope.vacating)
            for name, scope in self._scopes.items()
            for cause in scope.causes.values()
        )
        return tuple(memory for memory in found if memory is not None)

    def remember(self, memories: Iterable[Memory]) -> None:
        """Of scopes and causes that are watched still."""
        for memory in memories:
            scope = self._scopes.get(memory.scope)
            if scope is not None and memory.source in scope.causes:
                scope.causes[memory.source].remember(memory)
                scope.vacating = scope.vacating or memory.vacating

    def step(self, seen: Seen, now: float) -> dict[str, Stand]:
        """One look, at `now` of CLOCK_BOOTTIME: how each scope stands."""
        for uuid in self._gpus:
            self._tell(uuid, "gpu", seen.foreign.get(uuid), now)
        typed_s = seen.typed_s
        self._tell(MACHINE, "keyboard", None if typed_s is None else typed_s < TYPING_S, now, typed_s or 0.0)
        above = self.policy.load
        self._tell(MACHINE, "load", None if seen.load is None or above is None else seen.load >= above, now)
        self._tell(MACHINE, "calendar", not seen.open, now)
        return self._look(now)

    def step_gpus(self, foreign: Mapping[str, bool | None], now: float) -> dict[str, Stand]:
        """The same of the GPUs alone, which are looked at by themselves."""
        for uuid, there in foreign.items():
            self._tell(uuid, "gpu", there, now)
        return self._look(now)

    def stand(self, gpus: tuple[str, ...]) -> Stand:
        """Of a guest on these GPUs: as the worst of the scopes it is in."""
        mine = [self.stands[MACHINE], *(self.stands[uuid] for uuid in gpus if uuid in self.stands)]
        worst = max(mine, key=lambda stand: ("lend", "calm", "suspend", "vacate").index(stand.level))
        causes = [cause for stand in mine if stand.level == worst.level for cause in stand.causes]
        same = msgspec.structs.replace(worst, causes=tuple(dict.fromkeys(causes)))
        return msgspec.structs.replace(same, pressing=any(stand.pressing for stand in mine))

    def _tell(self, scope: str, source: Source, active: bool | None, now: float, quiet_s: float = 0.0) -> None:
        cause = self._scopes[scope].causes.get(source) if scope in self._scopes else None
        if cause is not None:
            cause.step(active, now, quiet_s)

    def _look(self, now: float) -> dict[str, Stand]:
        self.stands = {name: scope.step(now) for name, scope in self._scopes.items()}
        return self.stands
