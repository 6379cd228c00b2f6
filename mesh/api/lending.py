"""`mesh lend`, `pause`, `resume`, `reclaim`: the owner's word on what is lent."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from membership.durable import write_durably
from membership.identity import short_id
from mesh.api.errors import ExitCode, MeshError
from mesh.api.orders import LendOrder, ReclaimOrder
from mesh.edge.switch import MIGRATION
from mesh.engine.killswitch import BY_OWNER
from mesh.jobs.spec import format_job
from mesh.provider.inventory import Lending
from mesh.provider.ladder import Leave
from mesh.provider.owner import LOOK_S
from mesh.provider.policy import Policy, PolicyError, with_hours
from mesh.provider.presence import MACHINE, Stand
from placement.advert import WHOLE
from placement.allotment import percent
from placement.destination import LIKELY

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon

BY_HAND = "its owner took the machine back"


def lend_state(daemon: "Daemon") -> "answers.owner.Lend":
    """What is lent now, by whose word, and what the owner's policy has seen."""
    owner, lending = daemon.owner, daemon.inventory.lending
    gpus: list[answers.owner.LentGpu] = [
        {
            "index": index,
            "uuid": gpu.uuid,
            "model": gpu.model,
            "withheld": gpu.uuid in lending.withheld,
            **_stand(owner.stands[gpu.uuid]),
            "programs": [{"pid": pid, "name": name} for pid, name in owner.programs.get(gpu.uuid, [])],
        }
        for index, gpu in enumerate(daemon.inventory.gpus)
    ]
    return {
        "lending": lending.lending,
        "paused": lending.paused,
        "paused_until_unix": lending.until_unix if lending.paused else 0,
        "now": lending.lending and not lending.paused and not daemon.inventory.presence.held_by,
        "guests": len(daemon.jobs.participant.hosted),
        "machine": _stand(owner.stands[MACHINE]),
        "gpus": gpus,
        "hours": str(owner.policy.hours),
        "hours_change_unix": owner.opens_at(),
        "typed_s": owner.typed_s,
        "typing_seen_by": list(owner.console.sources),
        "load": owner.load,
        "policy": _policy(owner.policy),
        "policy_file": str(daemon.layout.policy),
        "problem": daemon.membership.problems.get("policy", ""),
        "warnings": owner.warnings(),
    }


def _stand(stand: Stand) -> "answers.owner.Stand":
    return {
        "level": stand.level,
        "causes": stand.causes,
        "pressing": stand.pressing,
        "next_s": stand.next_s,
        "why": stand.why,
    }


def _policy(policy: Policy) -> "answers.owner.Policy":
    return {
        "hours": str(policy.hours),
        "gpu": policy.gpu,
        "ignore": policy.ignore,
        "keyboard": policy.keyboard,
        "load": policy.load,
        "notice": policy.notice,
        "pause": policy.pause,
        "gpu_clocks": policy.gpu_clocks,
        "keyboard_clocks": policy.keyboard_clocks,
        "load_clocks": policy.load_clocks,
        "calendar_clocks": policy.calendar_clocks,
    }


async def lend(daemon: "Daemon", order: LendOrder) -> "answers.owner.Lend":
    """Lend or not, and in which hours."""
    if order.hours is not None:
        await asyncio.to_thread(_write_hours, daemon, tuple(order.hours))
    if order.on is not None:
        await set_paused(daemon, not order.on)
    await daemon.owner.look()
    return lend_state(daemon)


def _write_hours(daemon: "Daemon", texts: tuple[str, ...]) -> None:
    path = daemon.layout.policy
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        changed = with_hours(text, texts)
    except (PolicyError, UnicodeDecodeError) as error:
        where = "" if str(error).startswith("hours:") else f"{path}: "
        raise MeshError(f"{where}{error}", ExitCode.USAGE) from error
    write_durably(path, changed.encode())


async def set_paused(
    daemon: "Daemon", paused: bool, gpu: str | None = None, for_s: float | None = None
) -> "answers.owner.Paused":
    """The machine, or one GPU of it; the machine perhaps for so long only. Lending the machine again lends all of it."""
    before = daemon.inventory.lending
    if for_s is not None and (gpu is not None or not paused):
        raise MeshError("only a pause of the machine ends by itself", ExitCode.USAGE)
    if gpu is not None:
        uuid = find_gpu(daemon, gpu)
        others = [each for each in before.withheld if each != uuid]
        after = msgspec.structs.replace(before, withheld=tuple([*others, uuid] if paused else others))
    elif paused:
        after = msgspec.structs.replace(before, paused=True, until_unix=int(time.time() + for_s) if for_s else 0)
    else:
        after = Lending(lending=True)
    return await _take(daemon, after, not paused)


