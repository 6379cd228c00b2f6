"""Metrics of this node for Prometheus (docs/reference/metrics.md)."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from aiohttp import web

from ckptstore.store import Store
from membership.identity import NodeId
from membership.node import MembershipNode, PortInUse
from mesh.api.exposition import CONTENT_TYPE, Histogram, Sheet
from mesh.api.metric_names import METRICS, OTHER, STAGE_BOUNDS_S, STAGES
from mesh.gpus.guard import NodeGuard
from mesh.gpus.guarded_engine import GuardedEngine
from mesh.gpus.inventory import Inventory
from mesh.gpus.nvml import Reading, readings
from mesh.jobs.attempt import Attempt
from mesh.jobs.service import JobService
from mesh.provider.accounts import Accounts
from mesh.rpc.departed import departed
from mesh.rpc.pacing import Wire
from mesh.util.version import VERSION
from mesh.util.versions import STATE, WIRE
from placement.advert import WHOLE, Portion

FRESH_S = 1.0  # for which an answer is repeated, so that frequent requests do not wake the driver (own choice)
STATES = {"pending", "starting", "running", "suspended", "vacating", "saving", "releasing", "ending"} | {
    "done",
    "failed",
    "cancelled",
}


class ReclaimTimes:
    """Durations of reclaim stages since the daemon started."""

    def __init__(self) -> None:
        self.stages = {name: Histogram(STAGE_BOUNDS_S) for name in STAGES}
        self.count = 0

    def observe(self, stages_s: Mapping[str, float]) -> None:
        """Count one attempt that was taken back; `stages_s`: seconds from the order to each stage."""
        self.count += 1
        for stage, seconds in stages_s.items():
            if stage in self.stages:
                self.stages[stage].observe(seconds)


class Metrics:
    """`image_bytes`: of images, received from other nodes. `counters`: of membership, job cores and the API for peers.
    `started_unix`: start of the daemon.
    """

    def __init__(
        self,
        me: NodeId,
        membership: MembershipNode,
        inventory: Inventory,
        guard: NodeGuard,
        engines: Mapping[str, GuardedEngine],
        jobs: JobService,
        accounts: Accounts,
        reclaims: ReclaimTimes,
        wire: Wire,
        store: Store,
        image_bytes: Callable[[], int],
        counters: Callable[[], Counter[str]],
        started_unix: float,
    ) -> None:
        self._me, self._membership, self._inventory, self._guard = me, membership, inventory, guard
        self._engines, self._jobs, self._accounts, self._reclaims = engines, jobs, accounts, reclaims
        self._wire, self._store, self._counters, self._started_unix = wire, store, counters, started_unix
        self._image_bytes = image_bytes
        self._told: tuple[float, str] = (-FRESH_S, "")
        self._asking = asyncio.Lock()

    async def text(self) -> str:
        async with self._asking:
            at, text = self._told
            if time.monotonic() - at >= FRESH_S:
                text = self._write(await asyncio.to_thread(readings), await asyncio.to_thread(_process))
                self._told = (time.monotonic(), text)
            return text

    async def answer(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=(await self.text()).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def serve(self, host: str, port: int) -> web.AppRunner:
        """Serve the metrics alone on a TCP port. PortInUse if it is taken."""
        app = web.Application(middlewares=[departed])
        app.router.add_get("/metrics", self.answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise PortInUse(
                f"port {port} on {host} cannot be had for metrics ({error.strerror}). "
                "`mesh config set metrics_port PORT` chooses another"
            ) from error
        return runner

    def _write(self, gpus: tuple[Reading, ...], process: dict[str, float]) -> str:
        sheet = Sheet(METRICS)
        sheet.put("mesh_build_info", 1, version=VERSION, wire=str(WIRE), state=str(STATE))
        sheet.put("mesh_started_time_seconds", self._started_unix)
        for name, value in process.items():
            sheet.put(name, value)
        for gpu in gpus:
            sheet.put("mesh_gpu_info", 1, gpu=gpu.uuid, model=gpu.model)
            sheet.put("mesh_gpu_utilization_ratio", gpu.busy, gpu=gpu.uuid)
            sheet.put("mesh_gpu_memory_used_bytes", gpu.used_bytes, gpu=gpu.uuid)
            sheet.put("mesh_gpu_memory_total_bytes", gpu.total_bytes, gpu=gpu.uuid)
            sheet.put("mesh_gpu_temperature_celsius", gpu.celsius, gpu=gpu.uuid)
            sheet.put("mesh_gpu_power_watts", gpu.watts, gpu=gpu.uuid)
        self._lent(sheet)
        self._guests(sheet)
        self._mesh(sheet)
        self._checkpoints(sheet)
        return sheet.text()

    def _lent(self, sheet: Sheet) -> None:
        inventory, advert = self._inventory, self._inventory.advert()
        lending = inventory.lending
        present = inventory.presence.held_by == "owner"
        sheet.put("mesh_lending", lending.lending and not lending.paused and not inventory.presence.held_by)
        sheet.put("mesh_paused", lending.paused)
        sheet.put("mesh_owner_present", present)
        sheet.put("mesh_slots", advert.slots)
        sheet.put("mesh_slots_free", advert.slots_free)
        given: dict[str, list[Portion]] = {gpu.uuid: [] for gpu in advert.gpus}
        for attempt in self._jobs.attempts.values():
            for portion in attempt.portions:
                given.setdefault(portion.uuid, []).append(portion)
        for uuid, portions in given.items():
            sheet.put("mesh_gpu_share_given_ratio", sum(one.share for one in portions) / WHOLE, gpu=uuid)
            sheet.put("mesh_gpu_memory_given_bytes", sum(one.vram_mib for one in portions) << 20, gpu=uuid)
        for uuid, foreign in self._guard.foreign.items():
            sheet.put("mesh_gpu_foreign_bytes", foreign.memory, gpu=uuid)

    def _guests(self, sheet: Sheet) -> None:
        accounts, attempts = self._accounts, self._jobs.attempts
        states = Counter((attempt.engine.name, _guest_state(attempt)) for attempt in attempts.values())
        for name, engine in self._engines.items():
            for state in ("preparing", "running", "still"):
                sheet.put("mesh_guests", states[name, state], engine=name, state=state)
            for result in ("ok", "failed"):
                sheet.put("mesh_guest_starts_total", engine.starts[result], engine=name, result=result)
            sheet.put("mesh_attempt_seconds_total", accounts.ran_s[name], engine=name)
        for (name, end), count in sorted(accounts.ended.items()):
            sheet.put("mesh_attempts_ended_total", count, engine=name, end=end)
        sheet.put("mesh_gpu_seconds_total", accounts.gpu_s)
        sheet.put("mesh_checkpoints_total", self._jobs.event_log.counts["checkpoint"])
        now_ms, statuses = time.time() * 1000, self._jobs.job_table.all()
        risks = [
            status.at_risk_s(now_ms) for job in attempts if (status := statuses.get(job)) and status.runner == self._me
        ]
        sheet.put("mesh_work_at_risk_seconds", sum(risks))
        sheet.put("mesh_work_at_risk_max_seconds", max(risks, default=0.0))
        sheet.put("mesh_work_lost_seconds_total", accounts.lost_s)
        sheet.put("mesh_reclaims_total", self._reclaims.count)
        for stage, histogram in self._reclaims.stages.items():
            sheet.put_histogram("mesh_reclaim_stage_seconds", histogram, stage=stage)

    def _mesh(self, sheet: Sheet) -> None:
        for state, count in sorted(Counter(member.state for member in self._membership.members()).items()):
            sheet.put("mesh_members", count, state=state)
        by_state = Counter(status.state for status in self._jobs.job_table.all().values())
        states = Counter({state: by_state[state] for state in STATES})
        states[OTHER] = by_state.total() - states.total()  # of another version's
        for state, count in sorted(states.items()):
            sheet.put("mesh_jobs", count, state=state)
        counters = self._counters()
        for event, count in sorted(counters.items()):
            if event.startswith("refused_"):
                sheet.put("mesh_refused_total", count, reason=event.removeprefix("refused_"))
            else:
                sheet.put("mesh_gossip_total", count, event=event)
        sheet.put("mesh_clock_offset_seconds", self._membership.clock_offset_s)
        sheet.put("mesh_image_received_bytes_total", self._image_bytes())
        sheet.put("mesh_problems", len(self._membership.problems))

    def _checkpoints(self, sheet: Sheet) -> None:
        wire, store = self._wire, self._store
        lanes = wire.open
        for urgency in ("urgent", "background"):
            mine = [lane for lane in lanes if lane.urgency == urgency]
            sheet.put("mesh_transfers_open", len(mine), urgency=urgency)
            # A stream that gets in a hurry takes what it has sent along: only what is over is counted.
            sheet.put("mesh_transfer_sent_bytes_total", wire.sent[urgency], urgency=urgency)
        sheet.put("mesh_store_bytes", store.stored_bytes(), owner="all")
        sheet.put("mesh_store_bytes", store.foreign_bytes(), owner="others")
        sheet.put("mesh_store_room_bytes", store.remaining_quota())


def _guest_state(attempt: Attempt) -> str:
    if attempt.guest is None:
        return "preparing"
    return "still" if attempt.held else "running"


def _process() -> dict[str, float]:
    """Return the metrics of this process, by the names that Prometheus's own libraries use."""
    times = os.times()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "process_resident_memory_bytes": pages * os.sysconf("SC_PAGESIZE"),
        "process_cpu_seconds_total": times.user + times.system,
        "process_open_fds": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
    }
