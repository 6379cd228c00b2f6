"""A Slurm cluster on this machine: a controller and nodes in network namespaces, with all state in one directory.

Debian's slurmctld, slurmd and munged run as plain processes: no service, nothing under /etc, no systemd.
"""

import contextlib
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.bench.training import Kind, Trace, until
from tests.e2e.commands import PROJECT
from tests.netns.lan import Host, Lan

NEEDS = (
    "slurmctld",
    "slurmd",
    "munged",
    "sbatch",
    "squeue",
    "srun",
    "scontrol",
    "nsenter",
    "unshare",
    "ip",
    "iptables",
)
PACKAGES = "slurmctld slurmd slurm-client munge iproute2 iptables util-linux"
UP_S = 60.0


@dataclass(frozen=True)
class Timings:
    """Slurm's timeouts; docs/explanation/slurm.md gives the reasons."""

    slurmd_timeout_s: int
    message_timeout_s: int
    tcp_timeout_s: int
    cred_expire_s: int  # also the wait of a requeued job before it may start
    scheduler: str


SHIPPED = Timings(300, 10, 2, 120, "batch_sched_delay=3,sched_interval=60,bf_interval=30")
# Slurm rejects a shorter lifetime of credentials. Timeouts of 3 and 2 s detect a lost node about 3 s later.
QUICK = Timings(2, 1, 1, 5, "batch_sched_delay=0,sched_interval=1,sched_min_interval=1,bf_interval=1")

