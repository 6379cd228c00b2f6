"""`mesh doctor`: what keeps this machine from being a good node, each with its cause and the next command.

`examine` looks, at the daemon's answers and at this machine; `diagnose` decides what that means and does no I/O.
"""

import errno
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from membership.skew import CLOCK_WARN_S, PEERS_NEEDED
from membership.trust import CERTIFICATE_WARN_S, CLOCK_GRACE_S, TrustError, TrustStore
from mesh.api.errors import ConfigError, ExitCode, MeshError
from mesh.cli.edge import edge_words
from mesh.cli.telling import patience
from mesh.cli.terminal import client, json_option, layout, print_json, system_words
from mesh.config import Settings, load_settings
from mesh.layout import Layout

State = Literal["ok", "warn", "fail"]
MDNS_GROUP, MDNS_PORT = "224.0.0.251", 5353
MULTICAST_WAIT_S = 1.0
LOW_DISK = 2 << 30  # a checkpoint of a small model; ours


class Finding(msgspec.Struct, frozen=True):
    """`next` is what to do about it; empty if nothing is to be done."""

    check: str
    state: State
    detail: str
    next: str = ""


class Port(msgspec.Struct, frozen=True):
    """`taken_by`: the program that has it, "" if it is free, "?" if it is taken by one that cannot be seen."""

    protocol: str
    number: int
    option: str  # of `mesh up`, that chooses another
    taken_by: str = ""


