"""`mesh doctor`: find problems of this node, each with its cause and the next command.

`examine` reads the daemon's answers and the state of this machine. `diagnose` judges them and does no I/O.
"""

import errno
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from membership.addresses import bound_sockets, family_of, is_any, parse_seed
from membership.clock_skew import CLOCK_WARN_S, MIN_PEERS
from membership.trust import CERTIFICATE_WARN_S, CLOCK_GRACE_S, TrustError, TrustStore
from mesh.api.no_daemon import NoDaemon
from mesh.cli.nodes import edge_text, system_text
from mesh.cli.output import print_json, say
from mesh.cli.progress import waiting_for
from mesh.cli.terminal import client, json_option, layout
from mesh.daemon.config import GOSSIP_PORT, Settings, load_settings
from mesh.daemon.layout import Layout
from mesh.util.errors import ConfigError, ExitCode, MeshError
from mesh.util.processes import name_of
from mesh.util.text import plural

State = Literal["ok", "warn", "fail"]
MDNS_GROUP, MDNS_GROUP6 = "224.0.0.251", "ff02::fb"
MULTICAST_WAIT_S = 1.0
DISK_RATE = "disk rate"  # a limit as engines name it
LOW_DISK = 2 << 30  # a checkpoint of a small model (own choice)


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. `next`: the next command, empty if there is nothing to do."""

    check: str
    state: State
    detail: str
    next: str = ""


class Port(msgspec.Struct, frozen=True):
    """A port of the daemon. `taken_by`: the program that uses it; "" if it is free, "?" if the program is not visible."""

    protocol: str
    number: int
    option: str  # of `mesh up`, to choose another port
    taken_by: str = ""


class Facts(msgspec.Struct, frozen=True):
    """All observations. `status` and `network` are the daemon's answers; None if none runs."""

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
    streaming: str = ""  # whether jobs may read data sets while they are fetched
    left: str = ""  # what a killed daemon has left, if none runs
    addresses: tuple[str, ...] = ()  # of real networks, which others can use
    own: frozenset[str] = frozenset()  # every address of this machine
    multicast: dict[str, str] = {}  # the problem of each interface's address, "" if there is none
    now_unix: float = 0.0
    free_bytes: int | None = None  # on the disk of the state directory
    limits_disk: bool = False  # the owner set `max_disk_mib_s`
    native: bool = True  # checkpoints are compressed by a compiled library


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Find problems of this machine and their remedies. Exit with 1 if one is serious."""
    with waiting_for("asking other nodes how they reach this one"):
        facts = examine(layout(ctx), lambda path: client(ctx).get(path))
    findings = diagnose(facts)
    failed = any(finding.state == "fail" for finding in findings)
    if as_json:
        print_json({"healthy": not failed, "findings": [msgspec.to_builtins(f) for f in findings]})
    else:
        signs = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
        for finding in findings:
            say(f"{signs[finding.state]}  {finding.check}: {finding.detail}")
            if finding.next:
                say(f"      next: {finding.next}")
    if failed:
        ctx.exit(int(ExitCode.ERROR))


# --- examine


def examine(where: Layout, get: Any) -> Facts:
    from ckptstore import planes
    from membership.discovery import lan_addresses, own_addresses

    settings, settings_problem = _settings(where)
    key_problem = _key_problem(where)
    certificate_problem, ends = _certificate(where)
    status = network = None
    daemon_problem, hangs = "", False
    try:
        status = get("/v1/status")
        network = get("/v1/network")
    except MeshError as error:
        daemon_problem, hangs = str(error), not isinstance(error, NoDaemon) or error.runs
    ports: list[Port] = []
    if status is None:
        wanted = [("udp", settings.port, "--port"), ("tcp", settings.port, "--port")]
        if settings.api_port:
            wanted.append(("tcp", settings.api_port, "--api-port"))
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
        streaming=_streaming(status["pid"]) if status is not None else "",
        left=_left(where) if status is None else "",
        addresses=tuple(lan_addresses()),
        own=frozenset(own_addresses()),
        multicast=_multicast(settings) if settings.mdns else {},
        now_unix=time.time(),
        free_bytes=_free(where),
        limits_disk=settings.max_disk_mib_s is not None,
        native=planes.library() is not None,
    )


def _streaming(daemon: int) -> str:
    from mesh.data import streams

    if problem := streams.problem(daemon):
        return f"come whole before a job starts: {problem}"
    contained = "" if streams.seen_by_engine(daemon) else ", but not in containers: the engine does not see its mounts"
    return f"of {streams.LEAST_BYTES >> 20} MiB or more can be read while they come{contained}"


def _left(where: Layout) -> str:
    from mesh.daemon.leftovers import find

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
    """Return the program that uses this port; "" if it is free."""
    if number == 0:
        return ""
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    try:
        for probe in bound_sockets(host, number, kind):
            probe.close()
    except OSError as error:
        return _owner(protocol, number) if error.errno == errno.EADDRINUSE else f"no program, but: {error.strerror}"
    return ""


def _owner(protocol: str, number: int) -> str:
    """Return the program that listens on this port, as far as this user may see it."""
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
                    return f"{name_of(int(process.name))} (pid {process.name})"
        except OSError:
            continue
    return "?"


def _multicast(settings: Settings) -> dict[str, str]:
    """Send a multicast packet on each interface and check that it comes back."""
    from membership.discovery import interface_of, lan_addresses

    found = {}
    for address in lan_addresses() if is_any(settings.bind) else [settings.bind]:
        found[address] = _multicast_on(address, interface_of(address))
    return found


def _multicast_on(address: str, interface: int) -> str:
    word = b"campus-mesh doctor %d %d" % (os.getpid(), time.monotonic_ns())
    family = family_of(address)
    try:
        with (
            socket.socket(family, socket.SOCK_DGRAM) as receiver,
            socket.socket(family, socket.SOCK_DGRAM) as sender,
        ):
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                group, index = socket.inet_pton(family, MDNS_GROUP6), struct.pack("@I", interface)
                receiver.bind((MDNS_GROUP6, 0, 0, interface))
                receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group + index)
                sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
                sender.sendto(word, (MDNS_GROUP6, receiver.getsockname()[1], 0, interface))
            else:
                group, own = socket.inet_aton(MDNS_GROUP), socket.inet_aton(address)
                receiver.bind((MDNS_GROUP, 0))
                receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group + own)
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
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
    return "packets do not come back"


# --- diagnose


def diagnose(facts: Facts) -> list[Finding]:
    return [*_findings(facts)]


def _findings(facts: Facts) -> Iterator[Finding]:
    yield _state(facts)
    yield _certificate_finding(facts)
    yield _daemon(facts)
    yield from _ports(facts.ports)
    yield from _disk(facts)
    if not facts.native:
        what = "they are compressed in Python, about ten times slower: there is no C compiler to make the library once"
        yield warn("checkpoints", what, "`sudo apt install gcc libc6-dev`, then `mesh down && mesh up`")
    yield from _multicast_findings(facts)
    yield from _lending(facts)
    if facts.status is not None and facts.network is not None:
        yield from _families(facts.addresses, facts.network)
        yield from _network(facts.status, facts.network, facts.own)
        engines = facts.status["engines"]
        for name, engine in engines.items():
            if name == "apptainer" and not _concerns(engine, engines.get("docker")):
                continue
            yield _engine(name, engine)
            yield from _limits(name, engine, facts.limits_disk)
        for name in engines:
            if name == "docker" and engines[name]["ok"]:
                yield ok("system checkpoints", system_text(engines[name]["system"]))  # no node must offer them
    if facts.streaming:
        yield ok("data sets", facts.streaming)
    yield from _edge(facts)


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def warn(check: str, detail: str, next_step: str = "") -> Finding:
    return Finding(check, "warn", detail, next_step)


def fail(check: str, detail: str, next_step: str = "") -> Finding:
    return Finding(check, "fail", detail, next_step)


def _state(facts: Facts) -> Finding:
    if facts.key_problem:
        return fail("state", facts.key_problem)
    if facts.settings_problem:
        return fail("state", facts.settings_problem, "correct that line, or remove the file")
    if not facts.member:
        first = "`mesh init NAME` founds a mesh; `mesh join INVITE` or `mesh join HOST` joins one"
        return fail("state", f"{facts.state} belongs to no mesh", first)
    if facts.exposed:
        return warn("state", facts.exposed, "move the directory to a place where only you may write: `--state DIR`")
    return ok("state", facts.state)


def _certificate_finding(facts: Facts) -> Finding:
    if facts.certificate_problem:
        join = (
            f"`rm {facts.state}/genesis && mesh join HOST` here, with the HOST of a member. The key and all data stay"
        )
        approve = "then `mesh member approve NODE` on a node that may admit others"
        return fail("certificate", facts.certificate_problem, f"{join}; {approve}")
    if facts.certificate_ends_unix is None:
        return warn("certificate", "none yet")
    valid = f"valid until {time.strftime('%Y-%m-%d %H:%M', time.localtime(facts.certificate_ends_unix))}"
    if facts.certificate_ends_unix - facts.now_unix >= CERTIFICATE_WARN_S:
        return ok("certificate", valid)
    renewal = "it is renewed automatically when a node that may admit others is up: `mesh member ls` shows them"
    return warn("certificate", valid, renewal)


def _daemon(facts: Facts) -> Finding:
    if facts.status is None:
        first = "kill it (`kill -9` and that pid), then " if facts.daemon_hangs else ""
        if facts.certificate_ends_unix is None and not facts.certificate_problem:
            first = "`mesh join INVITE`, or `mesh init NAME`; then "
        return fail("daemon", facts.daemon_problem, f"{first}`mesh up`")
    status = facts.status
    return ok("daemon", f"{status['nick']} runs at {status['address']} (pid {status['pid']})")


def _lending(facts: Facts) -> Iterator[Finding]:
    """Find settings that keep the machine from ever being lent."""
    if facts.policy_problem:
        yield fail("policy", facts.policy_problem, "correct that key; until then the previous policy applies")
    elif facts.status is not None:
        for warning in facts.status.get("lend", {}).get("warnings", []):
            yield warn("lending", warning)


def _ports(ports: Sequence[Port]) -> Iterator[Finding]:
    names = [f"{port.number}/{port.protocol}" for port in ports]
    taken = [(name, port) for name, port in zip(names, ports, strict=True) if port.taken_by]
    for name, port in taken:
        program = "a program of another user" if port.taken_by == "?" else port.taken_by
        yield fail("ports", f"{name} is used by {program}", f"stop it, or `mesh up {port.option} NUMBER`")
    if ports and not taken:
        yield ok("ports", f"{', '.join(names)} are free")


def _multicast_findings(facts: Facts) -> Iterator[Finding]:
    network, problems = facts.network, {address: text for address, text in facts.multicast.items() if text}
    for address, problem in problems.items():
        group = MDNS_GROUP6 if ":" in address else MDNS_GROUP
        firewall = f"allow UDP port 5353 to {group} in the firewall, or name a node: `mesh up --join HOST`"
        yield warn("multicast", f"does not work on {address}: {problem}", firewall)
    if problems or not facts.multicast:
        return
    if network is None:
        yield ok("multicast", "works on this machine")
    elif network["mdns_problem"]:
        yield warn("multicast", network["mdns_problem"])
    elif network["neighbours"] and not network["neighbours_by_mdns"]:
        yield warn(
            "multicast",
            f"{plural(network['neighbours'], 'node')} on this network, but mDNS finds none: multicast is blocked "
            "between the machines (a switch, an access point, a firewall)",
            "known nodes remember each other; new ones need `mesh up --join HOST`",
        )
    elif network["others"] and not network["neighbours"]:
        yield ok(
            "multicast",
            "works, but all other nodes are beyond a router, where it ends: known nodes remember each other, new ones need "
            "`mesh up --join HOST`",
        )
    else:
        found, neighbours = network["neighbours_by_mdns"], network["neighbours"]
        yield ok("multicast", f"{found} of {neighbours} neighbours found by mDNS")


def _families(addresses: Sequence[str], network: dict[str, Any]) -> Iterator[Finding]:
    """Say which family is missing, and who cannot be reached without it."""
    if not addresses:
        lost = "no address that other machines can use (only loopback, link-local, containers and tunnels)"
        yield warn("IP", f"{lost}: no other machine can be in this mesh", "`ip address` shows the machine's addresses")
        return
    families = {family_of(address) for address in addresses}
    if len(families) == 2:
        return
    has6 = socket.AF_INET6 in families
    has, lacks = ("IPv6", "IPv4") if has6 else ("IPv4", "IPv6")
    if unreached := network["no_route"]:
        names = f"{', '.join(unreached[:5])}{' ...' if len(unreached) > 5 else ''}"
        yield fail(
            "IP",
            f"{has} alone, but {names} advertise {lacks}: they cannot be reached from here",
            f"give this machine an address of {lacks}, or on these `mesh up --advertise ADDRESS` with their {has} address",
        )
    elif has6:
        yield ok("IP", "no IPv4: nodes that advertise IPv4 could not be in this mesh")


def _network(status: dict[str, Any], network: dict[str, Any], own: Collection[str]) -> Iterator[Finding]:
    for topic, text in status["problems"].items():
        if topic not in {"clock", "certificate", "mdns", "reach", "policy"}:
            yield fail(topic, text, "`mesh leave`, then `mesh join` with a new invite" if topic == "revoked" else "")
    if not network["others"]:
        invite = "`mesh join` on another machine, with the output of `mesh member invite NAME` (or --mine)"
        yield warn("others", "no other node is up", f"{invite}; on another network also `mesh up --join HOST`")
        return
    yield ok("others", f"{plural(network['others'], 'other node')} up")
    yield from _versions(status)
    yield from _reach(status["address"], network, own)
    yield _clock(network["clock_offset_s"], network["clock_peers"])


def _versions(status: dict[str, Any]) -> Iterator[Finding]:
    """Warn about other releases: they should be in one mesh only during an upgrade."""
    others: dict[str, list[str]] = {}
    for nick, version in status.get("versions", {}).items():
        others.setdefault(version, []).append(nick)
    others.pop(status["version"], None)
    for version, nicks in sorted(others.items()):
        text = (
            f"this node runs {status['version']}; {', '.join(nicks[:5])}{' ...' if len(nicks) > 5 else ''}: {version}"
        )
        yield warn("versions", text, "upgrade the nodes one after the other (docs/how-to/upgrade.md)")


def _disk(facts: Facts) -> Iterator[Finding]:
    if facts.free_bytes is not None and facts.free_bytes < LOW_DISK:
        free = f"{facts.free_bytes / 2**30:.1f} GiB are free on the disk of {facts.state}"
        yield Finding(
            "disk",
            "warn" if facts.free_bytes else "fail",
            f"{free}: no space for checkpoints of other nodes",
            "free some space, `mesh ckpt gc`, `mesh image prune`, or set `store_quota_gib`",
        )


def _reach(address: str, network: dict[str, Any], own: Collection[str]) -> Iterator[Finding]:
    asked = network["asked"]
    host, port = parse_seed(address, GOSSIP_PORT)
    silent = [answer for answer in asked if answer["error"]]
    answers = [answer for answer in asked if not answer["error"]]
    if not answers:
        if silent:
            names = ", ".join(answer["nick"] for answer in silent)
            text = f"none of {names} answers over TCP ({silent[0]['error']})"
            yield fail("reaching others", text, f"allow outgoing TCP to port {port} here, and incoming there")
        return
    if network["relay"]:
        text = (
            f"no node reaches this machine itself (NAT, or a firewall): {network['relay']} passes connections on from {address}. "
            "Lost: UDP, some speed, and gangs with nodes on the other side"
        )
        step = "none needed; to do without: a bridged network, or a forwarded port (docs/how-to/connect.md)"
        yield warn("relay", text, step)
        return
    unreached = [answer for answer in answers if not answer["udp"] or answer["tcp"] != "acked"]
    if not unreached:
        yield ok("address", f"{plural(len(answers), 'node')} can reach this one at {address}")
        return
    first = unreached[0]
    who = f"{len(unreached)} of {len(answers)} asked nodes (for example {first['nick']})"
    if first["udp"]:
        text = f"does not reach {address} from {who} ({first['tcp']}); UDP does"
        yield fail("TCP", text, f"allow incoming TCP port {port}: large messages and calls about jobs need it")
    elif first["tcp"] == "acked":
        text = (
            f"does not reach {address} from {who}; TCP does, and carries gossip instead (to {network['over_tcp']} of "
            f"{plural(network['others'], 'node')}). Lost: discovery by multicast, and some speed"
        )
        yield warn("UDP", text, f"allow incoming and outgoing UDP port {port}")
    elif (seen := first["seen_host"]) and seen != host and seen not in own:
        text = (
            f"behind NAT: {who} see this machine as {seen}, which is none of its addresses, and cannot reach it at {address}. "
            "No node passes connections on to it. Lost: its place in the mesh, since it is declared dead again and again"
        )
        forward = f"forward port {port} (UDP and TCP) of {seen} to this machine, then `mesh up --advertise {seen}`"
        yield fail("NAT", text, f"{forward}; or use a bridged network (docs/how-to/connect.md)")
    else:
        seen = first["seen_host"]
        elsewhere = f"; they see this machine as {seen}" if seen and seen != host else ""
        text = f"{who} cannot reach this node at {address}, by UDP or by TCP{elsewhere}"
        step = f"allow incoming port {port}, or give the right address: `mesh up --advertise ADDRESS`"
        yield fail("address", text, step)


def _clock(offset_s: float | None, peers: int) -> Finding:
    if offset_s is None or abs(offset_s) <= CLOCK_WARN_S:
        return ok("clock", "agrees with other nodes")
    way = "behind" if offset_s > 0 else "ahead of"
    text = f"this machine's clock is {abs(offset_s):.0f} s {way} the clocks of {plural(peers, 'other node')}"
    if peers < MIN_PEERS:
        return warn("clock", text + " (too few to tell which clock is wrong)", "check `timedatectl` on each")
    judged = fail if abs(offset_s) > CLOCK_GRACE_S else warn
    return judged("clock", text, "`timedatectl set-ntp true`")


def _edge(facts: Facts) -> Iterator[Finding]:
    """Judge the network edge: without all of it the node still works, so a problem is a warning."""
    if facts.status is not None:
        edge = facts.status["edge"]
        yield Finding("network edge", "warn" if edge["problem"] else "ok", edge_text(edge), edge["next"])
    elif facts.left:
        text = f"a killed daemon left on this machine: {facts.left}"
        yield warn("leftovers", text, "`mesh up` reuses it; `mesh down` removes it")


def _limits(name: str, engine: dict[str, Any], limits_disk: bool) -> Iterator[Finding]:
    """Warn about limits that this engine cannot set for a guest as a whole. That of the disk's rate is only for who wants it."""
    missing = [limit for limit in engine["unlimited"] if limit != DISK_RATE or limits_disk]
    if engine["ok"] and missing:
        yield warn(f"limits of {name}", f"none of {', '.join(missing)} for a guest as a whole", engine["limits_by"])


def _concerns(apptainer: dict[str, Any], docker: dict[str, Any] | None) -> bool:
    """Tell whether to report on Apptainer: it runs images here, or could where Docker does not."""
    from mesh.execution.apptainer.engine import NOT_INSTALLED

    return bool(apptainer["ok"]) or docker is None or not (docker["ok"] or apptainer["detail"] == NOT_INSTALLED)


def _engine(name: str, engine: dict[str, Any]) -> Finding:
    detail = f"{engine['detail']}; {engine['isolation']}" if engine["ok"] else engine["detail"]
    return Finding(f"engine {name}", "ok" if engine["ok"] else "warn", detail)
