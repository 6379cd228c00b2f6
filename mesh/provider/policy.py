"""When this machine is lent, and how it is taken back: the owner's policy, as `policy.toml` says it. Pure: text in, a policy out.

Clocks are durations (`"2m"`, `"1h30m"`, or seconds). Of each thing that says that the owner is there: `after`, for how long it
has to be seen before guests feel it; `suspend`, how long they stand still then before they are asked to leave; `resume`, for how
long it has to be gone before they go on; `idle`, before the machine is lent to new ones again.
"""

import re
import tomllib
from typing import Literal

import msgspec

from mesh.duration import DurationError, duration_words, parse_duration
from mesh.provider.hours import ALWAYS, Hours, HoursError, parse_hours

MOST_S = 30 * 86_400.0  # of any clock; ours
MOST_BYTES = 64 * 1024  # of the file; ours

# On a GPU whenever somebody is logged in, or a service runs: a display's programs, MPS, DCGM; ours.
ALWAYS_THERE = (
    *("Xorg", "Xwayland", "gnome-shell", "kwin_x11", "kwin_wayland", "plasmashell"),
    *("nvidia-persistenced", "nvidia-cuda-mps-server", "nv-hostengine"),
)

Source = Literal["gpu", "keyboard", "load", "calendar"]
Watch = Literal["off", "console", "all"]


class PolicyError(ValueError):
    """The policy cannot be used; the text names the key and the reason."""


class Clocks(msgspec.Struct, frozen=True):
    """Of one thing that says that the owner is there. Seconds."""

    after: float
    suspend: float
    resume: float
    idle: float


class Policy(msgspec.Struct, frozen=True):
    """`gpu`: whether a program of the owner's on a GPU takes that one back, `ignore`: but for programs of these names.
    `keyboard`: which keys count. `load`: cores that others than guests may use, None if that is not looked at. `notice` and
    `pause`: the ladder's rungs in seconds; without a notice of its own the node's `grace_s`."""

    hours: Hours = ALWAYS
    gpu: bool = True
    ignore: tuple[str, ...] = ALWAYS_THERE
    keyboard: Watch = "off"
    load: float | None = None
    notice: float | None = None
    pause: float = 0.0
    # A short run on the GPU (is it there? how full is it?) only freezes guests; ours.
    gpu_clocks: Clocks = Clocks(0.0, 30.0, 5.0, 60.0)
    # HTCondor's policy for desktops: continue after 5 minutes, vacate after 10, start after 15.
    keyboard_clocks: Clocks = Clocks(0.0, 600.0, 300.0, 900.0)
    load_clocks: Clocks = Clocks(30.0, 600.0, 300.0, 900.0)
    calendar_clocks: Clocks = Clocks(0.0, 0.0, 0.0, 0.0)

    def clocks(self, source: Source) -> Clocks:
        """Of one of the things that say that the owner is there."""
        found: Clocks = getattr(self, f"{source}_clocks")
        return found


Span = str | float | int


