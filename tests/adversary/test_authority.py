"""Who may do what, asked of real daemons of several users by everybody; and the findings of the review on authority."""

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptstore.manifest import MAX_MANIFEST_BYTES, Manifest, encode_manifest, manifest_id, pack_tree
from ckptstore.manifest import Tree as FileTree
from membership.ratelimit import BURST_S
from mesh.api.handlers.peers import SECRETS_CALLS_PER_S
from mesh.checkpoints.key_shares import KEY_BYTES, Share, combine_shares, decode_held, encode_share
from mesh.consensus.messages import Accept, Cancel, EventReport, Prepare
from mesh.jobs.authority import encode_warrant
from mesh.jobs.log_times import LogPiece, encode_piece
from mesh.model.events import Event, encode_event
from mesh.model.record import Attempt, Config, JobRecord
from mesh.model.spec import decode_spec, job_id, parse_job
from mesh.rpc.client import PeerError
from tests.adversary.authority_matrix import (
    GANG,
    MATRIX,
    MEMBER,
    OTHER_RUNNER,
    RUNNER,
    STRANGER,
    USER,
    WITNESS,
    Row,
    exists,
    table,
)
from tests.adversary.town import PEOPLE, Actor, Town
from tests.e2e.commands import job_state, mesh, ok, until
from tests.e2e.test_gangs import submit as submit_gang

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
TRIES = 8  # submissions until some witness is neither the user, the runner nor a gang member
CALLED = [row for row in MATRIX if row.call]


class Scene:
    """A gang job of ada's in town, and a job of mal's on the third lender."""

    def __init__(self, town: Town, end: Path) -> None:
        self.town, self.addresses = town, town.addresses()
        ok(town.node("ada1"), "secret", "set", "KEY", input_text="canary")
        for _ in range(TRIES):
            self.name = submit_gang(town.node("ada1"), "2", steps=10**6, end=end, options=("--secret", "KEY"))
            state = until(self._running, "the gang to run and save")
            self.runner, (self.mate,), self.witnesses = state["node"], state["gang"], state["witnesses"]
            if set(self.witnesses) - {"ada1", "ada2", self.runner, self.mate}:
                break
            ok(town.node("ada1"), "cancel", self.name)
            until(lambda: job_state(town.node("ada1"), self.name).get("outcome"), "the gang to end")
        self.job = parse_job(self.name)
        self.term = state["attempts"][-1]["term"]
        self.other = ok(town.node("mal"), "submit", "--no-workdir", "--", "sleep", "3600").strip()
        where = until(self._other_runs, "the other job to run")
        self.classes: dict[str, set[str]] = {nick: {MEMBER} for nick in PEOPLE} | {"nobody": {STRANGER}}
        for nick in ("ada1", "ada2"):
            self.classes[nick].add(USER)
        for nick in self.witnesses:
            self.classes[nick].add(WITNESS)
        self.classes[self.runner].add(RUNNER)
        self.classes[self.mate].add(GANG)
        self.classes[where].add(OTHER_RUNNER)

    def _running(self) -> dict[str, Any] | None:
        state = self.town.job(self.name)
        ready = state and state["state"] == "running" and state["checkpoint"] and state["gang"]
        return job_state(self.town.node("ada1"), self.name) | state if ready else None

    def _other_runs(self) -> str | None:
        state = job_state(self.town.node("mal"), self.other)
        return state["node"] if state["state"] == "running" else None

    def actor(self, nick: str) -> Actor:
        return Actor(self.town, nick, self.addresses)

    def witness_besides(self, *nicks: str) -> str:
        return next(nick for nick in self.witnesses if nick not in nicks)

    def event(self, actor: Actor) -> bytes:
        now = time.time_ns() // 1_000_000
        return actor.sealer.seal("event", encode_event(Event(self.job, now, now, "state", b"", reason="by me")))

    def manifest(self, actor: Actor, **changes: object) -> tuple[str, bytes]:
        """Return the path and the body with which an actor brings a manifest that it has signed."""
        whole = Manifest(2, self.job, 0, self.term, 1, None, "checkpoint", 0, b"", (), 0, 0, b"", user="ada")
        fields = {"tree": pack_tree(FileTree(), self.job, ()), **changes}
        sealed = actor.sealer.seal("manifest", encode_manifest(msgspec.structs.replace(whole, **fields)))
        return f"/v1/manifests/{manifest_id(sealed).hex()}", sealed


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Town() as town:
        town.start_all()
        yield Scene(town, tmp_path_factory.mktemp("scene") / "end")


