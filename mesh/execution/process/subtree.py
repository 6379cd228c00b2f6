"""The daemon's own subtree of control groups of version 2, in which guests of the `process` engine get their groups.

systemd gives a subtree away with `Delegate=yes`: to the daemon's service, or to a scope of its own, which a daemon that somebody
started from a login asks for. A group whose children have controllers may hold no processes (cgroups(7), "no internal
processes"), so the daemon moves to a leaf before it enables controllers. Standard library only.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import subprocess
import time
from collections.abc import Set
from pathlib import Path

from mesh.execution.process.guest_cgroup import CONTROLLERS, INNER, V2_FILES, GuestGroup
from mesh.util.cgroups import groups_of, remove_groups

LEAF = "campus-mesh-daemon"
LINGER = Path("/var/lib/systemd/linger")  # a file for each user whose services outlive their logins (loginctl(1))
ASK_S, MOVED_S = 10.0, 10.0  # for systemd to answer, then to move a process; both take milliseconds (own choice)
LOOK_S = 0.01
# StartTransientUnit of org.freedesktop.systemd1.Manager (org.freedesktop.systemd1(5)).
START = (
    *("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"),
    *("StartTransientUnit", "ssa(sv)a(sa(sv))"),
)


def claim(stop_s: float) -> None:
    """Take over a subtree, if this machine gives one: its own, or that of a new scope. Call before the first guest.

    `stop_s`: the seconds that the daemon needs to stop. Without a subtree guests have fewer limits, and `remedy` says why.
    """
    own = groups_of(os.getpid()).get("")
    if own is None or not _controllers(own):
        return
    if not _is_ours(own):
        if own.suffix != ".scope" or needs_linger() or not _ask_for_scope(own, stop_s):
            return
        own = groups_of(os.getpid())[""]
    _settle(own)


def own_groups() -> dict[str, Path]:
    """Return the groups below which this process may make others, by controller ("" is version 2)."""
    found = groups_of(os.getpid())
    return {kind: own.parent if own.name == LEAF else own for kind, own in found.items()}


def make_group() -> GuestGroup | None:
    """Make the groups of a new guest; None if the daemon may make none."""
    name = f"mesh-guest-{secrets.token_hex(8)}"
    made: dict[str, Path] = {}
    for kind, own in own_groups().items():
        if kind in ("", *CONTROLLERS):
            with contextlib.suppress(OSError):
                (own / name).mkdir()
                made[kind] = own / name
    if "" in made and not _add_inner(made[""]):
        del made[""]
    if "" in made:
        made |= {kind: made[""] for kind, file in V2_FILES.items() if (made[""] / file).exists()}
    return GuestGroup(made) if made else None


def _add_inner(group: Path) -> bool:
    """Make the group for a guest's processes, the last one below this one. Return whether that worked; if not, remove both."""
    try:
        (group / "cgroup.max.descendants").write_text("1")
        (group / INNER).mkdir()
    except OSError:
        remove_groups((str(group),))
        return False
    return True


def remedy(missing: frozenset[str]) -> str:
    """Return how to get limits that the daemon's guests lack here; `missing`: the controllers."""
    own = own_groups().get("")
    if own is None or not _has_systemd():
        return "boot with control groups of version 2 and systemd, and run this node by `mesh install-service`"
    again = "`mesh down && mesh up`"
    if not _is_settled():
        if needs_linger():
            return f"`sudo loginctl enable-linger {_user()}`, then {again}; or `sudo mesh install-service`"
        return f"run this node by `mesh install-service`, or start it from a login: {again}"
    if os.getuid() != 0 and not missing & set(_controllers(own)):
        return f"{delegation({*_controllers(own), *missing})} and {again}; or `sudo mesh install-service`"
    return f"no program but the kernel decides on them: see `cat {own}/cgroup.controllers`"


def delegation(controllers: Set[str]) -> str:
    """Return how users get these controllers."""
    names = " ".join(sorted(controllers))
    return f"`sudo systemctl edit user@.service` with the lines [Service] and Delegate={names}, then log in again"


def needs_linger() -> bool:
    """Return whether a scope or service of this user ends with their last login."""
    return os.getuid() != 0 and not (LINGER / _user()).exists()


def _controllers(group: Path) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return tuple(name for name in (group / "cgroup.controllers").read_text().split() if name in CONTROLLERS)
    return ()


def _is_ours(own: Path) -> bool:
    """Return whether this process may change the group and no other is in it; the root group may hold processes and children."""
    if not os.access(own / "cgroup.subtree_control", os.W_OK) or not os.access(own, os.W_OK):
        return False
    return not (own / "cgroup.type").exists() or (own / "cgroup.procs").read_text().split() == [str(os.getpid())]


def _is_settled() -> bool:
    own = groups_of(os.getpid()).get("")
    return own is not None and (own.name == LEAF or not (own / "cgroup.type").exists())


def _settle(own: Path) -> None:
    with contextlib.suppress(OSError):
        if (own / "cgroup.type").exists():
            (own / LEAF).mkdir(exist_ok=True)
            (own / LEAF / "cgroup.procs").write_text(str(os.getpid()))
    for name in _controllers(own):
        with contextlib.suppress(OSError):  # each by itself: another program may keep one from us
            (own / "cgroup.subtree_control").write_text(f"+{name}")


def _has_systemd() -> bool:
    return Path("/run/systemd/system").is_dir()  # as sd_booted(3) looks


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container
        return str(os.getuid())


def _ask_for_scope(before: Path, stop_s: float) -> bool:
    """Ask systemd to move this process into a scope of its own; return whether it did."""
    program = shutil.which("busctl")
    if program is None or not _has_systemd():
        return False
    pid, user = str(os.getpid()), os.getuid() != 0
    properties = {
        "Description": ("s", "campus-mesh: lends this machine's GPUs, and takes them back"),
        "Delegate": ("b", "true"),
        "CollectMode": ("s", "inactive-or-failed"),
        "TimeoutStopUSec": ("t", str(int(stop_s * 1e6))),
        "PIDs": ("au", "1", pid),
    }
    order = [str(len(properties)), *(word for name, value in properties.items() for word in (name, *value)), "0"]
    bus = ("--user",) if user else ()
    env = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ} if user else None
    command = [program, *bus, f"--timeout={ASK_S:.0f}", "call", *START, f"campus-mesh-{pid}.scope", "fail", *order]
    try:
        done = subprocess.run(command, env=env, capture_output=True, check=False, timeout=2 * ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    deadline = time.monotonic() + MOVED_S
    while done.returncode == 0 and time.monotonic() < deadline:
        if groups_of(os.getpid()).get("") not in {before, None}:
            return True
        time.sleep(LOOK_S)
    return False
