"""A hostile guest: a job that tries to reach what belongs to its host's owner, and reports what it reached."""

import json
from collections.abc import Iterable
from pathlib import Path

from tests.execution.bench import Bench

PROGRAM = """
import ctypes, errno, json, os, signal, socket, stat, sys

libc = ctypes.CDLL(None, use_errno=True)

def read(path):
    return open(path, errors="replace").read(200)

def write(path):
    open(path, "w").close()

def entries(path):
    return sorted(os.listdir(path))

def connect(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)

def abstract(name):
    connect("\\0" + name)

def kill(pid):
    os.kill(int(pid), 0)

def trace(pid):
    return open(f"/proc/{pid}/environ").read(200)

def system_call(number):
    if libc.syscall(ctypes.c_long(int(number)), 0, 0, 0, 0, 0, 0) < 0 and ctypes.get_errno() == errno.EPERM:
        raise OSError

def unmount(path):
    if libc.umount2(path.encode(), 2) < 0:
        raise OSError

def make_device(path):
    os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(254, 0))

def terminal(_):
    return os.ttyname(os.open("/dev/tty", os.O_RDWR))

found = {}
for kind, target in json.load(open(sys.argv[1])):
    try:
        found[f"{kind} {target}"] = globals()[kind](target) or "reached"
    except OSError as error:
        continue
json.dump(found, open(sys.argv[2], "w"))
"""


class HostileGuest:
    """A job on an engine's bench. Its attempts are pairs of a kind, a function of `PROGRAM`, and a target."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        (bench.root / "work/attack.py").write_text(PROGRAM)

    async def reached(self, python: str, attempts: Iterable[tuple[str, object]], **launch: object) -> dict[str, object]:
        """Return what each attempt that succeeded found, by `kind target`."""
        wanted, found = self._bench.root / "work/attempts.json", self._bench.root / "out/reached.json"
        wanted.write_text(json.dumps([(kind, str(target)) for kind, target in attempts]))
        found.unlink(missing_ok=True)
        guest = await self._bench.start(python, "attack.py", str(wanted), str(found), **launch)
        end = await guest.wait()
        assert end.code == 0, self._bench.log
        reached: dict[str, object] = json.loads(found.read_text())
        return reached


def owners_machine(root: Path) -> dict[str, Path]:
    """Make a home with keys and a daemon's state below `root`; return the secrets by name."""
    secrets = {
        "SSH key": root / "home/.ssh/id_ed25519",
        "history": root / "home/.bash_history",
        "node key": root / "state/node.key",
        "file of another job": root / "state/jobs/other/1/work/file",
    }
    for path in secrets.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")
    return secrets