class Facts(msgspec.Struct, frozen=True):
    """What was seen. `status` and `network` are the daemon's answers; None while none runs."""

    state: str
    key_problem: str = ""
    exposed: str = ""
    member: bool = False
    certificate_problem: str = ""
    certificate_ends_unix: float | None = None
    settings_problem: str = ""
    policy_problem: str = ""
    daemon_problem: str = ""
    daemon_hangs: bool = False
    status: dict[str, Any] | None = None
    network: dict[str, Any] | None = None
    ports: tuple[Port, ...] = ()
    left: str = ""  # by a daemon that was killed, although none runs
    multicast: dict[str, str] = {}  # per address of an interface: "" or what went wrong
    now_unix: float = 0.0
    free_bytes: int | None = None  # where the state is


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Look for what keeps this machine from being a good node. Exit code 1 if something does."""
    with patience("asking other nodes how they see this one"):
        facts = examine(layout(ctx), lambda path: client(ctx).get(path))
    findings = diagnose(facts)
    failed = any(finding.state == "fail" for finding in findings)
    if as_json:
        print_json({"schema": 1, "healthy": not failed, "findings": [msgspec.to_builtins(f) for f in findings]})
    else:
        signs = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
        for finding in findings:
            click.echo(f"{signs[finding.state]}  {finding.check}: {finding.detail}")
            if finding.next:
                click.echo(f"      next: {finding.next}")
    if failed:
        ctx.exit(int(ExitCode.ERROR))


# --- looking


def examine(where: Layout, get: Any) -> Facts:
    settings, settings_problem = _settings(where)
    key_problem = _key_problem(where)
    certificate_problem, ends = _certificate(where)
    status = network = None
    daemon_problem, hangs = "", False
    try:
        status = get("/v1/status")
        network = get("/v1/network")
    except MeshError as error:
        daemon_problem, hangs = str(error), error.code != ExitCode.NO_DAEMON
    ports: list[Port] = []
    if status is None:
        wanted = [
            ("udp", settings.port, "--port"),
            ("tcp", settings.port, "--port"),
            ("tcp", settings.api_port, "--api-port"),
        ]
        ports = [Port(kind, number, option, _taken_by(kind, settings.bind, number)) for kind, number, option in wanted]
    return Facts(
        state=str(where.root),
        key_problem=key_problem,
        exposed=where.exposed(),
        member=where.genesis.exists(),
        certificate_problem=certificate_problem,
        certificate_ends_unix=ends,
        settings_problem=settings_problem,
        policy_problem=_policy_problem(where),
        daemon_problem=daemon_problem,
        daemon_hangs=hangs,
        status=status,
        network=network,
        ports=tuple(ports),
        left=_left(where) if status is None else "",
        multicast=_multicast(settings) if settings.mdns else {},
        now_unix=time.time(),
        free_bytes=_free(where),
    )


def _left(where: Layout) -> str:
    from mesh.engine.leftovers import find

    return find(where).words


def _settings(where: Layout) -> tuple[Settings, str]:
    try:
        return load_settings(where.config, {}), ""
    except ConfigError as error:
        return Settings(), str(error)


def _free(where: Layout) -> int | None:
    try:
        found = os.statvfs(where.root)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _policy_problem(where: Layout) -> str:
    from mesh.provider.policy import PolicyError, read_policy

    try:
        read_policy(where.policy.read_text(encoding="utf-8") if where.policy.exists() else "")
    except (PolicyError, OSError, UnicodeDecodeError) as error:
        return f"{where.policy}: {error}"
    return ""


def _key_problem(where: Layout) -> str:
    from membership.identity import Identity, IdentityError

    if not where.key.exists():
        return ""
    try:
        Identity.load(where.key)
    except IdentityError as error:
        return str(error)
    return ""


def _certificate(where: Layout) -> tuple[str, float | None]:
    if not where.genesis.exists():
        return "", None
    try:
        store = TrustStore(where.genesis.read_bytes())
        return "", store.check_chain(where.chain.read_bytes(), time.time()).not_after
    except (TrustError, OSError) as error:
        return str(error), None


def _taken_by(protocol: str, host: str, number: int) -> str:
    """Who has this port, if anybody."""
    if number == 0:
        return ""
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as probe:
        if protocol == "tcp":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            return _owner(protocol, number) if error.errno == errno.EADDRINUSE else f"nobody, but: {error.strerror}"
    return ""


def _owner(protocol: str, number: int) -> str:
    """The program that listens there, as far as this user may see."""
    inodes = set()
    for table in (f"/proc/net/{protocol}", f"/proc/net/{protocol}6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        inodes |= {fields[9] for line in lines if int((fields := line.split())[1].rpartition(":")[2], 16) == number}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for descriptor in (process / "fd").iterdir():
                target = str(descriptor.readlink())
                if target.startswith("socket:[") and target[8:-1] in inodes:
                    return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            continue
    return "?"


def _multicast(settings: Settings) -> dict[str, str]:
    """Whether a multicast packet that is sent on each interface comes back to this machine."""
    from membership.discovery import is_any, lan_addresses

    found = {}
    for address in lan_addresses() if is_any(settings.bind) else [settings.bind]:
        found[address] = _multicast_on(address)
    return found


def _multicast_on(address: str) -> str:
    word = b"campus-mesh doctor %d %d" % (os.getpid(), time.monotonic_ns())
    membership = struct.pack("4s4s", socket.inet_aton(MDNS_GROUP), socket.inet_aton(address))
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            receiver.bind((MDNS_GROUP, 0))
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            sender.sendto(word, (MDNS_GROUP, receiver.getsockname()[1]))
            deadline = time.monotonic() + MULTICAST_WAIT_S
            while (left := deadline - time.monotonic()) > 0:
                receiver.settimeout(left)
                if receiver.recv(2048) == word:
                    return ""
    except TimeoutError:
        pass
    except OSError as error:
        return error.strerror or str(error)
    return "what is sent does not come back"


# --- deciding


def diagnose(facts: Facts) -> list[Finding]:
    findings = [_state(facts), _certificate_finding(facts), _daemon(facts)]
    findings += [_port(port) for port in facts.ports if port.taken_by]
    if facts.ports and not any(port.taken_by for port in facts.ports):
        numbers = ", ".join(f"{port.number}/{port.protocol}" for port in facts.ports)
        findings.append(Finding("ports", "ok", f"{numbers} are free"))
    findings += _disk(facts)
    findings += _multicast_findings(facts)
    findings += _lending(facts)
    if facts.status is not None and facts.network is not None:
        findings += _network(facts.status, facts.network)
        engines = facts.status["engines"]
        findings += [_engine(name, engine) for name, engine in engines.items()]
        findings += [_system(engines[name]["system"]) for name in engines if name == "docker" and engines[name]["ok"]]
    findings += _edge(facts)
    return findings


def _state(facts: Facts) -> Finding:
    if facts.key_problem:
        return Finding("state", "fail", facts.key_problem)
    if facts.settings_problem:
        return Finding("state", "fail", facts.settings_problem, "correct that line, or remove the file")
    if not facts.member:
        return Finding(
            "state",
            "fail",
            f"{facts.state} belongs to no mesh",
            "`mesh init NAME` founds one, `mesh join INVITE` or `mesh join HOST` gets into one",
        )
    if facts.exposed:
        return Finding("state", "warn", facts.exposed, "keep the state where only you may write: `--state DIR`")
    return Finding("state", "ok", facts.state)


def _certificate_finding(facts: Facts) -> Finding:
    if facts.certificate_problem:
        return Finding(
            "certificate",
            "fail",
            facts.certificate_problem,
            f"ask for an invite (`mesh invite` on a node that may admit); then here: `rm {facts.state}/genesis && "
            "mesh join INVITE`. The key, and what is stored, stay",
        )
    if facts.certificate_ends_unix is None:
        return Finding("certificate", "warn", "none yet")
    left_s = facts.certificate_ends_unix - facts.now_unix
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.certificate_ends_unix))
    if left_s < CERTIFICATE_WARN_S:
        return Finding(
            "certificate",
            "warn",
            f"holds until {day}",
            "it is renewed by itself when a node that may admit is met: `mesh trust ls` shows which may",
        )
    return Finding("certificate", "ok", f"holds until {day}")


def _daemon(facts: Facts) -> Finding:
    if facts.status is None:
        first = "end it by that pid (`kill -9`), then " if facts.daemon_hangs else ""
        if facts.certificate_ends_unix is None and not facts.certificate_problem:
            first = "`mesh join INVITE`, or `mesh init NAME`; then "
        return Finding("daemon", "fail", facts.daemon_problem, f"{first}`mesh up`")
    status = facts.status
    return Finding("daemon", "ok", f"{status['nick']} runs at {status['address']} (pid {status['pid']})")


def _lending(facts: Facts) -> list[Finding]:
    """What keeps the machine from ever being lent, by its owner's own words."""
    if facts.policy_problem:
        return [Finding("policy", "fail", facts.policy_problem, "correct that key; what the file said before goes on")]
    told = [] if facts.status is None else facts.status.get("lend", {}).get("warnings", [])
    return [Finding("lending", "warn", warning) for warning in told]