async def end_pauses(daemon: "Daemon", say: Callable[[str], None]) -> None:
    """Those that were to end by themselves, each at its time, also after a restart."""
    while True:
        lending = daemon.inventory.lending
        if lending.paused and 0 < lending.until_unix <= time.time():
            say("its owner's pause is over")
            await _take(daemon, msgspec.structs.replace(lending, paused=False, until_unix=0), True)
        await asyncio.sleep(LOOK_S)


async def _take(daemon: "Daemon", after: Lending, lends: bool) -> "answers.owner.Paused":
    if lends:
        daemon.switch.release()
        daemon.edge.restore()
    daemon.inventory.lending = after
    daemon.refresh_advert(force=True)
    try:
        await asyncio.to_thread(write_durably, daemon.layout.lending, msgspec.json.encode(after))
        daemon.membership.problems.pop("lending", None)
    except OSError as error:  # what he has said counts all the same
        words = f"{daemon.layout.lending} cannot be written ({error.strerror}): a restart forgets what you said"
        daemon.membership.problems["lending"] = words
    guests = len(daemon.jobs.participant.hosted)
    return {
        "paused": after.paused,
        "lending": after.lending,
        "withheld": list(after.withheld),
        "guests": guests,
        "until_unix": after.until_unix,
    }


def find_gpu(daemon: "Daemon", text: str) -> str:
    """By its number here, or the beginning of its UUID."""
    uuids = [gpu.uuid for gpu in daemon.inventory.gpus]
    if text.isascii() and text.isdecimal() and len(text) < 4 and int(text) < len(uuids):
        return uuids[int(text)]
    fits = [uuid for uuid in uuids if text and (uuid.startswith(text) or uuid.removeprefix("GPU-").startswith(text))]
    if len(fits) != 1:
        known = ", ".join(f"{index}: {uuid}" for index, uuid in enumerate(uuids)) or "none"
        raise MeshError(f"{len(fits) or 'no'} GPUs of this machine fit {text!r} (it has {known})", ExitCode.NOT_FOUND)
    return fits[0]


def rehearsed(daemon: "Daemon", order: ReclaimOrder) -> "answers.owner.Rehearsed":
    """What that would cost; it changes nothing."""
    uuid = None if order.gpu is None else find_gpu(daemon, order.gpu)
    return {
        "dry_run": True,
        "gpu": uuid,
        "guests": _costs(daemon, uuid, 0.0 if order.now else _notice_s(daemon, order)),
    }


def _notice_s(daemon: "Daemon", order: ReclaimOrder) -> float:
    return daemon.owner.notice_s if order.grace_s is None else order.grace_s


async def reclaim(daemon: "Daemon", order: ReclaimOrder) -> "answers.owner.Reclaimed":
    """Take the machine back, or one GPU of it: no new work there, and every guest of it gone when this returns."""
    assert not order.dry_run, "that is `rehearsed`"
    uuid = None if order.gpu is None else find_gpu(daemon, order.gpu)
    begun = time.monotonic()
    if order.now and uuid is None:
        daemon.switch.strike()
        return _told(daemon, await settle_strike(daemon), None, begun)
    await set_paused(daemon, True, uuid)
    guests = _guests_of(daemon, uuid)
    reason, why = (BY_HAND, "by hand") if uuid is None else (f"its owner took GPU {uuid} back", "a GPU, by hand")
    if order.now:
        jobs = await daemon.ladder.kill(guests, f"{reason} at once", f"{why}, at once")
    else:
        leave = Leave(_notice_s(daemon, order), daemon.owner.policy.pause, reason, why, by_hand=True)
        jobs = await daemon.ladder.leave(guests, leave)
    return _told(daemon, jobs, uuid, begun)


async def settle_strike(daemon: "Daemon") -> list[bytes]:
    """What follows when the kill-switch was pressed: lending stays paused, and each job knows why it ended here."""
    jobs: list[bytes]
    jobs, _ = await asyncio.gather(daemon.ladder.kill(None, BY_OWNER, "by hand, at once"), set_paused(daemon, True))
    # No checkpoint is in a hurry any more; those that others keep here may be all that is left of their jobs.
    daemon.edge.restore(MIGRATION)
    return jobs


