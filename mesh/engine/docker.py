"""The `docker` engine: a real container per attempt, by the docker SDK, with few rights by default.

All capabilities dropped, no new privileges, read-only root with a small /tmp, a user that is not root, no network, limits where
asked. It runs images by id, only such as are already on the node. SDK calls block, so they have a thread pool of their own.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import docker
import docker.errors
import docker.types
import requests

from mesh.engine.descent import descendants_of
from mesh.engine.dockersession import DockerSession, open_docker_session
from mesh.engine.engine import Availability, BadCommand, BadImage, EngineError, Exit, Guest, Launch, contract_env
from mesh.engine.frames import Order
from mesh.engine.process import catches
from mesh.engine.session import Session
from mesh.engine.warden import Warden

THREADS = 8  # for calls; each guest is followed by a thread of its own, so that no number of guests delays a kill
CALL_TIMEOUT_S = 30.0
GUEST_UID = 65_532  # "nonroot" of distroless images; owns nothing on a normal host
LABEL_NODE, LABEL_JOB = "campus-mesh.node", "campus-mesh.job"
TMPFS = {"/tmp": "rw,nosuid,nodev,mode=1777,size=1g"}
WORK, CKPT, OUT, CTL = "/mesh/work", "/mesh/ckpt", "/mesh/out", "/mesh/ctl"

log = logging.getLogger(__name__)
T = TypeVar("T")


class DockerEngine:
    name = "docker"
    own_root = True

    def __init__(self, node: str) -> None:
        """`node` labels this daemon's containers, so that it, and nobody else, cleans up after a crash."""
        self._node = node
        self._client: Any = None
        self._warden: Warden | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")

    async def availability(self) -> Availability:
        try:
            if self._client is None:
                self._client = await self._call(lambda: docker.from_env(timeout=CALL_TIMEOUT_S))
                await self._call(self._sweep)
                self._warden = await Warden.start(_socket_path(self._client), self._node)
            version = await self._call(lambda: self._client.version()["Version"])
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            self._client = None
            return Availability(ok=False, detail=f"no Docker engine answers ({_reason(error)})")
        words = "a container: no capabilities, no new privileges, read-only root, not root, no network; it shares the kernel"
        return Availability(ok=True, detail=f"Docker {version}", isolation=words)

    async def images(self) -> tuple[str, ...]:
        if self._client is None:
            return ()
        try:
            found = await self._call(self._client.images.list)
        except (docker.errors.DockerException, requests.RequestException):
            return ()
        return tuple(sorted({tag for image in found for tag in image.tags}))[:256]

    async def start(self, launch: Launch) -> Guest:
        if launch.image is None:
            raise BadImage("the docker engine needs an image: --image NAME")
        if self._client is None and not (await self.availability()).ok:
            raise EngineError("no Docker engine answers on this node")
        return await self._call(lambda: self._start(launch))

    async def close(self) -> None:
        if self._warden is not None:
            await self._warden.dismiss()
        if self._client is not None:
            self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- in the pool's threads

    def _start(self, launch: Launch) -> "DockerGuest":
        image = self._image(launch.image or "")
        directories = {launch.work_dir: WORK, launch.ckpt_dir: CKPT, launch.out_dir: OUT, launch.ctl_dir: CTL}
        mounts = launch.injection.mounts
        user = f"{os.getuid()}:{os.getgid()}"
        if os.getuid() == 0:
            user = f"{GUEST_UID}:{GUEST_UID}"
            for path in (*map(Path, directories), *(mount.source for mount in mounts if not mount.read_only)):
                _give(path)
        devices = []
        if launch.gpu_uuids:
            wanted = [["gpu", "compute", "utility"]]
            devices = [docker.types.DeviceRequest(device_ids=list(launch.gpu_uuids), capabilities=wanted)]
        arguments: dict[str, Any] = {
            "command": list(launch.argv),
            "entrypoint": "",
            "environment": contract_env(launch, WORK, CKPT, OUT, CTL),
            "working_dir": WORK,
            "user": user,
            "volumes": {host: {"bind": inside, "mode": "rw"} for host, inside in directories.items()},
            "mounts": [
                docker.types.Mount(str(mount.target), str(mount.source), "bind", read_only=mount.read_only)
                for mount in mounts
            ],
            "labels": {LABEL_NODE: self._node, LABEL_JOB: launch.job},
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "read_only": True,
            "tmpfs": TMPFS,
            "network_mode": "none",
            "pids_limit": 4096,
            "device_requests": devices,
            "init": shutil.which("docker-init") is not None,
            "log_config": docker.types.LogConfig(type="none"),  # the attempt's log file is the one copy
        }
        if launch.memory_mib is not None:
            arguments |= {"mem_limit": launch.memory_mib << 20, "memswap_limit": launch.memory_mib << 20}
        if launch.cpus is not None:
            arguments["nano_cpus"] = int(launch.cpus * 1e9)
        try:
            container = self._client.containers.create(image, **arguments)
        except docker.errors.APIError as error:
            raise EngineError(f"Docker could not create the container: {error.explanation}") from error
        try:
            # Attached before it starts, nothing it writes is missed; `docker logs --follow` may lose a last line without an end.
            output = container.attach(stdout=True, stderr=True, stream=True)
        except docker.errors.APIError as error:
            raise EngineError(f"Docker could not attach to the container: {error.explanation}") from error
        try:
            container.start()
        except docker.errors.APIError as error:
            _shut(output)
            with contextlib.suppress(docker.errors.APIError):
                container.remove(force=True)
            text = str(error.explanation)
            if "not found" in text or "no such file" in text or "permission denied" in text:
                raise BadCommand(f"command {launch.argv[0]!r} cannot run in image {launch.image}: {text}") from error
            raise EngineError(f"Docker could not start the container: {text}") from error
        assert self._warden is not None
        guest = DockerGuest(container, output, self._warden, launch.log_path, self._threads)
        guest.allow_until(launch.until)
        return guest

    def _image(self, name: str) -> str:
        try:
            return str(self._client.images.get(name).id)
        except docker.errors.ImageNotFound as error:
            raise BadImage(
                f"image {name} is not on this node: see `docker images`, or `docker pull {name}` first"
            ) from error
        except docker.errors.APIError as error:
            raise BadImage(f"image {name!r} cannot be used: {error.explanation}") from error

    def _sweep(self) -> None:
        """Remove what an earlier, crashed daemon of this node left."""
        for container in self._client.containers.list(all=True, filters={"label": f"{LABEL_NODE}={self._node}"}):
            log.warning("removing a container that an earlier run left: %s", container.short_id)
            with contextlib.suppress(docker.errors.APIError):
                container.remove(force=True)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class DockerGuest:
    def __init__(self, container: Any, output: Any, warden: Warden, log_path: str, threads: ThreadPoolExecutor) -> None:
        self._container = container
        self._warden = warden
        self._output = output
        self._threads = threads
        self._log_path = log_path
        self._sessions: WeakSet[DockerSession] = WeakSet()
        follower = ThreadPoolExecutor(1, thread_name_prefix="docker guest")
        self._end = follower.submit(self._follow)
        follower.shutdown(wait=False)

    async def wait(self) -> Exit:
        return await asyncio.shield(asyncio.wrap_future(self._end))

    async def catches_term(self) -> bool:
        return await self._run(self._catches_term)

    async def terminate(self) -> bool:
        caught = await self.catches_term()
        if caught:
            await self._run(lambda: self._quietly(lambda: self._container.kill(signal="SIGTERM")))
        return caught

    async def pids(self) -> frozenset[int]:
        visitors = [
            await session.pids() for session in list(self._sessions)
        ]  # which do not descend from its first process
        return (await self._run(self._pids)).union(*visitors)

    async def open_session(self, order: Order) -> Session:
        session = await open_docker_session(self._run, self._container, self._warden.docker_socket, order)
        self._sessions.add(session)
        return session

    async def stands_still(self) -> bool:
        return bool(await self._run(self._is_paused))

    def allow_until(self, boot_s: float) -> None:
        self._warden.allow_until(self._container.id, boot_s)

    async def kill(self) -> None:
        await self._run(lambda: self._quietly(self._container.kill))
        await self.wait()

    # --- in threads

    def _follow(self) -> Exit:
        """Copy its output to the log file until the container ends, then take its exit and remove it."""
        try:
            with Path(self._log_path).open("ab", buffering=0) as file:
                for piece in self._output:
                    file.write(piece)
        except OSError as error:  # a full disk ends the log, not the guest
            log.warning("the log of container %s ends early: %s", self._container.short_id, error)
        _shut(self._output)
        while True:
            try:
                status = self._container.wait(timeout=3600)
                break
            except (requests.ReadTimeout, requests.ConnectionError):
                continue
            except docker.errors.NotFound:
                self._warden.gone(self._container.id)
                return Exit(code=137, detail="the container was removed by somebody else")
        oom = False
        with contextlib.suppress(docker.errors.APIError, requests.RequestException):
            self._container.reload()
            oom = bool(self._container.attrs["State"].get("OOMKilled"))
        self._warden.gone(self._container.id)
        with contextlib.suppress(docker.errors.APIError, requests.RequestException):
            self._container.remove(force=True)
        return Exit(code=int(status["StatusCode"]), oom=oom)

    def _is_paused(self) -> bool:
        try:
            self._container.reload()
        except docker.errors.APIError:
            return True
        state = self._container.attrs["State"]
        return bool(state.get("Paused")) or not state.get("Running")

    def _catches_term(self) -> bool:
        return any(catches(pid, signal.SIGTERM) for pid in self._pids())

    def _pids(self) -> frozenset[int]:
        """The first one, which adopts whatever is orphaned in the container, and all that descend from it."""
        try:
            self._container.reload()
            first = int(self._container.attrs["State"]["Pid"])
        except (docker.errors.APIError, requests.RequestException, KeyError):
            return frozenset()
        return frozenset({first, *descendants_of(first)} if first else ())

    @staticmethod
    def _quietly(work: Callable[[], object]) -> None:
        """A container that has already ended is no error here."""
        with contextlib.suppress(docker.errors.NotFound, docker.errors.APIError):
            work()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _shut(output: Any) -> None:
    with contextlib.suppress(OSError):
        output.close()


def _socket_path(client: Any) -> str:
    base = str(client.api.base_url)
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    return host.removeprefix("unix://") if host.startswith("unix://") else base


def _give(path: Path) -> None:
    os.chown(path, GUEST_UID, GUEST_UID)
    for directory, names, files in os.walk(path):
        for name in (*names, *files):
            os.chown(Path(directory) / name, GUEST_UID, GUEST_UID, follow_symlinks=False)


def _reason(error: Exception) -> str:
    text = str(error)
    for sign, words in (
        ("FileNotFoundError", "its socket does not exist"),
        ("PermissionError", "this user may not use its socket: add it to the group docker"),
        ("ConnectionRefusedError", "its socket refuses: is dockerd running?"),
    ):
        if sign in text:
            return words
    return text[:200]
