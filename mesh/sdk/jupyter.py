"""The program of a `mesh job jupyter` job: JupyterLab on a socket in the job's control directory, until it was idle for a while.

It goes to the guest as text and is run there by whatever Python 3 that has, so it is one module of the standard library alone.
JupyterLab is reached by that socket only: it binds no port, and its kernels talk over sockets in a directory of their own. Its
token is 256 random bits in a file that only the job's user may read; it stands in no argument and no variable.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from typing import Any

SOCKET, TOKEN = "jupyter.sock", "jupyter.token"
TERMINALS = "api/terminals"
SAYS = "mesh job jupyter: "  # prefix of lines of the log that are meant for the user
NOT_FOUND = 127
WARN_PART = 6  # a warning comes when 1/6 of the idle time is left (own choice)
POLLS = 60  # of the activity, in the idle time (own choice)
ENDS_S = 20.0  # for JupyterLab to stop its kernels (own choice)
ANSWERS_S = 5.0


def base_url(job: str) -> str:
    """Return the base URL, different for each job, so that two jobs do not share cookies."""
    return f"/mesh/{job[:8]}/"


def say(text: str) -> None:
    print(f"{SAYS}{text}", file=sys.stderr, flush=True)


class Idleness:
    """The idle time of a session, and its warning. All times are seconds of one clock."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.limit_s, self.used = limit_s, now
        self._warned = False

    def look(self, now: float, used: float) -> str:
        """Take the time of the last use; return `warn` (once), `end` or nothing."""
        if used > self.used:
            self.used, self._warned = min(used, now), False
        left = self.limit_s - (now - self.used)
        if left <= 0:
            return "end"
        if left < float("inf") and left <= self.limit_s / WARN_PART and not self._warned:
            self._warned = True
            return "warn"
        return ""


class Lab:
    """JupyterLab as a child process, and its API."""

    def __init__(self, command: list[str], job: str, folder: str) -> None:
        self._base = base_url(job)
        self._control = os.open(os.environ["MESH_CTL_DIR"], os.O_PATH | os.O_DIRECTORY)
        self._path = f"/proc/self/fd/{self._control}/{SOCKET}"  # a socket's path has at most 107 bytes
        for name in (SOCKET, TOKEN):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._control)
        self._token = secrets.token_urlsafe(32)
        token = os.open(TOKEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._control)
        with os.fdopen(token, "w") as file:
            file.write(self._token)
        self._home = tempfile.mkdtemp(prefix="mesh-jupyter-")
        arguments = [
            "--no-browser",
            f"--ServerApp.sock={self._path}",
            "--ServerApp.sock_mode=0600",
            f"--ServerApp.base_url={self._base}",
            f"--ServerApp.root_dir={os.environ['MESH_WORK_DIR']}",
            f"--FileContentsManager.preferred_dir={folder}",
            "--FileContentsManager.delete_to_trash=False",
            "--ServerApp.allow_origin=",
            "--ServerApp.allow_origin_pat=",
            "--ServerApp.allow_remote_access=False",
            "--ServerApp.disable_check_xsrf=False",
            "--KernelManager.transport=ipc",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            *(["--allow-root"] if os.getuid() == 0 else []),
        ]
        self.process = subprocess.Popen([*command, *arguments], env=self._environment(), pass_fds=(self._control,))

    def _environment(self) -> dict[str, str]:
        """Return an environment without the user's Jupyter settings, which could open this server."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER_", "MESH_JUPYTER"))}
        for name, place in (("RUNTIME", "run"), ("CONFIG", "config")):
            env[f"JUPYTER_{name}_DIR"] = os.path.join(self._home, place)  # noqa: PTH118
        home = env.get("HOME", "")
        if not home or not os.access(home, os.W_OK):
            env["HOME"] = self._home
        env["JUPYTER_TOKEN_FILE"] = f"{os.environ['MESH_CTL_DIR']}/{TOKEN}"
        return env

    def used(self, now: float) -> float:
        """Return the Unix time of the last activity of a kernel or terminal; now, while one is busy or if unknown."""
        try:
            kernels, terminals = self._get("api/kernels"), self._get(TERMINALS)
            if any(kernel["execution_state"] != "idle" for kernel in kernels):
                return now
            return max([0.0, *(_unix(one["last_activity"]) for one in (*kernels, *terminals))])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return now

    def _get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("localhost", timeout=ANSWERS_S)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.sock.settimeout(ANSWERS_S)
            connection.sock.connect(self._path)
            headers = {"Authorization": f"token {self._token}"}
            connection.request("GET", f"{self._base}{path}?no_track_activity=1", headers=headers)
            answer = connection.getresponse()
            if answer.status == 404 and path == TERMINALS:  # a server may have none
                return []
            if answer.status != 200:
                raise ValueError(f"JupyterLab answers {answer.status}")
            return json.loads(answer.read())
        finally:
            connection.close()

    def end(self) -> int:
        """Stop the server cleanly if possible; return its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def clear(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)


def gpu_used() -> bool:
    """Return whether a GPU of the job is busy, by nvidia-smi; a shared GPU may be busy for another job."""
    mine = {uuid for uuid in os.environ.get("MESH_GPU_UUIDS", "").split(",") if uuid}
    if not mine:
        return False
    query = ["nvidia-smi", "--query-gpu=uuid,utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=ANSWERS_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    rows = [line.split(",") for line in told.splitlines() if line.count(",") == 1]
    return any(uuid.strip() in mine and load.strip() not in {"", "0"} for uuid, load in rows)


def _unix(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _lasting(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def find_lab() -> list[str]:
    """Return the JupyterLab command of this machine; empty if there is none."""
    program = shutil.which("jupyter-lab")
    if program is not None:
        return [program]
    return [sys.executable, "-m", "jupyterlab"] if importlib.util.find_spec("jupyterlab") is not None else []


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=float, default=3600.0)
    parser.add_argument("--folder", default="")
    options = parser.parse_args()
    limit_s = options.idle
    command = find_lab()
    if not command:
        say(
            f"JupyterLab is not installed on {os.environ.get('MESH_NODE', 'this node')}. Use an image that has it (`mesh job "
            "jupyter --image IMAGE`), or install it on the PATH of the daemon there: `pip install jupyterlab`"
        )
        return NOT_FOUND
    lab = Lab(command, os.environ["MESH_JOB_ID"], options.folder)

    def leave(number: int, frame: object) -> None:
        raise SystemExit(lab.end())

    signal.signal(signal.SIGTERM, leave)
    try:
        return attend(lab, limit_s)
    finally:
        lab.clear()


def attend(lab: Lab, limit_s: float) -> int:
    """Serve until it ends or has been idle for this long (0: forever); return the exit status."""
    idleness = Idleness(limit_s or float("inf"), time.time())
    every_s = min(30.0, (limit_s or 3600.0) / POLLS)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return lab.process.wait(every_s)
        now = time.time()
        told = idleness.look(now, now if gpu_used() else lab.used(now))
        if told == "warn":
            idle_s = now - idleness.used
            left = _lasting(limit_s - idle_s)
            say(f"no kernel, terminal or GPU was used for {_lasting(idle_s)}; it ends in {left} unless one is")
        elif told == "end":
            say(f"it was not used for {_lasting(limit_s)}, and ends")
            return lab.end()


if __name__ == "__main__":
    # The user's own files are here and may have the names of modules.
    sys.path = [place for place in sys.path if place not in {"", os.getcwd()}]  # noqa: PTH109
    sys.exit(main())
