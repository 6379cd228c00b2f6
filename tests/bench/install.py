"""Installation as users do it: sdist and wheel into a new environment, pipx, uv, and from a clone to the finished demo.

The clone contains what is committed. Pip uses its configured index; its cache and the system packages stay unchanged.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.harness import not_run, row, write  # noqa: E402

DEMO_S = 90.0
ROUNDS = 5
UV = Path(sys.executable).with_name("uv")
FIRST_S, DEPENDENCIES_MIB = 8.0, 60
TOOLS = {"pip", "setuptools", "_distutils_hack", "pkg_resources"}  # what a new environment has
OURS = {"mesh", "membership", "placement", "ckptstore", "cuda_guard", "sim"}
SHARED = (
    "share/man/man1/mesh.1",
    "share/bash-completion/completions/mesh",
    "share/zsh/site-functions/_mesh",
    "share/fish/vendor_completions.d/mesh.fish",
    "share/systemd/user/campus-mesh.service",
)


def timed(words: Sequence[str | Path], **more: Any) -> tuple[float, str]:
    """Run a command that must succeed; return its seconds and its output."""
    begun = time.perf_counter()
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **more)
    taken = time.perf_counter() - begun
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(map(str, words))}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return taken, done.stdout


def environment(place: Path, *packages: str | Path) -> Path:
    timed([sys.executable, "-m", "venv", place])
    if packages:
        timed([place / "bin" / "pip", "install", "--quiet", *packages])
    return place / "bin"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", action="store_true", help="Also run `make demo` in a new clone.")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="mesh-install-") as base:
        here = Path(base)
        source, dist = here / "source", here / "dist"
        timed(["git", "clone", "--quiet", ROOT, source])
        _, commit = timed(["git", "-C", source, "describe", "--always", "--abbrev=12", "--exclude=*"])
        tools = environment(here / "tools", "build", "pipx")
        built, _ = timed([tools / "python", "-m", "build", "--outdir", dist, source])
        rows.append(row("sdist, and a wheel from it", [built], "s", goal="builds", met=True))
        (wheel,) = dist.glob("*.whl")
        (archive,) = dist.glob("*.tar.gz")
        for name, package in (("wheel", wheel), ("sdist", archive)):
            place = here / name
            environment(place)
            taken, _ = timed([place / "bin" / "pip", "install", "--quiet", package])
            check(place, commit)
            rows.append(row(f"the {name}, into a new environment", [taken], "s", goal="installs whole", met=True))
        rows += first_nodes(here, wheel)
        home = {"PIPX_HOME": str(here / "pipx"), "PIPX_BIN_DIR": str(here / "bin"), "PIPX_MAN_DIR": str(here / "man")}
        taken, _ = timed([tools / "pipx", "install", "."], cwd=source, env={**os.environ, **home})
        said = timed([here / "bin" / "mesh", "--version"])[1]
        whole = commit.strip() in said and (here / "man" / "man1" / "mesh.1").exists()
        rows.append(row("`pipx install .`", [taken], "s", goal="installs whole", met=whole))
        measure, goal = "from a clone to the finished demo", f"<= {DEMO_S:g} s"
        if options.demo:
            begun = time.perf_counter()
            clone = here / "clone"
            timed(["git", "clone", "--quiet", ROOT, clone])
            timed(["make", "demo"], cwd=clone)
            taken = time.perf_counter() - begun
            rows.append(row(measure, [taken], "s", goal=goal, met=taken <= DEMO_S))
        else:
            rows.append(not_run(measure, "s", goal, "add --demo to run it"))
    write("install", rows)


def first_nodes(here: Path, wheel: Path) -> list[dict[str, Any]]:
    """Time a new machine's way to its first `mesh nodes`, by uv beside pip, and weigh what was installed.

    uv's cache is new each time, so it downloads all packages. Pip uses its own cache, where it has one.
    """
    taken: dict[str, list[float]] = {"uv": [], "pip": []}
    for number in range(ROUNDS):
        for installer, times in taken.items():
            place = here / f"first-{installer}-{number}"
            begun = time.perf_counter()
            if installer == "uv":
                places = {f"UV_{name}_DIR": str(place / name) for name in ("TOOL", "TOOL_BIN", "CACHE")}
                install = [UV, "tool", "install", "--quiet", "--python", sys.executable, wheel]
                timed(install, env={**os.environ, **places})
                first = place / "TOOL_BIN"
            else:
                first = environment(place, wheel)
            mesh = [first / "mesh", "--state", place / "state"]
            timed([*mesh, "init", "lab"])
            timed([*mesh, "up"])
            try:
                _, said = timed([*mesh, "nodes"])
                times.append(time.perf_counter() - begun)
            finally:
                timed([*mesh, "down"])
            if socket.gethostname() not in said:
                raise SystemExit(f"the first `mesh nodes` does not name this machine: {said}")
    (site,) = (here / "first-pip-0" / "lib").glob("python3.*/site-packages")
    others = [each for each in site.iterdir() if each.name.split("-")[0] not in TOOLS | OURS | {"campus_mesh"}]
    size = sum(file.stat().st_size for each in others for file in (each, *each.rglob("*")) if file.is_file()) / 2**20
    return [
        row(
            "a wheel to the first `mesh nodes`, by `uv tool install`",
            taken["uv"],
            "s",
            goal=f"<= {FIRST_S:g} s",
            met=statistics.median(taken["uv"]) <= FIRST_S,
            peer="by pip in a new environment",
            peer_values=taken["pip"],
        ),
        row(
            "dependencies installed, with bytecode",
            [size],
            "MiB",
            goal=f"<= {DEPENDENCIES_MIB} MiB",
            met=size <= DEPENDENCIES_MIB,
        ),
    ]


def check(place: Path, commit: str) -> None:
    """Check that the installation is complete: the command, its commit, and the files in share/."""
    _, said = timed([place / "bin" / "mesh", "--version"], cwd="/")
    if commit.strip() not in said:
        raise SystemExit(f"{said.strip()!r} does not name its commit {commit.strip()}")
    missing = [path for path in SHARED if not (place / path).is_file()]
    if missing:
        raise SystemExit(f"not installed: {', '.join(missing)}")
    timed([place / "bin" / "pip", "check"])


if __name__ == "__main__":
    main()
