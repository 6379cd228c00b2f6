"""The `docker` engine: one container per attempt, with few rights by default (`hardening.py`).

It runs images by id, and only images that are already on the node. SDK calls block, so they run in their own thread pool; what
lasts as long as a container runs on the event loop; guests are killed by the kill-switch, which needs neither.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import aiohttp
import docker
import docker.errors
import msgspec
import requests
from docker.models.containers import ContainerCollection, _create_container_args

from mesh.consensus.contract import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND
from mesh.execution.abandoned_starts import Starts
from mesh.execution.docker import checkpoint, gpu_visibility, podman_checkpoint
from mesh.execution.docker.bridges import Bridges
from mesh.execution.docker.criu import Probe
from mesh.execution.docker.hardening import (
    LIKE_OURS,
    LIMITED_BY,
    Traits,
    arguments,
    command_of,
    docker_host,
    give_files,
    is_rootless,
    not_limited,
    open_gate,
    traits_of,
)
from mesh.execution.docker.session import DockerSession, open_docker_session
from mesh.execution.docker.socket import EngineSocket, NoContainer, Output, socket_path, why_silent
from mesh.execution.docker.sweep import sweep_containers
from mesh.execution.docker.watchdog import DOUBT_S, LABEL_NODE, LABEL_RUN, Watchdog
from mesh.execution.engine import Availability, BadCommand, BadImage, EngineError, Exit, Guest, Launch
from mesh.execution.guest_network import PORT
from mesh.execution.guest_registry import GuestEntry, boot_id
from mesh.execution.killswitch import KillSwitch
from mesh.execution.process.subtree import delegation, needs_linger
from mesh.execution.session import Session, SessionError
from mesh.network.edge import Edge
from mesh.network.egress import EgressError, Firewall, Policy, tag_of
from mesh.rpc.frames import Order
from mesh.util import capabilities, cgroups
from mesh.util.other_network import listen_in
from mesh.util.processes import catches, descendants_of, lives, process_of
from mesh.util.remembered import Remembered
from mesh.util.slow_calls import apart
from placement.advert import SystemCheckpoints

THREADS = 8  # for calls
IMAGES = 64  # whose configurations are remembered (own choice)
CALL_TIMEOUT_S = 30.0
ENGINE_TELLS_S = 3.0  # for the engine to report an exit that the kernel has seen; usually 0.1 s (own choice)
ENGINE_ASKED = 10  # pings before a slow engine counts as gone (own choice)
ATTACH_AGAIN_S = (
    1.0  # from the end of the output to the end of the container, before the engine counts as gone (own choice)
)
NOT_HERE = "image {0} is not on this node: see `docker images`, or `docker pull {0}` first"
NO_PROGRAM = ("not found", "no such file", "permission denied", "is a directory")  # runc's words for a bad program
REMOVED_S = 5.0  # to remove ended containers when the engine is closed; the next start removes the rest (own choice)

log = logging.getLogger(__name__)
T = TypeVar("T")


class Unseen(ContainerCollection):  # type: ignore[misc]  # the SDK has no types
    """Creates containers without the inspection that the SDK adds; only the id is needed."""

    def create(self, image: str, userns: str, **chosen: Any) -> Any:
        """Create a container with this mapping of users: the SDK takes none but "host"."""
        made = _create_container_args({**chosen, "image": image, "version": self.client.api._version})
        if userns:
            made["host_config"]["UsernsMode"] = userns
        return self.client.containers.prepare_model({"Id": self.client.api.create_container(**made)["Id"]})


class Network(NamedTuple):
    """A container's network by its name, and the gate at which it waits for its proxy if that is its only way out."""

    name: str
    gate: int | None = None


