"""The owner's policy: when this machine is lent and how it is taken back, from `policy.toml`. Pure: text in, a policy out.

Clocks are durations (`"2m"`, `"1h30m"`, or seconds). Each sign of the owner's presence has four: `after`, how long it must last
before it affects guests; `suspend`, how long guests are then stopped before they are asked to leave; `resume`, how long it must
be gone before they resume; `idle`, before the machine takes new guests again.
"""

import re
import tomllib
from typing import Literal

import msgspec

from mesh.provider.hours import ALWAYS, Hours, HoursError, parse_hours
from mesh.util.duration import DurationError, duration_words, parse_duration

MOST_S = 30 * 86_400.0  # of any clock (own choice)
MOST_BYTES = 64 * 1024  # of the file (own choice)

# Programs that use a GPU whenever a user is logged in or a service runs: displays, MPS, DCGM (own list).
ALWAYS_THERE = (
    *("Xorg", "Xwayland", "gnome-shell", "kwin_x11", "kwin_wayland", "plasmashell"),
    *("nvidia-persistenced", "nvidia-cuda-mps-server", "nv-hostengine"),
)

Source = Literal["gpu", "keyboard", "load", "calendar"]
Watch = Literal["off", "console", "all"]


class PolicyError(ValueError):
    """The policy cannot be used; the text names the key and the reason."""


class Clocks(msgspec.Struct, frozen=True):
    """The clocks of one sign of the owner's presence, in seconds."""

    after: float
    suspend: float
    resume: float
    idle: float


class Policy(msgspec.Struct, frozen=True):
    """A valid policy.

    `gpu`: a program of the owner on a GPU takes that GPU back, except programs named in `ignore`. `keyboard`: the input that
    counts. `load`: cores that programs outside the mesh may use before the machine is taken back, and `memory_wait`: per cent of
    the time that they may wait for memory; None: not checked. `notice` and `pause`: seconds of these reclaim stages; without
    `notice`, the node's `grace_s` applies.
    """

    hours: Hours = ALWAYS
    gpu: bool = True
    ignore: tuple[str, ...] = ALWAYS_THERE
    keyboard: Watch = "off"
    load: float | None = None
    memory_wait: float | None = None
    notice: float | None = None
    pause: float = 0.0
    # A short run on the GPU (is it there? how full is it?) only stops guests (own choice).
    gpu_clocks: Clocks = Clocks(0.0, 30.0, 5.0, 60.0)
    # HTCondor's policy for desktops: continue after 5 minutes, vacate after 10, start after 15.
    keyboard_clocks: Clocks = Clocks(0.0, 600.0, 300.0, 900.0)
    load_clocks: Clocks = Clocks(30.0, 600.0, 300.0, 900.0)
    calendar_clocks: Clocks = Clocks(0.0, 0.0, 0.0, 0.0)

    def clocks(self, source: Source) -> Clocks:
        """Return the clocks of one sign of the owner's presence."""
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
    memory_wait: float = 10.0  # systemd-oomd ends programs at 60 (oomd.conf(5)); long before, one feels it (own choice)


class _Reclaim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    notice: Span | None = None
    pause: Span | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's structure. A missing section is not watched, except the GPU."""

    hours: str | list[str] = "always"
    gpu: _Gpu = _Gpu()
    keyboard: _Keyboard | None = None
    load: _Load | None = None
    calendar: _Watched = _Watched()
    reclaim: _Reclaim = _Reclaim()


def read_policy(text: str) -> Policy:
    """Parse the file. PolicyError names the key that is wrong."""
    if len(text) > MOST_BYTES:
        raise PolicyError(f"it has more than {MOST_BYTES} characters")
    try:
        parsed = msgspec.convert(tomllib.loads(text), _File)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(str(error)) from error
    except RecursionError as error:
        raise PolicyError("it is nested too deeply") from error
    except msgspec.ValidationError as error:
        raise PolicyError(_by_key(str(error))) from error
    bare = Policy()
    above = None if parsed.load is None else parsed.load.above
    if above is not None and not 0 <= above < 1e6:
        raise PolicyError(f"load.above: {above:g} is not a number of cores")
    waits = None if parsed.load is None else parsed.load.memory_wait
    if waits is not None and not 0 < waits <= 100:
        raise PolicyError(f"load.memory_wait: {waits:g} is not a percentage from above 0 to 100")
    try:
        hours = parse_hours(parsed.hours)
    except HoursError as error:
        raise PolicyError(f"hours: {error}") from error
    reclaim = parsed.reclaim
    return Policy(
        hours=hours,
        gpu=parsed.gpu.watch,
        ignore=bare.ignore if parsed.gpu.ignore is None else parsed.gpu.ignore,
        keyboard="off" if parsed.keyboard is None else parsed.keyboard.watch,
        load=above,
        memory_wait=waits,
        notice=None if reclaim.notice is None else _seconds("reclaim.notice", reclaim.notice),
        pause=bare.pause if reclaim.pause is None else _seconds("reclaim.pause", reclaim.pause),
        gpu_clocks=_clocks("gpu", parsed.gpu, bare.gpu_clocks),
        keyboard_clocks=_clocks("keyboard", parsed.keyboard, bare.keyboard_clocks),
        load_clocks=_clocks("load", parsed.load, bare.load_clocks),
        calendar_clocks=_clocks("calendar", parsed.calendar, bare.calendar_clocks),
    )


def _clocks(section: str, watched: _Watched | None, bare: Clocks) -> Clocks:
    if watched is None:
        return bare
    spans = {name: getattr(watched, name) for name in Clocks.__struct_fields__}
    clocks = {name: _seconds(f"{section}.{name}", span) for name, span in spans.items() if span is not None}
    return msgspec.structs.replace(bare, **clocks)


def _seconds(key: str, span: Span) -> float:
    try:
        seconds = parse_duration(span) if isinstance(span, str) else float(span)
    except (DurationError, OverflowError) as error:
        raise PolicyError(f"{key}: {error}") from error
    if not 0 <= seconds <= MOST_S:
        raise PolicyError(f"{key}: {span} is not a duration of 0 to {duration_words(MOST_S)}")
    return seconds


def _by_key(words: str) -> str:
    """Return msgspec's message with the key first."""
    reason, _, place = words.partition(" - at `$")
    key = place.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `(.*)`", reason)
    if unknown is not None:
        return f"{'.'.join(filter(None, [key, unknown[1]]))}: unknown key"
    return f"{key}: {reason[:1].lower()}{reason[1:]}" if key else reason


def with_hours(text: str, texts: tuple[str, ...]) -> str:
    """Return the file with new hours and the rest unchanged. PolicyError if the file or the hours are invalid."""
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
        raise PolicyError("hours: they span several lines; edit the file instead")
    return changed


def never_lends(policy: Policy) -> list[str]:
    """Return warnings about settings with which the machine is never lent or guests never resume."""
    found = []
    longest_s = policy.hours.longest * 60
    if not policy.hours.spans:
        found.append("never lends: hours is never (`mesh lend --hours always`)")
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
            found.append(f"stopped guests never resume in place: {words}")
    return found


def _watched(policy: Policy) -> list[Source]:
    watched: list[Source] = ["gpu"] if policy.gpu else []
    if policy.keyboard != "off":
        watched.append("keyboard")
    if policy.load is not None:
        watched.append("load")
    return watched
