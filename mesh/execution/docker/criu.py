"""Support for system checkpoints on this machine: CRIU, the kernel, the engine and the GPU driver.

`Probe` collects facts; `judge` decides without I/O. Docker calls CRIU itself if it was started as experimental (its `checkpoint`
came with 1.13 and is still experimental); Podman always, through its OCI runtime, as root. The driver can suspend GPU memory
since 570, and CRIU 4.0 has a plugin for it (cuda-checkpoint's README; criu, plugins/cuda/README.md).
"""

import os
import re
import shutil
import subprocess
from hashlib import blake2b
from pathlib import Path

import msgspec

from placement.advert import MAX_LINE, SystemCheckpoints

LEAST_CUDA, LEAST_DRIVER = (4, 0), (570, 0)
CANNOT_RESTORE = (28,)  # 28.5 binds the network of a process that it has not restored yet (tried)
LEAST_PODMAN = (5, 8)  # the oldest that was tried
PODMAN_RUNTIME = "runc"  # the only one tried: crun needs a library (libcriu) that Debian does not have
CHECK_S = 30.0  # timeout of `criu check`, which takes 0.1 s
ERRORS_TOLD = 2
PLUGIN = "cuda_plugin.so"
PLUGIN_PATHS = ("/usr/lib/criu", "/usr/local/lib/criu", "/usr/lib/x86_64-linux-gnu/criu", "/usr/libexec/criu")
NVIDIA = Path("/proc/driver/nvidia")
RUNC_CONF = Path("/etc/criu/runc.conf")  # read by CRIU under runc by default (tried)
CPU_KEYS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")


class Facts(msgspec.Struct, frozen=True):
    """Facts about this machine.

    `check`: the error of `criu check`, empty if it passes; `cpu`: architecture and features; `gpus`: models; `plugin` and
    `tool`: CRIU's CUDA plugin and the program that it runs are installed; `closes`: a program with an open TCP connection is
    saved too, and finds the connection closed; `runtime`: the engine's OCI runtime.
    """

    allowed: bool = False
    root: bool = False
    engine: str = ""
    engine_version: str = ""
    experimental: bool = False
    criu: str = ""
    check: str = ""
    kernel: str = ""
    cpu: str = ""
    driver: str = ""
    gpus: tuple[str, ...] = ()
    plugin: bool = False
    tool: bool = False
    closes: bool = False
    runtime: str = ""


def judge(facts: Facts) -> SystemCheckpoints:
    """Return what this node can offer, and why not more."""
    problem = _problem(facts)
    if problem:
        return SystemCheckpoints(problem=_line(problem), gpu_problem=_line(problem))
    platform = (
        f"{facts.cpu}, Linux {kernel_series(facts.kernel)}, {facts.engine} {facts.engine_version}, "
        f"CRIU {'.'.join(map(str, version_of(facts.criu)))}{', closes connections' if facts.closes else ''}"
    )
    gpu_problem = _gpu_problem(facts)
    gpu_platform = "" if gpu_problem else f"{platform}, driver {facts.driver}, {' + '.join(sorted(facts.gpus))}"
    return SystemCheckpoints(_line(platform), "", _line(gpu_platform), _line(gpu_problem))


def _problem(facts: Facts) -> str:
    if not facts.allowed:
        return "its owner has not allowed them (system_checkpoints = true in config.toml)"
    if facts.engine not in {"Docker", "Podman"}:
        return f"they need Docker or Podman; its engine is {facts.engine or 'none'}"
    if facts.engine == "Podman" and version_of(facts.engine_version) < LEAST_PODMAN:
        return f"they were not tried with Podman older than {'.'.join(map(str, LEAST_PODMAN))}"
    if facts.engine == "Podman" and facts.runtime != PODMAN_RUNTIME:
        return f'its Podman runs containers by {facts.runtime}, not runc (runtime = "runc" in containers.conf)'
    if facts.engine == "Docker" and version_of(facts.engine_version) >= CANNOT_RESTORE:
        return "Docker 28 restores no container that has a network of its own (containerd's issue 12141)"
    if not facts.root:
        return "its daemon is not root, and engines restore only from a directory of root's"
    if not facts.experimental:
        return 'its engine was not started as experimental ("experimental": true in daemon.json)'
    if not facts.criu:
        return "criu is not installed"
    if not version_of(facts.criu):
        return f"criu's version is unknown ({facts.criu})"
    if facts.check:
        return f"`criu check` fails with CRIU {facts.criu} on Linux {facts.kernel}: {facts.check}"
    return ""