class _Watched(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    after: Span | None = None
    suspend: Span | None = None
    resume: Span | None = None
    idle: Span | None = None


class _Gpu(_Watched, frozen=True, forbid_unknown_fields=True):
    watch: bool = True
    ignore: tuple[str, ...] | None = None


class _Keyboard(_Watched, frozen=True, forbid_unknown_fields=True):
    watch: Watch = "all"


class _Load(_Watched, frozen=True, forbid_unknown_fields=True):
    above: float = 1.0


class _Ladder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    notice: Span | None = None
    pause: Span | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section that is not there is not watched, but for the GPU."""

    hours: str | list[str] = "always"
    gpu: _Gpu = _Gpu()
    keyboard: _Keyboard | None = None
    load: _Load | None = None
    calendar: _Watched = _Watched()
    ladder: _Ladder = _Ladder()


def read_policy(text: str) -> Policy:
    """What the file says. PolicyError names the key that is wrong."""
    if len(text) > MOST_BYTES:
        raise PolicyError(f"it has more than {MOST_BYTES} characters")
    try:
        told = msgspec.convert(tomllib.loads(text), _File)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(str(error)) from error
    except RecursionError as error:
        raise PolicyError("it is nested too deeply") from error
    except msgspec.ValidationError as error:
        raise PolicyError(_by_key(str(error))) from error
    bare = Policy()
    above = None if told.load is None else told.load.above
    if above is not None and not 0 <= above < 1e6:
        raise PolicyError(f"load.above: {above:g} is no number of cores")
    try:
        hours = parse_hours(told.hours)
    except HoursError as error:
        raise PolicyError(f"hours: {error}") from error
    ladder = told.ladder
    return Policy(
        hours=hours,
        gpu=told.gpu.watch,
        ignore=bare.ignore if told.gpu.ignore is None else told.gpu.ignore,
        keyboard="off" if told.keyboard is None else told.keyboard.watch,
        load=above,
        notice=None if ladder.notice is None else _seconds("ladder.notice", ladder.notice),
        pause=bare.pause if ladder.pause is None else _seconds("ladder.pause", ladder.pause),
        gpu_clocks=_clocks("gpu", told.gpu, bare.gpu_clocks),
        keyboard_clocks=_clocks("keyboard", told.keyboard, bare.keyboard_clocks),
        load_clocks=_clocks("load", told.load, bare.load_clocks),
        calendar_clocks=_clocks("calendar", told.calendar, bare.calendar_clocks),
    )


def _clocks(section: str, told: _Watched | None, bare: Clocks) -> Clocks:
    if told is None:
        return bare
    spans = {name: getattr(told, name) for name in Clocks.__struct_fields__}
    said = {name: _seconds(f"{section}.{name}", span) for name, span in spans.items() if span is not None}
    return msgspec.structs.replace(bare, **said)


def _seconds(key: str, span: Span) -> float:
    try:
        seconds = parse_duration(span) if isinstance(span, str) else float(span)
    except (DurationError, OverflowError) as error:
        raise PolicyError(f"{key}: {error}") from error
    if not 0 <= seconds <= MOST_S:
        raise PolicyError(f"{key}: {span} is not a duration of 0 to {duration_words(MOST_S)}")
    return seconds


def _by_key(words: str) -> str:
    """msgspec's words, the key first."""
    reason, _, place = words.partition(" - at `$")
    key = place.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `(.*)`", reason)
    if unknown is not None:
        return f"{'.'.join(filter(None, [key, unknown[1]]))}: there is no such key"
    return f"{key}: {reason[:1].lower()}{reason[1:]}" if key else reason


def with_hours(text: str, texts: tuple[str, ...]) -> str:
    """The file with other hours, all else as it stands. PolicyError if it, or the hours, cannot be understood."""
    before = read_policy(text)
    try:
        hours = parse_hours(texts)
    except HoursError as error:
        raise PolicyError(f"hours: {error}") from error
    lines = text.splitlines(keepends=True)
    top = next((n for n, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    head = [line for line in lines[:top] if re.match(r"\s*(hours|\"hours\"|'hours')\s*=", line) is None]
    line = [] if hours.always else [f"hours = {msgspec.json.encode(str(hours)).decode()}\n"]
    changed = "".join([*line, *head, *lines[top:]])
    try:
        after = read_policy(changed)
    except PolicyError:
        after = None
    if after != msgspec.structs.replace(before, hours=hours):
        raise PolicyError("hours: written over several lines; change them in the file itself")
    return changed


def never_lends(policy: Policy) -> list[str]:
    """What in it means that the machine is never lent, or that a rung is never reached; in words, with the keys."""
    found = []
    longest_s = policy.hours.longest * 60
    if not policy.hours.spans:
        found.append("never lends: hours say never (`mesh lend --hours always`)")
    elif not policy.hours.always and policy.calendar_clocks.idle >= longest_s:
        idle = duration_words(policy.calendar_clocks.idle)
        found.append(
            f"never lends: calendar.idle is {idle}, and hours are never longer than {duration_words(longest_s)}"
        )
    if policy.load == 0:
        found.append("never lends: load.above is 0, and there is always some load")
    for source in _watched(policy):
        clocks = policy.clocks(source)
        if clocks.idle >= 7 * 86_400:
            found.append(f"hardly ever lends: {source}.idle is {duration_words(clocks.idle)}")
        if 0 < clocks.suspend <= min(clocks.resume, clocks.idle):
            suspend, resume = duration_words(clocks.suspend), duration_words(clocks.resume)
            words = f"{source}.suspend ({suspend}) is not longer than {source}.resume ({resume})"
            found.append(f"guests never go on where they stand: {words}")
    return found


def _watched(policy: Policy) -> list[Source]:
    watched: list[Source] = ["gpu"] if policy.gpu else []
    if policy.keyboard != "off":
        watched.append("keyboard")
    if policy.load is not None:
        watched.append("load")
    return watched
