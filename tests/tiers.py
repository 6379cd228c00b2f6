"""What this machine can run beyond plain Python. A missing tier is skipped by name, or fails where it is required."""

import os
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

REQUIRE = "MESH_REQUIRE_TIERS"
FRAMEWORKS_PYTHON = Path(__file__).parents[1] / ".venv-frameworks" / "bin" / "python"


@cache
def docker_problem() -> str:
    """Why there is no Docker engine to test with; empty if there is one."""
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
    """Why a test cannot have Docker engines of its own here; empty if it can."""
    if shutil.which("dockerd") is None:
        return "dockerd is not installed"
    return "" if os.getuid() == 0 else "root is needed"


@cache
def netns_problem() -> str:
    """Why no network namespaces can be made here; empty if they can."""
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
    """Why there is no Hugging Face Trainer and Lightning to test with; empty if there is."""
    find = "from importlib.util import find_spec; raise SystemExit(not all(map(find_spec, %r)))"
    wanted = ("torch", "transformers", "accelerate", "lightning")
    try:
        done = subprocess.run([FRAMEWORKS_PYTHON, "-c", find % (wanted,)], capture_output=True, check=False)
    except OSError:
        return "there is no .venv-frameworks (make frameworks)"
    return "" if done.returncode == 0 else f".venv-frameworks lacks one of {', '.join(wanted)} (make frameworks)"


@cache
def podman_problem() -> str:
    """Why there is no Podman to test with; empty if there is. Its usual runtime does not know mixed control groups, runc does."""
    missing = [program for program in ("podman", "runc", "busybox") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    return "" if os.getuid() == 0 else "root is needed"


@cache
def browser_problem() -> str:
    """Why there is no browser to test with; empty if there is one."""
    return "" if shutil.which("chromium") else "chromium is not installed (Debian: apt-get install chromium)"


@cache
def promtool_problem() -> str:
    """Why Prometheus's own tool cannot be asked; empty if it can."""
    return "" if shutil.which("promtool") else "promtool is not installed (Debian: apt-get install prometheus)"


@cache
def zsh_problem() -> str:
    """Why completion cannot be tried in zsh; empty if it can."""
    return "" if shutil.which("zsh") else "zsh is not installed (Debian: apt-get install zsh)"


@cache
def fish_problem() -> str:
    """Why completion cannot be tried in fish; empty if it can."""
    return "" if shutil.which("fish") else "fish is not installed (Debian: apt-get install fish)"


@cache
def jupyter_problem() -> str:
    """Why there is no JupyterLab to test with; empty if there is one."""
    if shutil.which("ss") is None:
        return "ss is not installed (Debian: apt-get install iproute2)"
    if not (FRAMEWORKS_PYTHON.parent / "jupyter-lab").exists():
        return "there is no JupyterLab in .venv-frameworks (make frameworks)"
    return ""


@cache
def dask_problem() -> str:
    """Why there is no Dask cluster to test with; empty if there is."""
    return "" if find_spec("distributed") else "Dask distributed is not installed (pip install 'campus-mesh[dask]')"


@cache
def cc_problem() -> str:
    """Why the doubles of NVIDIA's libraries cannot be compiled here; empty if they can."""
    return "" if shutil.which("cc") else "no C compiler (cc) is installed"


@cache
def systemd_problem() -> str:
    """Why no manager of systemd can be run here, in namespaces of its own; empty if it can."""
    for program in ("systemd-analyze", "systemctl", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True, check=False
    )
    return f"unshare: {done.stderr.strip()[:100]} (root is needed)" if done.returncode else ""


@cache
def bpf_problem() -> str:
    """Why the kernel takes no programs of ours here; empty if it does."""
    for program in ("tc", "ip", "nsenter", "clang"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    from mesh.edge.program import BuildError, Programs, object_file

    try:
        Programs.load(object_file()).close()
    except (BuildError, OSError) as error:
        return str(error)
    return netns_problem()


@cache
def criu_problem() -> str:
    """Why no container can be saved and restored here; empty if it can. CRIU 3.17, of Debian 12, cannot on newer kernels."""
    from mesh.engine.criu import Probe

    return dockerd_problem() or Probe(True).look("Docker", "", True).problem


PROBES = {
    "criu": criu_problem,
    "dask": dask_problem,
    "docker": docker_problem,
    "dockerd": dockerd_problem,
    "podman": podman_problem,
    "netns": netns_problem,
    "frameworks": frameworks_problem,
    "cc": cc_problem,
    "systemd": systemd_problem,
    "bpf": bpf_problem,
    "browser": browser_problem,
    "jupyter": jupyter_problem,
    "promtool": promtool_problem,
    "zsh": zsh_problem,
    "fish": fish_problem,
}


def required() -> set[str]:
    return {name for name in os.environ.get(REQUIRE, "").split(",") if name}