def _told(daemon: "Daemon", jobs: list[bytes], uuid: str | None, begun: float) -> "answers.owner.Reclaimed":
    seconds = round(time.monotonic() - begun, 3)
    told: list[answers.owner.Gone] = [
        {
            "job": format_job(job),
            "user": gone.user,
            "name": gone.name,
            "reason": gone.reason,
            "lost_s": round(gone.lost.seconds, 3),
            "lost_steps": gone.lost.steps,
            "rungs_ms": gone.rungs_ms,
        }
        for job in jobs
        if (gone := daemon.ladder.told.get(job)) is not None
    ]
    return {"reclaimed": [format_job(job) for job in jobs], "gpu": uuid, "seconds": seconds, "guests": told}


def _guests_of(daemon: "Daemon", uuid: str | None) -> list[bytes]:
    hosted = daemon.jobs.participant.hosted
    if uuid is None:
        return hosted
    return [job for job in hosted if any(portion.uuid == uuid for portion in daemon.inventory.portions_of(job))]


def _costs(daemon: "Daemon", uuid: str | None, notice_s: float) -> "list[answers.owner.Cost]":
    """Whose work would go, where, and what that would cost, by what is known now: the plan that a reclaim would follow."""
    nicks = {member.node_id: member.nick for member in daemon.membership.members()}
    leaving = daemon.jobs.leaving
    window_s = (
        notice_s + daemon.owner.policy.pause if notice_s > 0 else 0.0
    )  # what is saved is shipped during the pause, too
    planned, found = leaving.plan(_guests_of(daemon, uuid), window_s)
    plans = {place.job: (guest, place) for guest, place in zip(planned, found.destinations, strict=True)}
    turns = {found.destinations[place].job: turn for turn, place in enumerate(found.order)}
    rows: list[answers.owner.Cost] = []
    for job in _guests_of(daemon, uuid):
        attempt, runner = daemon.jobs.attempts.get(job), daemon.jobs.participant.runners.get(job)
        if attempt is None:
            continue
        commit = runner.ledger.commit if runner is not None else None
        running_ms = runner.attempt.running_unix_ms if runner is not None else 0
        lost, spec = attempt.lost(), attempt.spec
        guest, destination = plans.get(job, (None, None))
        place, to = (None, None) if destination is None else (destination.place, destination.to)
        size = None if destination is None or guest is None or guest.state is None else int(destination.bytes)
        save_s = None if attempt.deposits.last_save is None else attempt.deposits.last_save[1]
        known = to is not None and leaving.path(to).source != "guessed"
        ship_s = destination.seconds if destination is not None and size is not None and known else None
        chance = destination.chance if destination is not None and ship_s is not None and save_s is not None else None
        saves = spec.checkpointing is not None
        fits = None if chance is None else chance >= LIKELY
        kept = saves and notice_s > 0 and attempt.heeds_notice is not False and fits is not False
        rows.append(
            {
                "job": format_job(job),
                "name": spec.name,
                "user": spec.user,
                "gpus": [portion.uuid for portion in attempt.portions],
                "leads": runner is not None,
                "ran_s": round(max(0.0, time.time() - running_ms / 1000), 1) if running_ms else 0.0,
                "checkpoint": None
                if commit is None
                else {"seq": commit.seq, "step": commit.step, "created_unix_ms": commit.created_unix_ms},
                "at_risk_s": round(lost.seconds, 1),
                "at_risk_gpu_s": round(lost.seconds * percent(spec.gpus, spec.gpu_share) / WHOLE, 1),
                "at_risk_steps": lost.steps,
                "heeds_notice": attempt.heeds_notice,
                "notice_s": notice_s,
                "save_s": None if save_s is None else round(save_s, 3),
                "ship_bytes": size,
                "ship_s": None if ship_s is None else round(ship_s, 3),
                "sent_to": None if to is None else nicks.get(to, short_id(to)),
                "turn": turns.get(job),
                "chance": None if chance is None else round(chance, 3),
                "in_time": fits,
                "goes_to": None if place is None else nicks.get(place, short_id(place)),
                "plan": "" if guest is None or destination is None else leaving.words(guest, destination, window_s),
                "loses": "" if kept else lost.words,
            }
        )
    return rows
