"""What a person at this node can ask and order, in terms of the daemon's parts; the answers are plain JSON values."""

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ckptstore.errors import StoreError
from membership.envelope import EnvelopeError, open_envelope, seal
from membership.events import MemberView
from membership.identity import format_id, parse_id, short_id
from membership.trust import ROLES, USER, TrustError, make_invite, make_revocation
from mesh import __version__
from mesh.api.errors import ExitCode, MeshError
from mesh.api.orders import ApproveOrder, InviteOrder, SubmitOrder
from mesh.api.peer import PeerError
from mesh.jobs.courier import FetchError
from mesh.jobs.ledger import Seat, left_unwillingly
from mesh.jobs.spec import Checkpointing, JobSpec, SpecError, check_spec, decode_spec, format_job, placement_request
from mesh.jobs.status import JobStatus
from mesh.jobs.steward import WANT_WITNESSES
from mesh.jobs.workdir import collect_files
from placement.decision import cannot_ever, explain, rank_nodes, replica_order, witness_order

if TYPE_CHECKING:
    from mesh.daemon import Daemon

WORKDIR_REPLICAS = 2
_Around = tuple[dict[bytes, str], set[bytes], dict[bytes, bytes]]
LOCAL_LEASE_S = 4.0  # with the local gossip profile: failover in seconds