async def call(scene: Scene, row: Row, actor: Actor) -> bool:
    """Make the row's call; tell whether it was admitted."""
    at, job = scene.witness_besides(actor.nick), f"/v1/jobs/{scene.job.hex()}"
    work = b"work".hex()
    match row.call:
        case "spec":
            return await actor.admitted(at, "GET", f"{job}/spec")
        case "record":
            return await actor.admitted(at, "GET", f"{job}/witness-record")
        case "events":
            return await actor.admitted(at, "GET", f"{job}/events")
        case "report":
            if actor.nick not in PEOPLE:
                return await actor.admitted(at, "POST", "/v1/messages", b"\x90")
            mine = scene.event(actor)
            await actor.told(at, scene.job, EventReport(job=scene.job, events=(mine,)))
            return mine in await actor.events(at, scene.job)
        case "files":
            return await actor.admitted(scene.runner, "GET", f"{job}/files?path={work}")
        case "mate's files":
            return await actor.admitted(scene.mate, "GET", f"{job}/files?path={work}")
        case "log":
            return await actor.admitted(scene.runner, "GET", f"{job}/log/0/{scene.town.id(scene.runner).hex()}")
        case "control":
            return await actor.admitted(scene.runner, "GET", f"{job}/control/none.json")
        case "key":
            return await actor.admitted(at, "GET", f"{job}/key")
        case "secrets key":
            return await actor.admitted(at, "GET", f"{job}/secrets-key")
        case "share" | "secrets share":
            share = encode_share(Share(b"12345678", 2, 1, bytes(KEY_BYTES)))
            return await actor.admitted(at, "PUT", f"{job}/{row.call.replace(' ', '-')}", share)
        case "log copy":
            piece = encode_piece(LogPiece(0, b"x", ((1, 1),)))
            return await actor.admitted(at, "PUT", f"{job}/log/63", piece)
        case "manifest" | "fence":
            taken = []
            for store in PEOPLE:  # those of witnesses, and those of nodes that ask them
                term = scene.term if row.call == "manifest" else 1 << 40
                path, sealed = scene.manifest(actor, term=term, config=0 if row.call == "manifest" else 1 << 40)
                if store != actor.nick:
                    taken.append(await actor.admitted(store, "PUT", path, sealed))
            assert len(set(taken)) == 1, "all stores answer alike"
            return taken[0]
        case "term" | "cancel":
            if actor.nick not in PEOPLE:
                return await actor.admitted(at, "POST", "/v1/messages", b"\x90")
            before = await actor.record(at, scene.job)
            prepare = Prepare(job=scene.job, term=before.promised + 1)
            ask = prepare if row.call == "term" else Cancel(job=scene.job, user="ada")
            after = await actor.told(at, scene.job, ask)
            return after.promised != before.promised or after.cancel_wanted
    raise AssertionError(row.call)


@pytest.mark.parametrize("nick", ["nobody", *PEOPLE])
@pytest.mark.parametrize("row", CALLED, ids=lambda row: row.call)
async def test_call_is_answered_as_the_matrix_says(scene: Scene, row: Row, nick: str) -> None:
    own_place = {"files": scene.runner, "log": scene.runner, "control": scene.runner, "mate's files": scene.mate}
    if own_place.get(row.call) == nick or (row.call == "cancel" and USER in scene.classes[nick]):
        return  # a node does not call itself; the job's end is the last test
    who = scene.classes[nick]
    may = bool(row.who & who)
    if row.call == "term":
        may = False  # nobody, while a lease runs
    async with scene.actor(nick) as actor:
        assert await call(scene, row, actor) is may, f"{nick} ({', '.join(sorted(who))}): {row.what}"


def test_every_kind_of_actor_is_played(scene: Scene) -> None:
    assert set().union(*scene.classes.values()) == {STRANGER, MEMBER, OTHER_RUNNER, WITNESS, GANG, RUNNER, USER}
    assert any(WITNESS in who and not who & {USER, RUNNER, GANG} for who in scene.classes.values())


def test_matrix_names_functions_and_tests_that_exist() -> None:
    page = (ROOT / "docs/reference/authority.md").read_text()
    for row, line in zip(MATRIX, table(), strict=True):
        assert exists(row.asked, ROOT) and exists(row.test, ROOT), row.what
        assert line in page, f"docs/reference/authority.md lacks: {line}"


# --- findings


