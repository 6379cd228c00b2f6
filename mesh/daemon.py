"""One node: membership, store, engines and jobs wired together, and the answers its two interfaces give.

`python -m mesh.daemon --state DIR` is what `mesh up` starts. SIGTERM and SIGINT leave in order (guests get their notice, their
state is shipped, the node says farewell); a second signal leaves at once.
"""

import argparse
import asyncio
import fcntl
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ckptstore.errors import StoreError
from ckptstore.store import Store
from membership.config import SwimConfig
from membership.discovery import MdnsConfig
from membership.envelope import EnvelopeError, open_envelope, seal
from membership.identity import Identity, IdentityError, NodeId, format_id, parse_id, short_id
from membership.node import MembershipNode, MemberView, PortInUse
from membership.trust import TrustError, TrustStore, make_invite
from mesh import __version__
from mesh.api import local
from mesh.api.auth import Gatekeeper
from mesh.api.errors import ExitCode, MeshError
from mesh.api.peer import Address, Facts, PeerClient, PeerError
from mesh.api.peers import PeerApi
from mesh.api.tls import server_context
from mesh.config import ConfigError, Layout, Settings, load_settings, state_directory
from mesh.engine.docker import DockerEngine
from mesh.engine.engine import Engine
from mesh.engine.process import ProcessEngine
from mesh.jobs.courier import FetchError
from mesh.jobs.journal import Journal, JournalError
from mesh.jobs.service import JobService
from mesh.jobs.spec import Checkpointing, JobSpec, SpecError, decode_spec, format_job
from mesh.jobs.status import JobStatus, decode_status, merge_statuses
from mesh.jobs.steward import WANT_WITNESSES
from mesh.jobs.workdir import collect_files
from mesh.provider.inventory import Inventory, Lending
from mesh.telemetry.gpu import inventory as gpu_inventory
from placement.advert import encode_advert
from placement.decision import cannot_ever, explain, rank_nodes, replica_order, witness_order
from placement.request import Request
from placement.survival import History, weight

FACTS_TTL_S = 3600.0
ADVERT_TTL_S = 120.0
REFRESH_S = 1.0
ENGINES_EVERY_S = 15.0
HAND_OVER_S = 4.0  # two lease rounds and a gossip spread
TAIL_POLL_S = 0.2
WORKDIR_REPLICAS = 2
LOCAL_LEASE_S = 4.0  # with the local gossip profile: failover in seconds

log = logging.getLogger("mesh.daemon")


