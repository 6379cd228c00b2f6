"""A world: the machines, owners, jobs and network of a study, as a TOML file says it; this is the list of all keys.

Unknown keys, wrong types and impossible numbers are errors that name the line: a typo must never silently mean "default".
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sim.campus.document import Change, Place, strict

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
    """Departures from a file (`traces.py`), in place of the owners' rates; machines take the trace's nodes in turn."""

    file: str


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    uplink_gbps: Positive = 10.0
    core_gbps: Positive = 40.0
    server_gbps: Positive = 10.0  # of the file server that some policies keep checkpoints on
    night: Share = 0.1  # of an uplink, its own traffic
    noon: Share = 0.6


class Jobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    per_day: Amount
    hours: Spread
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
    lessons: tuple[Lesson, ...] = ()
    shocks: tuple[Shock, ...] = ()
    trace: Trace | None = None
    wire: Wire = Wire()
    costs: Costs = Costs()

    @property
    def machines(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def digest(self) -> str:
        """The same for the same world, whatever its file looks like."""
        return blake2b(msgspec.json.encode(self, order="deterministic"), digest_size=16).hexdigest()


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
    if world.trace is not None and beside is not None:
        trace = Trace(str(beside / world.trace.file))
        world = msgspec.structs.replace(world, trace=trace)
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
    jobs = world.jobs
    wrong += _cut_wrongly(("jobs", "hours"), jobs.hours)
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


def _cut_wrongly(place: Place, spread: Spread) -> list[tuple[Place, str]]:
    if spread.least <= spread.median <= spread.most:
        return []
    return [(place, "its median is not between its least and its most")]
