"""The `apptainer` engine: guests in the root file system of an image, on machines without a container daemon.

A guest is one of the process engine's, with its namespaces, hidden files, filter of system calls and control groups; its command
is `apptainer exec IMAGE COMMAND`. Apptainer itself limits nothing, so the engine runs no guests where control groups cannot.
"""

import asyncio
import fcntl
import os
import re
import shutil
from pathlib import Path

import msgspec

from cuda_guard.guard import Mount
from mesh.execution.apptainer.gpus import mounts_of
from mesh.execution.engine import (
    CKPT,
    CTL,
    INSIDE,
    OUT,
    WORK,
    Availability,
    BadImage,
    EngineError,
    Injection,
    Launch,
    contract_env,
)
from mesh.execution.killswitch import KillSwitch
from mesh.execution.process.engine import KEPT_VARIABLES, ProcessEngine, ProcessGuest
from mesh.execution.process.sandbox import SECRETS, SHARED_MEMORY, TEMPORARY_PLACES, Sandbox

HOME = "/mesh/home"
NEEDED = ("memory", "processes", "CPU")  # limits without which no guest runs
ENVIRONMENT = "APPTAINERENV_"  # prefix of a variable of the guest, to Apptainer
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OPTIONS = ("--silent", "exec", "--userns", "--contain", "--cleanenv", "--no-eval", "--no-umask")
NOT_INSTALLED = "Apptainer is not installed: `apt install apptainer`, or your cluster's"
WEAKER = (
    "weaker than Docker: a short filter of system calls, user namespaces, /proc and /sys are in reach, and guests have the "
    "daemon's user id; no network; images need /bin/sh; it shares the kernel"
)


class ApptainerEngine(ProcessEngine):
    """Runs guests from images that lie in directories of `images`, each named by its digest."""

    name = "apptainer"
    own_root = True

    def __init__(self, switch: KillSwitch | None, images: Path, sandbox: Sandbox) -> None:
        super().__init__(switch, network="none", sandbox=sandbox)
        self._images, self._seen = images, sandbox

    async def availability(self) -> Availability:
        if shutil.which("apptainer") is None:
            return Availability(ok=False, detail=NOT_INSTALLED)
        if os.getuid() == 0:
            return Availability(ok=False, detail="its guests would be root on this machine: run the node as a user")
        state = await super().availability()
        if not state.ok:
            return state
        lacks = [name for name in NEEDED if name in state.unlimited]
        if lacks:
            what = f"guests cannot be limited here ({', '.join(lacks)})"
            return Availability(ok=False, detail=f"{what}: {state.limits_by}", limits_by=state.limits_by)
        return msgspec.structs.replace(state, isolation=WEAKER)

    async def _start(self, launch: Launch) -> ProcessGuest:
        state = await self.availability()
        if not state.ok:
            raise EngineError(state.detail)
        if launch.gpus:
            seen = await asyncio.to_thread(mounts_of, launch.gpu_uuids, launch.injection.mounts)
            launch = msgspec.structs.replace(launch, injection=Injection(mounts=seen))
        held = await asyncio.to_thread(self._hold, launch)
        try:
            guest = await super()._start(launch)
        except BaseException:
            os.close(held)
            raise
        guest.ended(lambda: os.close(held))
        return guest

    def _hold(self, launch: Launch) -> int:
        """Return a descriptor that keeps the image from removal while it is open."""
        try:
            held = os.open(self._image(launch), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise BadImage(f"image {launch.image} is not on this node") from error
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(held), self._image(launch).stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            os.close(held)
            raise BadImage(f"image {launch.image} is being removed from this node") from None
        return held

    def _image(self, launch: Launch) -> Path:
        digest = re.fullmatch(r"sha256:([0-9a-f]{64})", launch.image_id or "")
        if digest is None:
            raise BadImage("the apptainer engine needs an image by its digest")
        return self._images / digest[1]

    def _reads(self, launch: Launch) -> list[str]:
        return [*super()._reads(launch), str(self._image(launch))]

    def _environment(self, launch: Launch) -> dict[str, str]:
        inside = contract_env(launch, WORK, CKPT, OUT, CTL) | {shown.variable: shown.target for shown in launch.data}
        inside |= launch.secrets.variables
        if launch.environment is not None:
            inside |= {"PREPEND_PATH": f"{INSIDE}/bin", "VIRTUAL_ENV": INSIDE}  # Apptainer's name for it
        if odd := [name for name in inside if not NAME.fullmatch(name)]:
            raise EngineError(f"Apptainer cannot set the variable {odd[0][:80]!r}")  # and would then set none
        own = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        return own | {f"{ENVIRONMENT}{name}": value for name, value in inside.items()}

    def _wrap(self, launch: Launch) -> list[str]:
        """Return the words in front of the guest's command."""
        own = launch.directories | {place: place for place in (*TEMPORARY_PLACES, SHARED_MEMORY)}
        readable = [(shown.source, shown.target) for shown in launch.data]
        if launch.environment is not None:
            readable.append((launch.environment, INSIDE))
        if launch.secrets.directory is not None:
            readable.append((SECRETS, SECRETS))
        shown = [Mount(Path(source), Path(target), read_only=False) for source, target in own.items()]
        shown += [Mount(Path(source), Path(target)) for source, target in readable]
        binds = [_bind(mount) for mount in (*shown, *launch.injection.mounts)]
        words = ["apptainer", *OPTIONS, "--home", f"{self._seen.home}:{HOME}", "--pwd", WORK]
        for bind in binds:
            words += ["--bind", bind]
        # A shell reports a missing command by exit codes 126 and 127, and Apptainer by 255.
        return [*words, str(self._image(launch)), "/bin/sh", "-c", 'exec "$@"', "mesh"]

    def _check_command(self, launch: Launch, env: object, seen: object) -> None:
        """Do nothing: only the guest sees its image's programs."""


def _bind(mount: Mount) -> str:
    """Return the value of `--bind` that shows a file or directory."""
    places = f"{mount.source}:{mount.target}"
    if places.count(":") > 1 or set(places) & set(',"\\'):
        raise EngineError(f'Apptainer cannot show {places!r}: a name has one of : , " \\')
    return f"{places}:ro" if mount.read_only else places
