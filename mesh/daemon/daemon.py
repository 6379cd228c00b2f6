"""One node: builds its parts, runs them, and leaves in order. The composition root; no part receives the whole daemon."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ckptstore.store import Store
from cuda_guard.auditor import GpuProcess
from membership.addresses import bind_problem, bound_sockets, is_any
from membership.admission import AdmissionPolicy
from membership.config import SwimConfig
from membership.discovery import MdnsConfig
from membership.durable import write_durably
from membership.effects import RecordChanged
from membership.envelope import open_envelope
from membership.events import EventsLost
from membership.identity import Identity, NodeId, format_id, short_id
from membership.node import MembershipNode, PortInUse
from membership.trust import PROVIDER, TrustStore
from mesh.api import server
from mesh.api.handlers.caches import CacheWriter
from mesh.api.handlers.checkpoints import CheckpointHandlers
from mesh.api.handlers.data import DataHandlers
from mesh.api.handlers.files import FileHandlers
from mesh.api.handlers.gpus import GpuHandlers
from mesh.api.handlers.images import ImageHandlers
from mesh.api.handlers.jobs import JobHandlers
from mesh.api.handlers.lending import LendingHandlers
from mesh.api.handlers.logs import LogReader
from mesh.api.handlers.lookup import JobLookup, NodeLookup
from mesh.api.handlers.metrics import Metrics, ReclaimTimes
from mesh.api.handlers.node import NodeHandlers
from mesh.api.handlers.peers import PeerHandlers
from mesh.api.handlers.placement import PlacementHandlers
from mesh.api.handlers.secrets import SecretHandlers
from mesh.api.handlers.submission import Defaults, Delivery, SubmissionHandlers
from mesh.api.handlers.trust import TrustHandlers
from mesh.api.handlers.tunnels import Tunnels
from mesh.api.handlers.usage import UsageHandlers
from mesh.api.routing import Handlers
from mesh.checkpoints.repair_plan import LOCAL_LOST_S, LOST_S
from mesh.daemon.adverts import FACTS_TTL_S, AdvertPublisher, publish_facts
from mesh.daemon.config import Settings, ceilings_of
from mesh.daemon.edge_shaping import keep
from mesh.daemon.layout import Layout
from mesh.daemon.seeds import checked_seeds, read_seeds
from mesh.daemon.systemd import notify
from mesh.data.library import DataLibrary
from mesh.execution.apptainer.engine import ApptainerEngine
from mesh.execution.disk_usage import Writers
from mesh.execution.engine import Engine
from mesh.execution.guest_registry import GuestRegistry
from mesh.execution.killswitch import open_switch
from mesh.execution.limits import BoundedEngine, disk_limit
from mesh.execution.process.engine import ProcessEngine
from mesh.execution.process.sandbox import Sandbox
from mesh.gpus.guard import NodeGuard, page_directory
from mesh.gpus.guarded_engine import GuardedEngine
from mesh.gpus.inventory import Inventory, Lending, load_lending, machine_mib
from mesh.gpus.nvml import driver_version
from mesh.gpus.nvml import inventory as gpu_inventory
from mesh.gpus.tenant import Tenant
from mesh.images.catalogue import SECTION as IMAGES
from mesh.images.library import Library
from mesh.images.retention import DAY_S, Bounds
from mesh.jobs.attempt import Attempt
from mesh.jobs.environments import Environments
from mesh.jobs.journal_age import JournalAge
from mesh.jobs.logs import JobLogs
from mesh.jobs.packages import Neighbours, nearest
from mesh.jobs.secret_vault import SecretVault
from mesh.jobs.service import JobHooks, JobService
from mesh.jobs.status_gossip import RECOVERED
from mesh.jobs.submission_retry import SubmissionRetry
from mesh.journal import Journal, JournalError
from mesh.model.destinations import destinations
from mesh.model.spec import parse_job
from mesh.network.edge import Edge
from mesh.network.egress import policy_of
from mesh.network.proxy_rules import ProxyRules
from mesh.network.switch import GUESTS
from mesh.provider.accounts import Accounts
from mesh.provider.attendance import SECTION, SUMMARY_TTL_S, Attendance
from mesh.provider.owner import Owner
from mesh.provider.reclaim import Leave, Reclaimer
from mesh.rpc.client import Address, Facts, PeerClient, decode_facts
from mesh.rpc.pacing import Wire
from mesh.rpc.server import PeerServer
from mesh.util import trees
from mesh.util.errors import ExitCode, MeshError
from mesh.util.isolated import ROOT
from mesh.util.task_set import restarted
from mesh.util.version import VERSION
from mesh.util.versions import claim_state
from placement.advert import AdvertError, decode_advert

if TYPE_CHECKING:
    from mesh.api import schemas
    from mesh.web.site import Site

HAND_OVER_S = 4.0  # two lease rounds and a gossip spread
LOCAL_LEASE_S = 4.0  # with the local gossip profile: failover in seconds
LOCAL_SETTLE_S = 3.0  # the same for moving back home

log = logging.getLogger("mesh.daemon.daemon")


class Daemon:
    def __init__(self, layout: Layout, settings: Settings) -> None:
        self._layout, self._settings = layout, settings
        self._started_unix = time.time()
        self._runners: list[web.AppRunner] = []
        self._site: Site | None = None
        self._peer_server: PeerServer | None = None
        self._leaving = False
        self._failure = ""
        self.edge = Edge(layout.edge, settings.edge == "auto", settings.edge_device, settings.edge_mbps)

    # --- life

    async def start(self) -> None:
        """Build and start every part, each after those that it takes."""
        loop = asyncio.get_running_loop()
        self._down: asyncio.Future[tuple[float | None, bool]] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._open_identity()
        await self._open_guests()
        await self._open_storage()
        await self._open_membership()
        self._journal_age = JournalAge(self.membership, self._journal, self.membership.used_invites)
        journal_is_old = await self._journal_age.check()
        await self._make_jobs()
        await self._make_owner()
        await self._restore()
        await self._serve()
        if journal_is_old:
            self._note("the journal is an old copy: this node's witness groups replace it")

    def _open_identity(self) -> None:
        if not self._layout.genesis.exists():
            raise MeshError(
                "this node belongs to no mesh yet: `mesh init NAME` founds one, `mesh join INVITE` joins one"
            )
        claim_state(self._layout.version)
        self._identity = Identity.load(self._layout.key)
        self._me = self._identity.node_id
        self.trust = TrustStore(self._layout.genesis.read_bytes())

    async def _open_guests(self) -> None:
        """Open what holds guests: the GPU guard, the kill-switch (which first kills what an earlier run left), the engines."""
        settings = self._settings
        self._gpus = await asyncio.to_thread(gpu_inventory)
        self._ceilings = ceilings_of(machine_mib(), settings)
        self._guard = NodeGuard(
            page_directory(self._me),
            self._gpus,
            self._guard_changed,
            self._note,
            guards=settings.gpu_sharing,
            bypass=settings.gpu_bypass,
            pinned_mib=self._ceilings.memory_mib,
            found=lambda tenant, text: self._note_tenant(tenant, text, "bypass"),
            ended=lambda tenant, used: self._note_tenant(tenant, self._accounts.measured(tenant, used), "receipt"),
            looked=self._gpus_seen,
            lent=lambda: self._owner.recall,
        )
        self._killed = asyncio.Event()
        loop = asyncio.get_running_loop()
        registry = GuestRegistry(self._layout.guests)
        self._switch = await asyncio.to_thread(
            open_switch,
            registry,
            self._layout.kill_socket,
            [self.edge.cut, self._guard.shut_gates],
            lambda: loop.call_soon_threadsafe(self._killed.set),
        )
        self._engines = self._make_engines()

    async def _open_storage(self) -> None:
        self._journal = Journal(self._layout.journal)
        await self._journal.open()
        quotas = {
            "quota_bytes": _bytes(self._settings.store_quota_gib),
            "foreign_quota_bytes": _bytes(self._settings.foreign_quota_gib),
        }
        self._store = await asyncio.to_thread(lambda: Store(self._layout.store, self._unseal, **quotas))

    async def _open_membership(self) -> None:
        layout, settings = self._layout, self._settings
        mdns = None
        if settings.mdns:
            mdns = MdnsConfig(() if is_any(settings.bind) else (settings.bind,))
        self.membership = MembershipNode(
            self._identity,
            self.trust,
            layout.chain.read_bytes(),
            SwimConfig.local() if settings.profile == "local" else SwimConfig.lan(),
            layout.gossip,
            bind_host=settings.bind,
            port=settings.port,
            advertise_host=settings.advertise or None,
            seeds=[*checked_seeds(settings.join), *read_seeds(layout.seeds)],
            mdns=mdns,
            policy=AdmissionPolicy(layout.allow_list, settings.open),
            keep_chain=lambda chain: write_durably(layout.chain, chain),
            on_fatal=self._fail,
            zone_of=self._zone_of,
            tls=self._take_peer,
            relay_nodes=settings.relay_nodes,
            relay_mbps=settings.relay_mbps,
        )
        if settings.open:
            log.warning("OPEN MESH: this node admits everybody who asks. To end that, restart it without --open")
        self.membership.used_invites.held = True  # until the age of the file is known (`JournalAge`)
        await self.membership.start()
        credentials, problems = self.membership.credentials, self.membership.problems
        self._store.user = credentials.user
        if settings.lend and PROVIDER not in credentials.roles:
            problems["role"] = "not lending: your certificate has no role provider (`mesh member ls`)"
        if settings.nick not in {"", credentials.nick}:
            problems["nick"] = (
                f"config.toml says nick = {settings.nick!r}, but this node has joined as {credentials.nick!r}, "
                "and its certificate keeps that: take the setting out (`mesh config unset nick`)"
            )
        self._wire = Wire(settings.upload_mbps * 1e6 / 8 or None)
        self._peers = PeerClient(self._identity, self.trust.mesh_id, self._lookup, self._wire, self._refuse_peer)
        await self._peers.open()

    async def _make_jobs(self) -> None:
        """Make the job service, and what it takes: the inventory of the machine and the image library."""
        layout, settings, credentials = self._layout, self._settings, self.membership.credentials
        self._inventory = Inventory(
            self._me,
            credentials.nick,
            credentials.user,
            credentials.user_key,
            settings.zone,
            self._gpus,
            settings.slots,
            settings.accepts,
            ("process", "apptainer") if settings.process_engine_for == "own" else (),
            self._load_lending(),
            int(self._started_unix),
            gpu_sharing=settings.gpu_sharing,
            interactive=settings.interactive,
            driver=driver_version() if self._gpus else (),
            memory_mib=self._ceilings.memory_mib,
            cpus=None if settings.max_cpus is None else max(1, int(settings.max_cpus)),
            network=destinations(settings.network),
        )
        self._library = Library(
            layout.images,
            _bytes(settings.image_cache_gib) or 0,
            settings.image_fetch,
            settings.image_registries,
            settings.image_users,
            settings.registry_port,
            Bounds(_bytes(settings.image_keep_gib) or 0, settings.image_keep_days * DAY_S),
            self._identity,
            self.trust,
            self.membership,
            self._peers,
            lambda node, what: self._jobs.replicator.refusals.count("images", node, what),
            self._advert_changed,
        )
        self._data = DataLibrary(
            layout.data,
            _bytes(settings.data_quota_gib),
            settings.keep_days * DAY_S,
            settings.data,
            self._identity,
            self.trust,
            self.membership,
            self._peers,
            lambda node, what: self._jobs.replicator.refusals.count("data", node, what),
            self._data_changed,
        )
        environments = Environments(
            layout.environments,
            settings.uv_index,
            _bytes(settings.env_cache_gib) or 0,
            settings.conda_channels,
            Neighbours(
                self._me,
                self._peers,
                lambda: nearest(self.membership.members(), self._me, self.membership.own_host),
                lambda node, what: self._jobs.replicator.refusals.count("packages", node, what),
            ),
        )
        self._packages = environments.packages
        self._jobs = JobService(
            self._identity,
            self.trust,
            self.membership,
            self._journal,
            self._store,
            self._engines,
            self._inventory,
            self._peers,
            layout.jobs,
            JobLogs(layout.logs),
            environments,
            partial(disk_limit, self._ceilings),
            self._library.ready,
            settings.keep_days * DAY_S,
            LOCAL_LOST_S if settings.profile == "local" else LOST_S,
            JobHooks(
                places_changed=self._places_changed,
                attempt_ended=self._attempt_ended,
                attempt_cleared=self._attempt_cleared,
                rates=self._departure_rates,
                stay_caps=lambda: self._attendance.caps,
                warn=self._note,
            ),
            self._data,
            ProxyRules(destinations(settings.network), _bytes(settings.network_gib) or 0),
        )
        self._accounts = Accounts(self._identity, self.trust.mesh_id, self._journal, self._jobs)

    async def _make_owner(self) -> None:
        """Make what acts for the machine's owner: attendance, reclaim, presence, and the advert that they change."""
        layout, settings, jobs, credentials = self._layout, self._settings, self._jobs, self.membership.credentials
        self._attendance = Attendance(
            self._me,
            self._journal,
            lambda body: self.membership.publish(SECTION, body, SUMMARY_TTL_S),
            jobs.mesh_view.adverts,
            lambda: {node: zone.name for zone in jobs.mesh_view.hierarchy().zones for node in zone.nodes},
            lambda: {record.node: record.body for record in self.membership.records(SECTION)},
        )
        await self._attendance.open(time.time())
        self._reclaim_times = ReclaimTimes()
        self._reclaimer = Reclaimer(jobs, self._guard, credentials.user, credentials.nick, self._reclaim_times.observe)
        self._owner = Owner(
            layout.policy,
            layout.presence,
            jobs,
            self._guard,
            self._inventory,
            self._reclaimer,
            settings.grace_s,
            self._note,
            self._advert_changed,
            self.membership.problems,
        )
        self._adverts = AdvertPublisher(
            self.membership,
            self._inventory,
            self._engines,
            self._guard,
            self._library,
            self._data,
            self._store,
            self._attendance,
            self._owner,
            layout.root,
            self._started_unix,
        )

    async def _restore(self) -> None:
        """Take up what an earlier run has left. Before any peer is heard: a witness must know its promises first."""
        await asyncio.to_thread(trees.remove, self._layout.jobs)  # guests of an earlier run died with it
        await self._jobs.restore()
        self._submissions = SubmissionRetry(
            self._me,
            self.membership,
            self._journal,
            self._jobs,
            self._peers,
            self._jobs.authority.open_spec,
            lambda job, text: self._jobs.event_log.add(job, "state", text, new="submission"),
        )
        await self._submissions.restore()
        await self._library.open()
        await self._data.open()
        if self._journal.moved_aside is not None:
            self._jobs.event_log.add(None, "node", f"damaged journal moved to {self._journal.moved_aside}")

    async def _serve(self) -> None:
        """Make the handlers and open the three servers: for peers, for this machine, and for Prometheus if it is wanted."""
        trust, membership, store, jobs, peers = self.trust, self.membership, self._store, self._jobs, self._peers
        lookup = JobLookup(self._me, membership, self._journal, store, jobs, peers)
        files = FileHandlers(jobs, peers, lookup)
        logs = LogReader(membership, store, jobs, peers, lookup)
        self._tunnels = Tunnels(trust, membership, jobs, peers, lookup, self._settings.interactive)
        usage = UsageHandlers(trust.mesh_id, membership, jobs, peers, self._accounts, lookup)
        api_port = await self._serve_peers(
            PeerHandlers(
                trust,
                membership,
                self._journal,
                store,
                jobs,
                self._submissions,
                self._library,
                self._wire,
                self._settings.accepts,
                lookup,
                logs,
                files,
                self._tunnels,
                usage,
                self._data,
                self._packages,
            )
        )
        await asyncio.to_thread(self.edge.open)
        self._handlers = self._make_handlers(api_port, lookup, files, logs, usage)
        await self._serve_local()
        if self._settings.metrics_port:
            metrics = self._handlers.metrics
            self._runners.append(await metrics.serve(self._settings.metrics_address, self._settings.metrics_port))
        self._facts = msgspec.msgpack.encode(Facts(self._settings.api_port, VERSION, self._journal.disk))
        self.membership.publish("facts", self._facts, FACTS_TTL_S)
        await self._adverts.look_at_engines()
        await self._owner.look()
        self._advert_changed()

    def _make_handlers(
        self, api_port: int, lookup: JobLookup, files: FileHandlers, logs: LogReader, usage: UsageHandlers
    ) -> Handlers:
        identity, trust, membership, settings = self._identity, self.trust, self.membership, self._settings
        journal, store, jobs, peers = self._journal, self._store, self._jobs, self._peers
        data = DataHandlers(self._me, trust, membership, self._data)
        job_handlers = JobHandlers(identity, trust, membership, journal, jobs, self._submissions, lookup)
        images = ImageHandlers(self._me, membership, self._library, jobs, peers)
        nodes = NodeLookup(membership, settings.trusted)
        secrets = SecretHandlers(SecretVault(self._layout.secrets, identity), nodes)
        keep_s = settings.keep_days * DAY_S
        self._outputs = Delivery("output", journal, jobs, job_handlers.deliver, "brought home", keep_s)
        cache_writer = CacheWriter(lookup, self._data)
        self._caches = Delivery("cache", journal, jobs, cache_writer.write_back, "written back", keep_s)
        local = settings.profile == "local"
        lease_s = LOCAL_LEASE_S if local else settings.lease_s
        defaults = Defaults(settings.encrypt, settings.grace_s, lease_s, LOCAL_SETTLE_S if local else None)
        lending = LendingHandlers(
            membership,
            self._inventory,
            jobs,
            self._owner,
            self._reclaimer,
            self._switch,
            self.edge,
            self._layout.policy,
            self._layout.lending,
            self._advert_changed,
        )
        node = NodeHandlers(
            self._me,
            trust,
            membership,
            self._inventory,
            self._adverts.engine_states,
            jobs,
            self._wire,
            self.edge,
            lending,
            open_mesh=settings.open,
            api_port=api_port,
            open_page=self._open_page,
            leave=self._ask_down,
            leaving=lambda: self._leaving,
        )
        return Handlers(
            node=node,
            placement=PlacementHandlers(
                membership, jobs, self._submissions, self._attendance, lookup, job_handlers, images
            ),
            trust=TrustHandlers(identity, trust, membership),
            lending=lending,
            gpus=GpuHandlers(
                trust.mesh_id,
                membership.problems,
                journal,
                self._guard,
                self._inventory,
                jobs,
                lookup,
                self._advert_changed,
            ),
            jobs=job_handlers,
            submission=SubmissionHandlers(
                identity,
                trust,
                membership,
                journal,
                store,
                jobs,
                self._submissions,
                images,
                secrets,
                self._outputs,
                self._caches,
                lookup,
                nodes,
                defaults,
                data,
            ),
            data=data,
            files=files,
            logs=logs,
            tunnels=self._tunnels,
            usage=usage,
            metrics=Metrics(
                self._me,
                membership,
                self._inventory,
                self._guard,
                self._engines,
                jobs,
                self._accounts,
                self._reclaim_times,
                self._wire,
                store,
                lambda: self._library.fetcher.moved,
                node.counters,
                self._started_unix,
            ),
            checkpoints=CheckpointHandlers(membership, store, jobs, lookup),
            images=images,
            secrets=secrets,
            lookup=lookup,
        )

    async def run(self) -> None:
        """Run until the daemon is asked to stop; then leave, in order or at once."""
        work = asyncio.create_task(self._run_parts(), name="daemon")
        asked: list[asyncio.Future[Any]] = [work, self._down]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        if self._down.done():
            await self._leave(*self._down.result())
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        if self._failure:
            raise MeshError(self._failure)

    async def _run_parts(self) -> None:
        # A failure of these ends the daemon: nothing else keeps leases, the owner's rights or what was promised.
        parts = {
            "jobs": self._jobs.run(),
            "watch membership": self._watch_membership(),
            "journal age": self._journal_age.run(),
            "guard": self._guard.run(),
            "edge": keep(self.edge, self._wire, self._jobs.replicator.departures, self._note),
            "kill-switch": self._follow_switch(),
            "owner": self._owner.run(),
            "pauses": self._handlers.lending.end_pauses(self._note),
        }
        services: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "submission retry": self._submissions.run,
            "adverts": self._adverts.run,
            "facts": lambda: publish_facts(self.membership, self._facts),
            "output delivery": self._outputs.run,
            "write-back of caches": self._caches.run,
            "images": self._library.run,
            "data sets": self._data.run,
        }
        parts |= {name: restarted(work, name, log, JournalError) for name, work in services.items()}
        async with asyncio.TaskGroup() as group:
            for name, part in parts.items():
                group.create_task(part, name=name)

    async def stop(self) -> None:
        """Release everything that `start` took; a failure of one part does not keep the others."""
        self._attendance.close(time.time())
        for step in (
            self._reclaimer.close,
            self._jobs.close,
            self._library.close,
            self._data.close,
            *(engine.close for engine in self._engines.values()),
            lambda: asyncio.to_thread(self._switch.close),
            self._guard.close,
            self._accounts.close,
            lambda: asyncio.to_thread(self.edge.close),
            self._tunnels.close,
            *([self._site.close] if self._site is not None else []),
            *([self._peer_server.close] if self._peer_server is not None else []),
            *(runner.cleanup for runner in self._runners),
            self._peers.close,
            self.membership.stop,
            self._journal.close,
        ):
            try:
                await step()
            except Exception as error:
                log.error("while stopping: %s", error)
        self._store.close()
        self._layout.socket.unlink(missing_ok=True)

    # --- leaving

    def _ask_down(self, grace_s: float | None, now: bool) -> None:
        if not self._down.done():
            self._down.set_result((grace_s, now))

    def _fail(self, reason: str) -> None:
        """Go down because this node cannot be a member any more; `reason` is the process's last line."""
        self._failure = reason
        self._ask_down(None, now=False)

    def _on_signal(self) -> None:
        if self._leaving:
            log.warning("second signal: leaving at once")
            os._exit(1)  # guests and containers end with this process: see guest_init and watchdog
        self._ask_down(None, now=False)

    async def _leave(self, grace_s: float | None, now: bool) -> None:
        """Reclaim the whole machine by its stages, hand over what this node leads, and say farewell."""
        grace_s = self._owner.notice_s if grace_s is None else grace_s
        self._leaving = True
        notify("STOPPING=1\nSTATUS=leaving")
        log.info("leaving (%s)", "now" if now else f"grace {grace_s:g} s")
        self._inventory.draining = True
        self.membership.set_draining(True)
        self._advert_changed()
        if now:
            self.edge.cut(GUESTS)
            await self._reclaimer.kill(None, "its node leaves at once", "they stop the node at once")
        else:
            leave = Leave(grace_s, self._owner.policy.pause, "its node leaves", "they stop the node", by_hand=True)
            await self._reclaimer.leave(self._jobs.participant.hosted, leave)
        await self._submissions.leave(HAND_OVER_S)
        await self._jobs.hand_over(HAND_OVER_S)
        await self.membership.leave()

    # --- what parts tell each other

    async def _follow_switch(self) -> None:
        """Finish each reclaim whose guests the thread of the kill-switch has killed."""
        while True:
            await self._killed.wait()
            self._killed.clear()
            self._jobs.event_log.add(
                None, "audit", "the kill-switch was pressed: its guests were killed", new="killswitch"
            )
            await self._handlers.lending.settle_strike()

    async def _watch_membership(self) -> None:
        events = self.membership.subscribe()
        self._jobs.status_gossip.reload()
        self._jobs.views_changed()
        while True:
            event = await events.get()
            if isinstance(event, EventsLost):
                self._jobs.status_gossip.reload()
                self._library.hear_all()
            section = getattr(event, "section", "advert")
            if section in {"advert", "facts"} or section.startswith(RECOVERED):
                self._jobs.views_changed()
            elif isinstance(event, RecordChanged) and section.startswith("jobs/"):
                self._jobs.status_gossip.on_section(event.node, section)
            elif isinstance(event, RecordChanged) and section.partition("/")[0] == IMAGES:
                self._library.hear(event.node, section)

    def _advert_changed(self) -> None:
        self._adverts.publish(force=True)

    def _data_changed(self) -> None:
        if hasattr(self, "_adverts"):  # made after the library, which is opened before anything is published
            self._adverts.publish()

    # Parts that need the job service are made after it.

    def _attempt_ended(self, job: bytes, attempt: Attempt, reason: str) -> None:
        self._reclaimer.on_attempt_ended(job, attempt, reason)

    def _attempt_cleared(self, job: bytes, attempt: Attempt, reason: str) -> None:
        self._accounts.on_attempt_cleared(job, attempt, reason)

    async def _gpus_seen(self, strangers: dict[str, tuple[GpuProcess, ...]]) -> None:
        await self._owner.on_gpus_seen(strangers)

    def _departure_rates(self, start_unix: float) -> Iterator[tuple[float, float]]:
        return self._attendance.rates(start_unix)

    def _places_changed(self) -> None:
        self._adverts.publish()

    def _guard_changed(self, problem: str) -> None:
        self._adverts.guard_changed(problem)

    def _note(self, text: str) -> None:
        """Report to the owner: in the log and in the node's events."""
        log.warning("%s", text)
        self._jobs.event_log.add(None, "node", text)

    def _note_tenant(self, tenant: Tenant, text: str, new: str) -> None:
        """Report in the events of a job that is under guard."""
        self._jobs.event_log.add(parse_job(tenant.job), "state", text, new=new)

    def _unseal(self, sealed: bytes) -> tuple[bytes, bytes]:
        """Check signature and mesh of a manifest. Its signer may have left the mesh: a commit names the manifest by its hash."""
        return open_envelope(sealed, self.trust.mesh_id, "manifest")

    def _lookup(self, node: NodeId) -> Address | None:
        record = self.membership.record(node, "facts")
        address = self.membership.address_of(node)
        facts = decode_facts(record.body) if record is not None else None
        if facts is None or address is None:
            return None
        host, port = address
        return Address(host, facts.api_port or port)

    def _zone_of(self, node: NodeId) -> str:
        """Return the zone in a node's advert; empty without an advert."""
        record = self.membership.record(node, "advert")
        with suppress(AdvertError):
            return decode_advert(node, record.body).zone if record is not None else ""
        return ""

    # --- how parts are made

    def _load_lending(self) -> Lending:
        """Return whether to lend: by the command line and the owner's last order in an earlier run."""
        try:
            return load_lending(self._layout.lending, self._settings.lend)
        except (OSError, ValueError) as error:
            problem = f"{self._layout.lending} cannot be read ({error}): nothing is lent before `mesh lend`"
            self.membership.problems["lending"] = problem
            return Lending(lending=self._settings.lend, paused=True)

    def _make_engines(self) -> dict[str, GuardedEngine]:
        made: list[Engine] = []
        writers = Writers()
        if "process" in self._settings.engines:
            process = ProcessEngine(
                self._switch,
                network=self._settings.process_network,
                sandbox=self._sandbox() if self._settings.process_home == "private" else None,
                ready=lambda: self._inventory.lends,
            )
            made.append(BoundedEngine(process, self._ceilings, lambda: process.bounds_memory, writers))
        if "docker" in self._settings.engines:
            from mesh.execution.docker.engine import DockerEngine  # the SDK is 19 MiB and 0.1 s

            policy = policy_of(self._settings.egress, self._settings.egress_allow)
            docker = DockerEngine(
                format_id(self._me), self._switch, policy, self.edge, self._settings.system_checkpoints
            )
            made.append(BoundedEngine(docker, self._ceilings, writers=writers))
        if "apptainer" in self._settings.engines:
            apptainer = ApptainerEngine(self._switch, self._layout.apptainer_images, self._sandbox())
            made.append(BoundedEngine(apptainer, self._ceilings, writers=writers))
        return {engine.name: GuardedEngine(engine, self._guard) for engine in made}

    def _sandbox(self) -> Sandbox:
        """Return what guests must not see: the owner's home, sockets of programs and container engines, this node's state."""
        theirs = [f"/run/user/{os.getuid()}", os.environ.get("XDG_RUNTIME_DIR", ""), "/run/docker.sock"]
        engine = os.environ.get("DOCKER_HOST", "").removeprefix("unix://")
        hidden = [Path(path) for path in (*theirs, engine) if path.startswith("/")]
        sees = [ROOT / "mesh", *map(Path, self._settings.process_sees)]  # for `import mesh` from a checkout
        return Sandbox(Path(os.environ.get("HOME", "/")), [self._layout.root, *hidden], os.environ, sees)

    async def _open_page(self) -> "schemas.owner.Page":
        """Serve the web page from now on; return an address for one visit. MeshError if the owner wants no page."""
        if not self._settings.web:
            raise MeshError("this node has no page: config.toml says `web = false`", ExitCode.REFUSED)
        from mesh.web.site import Site  # loaded when it is first asked for

        if self._site is None:
            mesh = self.trust.genesis.name
            self._site = Site(self._handlers, self.membership, self._me, mesh, self._settings.web_port)
        return await self._site.invite()

    async def _serve_peers(self, peers: PeerHandlers) -> int:
        """Open the API for other nodes, on the port of the gossip or on one of its own; return the port."""
        bind, port = self._settings.bind, self._settings.api_port
        try:
            listeners = bound_sockets(bind, port, socket.SOCK_STREAM) if port else []
        except OSError as error:
            raise PortInUse(bind_problem(error, bind, port, "--api-port")) from error
        peer_server = PeerServer(
            peers.application(), self._identity, self.trust.mesh_id, self._refuse_peer, self._count
        )
        await peer_server.start(*listeners)
        self._peer_server = peer_server
        return port or self.membership.port

    def _take_peer(self, connection: socket.socket, host: str) -> None:
        """Serve a peer that came to the port of the gossip."""
        if self._peer_server is None:
            connection.close()  # this node is starting: the peer tries again
        else:
            self._peer_server.take(connection, host)

    def _refuse_peer(self, node: NodeId) -> str:
        if self.trust.credentials(node, time.time()) is not None:
            return ""
        return f"node {short_id(node)} is not a member of this mesh"

    def _count(self, reason: str) -> None:
        self._jobs.replicator.refusals.counters[reason] += 1

    async def _serve_local(self) -> None:
        application = server.application(self._handlers, self._jobs.event_log)
        # One who follows a log, or a request that hangs, must not hold up the end: aiohttp would wait for two minutes.
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        self._runners.append(runner)
        path = self._layout.socket
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            await web.UnixSite(runner, str(path)).start()
        finally:
            os.umask(before)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)