CONF = """\
ClusterName=bench
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket,cred_expire={timings.cred_expire_s}
StateSaveLocation={home}/state
SlurmctldPidFile={home}/slurmctld.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdSpoolDir={home}/%n
SlurmdPidFile={home}/%n.pid
SlurmdLogFile={home}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SchedulerType=sched/backfill
SchedulerParameters={timings.scheduler}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
RequeueExit=85
ReturnToService=2
KillWait={grace_s}
SlurmdTimeout={timings.slurmd_timeout_s}
MessageTimeout={timings.message_timeout_s}
TCPTimeout={timings.tcp_timeout_s}
{nodes}
PartitionName=guests Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace_s} MaxTime=INFINITE State=UP
PartitionName=owners Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""

# srun, because only a step receives the preemption signal in time; the batch script does not.
SCRIPT = """\
#!/bin/sh
export MESH_NODE=$SLURMD_NODENAME MESH_ATTEMPT=${{SLURM_RESTART_COUNT:-0}} MESH_CTL_DIR={home} MESH_OUT_DIR={home}
export MESH_CKPT_DIR={checkpoints} TRACE={trace}
mkdir -p $MESH_CKPT_DIR
export MESH_RESUME=$(ls -d $MESH_CKPT_DIR/step-* 2>/dev/null | sort | tail -n 1)
exec srun {command}
"""


class Cluster:
    """A cluster. With `shared`, trainings find their checkpoints in a shared directory; without it, they start over."""

    def __init__(self, lan: Lan, nodes: int, *, shared: bool, timings: Timings, grace_s: int) -> None:
        self.home = lan.directory
        self.shared = shared
        lan.switch("br0")
        self.control, *self.nodes = [lan.host(name) for name in ("control", *(f"s{n}" for n in range(nodes)))]
        self._owners: dict[str, str] = {}
        for number, host in enumerate((self.control, *self.nodes)):
            host.plug("br0", f"10.78.0.{number + 1}/24")
            host.state.mkdir()
        names = {"controller": self.control.name, "address": self.control.address, "home": self.home}
        lines = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=1" for host in self.nodes)
        self.conf.write_text(CONF.format(**names, timings=timings, grace_s=grace_s, nodes=lines))
        (self.home / "cgroup.conf").touch()
        (self.home / "state").mkdir()
        self._authenticate()
        self.control.daemon = self._start(self.control, "slurmctld", "-D", "-f", str(self.conf))
        for host in self.nodes:
            self._up(host)
        until(lambda: all(self._state(host.name) == "idle" for host in self.nodes), "the cluster to be up", UP_S)

    @property
    def conf(self) -> Path:
        return self.home / "slurm.conf"

    # --- training.System

    def submit(self, trace: Trace, steps: int, pace_s: float) -> str:
        home = self.home / f"{trace.path.name}-job"
        home.mkdir()
        checkpoints = home / "ckpts" if self.shared else f"{home}/ckpts-$MESH_ATTEMPT"
        command = shlex.join([sys.executable, str(PROJECT / "count.py"), str(steps), str(pace_s)])
        script = home / "script"
        script.write_text(SCRIPT.format(home=home, checkpoints=checkpoints, trace=trace.path, command=command))
        self._sbatch("--open-mode=append", f"--output={home}/log", str(script))
        return home.name

    def depart(self, kind: Kind, node: str) -> None:
        host = self._host(node)
        if kind == "notice":  # the owner's job preempts the guest's
            wants = ("-p", "owners", "-w", node, f"--output={host.state}/owner", "--wrap", "sleep infinity")
            self._owners[node] = self._sbatch(*wants)
        elif kind == "killed":
            host.power_off()
        else:
            # A machine without its shared directory would hang at its next write; here it stops at once.
            for pid in host.processes():
                if b"count.py" in _command(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
            host.cut_off()

    def come_back(self, kind: Kind, node: str) -> None:
        if kind == "notice":
            self._at_control("scancel", self._owners.pop(node))
        elif kind == "killed":
            self._up(self._host(node))
        else:
            self._host(node).reconnect()

    def result(self, job: str) -> str:
        path = self.home / job / "digest.txt"
        return path.read_text() if path.exists() else ""

    # --- arrays

    def array(self, jobs: int) -> None:
        """Submit jobs that do nothing. They leave no output files, which the mesh would keep."""
        self._sbatch(f"--array=0-{jobs - 1}", "--output=/dev/null", "--wrap", "true")

    def queued(self) -> bool:
        """Return whether any job waits or runs."""
        return bool(self._at_control("squeue", "--noheader").strip())

    # --- processes

    def _authenticate(self) -> None:
        """Start one munged for all nodes: they reach it through a file, which every namespace sees. `--force` allows that."""
        home = self.home / "munge"
        home.mkdir(mode=0o755)
        (home / "key").write_bytes(secrets.token_bytes(128))
        (home / "key").chmod(0o600)
        names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        places = [f"--{option}={home / name}" for option, name in names.items()]
        self._start(self.control, "munged", "--foreground", "--force", *places)
        until((home / "socket").exists, "munged to be up", UP_S)

    def _up(self, host: Host) -> None:
        host.daemon = self._start(host, "slurmd", "-D", "-f", str(self.conf))

    def _start(self, host: Host, *command: str) -> "subprocess.Popen[bytes]":
        """Start a daemon that sees this host name. `ip netns exec` would hide the cgroups that slurmd looks for."""
        named = f"hostname {host.name} && exec {shlex.join(command)}"
        with (host.state / "out").open("ab") as file:
            return subprocess.Popen(
                [*self._within(host), "unshare", "--uts", "sh", "-c", named],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self._environment,
                start_new_session=True,
            )

    def _within(self, host: Host) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{host.namespace}"]

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def _at_control(self, *command: str) -> str:
        done = subprocess.run(
            [*self._within(self.control), *command],
            capture_output=True,
            text=True,
            check=True,
            env=self._environment,
        )
        return done.stdout

    def _sbatch(self, *options: str) -> str:
        return self._at_control("sbatch", "--parsable", *options).strip()

    def _state(self, node: str) -> str:
        """Return the job's state in Slurm's words; empty while the controller does not answer."""
        try:
            found = re.search(r"State=(\w+\*?)", self._at_control("scontrol", "show", "node", node))
        except subprocess.CalledProcessError:
            return ""
        return found[1].lower() if found else ""

    def _host(self, name: str) -> Host:
        return next(host for host in self.nodes if host.name == name)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