def _port(port: Port) -> Finding:
    name = f"{port.number}/{port.protocol}"
    what = "a program of another user" if port.taken_by == "?" else port.taken_by
    return Finding("ports", "fail", f"{name} is taken by {what}", f"stop it, or `mesh up {port.option} NUMBER`")


def _multicast_findings(facts: Facts) -> list[Finding]:
    findings = []
    for address, problem in facts.multicast.items():
        if problem:
            findings.append(
                Finding(
                    "multicast",
                    "warn",
                    f"does not work on {address}: {problem}",
                    "allow UDP port 5353 to 224.0.0.251 in the firewall, or name a node: `mesh up --join HOST`",
                )
            )
    network = facts.network
    if network is None or findings or not facts.multicast:
        return findings or ([Finding("multicast", "ok", "works on this machine")] if facts.multicast else [])
    if network["mdns_problem"]:
        return [Finding("multicast", "warn", network["mdns_problem"])]
    if network["neighbours"] and not network["neighbours_by_mdns"]:
        return [
            Finding(
                "multicast",
                "warn",
                f"{network['neighbours']} nodes are on this network, and mDNS shows none of them: multicast is blocked "
                "between the machines (a switch, an access point, a firewall)",
                "nodes that have met remember each other; new ones need `mesh up --join HOST`",
            )
        ]
    return [
        Finding("multicast", "ok", f"{network['neighbours_by_mdns']} of {network['neighbours']} neighbours seen by it")
    ]


def _network(status: dict[str, Any], network: dict[str, Any]) -> list[Finding]:
    findings = [
        Finding(topic, "fail", text)
        for topic, text in status["problems"].items()
        if topic not in {"clock", "certificate", "mdns", "reach", "policy"}
    ]
    if not network["others"]:
        return [
            *findings,
            Finding(
                "others",
                "warn",
                "no other node is here",
                "on another machine: `mesh join` with what `mesh invite` prints here; far away, `mesh up --join HOST` too",
            ),
        ]
    findings.append(Finding("others", "ok", f"{network['others']} other nodes are here"))
    findings += _versions(status)
    findings += _reach(status["address"], network["asked"])
    findings.append(_clock(network["clock_offset_s"], network["clock_peers"]))
    return findings


