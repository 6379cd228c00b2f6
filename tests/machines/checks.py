"""What is tried on a machine: the core of the engine contract suite for each engine, and a mesh of two machines.

The contract's tests are those of `tests/execution`; the wheel's Python runs them on the machine. A mesh is founded and used by
the command line alone, as its users do.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from xml.etree import ElementTree

from tests.machines.machine import Failed, Machine

PYTHON = "/opt/pipx/venvs/campus-mesh/bin/python"
SUITE = "/opt/suite"
CORE = ("logs", "files", "exec", "freeze", "kill", "limits", "network")
TESTS_S, WAIT_S, CONDITION_S = 1500.0, 600.0, 240
ENGINES, SESSIONS, ESCAPES, GROUPS, PODMAN, WATCHDOG, APPTAINER, NETWORK = (
    f"tests/execution/test_{name}.py"
    for name in (
        *("engines", "sessions", "escapes", "groups"),
        *("docker_podman", "docker_watchdog", "apptainer", "guest_network"),
    )
)

# The aspects of the contract, and the tests that show each, for containers and for processes.
ALIKE = {
    "logs": (f"{ENGINES}::test_log_has_both_streams_completely",),
    "files": (f"{ENGINES}::test_guest_writes_and_node_reads_its_directories",),
    "exec": (f"{SESSIONS}::test_session_is_part_of_guest",),
    "freeze": (f"{ENGINES}::test_guest_stops_after_lease_and_resumes",),
    "kill": (f"{ENGINES}::test_kill_leaves_no_process",),
}
CONTAINERS = {
    **{aspect: tuple(f"{test}[docker]" for test in tests) for aspect, tests in ALIKE.items()},
    "limits": (
        f"{ESCAPES}::test_fork_bomb_stays_within_pids_limit",
        f"{ENGINES}::test_only_the_guest_over_memory_limit_ends[docker]",
    ),
    "network": (f"{ENGINES}::test_container_has_few_rights", f"{NETWORK}::test_guest_reaches_its_hosts_alone[docker]"),
}
ROOTLESS = {  # of an ordinary user; the engine's own tests start services of Podman that they may stop
    **CONTAINERS,
    "freeze": (*CONTAINERS["freeze"], f"{WATCHDOG}::test_lease_is_enforced_while_engine_hangs[rootless]"),
    "kill": (*CONTAINERS["kill"], f"{WATCHDOG}::test_guests_die_while_engine_hangs[rootless]"),
    "limits": (*CONTAINERS["limits"], f"{PODMAN}::test_podman_guest_is_limited_by_its_groups[rootless]"),
}
PROCESSES = {
    **{aspect: tuple(f"{test}[process]" for test in tests) for aspect, tests in ALIKE.items()},
    "freeze": (f"{GROUPS}::test_expired_lease_stops_guest_until_renewed[True]",),
    "limits": (f"{GROUPS}::test_memory_limit_covers_all_processes", f"{GROUPS}::test_pids_limit_is_enforced"),
    "network": (f"{GROUPS}::test_guest_without_network_has_loopback",),
}
UNPACKED = {  # Apptainer with an unpacked image, of an ordinary user
    **{aspect: tuple(f"{test}[apptainer]" for test in tests) for aspect, tests in ALIKE.items()},
    "limits": (f"{ENGINES}::test_only_the_guest_over_memory_limit_ends[apptainer]",),
    "network": (f"{APPTAINER}::test_guest_cannot_reach_the_machine",),
}
SAVED = {
    "saved": (
        "tests/execution/test_podman_criu.py::test_saved_guest_continues_in_another_podman",
        "tests/e2e/test_system_checkpoints.py::test_python_program_moves_between_two_podmans_bit_for_bit",
    )
}
ROOTLESS_DOCKER = "DOCKER_HOST=unix:///run/user/$(id -u)/docker.sock"
STEPS = 300
COUNT = """
n=0; if [ -n "$MESH_RESUME" ]; then n=$(cat $MESH_RESUME/n); echo "resumed at $n"; fi
save() { mkdir $MESH_CKPT_DIR/.new; echo $n > $MESH_CKPT_DIR/.new/n; mv $MESH_CKPT_DIR/.new $MESH_CKPT_DIR/step-$n; }
trap 'save; exit 85' TERM
while [ ! -e $MESH_WORK_DIR/end ] && [ $n -lt %d ]; do n=$((n + 1)); [ $((n %% 20)) = 0 ] && save; sleep 0.5; done
echo "counted $n"
"""


def facts(machine: Machine) -> dict[str, str]:
    """Return what a machine is: its system, kernel and programs."""
    script = """
    . /etc/os-release; echo "system=$PRETTY_NAME"
    echo "kernel=$(uname -r)"
    echo "systemd=$(systemctl --version | awk 'NR == 1 {print $2}')"
    echo "python=$(python3 -c 'import platform; print(platform.python_version())')"
    echo "docker=$(dockerd --version | awk '{print $3}' | tr -d ,)"
    echo "podman=$(podman version --format '{{.Version}}')"
    echo "criu=$(criu --version 2>/dev/null | awk 'NR == 1 {print $2}')"
    echo "apptainer=$(apptainer --version 2>/dev/null | awk '{print $NF}')"
    echo "groups=$(stat -fc %T /sys/fs/cgroup)"
    """
    return dict(line.split("=", 1) for line in machine.run(script).stdout.splitlines() if "=" in line)


def contract(
    machine: Machine, tests: dict[str, tuple[str, ...]], env: str = "", within: str = "", user: str = "root"
) -> dict[str, str]:
    """Run the tests; return, for each aspect, "ok", or why not."""
    wanted = " ".join(f"'{test}'" for group in tests.values() for test in group)
    command = (
        f"cd {SUITE} && rm -f ~/junit.xml && {within} env {env} MESH_TEST_WAIT_S={CONDITION_S} PYTHONDONTWRITEBYTECODE=1 "
        f"{PYTHON} -m pytest -q -p no:cacheprovider --timeout 600 --junitxml ~/junit.xml {wanted}"
    )
    done = machine.run(command, user=user, check=False, timeout_s=TESTS_S)
    report = machine.run("cat ~/junit.xml", user=user, check=False).stdout
    ended = _ended(report)
    if not ended:
        return dict.fromkeys(tests, f"no test ran: {(done.stdout + done.stderr).strip()[-300:]}")
    said = {}
    for aspect, group in tests.items():
        answers = [ended.get(test.rpartition("::")[2], "did not run") for test in group]
        said[aspect] = next((answer for answer in answers if answer != "ok"), "ok")
    return said


def _ended(report: str) -> dict[str, str]:
    """Return how each test of a JUnit report ended: "ok", or a reason."""
    if not report.strip():
        return {}
    found = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        problem = next((part for part in case if part.tag in {"failure", "error", "skipped"}), None)
        found[case.attrib["name"]] = (
            "ok" if problem is None else f"{problem.tag}: {problem.attrib.get('message', '')[:300]}"
        )
    return found


def use_store(machine: Machine, containerd: bool) -> None:
    """Let Docker keep its images in containerd's store, or in its own (overlay2)."""
    setting = json.dumps({"features": {"containerd-snapshotter": containerd}})
    file = "/etc/docker/daemon.json"
    machine.run(
        f"grep -qsF '{setting}' {file} || {{ mkdir -p /etc/docker && echo '{setting}' > {file} && systemctl restart docker; }}"
    )