class Desk:
    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon

    def describe(self) -> dict[str, Any]:
        """`mesh status`."""
        members = self._daemon.membership.members()
        counters = self._daemon.membership.counters + self._daemon.peer_api.counters
        counters["refused_job_messages"] += self._daemon.jobs.participant.refused
        return {
            "version": __version__,
            "pid": os.getpid(),
            "node": format_id(self._daemon.me),
            "nick": self._daemon.membership.standing.nick,
            "user": self._daemon.membership.standing.user,
            "mesh": self._daemon.trust.genesis.name,
            "mesh_id": self._daemon.trust.mesh_id.hex(),
            "roles": list(self._daemon.membership.standing.roles),
            "may_admit": self._daemon.membership.standing.can_admit,
            "open": self._daemon.settings.open,
            "address": f"{self._daemon.membership.host}:{self._daemon.membership.port}",
            "api_port": self._daemon.api_port,
            "lending": self._daemon.inventory.lending.lending,
            "paused": self._daemon.inventory.lending.paused,
            "leaving": self._daemon.leaving,
            "alive": sum(member.state == "alive" for member in members),
            "engines": {name: msgspec.to_builtins(found) for name, found in self._daemon.engine_states.items()},
            "guests": [format_job(job) for job in self._daemon.jobs.participant.runners],
            "certificate_ends_unix": self._daemon.membership.standing.not_after,
            "clock_offset_s": self._daemon.membership.clock_offset_s,
            "waiting": len(self._daemon.membership.waiting()),
            "problem": self._daemon.membership.problem,
            "problems": self._daemon.membership.problems,
            "reached_by": self._reached_by(),
            "counters": dict(sorted(counters.items())),
        }

    def _reached_by(self) -> list[dict[str, Any]]:
        """What other nodes said of reaching this one at its address."""
        nicks = {member.node_id: member.nick for member in self._daemon.membership.members()}
        return [
            {
                "node": format_id(node),
                "nick": nicks.get(node, short_id(node)),
                "udp": answer.udp,
                "tcp": answer.tcp,
                "seen_host": answer.seen_host,
            }
            for node, answer in self._daemon.membership.reached.items()
        ]

    def nodes(self) -> list[dict[str, Any]]:
        adverts = {advert.node: advert for advert in self._daemon.jobs.adverts()}
        running: dict[bytes, int] = {}
        for status in self.statuses().values():
            if status.runner is not None and status.outcome is None:
                running[status.runner] = running.get(status.runner, 0) + 1
        rows = []
        for member in self._daemon.membership.members():
            advert = adverts.get(member.node_id)
            rows.append(
                {
                    "node": format_id(member.node_id),
                    "nick": member.nick,
                    "user": member.user,
                    "state": "draining" if member.draining and member.state == "alive" else member.state,
                    "address": f"{member.host}:{member.port}",
                    "me": member.node_id == self._daemon.me,
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

    def statuses(self) -> dict[bytes, JobStatus]:
        return self._daemon.jobs.statuses()

    def job_list(self) -> list[dict[str, Any]]:
        ordered = sorted(self.statuses().values(), key=lambda status: status.created_unix_ms)
        around = self._around()
        return [self._show(status, around) for status in ordered]

    def _around(self) -> _Around:
        """Everybody's nick, who is there, and with which disk; looked up once for all jobs that are shown."""
        members = self._daemon.membership.members()
        nicks = {member.node_id: member.nick for member in members}
        return nicks, {member.node_id for member in members if member.present}, self._daemon.jobs.disks()

    def _show(self, status: JobStatus, around: _Around | None = None) -> dict[str, Any]:
        nicks, present, disks = around or self._around()
        state, detail = status.state, status.detail
        seats = {
            seat
            for seat in status.config.everyone
            if seat.node in present and disks.get(seat.node, seat.disk) == seat.disk
        }
        if status.outcome is None and not status.config.quorum(seats):
            left = {seat.node for seat in seats}
            gone = [nicks.get(node, short_id(node)) for node in status.witnesses if node not in left]
            state, detail = "stranded", _stranded(gone, len(status.witnesses))

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
            "state": state,
            "detail": detail,
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
        statuses = self.statuses()
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
            for event in await self._daemon.journal.events(wanted, after)
        ]

    # --- what it does

    async def submit(self, order: SubmitOrder) -> dict[str, Any]:
        if USER not in self._daemon.membership.standing.roles:
            raise MeshError("this node may lend, but not submit: its certificate says so", ExitCode.REFUSED)
        chosen = tuple(self.find_node(name).node_id for name in order.ckpt_to)
        members = [m for m in self._daemon.membership.members() if m.state == "alive" and not m.draining]
        alive = [member.node_id for member in members]
        spec = JobSpec(
            submitter=self._daemon.me,
            chain=self._daemon.membership.chain,
            user=self._daemon.membership.standing.user,
            created_unix_ms=time.time_ns() // 1_000_000,
            nonce=os.urandom(16),
            argv=tuple(order.argv),
            witnesses=self._choose_witnesses(alive),
            name=order.name,
            env=order.env,
            image=order.image,
            engine=order.engine,
            gpus=order.gpus,
            vram_mib=order.vram_mib,
            memory_mib=order.memory_mib,
            cpus=order.cpus,
            zone=order.zone,
            checkpointing=_checkpointing(order, chosen),
            grace_s=self._daemon.settings.grace_s if order.grace_s is None else order.grace_s,
            lease_s=LOCAL_LEASE_S if self._daemon.settings.profile == "local" else self._daemon.settings.lease_s,
            error_budget=order.retries,
            on_exit_0=order.on_exit_0,
            on_partition=order.on_partition,
            max_time_s=order.max_time_s,
            priority=order.priority,
            after=tuple(self._to_come_after(name) for name in order.after),
        )
        check_spec(spec)
        self._refuse_impossible(spec)
        size = 0
        if order.workdir is not None:
            workdir, holders, size = await self._pack_workdir(order.workdir, spec.checkpointing)
            spec = msgspec.structs.replace(spec, workdir=workdir, workdir_holders=holders)
        job, problem = await self._daemon.jobs.submit(spec)
        if problem is not None:
            raise MeshError(f"the job was not accepted: {problem}. Try again, or see `mesh nodes`.")
        return {
            "job": format_job(job),
            "workdir_bytes": size,
            "witnesses": len(spec.witnesses),
            "warning": "" if len(spec.witnesses) >= WANT_WITNESSES else _few_witnesses(len(alive)),
        }

    def _to_come_after(self, name: str) -> bytes:
        status = self.find_job(name)
        if status.outcome is not None and status.outcome.kind != "done":
            raise MeshError(f"job {format_job(status.job)[:8]} has ended already, and not well: {status.state}")
        return status.job

    def _refuse_impossible(self, spec: JobSpec) -> None:
        reason = cannot_ever(placement_request(b"", spec, 0), self._daemon.jobs.adverts())
        if reason is not None:
            raise MeshError(reason, ExitCode.IMPOSSIBLE)

    def _choose_witnesses(self, alive: list[bytes]) -> tuple[Seat, ...]:
        """This node and two others, or this node alone on a mesh of one or two."""
        me, disks = self._daemon.me, self._daemon.jobs.disks()
        ranked = witness_order(os.urandom(8), self._daemon.jobs.adverts(), alive)
        others = [Seat(node, disks[node]) for node in ranked if node != me and node in disks]
        chosen = others[: WANT_WITNESSES - 1] if len(others) >= WANT_WITNESSES - 1 else []
        return (Seat(me, self._daemon.journal.disk), *chosen)

    async def _pack_workdir(
        self, directory: str, checkpointing: Checkpointing | None
    ) -> tuple[bytes, tuple[bytes, ...], int]:
        """Store the user's files and copy them to peers: the manifest, who holds it, its size in bytes."""
        leave = (checkpointing.directory,) if checkpointing is not None else ()
        files = await asyncio.to_thread(collect_files, Path(directory), leave)
        try:
            saved = await asyncio.to_thread(
                self._daemon.store.save,
                files,
                job=b"\0" * 16,
                config=0,
                term=0,
                seq=0,
                parent=None,
                kind="workdir",
                created_unix=int(time.time()),
                seal=lambda payload: seal(self._daemon.identity, self._daemon.trust.mesh_id, "manifest", payload),
            )
        except StoreError as error:
            raise MeshError(f"the working directory could not be packed: {error}") from error
        order_of_peers = replica_order(saved.id[:16], self._daemon.jobs.adverts(), {self._daemon.me}, need_mib=1)
        copies = await self._daemon.jobs.courier.replicate(saved.id, [], order_of_peers, WORKDIR_REPLICAS)
        return saved.id, (self._daemon.me, *copies.holders), saved.manifest.total_bytes

    def cancel(self, text: str) -> dict[str, Any]:
        status = self.find_job(text)
        if status.outcome is not None:
            return {"job": format_job(status.job), "state": status.state, "already": True}
        self.check_owner(status)
        nodes = [*([status.runner] if status.runner is not None else []), *status.witnesses, status.submitter]
        self._daemon.jobs.cancel(status.job, self._daemon.membership.standing.user, nodes)
        return {"job": format_job(status.job), "state": "cancelling", "already": False}

    def check_owner(self, status: JobStatus) -> None:
        """MeshError if it is not this node's user's job."""
        if status.user != self._daemon.membership.standing.user:
            raise MeshError(f"job {format_job(status.job)[:8]} is {status.user}'s, not yours", ExitCode.REFUSED)

    async def sealed_spec(self, job: bytes) -> bytes | None:
        witness = self._daemon.jobs.participant.witnesses.get(job)
        return witness.cell.spec if witness is not None else (await self._daemon.journal.submitted()).get(job)

    async def spec_of(self, status: JobStatus) -> JobSpec:
        sealed = await self.sealed_spec(status.job)
        for node in status.witnesses:
            if sealed is None and node != self._daemon.me:
                with suppress(PeerError):
                    sealed = await self._daemon.peers.call(node, "GET", f"/v1/jobs/{status.job.hex()}/spec")
        if sealed is None:
            raise MeshError("none of the job's witnesses can be reached now; try again in a moment")
        try:
            return decode_spec(open_envelope(sealed, self._daemon.trust.mesh_id, "job")[1])
        except (EnvelopeError, SpecError) as error:
            raise MeshError(f"a witness gave a damaged job description: {error}") from error

    async def why(self, text: str) -> dict[str, Any]:
        """The ranking for the job's next attempt, with reasons; computed from this node's adverts, as anybody would."""
        status = self.find_job(text)
        spec = await self.spec_of(status)
        last = status.attempts[-1] if status.attempts else None
        attempt = 0 if last is None else last.number + bool(last.reason)
        request = placement_request(status.job, spec, attempt, status.excluded, left_unwillingly(status.attempts))
        adverts = self._daemon.jobs.adverts()
        ranking = rank_nodes(request, adverts)
        shown = self._show(status)
        return {
            "job": shown["job"],
            "state": shown["state"],
            "detail": shown["detail"],
            "node": shown["node"],
            "witnesses": shown["witnesses"],
            "explanation": explain(request, ranking),
            "candidates": [
                {"nick": c.nick, "score": str(c.score), "weight": c.weight, "advert_version": c.advert_version}
                for c in ranking.candidates
            ],
            "refused": [{"nick": r.nick, "reasons": list(r.reasons)} for r in ranking.refused],
            "attempts": shown["attempts"],
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
            await self.bring(status, status.outcome.manifest, status.outcome.holders)
            report = await asyncio.to_thread(
                lambda: self._daemon.store.restore(status.outcome.manifest, target, prefix="out")  # type: ignore[union-attr,arg-type]
            )
        except StoreError as error:
            raise MeshError(f"the results could not be written to {target}: {error}") from error
        return {"job": format_job(status.job), "destination": str(target), "files": report.files, "bytes": report.bytes}

    async def bring(self, status: JobStatus, manifest: bytes, holders: tuple[bytes, ...]) -> None:
        ran = [attempt.node for attempt in status.attempts]
        sources = [node for node in dict.fromkeys([*holders, *reversed(ran)]) if node != self._daemon.me]
        try:
            await self._daemon.jobs.courier.fetch(manifest, sources)
        except FetchError as error:
            raise MeshError(f"its files cannot be reached now: {error}") from error

    async def set_paused(self, paused: bool) -> dict[str, Any]:
        marker = self._daemon.layout.root / "paused"
        if paused:
            await asyncio.to_thread(marker.touch)
        else:
            await asyncio.to_thread(marker.unlink, True)
        lending = msgspec.structs.replace(self._daemon.inventory.lending, paused=paused)
        if not paused:
            lending = msgspec.structs.replace(lending, lending=True)
        self._daemon.inventory.lending = lending
        self._daemon.refresh_advert(force=True)
        return {"paused": paused, "lending": lending.lending, "guests": len(self._daemon.jobs.participant.runners)}

    async def reclaim(self, grace_s: float | None, now: bool) -> dict[str, Any]:
        """Take the machine back: no new work, and every guest gone when this returns."""
        await self.set_paused(True)
        begun = time.monotonic()
        if now:
            jobs = await self._daemon.jobs.kill("its owner took the machine back at once")
        else:
            grace = self._daemon.settings.grace_s if grace_s is None else grace_s
            jobs = await self._daemon.jobs.vacate(grace, "its owner took the machine back")
        return {"reclaimed": [format_job(job) for job in jobs], "seconds": round(time.monotonic() - begun, 3)}

    def invite(self, order: InviteOrder) -> str:
        if not 60 <= order.ttl_s <= 365 * 86_400:
            raise MeshError("an invite may live from a minute to a year", ExitCode.USAGE)
        if len(order.user) > 64:
            raise MeshError("a user's name has at most 64 characters", ExitCode.USAGE)
        seeds = tuple(f"{m.host}:{m.port}" for m in self._daemon.membership.members() if m.state == "alive")[:3]
        try:
            return make_invite(
                self._daemon.identity,
                self._daemon.membership.chain,
                self._daemon.trust.genesis_bytes,
                seeds,
                order.ttl_s,
                time.time(),
                tuple(order.roles) or ROLES,
                order.user,
            )
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error

    async def network(self) -> dict[str, Any]:
        """How this node stands in the network, as it and others see it now; for `mesh doctor`."""
        seen: dict[str, Any] = msgspec.to_builtins(await self._daemon.membership.examine())
        return seen

    def pending(self) -> list[dict[str, Any]]:
        """Who has knocked, anywhere in the mesh, and waits to be let in."""
        waiting = sorted(self._daemon.membership.waiting().values(), key=lambda entry: entry.since_unix)
        return [
            {
                "node": format_id(entry.node),
                "nick": entry.nick,
                "user": entry.user,
                "host": entry.host,
                "since_unix": entry.since_unix,
            }
            for entry in waiting
        ]

    def approve(self, order: ApproveOrder) -> dict[str, Any]:
        waiting = self._daemon.membership.waiting()
        text = order.node.lower()
        fits = [
            entry
            for entry in waiting.values()
            if entry.nick == order.node or (text and format_id(entry.node).startswith(text))
        ]
        if len(fits) != 1:
            known = ", ".join(f"{entry.nick} {format_id(entry.node)[:7]}" for entry in waiting.values()) or "nobody"
            word = "nobody" if not fits else f"{len(fits)} nodes"
            raise MeshError(f"{word} that waits fits {order.node!r} (waiting: {known})", ExitCode.NOT_FOUND)
        (entry,) = fits
        nick, user = order.nick or entry.nick, order.user or entry.user
        try:
            self._daemon.membership.approve(entry.node, nick, user, tuple(order.roles) or ROLES, order.admit)
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        return {"node": format_id(entry.node), "nick": nick, "user": user}

    def trusted(self) -> list[dict[str, Any]]:
        """Everybody with a certificate that this node has seen, and every key that was shut out."""
        trust, now = self._daemon.trust, time.time()
        seen = trust.seen()
        rows = []
        for node in {*seen, *trust.revocations}:
            standing, (revocation, _) = seen.get(node), trust.revocations.get(node, (None, b""))
            rows.append(
                {
                    "node": format_id(node),
                    "nick": standing.nick if standing is not None else short_id(node),
                    "user": standing.user if standing is not None else "",
                    "founder": node in trust.genesis.roots,
                    "can_admit": standing is not None and standing.can_admit,
                    "roles": list(standing.roles) if standing is not None else [],
                    "ends_unix": standing.not_after if standing is not None else None,
                    "ended": standing is not None and now > standing.not_after,
                    "revoked_unix": revocation.revoked_unix if revocation is not None else None,
                    "reason": revocation.reason if revocation is not None else "",
                }
            )
        return sorted(rows, key=lambda row: (row["nick"], row["node"]))

    def revoke(self, text: str, reason: str) -> dict[str, Any]:
        node = self.find_node(text)
        if node.node_id in self._daemon.trust.revoked:
            return {"node": format_id(node.node_id), "nick": node.nick, "already": True}
        try:
            sealed = make_revocation(self._daemon.identity, self._daemon.trust, node.node_id, reason, time.time())
        except TrustError as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        self._daemon.membership.revoke(sealed)
        return {"node": format_id(node.node_id), "nick": node.nick, "already": False}

    def find_node(self, text: str) -> MemberView:
        members = self._daemon.membership.members()
        fits = [member for member in members if member.nick == text]
        if not fits:
            with suppress(ValueError):
                wanted = parse_id(text)
                fits = [member for member in members if member.node_id == wanted]
        if not fits and text:
            fits = [member for member in members if format_id(member.node_id).startswith(text.lower())]
        if len(fits) != 1:
            known = ", ".join(member.nick for member in members)
            word = "no node" if not fits else f"{len(fits)} nodes"
            raise MeshError(f"{word} called {text!r} (known: {known})", ExitCode.NOT_FOUND)
        return fits[0]


def _checkpointing(order: SubmitOrder, chosen: tuple[bytes, ...]) -> Checkpointing | None:
    if order.ckpt is None:
        if chosen:
            raise MeshError("--ckpt-to needs --ckpt DIR: which directory holds checkpoints?", ExitCode.USAGE)
        return None
    return Checkpointing(
        directory=order.ckpt.rstrip("/").removeprefix("./"),
        mode=order.ckpt_mode,
        keep=order.keep,
        replicas=order.replicas,
        to=chosen,
    )


def _few_witnesses(alive: int) -> str:
    here = "this node is alone" if alive <= 1 else f"only {alive} nodes are here"
    return f"{here}, so one witness keeps the job's record: if its disk is lost, so is the record"


def _stranded(gone: list[str], of: int) -> str:
    return (
        f"{', '.join(gone)} of the {of} nodes that keep its record are gone; it goes on by itself when most are back; "
        "if they never will be: `mesh recover`"
    )


def _in_the_way(target: Path) -> bool:
    return target.exists() and (not target.is_dir() or any(target.iterdir()))
