"""`GET /metrics`: what is measured on this node now, for Prometheus (docs/metrics.md)."""

import asyncio
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from membership.node import PortInUse
from mesh import __version__
from mesh.jobs.attempt import Attempt
from mesh.telemetry.exposition import CONTENT_TYPE, Histogram, Sheet
from mesh.telemetry.gpu import Reading, readings
from mesh.telemetry.metrics import METRICS, OTHER, RUNG_BOUNDS_S, RUNGS
from mesh.versions import STATE, WIRE
from placement.advert import WHOLE, Portion

if TYPE_CHECKING:
    from mesh.daemon import Daemon

FRESH_S = 1.0  # for which an answer is given again: whoever asks more often learns nothing, and wakes the driver; ours
STATES = {"pending", "starting", "running", "suspended", "vacating", "saving", "releasing", "ending"} | {
    "done",
    "failed",
    "cancelled",
}


class Metrics:
    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._rungs = {name: Histogram(RUNG_BOUNDS_S) for name in RUNGS}
        self._reclaims = 0
        self._told: tuple[float, str] = (-FRESH_S, "")
        self._asking = asyncio.Lock()
        daemon.ladder.reclaimed = self._reclaimed

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
        """On a TCP port of its own, where nothing else is answered. PortInUse if it is taken."""
        app = web.Application()
        app.router.add_get("/metrics", self.answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise PortInUse(
                f"port {port} on {host} cannot be had for metrics ({error.strerror}). Choose another metrics_port in "
                f"{self._daemon.layout.config}"
            ) from error
        return runner

    def _reclaimed(self, rungs_s: dict[str, float]) -> None:
        self._reclaims += 1
        for rung, seconds in rungs_s.items():
            if rung in self._rungs:
                self._rungs[rung].observe(seconds)

    def _write(self, gpus: tuple[Reading, ...], process: dict[str, float]) -> str:
        sheet = Sheet(METRICS)
        sheet.put("mesh_build_info", 1, version=__version__, wire=str(WIRE), state=str(STATE))
        sheet.put("mesh_started_time_seconds", self._daemon.started_unix)
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
        inventory, advert = self._daemon.inventory, self._daemon.inventory.advert()
        lending = inventory.lending
        present = inventory.presence.held_by == "owner"
        sheet.put("mesh_lending", lending.lending and not lending.paused and not inventory.presence.held_by)
        sheet.put("mesh_paused", lending.paused)
        sheet.put("mesh_owner_present", present)
        sheet.put("mesh_slots", advert.slots)
        sheet.put("mesh_slots_free", advert.slots_free)
        given: dict[str, list[Portion]] = {gpu.uuid: [] for gpu in advert.gpus}
        for attempt in self._daemon.jobs.attempts.values():
            for portion in attempt.portions:
                given.setdefault(portion.uuid, []).append(portion)
        for uuid, portions in given.items():
            sheet.put("mesh_gpu_share_given_ratio", sum(one.share for one in portions) / WHOLE, gpu=uuid)
            sheet.put("mesh_gpu_memory_given_bytes", sum(one.vram_mib for one in portions) << 20, gpu=uuid)
        for uuid, foreign in self._daemon.guard.foreign.items():
            sheet.put("mesh_gpu_foreign_bytes", foreign.memory, gpu=uuid)

    def _guests(self, sheet: Sheet) -> None:
        daemon, accounts = self._daemon, self._daemon.accounts
        attempts = daemon.jobs.attempts
        standing = Counter((attempt.engine.name, _standing(attempt)) for attempt in attempts.values())
        for name, engine in daemon.engines.items():
            for state in ("preparing", "running", "still"):
                sheet.put("mesh_guests", standing[name, state], engine=name, state=state)
            for result in ("ok", "failed"):
                sheet.put("mesh_guest_starts_total", engine.starts[result], engine=name, result=result)
            sheet.put("mesh_attempt_seconds_total", accounts.ran_s[name], engine=name)
        for (name, end), count in sorted(accounts.ended.items()):
            sheet.put("mesh_attempts_ended_total", count, engine=name, end=end)
        sheet.put("mesh_gpu_seconds_total", accounts.gpu_s)
        sheet.put("mesh_checkpoints_total", daemon.jobs.chronicle.said["checkpoint"])
        now_ms, statuses = time.time() * 1000, daemon.jobs.board.all()
        risks = [
            status.at_risk_s(now_ms) for job in attempts if (status := statuses.get(job)) and status.runner == daemon.me
        ]
        sheet.put("mesh_work_at_risk_seconds", sum(risks))
        sheet.put("mesh_work_at_risk_max_seconds", max(risks, default=0.0))
        sheet.put("mesh_work_lost_seconds_total", accounts.lost_s)
        sheet.put("mesh_reclaims_total", self._reclaims)
        for rung, histogram in self._rungs.items():
            sheet.put_histogram("mesh_reclaim_rung_seconds", histogram, rung=rung)

    def _mesh(self, sheet: Sheet) -> None:
        daemon = self._daemon
        for state, count in sorted(Counter(member.state for member in daemon.membership.members()).items()):
            sheet.put("mesh_members", count, state=state)
        told = Counter(status.state for status in daemon.jobs.board.all().values())
        states = Counter({state: told[state] for state in STATES})
        states[OTHER] = told.total() - states.total()  # of another version's
        for state, count in sorted(states.items()):
            sheet.put("mesh_jobs", count, state=state)
        counters = daemon.desk.counters()
        for event, count in sorted(counters.items()):
            if event.startswith("refused_"):
                sheet.put("mesh_refused_total", count, reason=event.removeprefix("refused_"))
            else:
                sheet.put("mesh_gossip_total", count, event=event)
        sheet.put("mesh_clock_offset_seconds", daemon.membership.clock_offset_s)
        sheet.put("mesh_problems", len(daemon.membership.problems))

    def _checkpoints(self, sheet: Sheet) -> None:
        wire, store = self._daemon.wire, self._daemon.store
        lanes = wire.open
        for urgency in ("urgent", "background"):
            mine = [lane for lane in lanes if lane.urgency == urgency]
            sheet.put("mesh_transfers_open", len(mine), urgency=urgency)
            # A stream that gets in a hurry takes what it has sent along: only what is over is counted.
            sheet.put("mesh_transfer_sent_bytes_total", wire.sent[urgency], urgency=urgency)
        sheet.put("mesh_store_bytes", store.stored_bytes(), owner="all")
        sheet.put("mesh_store_bytes", store.foreign_bytes(), owner="others")
        sheet.put("mesh_store_room_bytes", store.room())


def _standing(attempt: Attempt) -> str:
    if attempt.guest is None:
        return "preparing"
    return "still" if attempt.held else "running"


def _process() -> dict[str, float]:
    """Of this process; the names are those that Prometheus's own libraries use."""
    times = os.times()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "process_resident_memory_bytes": pages * os.sysconf("SC_PAGESIZE"),
        "process_cpu_seconds_total": times.user + times.system,
        "process_open_fds": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
    }