class Daemon:
    def __init__(self, layout: Layout, settings: Settings) -> None:
        self.layout = layout
        self.settings = settings
        self._down: asyncio.Future[tuple[float, bool]] | None = None
        self._started_unix = time.time()
        self._runners: list[web.AppRunner] = []
        self._leaving = False

    # --- life

    async def start(self) -> None:
        layout, settings = self.layout, self.settings
        self._down = asyncio.get_running_loop().create_future()
        self.identity = Identity.load(layout.key)
        try:
            self.trust = TrustStore(layout.genesis.read_bytes())
            chain = layout.chain.read_bytes()
        except FileNotFoundError as error:
            raise MeshError(
                "this node belongs to no mesh yet: `mesh init NAME` founds one, `mesh join INVITE` joins one"
            ) from error
        self.journal = Journal(layout.journal)
        await self.journal.open()
        quota = None if settings.store_quota_gib is None else int(settings.store_quota_gib * 2**30)
        self.store = await asyncio.to_thread(lambda: Store(layout.store, self._unseal, quota_bytes=quota))
        config = SwimConfig.local() if settings.profile == "local" else SwimConfig.lan()
        seeds = [*settings.join, *(layout.seeds.read_text().split() if layout.seeds.exists() else [])]
        mdns = None
        if settings.mdns:
            mdns = MdnsConfig(() if settings.bind == "0.0.0.0" else (settings.bind,))
        self.membership = MembershipNode(
            self.identity,
            self.trust,
            chain,
            config,
            layout.gossip,
            bind_host=settings.bind,
            port=settings.port,
            advertise_host=settings.advertise or None,
            seeds=seeds,
            mdns=mdns,
        )
        await self.membership.start()
        self.me = self.identity.node_id
        self.standing = self.membership.standing
        self.peers = PeerClient(self.identity, self.trust.mesh_id, self._lookup)
        await self.peers.open()
        self.engines = self._make_engines()
        own_only = ("process",) if settings.process_engine_for == "own" else ()
        self.inventory = Inventory(
            self.me,
            self.standing.nick,
            self.standing.user,
            settings.zone,
            await asyncio.to_thread(gpu_inventory),
            settings.slots,
            settings.accepts,
            own_only,
            self._load_lending(),
            int(self._started_unix),
        )
        self.history = History.of(await self.journal.sessions())
        self.jobs = JobService(
            self.identity,
            self.trust,
            self.membership,
            self.journal,
            self.store,
            self.engines,
            self.inventory,
            self.peers,
            layout.jobs,
            random.Random(),
        )
        await asyncio.to_thread(shutil.rmtree, layout.jobs, True)  # guests of an earlier run died with it
        context, fingerprint = server_context(layout.tls, self.identity.seed, short_id(self.me))
        self.peer_api = PeerApi(self, Gatekeeper(self.me, self.trust.mesh_id, self.trust))
        port = await self._serve_peers(context)
        await self._serve_local()
        self._facts = msgspec.msgpack.encode(Facts(port, fingerprint, __version__))
        self.api_port = port
        self.membership.publish("facts", self._facts, FACTS_TTL_S)
        await self._refresh_engines()
        self._refresh_advert(force=True)
        await self.jobs.restore()
        if self.journal.moved_aside is not None:
            await self.journal.record(None, self.standing.nick, f"damaged journal moved to {self.journal.moved_aside}")

    async def run(self) -> None:
        """Until somebody asks to go down; then leave, in order or at once."""
        assert self._down is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        work = asyncio.create_task(self._run_parts(), name="daemon")
        down: asyncio.Future[Any] = self._down
        await asyncio.wait([work, down], return_when=asyncio.FIRST_COMPLETED)
        if self._down.done():
            grace_s, now = self._down.result()
            await self._leave(grace_s, now)
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    async def stop(self) -> None:
        """Let go of everything that `start` took."""
        for step in (
            self.jobs.close,
            *(engine.close for engine in self.engines.values()),
            *(runner.cleanup for runner in self._runners),
            self.peers.close,
            self.membership.stop,
        ):
            try:
                await step()
            except Exception:
                log.exception("while stopping")
        length_s = time.time() - self._started_unix
        await self.journal.record_session(length_s, ended=True)
        await self.journal.close()
        self.store.close()
        self.layout.socket.unlink(missing_ok=True)

    def ask_down(self, grace_s: float | None, now: bool) -> dict[str, Any]:
        assert self._down is not None
        if not self._down.done():
            self._down.set_result((self.settings.grace_s if grace_s is None else grace_s, now))
        return {"pid": os.getpid(), "guests": len(self.jobs.participant.runners)}

    def _on_signal(self) -> None:
        if self._leaving:
            log.warning("second signal: leaving at once")
            os._exit(1)  # guests and containers end with this process: see guest_init and warden
        self.ask_down(None, now=False)

    async def _leave(self, grace_s: float, now: bool) -> None:
        """The owner's ladder for the whole node: notice, save, ship, release, say farewell."""
        self._leaving = True
        log.info("leaving (%s)", "now" if now else f"grace {grace_s:g} s")
        self.inventory.draining = True
        self.membership.set_draining(True)
        self._refresh_advert(force=True)
        if now:
            await self.jobs.kill("its node leaves at once")
        else:
            await self.jobs.vacate(grace_s, "its node leaves")
        await self.jobs.hand_over(HAND_OVER_S)
        await self.membership.leave()

    async def _run_parts(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.jobs.run(), name="jobs")
            group.create_task(self._watch_membership(), name="watch membership")
            group.create_task(self._keep_fresh(), name="adverts")

    async def _watch_membership(self) -> None:
        events = self.membership.subscribe()
        self.jobs.views_changed()
        while True:
            event = await events.get()
            section = getattr(event, "section", "advert")
            if section in {"advert", "facts"}:
                self.jobs.views_changed()

    async def _keep_fresh(self) -> None:
        engines_due = facts_due = time.monotonic() + ENGINES_EVERY_S
        while True:
            await asyncio.sleep(REFRESH_S)
            now = time.monotonic()
            if now >= engines_due:
                await self._refresh_engines()
                engines_due = now + ENGINES_EVERY_S
            if now >= facts_due:
                self.membership.publish("facts", self._facts, FACTS_TTL_S)
                facts_due = now + FACTS_TTL_S / 4
            self._refresh_advert()

    def _refresh_advert(self, force: bool = False) -> None:
        self.inventory.weight = weight(self.history, time.time() - self._started_unix)
        free = shutil.disk_usage(self.layout.root).free >> 20
        self.inventory.store_free_mib = free // 1024 * 1024  # to the GiB, so that it does not flutter
        advert = self.inventory.advert()
        now = time.monotonic()
        published_version, published_at = getattr(self, "_advert_published", (0, 0.0))
        if force or advert.version != published_version or now - published_at > ADVERT_TTL_S / 4:
            self._advert_published = (advert.version, now)
            self.membership.publish("advert", encode_advert(advert), ADVERT_TTL_S)

    async def _refresh_engines(self) -> None:
        ready: list[str] = []
        images: list[str] = []
        for name, engine in self.engines.items():
            if (await engine.availability()).ok:
                ready.append(name)
                images += await engine.images()
        self.inventory.engines, self.inventory.images = tuple(ready), tuple(images)

    def _make_engines(self) -> dict[str, Engine]:
        made: dict[str, Engine] = {}
        if "process" in self.settings.engines:
            made["process"] = ProcessEngine()
        if "docker" in self.settings.engines:
            made["docker"] = DockerEngine(format_id(self.me))
        return made

    async def _serve_peers(self, context: Any) -> int:
        runner = web.AppRunner(self.peer_api.application(), access_log=None, handler_cancellation=True)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, self.settings.bind, self.settings.api_port, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            raise PortInUse(
                f"port {self.settings.api_port} on {self.settings.bind} is taken by another program. "
                "Stop it, or choose one with --api-port."
            ) from error
        return int(runner.addresses[0][1])

    async def _serve_local(self) -> None:
        runner = web.AppRunner(local.application(self), access_log=None, handler_cancellation=True)
        await runner.setup()
        self._runners.append(runner)
        path = self.layout.socket
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            await web.UnixSite(runner, str(path)).start()
        finally:
            os.umask(before)

    # --- what it knows

    def _unseal(self, sealed: bytes) -> tuple[bytes, bytes]:
        signer, payload = open_envelope(sealed, self.trust.mesh_id, "manifest")
        if self.trust.standing(signer, time.time()) is None:
            raise EnvelopeError("its signer is not a member of this mesh")
        return signer, payload

    def _lookup(self, node: NodeId) -> Address | None:
        record = self.membership.record(node, "facts")
        member = next((m for m in self.membership.members() if m.node_id == node), None)
        if record is None or member is None:
            return None
        try:
            facts = msgspec.msgpack.decode(record.body, type=Facts)
        except msgspec.MsgspecError:
            return None
        return Address(member.host, facts.api_port, facts.fingerprint)

    def _load_lending(self) -> Lending:
        """The command line's word, with what the owner paused in an earlier run."""
        paused = (self.layout.root / "paused").exists()
        return Lending(lending=self.settings.lend, paused=paused)

    def describe(self) -> dict[str, Any]:
        """`mesh status`."""
        members = self.membership.members()
        counters = self.membership.counters + self.peer_api.counters
        counters["refused_job_messages"] += self.jobs.participant.refused
        return {
            "version": __version__,
            "pid": os.getpid(),
            "node": format_id(self.me),
            "nick": self.standing.nick,
            "user": self.standing.user,
            "mesh": self.trust.genesis.name,
            "mesh_id": self.trust.mesh_id.hex(),
            "address": f"{self.membership.host}:{self.membership.port}",
            "api_port": self.api_port,
            "lending": self.inventory.lending.lending,
            "paused": self.inventory.lending.paused,
            "leaving": self._leaving,
            "alive": sum(member.state == "alive" for member in members),
            "guests": [format_job(job) for job in self.jobs.participant.runners],
            "certificate_ends_unix": self.standing.not_after,
            "problem": self.membership.problem,
            "counters": dict(sorted(counters.items())),
        }

    def nodes(self) -> list[dict[str, Any]]:
        adverts = {advert.node: advert for advert in self.jobs.adverts()}
        running: dict[bytes, int] = {}
        for status in self._statuses().values():
            if status.runner is not None and status.outcome is None:
                running[status.runner] = running.get(status.runner, 0) + 1
        rows = []
        for member in self.membership.members():
            advert = adverts.get(member.node_id)
            rows.append(
                {
                    "node": format_id(member.node_id),
                    "nick": member.nick,
                    "user": member.user,
                    "state": "draining" if member.draining and member.state == "alive" else member.state,
                    "address": f"{member.host}:{member.port}",
                    "me": member.node_id == self.me,
                    "since_unix": round(member.since_unix, 3),
                    "zone": advert.zone if advert else "",
                    "lending": bool(advert and advert.lending and not advert.paused),
                    "gpus": [msgspec.to_builtins(gpu) for gpu in advert.gpus] if advert else [],
                    "gpus_free": len(advert.gpus_free) if advert else 0,
                    "slots": advert.slots if advert else 0,
                    "slots_free": advert.slots_free if advert else 0,
                    "engines": list(advert.engines) if advert else [],
                    "weight": advert.weight if advert else 0,
                    "jobs": running.get(member.node_id, 0),
                }
            )
        return rows

    def _statuses(self) -> dict[bytes, JobStatus]:
        views = [decode_status(record.body) for record in self.membership.records("jobs/")]
        mine = [self.jobs.status(job) for job in {*self.jobs.participant.witnesses, *self.jobs.participant.runners}]
        return merge_statuses(view for view in (*views, *mine) if view is not None)

    def job_list(self) -> list[dict[str, Any]]:
        ordered = sorted(self._statuses().values(), key=lambda status: status.created_unix_ms)
        return [self._show(status) for status in ordered]

    def _show(self, status: JobStatus) -> dict[str, Any]:
        nicks = {member.node_id: member.nick for member in self.membership.members()}

        def nick(node: bytes | None) -> str | None:
            return None if node is None else nicks.get(node, short_id(node))

        commit, outcome = status.commit, status.outcome
        return {
            "job": format_job(status.job),
            "name": status.name,
            "user": status.user,
            "submitter": nick(status.submitter),
            "command": status.command,
            "created_unix_ms": status.created_unix_ms,
            "state": status.state,
            "detail": status.detail,
            "node": nick(status.runner),
            "gpus": status.gpus,
            "witnesses": [nick(node) for node in status.witnesses],
            "step": status.step,
            "of": status.of,
            "checkpoint": None
            if commit is None
            else {
                "seq": commit.seq,
                "step": commit.step,
                "manifest": commit.manifest.hex(),
                "holders": [nick(node) for node in commit.holders],
                "created_unix_ms": commit.created_unix_ms,
            },
            "attempts": [
                {
                    "number": attempt.number,
                    "node": attempt.nick,
                    "term": attempt.term,
                    "started_unix_ms": attempt.started_unix_ms,
                    "running_unix_ms": attempt.running_unix_ms,
                    "ended_unix_ms": attempt.ended_unix_ms,
                    "seen_unix_ms": attempt.seen_unix_ms,
                    "reason": attempt.reason,
                    "exit_code": attempt.exit_code,
                    "resumed_step": attempt.resumed_step,
                    "last_step": attempt.last_step,
                }
                for attempt in status.attempts
            ],
            "outcome": None
            if outcome is None
            else {
                "kind": outcome.kind,
                "detail": outcome.detail,
                "exit_code": outcome.exit_code,
                "ended_unix_ms": outcome.ended_unix_ms,
            },
        }

    def find_job(self, text: str) -> JobStatus:
        """By id, prefix of an id, or name; MeshError if none or several fit."""
        statuses = self._statuses()
        wanted = text.lower()
        fits = [status for job, status in statuses.items() if format_job(job).startswith(wanted)]
        named = [status for status in statuses.values() if status.name and status.name == text]
        fits = fits or sorted(named, key=lambda status: -status.created_unix_ms)[:1]
        if not fits or not wanted:
            raise MeshError(f"no job {text!r} is known here: `mesh ps -a` lists them", ExitCode.NOT_FOUND)
        if len(fits) > 1:
            raise MeshError(
                f"{text!r} fits {len(fits)} jobs: give more of the id ({', '.join(format_job(s.job)[:8] for s in fits)})",
                ExitCode.USAGE,
            )
        return fits[0]

    async def job_detail(self, text: str) -> dict[str, Any]:
        return {"job": self._show(self.find_job(text))}

    async def events(self, job: str | None, after: int) -> list[dict[str, Any]]:
        wanted = self.find_job(job).job if job else None
        return [
            {
                "id": event.id,
                "unix_ms": event.unix_ms,
                "job": format_job(event.job) if event.job else None,
                "actor": event.actor,
                "text": event.text,
            }
            for event in await self.journal.events(wanted, after)
        ]

    # --- what it does

    async def submit(self, order: local.SubmitOrder) -> dict[str, Any]:
        chosen = [self._find_node(name).node_id for name in order.ckpt_to]
        self._refuse_impossible(order)
        workdir, holders, size = await self._pack_workdir(order)
        members = [m for m in self.membership.members() if m.state == "alive" and not m.draining]
        alive = [member.node_id for member in members]
        spec = JobSpec(
            submitter=self.me,
            user=self.standing.user,
            created_unix_ms=time.time_ns() // 1_000_000,
            nonce=os.urandom(16),
            argv=tuple(order.argv),
            witnesses=self._choose_witnesses(alive),
            name=order.name,
            env=order.env,
            workdir=workdir,
            workdir_holders=holders,
            image=order.image,
            engine=order.engine,
            gpus=order.gpus,
            vram_mib=order.vram_mib,
            memory_mib=order.memory_mib,
            cpus=order.cpus,
            zone=order.zone,
            checkpointing=self._checkpointing(order, chosen),
            grace_s=self.settings.grace_s if order.grace_s is None else order.grace_s,
            lease_s=LOCAL_LEASE_S if self.settings.profile == "local" else self.settings.lease_s,
            error_budget=order.retries,
            on_exit_0="done" if order.on_exit_0 == "done" else "resume",
        )
        job, problem = await self.jobs.submit(spec)
        if problem is not None:
            raise MeshError(f"the job was not accepted: {problem}. Try again, or see `mesh nodes`.")
        return {
            "job": format_job(job),
            "workdir_bytes": size,
            "witnesses": len(spec.witnesses),
            "warning": "" if len(spec.witnesses) >= WANT_WITNESSES else _FEW_WITNESSES.format(len(alive)),
        }

    def _refuse_impossible(self, order: local.SubmitOrder) -> None:
        adverts = self.jobs.adverts()
        request = Request(
            job=b"", attempt=0, user=self.standing.user, gpus=order.gpus, vram_mib=order.vram_mib, image=order.image
        )
        reason = cannot_ever(request, adverts)
        if reason is None and order.engine not in {None, "process", "docker"}:
            raise MeshError(f"there is no engine {order.engine!r}: process or docker", ExitCode.USAGE)
        if reason is None and order.image is not None and not any(order.image in ad.images for ad in adverts):
            reason = (
                f"no node of the mesh has image {order.image}: load it on a lending node (`docker pull`, `docker load`)"
            )
        if reason is not None:
            raise MeshError(reason, ExitCode.IMPOSSIBLE)

    def _checkpointing(self, order: local.SubmitOrder, chosen: list[bytes]) -> Checkpointing | None:
        if order.ckpt is None:
            if chosen:
                raise MeshError("--ckpt-to needs --ckpt DIR: which directory holds checkpoints?", ExitCode.USAGE)
            return None
        if order.ckpt_mode not in {"rename", "marker", "stable"}:
            raise MeshError("--ckpt-mode is rename, marker or stable", ExitCode.USAGE)
        return Checkpointing(
            directory=order.ckpt.strip("/"),
            mode=order.ckpt_mode,  # type: ignore[arg-type]
            keep=order.keep,
            replicas=order.replicas,
            to=tuple(chosen),
        )

    def _choose_witnesses(self, alive: list[bytes]) -> tuple[bytes, ...]:
        """This node and two others, or this node alone on a mesh of one or two."""
        others = [n for n in witness_order(os.urandom(8), self.jobs.adverts(), alive) if n != self.me]
        return (self.me, *others[: WANT_WITNESSES - 1]) if len(others) >= WANT_WITNESSES - 1 else (self.me,)

    async def _pack_workdir(self, order: local.SubmitOrder) -> tuple[bytes | None, tuple[bytes, ...], int]:
        if order.workdir is None:
            return None, (), 0
        leave = (order.ckpt.strip("/"),) if order.ckpt else ()
        files = await asyncio.to_thread(collect_files, Path(order.workdir), leave)
        try:
            saved = await asyncio.to_thread(
                self.store.save,
                files,
                job=b"\0" * 16,
                config=0,
                term=0,
                seq=0,
                parent=None,
                kind="workdir",
                created_unix=int(time.time()),
                seal=lambda payload: seal(self.identity, self.trust.mesh_id, "manifest", payload),
            )
        except StoreError as error:
            raise MeshError(f"the working directory could not be packed: {error}") from error
        order_of_peers = replica_order(saved.id[:16], self.jobs.adverts(), {self.me}, need_mib=1)
        copies = await self.jobs.courier.replicate(saved.id, [], order_of_peers, WORKDIR_REPLICAS)
        return saved.id, (self.me, *copies.holders), saved.manifest.total_bytes

    def cancel(self, text: str) -> dict[str, Any]:
        status = self.find_job(text)
        if status.outcome is not None:
            return {"job": format_job(status.job), "state": status.state, "already": True}
        if status.user != self.standing.user:
            raise MeshError(f"job {format_job(status.job)[:8]} is {status.user}'s, not yours", ExitCode.REFUSED)
        nodes = [*([status.runner] if status.runner is not None else []), *status.witnesses, status.submitter]
        self.jobs.cancel(status.job, self.standing.user, nodes)
        return {"job": format_job(status.job), "state": "cancelling", "already": False}

    async def sealed_spec(self, job: bytes) -> bytes | None:
        witness = self.jobs.participant.witnesses.get(job)
        return witness.cell.spec if witness is not None else (await self.journal.submitted()).get(job)

    async def _spec_of(self, status: JobStatus) -> JobSpec:
        sealed = await self.sealed_spec(status.job)
        for node in status.witnesses:
            if sealed is None and node != self.me:
                with suppress(PeerError):
                    sealed = await self.peers.call(node, "GET", f"/v1/jobs/{status.job.hex()}/spec")
        if sealed is None:
            raise MeshError("none of the job's witnesses can be reached now; try again in a moment")
        try:
            return decode_spec(open_envelope(sealed, self.trust.mesh_id, "job")[1])
        except (EnvelopeError, SpecError) as error:
            raise MeshError(f"a witness gave a damaged job description: {error}") from error

    async def why(self, text: str) -> dict[str, Any]:
        """The ranking for the job's next attempt, with reasons; computed from this node's adverts, as anybody would."""
        status = self.find_job(text)
        spec = await self._spec_of(status)
        last = status.attempts[-1] if status.attempts else None
        attempt = 0 if last is None else last.number + bool(last.reason)
        request = Request(
            job=status.job,
            attempt=attempt,
            user=spec.user,
            gpus=spec.gpus,
            vram_mib=spec.vram_mib,
            engine=spec.engine,
            image=spec.image,
            zone=spec.zone,
            memory_mib=spec.memory_mib,
        )
        adverts = self.jobs.adverts()
        ranking = rank_nodes(request, adverts)
        return {
            "job": format_job(status.job),
            "state": status.state,
            "detail": status.detail,
            "node": self._show(status)["node"],
            "explanation": explain(request, ranking),
            "candidates": [
                {"nick": c.nick, "score": str(c.score), "weight": c.weight, "advert_version": c.advert_version}
                for c in ranking.candidates
            ],
            "refused": [{"nick": r.nick, "reasons": list(r.reasons)} for r in ranking.refused],
            "attempts": self._show(status)["attempts"],
        }

    async def pull(self, text: str, destination: str) -> dict[str, Any]:
        """Bring a finished job's published files here."""
        status = self.find_job(text)
        if status.outcome is None or status.outcome.manifest is None:
            raise MeshError(
                f"job {format_job(status.job)[:8]} is {status.state}: it has no results to pull yet", ExitCode.NOT_FOUND
            )
        target = Path(destination)
        if await asyncio.to_thread(_in_the_way, target):
            raise MeshError(f"{target} exists and is not empty: name a new directory", ExitCode.USAGE)
        try:
            await self._bring(status, status.outcome.manifest, status.outcome.holders)
            report = await asyncio.to_thread(
                lambda: self.store.restore(status.outcome.manifest, target, prefix="out")  # type: ignore[union-attr,arg-type]
            )
        except StoreError as error:
            raise MeshError(f"the results could not be written to {target}: {error}") from error
        return {"job": format_job(status.job), "destination": str(target), "files": report.files, "bytes": report.bytes}

    async def _bring(self, status: JobStatus, manifest: bytes, holders: tuple[bytes, ...]) -> None:
        ran = [attempt.node for attempt in status.attempts]
        sources = [node for node in dict.fromkeys([*holders, *reversed(ran)]) if node != self.me]
        try:
            await self.jobs.courier.fetch(manifest, sources)
        except FetchError as error:
            raise MeshError(f"its files cannot be reached now: {error}") from error

    async def set_paused(self, paused: bool) -> dict[str, Any]:
        marker = self.layout.root / "paused"
        if paused:
            await asyncio.to_thread(marker.touch)
        else:
            await asyncio.to_thread(marker.unlink, True)
        lending = msgspec.structs.replace(self.inventory.lending, paused=paused)
        if not paused:
            lending = msgspec.structs.replace(lending, lending=True)
        self.inventory.lending = lending
        self._refresh_advert(force=True)
        return {"paused": paused, "lending": lending.lending, "guests": len(self.jobs.participant.runners)}

    async def reclaim(self, grace_s: float | None, now: bool) -> dict[str, Any]:
        """Take the machine back: no new work, and every guest gone when this returns."""
        await self.set_paused(True)
        begun = time.monotonic()
        if now:
            jobs = await self.jobs.kill("its owner took the machine back at once")
        else:
            grace = self.settings.grace_s if grace_s is None else grace_s
            jobs = await self.jobs.vacate(grace, "its owner took the machine back")
        return {"reclaimed": [format_job(job) for job in jobs], "seconds": round(time.monotonic() - begun, 3)}

    def invite(self, ttl_s: float) -> str:
        if not 60 <= ttl_s <= 365 * 86_400:
            raise MeshError("an invite may live from a minute to a year", ExitCode.USAGE)
        seeds = tuple(f"{m.host}:{m.port}" for m in self.membership.members() if m.state == "alive")[:3]
        chain = self.layout.chain.read_bytes()
        try:
            return make_invite(self.identity, chain, self.trust.genesis_bytes, seeds, ttl_s, time.time())
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error

    def _find_node(self, text: str) -> MemberView:
        members = self.membership.members()
        fits = [member for member in members if member.nick == text]
        if not fits:
            with suppress(ValueError):
                wanted = parse_id(text)
                fits = [member for member in members if member.node_id == wanted]
        if not fits:
            fits = [member for member in members if format_id(member.node_id).startswith(text.lower())]
        if len(fits) != 1:
            known = ", ".join(member.nick for member in members)
            word = "no node" if not fits else f"{len(fits)} nodes"
            raise MeshError(f"{word} called {text!r} (known: {known})", ExitCode.NOT_FOUND)
        return fits[0]

    # --- logs

    async def follow_log(self, text: str, follow: bool) -> AsyncIterator[bytes]:
        """The job's output over all its attempts; with `follow`, until it ends."""
        job = self.find_job(text).job
        given: dict[int, int] = {}
        while True:
            status = self._statuses().get(job)
            if status is None:
                return
            for attempt in status.attempts:
                async for piece in self._attempt_log(status, attempt.number, given.get(attempt.number, 0), follow):
                    given[attempt.number] = given.get(attempt.number, 0) + len(piece)
                    yield piece
            if not follow or status.outcome is not None:
                return
            await asyncio.sleep(TAIL_POLL_S)

    async def _attempt_log(self, status: JobStatus, number: int, offset: int, follow: bool) -> AsyncIterator[bytes]:
        running = self.jobs.attempts.get(status.job)
        if running is not None and running.number == number:
            async for piece in self.tail(status.job, number, offset, follow):
                yield piece
            return
        last = status.attempts[-1]
        if status.runner is not None and last.number == number and status.outcome is None:
            path = f"/v1/jobs/{status.job.hex()}/log/{number}?offset={offset}&follow={int(follow)}"
            with suppress(PeerError):
                async with self.peers.stream(status.runner, "GET", path, b"") as response:
                    async for piece in response.content.iter_any():
                        yield piece
            return
        if offset == 0 or status.outcome is not None:
            async for piece in self._kept_log(status, number, offset):
                yield piece

    async def _kept_log(self, status: JobStatus, number: int, offset: int) -> AsyncIterator[bytes]:
        """An ended attempt's log, from the result or the last checkpoint."""
        kept = status.outcome if status.outcome is not None and status.outcome.manifest else status.commit
        if kept is None or kept.manifest is None:
            return
        try:
            await self._bring(status, kept.manifest, kept.holders)
            data = await asyncio.to_thread(
                lambda: b"".join(self.store.read_file(kept.manifest, f"log/{number:03d}.txt"))  # type: ignore[arg-type]
            )
        except (MeshError, StoreError):
            return
        if data[offset:]:
            yield data[offset:]

    async def tail(self, job: bytes, number: int, offset: int, follow: bool) -> AsyncIterator[bytes]:
        """A running attempt's log from `offset`; with `follow`, until the attempt has ended."""
        while True:
            attempt = self.jobs.attempts.get(job)
            ended = attempt is None or attempt.number != number
            if attempt is not None and attempt.number == number:
                with suppress(FileNotFoundError):
                    data = await asyncio.to_thread(_read_from, attempt.log_path, offset)
                    offset += len(data)
                    if data:
                        yield data
                        continue
            if ended or not follow:
                return
            await asyncio.sleep(TAIL_POLL_S)