def start_rootless_docker(machine: Machine, user: str) -> None:
    """Start this user's own Docker as a service of theirs, and wait until it answers."""
    scripts = "/usr/share/docker.io/contrib"
    service = (
        "-p Delegate=yes -p Restart=on-failure -p StartLimitIntervalSec=0"  # containerd may start too slowly for it
    )
    machine.run(
        f"systemd-run --user --unit docker {service} --setenv PATH=$PATH:/usr/sbin:/sbin:{scripts} {scripts}/dockerd-rootless.sh",
        user=user,
    )
    asks = (
        "curl -fs --unix-socket /run/user/$(id -u)/docker.sock http://localhost/_ping"  # trixie has no docker command
    )
    until(lambda: machine.run(asks, user=user, check=False).returncode == 0, "this user's Docker to answer")


def limits_of(machine: Machine, user: str, start: str) -> dict[str, Any]:
    """Start a daemon as `user`; return what limits a guest of its process engine, and what it says of its engines. Stop it."""
    # A guest's group is in the one that has its limits.
    script = "cat /proc/self/cgroup; cd /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup) && grep . *.max ../*.max"
    words = "mesh run --no-workdir --engine process --memory"
    try:
        machine.run(start, user=user, timeout_s=WAIT_S)
        engines = until(partial(_engines, machine, user), "the process engine to be offered")
        ran = machine.run(f"{words} 100M -- sh -c '{script}'", user=user, check=False)
        over = machine.run(f"{words} 60M -- python3 -c 'bytearray(150 << 20)'", user=user, check=False)
    finally:
        machine.run("mesh down", user=user, check=False)
    return {
        "group": next((line[3:] for line in ran.stdout.splitlines() if line.startswith("0::")), ran.stderr[-300:]),
        "unlimited": engines["process"]["unlimited"],
        "limits_by": engines["process"]["limits_by"],
        "bound": f"memory.max:{100 << 20}" in ran.stdout and "killed for memory" in over.stderr,
        "docker": engines.get("docker", {}).get("detail", ""),
    }