def _versions(status: dict[str, Any]) -> list[Finding]:
    """Two releases in one mesh are meant to be there for as long as an upgrade takes."""
    others: dict[str, list[str]] = {}
    for nick, version in status.get("versions", {}).items():
        others.setdefault(version, []).append(nick)
    others.pop(status["version"], None)
    return [
        Finding(
            "versions",
            "warn",
            f"this node runs {status['version']}; {', '.join(nicks[:5])}{' ...' if len(nicks) > 5 else ''}: {version}",
            "bring all nodes to one release, one after the other (docs/upgrade.md)",
        )
        for version, nicks in sorted(others.items())
    ]


def _disk(facts: Facts) -> list[Finding]:
    if facts.free_bytes is None or facts.free_bytes >= LOW_DISK:
        return []
    return [
        Finding(
            "disk",
            "warn" if facts.free_bytes else "fail",
            f"{facts.free_bytes / 2**30:.1f} GiB are free where {facts.state} is; checkpoints of others find no room",
            "free some, `mesh ckpt gc`, `mesh image prune`, or set `store_quota_gib`",
        )
    ]


def _reach(address: str, asked: list[dict[str, Any]]) -> list[Finding]:
    port = address.rpartition(":")[2]
    silent = [answer for answer in asked if answer["error"]]
    told = [answer for answer in asked if not answer["error"]]
    findings = []
    if silent and not told:
        names = ", ".join(answer["nick"] for answer in silent)
        findings.append(
            Finding(
                "reaching others",
                "fail",
                f"none of {names} answers over TCP ({silent[0]['error']})",
                f"allow TCP port {port} out of this machine, and into theirs",
            )
        )
    deaf = [answer for answer in told if not answer["udp"] or answer["tcp"] != "acked"]
    if not told:
        return findings
    if not deaf:
        return [*findings, Finding("address", "ok", f"{len(told)} nodes reach this one at {address}")]
    nick, seen = deaf[0]["nick"], deaf[0]["seen_host"]
    who = f"{len(deaf)} of {len(told)} nodes that were asked (as {nick})"
    if deaf[0]["udp"]:
        return [
            *findings,
            Finding(
                "TCP",
                "fail",
                f"does not come through to {address} from {who} ({deaf[0]['tcp']}); UDP does",
                f"allow TCP port {port} into this machine: large news and job calls need it",
            ),
        ]
    if deaf[0]["tcp"] == "acked":
        return [
            *findings,
            Finding(
                "UDP",
                "fail",
                f"does not come through to {address} from {who}; TCP does, and is used instead, more slowly",
                f"allow UDP port {port} into and out of this machine",
            ),
        ]
    elsewhere = f"; they see this machine at {seen}" if seen and seen != address.rpartition(":")[0] else ""
    return [
        *findings,
        Finding(
            "address",
            "fail",
            f"{who} cannot reach this node at {address}, by UDP or by TCP{elsewhere}",
            f"allow port {port} into this machine, or name the right address: `mesh up --advertise ADDRESS`",
        ),
    ]


def _clock(offset_s: float | None, peers: int) -> Finding:
    if offset_s is None or abs(offset_s) <= CLOCK_WARN_S:
        return Finding("clock", "ok", "agrees with the others'")
    way = "behind" if offset_s > 0 else "ahead of"
    text = f"this machine's clock is {abs(offset_s):.0f} s {way} those of {peers} other nodes"
    if peers < PEERS_NEEDED:
        return Finding("clock", "warn", text + " (too few to say whose is wrong)", "`timedatectl` on each shows which")
    state: State = "fail" if abs(offset_s) > CLOCK_GRACE_S else "warn"
    return Finding("clock", state, text, "`timedatectl set-ntp true`")


def _edge(facts: Facts) -> list[Finding]:
    """Where it does less than it was asked for, the node still works: only a warning."""
    if facts.status is not None:
        edge = facts.status["edge"]
        return [Finding("network edge", "warn" if edge["problem"] else "ok", edge_words(edge), edge["next"])]
    if facts.left:
        text = f"a daemon that was killed has left on this machine: {facts.left}"
        return [Finding("leftovers", "warn", text, "`mesh up` puts that right; `mesh down` takes it away")]
    return []


def _engine(name: str, engine: dict[str, Any]) -> Finding:
    detail = f"{engine['detail']}; {engine['isolation']}" if engine["ok"] else engine["detail"]
    return Finding(f"engine {name}", "ok" if engine["ok"] else "warn", detail)


def _system(system: dict[str, str]) -> Finding:
    """Nobody must offer them, so it is never more than said."""
    return Finding("system checkpoints", "ok", system_words(system))
