"""`--build DIR`: builds a Dockerfile here, and signs the image for this user under a name that its content gives."""

import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mesh.api.client import Client
from mesh.cli.output import say
from mesh.util.errors import ExitCode, MeshError

SIGN_S = 600.0  # for the daemon to read a pushed image's blobs (own choice)


def built(daemon: Client, directory: Path) -> str:
    """Build the directory's Dockerfile, push the image into this node's registry and sign it; return its name."""
    program = next((name for name in ("docker", "podman") if shutil.which(name)), None)
    if program is None:
        raise MeshError("--build needs Docker or Podman here (Debian: apt-get install docker.io)", ExitCode.USAGE)
    registry = daemon.get("/v1/images/registry")
    user = daemon.get("/v1/status")["user"]
    name = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-") or "image"
    with tempfile.TemporaryDirectory(prefix="mesh-build-") as temporary:
        written = Path(temporary, "id")
        say(f"building the image of {directory}", err=True)
        _run(program, "build", "--iidfile", str(written), str(directory))
        image = written.read_text().strip()
        tag = image.removeprefix("sha256:")[:12]
        pushed = f"mesh-build/{name}:{tag}"
        access = base64.b64encode(f"{registry['user']}:{registry['password']}".encode()).decode()
        passwords = Path(temporary, "config.json")
        passwords.touch(0o600)
        passwords.write_text(json.dumps({"auths": {registry["address"]: {"auth": access}}}))
        _push(program, image, f"{registry['address']}/{pushed}", passwords)
    alias = f"@{user}/{name}:{tag}"
    daemon.post("/v1/images/allow", {"alias": alias, "source": pushed}, timeout_s=SIGN_S)
    say(f"image {alias}", err=True)
    return alias


def _push(program: str, image: str, place: str, passwords: Path) -> None:
    if program == "podman":
        _run(program, "push", "--tls-verify=false", "--authfile", str(passwords), image, place)
        return
    _run(program, "tag", image, place)
    try:
        _run(program, "--config", str(passwords.parent), "push", place)
    finally:
        _run(program, "rmi", "--no-prune", place)


def _run(*command: str) -> None:
    """Run a command of the engine, whose output goes to standard error. MeshError if it fails."""
    done = subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise MeshError(f"`{' '.join(command[:2])}` failed with exit code {done.returncode}; its output is above")