def _engines(machine: Machine, user: str) -> dict[str, Any]:
    done = machine.run("mesh status --json", user=user, check=False)
    found: dict[str, Any] = json.loads(done.stdout)["engines"] if done.returncode == 0 else {}
    return found if "docker" in found and found["process"]["ok"] else {}


def until(ready: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
    deadline = time.monotonic() + wait_s
    while True:
        value = ready()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failed(f"waited {wait_s:.0f} s for {what}")
        time.sleep(2)


def mesh_of_two(one: Machine, two: Machine) -> None:
    """Found a mesh over the cable: `one` invites `two`."""
    for machine in (one, two):
        cable = "$(ip -br link | awk '/52:54:00:00:01:0/ {print $1}')"
        machine.run(f"ip address replace {machine.address}/24 dev {cable} && ip link set {cable} up")
    one.run(
        f"mesh init lab --nick {one.name} && mesh config set bind {one.address} && mesh up --lend", timeout_s=WAIT_S
    )
    invite = one.run("mesh member invite --mine").stdout.split()[-1]
    two.run(
        f"mesh join {invite} --nick {two.name} && mesh config set bind {two.address} && mesh up --lend",
        timeout_s=WAIT_S,
    )
    for machine in (one, two):
        until(partial(_sees_both, machine), f"{machine.name} to see both nodes")


def _sees_both(machine: Machine) -> bool:
    done = machine.run("mesh nodes --json", check=False)
    rows = json.loads(done.stdout)["nodes"] if done.returncode == 0 else []
    return len([row for row in rows if row["state"] == "alive" and row["engines"]]) == 2


def reclaimed_job_continues(one: Machine, two: Machine) -> dict[str, Any]:
    """Run a job in an image that only `one` has; `one` is taken back, and `two` fetches the image and ends the job."""
    one.run(
        "mkdir -p /root/image/bin && cp /usr/bin/busybox /root/image/bin/ && cd /root/image/bin && "
        "for name in sh cat mkdir mv sleep echo; do ln -sf busybox $name; done && "
        "tar -C /root/image -c . | docker import - lab/box:1 && mesh image allow box --from lab/box:1",
        timeout_s=WAIT_S,
    )
    two.run("mesh pause")
    count = COUNT % STEPS
    one.run(f"cat > /root/count.sh <<'END'\n{count}\nEND")
    job = one.run(
        "cd /root && mkdir -p work && cp count.sh work/ && cd work && "
        "mesh submit --image box --ckpt ckpts --ckpt-mode rename -- sh count.sh",
        timeout_s=WAIT_S,
    ).stdout.split()[-1]
    until(lambda: _job(one, job).get("checkpoint"), "a checkpoint")
    two.run("mesh lend")
    begun = time.monotonic()
    one.run("mesh reclaim --grace 60s", timeout_s=WAIT_S)
    until(
        lambda: (state := _job(two, job)).get("node") == two.name and state["state"] == "running",
        "the job on the other machine",
    )
    took_s = time.monotonic() - begun
    state = until(lambda: (state := _job(two, job)).get("outcome") and state, "the job to end", 3 * WAIT_S)
    said = two.run(f"mesh logs {job}").stdout
    return {
        "nodes": [attempt["node"] for attempt in state["attempts"]],
        "resumed_at": next((line.split()[-1] for line in said.splitlines() if line.startswith("resumed at")), "none"),
        "whole": f"counted {STEPS}" in said,
        "outcome": state["outcome"]["kind"],
        "took_s": round(took_s),
    }


def _job(machine: Machine, job: str) -> dict[str, Any]:
    done = machine.run("mesh ps -a --json", check=False)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["jobs"] if done.returncode == 0 else []
    return next((row for row in rows if row["job"] == job), {})
