"""The shell around one attempt: its directories, its guest, its watchers. Tells the runner core what happens.

jobs/<job>/<term>/work   the working directory, restored      .../ckpt  the checkpoint directory (a link leads here from work)
                 /out    what the job publishes               .../ctl   notice.json, progress.json
                 /logs   NNN.txt, of earlier attempts, restored
logs/<job>/NNN.txt       what attempts here have printed; they stay when the attempt is gone (`joblogs.py`)
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ckptstore.errors import SaveTorn, StoreError
from ckptstore.store import Store
from ckptstore.vault import Vault
from mesh import trees
from mesh.chores import Chores
from mesh.engine.alarm import boot_s
from mesh.engine.engine import BadCommand, Engine, EngineError, Guest, Launch
from mesh.engine.notice import give_notice
from mesh.jobs.cadence import Cadence
from mesh.jobs.commits import DONE_MARKER, CommittedTree, being_written, committed_tree, link_checkpoints
from mesh.jobs.contract import EXIT_CHECKPOINTED, MAX_PROGRESS_BYTES, Progress, decode_progress, gang_env
from mesh.jobs.courier import Courier, FetchError
from mesh.jobs.ctlfiles import put_file, read_file
from mesh.jobs.custody import Custody
from mesh.jobs.deposits import Deposits
from mesh.jobs.dumps import PARTS, Dumps
from mesh.jobs.effects import SaveCheckpoint, SaveResult
from mesh.jobs.joblogs import still_logs
from mesh.jobs.keyring import NoKey
from mesh.jobs.ledger import Commit, Ledger
from mesh.jobs.messages import Post
from mesh.jobs.reports import (
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
from mesh.jobs.spec import JobSpec, format_job
from mesh.jobs.stake import Lost, Stake
from placement.advert import Portion
from placement.allotment import percent

POLL_S = 0.25  # of the checkpoint directory and the progress file; ours
TORN_RETRIES = 5
HEEDS_EVERY = 8  # looks at the files: a guest that catches nothing may yet come to
FULL_BYTES = 1 << 20  # free space below which a program's writes fail, sooner or later; ours

log = logging.getLogger(__name__)


HaveImage = Callable[[str, bytes | None, Callable[[str], None]], Awaitable[str]]


class Abandoned(Exception):
    """It is not to start any more."""


class Attempt:
    """`tell` hands an event to the runner core; `custody` says where replicas may go now; `say` is for the user.
    `have_image` gives the id of the image that a container is to run, once the node has it (`Library.ready`)."""

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
        courier: Courier,
        seal: Callable[[bytes], bytes],
        custody: Callable[[], Custody],
        vault: Callable[[], Awaitable[Vault | None]],
        tell: Callable[[RunnerEvent], None],
        say: Callable[..., None] = lambda text, new="": None,
        have_image: HaveImage | None = None,
    ) -> None:
        self.job, self.spec, self.number, self.base, self.log_path = job, spec, number, base, log_path
        self.engine = engine
        self.progress: Progress | None = None
        self.note = ""
        self.preparing = ""  # how far what it needs has come
        self.heeds_notice: bool | None = None  # None until it was looked
        self.portions = portions  # of its GPUs
        self.held = ""  # why it stands still, whatever its lease says
        self.reserve_s = 0.0  # of the grace of a notice, which is not the guest's own
        self.rungs: dict[str, float] = {}  # of the owner's ladder: when, by CLOCK_BOOTTIME
        self._nick = nick
        self._store, self._courier = store, courier
        self._custody, self._open_vault, self._tell, self._say = custody, vault, tell, say
        self._guest: Guest | None = None
        self._until = 0.0
        self._held_at = 0.0
        self._allowed = asyncio.Event()
        self._chores = Chores(log, self._chore_failed)
        self._stake = Stake(percent(spec.gpus, spec.gpu_share), self._warn, spec.priority)
        self.cadence = Cadence(spec, base / "ctl", self._stake)
        self.deposits = Deposits(job, spec, store, courier, seal, custody, self._stake, self.cadence, say)
        self._saved_key: object = None
        self._found_key: object = None
        self._exit_was_clean = self._yielded = False
        self._started = self._unwanted = False
        self.began_unix_ms = 0  # when its guest started
        self._have_image = have_image
        self._fetching: asyncio.Future[str] | None = None
        self._notices, self._noticing = 0, asyncio.Lock()
        self._closing = False
        self._still_since = 0.0  # while it stands still for a dump
        self._dumps = Dumps(base, self._stand) if spec.saves_from_outside else None

    @property
    def guest(self) -> Guest | None:
        """Once it has started."""
        return self._guest

    # --- what the runner core orders

    def launch(self, ledger: Ledger, post: Post | None) -> None:
        self._spawn(self._launch(ledger, post), "launch")

    def save(self, order: SaveCheckpoint) -> None:
        self._spawn(self._save(order), "save checkpoint")

    def save_result(self, order: SaveResult) -> None:
        self._spawn(self._save_result(order), "save result")

    def notify(self, kind: str, grace_s: float, reason: str) -> None:
        self._spawn(self._notify(kind, grace_s, reason), "notify")

    def allow_until(self, until: float) -> None:
        self._until = until
        self._allowed.set()
        if self._guest is not None:
            self._guest.allow_until(self._may_run_until)

    def hold(self, why: str) -> None:
        """Let it stand still, whatever its lease says; for no reason: let it go on."""
        if why and not self.held:
            self._held_at = boot_s()
        elif self.held and not why:
            self._stood_still()
        self.held = why
        if self._guest is not None:
            self._guest.allow_until(self._may_run_until)

    def _stood_still(self) -> None:
        until = boot_s()
        self._stake.stood_still(self._held_at, until)
        self.cadence.stood_still(self._held_at, until)

    @property
    def _may_run_until(self) -> float:
        return 0.0 if self.held or self._still_since else self._until

    def _stand(self, still: bool) -> None:
        """For a dump."""
        if still and not self._still_since:
            self._still_since = boot_s()
        elif self._still_since and not still:
            self._stake.stood_still(self._still_since, boot_s())
            self._still_since = 0.0
        if self._guest is not None:
            self._guest.allow_until(self._may_run_until)

    async def stands_still(self) -> bool:
        return self._guest is None or await self._guest.stands_still()

    async def pids(self) -> frozenset[int]:
        return frozenset() if self._guest is None else await self._guest.pids()

    def mark(self, rung: str) -> None:
        """It has come to this rung now, if it was not there before."""
        self.rungs.setdefault(rung, boot_s())

    def lost(self) -> Lost:
        """What is lost of its work if nothing more of it is saved."""
        step = self.progress.step if self.progress is not None else None
        now = self._held_at if self.held else boot_s()
        return self._stake.lost(self.rungs.get("exited", now), step)

    def kill(self) -> None:
        self._abandon()
        self._spawn(self.kill_guest(), "kill")

    def _abandon(self) -> None:
        """Do not start it, if it has not been."""
        self._unwanted = True
        if self._fetching is not None:
            self._fetching.cancel()

    async def kill_guest(self) -> None:
        """SIGKILL to all of it; returns when nothing of it is left."""
        if self._guest is not None:
            self.mark("killed")
            await self._guest.kill()

    async def close(self) -> None:
        """Leave nothing of the attempt: no process, no directory."""
        self._closing = True
        self._abandon()
        await self.kill_guest()
        await self._chores.close()
        await asyncio.to_thread(trees.remove, self.base)

    # --- starting

    async def _launch(self, ledger: Ledger, post: Post | None) -> None:
        try:
            self.deposits.vault = await self._open_vault()
            await self._prepare(ledger)
            self.preparing = ""
            image_id = await self._image()
        except (FetchError, NoKey, StoreError, OSError) as error:
            self._tell(GuestFailed(f"its files could not be brought here: {error}", elsewhere=True))
            return
        except (EngineError, Abandoned) as error:
            self._tell(GuestFailed(str(error), elsewhere=True))
            return
        finally:
            self.preparing = ""
        resume = await asyncio.to_thread(self._resume, ledger.commit) if ledger.commit is not None else None
        while boot_s() >= self._until:  # fetching its files can outlast the lease
            self._allowed.clear()
            await self._allowed.wait()
        launch = Launch(
            job=format_job(self.job),
            attempt=self.number,
            argv=self.spec.argv,
            env=self._env(post),
            work_dir=str(self.base / "work"),
            ckpt_dir=str(self.base / "ckpt"),
            out_dir=str(self.base / "out"),
            ctl_dir=str(self.base / "ctl"),
            log_path=str(self.log_path),
            node=self._nick,
            grace_s=self.spec.grace_s,
            system=self._dumps is not None,
            dump=str(self.base / "dump") if self._dumps is not None and ledger.commit is not None else None,
            resume=resume,
            image=self.spec.image,
            image_id=image_id,
            gpus=self.portions,
            gpu_share_limit=self.spec.gpu_share_limit,
            vram_limit_mib=self.spec.vram_limit_mib,
            memory_mib=self.spec.memory_mib,
            cpus=self.spec.cpus,
            until=self._may_run_until,
            wanted=lambda: not self._unwanted,
            say=self._say,
        )
        if self._unwanted:
            self._tell(GuestFailed("it was stopped before it began", elsewhere=True))
            return
        try:
            self._guest = await self.engine.start(launch)
        except BadCommand as error:
            await asyncio.to_thread(self.log_path.write_text, f"mesh: {error}\n")
            self._tell(GuestFailed(str(error), elsewhere=False))
            return
        except EngineError as error:
            self._tell(GuestFailed(str(error), elsewhere=True))
            return
        self._guest.allow_until(self._may_run_until)  # the lease has gone on while it started
        self._started, self.began_unix_ms = True, time.time_ns() // 1_000_000
        step = ledger.commit.step if ledger.commit is not None else None
        self._stake.began(boot_s(), ledger.commit is not None, step)
        self.cadence.began(boot_s())
        self._tell(GuestStarted(step))
        self._spawn(self._watch_end(self._guest), "watch the end")
        self._spawn(self._watch_files(), "watch the files")
        if launch.dump is not None:  # as large as its memory
            self._spawn(asyncio.to_thread(trees.remove, Path(launch.dump)), "remove the dump")
        if self._unwanted:  # since it began to start, which can take seconds
            await self.kill_guest()

    async def _image(self) -> str | None:
        """What the engine calls the image, which is fetched from other nodes if it is not here; None if it needs none."""
        if self._unwanted:
            raise Abandoned("it was stopped before it began")
        if self.spec.image is None or not self.engine.own_root or self._have_image is None:
            return None
        begun = time.monotonic()
        self._fetching = asyncio.ensure_future(self._have_image(self.spec.image, self.spec.image_id, self._fetches))
        try:
            found = await self._fetching
        except asyncio.CancelledError:
            if self._unwanted and not self._closing:
                raise Abandoned("it was stopped before it began, while its image was fetched") from None
            raise
        finally:
            self._fetching = None
        if self.preparing:
            self._say(f"image {self.spec.image} came in {time.monotonic() - begun:.1f} s", "prepared")
        return found

    def _brings(self, what: str) -> Callable[[str], None]:
        def tell(words: str) -> None:
            self.preparing = f"preparing: {what}, {words}"

        return tell

    def _fetches(self, words: str) -> None:
        """How far its image has come."""
        if not self.preparing:
            self._say(f"image {self.spec.image} is not on this node: it is fetched from others", "preparing")
        self.preparing = f"preparing: image {words}"

    def _env(self, post: Post | None) -> dict[str, str]:
        env, array = dict(self.spec.env), self.spec.array
        if array is not None:
            env |= {"MESH_ARRAY_ID": format_job(array.array), "MESH_ARRAY_INDEX": str(array.index)}
            env["MESH_ARRAY_COUNT"] = str(array.of)
        return env if post is None else env | gang_env(post)

    def _resume(self, commit: Commit) -> str | None:
        """Which of the restored entries the guest is to go on from: the one that was the newest when they were saved."""
        if self.spec.checkpointing is None or self._dumps is not None:
            return None
        newest = self._store.manifest(commit.manifest).open(self.deposits.vault).note.get("resume", "")
        inside = newest not in {".", ".."} and "/" not in newest and (self.base / "ckpt" / newest).exists()
        return newest if inside else None

    async def _prepare(self, ledger: Ledger) -> None:
        """Directories as the guest will find them: working directory, last checkpoint, earlier logs."""
        base, vault, commit = self.base, self.deposits.vault, ledger.commit
        await asyncio.to_thread(trees.remove, base)
        for name in ("out", "ctl"):
            (base / name).mkdir(parents=True)
        whole = commit is not None and self._dumps is not None
        if self.spec.workdir is not None and not whole:
            holders = [*self.spec.workdir_holders, *self._custody().fallback]
            await self._courier.fetch(self.spec.workdir, holders, self._brings("working directory"))
            await asyncio.to_thread(self._store.restore, self.spec.workdir, base / "work", prefix="work", vault=vault)
        (base / "work").mkdir(exist_ok=True)
        if commit is not None:
            holders = [*commit.holders, *self._custody().fallback]
            await self._courier.fetch(commit.manifest, holders, self._brings("checkpoint"))
            kept = commit.manifest
            self.deposits.state_bytes = await asyncio.to_thread(lambda: self._store.manifest(kept).total_bytes)
            parts = {"logs": "log", **{part: part for part in (("dump", *PARTS) if whole else ("ckpt",))}}
            for place, prefix in parts.items():
                await asyncio.to_thread(self._store.restore, kept, base / place, prefix=prefix, vault=vault)
        (base / "ckpt").mkdir(exist_ok=True)
        (base / "logs").mkdir(exist_ok=True)
        if self.spec.checkpointing is not None and self._dumps is None:
            tree = committed_tree(base / "ckpt", self.spec.checkpointing, time.time(), ended=True)
            self._saved_key = self._found_key = tree.key if tree is not None else None
            await asyncio.to_thread(link_checkpoints, base, self.spec.checkpointing.directory)

    # --- watching

    async def _watch_end(self, guest: Guest) -> None:
        end = await guest.wait()
        self.mark("exited")
        self.cadence.ended()
        if self.held:
            self._stood_still()
        self._read_progress()
        self._exit_was_clean, self._yielded = end.code < 128, end.code == EXIT_CHECKPOINTED
        done = (self.base / "ckpt" / DONE_MARKER).exists()
        if self.progress is not None:
            self._tell(Progressed(self.progress.step))
        fault = end.fault or ("its node's disk is full" if end.code and self._disk_is_full() else "")
        if end.detail:
            self._say(end.detail, "ended")
        self._tell(GuestExited(code=end.code, oom=end.oom, forced_done=done, fault=fault))

    def _disk_is_full(self) -> bool:
        return shutil.disk_usage(self.base).free < FULL_BYTES

    async def _watch_files(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(POLL_S)
            looks += 1
            if self._dumps is not None:
                self.heeds_notice = True
            elif not self.heeds_notice and looks % HEEDS_EVERY == 0 and self._guest is not None:
                self.heeds_notice = self._watches_notices() or await self._guest.catches_term()
            self._hear_progress()
            if self.spec.checkpointing is not None and self._dumps is None:
                tree = await asyncio.to_thread(self._committed, False)
                self.cadence.sees(boot_s(), await asyncio.to_thread(being_written, self.base / "ckpt"))
                if tree is not None and tree.key not in (self._saved_key, self._found_key):
                    self._found_key = tree.key
                    self.cadence.saved(boot_s())
                    self._tell(CheckpointFound())

    def _hear_progress(self) -> None:
        if self._read_progress() and self.progress is not None:
            self._tell(Progressed(self.progress.step))

    def _read_progress(self) -> bool:
        """Whether the progress file says something new; a broken one says nothing."""
        with suppress(OSError):
            progress = decode_progress(read_file(self.base / "ctl" / "progress.json", MAX_PROGRESS_BYTES))
            if progress is not None and progress != self.progress:
                self.progress = progress
                return True
        return False

    def _committed(self, ended: bool) -> CommittedTree | None:
        assert self.spec.checkpointing is not None
        with suppress(FileNotFoundError):
            return committed_tree(self.base / "ckpt", self.spec.checkpointing, time.time(), ended=ended)
        return None

    # --- saving

    async def _save(self, order: SaveCheckpoint) -> None:
        try:
            stored = await (
                self._store_checkpoint(order) if self._dumps is None else self._store_dump(order, self._dumps)
            )
        except (StoreError, EngineError, OSError) as error:
            await self._not_saved(order, str(error))
        except Exception as error:  # or its end would wait for it for ever
            await self._not_saved(order, f"internal error: {error!r}")
            raise
        else:
            self.note = self.note if stored.manifest is None else self.deposits.note
            self._tell(stored)

    async def _not_saved(self, order: SaveCheckpoint, why: str) -> None:
        """The one before it stands; of the last one, which nothing follows, its user is told in the log too."""
        self.note = why
        self.cadence.failed(boot_s())
        if order.final:
            stands = "the one before it stands" if order.parent is not None else "there is none before it"
            await asyncio.to_thread(self.log_line, f"its last checkpoint could not be stored: {why}; {stands}")
            self._say(f"its last checkpoint could not be stored; {stands}: {why}", "not stored")
        self._tell(CheckpointFailed(why))

    async def _store_checkpoint(self, order: SaveCheckpoint) -> CheckpointStored:
        for remaining in reversed(range(TORN_RETRIES)):
            self._hear_progress()  # a program tells its step before it saves it
            tree = await asyncio.to_thread(self._committed, order.final and self._exit_was_clean)
            if tree is None or tree.key == self._saved_key:
                if order.final and self._yielded:
                    self._stake.yielded(self.rungs["exited"])
                return CheckpointStored(None, (), None)
            step = self.progress.step if self.progress is not None else None
            logs = await asyncio.to_thread(still_logs, self.base, self.log_path)
            try:
                stored = await self.deposits.checkpoint({**tree.roots, "log": logs}, order, boot_s(), step, tree.resume)
            except SaveTorn:
                if not remaining:
                    raise
                await asyncio.sleep(POLL_S)
                continue
            self._saved_key = self._found_key = tree.key
            return stored
        raise SaveTorn("the checkpoint directory would not stand still")

    async def _store_dump(self, order: SaveCheckpoint, dumps: Dumps) -> CheckpointStored:
        begun = boot_s()
        dumped = await dumps.last(None if order.final else self._guest)
        if dumped is None:
            return CheckpointStored(None, (), None)
        self.cadence.saved(boot_s(), dumped.stood_s)
        step = self.progress.step if self.progress is not None else None
        logs = await asyncio.to_thread(still_logs, self.base, self.log_path)
        try:
            stored = await self.deposits.checkpoint({**dumped.roots, "log": logs}, order, begun, step)
        finally:
            await dumps.drop(dumped)
        return msgspec.structs.replace(stored, like=dumped.like)

    async def _save_result(self, order: SaveResult) -> None:
        try:
            self.deposits.vault = await self._open_vault()  # it may never have come to start
            roots = {"log": await asyncio.to_thread(still_logs, self.base, self.log_path)}
            if (self.base / "out").is_dir():
                roots["out"] = self.base / "out"
            self._tell(ResultStored(*await self.deposits.result(roots, order)))
        except (NoKey, StoreError, OSError) as error:
            self._tell(ResultStored(None, (), f"its files could not be kept: {error}"))
        except Exception as error:  # or its end would wait for it for ever
            self._tell(ResultStored(None, (), f"its files could not be kept: internal error: {error!r}"))
            raise

    # --- notices

    async def _notify(self, kind: str, grace_s: float, reason: str) -> None:
        if kind == "checkpoint" and "notice" in self.rungs:
            return
        if self._dumps is not None and kind == "checkpoint":
            self._tell(CheckpointFound())
            return
        self._notices += 1
        own_s = grace_s
        if kind == "vacate":
            self.cadence.ended()
            self._stake.noticed(boot_s(), grace_s)
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
            async with self._noticing:  # the last one is the one that stays
                await asyncio.to_thread(put_file, self.base / "ctl" / "notice.json", json.dumps(notice).encode())
        except OSError as error:  # a full disk: who catches SIGTERM hears of it all the same
            log.warning("the notice to %s cannot be written: %s", format_job(self.job)[:8], error)
        if kind != "vacate" or self._guest is None:
            return
        await asyncio.to_thread(self.log_line, f"{reason}: {own_s:g} s to save")
        if not await give_notice(self._guest, self._may_run_until, self._watches_notices):
            # Nobody would act on it: the last checkpoint is all there will be, so the owner need not wait.
            await self.kill_guest()

    async def _part(self, guest: Guest, dumps: Dumps, reason: str) -> None:
        """Save all of a guest that knows of nothing, and end it."""
        try:
            await dumps.part(guest)
            self.mark("saved")
            await asyncio.to_thread(self.log_line, f"{reason}: all of it is saved here, and now stored elsewhere")
        except (EngineError, OSError) as error:
            words = f"no system checkpoint at the notice: {error}; the last one stands"
            await asyncio.to_thread(self.log_line, words)
            self._say(words, "late")
        await self.kill_guest()

    def log_line(self, text: str) -> None:
        """For its user, among what it has printed itself. A full disk keeps the line away, and nothing else."""
        with suppress(OSError), self.log_path.open("a") as file:
            file.write(f"mesh: {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _warn(self, text: str) -> None:
        """Of a last checkpoint that is likely to be late."""
        self.note = text
        self._say(text, "late")

    def _watches_notices(self) -> bool:
        """Whether the job has shown that it reads its control directory (it wrote progress there)."""
        self._read_progress()
        return self.progress is not None

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._closing:
            work.close()
        else:
            self._chores.start(work, f"{name} {format_job(self.job)[:8]}")

    def _chore_failed(self, error: BaseException) -> None:
        if not self._started:
            self._tell(GuestFailed(f"internal error: {error!r}", elsewhere=True))
