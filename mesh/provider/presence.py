"""The owner's presence and its effect on guests. Pure: observations and a clock in, levels out.

Each sign of presence (a *cause*) has its own clocks (`policy.py`); each *scope*, the machine or one of its GPUs, has the causes
that concern it, and is at one level:

    lend --seen for `after`--> suspend --`suspend` is over--> vacate
      ^                           |                              |
      |                        gone for `resume`                 |
      |                           v                              |
      +------gone for `idle`---- calm                            |
      +----------------------------------------gone for `idle`---+

Guests run at `lend` and `calm`, are stopped at `suspend`, leave at `vacate`; new guests come at `lend` only. The terms suspend
and vacate and the separate clocks are HTCondor's; a GPU as a scope is new here.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from mesh.provider.policy import Clocks, Policy, Source

MACHINE = ""  # the scope of the whole machine; a GPU's scope is its UUID
TYPING_S = 10.0  # input at shorter intervals counts as continuous; terminals update in steps of 8 s (`tty_update_time`)

Level = Literal["lend", "calm", "suspend", "vacate"]

WORDS: dict[Source, str] = {
    "gpu": "the owner's program runs on its GPU",
    "keyboard": "its keyboard or mouse is in use",
    "load": "the owner's programs need its processors or memory",
    "calendar": "its hours of lending are over",
}


class Seen(msgspec.Struct, frozen=True):
    """One observation.

    `foreign`: for each GPU, whether a program of the owner is on it. `typed_s`: seconds since keyboard or mouse input. `load`:
    cores used outside the mesh; `memory_wait`: per cent of the time in which a program there waits for memory. None, or a missing
    key: not visible now.
    """

    foreign: Mapping[str, bool | None] = {}
    typed_s: float | None = None
    load: float | None = None
    memory_wait: float | None = None
    open: bool = True  # within the hours of lending


class Stand(msgspec.Struct, frozen=True):
    """The state of a scope.

    `causes`: why it is not lent. `pressing`: one of them is active now or was just now. `next_s`: seconds until the next level
    if nothing changes; None if the level would stay.
    """

    level: Level = "lend"
    causes: tuple[Source, ...] = ()
    pressing: bool = False
    next_s: float | None = None

    @property
    def why(self) -> str:
        return " and ".join(WORDS[cause] for cause in self.causes)


class Memory(msgspec.Struct, frozen=True):
    """The remembered state of one cause, in seconds of CLOCK_BOOTTIME. `vacating`: guests of its scope were asked to leave."""

    scope: str
    source: Source
    presses: bool
    holds: bool
    vacating: bool
    pressed_at: float
    active_since: float | None
    quiet_since: float | None

    def moved(self, by_s: float) -> "Memory":
        """Return the same state with times shifted by `by_s` seconds."""
        times = {"pressed_at": self.pressed_at, "active_since": self.active_since, "quiet_since": self.quiet_since}
        return msgspec.structs.replace(self, **{name: at and at + by_s for name, at in times.items()})


class Cause:
    """One sign of the owner's presence, with hysteresis in both directions."""

    def __init__(self, source: Source, clocks: Clocks) -> None:
        self.source, self.clocks = source, clocks
        self.presses = self.holds = False
        self.pressed_at = 0.0
        self._active_since: float | None = None
        self._quiet_since: float | None = None

    def step(self, active: bool | None, now: float, quiet_s: float = 0.0) -> None:
        """Take an observation; None (not visible) changes nothing. `quiet_s`: for how long it is known to be inactive."""
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
        """Return the state to remember; None if there is none."""
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
        """Return when it stops holding if it stays inactive; None while it is active."""
        return None if self._quiet_since is None else self._quiet_since + self.clocks.idle


class Scope:
    """The machine or one GPU, with the causes that concern it."""

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
    """The presence state of the machine and its GPUs. `gpus`: their UUIDs."""

    def __init__(self, policy: Policy, gpus: tuple[str, ...]) -> None:
        self._gpus = gpus
        self._scopes = {scope: Scope() for scope in (MACHINE, *gpus)}
        self.stands = dict.fromkeys(self._scopes, Stand())
        self.policy = policy
        self.take(policy)

    def take(self, policy: Policy) -> None:
        """Apply another policy from the next step on; causes that it does not watch are dropped."""
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
        """Return the state that must outlast this process."""
        found = (
            cause.memory(name, scope.vacating)
            for name, scope in self._scopes.items()
            for cause in scope.causes.values()
        )
        return tuple(memory for memory in found if memory is not None)

    def remember(self, memories: Iterable[Memory]) -> None:
        """Restore the state of scopes and causes that are still watched."""
        for memory in memories:
            scope = self._scopes.get(memory.scope)
            if scope is not None and memory.source in scope.causes:
                scope.causes[memory.source].remember(memory)
                scope.vacating = scope.vacating or memory.vacating

    def step(self, seen: Seen, now: float) -> dict[str, Stand]:
        """Take one observation at `now` of CLOCK_BOOTTIME; return the state of each scope."""
        for uuid in self._gpus:
            self._tell(uuid, "gpu", seen.foreign.get(uuid), now)
        typed_s = seen.typed_s
        self._tell(MACHINE, "keyboard", None if typed_s is None else typed_s < TYPING_S, now, typed_s or 0.0)
        measured = ((seen.load, self.policy.load), (seen.memory_wait, self.policy.memory_wait))
        signs = [value >= above for value, above in measured if value is not None and above is not None]
        self._tell(MACHINE, "load", any(signs) if signs else None, now)
        self._tell(MACHINE, "calendar", not seen.open, now)
        return self._look(now)

    def step_gpus(self, foreign: Mapping[str, bool | None], now: float) -> dict[str, Stand]:
        """Take an observation of the GPUs alone; return the state of each scope."""
        for uuid, there in foreign.items():
            self._tell(uuid, "gpu", there, now)
        return self._look(now)

    def stand(self, gpus: tuple[str, ...]) -> Stand:
        """Return the state for a guest on these GPUs: the worst of its scopes."""
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
