"""One node: membership, store, engines and jobs wired together, and the answers its two interfaces give."""

import asyncio
import logging
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ckptstore.store import Store
from membership.config import SwimConfig
from membership.discovery import MdnsConfig
from membership.durable import write_durably
from membership.effects import RecordChanged
from membership.envelope import open_envelope
from membership.events import EventsLost
from membership.gate import Policy
from membership.identity import Identity, NodeId, format_id, short_id
from membership.node import MembershipNode, PortInUse
from membership.trust import PROVIDER, TrustStore
from mesh import __version__, trees
from mesh.api import local
from mesh.api.auth import Gatekeeper
from mesh.api.ckptdesk import CkptDesk
from mesh.api.desk import Desk
from mesh.api.errors import ExitCode, MeshError
from mesh.api.homecoming import Homecoming
from mesh.api.images import ImageDesk
from mesh.api.jobdesk import JobDesk
from mesh.api.lending import end_pauses, settle_strike
from mesh.api.logs import LogReader
from mesh.api.metrics import Metrics
from mesh.api.peer import READ_BYTES, Address, Facts, PeerClient, decode_facts
from mesh.api.peers import PeerApi
from mesh.api.tls import server_context
from mesh.api.tunnels import Tunnels
from mesh.api.wire import Wire
from mesh.config import Settings
from mesh.edge.edge import Edge
from mesh.edge.keeper import keep
from mesh.edge.switch import GUESTS
from mesh.engine.alone import ROOT
from mesh.engine.bounded import BoundedEngine
from mesh.engine.ceilings import ceilings_of
from mesh.engine.egress import policy_of
from mesh.engine.engine import Availability, Engine
from mesh.engine.guarded import GuardedEngine
from mesh.engine.killswitch import open_switch
from mesh.engine.process import ProcessEngine
from mesh.engine.register import Register
from mesh.engine.room import Writers
from mesh.engine.seclusion import Seclusion
from mesh.images.catalogue import SECTION as IMAGES
from mesh.images.library import Library
from mesh.images.shelf import DAY_S, Bounds
from mesh.jobs.authority import Authority
from mesh.jobs.deputy import Deputy
from mesh.jobs.joblogs import JobLogs
from mesh.jobs.journal import Journal
from mesh.jobs.mending import LOCAL_LOST_S
from mesh.jobs.service import JobService
from mesh.jobs.spec import parse_job
from mesh.layout import Layout
from mesh.provider.accounts import Accounts
from mesh.provider.attendance import SECTION, SUMMARY_TTL_S, Attendance
from mesh.provider.guard import NodeGuard, page_directory
from mesh.provider.inventory import Inventory, Lending, load_lending, machine_mib
from mesh.provider.ladder import Ladder, Leave
from mesh.provider.owner import Owner
from mesh.provider.tenant import Tenant
from mesh.seeds import checked_seeds, read_seeds
from mesh.systemd import notify
from mesh.telemetry.gpu import driver_version
from mesh.telemetry.gpu import inventory as gpu_inventory
from mesh.versions import claim_state
from placement.advert import AdvertError, decode_advert, encode_advert

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.web.site import Site

FACTS_TTL_S = 3600.0
ADVERT_TTL_S = 3600.0  # changes are told at once, and the absent are not asked, so it need not be repeated often
REFRESH_S = 1.0
ENGINES_EVERY_S = 15.0
HAND_OVER_S = 4.0  # two lease rounds and a gossip spread

log = logging.getLogger("mesh.daemon")


