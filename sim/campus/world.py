"""A world: the machines, owners, jobs and network of a study, as a TOML file says it; this is the list of all keys.

Unknown keys, wrong types and impossible numbers are errors that name the line: a typo must never silently mean "default".
"""

from collections.abc import Sequence
from datetime import date, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from sim.campus.document import Change, Place, Places, strict

PRESETS = Path(__file__).parent / "worlds"
MOST_NODES, MOST_JOBS = 20_000, 2_000_000

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Hour = Annotated[float, msgspec.Meta(ge=0, le=24)]
Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: tuple[Day, ...] = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
Kind = Literal["noticed", "sudden", "brief"]


class WorldError(ValueError):
    """A file that is no world; the text names the file, the line and what is wrong with it."""


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lognormal, cut off at both ends; `sigma` 0 is always the median."""

    median: Positive
    sigma: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    least: Amount = 0.0
    most: Positive = 1e9


class Owners(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the owners of a group of machines take them back. Rates count while a machine is lent."""

    reclaims_per_day: Amount
    absent_h: Spread  # how long a machine stays away
    spread: Annotated[float, msgspec.Meta(ge=0, le=3)] = 0.0  # sigma of a lognormal of mean 1 that machines differ by
    age_shape: Annotated[float, msgspec.Meta(gt=0.2, le=3)] = (
        1.0  # Weibull's k; below 1, who has stayed long stays longer
    )
    by_hour: tuple[Amount, ...] = ()  # 24 relative rates, Monday to Friday
    weekend: Amount = 1.0  # times that, on Saturday and Sunday
    noticed: Share = 0.6
    brief: Share = 0.15  # gone without a word, and back soon; the rest is gone without a word
    notice_s: Spread = Spread(120.0, 0.8, 30.0, 600.0)
    brief_s: Spread = Spread(480.0, 0.8, 60.0, 1800.0)
    busy: Share = 0.8  # of its GPUs' time, while the owner has it


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` machines alike, dealt out over the rooms; a room is `building/room`, and its building has one uplink."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=40)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_NODES)]
    owners: str
    gpus: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    vram_gib: Positive = 24.0
    edge_gbps: Positive = 1.0
    rooms: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("main/1",)


class Lesson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class: the machines of its rooms are taken back together when it begins, and lent again when it is over."""

    rooms: tuple[str, ...]
    days: tuple[Day, ...]
    begins_h: Hour
    ends_h: Hour
    share: Share = 1.0  # of the room's machines
    kind: Kind = "noticed"
    notice_s: Amount = 120.0


class Shock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Machines that go together, at any time: a power cut, a switch, a visitor with a whole course."""

    scope: Literal["room", "building", "campus"]
    per_week: Annotated[float, msgspec.Meta(ge=0, le=1000)]  # of each room, building, or the campus
    absent_h: Spread
    share: Share = 1.0
    kind: Kind = "sudden"
    notice_s: Amount = 120.0


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Departures from a file, or all files of a directory, in place of owners' rates: machines take the trace's nodes in turn.

    `owners`: whose machines; all if none is named. `form` `events` is this simulator's own (`traces.py`), the others are those of
    `mesh survive eval`, which are read from the first midnight of a `begins` day on. `digest` is filled in: what the files held.
    """

    file: str
    form: Literal["events", "swf-nodes", "spot-json", "fta", "last", "wtmp", "journal"] = "events"
    owners: tuple[str, ...] = ()
    utc_offset_h: Annotated[float, msgspec.Meta(ge=-14, le=14)] = 0.0  # of the file's place
    digest: str = ""


class Mix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs from a file (`mixes.py`): run times, and with `openb` GPUs too; those that do not fit between the bounds are left out.

    `arrivals`: they come when the file says, else `per_day` as they are drawn.
    """

    file: str
    form: Literal["philly", "openb", "swf"]
    least_h: Amount = 0.0
    most_h: Positive = 1e9
    most_gpus: Annotated[int, msgspec.Meta(ge=1, le=64)] = 64
    arrivals: bool = False
    digest: str = ""


class Period(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Days, both included, that are unlike others: a break, a holiday, exams, the weeks before a deadline."""

    first: date
    last: date
    says: str = ""
    reclaims: Amount = 1.0  # times the owners' rates
    owners: tuple[str, ...] = ()  # whose; all if none is named
    lessons: bool = True  # whether classes are held
    jobs: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 1.0  # times what is submitted


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Power that is off, in these buildings (or everywhere): announced if `notice_s` is more than 0."""

    at: datetime  # local time
    hours: Annotated[float, msgspec.Meta(gt=0, le=10_000)]
    buildings: tuple[str, ...] = ()
    notice_s: Amount = 0.0


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    uplink_gbps: Positive = 10.0
    core_gbps: Positive = 40.0
    server_gbps: Positive = 10.0  # of the file server that some policies keep checkpoints on
    night: Share = 0.1  # of an uplink, its own traffic
    noon: Share = 0.6


class Jobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long they run is said by `hours`, or by a `mix`."""

    per_day: Amount
    hours: Spread | None = None
    mix: Mix | None = None
    at_start: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    until_day: Amount = 1e9  # none is submitted later
    by_day: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.0  # how much more are submitted at 14:00 than at 2:00
    gpus: tuple[tuple[Annotated[int, msgspec.Meta(ge=1, le=64)], Share], ...] = ((1, 1.0),)
    vram_gib: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)] = (8.0,)
    state_gib: Spread = Spread(4.0, 1.0, 0.5, 40.0)
    changed: tuple[Share, Share] = (0.05, 0.3)  # of the state, from one checkpoint to the next
    users: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 12


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a machine needs for things. The defaults are this project's own measurements (docs/simulator.md)."""

    stall_s: Amount = 0.5  # of the training, at each checkpoint, besides the copy
    copy_gib_s: Positive = 2.0  # of its state to the host's memory
    write_gib_s: Positive = 1.0  # of the state to a disk, and back from it
    launch_s: Amount = 1.3  # from an assignment to a running guest


class World(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    days: Annotated[float, msgspec.Meta(gt=0, le=3650)]
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1)]
    owners: dict[str, Owners]
    jobs: Jobs
    says: str = ""
    warm_up: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.2  # of the days, before anything is counted
    begins: Day = "Mon"
    first_date: date | None = None  # of the first day, if there are dates; `begins` follows from it
    lessons: tuple[Lesson, ...] = ()
    shocks: tuple[Shock, ...] = ()
    periods: tuple[Period, ...] = ()
    cuts: tuple[Cut, ...] = ()
    trace: Trace | None = None
    wire: Wire = Wire()
    costs: Costs = Costs()

    @property
    def machines(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def first_day(self) -> int:
        """Of the week, Monday is 0."""
        return DAYS.index(self.begins)

    def day_of(self, when: date) -> int:
        """Which day of this world that is, from 0; before the first it is negative."""
        assert self.first_date is not None
        return when.toordinal() - self.first_date.toordinal()

    def seconds_of(self, when: datetime) -> float:
        return self.day_of(when) * 86_400.0 + when.hour * 3600.0 + when.minute * 60.0 + when.second

    @property
    def digest(self) -> str:
        """The same for the same world, whatever its file looks like and wherever the files lie that it names."""
        world = self
        if world.trace is not None:
            world = replace(world, trace=replace(world.trace, file=""))
        if world.jobs.mix is not None:
            world = replace(world, jobs=replace(world.jobs, mix=replace(world.jobs.mix, file="")))
        return blake2b(msgspec.json.encode(world, order="deterministic"), digest_size=16).hexdigest()


def presets() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def world_file(name: str) -> Path:
    """Of a preset, or the file itself."""
    if name in presets():
        return PRESETS / f"{name}.toml"
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        raise WorldError(f"there is no world {name!r}; presets: {', '.join(presets())}; or name a .toml file")
    return path


def find_world(name: str, changes: Sequence[str | Change] = ()) -> World:
    """A preset by its name, or a file; with `changes`, as `parse_world` has them."""
    path = world_file(name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WorldError(f"{path}: {error.strerror or error}") from error
    return parse_world(data, str(path), path.parent, changes)


def parse_world(data: bytes, source: str, beside: Path | None = None, changes: Sequence[str | Change] = ()) -> World:
    """The world that these bytes say; a trace's file is looked for beside them. A change is `jobs.per_day=200`: the place of a
    value, and TOML (or the value itself); places in lists are numbers from 0."""
    world, places = strict(data, source, World, WorldError, changes)
    for place, words in _impossible(world):
        raise WorldError(f"{source}: line {places.line(place)}: {words}")
    if world.first_date is not None:
        begins = DAYS[world.first_date.weekday()]
        if begins != world.begins and (world.begins != "Mon" or places.has(("begins",))):
            raise WorldError(f"{source}: line {places.line(('begins',))}: {world.first_date} is a {begins}")
        world = replace(world, begins=begins)
    return world if beside is None else _with_files(world, source, places, beside)


def _with_files(world: World, source: str, places: Places, beside: Path) -> World:
    """The same, with what its files hold: they are looked for beside it, and read once, so that mistakes are told now."""
    from sim.campus.mixes import jobs_of
    from sim.campus.traces import read_trace, sealed

    try:
        if world.trace is not None:
            place: Place = ("trace", "file")
            trace = replace(world.trace, file=str(beside.absolute() / world.trace.file))
            world = replace(world, trace=sealed(trace))
            read_trace(world.trace, world.days * 86_400.0, world.first_day)
        if world.jobs.mix is not None:
            place = ("jobs", "mix", "file")
            mix = replace(world.jobs.mix, file=str(beside.absolute() / world.jobs.mix.file))
            world = replace(world, jobs=replace(world.jobs, mix=sealed(mix)))
            jobs_of(world.jobs.mix)
    except WorldError as error:
        raise WorldError(f"{source}: line {places.line(place)}: {error}") from error
    return world


def _impossible(world: World) -> list[tuple[Place, str]]:
    """What types do not say."""
    wrong: list[tuple[Place, str]] = []
    if world.machines > MOST_NODES:
        wrong.append((("groups",), f"{world.machines} machines; at most {MOST_NODES}"))
    for number, group in enumerate(world.groups):
        if group.owners not in world.owners:
            there = ", ".join(world.owners) or "none"
            wrong.append((("groups", number, "owners"), f"there are no owners {group.owners!r} (there are: {there})"))
        if any(room.count("/") != 1 for room in group.rooms):
            wrong.append((("groups", number, "rooms"), "a room is building/room"))
    if len({group.name for group in world.groups}) < len(world.groups):
        wrong.append((("groups",), "two groups have one name"))
    for name, owners in world.owners.items():
        if len(owners.by_hour) not in {0, 24}:
            wrong.append((("owners", name, "by_hour"), f"{len(owners.by_hour)} hours instead of 24"))
        if owners.by_hour and not sum(owners.by_hour):
            wrong.append((("owners", name, "by_hour"), "all hours are 0: say reclaims_per_day = 0"))
        if owners.noticed + owners.brief > 1 + 1e-9:
            wrong.append((("owners", name, "noticed"), "noticed and brief are more than all departures"))
        if owners.reclaims_per_day > 1000:
            wrong.append((("owners", name, "reclaims_per_day"), "more than 1000 a day"))
        for field in ("absent_h", "notice_s", "brief_s"):
            wrong += _cut_wrongly(("owners", name, field), getattr(owners, field))
    rooms = {room for group in world.groups for room in group.rooms}
    for number, lesson in enumerate(world.lessons):
        strange = [room for room in lesson.rooms if room not in rooms]
        if strange:
            wrong.append((("lessons", number, "rooms"), f"no machine is in room {strange[0]!r}"))
        if lesson.ends_h <= lesson.begins_h:
            wrong.append((("lessons", number, "ends_h"), "it ends before it begins"))
    for number, shock in enumerate(world.shocks):
        wrong += _cut_wrongly(("shocks", number, "absent_h"), shock.absent_h)
    if world.trace is not None and (strange := [name for name in world.trace.owners if name not in world.owners]):
        wrong.append((("trace", "owners"), f"there are no owners {strange[0]!r}"))
    wrong += _impossible_dates(world)
    jobs = world.jobs
    if (jobs.hours is None) == (jobs.mix is None):
        wrong.append((("jobs",), "either hours or a mix says how long jobs run"))
    if jobs.hours is not None:
        wrong += _cut_wrongly(("jobs", "hours"), jobs.hours)
    if jobs.mix is not None:
        if jobs.mix.arrivals and (jobs.per_day or jobs.mix.form == "philly"):
            why = (
                "has no times of submission" if jobs.mix.form == "philly" else "says when they come: per_day must be 0"
            )
            wrong.append((("jobs", "mix", "arrivals"), f"the file {why}"))
        if jobs.mix.most_h < jobs.mix.least_h:
            wrong.append((("jobs", "mix", "most_h"), "less than least_h"))
        largest = max(group.gpus for group in world.groups)
        if jobs.mix.form == "openb" and jobs.mix.most_gpus > largest:
            wrong.append((("jobs", "mix"), f"no machine has more than {largest} GPUs: say most_gpus = {largest}"))
    wrong += _cut_wrongly(("jobs", "state_gib"), jobs.state_gib)
    if not jobs.gpus or abs(sum(share for _, share in jobs.gpus) - 1) > 1e-6:
        wrong.append((("jobs", "gpus"), "the shares do not add up to 1"))
    if jobs.changed[0] > jobs.changed[1]:
        wrong.append((("jobs", "changed"), "the first is more than the second"))
    if jobs.at_start + jobs.per_day * min(world.days, jobs.until_day) > MOST_JOBS:
        wrong.append((("jobs", "per_day"), f"more than {MOST_JOBS} jobs in all"))
    most = max(group.gpus for group in world.groups)
    if any(count > most for count, share in jobs.gpus if share):
        wrong.append((("jobs", "gpus"), f"no machine has so many GPUs (at most {most})"))
    roomiest = max(group.vram_gib for group in world.groups)
    if max(jobs.vram_gib) > roomiest:
        wrong.append((("jobs", "vram_gib"), f"no GPU has so much memory (at most {roomiest:g})"))
    if world.wire.night > world.wire.noon:
        wrong.append((("wire", "night"), "more than at noon"))
    return wrong


def _impossible_dates(world: World) -> list[tuple[Place, str]]:
    if world.first_date is None:
        return [
            ((name,), "dates need first_date, the world's first day")
            for name in ("periods", "cuts")
            if getattr(world, name)
        ]
    wrong: list[tuple[Place, str]] = []
    buildings = {room.split("/")[0] for group in world.groups for room in group.rooms}
    for number, period in enumerate(world.periods):
        if period.last < period.first:
            wrong.append((("periods", number, "last"), "it ends before it begins"))
        if world.day_of(period.last) < 0 or world.day_of(period.first) >= world.days:
            wrong.append((("periods", number, "first"), "it is not within the world's days"))
        if strange := [name for name in period.owners if name not in world.owners]:
            wrong.append((("periods", number, "owners"), f"there are no owners {strange[0]!r}"))
    for number, cut in enumerate(world.cuts):
        if cut.at.tzinfo is not None:
            wrong.append((("cuts", number, "at"), "write local time, without an offset"))
        elif not 0 <= world.seconds_of(cut.at) < world.days * 86_400:
            wrong.append((("cuts", number, "at"), "it is not within the world's days"))
        if strange := [name for name in cut.buildings if name not in buildings]:
            wrong.append((("cuts", number, "buildings"), f"no machine is in building {strange[0]!r}"))
    return wrong


def _cut_wrongly(place: Place, spread: Spread) -> list[tuple[Place, str]]:
    if spread.least <= spread.median <= spread.most:
        return []
    return [(place, "its median is not between its least and its most")]
