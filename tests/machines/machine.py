"""A whole Debian under QEMU: its disk, built once for each suite, and running machines on copies of it.

A machine has KVM where that works (`MACHINES_ACCEL=kvm`), else the processor is emulated: ten to twenty times slower.
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PACKAGES = (
    *(
        "passwd",
        "linux-image-cloud-amd64",
        "systemd",
        "systemd-sysv",
        "libpam-systemd",
        "udev",
        "dbus",
        "dbus-user-session",
    ),
    *(
        "iproute2",
        "iptables",
        "kmod",
        "procps",
        "openssh-server",
        "ca-certificates",
        "busybox-static",
        "python3",
        "pipx",
    ),
    *("docker.io", "containerd", "runc", "tini", "podman", "crun", "catatonit", "uidmap", "passt", "fuse-overlayfs"),
    *("rootlesskit", "slirp4netns", "curl"),
)
MORE = {"sid": ("docker-cli", "apptainer", "criu"), "trixie": ("criu",)}
# NumPy's later wheels need a processor with CMPXCHG16B, which some kernels do not survive under emulation.
CONSTRAINTS = "numpy<2.4\n"
TEST_PACKAGES = ("pytest>=8", "pytest-asyncio>=0.24", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100")
USER = "alice"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")  # the host's: a proxy on the way may have its own
DISK = "6G"
BOOT_S = 900.0
NICE = 5
EMULATED = ("tcg,thread=multi", "max,cx16=off")  # with CMPXCHG16B, the kernel of trixie (6.12) panics
# On a busy host, kernel 7.2 hung while it began to use the HPET. Measures against faults of processors cost an emulated one time.
KERNEL_ARGS = "console=ttyS0 root=/dev/vda rw quiet tsc=reliable mitigations=off"
ACCEL = {"kvm": ("kvm", "host"), "tcg": EMULATED}

UNITS = {
    "host-keys.service": "[Unit]\nBefore=ssh.service\n[Service]\nType=oneshot\nExecStart=/usr/bin/ssh-keygen -A\n"
    "[Install]\nWantedBy=multi-user.target\n",
}
NETWORKS = {
    "10-wan.network": "[Match]\nMACAddress=52:54:00:00:00:01\n[Network]\nDHCP=ipv4\n",
    "20-cable.network": "[Match]\nMACAddress=52:54:00:00:01:0*\n[Network]\nLinkLocalAddressing=no\n",
}


class Failed(Exception):
    """A machine cannot be built or does not come up; the text says why."""


def tools_missing() -> list[str]:
    return [
        tool
        for tool in ("mmdebstrap", "qemu-system-x86_64", "mkfs.ext4", "ssh", "qemu-img")
        if shutil.which(tool) is None
    ]


def mirror() -> str:
    """Return the host's mirror of Debian, or the usual one."""
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for line in path.read_text().splitlines():
            if line.startswith("URIs:") and "debian.org/debian" in line and "security" not in line:
                return line.split()[1]
    return "http://deb.debian.org/debian"


