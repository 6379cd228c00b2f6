"""The daemon as a service of systemd: its unit, with the privileges it needs and no others, and what it tells the manager.

Directives are those of systemd.exec(5), systemd.service(5) and systemd.resource-control(5), of version 247 on.
"""

import os
import resource
import socket
from contextlib import suppress
from typing import Literal

import msgspec

UNIT = "campus-mesh.service"
EDGE_PARENT = "campus-mesh"  # below /run: `Layout.edge`
SYSTEM_DIRECTORY = "/etc/systemd/system"
LEAVING_S = 60.0  # besides the grace: the last upload (`JobService.vacate`: 30 s), handing over, leaving (own choice)
RESTART_S = 5.0  # as kubelet's unit has it (10) and docker's (2), in between (own choice)

Extra = Literal["edge", "kill", "docker"]
EXTRAS: dict[Extra, str] = {
    "edge": "CAP_NET_ADMIN and CAP_BPF: to cut guests off the network at once and to keep migration traffic to its rate",
    "kill": "CAP_KILL: to end the processes of containers itself, when the container engine hangs",
    "docker": "the group docker: to run containers. access to that engine is root access to this machine",
}
CAPABILITIES: dict[Extra, tuple[str, ...]] = {"edge": ("CAP_NET_ADMIN", "CAP_BPF"), "kill": ("CAP_KILL",), "docker": ()}

MAX_FILES = 65_536  # open files of the daemon: every member's connections, the store and the guests


class Service(msgspec.Struct, frozen=True):
    """`user`: whose service it is, None in that user's own manager; `extras`: what it may beyond that user's rights;
    `edge`: where its network edge has its switch; `config`: the directory of its configuration, if not `state`."""

    python: str
    state: str
    grace_s: float
    user: str | None = None
    extras: tuple[Extra, ...] = ()
    edge: str = ""
    config: str = ""


def unit(service: Service) -> str:
    """The unit file.

    /proc and /sys are left as they are: with parts of them covered (ProtectKernelTunables=, ProtectProc=) the kernel refuses
    guests a /proc of their own, and with it their own PID namespace.
    """
    config = f" --config {_word(service.config)}" if service.config else ""
    lines = [
        "[Unit]",
        "Description=campus-mesh: lends this machine's GPUs, and takes them back",
        "After=network-online.target docker.service" if service.user else "After=default.target",
        *(["Wants=network-online.target"] if service.user else []),
        "StartLimitIntervalSec=300",
        "StartLimitBurst=10",
        "",
        "[Service]",
        "Type=notify",
        f"ExecStart={_word(service.python)} -m mesh.daemon.entry --log --state {_word(service.state)}{config}",
        *([f"User={service.user}"] if service.user else []),
        "# Stopping is leaving: guests save and move on. Only the daemon gets the SIGTERM; it looks after its guests.",
        "KillMode=mixed",
        f"TimeoutStopSec={service.grace_s + LEAVING_S:.0f}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S:.0f}",
        "# Guests get cgroups of their own below this one.",
        "Delegate=yes",
        f"LimitNOFILE={MAX_FILES}",
        "# Nothing may become more than it is, guests included.",
        "NoNewPrivileges=yes",
        "UMask=0077",
    ]
    if service.user:
        granted = " ".join(name for extra in service.extras for name in CAPABILITIES[extra])
        lines += [
            f"# {'; '.join(EXTRAS[extra] for extra in service.extras) or 'No privileges beyond those of its user.'}",
            f"CapabilityBoundingSet={granted}",
            f"AmbientCapabilities={granted}",
            *(["SupplementaryGroups=docker"] if "docker" in service.extras else []),
            "ProtectSystem=full",
        ]
        if "edge" in service.extras:
            lines += _edge(service.edge, service.user)
    lines += ["", "[Install]", f"WantedBy={'multi-user.target' if service.user else 'default.target'}", ""]
    return "\n".join(lines)


def template() -> str:
    """A user's own unit that names no place of an installation, as a package brings it along."""
    from mesh.daemon.config import Settings

    lines = unit(Service("", "", Settings().grace_s)).splitlines()
    given = {
        "ExecStart=": "ExecStart=/usr/bin/env mesh up --foreground\n"
        "Environment=PATH=%h/.local/bin:/usr/local/bin:/usr/bin:/bin",
    }
    return "\n".join(next((text for key, text in given.items() if line.startswith(key)), line) for line in lines) + "\n"


def _edge(directory: str, user: str) -> list[str]:
    """A file system for its BPF programs, which only root can mount."""
    place = _word(directory)
    return [
        f"RuntimeDirectory={EDGE_PARENT}",
        f"ExecStartPre=+/bin/mkdir -p {place}",
        f"ExecStartPre=+/bin/mount -t bpf bpf {place}",
        f"ExecStartPre=+/bin/chown {user} {place}",
        f"ExecStopPost=-+/bin/umount {place}",
    ]


def _word(text: str) -> str:
    """One word of a command line, whatever is in it; ValueError for what no unit file can hold."""
    quoted = _plain(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{quoted}"'


def _plain(text: str) -> str:
    if any(character in text for character in "\n\r\0"):
        raise ValueError(f"{text!r} cannot be written in a unit file")
    return text.replace("%", "%%")


def notify(state: str) -> None:
    """Tell the service manager (sd_notify(3)), if there is one that wants to know."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(state.encode(), address.replace("@", "\0", 1))


def raise_file_limit() -> None:
    """Allow this process up to MAX_FILES open files, as its unit does, if the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