def _gpu_problem(facts: Facts) -> str:
    if not facts.driver:
        return "this machine has no NVIDIA GPU"
    if version_of(facts.driver) < LEAST_DRIVER:
        return f"GPU jobs need driver {LEAST_DRIVER[0]} or newer, it has {facts.driver}"
    if version_of(facts.criu) < LEAST_CUDA:
        return f"GPU jobs need CRIU {LEAST_CUDA[0]} or newer, it has {facts.criu}"
    if not facts.plugin:
        return f"GPU jobs need CRIU's plugin for CUDA ({PLUGIN}), which is not installed"
    return "" if facts.tool else "GPU jobs need NVIDIA's cuda-checkpoint, which is not installed"


def version_of(words: str) -> tuple[int, ...]:
    """Return the first version number in a text: `Version: 4.2` gives (4, 2); empty if there is none."""
    found = re.search(r"[0-9]{1,9}(?:\.[0-9]{1,9})*", words)
    return tuple(map(int, found[0].split("."))) if found is not None else ()


def kernel_series(release: str) -> str:
    """Return the series of a kernel release: `6.1.0-18-amd64` gives 6.1."""
    return ".".join(map(str, version_of(release)[:2]))


def cpu_features(machine: str, cpuinfo: str) -> str:
    """Return the architecture and a hash of the first processor's model and features in /proc/cpuinfo, which CRIU compares."""
    said: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        said.setdefault(key.strip(), " ".join(sorted(value.split())))
    kept = "\n".join(f"{key}={said.get(key, '')}" for key in CPU_KEYS)
    return f"{machine} {blake2b(kept.encode(errors='replace'), digest_size=4).hexdigest()}"


def closes_connections(conf: str) -> bool:
    """Return whether CRIU's configuration for runc closes TCP connections."""
    return any(line.split("#")[0].strip() == "tcp-close" for line in conf.splitlines())


def last_words(said: str) -> str:
    """Return the first errors of CRIU's log without source positions; later ones only repeat the failure."""
    errors = [line for line in said.splitlines() if "Error" in line][:ERRORS_TOLD]
    told = [re.sub(r"^.*?Error\s*(\([^)]*\))?:?\s*", "", error) for error in errors]
    return "; ".join(told) if told else said.strip()[-100:]


def _line(words: str) -> str:
    """Return a text as adverts may carry it: printable and short."""
    return "".join(sign if sign.isprintable() else " " for sign in words)[:MAX_LINE]


class Probe:
    """Collects the facts, again only after the engine, criu or its configuration changed. Blocks. `allowed`: by the owner."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._asked: tuple[object, ...] | None = None
        self._found = SystemCheckpoints()

    def look(self, engine: str, version: str, experimental: bool, runtime: str = "") -> SystemCheckpoints:
        path = shutil.which("criu")
        asked = (
            engine,
            version,
            experimental,
            runtime,
            path,
            _read(RUNC_CONF),
            Path(path).stat().st_mtime_ns if path else 0,
        )
        if asked != self._asked:
            facts = Facts(self._allowed, os.getuid() == 0, engine, version, experimental, runtime=runtime)
            self._found, self._asked = judge(_look_at(facts, path)), asked
        return self._found


def _look_at(facts: Facts, criu: str | None) -> Facts:
    if not facts.allowed:
        return facts
    driver, gpus = _nvidia()
    uname = os.uname()
    places = [os.environ.get("CRIU_LIBS_DIR", ""), *PLUGIN_PATHS]
    return msgspec.structs.replace(
        facts,
        criu=".".join(map(str, version_of(_say(criu, "--version")[1]))) if criu else "",
        check=_check(criu) if criu else "",
        kernel=uname.release,
        cpu=cpu_features(uname.machine, _read(Path("/proc/cpuinfo"))),
        driver=driver,
        gpus=gpus,
        plugin=any(Path(place, PLUGIN).exists() for place in places if place),
        tool=shutil.which("cuda-checkpoint") is not None,
        closes=closes_connections(_read(RUNC_CONF)),
    )


def _check(criu: str) -> str:
    code, said = _say(criu, "check")
    return "" if code == 0 else last_words(said) or f"exit {code}"


def _say(*command: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr


def _nvidia() -> tuple[str, tuple[str, ...]]:
    """Return the driver's version and the GPU models from /proc (`NVRM version: ... Kernel Module  570.86.15  ...`)."""
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", _read(NVIDIA / "version"))
    models = [re.search(r"^Model:\s*(.*)$", _read(path), re.M) for path in sorted(NVIDIA.glob("gpus/*/information"))]
    return found[1] if found is not None else "", tuple(model[1].strip() for model in models if model is not None)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
