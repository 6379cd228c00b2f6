"""Attempt: the shell around one attempt, with its directories, its guest and its watchers. It reports to the runner core.

jobs/<job>/<term>/work   the working directory, restored    .../ckpt  the checkpoint directory (linked from work)
                 /out    what the job publishes             .../ctl   notice.json, progress.json, schedule.json
                 /logs   NNN.txt of earlier attempts, restored   .../cache/NAME  its caches
logs/<job>/NNN.txt       output of attempts here; it stays when the attempt is gone (`logs.py`)
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from ckptstore.cipher import StateCipher
from ckptstore.errors import FileChanged, StoreError, TooLarge
from ckptstore.store import Store
from ckptstore.tree_scan import Scan, scan
from mesh.checkpoints.commit_modes import CommittedTree, being_written, committed_tree, is_done, link_checkpoints
from mesh.checkpoints.keys import NoKey
from mesh.checkpoints.loss_estimate import LossEstimate, Lost
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.checkpoints.replicator import Expected, FetchError, Replicator
from mesh.checkpoints.save_schedule import SaveSchedule
from mesh.checkpoints.system_checkpoints import PARTS, Dumps
from mesh.checkpoints.writer import CheckpointWriter
from mesh.consensus.contract import EXIT_CHECKPOINTED, MAX_PROGRESS_BYTES, Progress, decode_progress, gang_env
from mesh.consensus.effects import GuestEffect, Kill, Launch, Notify, RunUntil, SaveCheckpoint, SaveResult
from mesh.consensus.messages import GangPlace
from mesh.consensus.reports import (
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    GuestExited,
    GuestFailed,
    GuestStarted,
    Progressed,
    ResultStored,
    RunnerEvent,
)
from mesh.data.cache_files import MAX_ENTRIES
from mesh.data.library import BringsKey, Brought, OwnCopy
from mesh.data.manifest import BLOCK_BYTES, FetchFailed
from mesh.data.streams import Guest as DataGuest
from mesh.data.streams import seen_by_engine
from mesh.execution.control_files import put_file, read_file
from mesh.execution.engine import CACHE, CKPT, INSIDE, OUT, WORK, BadCommand, Engine, EngineError, Guest, Shown
from mesh.execution.engine import Launch as GuestLaunch
from mesh.execution.notice import give_notice
from mesh.jobs import image_python
from mesh.jobs.array_batch import command_of
from mesh.jobs.attempt_secrets import AttemptSecrets
from mesh.jobs.environments import Environments
from mesh.jobs.image_python import ImagePython
from mesh.jobs.logs import SNAPSHOT_BYTES, snapshot_logs
from mesh.model.environment import CondaList, EnvironmentRefused, UvProject
from mesh.model.record import Commit, JobRecord
from mesh.model.secrets import SecretError
from mesh.model.spec import NO_JOB, DataNeed, JobSpec, format_job
from mesh.network.proxy_rules import ProxyRules
from mesh.util import trees
from mesh.util.boottime import boot_s
from mesh.util.slow_calls import apart
from mesh.util.task_set import TaskSet
from placement.advert import Portion
from placement.allocation import gpu_percent

if TYPE_CHECKING:
    from mesh.network.proxy import Proxy

STREAM_S = 1.0  # for a killed guest to end before reads of streamed data sets are failed (own choice)
DATA_NOTED_S = 1.0  # a data set that is ready sooner needs no event (own choice)
POLL_S = 0.25  # between looks at the checkpoint directory and the progress file (own choice)
TORN_RETRIES = 5
TRIES_BESIDE = 2  # of these with earlier checkpoints, and a log that grows all the time beside them (own choice)
PIDS_S = 10.0  # for an engine to list the guest's processes, which takes milliseconds (own choice)
HEEDS_EVERY = 8  # looks: a guest may install its signal handler late
FULL_BYTES = 1 << 20  # free space below which writes are likely to fail (own choice)

log = logging.getLogger(__name__)


T = TypeVar("T")
HaveImage = Callable[[str, bytes | None, Callable[[str], None]], Awaitable[str]]


class HaveData(Protocol):
    """Brings data sets to this node (`DataLibrary`)."""

    async def bring(
        self,
        need: DataNeed,
        key: BringsKey,
        user_key: bytes,
        guest: DataGuest,
        tell: Callable[[str], None],
        may_stream: bool,
        copy: OwnCopy | None = None,
    ) -> Brought: ...

    async def release(self, brought: Brought) -> None: ...


class Abandoned(Exception):
    """The attempt is not to start any more."""


class CommitNotFetched(Exception):
    """The last checkpoint could not be fetched; `failure` tells the runner what that means."""

    def __init__(self, failure: GuestFailed) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def seen_places(spec: JobSpec, base: Path, own_root: bool) -> dict[str, str]:
    """Return the prefixes in the store by the guest's directories, as it sees them."""
    work = WORK if own_root else str(base / "work")
    places = {
        work: "work",
        CKPT if own_root else str(base / "ckpt"): "ckpt",
        OUT if own_root else str(base / "out"): "out",
    }
    if spec.checkpointing is not None:
        places[f"{work}/{spec.checkpointing.directory}"] = "ckpt"
    return places | {
        f"{caches_at(base, own_root)}/{need.last}": saved_as(need.last) for need in spec.data if need.cache
    }


