"""Build, boot and try the machines, and write docs/platforms.md.

    python -m tests.machines [--only sid] [--keep] [--part mesh|processes|containers|rootless|apptainer|system|limits]

Needs root, the network, and Debian's mmdebstrap, qemu-system-x86, qemu-utils, e2fsprogs and openssh-client.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from tests.machines import checks
from tests.machines.machine import USER, Failed, Machine, build, tools_missing
from tests.machines.page import page

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "machines"
RESULTS, PAGE = PLACE / "results.json", ROOT / "docs" / "platforms.md"
SUITES = ("sid", "trixie")
PARTS = ("mesh", "processes", "containers", "rootless", "apptainer", "system", "limits")
INIT = "mesh init home --nick home && mesh up --lend --no-mdns --port 7473 --api-port 7474"
PODMAN = "DOCKER_HOST=unix:///run/podman/podman.sock"
ROOTLESS = "DOCKER_HOST=unix:///run/user/$(id -u)/podman/podman.sock"
INIT_ROOTLESS = f"systemctl --user start podman.socket && export {ROOTLESS} && {INIT}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.machines")
    parser.add_argument("--only", choices=SUITES, action="append")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--keep", action="store_true", help="use the disks of an earlier run")
    options = parser.parse_args()
    if missing := tools_missing():
        sys.exit(f"not installed: {', '.join(missing)}; see the head of {__file__}")
    PLACE.mkdir(parents=True, exist_ok=True)
    parts, made, begun = options.part or PARTS, wheel(), time.monotonic()
    tried, ports = Tried(), (free_port(), free_port())
    with ExitStack() as stack:
        machines, old = list[Machine](), set[str]()
        for suite in options.only or SUITES:
            with tried.noting(suite):
                place = PLACE / suite
                kept = options.keep and (place / "disk").exists()
                if not kept:
                    told(f"{suite}: building its disk")
                    build(place, suite, made)
                here, there = reversed(ports) if machines else ports
                cable = f"udp=127.0.0.1:{there},localaddr=127.0.0.1:{here}"  # TCP would need the other machine to listen already
                machine = Machine(place, suite, len(machines) + 1, cable)
                stack.callback(machine.close)
                machine.start()
                machines.append(machine)
                old |= {suite} if kept else set()
        with ThreadPoolExecutor(len(SUITES)) as pool:  # each mostly waits, or uses one processor
            up = pool.map(lambda machine: tried.boot(machine, made if machine.name in old else None), machines)
            machines = [machine for machine, is_up in zip(machines, list(up), strict=True) if is_up]
            if "mesh" in parts:
                tried.mesh(machines)
            list(pool.map(lambda machine: tried.alone(machine, parts), machines))
    told(f"{PAGE} written after {(time.monotonic() - begun) / 60:.0f} minutes")
    sys.exit(0 if tried.passed() else 1)


class Tried:
    """The results so far, by earlier runs too. Each is kept, and the page written, as it comes."""

    def __init__(self) -> None:
        self._results: dict[str, Any] = {"engines": [], "system": [], "limits": [], "mesh": [], "failed": {}}
        if RESULTS.exists():
            self._results |= json.loads(RESULTS.read_text())
        self._lock = Lock()

    def passed(self) -> bool:
        answers = {answer for row in self._results["engines"] for answer in row["contract"].values()}
        answers |= {row["saved"] for row in self._results["system"]}
        answers |= {"no" for row in self._results["limits"] if not row["bound"] and "memory" not in row["unlimited"]}
        return answers <= {"ok"} and not self._results["failed"]

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note a failure of `what` instead of raising it. Until its end it is noted as not ended, should this run be."""
        self._note(what, "this run did not come to its end")
        try:
            yield
        except Failed as error:
            told(f"{what}: {error}")
            self._note(what, str(error)[:600])
        else:
            self._note(what, "")

    def boot(self, machine: Machine, wheel_to_install: Path | None) -> bool:
        """Wait until it is up, and install the wheel if its disk has an earlier one; return whether it is of use."""
        with self.noting(machine.name):
            machine.wait()
            told(f"{machine.name}: booted")
            if wheel_to_install is not None:
                machine.install(wheel_to_install)
            return True
        return False

    def mesh(self, machines: list[Machine]) -> None:
        self._results["mesh"] = []
        with self.noting("a mesh of two machines"):
            if len(machines) < 2:
                raise Failed("there was one machine, or none")
            for line in two_machines(*machines):
                told(line)
                self._results["mesh"].append(f"{line} ({commit()})")

    def alone(self, machine: Machine, parts: Sequence[str]) -> None:
        """Try each engine of a machine, and the limits that a daemon gets there."""
        with self.noting(machine.name):
            machine.send(ROOT, ("tests", "pyproject.toml"), checks.SUITE)
            known = checks.facts(machine)
            told(f"{machine.name}: {known}")
            name = {"system": known["system"], "kernel": known["kernel"], "commit": commit()}
            with self.noting(f"{machine.name}, engines"):
                for engine, answers in all_engines(machine, known, parts):
                    self._put("engines", {**name, "engine": engine, "contract": answers}, "engine")
            if "system" in parts:
                by = f"Podman {known['podman']}, CRIU {known['criu']}"
                self._put("system", {**name, "by": by, **checks.contract(machine, checks.SAVED)}, "by")
            for row in all_limits(machine) if "limits" in parts else ():
                self._put("limits", {**name, **row}, "how")

    def _note(self, what: str, why: str) -> None:
        with self._lock:
            self._results["failed"].pop(what, None)
            if why:
                self._results["failed"][what] = f"{why} ({commit()})"
            self._save()

    def _put(self, table: str, row: dict[str, Any], key: str) -> None:
        """Add a row, in the place of an earlier one about the same."""
        told(str(row))
        with self._lock:
            rows = self._results[table]
            rows[:] = [old for old in rows if (old["system"], old[key]) != (row["system"], row[key])]
            rows.append(row)
            self._save()

    def _save(self) -> None:
        RESULTS.write_text(json.dumps(self._results, indent=1))
        PAGE.write_text(page(self._results, time.strftime("%Y-%m-%d"), commit()))


