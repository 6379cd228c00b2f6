"""Build, boot and try the machines, and write docs/platforms.md.

    python -m tests.machines [--only sid] [--keep] [--part engines|limits|mesh]

Needs root, the network, and Debian's mmdebstrap, qemu-system-x86, qemu-utils, e2fsprogs and openssh-client.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from tests.machines import checks
from tests.machines.machine import USER, Failed, Machine, build, tools_missing
from tests.machines.page import page

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "machines"
RESULTS, PAGE = PLACE / "results.json", ROOT / "docs" / "platforms.md"
SUITES = ("sid", "trixie")
PARTS = ("engines", "limits", "mesh")
INIT = "mesh init home --nick home && mesh up --lend --no-mdns --port 7473 --api-port 7474"
PODMAN = "DOCKER_HOST=unix:///run/podman/podman.sock"
ROOTLESS = (
    f"systemctl --user start podman.socket && export DOCKER_HOST=unix:///run/user/$(id -u)/podman/podman.sock && {INIT}"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.machines")
    parser.add_argument("--only", choices=SUITES, action="append")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--keep", action="store_true", help="use the disks of an earlier run")
    options = parser.parse_args()
    if missing := tools_missing():
        sys.exit(f"not installed: {', '.join(missing)}; see the head of {__file__}")
    PLACE.mkdir(parents=True, exist_ok=True)
    suites, parts = options.only or SUITES, options.part or PARTS
    results: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {"engines": [], "limits": [], "mesh": []}
    )
    begun, failed = time.monotonic(), False
    for suite in suites:
        try:
            place, kept, built = PLACE / suite, (PLACE / suite / "disk").exists() and options.keep, wheel()
            if not kept:
                told(f"{suite}: building its disk")
                build(place, suite, built)
            try_suite(suite, place, parts, results, built if kept else None)
        except Failed as error:
            failed = True
            told(f"{suite}: {error}")
            results["mesh"] = [*results["mesh"], f"{suite}: {str(error)[:300]}"]
        save(results)
    bad = [row for row in results["engines"] if set(row["contract"].values()) - {"ok"}]
    told(f"{PAGE} written after {(time.monotonic() - begun) / 60:.0f} minutes")
    sys.exit(1 if failed or bad else 0)


def try_suite(
    suite: str, place: Path, parts: tuple[str, ...], results: dict[str, Any], wheel_to_install: Path | None
) -> None:
    """Try one system; its second machine, with containerd's image store, is on the same disk."""
    cable = free_port()
    with ExitStack() as stack:
        one = Machine(place, f"{suite}-a", 1, f"listen=127.0.0.1:{cable}")
        machines = [one]
        if suite == "sid" and "mesh" in parts:
            machines.append(Machine(place, f"{suite}-b", 2, f"connect=127.0.0.1:{cable}"))
        for machine in machines:
            stack.callback(machine.close)
            machine.start()
        for machine in machines:
            machine.wait()
            told(f"{machine.name}: booted")
            if wheel_to_install is not None:
                machine.install(wheel_to_install)
        one.send(ROOT, ("tests", "pyproject.toml"), checks.SUITE)
        known = checks.facts(one)
        told(f"{one.name}: {known}")
        name = {"system": known["system"], "kernel": known["kernel"], "commit": commit()}
        if "mesh" in parts and len(machines) == 2:
            results["mesh"] = [f"{line} ({commit()})" for line in attempted(lambda: two_machines(*machines))]
            save(results)
        for other in machines[1:]:
            other.close()
        if "engines" in parts:
            for engine, answers in all_engines(one, known):
                put(results["engines"], {**name, "engine": engine, "contract": answers}, "engine")
                save(results)
                told(f"{one.name}: {engine}: {answers}")
        if "limits" in parts:
            for row in all_limits(one):
                put(results["limits"], {**name, **row}, "how")
                save(results)
                told(f"{one.name}: {row}")


def put(rows: list[dict[str, Any]], row: dict[str, Any], key: str) -> None:
    """Add a row, in the place of an earlier one about the same."""
    rows[:] = [old for old in rows if (old["system"], old[key]) != (row["system"], row[key])]
    rows.append(row)


def all_limits(machine: Machine) -> Iterator[dict[str, Any]]:
    """Start a daemon in each way that people do. Each way: who, what root does before, how the user starts it."""
    member = f"runuser -l {USER} -c 'mesh init home --nick home && mesh config set lend true'"
    service = f"{member} && mesh install-service --as {USER}"
    ways = (
        ("by root, from a login", "root", "true", INIT),
        ("by a user, from a login", USER, "true", INIT),
        ("by a lingering user, from a login", USER, f"loginctl enable-linger {USER}", ROOTLESS),
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


def all_engines(machine: Machine, known: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each engine of the machine with the contract's answers."""
    scope = "systemd-run --scope --quiet -p Delegate=yes"
    yield "process", checks.contract(machine, checks.PROCESSES, within=scope)
    checks.use_store(machine, containerd=False)
    yield f"Docker {known['docker']}, overlay2", checks.contract(machine, checks.CONTAINERS)
    checks.use_store(machine, containerd=True)
    yield f"Docker {known['docker']}, containerd's store", checks.contract(machine, checks.CONTAINERS)
    machine.run("systemctl start podman.socket")
    yield f"Podman {known['podman']}, as root", checks.contract(machine, checks.CONTAINERS, PODMAN)


def two_machines(one: Machine, two: Machine) -> list[str]:
    checks.use_store(one, containerd=False)
    checks.use_store(two, containerd=True)
    checks.mesh_of_two(one, two)
    lines = [
        f"{one.name} (overlay2) founded a mesh over a cable, and {two.name} (containerd's store) joined it by an invite."
    ]
    told(lines[0])
    found = checks.reclaimed_job_continues(one, two)
    told(str(found))
    lines.append(
        f"A job in an image that only {one.name} had was reclaimed there. {found['took_s']} s later it ran on {two.name}, which "
        f"had fetched the image, from step {found['resumed_at']}. Its attempts: {', '.join(found['nodes'])}; outcome: "
        f"{found['outcome']}; it counted to {checks.STEPS}: {'yes' if found['whole'] else 'no'}."
    )
    return lines


def attempted(work: Callable[[], list[str]]) -> list[str]:
    try:
        return work()
    except Failed as error:
        told(str(error))
        return [f"**no**: {' '.join(str(error).split())[:600]}"]


def save(results: dict[str, Any]) -> None:
    """Keep the results so far, and write the page."""
    RESULTS.write_text(json.dumps(results, indent=1))
    PAGE.write_text(page(results, time.strftime("%Y-%m-%d"), commit()))


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
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def told(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