def build(place: Path, suite: str, wheel: Path) -> None:
    """Make the disk of a suite in `place`, with the wheel. An earlier disk is replaced."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / "key"], check=True)
    (place / "constraints").write_text(CONSTRAINTS)
    script = place / "inside"
    script.write_text(_inside(wheel.name))
    root = place / "root"
    hooks = [
        f'cp {shlex.quote(str(wheel))} {shlex.quote(str(place / "constraints"))} {shlex.quote(str(script))} "$1/root/"',
        f'install -D -m 600 {shlex.quote(str(place / "key.pub"))} "$1/root/.ssh/authorized_keys"',
    ]
    if CERTIFICATES.exists():
        hooks.append(f'cp {CERTIFICATES} "$1{CERTIFICATES}"')
    hooks.append('chroot "$1" env -i HOME=/root PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh /root/inside')
    done = subprocess.run(
        [
            *("nice", "-n", str(NICE), "mmdebstrap", "--variant=apt", "--mode=root"),
            *("--aptopt=APT::Install-Recommends false", "--aptopt=Acquire::Check-Valid-Until false"),
            f"--include={','.join((*PACKAGES, *MORE[suite]))}",
            *(f"--customize-hook={hook}" for hook in hooks),
            *(suite, str(root), f"deb [trusted=yes] {mirror()} {suite} main"),
        ],
        stdout=(place / "build.log").open("wb"),
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{suite} cannot be built; its log is {place / 'build.log'}")
    for name, pattern in (("vmlinuz", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        shutil.copy(next(iter((root / "boot").glob(pattern))), place / name)
    subprocess.run(["mkfs.ext4", "-q", "-d", root, place / "disk", DISK], check=True)
    shutil.rmtree(root)


def _inside(wheel: str) -> str:
    """Return what is done inside the new system: users, units, and the wheel by pipx."""
    lines = [
        "set -eu",
        f"printf '[global]\\ncert = {CERTIFICATES}\\n' >/etc/pip.conf",
        f"pipx install --global --pip-args '-c /root/constraints' /root/{wheel}",
        f"pipx inject --global campus-mesh {' '.join(map(shlex.quote, TEST_PACKAGES))}",
        f"useradd --create-home --shell /bin/bash {USER}",
        f"install -d -o {USER} -g {USER} -m 700 /home/{USER}/.ssh",
        f"install -o {USER} -g {USER} -m 600 /root/.ssh/authorized_keys /home/{USER}/.ssh/authorized_keys",
        f"usermod -p '*' {USER}",  # no password, but not locked: sshd lets its key in
        "rm -f /etc/ssh/ssh_host_*",
        "systemctl enable ssh.service systemd-networkd.service podman.socket",
        "systemctl disable systemd-networkd-wait-online.service || true",
    ]
    for name, text in UNITS.items():
        lines += [f"cat >/etc/systemd/system/{name} <<'END'\n{text}END", f"systemctl enable {name}"]
    for name, text in NETWORKS.items():
        lines.append(f"cat >/etc/systemd/network/{name} <<'END'\n{text}END")
    return "\n".join(lines) + "\n"


class Machine:
    """A running machine on a copy of a suite's disk. `number` sets its ssh port and the address of its cable."""

    def __init__(self, place: Path, name: str, number: int, cable: str = "") -> None:
        self.name, self.address = name, f"10.77.0.{number}"
        self._place, self._port, self._cable = place, 22_000 + os.getpid() % 1000 + number, cable
        self._number = number
        self._process: subprocess.Popen[bytes] | None = None
        self._disk, self.log = place / f"{name}.qcow2", place / f"{name}.log"

    def start(self) -> None:
        """Boot it, without waiting."""
        base = self._place / "disk"
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", self._disk], check=True)
        accel, processor = ACCEL[os.environ.get("MACHINES_ACCEL", "tcg")]
        cable = ["-nic", f"socket,{self._cable},model=virtio-net-pci,mac=52:54:00:00:01:0{self._number}"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(
                        "nice",
                        "-n",
                        str(NICE),
                        "qemu-system-x86_64",
                        "-accel",
                        accel,
                        "-cpu",
                        processor,
                        "-m",
                        "3072",
                        "-smp",
                        "2",
                    ),
                    *(
                        "-nographic",
                        "-no-reboot",
                        "-kernel",
                        self._place / "vmlinuz",
                        "-initrd",
                        self._place / "initrd",
                    ),
                    *("-machine", "pc,hpet=off", "-append", KERNEL_ARGS),
                    *("-drive", f"file={self._disk},if=virtio,format=qcow2,cache=unsafe"),
                    "-nic",
                    f"user,model=virtio-net-pci,mac=52:54:00:00:00:01,hostfwd=tcp:127.0.0.1:{self._port}-:22",
                    *(cable if self._cable else []),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it takes commands."""
        deadline = time.monotonic() + BOOT_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None or "Kernel panic" in self.log.read_text(errors="replace"):
                raise Failed(f"{self.name} does not boot; its console is {self.log}")
            if self.run("systemctl is-system-running --wait || true", check=False, timeout_s=300).returncode == 0:
                return
            time.sleep(3)
        raise Failed(f"{self.name} does not answer; its console is {self.log}")

    def run(
        self, command: str, *, user: str = "root", check: bool = True, timeout_s: float = 600.0
    ) -> "subprocess.CompletedProcess[str]":
        """Run a shell command, of users other than root from a new login; Failed if it fails and `check` is set."""
        done = self._ssh(command, user, timeout_s)
        if check and done.returncode:
            said = (done.stdout + done.stderr)[-1500:]
            raise Failed(f"{self.name}: {command[:200]!r} failed ({done.returncode}): {said}")
        return done

    def install(self, wheel: Path) -> None:
        """Install another wheel of the product; what it needs stays as it is."""
        self.send(wheel.parent, (wheel.name,), "/root")
        self.run(f"pipx runpip --global campus-mesh install --quiet --no-deps --force-reinstall /root/{wheel.name}")

    def send(self, root: Path, names: tuple[str, ...], place: str) -> None:
        """Copy files and trees below `root` to a directory of the machine."""
        tar = subprocess.run(
            ["tar", "-C", root, "--exclude=__pycache__", "-cz", *names], capture_output=True, check=True
        )
        done = self._ssh(f"mkdir -p {place} && tar -C {place} -xz --no-same-owner", "root", 600.0, tar.stdout)
        if done.returncode:
            raise Failed(f"{self.name}: files cannot be sent: {done.stderr[-300:]}")

    def _ssh(
        self, command: str, user: str, timeout_s: float, given: bytes | None = None
    ) -> "subprocess.CompletedProcess[str]":
        options = {
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
            "ConnectTimeout": "120",
            "BatchMode": "yes",
        }
        if user == "root":  # one login for all commands: each takes four to twelve seconds under emulation
            options |= {
                "ControlMaster": "auto",
                "ControlPersist": "600",
                "ControlPath": str(self._place / f"login-{self._port}"),
            }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        login = ["ssh", *words, "-i", str(self._place / "key"), "-p", str(self._port), f"{user}@127.0.0.1", command]
        try:
            done = subprocess.run(login, input=given or b"", capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(login, 124, "", f"no answer within {timeout_s:g} s")
        output, errors = (said.decode(errors="replace") for said in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(login, done.returncode, output, errors)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.run("poweroff", check=False, timeout_s=60)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._disk.unlink(missing_ok=True)