class Daemon:
    def __init__(self, layout: Layout, settings: Settings) -> None:
        self.layout = layout
        self.settings = settings
        self._down: asyncio.Future[tuple[float, bool]] | None = None
        self.started_unix = time.time()
        self._runners: list[web.AppRunner] = []
        self._advert_published = (0, 0.0)  # version, when
        self._failure = ""
        self.engine_states: dict[str, Availability] = {}
        self.leaving = False
        self.edge = Edge(layout.edge, settings.edge == "auto", settings.edge_device, settings.edge_mbps)

    # --- life

    async def start(self) -> None:
        layout, settings = self.layout, self.settings
        self._down = asyncio.get_running_loop().create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if not layout.genesis.exists():
            raise MeshError(
                "this node belongs to no mesh yet: `mesh init NAME` founds one, `mesh join INVITE` joins one"
            )
        claim_state(layout.version)
        self.identity = Identity.load(layout.key)
        self.trust = TrustStore(layout.genesis.read_bytes())
        chain = layout.chain.read_bytes()
        self.switch = await asyncio.to_thread(open_switch, Register(layout.guests), layout.kill_socket)
        self._struck = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.switch.struck = lambda: loop.call_soon_threadsafe(self._struck.set)
        self.switch.first.append(self.edge.cut)
        self.journal = Journal(layout.journal)
        await self.journal.open()
        quotas = {
            "quota_bytes": _bytes(settings.store_quota_gib),
            "foreign_quota_bytes": _bytes(settings.foreign_quota_gib),
        }
        self.store = await asyncio.to_thread(lambda: Store(layout.store, self._unseal, **quotas))
        config = SwimConfig.local() if settings.profile == "local" else SwimConfig.lan()
        seeds = [*checked_seeds(settings.join), *read_seeds(layout.seeds)]
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
            policy=Policy(layout.allow_list, settings.open),
            keep_chain=lambda chain: write_durably(layout.chain, chain),
            on_fatal=self._fail,
            zone_of=self._zone_of,
        )
        if settings.open:
            log.warning(
                "OPEN MESH: this node lets in everybody who knocks. Stop it, and start without --open, to end that"
            )
        await self.membership.start()
        self.store.user = self.membership.standing.user
        if settings.lend and PROVIDER not in self.membership.standing.roles:
            self.membership.problems["role"] = "this node may not lend: its certificate says so (`mesh trust ls`)"
        if settings.nick not in {"", self.membership.standing.nick}:
            self.membership.problems["nick"] = (
                f"config.toml says nick = {settings.nick!r}, but this node has joined as {self.membership.standing.nick!r}, "
                "and its certificate keeps that: take the setting out (`mesh config unset nick`)"
            )
        self.me = self.identity.node_id
        self.wire = Wire(settings.upload_mbps * 1e6 / 8 or None)
        self.peers = PeerClient(self.identity, self.trust.mesh_id, self._lookup, self.wire)
        await self.peers.open()
        gpus = await asyncio.to_thread(gpu_inventory)
        self.ceilings = ceilings_of(machine_mib(), settings)
        self.guard = NodeGuard(
            page_directory(self.me),
            gpus,
            self._guard_changed,
            self._note,
            guards=settings.gpu_sharing,
            bypass=settings.gpu_bypass,
            pinned_mib=self.ceilings.memory_mib,
            found=lambda tenant, text: self.say_of(tenant, text, "bypass"),
            ended=lambda tenant, used: self.say_of(tenant, self.accounts.measured(tenant, used), "receipt"),
        )
        self.switch.first.append(self.guard.shut_gates)
        self.engines = self._make_engines()
        own_only = ("process",) if settings.process_engine_for == "own" else ()
        self.inventory = Inventory(
            self.me,
            self.membership.standing.nick,
            self.membership.standing.user,
            settings.zone,
            gpus,
            settings.slots,
            settings.accepts,
            own_only,
            self._load_lending(),
            int(self.started_unix),
            gpu_sharing=settings.gpu_sharing,
            interactive=settings.interactive,
            driver=driver_version() if gpus else (),
            memory_mib=self.ceilings.memory_mib,
            cpus=None if settings.max_cpus is None else max(1, int(settings.max_cpus)),
        )
        self.library = Library(
            layout.images,
            _bytes(settings.image_cache_gib) or 0,
            settings.image_fetch,
            Bounds(_bytes(settings.image_keep_gib) or 0, settings.image_keep_days * DAY_S),
            self.identity,
            self.trust,
            self.membership,
            self.peers,
            lambda node, what: self.jobs.courier.refusals.count("images", node, what),
            self._images_changed,
        )
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
            JobLogs(layout.logs),
            random.Random(),
            self.refresh_advert,
            self.library.ready,
            settings.keep_days * DAY_S,
        )
        self.accounts = Accounts(self.identity, self.trust.mesh_id, self.journal, self.jobs)
        self.attendance = Attendance(
            self.me,
            self.journal,
            lambda body: self.membership.publish(SECTION, body, SUMMARY_TTL_S),
            self.jobs.outlook.adverts,
            lambda: {node: zone.name for zone in self.jobs.outlook.hierarchy().zones for node in zone.nodes},
            lambda: {record.node: record.body for record in self.membership.records(SECTION)},
        )
        await self.attendance.open(time.time())
        self.jobs.cadences.rates = self.attendance.rates
        self.jobs.courier.refusals.tell = self._note
        standing = self.membership.standing
        self.ladder = Ladder(self.jobs, self.guard, standing.user, standing.nick)
        self.owner = Owner(
            layout.policy,
            layout.presence,
            self.jobs,
            self.guard,
            self.inventory,
            self.ladder,
            settings.grace_s,
            self._note,
            lambda: self.refresh_advert(force=True),
            self.membership.problems,
        )
        if settings.profile == "local":
            self.jobs.mending.lost_s = LOCAL_LOST_S
        await asyncio.to_thread(trees.remove, layout.jobs)  # guests of an earlier run died with it
        # Before any peer is heard: a witness that does not know its promises would break them.
        await self.jobs.restore()
        self.deputy = Deputy(
            self.me,
            self.membership,
            self.journal,
            self.jobs,
            self.peers,
            Authority(self.me, self.trust).open_spec,
            lambda job, text: self.jobs.chronicle.say(job, "state", text, new="errand"),
        )
        await self.deputy.restore()
        await self.library.open()
        self.desk = Desk(self)
        self.metrics = Metrics(self)
        self.job_desk = JobDesk(self)
        self.ckpt_desk = CkptDesk(self)
        self.image_desk = ImageDesk(self)
        self.homecoming = Homecoming(self)
        self.logs = LogReader(self, self.job_desk)
        self.tunnels = Tunnels(self)
        self.site: Site | None = None
        context, fingerprint = server_context(layout.tls, self.identity.seed, short_id(self.me))
        self.peer_api = PeerApi(self, Gatekeeper(self.me, self.trust.mesh_id, self.trust))
        port = await self._serve_peers(context)
        await asyncio.to_thread(self.edge.open)
        if self.journal.moved_aside is not None:
            self.jobs.chronicle.say(None, "node", f"damaged journal moved to {self.journal.moved_aside}")
        await self._serve_local()
        if settings.metrics_port:
            self._runners.append(await self.metrics.serve(settings.metrics_address, settings.metrics_port))
        self._facts = msgspec.msgpack.encode(Facts(port, fingerprint, __version__, self.journal.disk))
        self.api_port = port
        self.membership.publish("facts", self._facts, FACTS_TTL_S)
        await self._refresh_engines()
        await self.owner.look()
        self.refresh_advert(force=True)

    async def run(self) -> None:
        """Until somebody asks to go down; then leave, in order or at once."""
        assert self._down is not None
        work = asyncio.create_task(self._run_parts(), name="daemon")
        down: asyncio.Future[Any] = self._down
        await asyncio.wait([work, down], return_when=asyncio.FIRST_COMPLETED)
        if self._down.done():
            grace_s, now = self._down.result()
            await self._leave(grace_s, now)
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        if self._failure:
            raise MeshError(self._failure)

    async def stop(self) -> None:
        """Let go of everything that `start` took; one part's trouble does not keep the others."""
        self.attendance.close(time.time())
        for step in (
            self.ladder.close,
            self.jobs.close,
            self.library.close,
            *(engine.close for engine in self.engines.values()),
            lambda: asyncio.to_thread(self.switch.close),
            self.guard.close,
            self.accounts.close,
            lambda: asyncio.to_thread(self.edge.close),
            self.tunnels.close,
            *([self.site.close] if self.site is not None else []),
            *(runner.cleanup for runner in self._runners),
            self.peers.close,
            self.membership.stop,
            self.journal.close,
        ):
            try:
                await step()
            except Exception as error:
                log.error("while stopping: %s", error)
        self.store.close()
        self.layout.socket.unlink(missing_ok=True)

    async def invite_to_page(self) -> "answers.owner.Page":
        """Where its page is, for one visit; MeshError if its owner has none."""
        if not self.settings.web:
            raise MeshError("this node has no page: config.toml says `web = false`", ExitCode.REFUSED)
        from mesh.web.site import Site  # nobody pays for what nobody looks at

        self.site = self.site or Site(self, self.settings.web_port)
        return await self.site.invite()

    def ask_down(self, grace_s: float | None, now: bool) -> "answers.owner.Leaving":
        assert self._down is not None
        if not self._down.done():
            self._down.set_result((self.owner.notice_s if grace_s is None else grace_s, now))
        return {"pid": os.getpid(), "guests": len(self.jobs.participant.hosted)}

    def _fail(self, reason: str) -> None:
        """Go down, since this node cannot be a member any more; the last words say why."""
        self._failure = reason
        self.ask_down(None, now=False)

    def _on_signal(self) -> None:
        if self.leaving:
            log.warning("second signal: leaving at once")
            os._exit(1)  # guests and containers end with this process: see guest_init and warden
        self.ask_down(None, now=False)

    async def _leave(self, grace_s: float, now: bool) -> None:
        """The owner's ladder for the whole node: notice, save, ship, release, say farewell."""
        self.leaving = True
        notify("STOPPING=1\nSTATUS=leaving")
        log.info("leaving (%s)", "now" if now else f"grace {grace_s:g} s")
        self.inventory.draining = True
        self.membership.set_draining(True)
        self.refresh_advert(force=True)
        if now:
            self.edge.cut(GUESTS)
            await self.ladder.kill(None, "its node leaves at once", "he stops the node at once")
        else:
            leave = Leave(grace_s, self.owner.policy.pause, "its node leaves", "he stops the node", by_hand=True)
            await self.ladder.leave(self.jobs.participant.hosted, leave)
        await self.deputy.leave(HAND_OVER_S)
        await self.jobs.hand_over(HAND_OVER_S)
        await self.membership.leave()

    async def _run_parts(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.jobs.run(), name="jobs")
            group.create_task(self.deputy.run(), name="deputy")
            group.create_task(self._watch_membership(), name="watch membership")
            group.create_task(self._keep_fresh(), name="adverts")
            group.create_task(self.homecoming.run(), name="homecoming")
            group.create_task(self.guard.run(), name="guard")
            group.create_task(self.library.run(), name="images")
            group.create_task(keep(self.edge, self.wire, self.jobs.courier.departures, self._note), name="edge")
            group.create_task(self._heed_switch(), name="kill-switch")
            group.create_task(self.owner.run(), name="owner")
            group.create_task(end_pauses(self, self._note), name="pauses")

    async def _heed_switch(self) -> None:
        """Its thread ends the guests; the rest of a reclaim follows here."""
        while True:
            await self._struck.wait()
            self._struck.clear()
            self.jobs.chronicle.say(
                None, "audit", "the kill-switch was pressed: its guests were killed", new="killswitch"
            )
            await settle_strike(self)

    async def _watch_membership(self) -> None:
        events = self.membership.subscribe()
        self.jobs.hearing.all()
        self.jobs.views_changed()
        while True:
            event = await events.get()
            if isinstance(event, EventsLost):
                self.jobs.hearing.all()
                self.library.hear_all()
            section = getattr(event, "section", "advert")
            if section in {"advert", "facts"}:
                self.jobs.views_changed()
            elif isinstance(event, RecordChanged) and section.startswith("jobs/"):
                self.jobs.hearing.section(event.node, section)
            elif isinstance(event, RecordChanged) and section.partition("/")[0] == IMAGES:
                self.library.hear(event.node, section)

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
            self.inventory.image_offer = self.library.offer()  # what others have changes too
            self.refresh_advert()

    def refresh_advert(self, force: bool = False) -> None:
        self.attendance.until_unix = self.owner.opens_at() or 0.0
        self.inventory.stays = self.attendance.tick(time.time(), self.inventory.lends)
        self.jobs.outlook.caps = self.attendance.caps
        self.inventory.gpu_pauses = bool(self.inventory.gpus) and not self.guard.pause_problem
        self.inventory.up_since_unix = int(self.attendance.since_unix or self.started_unix)
        free, room = shutil.disk_usage(self.layout.root).free, self.store.room()
        free_mib = (free if room is None else min(free, room)) >> 20
        self.inventory.store_free_mib = free_mib // 1024 * 1024  # to the GiB, so that it does not flutter
        advert = self.inventory.advert()
        now = time.monotonic()
        published_version, published_at = self._advert_published
        if force or advert.version != published_version or now - published_at > ADVERT_TTL_S / 4:
            self._advert_published = (advert.version, now)
            self.membership.publish("advert", encode_advert(advert), ADVERT_TTL_S, urgent=force)

    async def _refresh_engines(self) -> None:
        for name, engine in self.engines.items():
            self.engine_states[name] = await engine.availability()
        ready = tuple(name for name, found in self.engine_states.items() if found.ok)
        await self.library.look("docker" in ready)
        self.inventory.engines, self.inventory.image_offer = ready, self.library.offer()
        if "docker" in self.engine_states:
            self.inventory.system = self.engine_states["docker"].system

    def _images_changed(self) -> None:
        """Another image is here, or another may be run."""
        self.inventory.image_offer = self.library.offer()
        self.refresh_advert(force=True)

    def _make_engines(self) -> dict[str, GuardedEngine]:
        made: list[Engine] = []
        writers = Writers()
        if "process" in self.settings.engines:
            process = ProcessEngine(self.switch, network=self.settings.process_network, seclusion=self._seclusion())
            made.append(BoundedEngine(process, self.ceilings, lambda: process.bounds_memory, writers))
        if "docker" in self.settings.engines:
            from mesh.engine.docker import DockerEngine  # the SDK is 19 MiB and 0.1 s

            policy = policy_of(self.settings.egress, self.settings.egress_allow)
            docker = DockerEngine(format_id(self.me), self.switch, policy, self.edge, self.settings.system_checkpoints)
            made.append(BoundedEngine(docker, self.ceilings, writers=writers))
        return {engine.name: GuardedEngine(engine, self.guard) for engine in made}

    def _seclusion(self) -> Seclusion | None:
        """The owner's home with all his keys, sockets of his programs and of container engines, this daemon's own files."""
        if self.settings.process_home == "shared":
            return None
        theirs = [f"/run/user/{os.getuid()}", os.environ.get("XDG_RUNTIME_DIR", ""), "/run/docker.sock"]
        engine = os.environ.get("DOCKER_HOST", "").removeprefix("unix://")
        hidden = [Path(path) for path in (*theirs, engine) if path.startswith("/")]
        sees = [ROOT / "mesh", *map(Path, self.settings.process_sees)]  # for `import mesh` from a checkout
        return Seclusion(Path(os.environ.get("HOME", "/")), [self.layout.root, *hidden], sees)

    def _guard_changed(self, problem: str) -> None:
        self.inventory.guards = not problem
        if problem:
            self.membership.problems["guard"] = problem
        self.refresh_advert(force=True)

    async def _serve_peers(self, context: Any) -> int:
        runner = web.AppRunner(
            self.peer_api.application(), access_log=None, handler_cancellation=True, read_bufsize=READ_BYTES
        )
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
        """Signature and mesh only: its signer may have left for good, and what was committed is asked for by its hash."""
        return open_envelope(sealed, self.trust.mesh_id, "manifest")

    def _note(self, text: str) -> None:
        """For the owner: in the log, and among the node's events."""
        log.warning("%s", text)
        self.jobs.chronicle.say(None, "node", text)

    def say_of(self, tenant: Tenant, text: str, new: str) -> None:
        """Among the events of the job that is under guard."""
        self.jobs.chronicle.say(parse_job(tenant.job), "state", text, new=new)

    def _lookup(self, node: NodeId) -> Address | None:
        record = self.membership.record(node, "facts")
        host = self.membership.host_of(node)
        if record is None or host is None:
            return None
        facts = decode_facts(record.body)
        return Address(host, facts.api_port, facts.fingerprint) if facts is not None else None

    def _zone_of(self, node: NodeId) -> str:
        """A node's zone, as it says; none for one that has said nothing."""
        record = self.membership.record(node, "advert")
        with suppress(AdvertError):
            return decode_advert(node, record.body).zone if record is not None else ""
        return ""

    def _load_lending(self) -> Lending:
        """The command line's word, with what the owner said in an earlier run."""
        try:
            return load_lending(self.layout.lending, self.settings.lend)
        except (OSError, ValueError) as error:
            words = f"{self.layout.lending} cannot be read ({error}): nothing is lent before `mesh resume`"
            self.membership.problems["lending"] = words
            return Lending(lending=self.settings.lend, paused=True)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)
