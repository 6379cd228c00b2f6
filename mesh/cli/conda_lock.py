"""`--conda FILE`: solves an environment.yml into a list of conda packages, beside it, with which the job travels.

The list says from which file it was made, and is used until that changes. What this machine has (`__glibc`, `__cuda`) counts, or
what CONDA_OVERRIDE_CUDA and its like say, as for conda.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click

from mesh.cli.job_file import read_mapping, wrong_at
from mesh.cli.output import say
from mesh.execution.control_files import put_file, read_file
from mesh.model.environment import (
    CONDA_PLATFORMS,
    EXPLICIT,
    MOST_LOCK_BYTES,
    CondaList,
    EnvironmentRefused,
    check_environment,
    conda_packages_of,
)
from mesh.util.errors import ExitCode, MeshError
from mesh.util.isolated import isolated

SHAPE = "an environment.yml has the keys channels and dependencies"
NO_CONDA = "--conda solves by py-rattler, which is not here: run `pip install py-rattler` beside campus-mesh"
PIP = (
    "a lock of conda packages has none of pip: take them from a channel, or describe all by pyproject.toml and use --uv"
)
DEFAULTS = "the channel defaults is several: name an address, as https://repo.anaconda.com/pkgs/main"


def locked(workdir: Path, name: str) -> str:
    """Return the lock of an environment.yml, which is made unless it is here; a list of packages is its own."""
    name = name.removeprefix("./")
    try:
        check_environment(CondaList(name))
        text = read_file(workdir / name, MOST_LOCK_BYTES)
    except EnvironmentRefused as error:
        raise MeshError(f"--conda: {error}", ExitCode.USAGE) from error
    except OSError as error:
        raise MeshError(
            f"--conda: cannot read {name} in {workdir}: {error.strerror or error}", ExitCode.USAGE
        ) from error
    if EXPLICIT.encode() in text.splitlines():
        return name
    platform = CONDA_PLATFORMS.get(os.uname().machine)
    if platform is None:
        raise MeshError(f"--conda: conda has no packages for {os.uname().machine}", ExitCode.USAGE)
    lock, made_from = f"{name}.lock", f"# of {name} {hashlib.sha256(text).hexdigest()}, for {platform}"
    try:
        if made_from.encode() in read_file(workdir / lock, MOST_LOCK_BYTES).splitlines():
            return lock
    except OSError:
        pass
    channels, specs = read_environment(text, name)
    say(f"solving {name}", err=True)
    lines = _solved(channels, specs, platform)
    try:
        put_file(workdir / lock, "\n".join([made_from, EXPLICIT, *lines, ""]).encode())
    except OSError as error:
        raise MeshError(f"--conda: cannot write {lock} in {workdir}: {error.strerror or error}") from error
    return lock


def read_environment(text: bytes, name: str) -> tuple[list[str], list[str]]:
    """Return the channels and the dependencies of an environment.yml; UsageError names the line that is wrong."""
    import yaml

    wrong, listed = partial(wrong_at, name), dict[str, list[str]]()
    for key, node in read_mapping(text, name, SHAPE).value:
        what = str(key.value)[:80]
        if what in {"name", "prefix"}:
            continue
        if what not in {"channels", "dependencies"}:
            raise wrong(
                key, f"the key {what!r} is not taken: {'set variables by -e' if what == 'variables' else SHAPE}"
            )
        if what in listed or not isinstance(node, yaml.SequenceNode) or not node.value:
            raise wrong(node, f"{what} must be one list")
        for item in node.value:
            if isinstance(item, yaml.MappingNode):
                raise wrong(item, PIP)
            if not isinstance(item, yaml.ScalarNode) or not item.value:
                raise wrong(item, f"each of the {what} is a word")
            if what == "channels" and item.value == "defaults":
                raise wrong(item, DEFAULTS)
        listed[what] = [item.value for item in node.value if item.value != "nodefaults"]
    for key in ("channels", "dependencies"):
        if not listed.get(key):
            raise click.UsageError(f"{name}: it names no {key}")
    return listed["channels"], listed["dependencies"]


def _solved(channels: Sequence[str], specs: Sequence[str], platform: str) -> list[str]:
    """Return the packages of a lock."""
    if find_spec("rattler") is None:
        raise MeshError(NO_CONDA, ExitCode.USAGE)
    program = isolated("mesh.jobs", "rattler_program", packages=True)
    asked = json.dumps([channels, specs])
    done = subprocess.run([*program, "solve", platform], input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeshError(f"--conda: {done.stderr.strip().removeprefix('error: ')[-2000:]}", ExitCode.USAGE)
    lines = sorted(done.stdout.splitlines())
    try:
        conda_packages_of("\n".join([EXPLICIT, *lines]))
    except EnvironmentRefused as error:
        raise MeshError(f"--conda: {error}", ExitCode.USAGE) from error
    return lines