def all_limits(machine: Machine) -> Iterator[dict[str, Any]]:
    """Start a daemon in each way that people do. Each way: who, what root does before, how the user starts it."""
    member = f"runuser -l {USER} -c 'mesh init home --nick home && mesh config set lend true'"
    service = f"{member} && mesh install-service --as {USER}"
    ways = (
        ("by root, from a login", "root", "true", INIT),
        ("by a user, from a login", USER, "true", INIT),
        ("by a lingering user, from a login", USER, f"loginctl enable-linger {USER}", INIT_ROOTLESS),
        ("as a service (`mesh install-service --as USER`)", USER, service, "true"),
    )
    for how, user, before, start in ways:
        try:
            machine.run("rm -rf ~/.local/state/campus-mesh ~/.config/campus-mesh", user=user)
            machine.run(before, timeout_s=checks.WAIT_S)
            row = {"how": how, **checks.limits_of(machine, user, start)}
        except Failed as error:
            row = {
                "how": how,
                "bound": False,
                "unlimited": ["?"],
                "limits_by": str(error)[-300:],
                "group": "",
                "docker": "",
            }
        machine.run(f"mesh install-service --remove --as {USER}", check=False)
        yield row


def all_engines(machine: Machine, known: dict[str, str], parts: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each engine of the machine with the contract's answers."""
    if "processes" in parts:
        scope = "systemd-run --scope --quiet -p Delegate=yes"
        yield "process", checks.contract(machine, checks.PROCESSES, within=scope)
    if "containers" in parts:
        checks.use_store(machine, containerd=False)
        yield f"Docker {known['docker']}, overlay2", checks.contract(machine, checks.CONTAINERS)
        checks.use_store(machine, containerd=True)
        yield f"Docker {known['docker']}, containerd's store", checks.contract(machine, checks.CONTAINERS)
        machine.run("systemctl start podman.socket")
        yield f"Podman {known['podman']}, as root", checks.contract(machine, checks.CONTAINERS, PODMAN)
    if "rootless" in parts:
        with lingering(machine):
            machine.run("systemctl --user start podman.socket", user=USER)
            yield f"Podman {known['podman']}, rootless", checks.contract(machine, checks.ROOTLESS, ROOTLESS, user=USER)
            checks.start_rootless_docker(machine, USER)
            answers = checks.contract(machine, checks.CONTAINERS, checks.ROOTLESS_DOCKER, user=USER)
            yield f"Docker {known['docker']}, rootless", answers
    if "apptainer" in parts and known["apptainer"]:
        with lingering(machine):
            yield f"Apptainer {known['apptainer']}", checks.contract(machine, checks.UNPACKED, user=USER)


@contextmanager
def lingering(machine: Machine) -> Iterator[None]:
    """Let the user's own systemd run without a login, which gives the user control groups."""
    machine.run(f"loginctl enable-linger {USER}")
    try:
        yield
    finally:
        machine.run(f"loginctl disable-linger {USER}")


def two_machines(one: Machine, two: Machine) -> Iterator[str]:
    """Found a mesh of two machines, move a job between them, and stop it; yield what was seen."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(checks.use_store, (one, two), (False, True)))
    try:
        checks.mesh_of_two(one, two)
        yield f"{one.name} (overlay2) founded a mesh over a cable, and {two.name} (containerd's store) joined it by an invite."
        found = checks.reclaimed_job_continues(one, two)
        yield (
            f"A job in an image that only {one.name} had was reclaimed there. {found['took_s']} s later it ran on {two.name}, "
            f"which had fetched the image, from step {found['resumed_at']}. Its attempts: {', '.join(found['nodes'])}; outcome: "
            f"{found['outcome']}; it counted to {checks.STEPS}: {'yes' if found['whole'] else 'no'}."
        )
    finally:
        for machine in (one, two):
            machine.run("mesh down", check=False)


def wheel() -> Path:
    """Build the wheel of this tree."""
    where = PLACE / "wheel"
    for old in where.glob("*.whl"):
        old.unlink()
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", where, ROOT], check=True)
    return next(where.glob("*.whl"))


@cache
def commit() -> str:
    """Return the commit, as it is before the page is written."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def free_port() -> int:
    """Return a free port of UDP."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def told(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
