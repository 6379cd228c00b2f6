"""Test tiers: what a machine offers beyond plain Python. A missing tier is skipped by name, or fails where it is required."""

import os
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

REQUIRE = "MESH_REQUIRE_TIERS"
FRAMEWORKS_PYTHON = (Path(__file__).parents[1] / ".venv-frameworks").resolve() / "bin" / "python"


@cache
def docker_problem() -> str:
    """Return why no Docker engine is available, or an empty text."""
    import docker
    import docker.errors

    try:
        client = docker.from_env(timeout=60)
        client.ping()
        client.close()
    except (docker.errors.DockerException, OSError) as error:
        return f"no Docker engine answers ({str(error)[:100]})"
    return ""


@cache
def dockerd_problem() -> str:
    """Return why a test cannot start Docker engines of its own, or an empty text."""
    if shutil.which("dockerd") is None:
        return "dockerd is not installed"
    return "" if os.getuid() == 0 else "root is needed"


@cache
def netns_problem() -> str:
    """Return why no network namespaces can be made, or an empty text."""
    for program in ("ip", "iptables", "sysctl"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    name = f"mesh-probe-{os.getpid()}"
    for words in (["add", name], ["exec", name, "iptables", "-L"], ["del", name]):
        done = subprocess.run(["ip", "netns", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"ip netns {words[0]}: {done.stderr.strip()[:100]} (root is needed)"
    return ""


@cache
def frameworks_problem() -> str:
    """Return why the Hugging Face Trainer and Lightning are not available, or an empty text."""
    return _lacking("torch", "transformers", "accelerate", "lightning")


@cache
def trackers_problem() -> str:
    """Return why W&B, MLflow and TensorBoard are not available, or an empty text."""
    return _lacking("wandb", "mlflow", "tensorboard")


@cache
def jax_problem() -> str:
    """Return why JAX is not available, or an empty text."""
    return _lacking("jax")


def _lacking(*wanted: str) -> str:
    find = "from importlib.util import find_spec; raise SystemExit(not all(map(find_spec, %r)))"
    try:
        done = subprocess.run([FRAMEWORKS_PYTHON, "-c", find % (wanted,)], capture_output=True, check=False)
    except OSError:
        return "there is no .venv-frameworks (make frameworks)"
    return "" if done.returncode == 0 else f".venv-frameworks lacks one of {', '.join(wanted)} (make frameworks)"


@cache
def podman_problem() -> str:
    """Return why Podman is not available, or an empty text. Its default runtime lacks hybrid control groups; runc has them."""
    missing = [program for program in ("podman", "runc", "busybox") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    return "" if os.getuid() == 0 else "root is needed"


@cache
def rootless_problem() -> str:
    """Return why this user has no rootless Podman that can run guests, or an empty text."""
    if shutil.which("podman") is None:
        return "podman is not installed"
    if os.getuid() == 0:
        return "an ordinary user is needed"
    from mesh.execution.process.subtree import needs_linger

    if needs_linger():
        return "this user does not linger (loginctl enable-linger)"
    asked = ["podman", "info", "--format", "{{.Host.CgroupsVersion}} {{.Host.CgroupManager}}"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return "" if said == "v2 systemd" else f"no control groups of version 2 and systemd of this user ({said})"


@cache
def apptainer_problem() -> str:
    """Return why Apptainer can run no guests here, or an empty text."""
    from mesh.execution.process import subtree

    if shutil.which("apptainer") is None or shutil.which("busybox") is None:
        return "apptainer and busybox are needed (Debian sid)"
    if os.getuid() == 0:
        return "an ordinary user is needed"
    subtree.claim(1.0)
    group = subtree.make_group()
    kinds = group.kinds if group is not None else frozenset()
    if group is not None:
        group.remove()
    lacks = {"memory", "pids", "cpu"} - kinds
    return f"this user has no control groups for {', '.join(sorted(lacks))}" if lacks else ""


@cache
def browser_problem() -> str:
    """Return why no browser is available, or an empty text."""
    return "" if shutil.which("chromium") else "chromium is not installed (Debian: apt-get install chromium)"


@cache
def ssh_problem() -> str:
    """Return why OpenSSH's client is not available, or an empty text."""
    missing = [name for name in ("ssh-keygen", "ssh-add", "ssh-agent") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed (Debian: apt-get install openssh-client)" if missing else ""


@cache
def promtool_problem() -> str:
    """Return why promtool is not available, or an empty text."""
    return "" if shutil.which("promtool") else "promtool is not installed (Debian: apt-get install prometheus)"


@cache
def zsh_problem() -> str:
    """Return why zsh is not available, or an empty text."""
    return "" if shutil.which("zsh") else "zsh is not installed (Debian: apt-get install zsh)"


@cache
def strace_problem() -> str:
    """Return why the system calls of a program cannot be recorded, or an empty text."""
    if shutil.which("strace") is None:
        return "strace is not installed (Debian: apt-get install strace)"
    done = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return f"strace: {done.stderr.strip()[:100]}" if done.returncode else ""


@cache
def fish_problem() -> str:
    """Return why fish is not available, or an empty text."""
    return "" if shutil.which("fish") else "fish is not installed (Debian: apt-get install fish)"


@cache
def jupyter_problem() -> str:
    """Return why JupyterLab is not available, or an empty text."""
    if shutil.which("ss") is None:
        return "ss is not installed (Debian: apt-get install iproute2)"
    if not (FRAMEWORKS_PYTHON.parent / "jupyter-lab").exists():
        return "there is no JupyterLab in .venv-frameworks (make frameworks)"
    return ""


@cache
def dask_problem() -> str:
    """Return why Dask is not available, or an empty text."""
    return "" if find_spec("distributed") else "Dask distributed is not installed (pip install 'campus-mesh[dask]')"


@cache
def cc_problem() -> str:
    """Return why the emulation of NVIDIA's libraries cannot be compiled, or an empty text."""
    return "" if shutil.which("cc") else "no C compiler (cc) is installed"


@cache
def systemd_problem() -> str:
    """Return why no systemd manager can run in namespaces of its own, or an empty text."""
    for program in ("systemd-analyze", "systemctl", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True, check=False
    )
    return f"unshare: {done.stderr.strip()[:100]} (root is needed)" if done.returncode else ""


@cache
def bpf_problem() -> str:
    """Return why the kernel does not load our BPF programs, or an empty text."""
    for program in ("tc", "ip", "nsenter", "clang"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    from mesh.network.program import BuildError, Programs, object_file

    try:
        Programs.load(object_file()).close()
    except (BuildError, OSError) as error:
        return str(error)
    return netns_problem()


@cache
def criu_problem() -> str:
    """Return why CRIU cannot save and restore a container, or an empty text. CRIU 3.17 of Debian 12 fails on newer kernels."""
    from mesh.execution.docker.criu import Probe

    if problem := dockerd_problem():
        return problem
    version = subprocess.run(["dockerd", "--version"], capture_output=True, text=True, check=True).stdout
    return Probe(True).look("Docker", version, True).problem


@cache
def podman_criu_problem() -> str:
    """Return why CRIU cannot save and restore a container of Podman, or an empty text."""
    from mesh.execution.docker.criu import Probe

    if problem := podman_problem():
        return problem
    version = subprocess.run(["podman", "--version"], capture_output=True, text=True, check=True).stdout
    return Probe(True).look("Podman", version, True, "runc").problem


PROBES = {
    "apptainer": apptainer_problem,
    "criu": criu_problem,
    "dask": dask_problem,
    "docker": docker_problem,
    "dockerd": dockerd_problem,
    "podman": podman_problem,
    "podman_criu": podman_criu_problem,
    "rootless": rootless_problem,
    "netns": netns_problem,
    "frameworks": frameworks_problem,
    "trackers": trackers_problem,
    "jax": jax_problem,
    "cc": cc_problem,
    "systemd": systemd_problem,
    "bpf": bpf_problem,
    "browser": browser_problem,
    "jupyter": jupyter_problem,
    "promtool": promtool_problem,
    "ssh": ssh_problem,
    "strace": strace_problem,
    "zsh": zsh_problem,
    "fish": fish_problem,
    "long": lambda: "",
}


def required() -> set[str]:
    return {name for name in os.environ.get(REQUIRE, "").split(",") if name}
