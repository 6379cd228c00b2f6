"""Orders of `mesh lend`, `pause` and `reclaim`."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from membership.durable import write_durably
from membership.identity import short_id
from membership.node import MembershipNode
from membership.trust import PROVIDER
from mesh.api import schemas
from mesh.api.requests import LendOrder, ReclaimOrder
from mesh.execution.killswitch import BY_OWNER, KillSwitch
from mesh.gpus.inventory import Inventory, Lending
from mesh.jobs.service import JobService
from mesh.model.spec import format_job
from mesh.network.edge import Edge
from mesh.network.switch import MIGRATION
from mesh.provider.owner import LOOK_S, Owner
from mesh.provider.policy import PolicyError, with_hours
from mesh.provider.presence import MACHINE
from mesh.provider.reclaim import Leave, Reclaimer
from mesh.util.errors import ExitCode, MeshError
from mesh.util.structs import copy_as
from mesh.util.task_set import TaskSet
from placement.advert import WHOLE
from placement.allocation import gpu_percent
from placement.destination import LIKELY

BY_HAND = "its owner took the machine back"

log = logging.getLogger(__name__)


class LendingHandlers:
    """`policy_file`, `lending_file`: where the owner's policy and their last order are kept."""

    def __init__(
        self,
        membership: MembershipNode,
        inventory: Inventory,
        jobs: JobService,
        owner: Owner,
        reclaimer: Reclaimer,
        switch: KillSwitch,
        edge: Edge,
        policy_file: Path,
        lending_file: Path,
        advert_changed: Callable[[], None],
    ) -> None:
        self._membership, self._inventory, self._jobs = membership, inventory, jobs
        self._owner, self._reclaimer, self._switch, self._edge = owner, reclaimer, switch, edge
        self._policy_file, self._lending_file = policy_file, lending_file
        self._problems, self._advert_changed = membership.problems, advert_changed
        self._tasks = TaskSet(log)

    @property
    def barred(self) -> str:
        """Why this node may not lend, whatever its owner says; empty if it may."""
        return "" if PROVIDER in self._membership.credentials.roles else "your certificate has no role provider"

    def lend_state(self) -> schemas.owner.Lend:
        """Return what is lent now and why, and what the owner's policy has observed."""
        owner, lending = self._owner, self._inventory.lending
        gpus: list[schemas.owner.LentGpu] = [
            copy_as(
                schemas.owner.LentGpu,
                owner.stands[gpu.uuid],
                index=index,
                uuid=gpu.uuid,
                model=gpu.model,
                withheld=gpu.uuid in lending.withheld,
                programs=[schemas.owner.Program(pid=pid, name=name) for pid, name in owner.programs.get(gpu.uuid, [])],
            )
            for index, gpu in enumerate(self._inventory.gpus)
        ]
        return schemas.owner.Lend(
            lending=lending.lending and not self.barred,
            barred=self.barred,
            paused=lending.paused,
            paused_until_unix=lending.until_unix if lending.paused else 0,
            now=lending.lending and not self.barred and not lending.paused and not self._inventory.presence.held_by,
            guests=len(self._jobs.participant.hosted),
            machine=copy_as(schemas.owner.Stand, owner.stands[MACHINE]),
            gpus=gpus,
            hours=str(owner.policy.hours),
            hours_change_unix=owner.opens_at(),
            typed_s=owner.typed_s,
            typing_seen_by=list(owner.console.sources),
            load=owner.load,
            memory_wait=owner.memory_wait,
            policy=copy_as(schemas.owner.Policy, owner.policy, hours=str(owner.policy.hours)),
            policy_file=str(self._policy_file),
            problem=self._problems.get("policy", ""),
            warnings=owner.warnings(),
        )

    async def lend(self, order: LendOrder) -> schemas.owner.Lend:
        """Start or stop lending, or set its hours."""
        if order.on:
            self._check_role()
        if order.hours is not None:
            await asyncio.to_thread(self._write_hours, tuple(order.hours))
        if order.on is not None:
            await self.set_paused(not order.on)
        await self._owner.look()
        return self.lend_state()

    def _check_role(self) -> None:
        if self.barred:
            raise MeshError(f"not lending: {self.barred} (`mesh member ls`)", ExitCode.REFUSED)

    def _write_hours(self, texts: tuple[str, ...]) -> None:
        path = self._policy_file
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            changed = with_hours(text, texts)
        except (PolicyError, UnicodeDecodeError) as error:
            where = "" if str(error).startswith("hours:") else f"{path}: "
            raise MeshError(f"{where}{error}", ExitCode.USAGE) from error
        write_durably(path, changed.encode())

    async def set_paused(
        self, paused: bool, gpu: str | None = None, for_s: float | None = None
    ) -> schemas.owner.Paused:
        """Pause or resume the machine, or one GPU; `for_s`: length of a pause. Resuming the machine resumes every GPU."""
        before = self._inventory.lending
        if not paused:
            self._check_role()
        if for_s is not None and (gpu is not None or not paused):
            raise MeshError("only a pause of the machine ends by itself", ExitCode.USAGE)
        if gpu is not None:
            uuid = self.find_gpu(gpu)
            others = [each for each in before.withheld if each != uuid]
            after = msgspec.structs.replace(before, withheld=tuple([*others, uuid] if paused else others))
        elif paused:
            after = msgspec.structs.replace(before, paused=True, until_unix=int(time.time() + for_s) if for_s else 0)
        else:
            after = Lending(lending=True)
        return await self._take(after, not paused)

    async def end_pauses(self, say: Callable[[str], None]) -> None:
        """End timed pauses at their time, also after a restart, until cancelled."""
        while True:
            lending = self._inventory.lending
            if lending.paused and 0 < lending.until_unix <= time.time():
                say("its owner's pause is over")
                await self._take(msgspec.structs.replace(lending, paused=False, until_unix=0), True)
            await asyncio.sleep(LOOK_S)

    async def _take(self, after: Lending, lends: bool) -> schemas.owner.Paused:
        if lends:
            self._switch.release()
            self._edge.restore()
        self._inventory.lending = after
        self._advert_changed()
        try:
            await asyncio.to_thread(write_durably, self._lending_file, msgspec.json.encode(after))
            self._problems.pop("lending", None)
        except OSError as error:  # the order counts all the same
            words = f"{self._lending_file} cannot be written ({error.strerror}): a restart forgets what you said"
            self._problems["lending"] = words
        guests = len(self._jobs.participant.hosted)
        return schemas.owner.Paused(
            paused=after.paused,
            lending=after.lending,
            withheld=list(after.withheld),
            guests=guests,
            until_unix=after.until_unix,
            problem=self._problems.get("lending", ""),
        )

    def find_gpu(self, text: str) -> str:
        """Return the UUID of the GPU with this number or UUID prefix."""
        uuids = [gpu.uuid for gpu in self._inventory.gpus]
        if text.isascii() and text.isdecimal() and len(text) < 4 and int(text) < len(uuids):
            return uuids[int(text)]
        fits = [
            uuid for uuid in uuids if text and (uuid.startswith(text) or uuid.removeprefix("GPU-").startswith(text))
        ]
        if len(fits) != 1:
            known = ", ".join(f"{index}: {uuid}" for index, uuid in enumerate(uuids)) or "none"
            raise MeshError(
                f"{len(fits) or 'no'} GPUs of this machine fit {text!r} (it has {known})", ExitCode.NOT_FOUND
            )
        return fits[0]

    def rehearsed(self, order: ReclaimOrder) -> schemas.owner.Rehearsed:
        """Return the cost of a reclaim; change nothing."""
        uuid = None if order.gpu is None else self.find_gpu(order.gpu)
        return schemas.owner.Rehearsed(
            dry_run=True,
            gpu=uuid,
            guests=self._costs(uuid, 0.0 if order.now else self.notice_s(order.grace_s)),
        )

    def notice_s(self, grace_s: float | None = None) -> float:
        """Return the notice that guests get: as asked for, else by the owner's policy."""
        return self._owner.notice_s if grace_s is None else grace_s

    async def reclaim(self, order: ReclaimOrder) -> schemas.owner.Reclaimed:
        """Take the machine back, or one GPU of it: no new work there, and every guest of it gone when this returns."""
        assert not order.dry_run, "that is `rehearsed`"
        uuid = None if order.gpu is None else self.find_gpu(order.gpu)
        # The client may stop waiting at any time. The order stands: lending is paused, and the guests must leave.
        return await asyncio.shield(self._tasks.start(self._reclaim(order, uuid), "reclaim"))

    async def _reclaim(self, order: ReclaimOrder, uuid: str | None) -> schemas.owner.Reclaimed:
        begun = time.monotonic()
        if order.now and uuid is None:
            self._switch.kill_all()
            return self._told(await self.settle_strike(), None, begun)
        await self.set_paused(True, uuid)
        guests = self._guests_of(uuid)
        reason, why = (BY_HAND, "by hand") if uuid is None else (f"its owner took GPU {uuid} back", "a GPU, by hand")
        if order.now:
            jobs = await self._reclaimer.kill(guests, f"{reason} at once", f"{why}, at once")
        else:
            leave = Leave(self.notice_s(order.grace_s), self._owner.policy.pause, reason, why, by_hand=True)
            jobs = await self._reclaimer.leave(guests, leave)
        return self._told(jobs, uuid, begun)

    async def settle_strike(self) -> list[bytes]:
        """Finish a reclaim by the kill-switch: lending stays paused, and each job records why it ended here."""
        jobs: list[bytes]
        jobs, _ = await asyncio.gather(self._reclaimer.kill(None, BY_OWNER, "by hand, at once"), self.set_paused(True))
        # No checkpoint is in a hurry any more; those that others keep here may be all that is left of their jobs.
        self._edge.restore(MIGRATION)
        return jobs

    def _told(self, jobs: list[bytes], uuid: str | None, begun: float) -> schemas.owner.Reclaimed:
        seconds = round(time.monotonic() - begun, 3)
        departures: list[schemas.owner.Gone] = [
            schemas.owner.Gone(
                job=format_job(job),
                user=gone.user,
                name=gone.name,
                reason=gone.reason,
                lost_s=round(gone.lost.seconds, 3),
                lost_steps=gone.lost.steps,
                stages_ms=gone.stages_ms,
            )
            for job in jobs
            if (gone := self._reclaimer.departed.get(job)) is not None
        ]
        return schemas.owner.Reclaimed(
            reclaimed=[format_job(job) for job in jobs],
            gpu=uuid,
            seconds=seconds,
            guests=departures,
            problem=self._problems.get("lending", ""),
        )

    def _guests_of(self, uuid: str | None) -> list[bytes]:
        hosted = self._jobs.participant.hosted
        if uuid is None:
            return hosted
        return [job for job in hosted if any(portion.uuid == uuid for portion in self._inventory.portions_of(job))]

    def _costs(self, uuid: str | None, notice_s: float) -> list[schemas.owner.Cost]:
        """Return the affected jobs, their destinations and the work they would lose, by the plan that a reclaim would follow."""
        nicks = {member.node_id: member.nick for member in self._membership.members()}
        leaving = self._jobs.departure_planner
        window_s = (
            notice_s + self._owner.policy.pause if notice_s > 0 else 0.0
        )  # what is saved is shipped during the pause, too
        planned, found = leaving.plan(self._guests_of(uuid), window_s)
        plans = {place.job: (guest, place) for guest, place in zip(planned, found.destinations, strict=True)}
        turns = {found.destinations[place].job: turn for turn, place in enumerate(found.order)}
        rows: list[schemas.owner.Cost] = []
        for job in self._guests_of(uuid):
            attempt, runner = self._jobs.attempts.get(job), self._jobs.participant.runners.get(job)
            if attempt is None:
                continue
            commit = runner.record.commit if runner is not None else None
            running_ms = runner.attempt.running_unix_ms if runner is not None else 0
            lost, spec = attempt.lost(), attempt.spec
            guest, destination = plans.get(job, (None, None))
            place, to = (None, None) if destination is None else (destination.place, destination.to)
            size = None if destination is None or guest is None or guest.state is None else int(destination.bytes)
            save_s = None if attempt.writer.last_save is None else attempt.writer.last_save[1]
            known = to is not None and leaving.path(to).source != "guessed"
            ship_s = destination.seconds if destination is not None and size is not None and known else None
            chance = (
                destination.chance if destination is not None and ship_s is not None and save_s is not None else None
            )
            saves = spec.checkpointing is not None
            fits = None if chance is None else chance >= LIKELY
            kept = saves and notice_s > 0 and attempt.heeds_notice is not False and fits is not False
            rows.append(
                schemas.owner.Cost(
                    job=format_job(job),
                    name=spec.name,
                    user=spec.user,
                    gpus=[portion.uuid for portion in attempt.portions],
                    leads=runner is not None,
                    ran_s=round(max(0.0, time.time() - running_ms / 1000), 1) if running_ms else 0.0,
                    checkpoint=None if commit is None else copy_as(schemas.owner.Kept, commit),
                    at_risk_s=round(lost.seconds, 1),
                    at_risk_gpu_s=round(lost.seconds * gpu_percent(spec.gpus, spec.gpu_share) / WHOLE, 1),
                    at_risk_steps=lost.steps,
                    heeds_notice=attempt.heeds_notice,
                    notice_s=notice_s,
                    save_s=None if save_s is None else round(save_s, 3),
                    ship_bytes=size,
                    ship_s=None if ship_s is None else round(ship_s, 3),
                    sent_to=None if to is None else nicks.get(to, short_id(to)),
                    turn=turns.get(job),
                    chance=None if chance is None else round(chance, 3),
                    in_time=fits,
                    goes_to=None if place is None else nicks.get(place, short_id(place)),
                    plan="" if guest is None or destination is None else leaving.describe(guest, destination, window_s),
                    loses="" if kept else lost.text,
                )
            )
        return rows