class DockerEngine:
    """Runs guests in containers of Docker, or of Podman through its Docker API."""

    name = "docker"
    own_root = True

    def __init__(
        self,
        node: str,
        switch: KillSwitch | None = None,
        policy: Policy | None = None,
        edge: Edge | None = None,
        system: bool = False,
    ) -> None:
        """`node` labels this daemon's containers, so that only this daemon cleans up after a crash.

        `policy`: the network addresses that containers may reach; `edge`: the switch that cuts them off; `system`: whether the
        owner allows system checkpoints.
        """
        self._labels = {LABEL_NODE: node, LABEL_RUN: secrets.token_hex(8)}
        self._switch, self._own_switch = switch or KillSwitch(), switch is None
        self._bridges = Bridges(Firewall(policy or Policy(), tag_of(node)), self._labels, edge)
        self._traits = Traits()
        self._probe, self.system = Probe(system), SystemCheckpoints()
        self._client: Any = None
        self._configs = Remembered[str, dict[str, Any]](IMAGES)
        self._answers = False  # whether the engine answered when it was last asked
        self._socket: EngineSocket | None = None
        self._watchdog: Watchdog | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._live: set[str] = set()  # containers of this run
        self._following: set[asyncio.Task[None]] = set()
        self._starts = Starts()

    async def availability(self) -> Availability:
        try:
            if not self._answers:
                await self._connect()
            await self._call(self._client.ping)
            problem = self._problem or await self._call(self._egress_problem)
            traits = self._traits
            asked = traits.name, traits.version, traits.experimental, traits.runtime
            self.system = await self._call(lambda: self._probe.look(*asked))
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            self._answers = False
            return Availability(ok=False, detail=f"no Docker engine answers ({why_silent(error)})")
        if problem:
            return Availability(ok=False, detail=problem)
        user = "root inside and this user outside" if traits.user == LIKE_OURS else "not root"
        rights = f"a container: no capabilities, no new privileges, read-only root, {user}"
        return Availability(
            ok=True,
            detail=f"{self._traits.name} {self._traits.version}",
            isolation=f"{rights}, {self._bridges.words}; it shares the kernel",
            proxies=traits.rootless or capabilities.has(capabilities.SYS_ADMIN),  # to enter a container's network
            system=self.system,
            unlimited=() if traits.disk_rate else ("disk rate",),
            limits_by="" if traits.disk_rate else delegation({*LIMITED_BY, "io"}),
        )

    @property
    def _problem(self) -> str:
        return self._traits.problem or (self._watchdog.problem if self._watchdog is not None else "")

    async def _connect(self) -> None:
        path = socket_path()
        self._client = await self._call(lambda: docker.from_env(timeout=CALL_TIMEOUT_S))
        await self._call(self._sweep)
        self._traits = await self._call(self._look)
        if self._socket is None:
            self._socket = EngineSocket(path)
        if self._watchdog is None:
            self._watchdog = await Watchdog.start(
                path, self._labels[LABEL_RUN], self._switch.register, self._traits.is_podman
            )
        self._answers = True

    async def start(self, launch: Launch) -> Guest:
        return await self._starts.finish(self._start(launch), launch.job)

    async def _start(self, launch: Launch) -> "DockerGuest":
        if launch.image is None:
            raise BadImage("the docker engine needs an image: --image NAME")
        if not self._answers and not (await self.availability()).ok:
            raise EngineError(self._problem or "no Docker engine answers on this node")
        if self._problem:
            raise EngineError(self._problem)
        assert self._socket is not None
        container, network = await self._call(lambda: self._create(launch))
        entry = GuestEntry(
            boot_id(), self.name, launch.job, launch.attempt, container=container.id, socket=self._socket.path
        )
        try:
            output = await self._socket.attach(container.id)
            try:
                key = await self._call(lambda: self._switch.add(entry))
                if launch.dump is None:
                    entry = await self._call(lambda: self._begin(container, network, launch, key, entry))
                else:
                    entry = await apart(lambda: self._begin(container, network, launch, key, entry), "restore")
                    if self._traits.is_podman:  # the first output was of what was stopped for the restore
                        output.close()
                        output = await self._socket.attach(container.id)
            except BaseException:
                output.close()
                raise
        except (OSError, aiohttp.ClientError) as error:
            await self._call(lambda: self._remove(container, network))
            _check_program(launch, str(error))  # Podman looks for it here
            raise EngineError(f"Docker could not attach to the container: {error}") from error
        except BaseException:
            await self._call(lambda: self._remove(container, network))
            raise
        assert self._watchdog is not None
        guest = DockerGuest(
            self,
            container,
            network,
            entry,
            key,
            output,
            self._watchdog,
            self._switch,
            self._socket,
            bool(launch.gpus),
        )
        follower = asyncio.create_task(guest.follow(launch.log_path), name=f"container {container.short_id}")
        self._following.add(follower)
        follower.add_done_callback(self._following.discard)
        guest.allow_until(launch.until)
        if launch.gpu_uuids and entry.head is not None:
            guest.watch_gpus(entry.head.pid, launch.gpu_uuids)
        return guest

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + REMOVED_S
        await self._starts.close(REMOVED_S)  # a start that is undone has a follower too
        if self._following and loop.time() < until:
            await asyncio.wait(self._following, timeout=until - loop.time())
        late = list(self._following)
        for follower in late:
            follower.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if self._watchdog is not None:
            await self._watchdog.dismiss()
        if self._socket is not None:
            await self._socket.close()
        if self._client is not None:
            self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._own_switch:
            await asyncio.to_thread(self._switch.close)

    # --- in the pool's threads

    def _look(self) -> Traits:
        """Ask the engine what it is, and a rootless one what it may do here: Docker does not know Podman's question."""
        info, host = self._client.info(), dict[str, Any]()
        if is_rootless(info):
            answer = self._client.api._get(f"{self._client.api.base_url}/v4.0.0/libpod/info")
            host = answer.json()["host"] if answer.ok else docker_host(info, Path(socket_path()).stat().st_uid)
        return traits_of(self._client.version(), info, host, not needs_linger())

    def _create(self, launch: Launch) -> tuple[Any, Network]:
        """Create a container and its own network."""
        image = launch.image_id or self._image(launch.image or "")
        made = checkpoint.made_of(Path(launch.dump)) if launch.dump is not None else None
        if made is not None and made.image != image:
            raise BadImage(f"its system checkpoint is of image {made.image[:19]}, {launch.image} is {image[:19]} here")
        give_files(launch, self._traits.remapped)
        gate = open_gate(launch, self._traits.remapped)
        network = Network(self._bridges.make(self._client)) if gate is None else Network("none", gate)
        try:
            chosen = arguments(launch, self._labels, network.name, self._traits, self._config_of(image))
            container = Unseen(self._client).create(image, self._traits.userns, **chosen)
            self._live.add(container.id)
            return container, network
        except (docker.errors.APIError, requests.RequestException) as error:
            self._leave(network)
            if isinstance(error, docker.errors.ImageNotFound):
                raise BadImage(NOT_HERE.format(launch.image)) from error
            text = error.explanation if isinstance(error, docker.errors.APIError) else error
            raise EngineError(f"Docker could not create the container: {text}") from error

    def _remove(self, container: Any, network: Network) -> None:
        with contextlib.suppress(docker.errors.APIError, requests.RequestException):
            container.remove(force=True, v=True)
        self._live.discard(container.id)
        self._leave(network)

    def _leave(self, network: Network) -> None:
        self._bridges.remove(self._client, network.name)
        if network.gate is not None:
            os.close(network.gate)

    def _egress_problem(self) -> str:
        """Return why no container may start here; restore firewall rules that were flushed."""
        problem = self._bridges.problem(self._traits.name)
        if not problem:
            try:
                self._bridges.repair()
            except EgressError as error:
                return str(error)
        return f"containers could not be kept to {self._bridges.words}: {problem}" if problem else ""

    def _begin(self, container: Any, network: Network, launch: Launch, key: str, entry: GuestEntry) -> GuestEntry:
        """Start the container and register its process and control groups, so that it can be killed without the engine."""
        try:
            if launch.dump is None:
                container.start()
            elif self._traits.is_podman:
                podman_checkpoint.restore(container, Path(launch.dump))
            else:
                checkpoint.restore(container, Path(launch.dump), Path(self._traits.root))
            container.reload()
            for mount in container.attrs.get("Mounts") or ():
                if mount.get("Type") == "volume":
                    raise EngineError(f"its engine gave it a volume, which no limit counts: {mount.get('Destination')}")
            pid = int(container.attrs["State"]["Pid"])
            head = process_of(pid) if pid else None
            if head is not None:
                groups = tuple(map(str, cgroups.own_groups(pid, container.id)))
                entry = dataclasses.replace(entry, head=head, groups=groups)
                self._switch.update(key, entry)
                self._check_limits(launch, entry)
                if launch.proxy is not None and network.gate is not None:
                    launch.proxy(listen_in(head, PORT))
                    os.write(network.gate, b"\n")
            self._switch.check_started(key)
        except BaseException as error:
            self._switch.kill(key).result()  # an engine that did not answer may still have started it
            self._switch.remove(key)
            if isinstance(error, EngineError):
                raise
            if not isinstance(error, docker.errors.APIError):
                raise EngineError(f"Docker did not start the container: {error}") from error
            text = str(error.explanation)
            _check_program(launch, text)
            raise EngineError(f"Docker could not start the container: {text}") from error
        return entry

    def _check_limits(self, launch: Launch, entry: GuestEntry) -> None:
        """Check that a guest is limited: a rootless engine drops limits for which its user lacks rights, and CRIU can put
        processes into another group than their container's.
        """
        restored = launch.dump is not None
        if restored and not entry.groups and entry.head is not None and lives(entry.head):
            raise EngineError("CRIU did not put the processes into the container's control group")
        if not self._traits.rootless and not (restored and self._traits.unified):
            return
        missing = not_limited(launch, cgroups.limits_of(tuple(map(Path, entry.groups))))
        if missing and entry.head is not None and lives(entry.head):
            raise EngineError(f"{self._traits.name} did not limit the container: {', '.join(missing)}")

    def _image(self, name: str) -> str:
        try:
            return str(self._client.images.get(name).id)
        except docker.errors.ImageNotFound as error:
            raise BadImage(NOT_HERE.format(name)) from error
        except docker.errors.APIError as error:
            raise BadImage(f"image {name!r} cannot be used: {error.explanation}") from error

    def _config_of(self, image: str) -> dict[str, Any]:
        """Return the configuration of an image by its id."""
        known = self._configs.get(image)
        if known is None:
            known = self._client.images.get(image).attrs.get("Config") or {}
            self._configs.keep(image, known)
        return known

    def _sweep(self) -> None:
        """Remove what a crashed daemon of this node left; containers of this run stay."""
        sweep_containers(self._client, self._labels[LABEL_NODE], frozenset(self._live))
        self._bridges.sweep(self._client)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class DockerGuest:
    """A container that runs one attempt.

    `follow` runs until the container is removed, even when nobody waits for it any more: an engine that hangs removes it later.
    """

    def __init__(
        self,
        engine: DockerEngine,
        container: Any,
        network: Network,
        entry: GuestEntry,
        key: str,
        output: Output,
        watchdog: Watchdog,
        switch: KillSwitch,
        engine_socket: EngineSocket,
        has_gpus: bool,
    ) -> None:
        self._engine, self._container, self._head, self._key = engine, container, entry.head, key
        self._groups = tuple(map(Path, entry.groups))
        self._network = network
        self._has_gpus = has_gpus
        self._gpu_watch: asyncio.Task[None] | None = None
        self._patience: asyncio.Task[None] | None = None
        self._killed = False
        self._fault = ""
        self._output, self._watchdog, self._switch, self._socket = output, watchdog, switch, engine_socket
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._sessions: WeakSet[DockerSession] = WeakSet()

    async def wait(self) -> Exit:
        return await asyncio.shield(self._exit)

    async def catches_term(self) -> bool:
        return await apart(self._catches_term, "notice")

    async def terminate(self) -> bool:
        caught = await self.catches_term()
        if caught:
            with contextlib.suppress(docker.errors.APIError, requests.RequestException):
                await self._engine._call(lambda: self._container.kill(signal="SIGTERM"))
        return caught

    async def pids(self) -> frozenset[int]:
        here = await apart(self._pids, "its processes")
        sessions = [await session.pids() for session in list(self._sessions)]  # not descendants of the first process
        return here.union(*sessions)

    async def open_session(self, order: Order) -> Session:
        if await self.stands_still():
            raise SessionError("the job may not run now: it waits for its lease, or is paused; try again")
        session = await open_docker_session(self._engine._call, self._container, self._socket.path, order)
        self._sessions.add(session)
        return session

    async def stands_still(self) -> bool:
        """Ask the kernel if possible: the engine may hang."""
        frozen = await apart(lambda: cgroups.are_frozen(self._groups), "its processes")
        return bool(await self._engine._call(self._is_paused)) if frozen is None else frozen

    async def dump(self, directory: Path) -> str:
        platform = self._engine.system.gpu_platform if self._has_gpus else self._engine.system.platform
        made = checkpoint.Made(self._container.attrs["Image"], platform)
        await apart(lambda: self._dump(directory, made), f"dump {self._container.short_id}")
        return platform

    def allow_until(self, boot_s: float) -> None:
        self._watchdog.allow_until(self._container.id, boot_s)

    async def kill(self) -> None:
        self._killed = True
        await self._switch.kill_and_wait(self._key)
        await self.wait()

    def watch_gpus(self, pid: int, uuids: tuple[str, ...]) -> None:
        self._gpu_watch = asyncio.create_task(self._watch_gpus(pid, uuids), name=f"GPUs of {self._container.short_id}")

    async def _watch_gpus(self, pid: int, uuids: tuple[str, ...]) -> None:
        """End a container that loses a GPU; the node is at fault."""
        while True:
            stands = await self.stands_still()  # the probe would only start when it is thawed
            wrong = "" if stands else await gpu_visibility.look(self._socket, self._container.id, pid, uuids)
            if wrong and not self._exit.done():
                log.warning("container %s: %s", self._container.short_id, wrong)
                self._fault = wrong
                await self._switch.kill_and_wait(self._key)
                return
            await asyncio.sleep(gpu_visibility.EVERY_S)

    async def follow(self, log_path: str) -> None:
        """Copy the output to the log file until the container ends, then read its exit and remove it."""
        loop = asyncio.get_running_loop()
        descriptor = self._head.open() if self._head is not None else None
        if descriptor is not None:
            loop.add_reader(descriptor, self._head_ended, descriptor)
        ended = asyncio.create_task(self._socket.ended(self._container.id), name=f"end of {self._container.short_id}")
        try:
            await self._copy(log_path, ended)
            end = await self._take_exit(ended)
            end = msgspec.structs.replace(end, fault=self._switch.remove(self._key) or self._fault or end.fault)
            self._conclude(end)
        finally:
            ended.cancel()
            if descriptor is not None:
                loop.remove_reader(descriptor)
                os.close(descriptor)
            self._conclude(Exit(code=137, detail="the daemon stopped following it"))
            for beside in (self._gpu_watch, self._patience):
                if beside is not None:
                    beside.cancel()
        self._watchdog.gone(self._container.id)
        await self._engine._call(lambda: self._engine._remove(self._container, self._network))

    async def _copy(self, log_path: str, ended: asyncio.Task[int]) -> None:
        """Copy output to the log. Output written while the engine is away is lost.

        A container that has ended is not attached to again: Podman would make it anew for that, and forget how it ended.
        """
        try:
            with await asyncio.to_thread(Path(log_path).open, "ab", 0) as file:
                await self._write_to(file)
                while not (await asyncio.wait([ended], timeout=ATTACH_AGAIN_S))[0]:
                    if self._head is None or not lives(self._head):
                        continue
                    self._output.close()
                    try:
                        self._output = await self._socket.attach(self._container.id)
                    except (OSError, aiohttp.ClientError):
                        continue
                    await self._write_until(ended, file)
        except OSError as error:  # a full disk ends the log, not the guest
            log.warning("the log of container %s ends early: %s", self._container.short_id, error)
        finally:
            self._output.close()

    async def _write_to(self, file: FileIO) -> None:
        async for piece in self._output.pieces():
            await asyncio.to_thread(file.write, piece)

    async def _write_until(self, ended: asyncio.Task[int], file: FileIO) -> None:
        """Copy output until the container ends: Docker never closes the output of one that ended before it was attached to."""
        copying = asyncio.create_task(self._write_to(file), name=f"output of {self._container.short_id}")
        try:
            await asyncio.wait([copying, ended], return_when=asyncio.FIRST_COMPLETED)
            for done in (await asyncio.wait([copying], timeout=ATTACH_AGAIN_S))[0]:
                await done
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)

    async def _take_exit(self, ended: asyncio.Task[int]) -> Exit:
        try:
            code = await ended
        except NoContainer:
            return Exit(code=137, fault="another program removed its container")
        if code < 0:  # from Podman
            return Exit(code=137, fault="its container engine does not know how it ended")
        oom = False
        with contextlib.suppress(docker.errors.APIError, requests.RequestException):
            await self._engine._call(self._container.reload)
            oom = bool(self._container.attrs["State"].get("OOMKilled"))
        return Exit(code=code, oom=oom)

    def _head_ended(self, descriptor: int) -> None:
        """React to the kernel's report that the first process has ended."""
        asyncio.get_running_loop().remove_reader(descriptor)
        self._patience = asyncio.create_task(self._wait_for_engine(), name=f"patience {self._container.short_id}")

    async def _wait_for_engine(self) -> None:
        """Wait for the engine to report the exit: longer if it is slow but answers, not at all if we killed the guest."""
        for _ in range(ENGINE_ASKED):
            _, there = await asyncio.gather(asyncio.sleep(ENGINE_TELLS_S), self._socket.answers(ENGINE_TELLS_S))
            if not there or self._killed or self._exit.done():
                break
        if not self._exit.done():
            fault = self._switch.remove(self._key) or self._fault or "its container engine does not answer"
            self._conclude(Exit(code=137, fault=fault))

    def _conclude(self, end: Exit) -> None:
        if not self._exit.done():
            self._exit.set_result(end)

    # --- in threads

    def _dump(self, directory: Path, made: checkpoint.Made) -> None:
        with contextlib.ExitStack() as turn:
            try:
                turn.enter_context(self._watchdog.freeze_lock.own(self._container.id, 2 * DOUBT_S))
            except TimeoutError as error:
                raise EngineError("its container engine has not answered reliably lately") from error
            engine = podman_checkpoint if self._engine._traits.is_podman else checkpoint
            engine.dump(self._container, directory, made)

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
        """Return the first process, which adopts orphans in the container, and its descendants."""
        with contextlib.suppress(OSError):  # no descriptor is free
            if self._head is not None and lives(self._head):
                return frozenset({self._head.pid, *descendants_of(self._head.pid)})
        return frozenset()


def _check_program(launch: Launch, told: str) -> None:
    """Raise BadCommand if the engine's error says that the program cannot run in the image; otherwise the node is at fault."""
    program = command_of(launch)[0]
    if no_program(program, told):
        code = EXIT_NOT_FOUND if "not found" in told or "no such file" in told else EXIT_NOT_EXECUTABLE
        hint = "" if program == launch.argv[0] else " (variables that are secrets need a shell: use files)"
        raise BadCommand(f"command {program!r} cannot run in image {launch.image}: {told}{hint}", code)


def no_program(name: str, told: str) -> bool:
    """Return whether the engine's error says that this program cannot run in the image; otherwise the node is at fault."""
    return f'"{name}"' in told and any(words in told for words in NO_PROGRAM)