async def test_member_cannot_stop_a_jobs_checkpoints(scene: Scene) -> None:
    """Finding 3: one PUT of a manifest with an enormous term raised the fence of every store."""
    ada = scene.town.node("ada1")
    async with AsyncExitStack() as stack:
        for nick in ("mal", "eve", scene.mate):
            actor = await stack.enter_async_context(scene.actor(nick))
            path, sealed = scene.manifest(actor, term=1 << 40, config=1 << 40)
            for store in PEOPLE:
                if store != nick:
                    assert not await actor.admitted(store, "PUT", path, sealed)
    for node in scene.town.nodes:
        fence = node.where.store / "fences" / scene.job.hex()
        assert not fence.exists() or msgspec.json.decode(fence.read_bytes())["term"] <= scene.term
    seq = scene.town.job(scene.name)["checkpoint"]["seq"]
    until(lambda: scene.town.job(scene.name)["checkpoint"]["seq"] > seq + 1, "the job to commit further checkpoints")
    assert not job_state(ada, scene.name).get("outcome")


async def test_files_of_a_gang_member_are_for_its_user(scene: Scene) -> None:
    """Finding 8: a gang member has an attempt and no runner, so nobody was asked for their user."""
    path = f"/v1/jobs/{scene.job.hex()}/files?path={b'work'.hex()}"
    async with scene.actor("mal") as mal, scene.actor("ada2") as ada:
        for place in (scene.mate, scene.runner):
            assert not await mal.admitted(place, "GET", path)
            assert await ada.admitted(place, "GET", path)