_FEW_WITNESSES = (
    "only {} nodes are here, so one witness keeps the job's record: if this node is lost, so is the job's place in it"
)


def _in_the_way(target: Path) -> bool:
    return target.exists() and (not target.is_dir() or any(target.iterdir()))


def _read_from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(1 << 20)


async def _main(layout: Layout, settings: Settings) -> None:
    daemon = Daemon(layout, settings)
    await daemon.start()
    try:
        await daemon.run()
    finally:
        await daemon.stop()


def main() -> None:
    """The process behind `mesh up`. Exit codes as the command line's; the last line of stderr says what was wrong."""
    parser = argparse.ArgumentParser(prog="mesh.daemon")
    parser.add_argument("--state", required=True)
    parser.add_argument("--overrides", default="{}", help="settings as JSON, over those of config.toml")
    options = parser.parse_args()
    layout = Layout(state_directory(options.state))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    try:
        layout.root.mkdir(parents=True, exist_ok=True)
        lock = layout.lock.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"mesh: another daemon runs with {layout.root}: `mesh status`, or `mesh down` to stop it")
        settings = load_settings(layout.config, json.loads(options.overrides))
        asyncio.run(_main(layout, settings))
    except (MeshError, IdentityError, TrustError, ConfigError, JournalError, PortInUse, StoreError) as error:
        sys.exit(f"mesh: {error}")
    except OSError as error:
        sys.exit(f"mesh: {error.filename or layout.root}: {error.strerror}. Name another place with --state.")


if __name__ == "__main__":
    main()