def caches_at(base: Path, own_root: bool) -> str:
    """Return where the guest sees its caches."""
    return CACHE if own_root else str(base / "cache")


def saved_as(cache: str) -> str:
    """Return the prefix in a job's result of what it has added to one of its caches."""
    return f"cache.{cache}"  # one component, so that no link leads from one cache to another


class Attempt:
    """One attempt on this node, as runner or gang member.

    `report` hands an event to the job cores; `note` writes an event for the user; `replica_policy` tells where replicas may
    go now; `cipher` opens the key of what the job saves; `have_image` gives the id of a container's image once the node has
    it (`Library.ready`), `data` brings its data sets, `proxy_rules` say which hosts it reaches; `disk_limit` gives the
    bytes that an attempt in a directory may hold.
    """

    def __init__(
        self,
        job: bytes,
        spec: JobSpec,
        number: int,
        base: Path,
        log_path: Path,
        engine: Engine,
        portions: tuple[Portion, ...],
        nick: str,
        store: Store,
        replicator: Replicator,
        seal: Callable[[bytes], bytes],
        replica_policy: Callable[[], ReplicaPolicy],
        cipher: Callable[[], Awaitable[StateCipher | None]],
        report: Callable[[RunnerEvent], Awaitable[None]],
        disk_limit: Callable[[Path], int],
        secrets: AttemptSecrets,
        environments: Environments,
        note: Callable[..., None] = lambda text, new="": None,
        have_image: HaveImage | None = None,
        data: HaveData | None = None,
        proxy_rules: ProxyRules | None = None,
    ) -> None:
        self.job, self.spec, self.number, self.base, self.log_path = job, spec, number, base, log_path
        self.engine = engine
        self.progress: Progress | None = None
        self.note = ""
        self.preparing = ""  # progress of its files and image
        self.heeds_notice: bool | None = True if spec.saves_from_outside else None  # None until known
        self.portions = portions  # of this node's GPUs
        self.held = ""  # why the guest is frozen, whatever its lease allows
        self.reserve_s = 0.0  # part of a notice's grace that is not the guest's
        self.stages: dict[str, float] = {}  # times of the reclaim stages, CLOCK_BOOTTIME
        self._nick, self._secrets = nick, secrets
        self._environments, self._environment = environments, Path()
        self._store, self._replicator = store, replicator
        self._replica_policy, self._open_cipher, self._report, self._note = replica_policy, cipher, report, note
        self._guest: Guest | None = None
        self._loop = asyncio.get_running_loop()
        self._until = 0.0
        self._held_at = 0.0
        self._allowed = asyncio.Event()
        self._tasks = TaskSet(log, self._task_failed)
        self._loss = LossEstimate(gpu_percent(spec.gpus, spec.gpu_share), self._warn, spec.priority)
        self.save_schedule = SaveSchedule(spec, base / "ctl", self._loss)
        self.writer = CheckpointWriter(
            job,
            spec,
            store,
            replicator,
            seal,
            replica_policy,
            self._loss,
            self.save_schedule,
            note,
            seen_places(spec, base, engine.own_root),
            self._processes,
        )
        self._saved_key: object = None
        self._found_key: object = None
        self._exit_was_clean = self._yielded = self._ended_well = False
        self._started = self._unwanted = False
        self.began_unix_ms = 0  # start of the guest
        self._have_image, self._disk_limit, self._data = have_image, disk_limit, data
        self._fetching: asyncio.Future[Any] | None = None
        self._brought: list[Brought] = []
        self._room_bytes = 0  # that its files may still take
        self._caches: dict[str, Scan] = {}  # how each looked before the guest began
        self._notices, self._noticing = 0, asyncio.Lock()
        self._proxy: Proxy | None = None
        if spec.network:
            from mesh.network import proxy  # and h11, which few attempts need

            rules = proxy_rules or ProxyRules((), 0)
            self._proxy = proxy.Proxy(rules, job, spec.network, lambda text: note(text, "network"))
        self._closing = False
        self._still_since = 0.0  # start of the freeze for a dump, else 0
        self._dumps = Dumps(base, self._stand) if spec.saves_from_outside else None

    @property
    def guest(self) -> Guest | None:
        """Return the guest once it has started."""
        return self._guest

    # --- what the runner core orders

    def perform(self, effect: GuestEffect) -> None:
        """Begin what the job's runner or gang member orders."""
        match effect:
            case RunUntil(boot_s=until):
                self._until = until
                self._allowed.set()
                if self._guest is not None:
                    self._guest.allow_until(self._may_run_until)
            case Launch(record=record, place=place):
                self._spawn(self._launch(record, place), "launch")
            case SaveCheckpoint():
                self._spawn(self._save(effect), "save checkpoint")
            case SaveResult():
                self._spawn(self._save_result(effect), "save result")
            case Notify(kind=kind, grace_s=grace_s, reason=reason):
                self.notify(kind, grace_s, reason)
            case Kill():
                self._abandon()
                self._spawn(self.kill_guest(), "kill")

    def notify(self, kind: str, grace_s: float, reason: str) -> None:
        self._spawn(self._notify(kind, grace_s, reason), "notify")

    def hold(self, why: str) -> None:
        """Freeze the guest whatever its lease allows, or let it continue if `why` is empty."""
        if why and not self.held:
            self._held_at = boot_s()
        elif self.held and not why:
            self._stood_still()
        self.held = why
        if self._guest is not None:
            self._guest.allow_until(self._may_run_until)

    def _stood_still(self) -> None:
        until = boot_s()
        self._loss.stood_still(self._held_at, until)
        self.save_schedule.stood_still(self._held_at, until)

    @property
    def _may_run_until(self) -> float:
        return 0.0 if self.held or self._still_since else self._until

    def _stand(self, still: bool) -> None:
        """Freeze the guest for a dump, or let it continue."""
        if still and not self._still_since:
            self._still_since = boot_s()
        elif self._still_since and not still:
            self._loss.stood_still(self._still_since, boot_s())
            self._still_since = 0.0
        if self._guest is not None:
            self._guest.allow_until(self._may_run_until)

    async def stands_still(self) -> bool:
        return self._guest is None or await self._guest.stands_still()

    async def pids(self) -> frozenset[int]:
        return frozenset() if self._guest is None else await self._guest.pids()

    def _processes(self) -> frozenset[int]:
        """Return the ids of the guest's processes, in a thread. OSError if they are not known in time.

        Nobody else writes to its directories, and each guest chooses how long it takes to look at its processes.
        """
        if self._guest is None:
            return frozenset()

        async def listed() -> frozenset[int]:
            async with asyncio.timeout(PIDS_S):
                return await self.pids()

        return asyncio.run_coroutine_threadsafe(listed(), self._loop).result()

    def mark(self, stage: str) -> None:
        """Record the time of a reclaim stage, once."""
        self.stages.setdefault(stage, boot_s())

    def lost(self) -> Lost:
        """Return the work that is lost if nothing more is saved."""
        step = self.progress.step if self.progress is not None else None
        now = self._held_at if self.held else boot_s()
        return self._loss.lost(self.stages.get("exited", now), step)

    def _abandon(self) -> None:
        """Prevent a start that has not happened yet."""
        self._unwanted = True
        if self._fetching is not None:
            self._fetching.cancel()

    async def kill_guest(self) -> None:
        """SIGKILL all processes of the guest; return when none is left."""
        if self._guest is not None:
            self.mark("killed")
            killing = asyncio.ensure_future(self._guest.kill())
            await asyncio.wait([killing], timeout=STREAM_S)
            for brought in self._brought if not killing.done() else ():
                if brought.stream is not None:
                    brought.stream.abort()
            await killing

    async def close(self) -> None:
        """Remove everything of the attempt: processes and directories."""
        self._closing = True
        self._abandon()
        await self.kill_guest()
        await self._tasks.close()
        await self._secrets.close()
        await self._close_proxy()
        while self._brought and self._data is not None:
            await self._data.release(self._brought.pop())
        if self._environment.name:
            self._environments.release(self._environment)
        await asyncio.to_thread(trees.remove, self.base)

    async def _close_proxy(self) -> None:
        if self._proxy is not None:
            await self._proxy.close()

    # --- starting

    async def _launch(self, record: JobRecord, place: GangPlace | None) -> None:
        try:
            self.writer.cipher = await self._open_cipher()
            await self._prepare(record)
            self.preparing = ""
            image_id = await self._image()
            await self._bring_data()
            await self._make_environment(image_id)
        except (FetchError, NoKey, StoreError, OSError) as error:
            await asyncio.to_thread(trees.remove, self.base)
            await self._report(GuestFailed(f"its files could not be brought here: {error}", elsewhere=True))
            return
        except CommitNotFetched as error:
            await asyncio.to_thread(trees.remove, self.base)
            await self._report(error.failure)
            return
        except EnvironmentRefused as error:
            await self._report(GuestFailed(str(error), elsewhere=False))
            return
        except (EngineError, FetchFailed, Abandoned) as error:
            await self._report(GuestFailed(str(error), elsewhere=True))
            return
        finally:
            self.preparing = ""
        resume = await asyncio.to_thread(self._resume, record.commit) if record.commit is not None else None
        while boot_s() >= self._until:  # fetching files can outlast the lease
            self._allowed.clear()
            await self._allowed.wait()
        try:
            secrets = await self._secrets.open()
        except (NoKey, SecretError, OSError) as error:
            await self._report(GuestFailed(f"its secrets could not be opened here: {error}", elsewhere=True))
            return
        launch = GuestLaunch(
            job=format_job(self.job),
            attempt=self.number,
            argv=command_of(self.spec),
            env=self._env(place),
            work_dir=str(self.base / "work"),
            ckpt_dir=str(self.base / "ckpt"),
            out_dir=str(self.base / "out"),
            ctl_dir=str(self.base / "ctl"),
            log_path=str(self.log_path),
            node=self._nick,
            grace_s=self.spec.grace_s,
            system=self._dumps is not None,
            dump=str(self.base / "dump") if self._dumps is not None and record.commit is not None else None,
            resume=resume,
            image=self.spec.image,
            image_id=image_id,
            gpus=self.portions,
            gpu_share_limit=self.spec.gpu_share_limit,
            vram_limit_mib=self.spec.vram_limit_mib,
            memory_mib=self.spec.memory_mib,
            cpus=self.spec.cpus,
            secrets=secrets,
            environment=str(self._environment) if self._environment.name else None,
            until=self._may_run_until,
            wanted=lambda: not self._unwanted,
            say=self._note,
            data=tuple(Shown(str(each.path), each.need.inside, each.need.variable) for each in self._brought),
            proxy=None if self._proxy is None else self._proxy.listen,
            cache_dir=str(self.base / "cache") if self._caches else None,
        )
        if self._unwanted:
            await self._report(GuestFailed("it was stopped before it began", elsewhere=True))
            return
        try:
            self._guest = await self.engine.start(launch)
        except BadCommand as error:
            await asyncio.to_thread(self.log_path.write_text, f"mesh: {error}\n")
            await self._report(GuestFailed(str(error), elsewhere=False, exit_code=error.exit_code))
            return
        except EngineError as error:
            await self._report(GuestFailed(str(error), elsewhere=True))
            return
        self._guest.allow_until(self._may_run_until)  # the lease was renewed meanwhile
        self._started, self.began_unix_ms = True, time.time_ns() // 1_000_000
        step = record.commit.step if record.commit is not None else None
        self._loss.began(boot_s(), record.commit is not None, step)
        self.save_schedule.began(boot_s())
        await self._report(GuestStarted(step))
        self._spawn(self._watch_end(self._guest), "watch the end")
        self._spawn(self._watch_files(), "watch the files")
        if launch.dump is not None:  # as large as the guest's memory
            self._spawn(asyncio.to_thread(trees.remove, Path(launch.dump)), "remove the dump")
        if self._unwanted:  # during the start, which can take seconds
            await self.kill_guest()

    async def _bring_data(self) -> None:
        """Bring the job's data sets to this node, or begin to: those that are streamed. FetchFailed, Abandoned."""
        guest = DataGuest(self.job, lambda words: self._note(words, "data"))
        may_stream = self._dumps is None and (not self.engine.own_root or seen_by_engine())
        for need in self.spec.data if self._data is not None else ():
            begun = time.monotonic()

            def tell(words: str, need: DataNeed = need, begun: float = begun) -> None:
                if not self.preparing and time.monotonic() - begun > DATA_NOTED_S:
                    self._note(f"data set {need.name} is not ready on this node: it is fetched", "preparing")
                self.preparing = f"preparing: data set {words}"

            if self._unwanted:
                raise Abandoned("it was stopped before it began")
            assert self._data is not None
            key = partial(self._secrets.data_key, need)
            bring = partial(self._data.bring, need, key, self.spec.user_key, guest, tell)
            if need.cache:
                await self._fill_cache(need, bring)
            else:
                self._brought.append(await self._fetched(bring(may_stream), "data"))
            if self.preparing and (need.cache or self._brought[-1].stream is None):
                self._note(f"data set {need.name} was ready in {time.monotonic() - begun:.1f} s", "prepared")
            self.preparing = ""

    async def _fill_cache(self, need: DataNeed, bring: Callable[[bool, OwnCopy], Awaitable[Brought]]) -> None:
        """Give the guest a copy of its own of one of its user's caches; nothing of it is shared with other guests."""
        assert self._data is not None
        place = self.base / "cache" / need.last
        place.parent.mkdir(exist_ok=True)
        if need.manifest:
            copy = OwnCopy(place, self._room_bytes)
            await self._data.release(await self._fetched(bring(False, copy), "data"))
        else:
            place.mkdir()
        found = self._caches[need.last] = await asyncio.to_thread(scan, place)
        self._room_bytes -= sum(look.size + BLOCK_BYTES for look in found.values())

    async def _image(self) -> str | None:
        """Return the engine's id of the image, fetched from other nodes if needed; None if the guest needs no image."""
        if self._unwanted:
            raise Abandoned("it was stopped before it began")
        if self.spec.image is None or not self.engine.own_root or self._have_image is None:
            return None
        begun = time.monotonic()
        found = await self._fetched(self._have_image(self.spec.image, self.spec.image_id, self._fetches), "image")
        if self.preparing:
            self._note(f"image {self.spec.image} came in {time.monotonic() - begun:.1f} s", "prepared")
        return found

    async def _make_environment(self, image_id: str | None) -> None:
        """Have the environment of the job made, unless it is here."""
        wanted = self.spec.environment
        if wanted is None:
            return
        begun, making = time.monotonic(), self._brings("environment")
        inside = None
        if self.engine.own_root and isinstance(wanted, UvProject):
            asked = self._environments.python_of(image_id, lambda: self._ask_image(image_id))
            inside = await self._fetched(asked, "Python")
        contained = self.engine.own_root
        ready = self._environments.ready(self.spec.user_key, wanted, self.base / "work", making, inside, contained)
        self._environment = await self._fetched(ready, "environment")
        if self.preparing:
            self._note(f"its environment was made in {time.monotonic() - begun:.1f} s", "prepared")
        self.preparing = ""

    async def _ask_image(self, image_id: str | None) -> ImagePython:
        place, image = self.base / "python", self.spec.image or ""
        try:
            return await image_python.ask(self.engine, place, image, image_id, format_job(self.job), self._nick)
        finally:
            await asyncio.to_thread(trees.remove, place)

    async def _fetched(self, work: Awaitable[T], what: str) -> T:
        """Wait for something that is needed before the start; Abandoned if it is not wanted any more."""
        self._fetching = fetching = asyncio.ensure_future(work)
        try:
            return await fetching
        except asyncio.CancelledError:
            if self._unwanted and not self._closing:
                raise Abandoned(f"it was stopped before it began, while its {what} was fetched") from None
            raise
        finally:
            self._fetching = None

    def _brings(self, what: str) -> Callable[[str], None]:
        def show(text: str) -> None:
            self.preparing = f"preparing: {what}, {text}"

        return show

    def _fetches(self, text: str) -> None:
        """Show how far the image has come."""
        if not self.preparing:
            self._note(f"image {self.spec.image} is not on this node: it is fetched from others", "preparing")
        self.preparing = f"preparing: image {text}"

    def _env(self, place: GangPlace | None) -> dict[str, str]:
        # One run of W&B over all attempts; its ids take a job's letters and digits (docs/how-to/track-experiments.md).
        env = {"WANDB_RUN_ID": format_job(self.job), "WANDB_RESUME": "allow", **self.spec.env}
        for need in self.spec.data:
            if need.cache:
                seen = f"{caches_at(self.base, self.engine.own_root)}/{need.last}"
                env |= dict.fromkeys(need.variables, seen)
        if isinstance(self.spec.environment, CondaList):
            env["CONDA_PREFIX"] = INSIDE if self.engine.own_root else str(self._environment)
        array = self.spec.array
        if array is not None:
            env |= {"MESH_ARRAY_ID": format_job(array.array), "MESH_ARRAY_INDEX": str(array.index)}
            env["MESH_ARRAY_COUNT"] = str(array.count or array.of)
        return env if place is None else env | gang_env(place)

    def _resume(self, commit: Commit) -> str | None:
        """Return the restored entry from which the guest resumes: the newest one when the checkpoint was saved."""
        if self.spec.checkpointing is None or self._dumps is not None:
            return None
        newest = self._store.manifest(commit.manifest).open(self.writer.cipher).note.get("resume", "")
        inside = newest not in {".", ".."} and "/" not in newest and (self.base / "ckpt" / newest).exists()
        return newest if inside else None

    async def _prepare(self, record: JobRecord) -> None:
        """Prepare the guest's directories: working directory, last checkpoint, earlier logs."""
        base, cipher, commit = self.base, self.writer.cipher, record.commit
        await asyncio.to_thread(trees.remove, base)
        for name in ("out", "ctl"):
            (base / name).mkdir(parents=True)
        limit, restored = await asyncio.to_thread(self._disk_limit, base), 0

        async def restore(
            manifest: bytes, place: str, prefix: str, fetch: Callable[[], Awaitable[None]], most: int = limit
        ) -> None:
            nonlocal restored
            at, room = base / place, max(0, min(most, limit - restored))
            part = partial(self._store.restore, manifest, at, prefix=prefix, cipher=cipher, limit_bytes=room)
            restored += (await self._replicator.mended(manifest, fetch, part)).disk_bytes

        whole = commit is not None and self._dumps is not None
        if self.spec.workdir is not None and not whole:
            holders = [*self.spec.workdir_holders, *self._replica_policy().fallback]
            brings = self._brings("working directory")
            fetch = partial(
                self._replicator.fetch, self.spec.workdir, holders, Expected(NO_JOB, self.spec.user), brings
            )
            await fetch()
            await restore(self.spec.workdir, "work", "work", fetch)
        (base / "work").mkdir(exist_ok=True)
        if commit is not None:
            fetch = partial(self._fetch_commit, record, commit)
            await fetch()
            kept = commit.manifest
            self.writer.state_bytes = await asyncio.to_thread(lambda: self._store.manifest(kept).total_bytes)
            try:
                await restore(kept, "logs", "log", fetch, SNAPSHOT_BYTES)
            except TooLarge as error:
                self._note(f"the logs of earlier attempts are left out: {error}")
            for part in ("dump", *PARTS) if whole else ("ckpt",):
                await restore(kept, part, part, fetch)
        self._room_bytes = limit - restored
        (base / "ckpt").mkdir(exist_ok=True)
        (base / "logs").mkdir(exist_ok=True)
        if self.spec.checkpointing is not None and self._dumps is None:
            tree = committed_tree(base / "ckpt", self.spec.checkpointing, time.time(), ended=True)
            self._saved_key = self._found_key = tree.key if tree is not None else None
            await asyncio.to_thread(link_checkpoints, base, self.spec.checkpointing.directory)

    async def _fetch_commit(self, record: JobRecord, commit: Commit) -> None:
        """Fetch the last checkpoint; CommitNotFetched tells whether it is lost, and whether its predecessor is here then."""
        sources, of = self._replica_policy().sources, Expected.of(self.job, self.spec)
        try:
            await self._replicator.fetch(commit.manifest, sources(record, commit), of, self._brings("checkpoint"))
        except FetchError as error:
            before, here = record.predecessor, False
            if before is not None:
                with suppress(FetchError, StoreError, OSError):
                    await self._replicator.fetch(before.manifest, sources(record, before), of)
                    here = True
            reason = f"checkpoint {commit.seq} could not be brought here: {error}"
            unfetched: Literal["away", "lost"] = "away" if error.unsure else "lost"
            raise CommitNotFetched(
                GuestFailed(reason, elsewhere=True, unfetched=unfetched, predecessor_here=here)
            ) from error

    # --- watching

    async def _watch_end(self, guest: Guest) -> None:
        end = await guest.wait()
        self.mark("exited")
        await self._secrets.close()
        await self._close_proxy()
        self.save_schedule.ended()
        if self.held:
            self._stood_still()
        self._read_progress()
        self._exit_was_clean, self._yielded = end.code < 128, end.code == EXIT_CHECKPOINTED
        self._ended_well = end.code == 0
        done = is_done(self.base / "ckpt")
        if self.progress is not None:
            await self._report(Progressed(self.progress.step))
        streams = (brought.stream.failed for brought in self._brought if brought.stream is not None)
        fault = end.fault or ("its node's disk is full" if end.code and self._disk_is_full() else "")
        if end.code and not fault:
            fault = next(filter(None, streams), "")
        if end.detail:
            self._note(end.detail, "ended")
        await self._report(GuestExited(code=end.code, oom=end.oom, forced_done=done, fault=fault))

    def _disk_is_full(self) -> bool:
        return shutil.disk_usage(self.base).free < FULL_BYTES

    async def _watch_files(self) -> None:
        looks, trouble = 0, 0
        while True:
            await asyncio.sleep(POLL_S)
            looks += 1
            if not self.heeds_notice and looks % HEEDS_EVERY == 0 and self._guest is not None:
                self.heeds_notice = self._watches_notices() or await self._guest.catches_term()
            await self._report_progress()
            if self.spec.checkpointing is not None and self._dumps is None:
                try:
                    await self._look_for_checkpoint()
                    trouble = 0
                except OSError as error:  # what the guest has made of its directory must not end the watch
                    if trouble == 0 or error.errno not in {None, trouble}:
                        log.warning("the checkpoints of %s cannot be read: %s", format_job(self.job)[:8], error)
                        self._note(f"its checkpoints cannot be read: {error.strerror}", "checkpoints unreadable")
                    trouble = error.errno or -1

    async def _look_for_checkpoint(self) -> None:
        # Not in the default executor: the guests choose how long it takes.
        tree = await apart(lambda: self._committed(False, known=self._found_key), "checkpoints")
        self.save_schedule.sees(boot_s(), await apart(lambda: being_written(self.base / "ckpt"), "checkpoints"))
        if tree is not None and tree.key != self._found_key:
            self._found_key = tree.key
            self.save_schedule.saved(boot_s())
            await self._report(CheckpointFound())

    async def _report_progress(self) -> None:
        if self._read_progress() and self.progress is not None:
            await self._report(Progressed(self.progress.step))

    def _read_progress(self) -> bool:
        """Tell whether the progress file has changed; a malformed one is ignored."""
        with suppress(OSError):
            progress = decode_progress(read_file(self.base / "ctl" / "progress.json", MAX_PROGRESS_BYTES))
            if progress is not None and progress != self.progress:
                self.progress = progress
                return True
        return False

    def _committed(self, ended: bool, beside: bool = True, known: object = None) -> CommittedTree | None:
        assert self.spec.checkpointing is not None
        directory, rules = self.base / "ckpt", self.spec.checkpointing
        with suppress(FileNotFoundError):
            now, processes = time.time(), self._processes
            return committed_tree(directory, rules, now, ended=ended, beside=beside, known=known, processes=processes)
        return None

    # --- saving

    async def _save(self, order: SaveCheckpoint) -> None:
        try:
            stored = await (
                self._store_checkpoint(order) if self._dumps is None else self._store_dump(order, self._dumps)
            )
        except (StoreError, EngineError, OSError) as error:
            await self._not_saved(order, str(error))
        except Exception as error:  # otherwise the end of the attempt would wait for ever
            await self._not_saved(order, f"internal error: {error!r}")
            raise
        else:
            self.note = self.note if stored.manifest is None else self.writer.note
            await self._report(stored)

    async def _not_saved(self, order: SaveCheckpoint, why: str) -> None:
        """Report that a checkpoint was not stored. For the last one the user also gets a line in the log."""
        self.note = why
        self.save_schedule.failed(boot_s())
        if order.final:
            stands = "the one before it stands" if order.parent is not None else "there is none before it"
            await asyncio.to_thread(self.log_line, f"its last checkpoint could not be stored: {why}; {stands}")
            self._note(f"its last checkpoint could not be stored; {stands}: {why}", "not stored")
        await self._report(CheckpointFailed(why))

    async def _store_checkpoint(self, order: SaveCheckpoint) -> CheckpointStored:
        for remaining in reversed(range(TORN_RETRIES)):
            await self._report_progress()  # programs write their progress before they save
            beside = remaining >= TORN_RETRIES - TRIES_BESIDE
            ended = order.final and self._exit_was_clean
            tree = await apart(partial(self._committed, ended, beside), "checkpoints")
            if tree is None or tree.key == self._saved_key:
                if order.final and self._yielded:
                    self._loss.yielded(self.stages["exited"])
                return CheckpointStored(None, (), None)
            step = self.progress.step if self.progress is not None else None
            logs = await asyncio.to_thread(snapshot_logs, self.base, self.log_path)
            try:
                roots = {**tree.roots, "log": logs}
                stored = await self.writer.checkpoint(roots, order, boot_s(), step, tree.resume, tree.scans)
            except FileChanged:
                if not remaining:
                    raise
                await asyncio.sleep(POLL_S)
                continue
            self._saved_key = self._found_key = tree.key
            return stored
        raise FileChanged("the checkpoint directory would not stand still")

    async def _store_dump(self, order: SaveCheckpoint, dumps: Dumps) -> CheckpointStored:
        begun = boot_s()
        dumped = await dumps.last(None if order.final else self._guest)
        if dumped is None:
            return CheckpointStored(None, (), None)
        self.save_schedule.saved(boot_s(), dumped.stood_s)
        step = self.progress.step if self.progress is not None else None
        logs = await asyncio.to_thread(snapshot_logs, self.base, self.log_path)
        try:
            stored = await self.writer.checkpoint({**dumped.roots, "log": logs}, order, begun, step)
        finally:
            await dumps.drop(dumped)
        return msgspec.structs.replace(stored, platform=dumped.platform)

    async def _save_result(self, order: SaveResult) -> None:
        try:
            self.writer.cipher = await self._open_cipher()  # the guest may never have started
            roots = {"log": await asyncio.to_thread(snapshot_logs, self.base, self.log_path)}
            if (self.base / "out").is_dir():
                roots["out"] = self.base / "out"
            await self._report(ResultStored(*await self._store_result(roots, order)))
        except (NoKey, StoreError, OSError) as error:
            await self._report(ResultStored(None, (), f"its files could not be kept: {error}"))
        except Exception as error:  # otherwise the end of the attempt would wait for ever
            await self._report(ResultStored(None, (), f"its files could not be kept: internal error: {error!r}"))
            raise

    async def _store_result(self, roots: dict[str, Path], order: SaveResult) -> tuple[bytes, tuple[bytes, ...]]:
        """Store the result, after exit code 0 with what is new in the caches; if that cannot be stored, without it."""
        caches = {saved_as(name): self.base / "cache" / name for name in self._caches} if self._ended_well else {}
        known = {saved_as(name): before for name, before in self._caches.items()}
        try:
            for place in caches.values():  # not in the default executor: the guest chooses how long it takes
                await apart(partial(scan, place, MAX_ENTRIES), "caches")
            return await self.writer.result(roots | caches, order, known)
        except (StoreError, OSError) as error:
            if not caches:
                raise
            self._note(str(error), "its caches are not kept")
        return await self.writer.result(roots, order)

    # --- notices

    async def _notify(self, kind: str, grace_s: float, reason: str) -> None:
        if kind == "checkpoint" and "notice" in self.stages:
            return
        if self._dumps is not None and kind == "checkpoint":
            await self._report(CheckpointFound())
            return
        self._notices += 1
        own_s = grace_s
        if kind == "vacate":
            self.save_schedule.ended()
            self._loss.noticed(boot_s(), grace_s)
            self.mark("notice")
            own_s = max(0.0, grace_s - self.reserve_s)
        if self._dumps is not None and self._guest is not None:
            await self._part(self._guest, self._dumps, reason)
            return
        notice = {
            "seq": self._notices,
            "kind": kind,
            "deadline_unix": time.time() + own_s,
            "grace_s": own_s,
            "reason": reason,
        }
        try:
            async with self._noticing:  # the latest notice wins
                told = json.dumps(notice).encode()
                await apart(lambda: put_file(self.base / "ctl" / "notice.json", told), "notice")
        except OSError as error:  # a full disk: a guest that catches SIGTERM is notified anyway
            log.warning("the notice to %s cannot be written: %s", format_job(self.job)[:8], error)
        if kind != "vacate" or self._guest is None:
            return
        await apart(lambda: self.log_line(f"{reason}: {own_s:g} s to save"), "notice")
        if not await give_notice(self._guest, self._may_run_until, self._watches_notices):
            # The guest ignores notices: no more is saved, so the owner need not wait.
            await self.kill_guest()

    async def _part(self, guest: Guest, dumps: Dumps, reason: str) -> None:
        """Dump a guest that cannot save by itself, and end it."""
        try:
            await dumps.part(guest)
            self.mark("saved")
            await asyncio.to_thread(self.log_line, f"{reason}: all of it is saved here, and now stored elsewhere")
        except (EngineError, OSError) as error:
            text = f"no system checkpoint at the notice: {error}; the last one stands"
            await asyncio.to_thread(self.log_line, text)
            self._note(text, "late")
        await self.kill_guest()

    def log_line(self, text: str) -> None:
        """Append a line for the user to the guest's log. It is lost if the disk is full."""
        with suppress(OSError), self.log_path.open("a") as file:
            file.write(f"mesh: {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _warn(self, text: str) -> None:
        """Warn the user of a last checkpoint that will probably be late."""
        self.note = text
        self._note(text, "late")

    def _watches_notices(self) -> bool:
        """Tell whether the job has shown that it uses its control directory, by writing its progress there."""
        self._read_progress()
        return self.progress is not None

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._closing:
            work.close()
        else:
            self._tasks.start(work, f"{name} {format_job(self.job)[:8]}")

    def _task_failed(self, error: BaseException) -> None:
        if not self._started:
            self._spawn(self._start_failed(f"internal error: {error!r}"), "report")

    async def _start_failed(self, why: str) -> None:
        await self._report(GuestFailed(why, elsewhere=True))