async def test_large_manifests_of_unknown_jobs_are_refused(scene: Scene) -> None:
    """Finding 10: manifests of unknown jobs, of 40 MiB each, were kept outside of every quota."""
    async with scene.actor("carol") as carol:
        for number in range(3):
            for kind in ("checkpoint", "result", "workdir"):
                unknown = bytes([number + 1]) * 16
                path, sealed = scene.manifest(
                    carol, job=unknown, kind=kind, tree=b"t" * (MAX_MANIFEST_BYTES // 2), user="carol"
                )
                assert not await carol.admitted("bob", "PUT", path, sealed)
    stored = list((scene.town.node("bob").where.store / "manifests").iterdir())
    assert all(path.stat().st_size < MAX_MANIFEST_BYTES // 4 for path in stored)


async def test_workdir_is_kept_for_its_own_user_only(scene: Scene) -> None:
    none = {"job": bytes(16), "kind": "workdir", "term": 0, "seq": 0}
    for nick, user, taken in (("mal", "mal", True), ("mal", "ada", False), ("eve", "eve", False)):
        async with scene.actor(nick) as actor:
            path, sealed = scene.manifest(actor, user=user, **none)
            assert await actor.admitted("bob", "PUT", path, sealed) is taken, (nick, user)
            for wrong in ({"term": 1}, {"config": 1}, {"job": b"j" * 16}):
                path, sealed = scene.manifest(actor, user=user, **{**none, **wrong})
                assert not await actor.admitted("bob", "PUT", path, sealed)


async def test_member_cannot_steal_the_lease_of_a_waiting_job(scene: Scene) -> None:
    """Finding 9: a member with the role `user` took the lease of a waiting job, and got its key."""
    ada = scene.town.node("ada1")
    name = ok(ada, "submit", "--nodes", "3", "--no-workdir", "--", "true").strip()  # two places are taken
    state = until(lambda: (s := job_state(ada, name)).get("state") == "pending" and s, "the job to wait")
    job = parse_job(name)
    async with AsyncExitStack() as stack:
        for nick in (nick for nick in PEOPLE if nick not in {*state["witnesses"], "ada1", "ada2"}):
            thief = await stack.enter_async_context(scene.actor(nick))
            records = {witness: await thief.record(witness, job) for witness in state["witnesses"]}
            term = max(record.promised for record in records.values()) + 1000
            for witness, record in records.items():
                now = time.time_ns() // 1_000_000
                attempt = Attempt(record.record.next_attempt, thief.me, nick, term, now, seen_unix_ms=now)
                stolen = record.record.with_attempt(attempt)
                warrants = (b"", thief.sealer.seal("warrant", encode_warrant(job, term, thief.me, record.config)))
                lease = Accept(job, term, 1, record.config, stolen, thief.me, warrants=warrants)
                await thief.tell(witness, Prepare(job=job, term=term), lease)
            shares = []
            for witness in records:
                after = await thief.told(witness, job)
                assert after.holder is None and after.promised < term, f"{nick} took the lease from {witness}"
                if await thief.admitted(witness, "GET", f"/v1/jobs/{job.hex()}/key"):
                    held = decode_held(await thief.call(witness, "GET", f"/v1/jobs/{job.hex()}/key"))
                    shares += held.shares
            lock = decode_spec(next(iter(records.values())).spec[97:]).lock
            assert lock is not None and combine_shares(lock.realm, shares) is None and not shares
    ok(ada, "cancel", name)


async def test_witness_that_is_not_to_run_a_job_gets_neither_its_lease_nor_its_key(scene: Scene) -> None:
    """A witness wins terms, gives one to itself, and may lend: nothing else kept it from any job that waits."""
    ada = scene.town.node("ada1")
    for _ in range(10):
        name = ok(ada, "submit", "--on", "ada2", "--no-workdir", "--", "true").strip()  # it does not lend
        state = until(lambda of=name: (s := job_state(ada, of)).get("state") == "pending" and s, "the job to wait")
        lenders = [nick for nick in state["witnesses"] if PEOPLE[nick][2]]
        if lenders:
            break
        ok(ada, "cancel", name)
    job, nick = parse_job(name), lenders[0]
    async with scene.actor(nick) as thief:
        others = [witness for witness in state["witnesses"] if witness != nick]
        records = {witness: await thief.record(witness, job) for witness in others}
        term = max(record.promised for record in records.values()) + 1
        for witness, record in records.items():
            now = time.time_ns() // 1_000_000
            attempt = Attempt(record.record.next_attempt, thief.me, nick, term, now, seen_unix_ms=now)
            stolen = record.record.with_attempt(attempt)
            warrants = (thief.sealer.seal("warrant", encode_warrant(job, term, thief.me, record.config)),)
            await thief.tell(witness, Prepare(job=job, term=term))
            assert (await thief.told(witness, job)).promised == term, "it is a witness of the job"
            await thief.tell(witness, Accept(job, term, 1, record.config, stolen, thief.me, warrants=warrants))
            after = await thief.told(witness, job)
            assert after.holder is None and after.record == record.record, f"{nick} took the lease from {witness}"
            assert not await thief.admitted(witness, "GET", f"/v1/jobs/{job.hex()}/key")
    ok(ada, "cancel", name)


async def test_lock_copied_into_another_job_gives_no_key(scene: Scene) -> None:
    """A member submitted a job with the lock and the witnesses of another's, and they gave it that job's key as its user."""
    async with scene.actor("mal") as mal:
        known = await mal.record(scene.witness_besides("mal"), scene.job)
        theirs = decode_spec(known.spec[97:])
        assert theirs.lock is not None
        own = mal.sealer.open(
            "job", (await mal.record(scene.town.job(scene.other)["witnesses"][0], parse_job(scene.other))).spec
        )
        spec = decode_spec(own[1])
        copied = msgspec.structs.replace(
            spec, nonce=b"n" * 16, witnesses=theirs.witnesses, lock=theirs.lock, workdir=None
        )
        payload = msgspec.msgpack.encode(copied)
        job, config = job_id(payload), Config(0, 1, theirs.witnesses)
        shares, whole = [], []
        for witness in scene.witnesses:
            if witness == "mal":
                continue
            accept = Accept(job, 1, 1, config, JobRecord(), None, spec=mal.sealer.seal("job", payload))
            await mal.tell(witness, accept)
            try:
                held = decode_held(await mal.call(witness, "GET", f"/v1/jobs/{job.hex()}/key"))
            except PeerError as error:
                assert error.status == 403
                continue
            shares += held.shares
            whole.append(held.key)
        assert combine_shares(theirs.lock.realm, shares) is None and not any(whole)


async def test_calls_for_keys_of_secrets_are_bounded(scene: Scene) -> None:
    async with scene.actor("eve") as eve:
        at, answers = scene.witness_besides("eve"), set[int | None]()
        for _ in range(int(4 * BURST_S * SECRETS_CALLS_PER_S)):
            with pytest.raises(PeerError) as refused:
                await eve.call(at, "GET", f"/v1/jobs/{scene.job.hex()}/secrets-key")
            answers.add(refused.value.status)
            if 503 in answers:
                break
    assert answers >= {503}


async def test_only_its_user_ends_the_job(scene: Scene) -> None:
    """The last test of this scene: its user's other machine cancels the job that nobody else could."""
    refused = mesh(scene.town.node("mal"), "cancel", scene.name)
    assert refused.returncode != 0 and "ada's, not yours" in refused.stderr
    async with scene.actor("ada2") as ada:
        await ada.tell(scene.witness_besides("ada2"), Cancel(job=scene.job, user="ada"))
    until(lambda: (scene.town.job(scene.name) or {}).get("outcome"), "the job to end")
