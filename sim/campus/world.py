"""Worlds: the machines, owners, jobs and network of a study. The structs list all keys of a world's TOML file."""

from datetime import date, datetime
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

MAX_MACHINES = 20_000

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Hour = Annotated[float, msgspec.Meta(ge=0, le=24)]
Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: tuple[Day, ...] = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
Kind = Literal["noticed", "sudden", "brief"]


class WorldError(ValueError):
    """An invalid world file; the text names the file, the line and the mistake."""


class Lognormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lognormal distribution truncated to `min`..`max`; with `sigma` 0 it is always the median."""

    median: Positive
    sigma: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    min: Amount = 0.0
    max: Positive = 1e9


class Owners(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reclaims of a group of owners. Rates apply while a machine is lent."""

    reclaims_per_day: Amount
    absent_h: Lognormal  # length of an absence
    spread: Annotated[float, msgspec.Meta(ge=0, le=3)] = 0.0  # sigma of a lognormal factor of mean 1 for each machine
    age_shape: Annotated[float, msgspec.Meta(gt=0.2, le=3)] = (
        1.0  # Weibull's k; below 1, long stays tend to last longer
    )
    by_hour: tuple[Amount, ...] = ()  # 24 relative rates, Monday to Friday
    weekend: Amount = 1.0  # factor of the rates on Saturday and Sunday
    noticed: Share = 0.6  # share of departures with a notice
    brief: Share = 0.15  # share of departures without notice and back after `brief_s`; the rest is sudden
    notice_s: Lognormal = Lognormal(120.0, 0.8, 30.0, 600.0)
    brief_s: Lognormal = Lognormal(480.0, 0.8, 60.0, 1800.0)
    busy: Share = 0.8  # share of GPU time that owners use during an absence


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal machines, distributed over rooms. A room is `building/room`; a building has one uplink."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=40)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_MACHINES)]
    owners: str
    gpus: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    vram_gib: Positive = 24.0
    edge_gbps: Positive = 1.0
    rooms: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("main/1",)


class Lesson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class in the timetable: it takes the machines of its rooms together and returns them at its end."""

    rooms: tuple[str, ...]
    days: tuple[Day, ...]
    begins_h: Hour
    ends_h: Hour
    share: Share = 1.0  # of the machines of the room
    kind: Kind = "noticed"
    notice_s: Amount = 120.0


class Shock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A common cause that takes machines together at any time: a power cut, a failed switch, a visiting course."""

    scope: Literal["room", "building", "campus"]
    per_week: Annotated[float, msgspec.Meta(ge=0, le=1000)]  # for each room or building, or for the campus
    absent_h: Lognormal
    share: Share = 1.0
    kind: Kind = "sudden"
    notice_s: Amount = 120.0


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Departures from a file, or from all files of a directory. Machines take the nodes of the trace in turn.

    A trace replaces the rates of the named owners, or of all. The form `events` is that of `traces.py`; the others are those of
    `mesh debug survive eval`, read from the first midnight of a `first_weekday`. Loading fills in `digest`.
    """

    file: str
    form: Literal["events", "swf-nodes", "spot-json", "fta", "last", "wtmp", "journal"] = "events"
    owners: tuple[str, ...] = ()
    utc_offset_h: Annotated[float, msgspec.Meta(ge=-14, le=14)] = 0.0  # of the traced site
    digest: str = ""


class JobTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs from a file (`workload.py`): run times, and with `openb` also GPUs. Jobs outside the bounds are left out.

    With `arrivals`, jobs arrive when the file says, else at the rate `per_day`.
    """

    file: str
    form: Literal["philly", "openb", "swf"]
    min_h: Amount = 0.0
    max_h: Positive = 1e9
    max_gpus: Annotated[int, msgspec.Meta(ge=1, le=64)] = 64
    arrivals: bool = False
    digest: str = ""


class Period(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Special days, `first` to `last` inclusive: a break, a holiday, exams, the weeks before a deadline."""

    first: date
    last: date
    description: str = ""
    reclaim_factor: Amount = 1.0  # of the owners' rates
    owners: tuple[str, ...] = ()  # to which `reclaim_factor` applies; empty: all
    lessons: bool = True  # False: no classes
    job_factor: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 1.0  # of the rate of submissions


class Outage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A power outage in these buildings, or everywhere; announced if `notice_s` is more than 0."""

    at: datetime  # local time
    hours: Annotated[float, msgspec.Meta(gt=0, le=10_000)]
    buildings: tuple[str, ...] = ()
    notice_s: Amount = 0.0


class NetworkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Link speeds, and the other traffic on uplinks as a share of their capacity."""

    uplink_gbps: Positive = 10.0
    core_gbps: Positive = 40.0
    server_gbps: Positive = 10.0  # of the file server on which some policies store checkpoints
    night_load: Share = 0.1
    noon_load: Share = 0.6


class Jobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The submitted jobs. Either `hours` or `trace` gives their run times."""

    per_day: Amount
    hours: Lognormal | None = None
    trace: JobTrace | None = None
    at_start: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    until_day: Amount = 1e9  # end of submissions
    day_night_ratio: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.0  # submissions at 14:00 over those at 2:00
    gpus: tuple[tuple[Annotated[int, msgspec.Meta(ge=1, le=64)], Share], ...] = ((1, 1.0),)
    vram_gib: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)] = (8.0,)
    state_gib: Lognormal = Lognormal(4.0, 1.0, 0.5, 40.0)
    changed: tuple[Share, Share] = (0.05, 0.3)  # range of the share of state that changes between checkpoints
    users: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 12


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times and speeds of checkpoints and starts. The defaults are this project's own measurements."""

    stall_s: Amount = 0.5  # pause of the training at each checkpoint, without the copy
    copy_gib_s: Positive = 2.0  # copy of the state to host memory
    write_gib_s: Positive = 1.0  # write of the state to disk, and read from it
    launch_s: Amount = 1.3  # from assignment to running guest


class World(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole campus over some days."""

    name: str
    days: Annotated[float, msgspec.Meta(gt=0, le=3650)]
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1)]
    owners: dict[str, Owners]
    jobs: Jobs
    description: str = ""
    warm_up: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.2  # share of the days that the metrics leave out
    first_weekday: Day = "Mon"
    first_date: date | None = None  # needed for periods and outages; determines `first_weekday`
    lessons: tuple[Lesson, ...] = ()
    shocks: tuple[Shock, ...] = ()
    periods: tuple[Period, ...] = ()
    outages: tuple[Outage, ...] = ()
    trace: Trace | None = None
    network: NetworkSpec = NetworkSpec()
    costs: Costs = Costs()

    @property
    def machines(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def first_day(self) -> int:
        """Return the first weekday as a number; Monday is 0."""
        return DAYS.index(self.first_weekday)

    def day_of(self, when: date) -> int:
        """Return the number of a day, from 0; days before the first are negative."""
        assert self.first_date is not None
        return when.toordinal() - self.first_date.toordinal()

    def seconds_of(self, when: datetime) -> float:
        return self.day_of(when) * 86_400.0 + when.hour * 3600.0 + when.minute * 60.0 + when.second

    @property
    def digest(self) -> str:
        """Return a hash of the world's values and of its files' content. Paths and the layout of the file do not count."""
        world = self
        if world.trace is not None:
            world = replace(world, trace=replace(world.trace, file=""))
        if world.jobs.trace is not None:
            world = replace(world, jobs=replace(world.jobs, trace=replace(world.jobs.trace, file="")))
        return blake2b(msgspec.json.encode(world, order="deterministic"), digest_size=16).hexdigest()
