"""Loading of world files: presets by name or TOML files, with changes, checked for values that types cannot exclude."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from sim.campus.document import Change, Place, Positions, strict
from sim.campus.traces import read_trace, with_digest
from sim.campus.workload import read_job_trace
from sim.campus.world import DAYS, MAX_MACHINES, Lognormal, World, WorldError

PRESETS = Path(__file__).parent / "worlds"
MAX_JOBS = 2_000_000


def presets() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def world_file(name: str) -> Path:
    """Return the path of a preset or of a world file."""
    if name in presets():
        return PRESETS / f"{name}.toml"
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        raise WorldError(f"unknown world {name!r}; choose from {', '.join(presets())}, or give a .toml file")
    return path


def find_world(name: str, changes: Sequence[str | Change] = ()) -> World:
    """Load a preset or a world file, with `changes` as in `parse_world`."""
    path = world_file(name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WorldError(f"{path}: {error.strerror or error}") from error
    return parse_world(data, str(path), path.parent, changes)


def parse_world(data: bytes, source: str, beside: Path | None = None, changes: Sequence[str | Change] = ()) -> World:
    """Decode a world file, with changes such as `jobs.per_day=200`; WorldError if it is invalid.

    A change is the dotted path of a value and TOML, or the value itself; items of lists are numbered from 0. `beside` is the
    directory in which the files of traces lie; without it they are not read.
    """
    world, positions = strict(data, source, World, WorldError, changes)
    for place, text in _problems(world):
        raise WorldError(f"{source}: line {positions.line(place)}: {text}")
    if world.first_date is not None:
        first_weekday = DAYS[world.first_date.weekday()]
        if first_weekday != world.first_weekday and (world.first_weekday != "Mon" or positions.has(("first_weekday",))):
            raise WorldError(
                f"{source}: line {positions.line(('first_weekday',))}: {world.first_date} is a {first_weekday}"
            )
        world = replace(world, first_weekday=first_weekday)
    return world if beside is None else _with_files(world, source, positions, beside)


def _with_files(world: World, source: str, positions: Positions, beside: Path) -> World:
    """Return the world with the digests of its trace files. The files are read now, so that errors appear early."""
    try:
        if world.trace is not None:
            place: Place = ("trace", "file")
            trace = replace(world.trace, file=str(beside.absolute() / world.trace.file))
            world = replace(world, trace=with_digest(trace))
            read_trace(world.trace, world.days * 86_400.0, world.first_day)
        if world.jobs.trace is not None:
            place = ("jobs", "trace", "file")
            job_trace = replace(world.jobs.trace, file=str(beside.absolute() / world.jobs.trace.file))
            world = replace(world, jobs=replace(world.jobs, trace=with_digest(job_trace)))
            read_job_trace(world.jobs.trace)
    except WorldError as error:
        raise WorldError(f"{source}: line {positions.line(place)}: {error}") from error
    return world


def _problems(world: World) -> list[tuple[Place, str]]:
    """Return mistakes that types cannot exclude: the path of each value, and a text."""
    wrong: list[tuple[Place, str]] = []
    if world.machines > MAX_MACHINES:
        wrong.append((("groups",), f"{world.machines} machines; at most {MAX_MACHINES}"))
    for number, group in enumerate(world.groups):
        if group.owners not in world.owners:
            there = ", ".join(world.owners) or "none"
            wrong.append((("groups", number, "owners"), f"unknown owners {group.owners!r} (defined: {there})"))
        if any(room.count("/") != 1 for room in group.rooms):
            wrong.append((("groups", number, "rooms"), "a room is building/room"))
    if len({group.name for group in world.groups}) < len(world.groups):
        wrong.append((("groups",), "two groups have the same name"))
    for name, owners in world.owners.items():
        if len(owners.by_hour) not in {0, 24}:
            wrong.append((("owners", name, "by_hour"), f"{len(owners.by_hour)} hours instead of 24"))
        if owners.by_hour and not sum(owners.by_hour):
            wrong.append((("owners", name, "by_hour"), "all hours are 0; write reclaims_per_day = 0 instead"))
        if owners.noticed + owners.brief > 1 + 1e-9:
            wrong.append((("owners", name, "noticed"), "noticed and brief add up to more than 1"))
        if owners.reclaims_per_day > 1000:
            wrong.append((("owners", name, "reclaims_per_day"), "more than 1000 a day"))
        for field in ("absent_h", "notice_s", "brief_s"):
            wrong += _bad_bounds(("owners", name, field), getattr(owners, field))
    rooms = {room for group in world.groups for room in group.rooms}
    for number, lesson in enumerate(world.lessons):
        unknown = [room for room in lesson.rooms if room not in rooms]
        if unknown:
            wrong.append((("lessons", number, "rooms"), f"no machine is in room {unknown[0]!r}"))
        if lesson.ends_h <= lesson.begins_h:
            wrong.append((("lessons", number, "ends_h"), "it ends before it begins"))
    for number, shock in enumerate(world.shocks):
        wrong += _bad_bounds(("shocks", number, "absent_h"), shock.absent_h)
    if world.trace is not None and (unknown := [name for name in world.trace.owners if name not in world.owners]):
        wrong.append((("trace", "owners"), f"unknown owners {unknown[0]!r}"))
    wrong += _date_problems(world)
    jobs = world.jobs
    if (jobs.hours is None) == (jobs.trace is None):
        wrong.append((("jobs",), "give run times with either hours or trace"))
    if jobs.hours is not None:
        wrong += _bad_bounds(("jobs", "hours"), jobs.hours)
    if jobs.trace is not None:
        if jobs.trace.arrivals and (jobs.per_day or jobs.trace.form == "philly"):
            why = (
                "has no submission times"
                if jobs.trace.form == "philly"
                else "has the submission times: per_day must be 0"
            )
            wrong.append((("jobs", "trace", "arrivals"), f"the file {why}"))
        if jobs.trace.max_h < jobs.trace.min_h:
            wrong.append((("jobs", "trace", "max_h"), "less than min_h"))
        largest = max(group.gpus for group in world.groups)
        if jobs.trace.form == "openb" and jobs.trace.max_gpus > largest:
            wrong.append((("jobs", "trace"), f"no machine has more than {largest} GPUs; write max_gpus = {largest}"))
    wrong += _bad_bounds(("jobs", "state_gib"), jobs.state_gib)
    if not jobs.gpus or abs(sum(share for _, share in jobs.gpus) - 1) > 1e-6:
        wrong.append((("jobs", "gpus"), "the shares do not add up to 1"))
    if jobs.changed[0] > jobs.changed[1]:
        wrong.append((("jobs", "changed"), "the first value is larger than the second"))
    if jobs.at_start + jobs.per_day * min(world.days, jobs.until_day) > MAX_JOBS:
        wrong.append((("jobs", "per_day"), f"more than {MAX_JOBS} jobs in all"))
    max_gpus = max(group.gpus for group in world.groups)
    if any(count > max_gpus for count, share in jobs.gpus if share):
        wrong.append((("jobs", "gpus"), f"no machine has so many GPUs (at most {max_gpus})"))
    max_vram_gib = max(group.vram_gib for group in world.groups)
    if max(jobs.vram_gib) > max_vram_gib:
        wrong.append((("jobs", "vram_gib"), f"no GPU has so much memory (at most {max_vram_gib:g})"))
    if world.network.night_load > world.network.noon_load:
        wrong.append((("network", "night_load"), "larger than noon_load"))
    return wrong


def _date_problems(world: World) -> list[tuple[Place, str]]:
    if world.first_date is None:
        return [
            ((name,), "needs first_date, the date of the world's first day")
            for name in ("periods", "outages")
            if getattr(world, name)
        ]
    wrong: list[tuple[Place, str]] = []
    buildings = {room.split("/")[0] for group in world.groups for room in group.rooms}
    for number, period in enumerate(world.periods):
        if period.last < period.first:
            wrong.append((("periods", number, "last"), "it ends before it begins"))
        if world.day_of(period.last) < 0 or world.day_of(period.first) >= world.days:
            wrong.append((("periods", number, "first"), "it is not within the world's days"))
        if unknown := [name for name in period.owners if name not in world.owners]:
            wrong.append((("periods", number, "owners"), f"unknown owners {unknown[0]!r}"))
    for number, outage in enumerate(world.outages):
        if outage.at.tzinfo is not None:
            wrong.append((("outages", number, "at"), "write local time, without an offset"))
        elif not 0 <= world.seconds_of(outage.at) < world.days * 86_400:
            wrong.append((("outages", number, "at"), "it is not within the world's days"))
        if unknown := [name for name in outage.buildings if name not in buildings]:
            wrong.append((("outages", number, "buildings"), f"no machine is in building {unknown[0]!r}"))
    return wrong


def _bad_bounds(place: Place, spread: Lognormal) -> list[tuple[Place, str]]:
    if spread.min <= spread.median <= spread.max:
        return []
    return [(place, "median is not between min and max")]
