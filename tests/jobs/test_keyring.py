"""Who gets the key of a job, from whom, and who does not: real cores, journals and node keys; calls go from hand to hand."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from ckptstore.vault import Vault
from membership.identity import Identity
from membership.trust import Standing
from mesh.api.peer import PeerError
from mesh.jobs.journal import Journal
from mesh.jobs.keyring import Keyring, NoKey
from mesh.jobs.ledger import Attempt, Config, Ledger, Seat
from mesh.jobs.participant import Participant, Rules
from mesh.jobs.shares import Share, decode_share, encode_held, locked, opened
from mesh.jobs.spec import JobSpec
from mesh.jobs.witness import Witness
from tests.jobs.worlds import JOB, make_spec, make_witness, seats

NAMES = "ABCDEF"
USERS = {"A": "ada"}  # the job's; everybody else is somebody else


class Campus:
    """Six nodes. The job is A's, its witnesses are A, B and C, and D runs it, unless a test says otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ids = {name: Identity.generate() for name in NAMES}
        self.names = {identity.node_id: name for name, identity in self.ids.items()}
        self.vault = Vault.fresh()
        self.gone: set[str] = set()
        self.calls: list[str] = []
        self.rings: dict[str, Keyring] = {}
        self.parts: dict[str, Participant] = {}
        self.journals: list[Journal] = []
        witnesses = self.nodes("ABC")
        self.spec = make_spec(submitter=witnesses[0], witnesses=seats(*witnesses), lock=locked(self.vault, witnesses))

    async def start(self) -> None:
        for name in NAMES:
            await self.boot(name)
        for name in "ABC":
            self.witness(name, "ABC", holder="D")

    async def boot(self, name: str) -> None:
        identity = self.ids[name]
        journal = Journal(self.root / f"{name}.sqlite")
        await journal.open()
        self.journals.append(journal)
        rules = Rules(lambda job, sealed: self.spec, lambda job, spec, order: None, lambda sender, user, spec: True)
        self.parts[name] = Participant(identity.node_id, b"", name, rules, Random(0))
        peers: Any = Hands(self, name)
        ring = self.rings[name] = Keyring(identity, peers, journal, self.parts[name], lambda: self.names)
        await ring.restore()

    def nodes(self, names: str) -> list[bytes]:
        return [self.ids[name].node_id for name in names]

    def witness(self, name: str, group: str, holder: str | None, number: int = 0, mates: str = "") -> Witness:
        made: Witness = make_witness(tuple(self.nodes(group)), self.spec)
        attempt = Attempt(0, self.ids[holder].node_id, holder, 1, 0) if holder else None
        if attempt is not None:
            attempt = msgspec.structs.replace(attempt, mates=tuple((self.ids[mate].node_id, mate) for mate in mates))
        made.cell = msgspec.structs.replace(
            made.cell,
            config=Config(number, number, seats(*self.nodes(group))),
            holder=self.ids[holder].node_id if holder else None,
            ledger=Ledger(attempts=(attempt,) if attempt else ()),
        )
        self.parts[name].witnesses[JOB] = made
        return made

    def standing(self, name: str) -> Standing:
        return Standing(self.ids[name].node_id, name, USERS.get(name, name), (), False, 0)

    async def key(self, name: str) -> bytes:
        vault = await self.rings[name].vault(JOB, self.spec, ())
        assert vault is not None
        return vault.key


class Hands:
    """Stands in for the network: one node's calls."""

    def __init__(self, campus: Campus, caller: str) -> None:
        self.campus, self.caller = campus, caller

    async def call(self, node: bytes, method: str, path: str, body: bytes = b"", timeout_s: float = 0) -> bytes:
        campus, name = self.campus, self.campus.names[node]
        campus.calls.append(f"{self.caller}->{name} {path.rsplit('/', 1)[1]}")
        await asyncio.sleep(0)
        if name in campus.gone:
            raise PeerError("it is gone")
        standing, ring = campus.standing(self.caller), campus.rings[name]
        if path.endswith("/cell"):
            witness = campus.parts[name].witnesses.get(JOB)
            if witness is None:
                raise PeerError("no record", 404)
            return msgspec.msgpack.encode(witness.cell)
        if path.endswith("/share"):
            if not await ring.take(JOB, standing, decode_share(body)):
                raise PeerError("not yours", 403)
            return b""
        held = await ring.held_for(JOB, standing)
        if held is None:
            raise PeerError("not for you", 403)
        return encode_held(held)


@pytest.fixture
async def campus(tmp_path: Path) -> AsyncIterator[Campus]:
    made = Campus(tmp_path)
    await made.start()
    yield made
    for journal in made.journals:
        await journal.close()


async def test_the_runner_has_it_from_a_majority_of_witnesses_and_no_fewer(campus: Campus) -> None:
    campus.gone = {"A"}
    assert await campus.key("D") == campus.vault.key
    campus.gone = {"A", "B"}
    assert await campus.key("D") == campus.vault.key, "it is kept"
    await campus.boot("D")
    assert await campus.key("D") == campus.vault.key, "on disk"


async def test_too_few_witnesses_are_told(campus: Campus) -> None:
    campus.gone = {"A", "B"}
    with pytest.raises(NoKey, match=r"most of its witnesses are needed.*it is gone"):
        await campus.key("D")


@pytest.mark.parametrize("who", ["B", "E"])
async def test_a_witness_alone_and_who_only_keeps_its_checkpoints_get_nothing(campus: Campus, who: str) -> None:
    with pytest.raises(NoKey, match="not for you"):
        await campus.key(who)
    held = await campus.rings["C"].held_for(JOB, campus.standing(who))
    assert held is None


async def test_the_users_other_node_and_a_mate_of_the_gang_get_it(
    campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ABC":
        campus.witness(name, "ABC", holder="D", mates="F")
    assert await campus.key("F") == campus.vault.key
    monkeypatch.setitem(USERS, "E", "ada")
    assert await campus.key("E") == campus.vault.key


async def test_one_witness_that_lies_does_no_harm(campus: Campus, monkeypatch: pytest.MonkeyPatch) -> None:
    real = campus.rings["B"].held_for

    async def lies(job: bytes, caller: Standing) -> Any:
        held = await real(job, caller)
        assert held is not None
        wrong = tuple(msgspec.structs.replace(share, value=bytes(32)) for share in held.shares)
        return msgspec.structs.replace(held, shares=wrong, key=bytes(32))

    monkeypatch.setattr(campus.rings["B"], "held_for", lies)
    assert await campus.key("D") == campus.vault.key


async def test_who_was_replaced_follows_the_groups_to_whose_the_lease_is_now(campus: Campus) -> None:
    """The job waited while B and C were replaced by E and F, who have no shares; C was not even told."""
    for name in "AEF":
        campus.witness(name, "AEF", holder="D", number=1)
    campus.witness("B", "AEF", holder=None, number=1)
    campus.witness("C", "ABC", holder=None)
    assert await campus.rings["C"].held_for(JOB, campus.standing("D")) is not None
    assert await campus.rings["C"].held_for(JOB, campus.standing("E")) is None, "a witness, but not the runner"
    campus.gone = {"F"}
    assert await campus.key("D") == campus.vault.key


async def test_who_was_replaced_gives_nothing_while_nobody_has_the_lease_or_few_can_say_so(campus: Campus) -> None:
    for name in "ABCEF":
        campus.witness(name, "AEF", holder=None if name in "BC" else "D", number=1)
    campus.gone = {"E", "F"}
    assert await campus.rings["B"].held_for(JOB, campus.standing("D")) is None, "most of the group must say so"
    campus.gone = set()
    assert await campus.rings["B"].held_for(JOB, campus.standing("D")) is not None
    for name in "EF":
        campus.witness(name, "AEF", holder=None, number=1)
    assert await campus.rings["B"].held_for(JOB, campus.standing("D")) is None


async def test_its_runner_shares_it_with_witnesses_that_come_and_these_suffice(campus: Campus) -> None:
    await campus.key("D")
    for name in "DEF":
        campus.witness(name, "DEF", holder="D", number=1)
    runner: Any = Runs(campus.spec, Config(1, 1, seats(*campus.nodes("DEF"))))
    ring = campus.rings["D"]
    campus.gone = {"F"}
    ring.follow(JOB, runner)
    await ring._sharing[JOB]
    ring.follow(JOB, runner)
    campus.gone = set()
    await ring._sharing[JOB]  # F is tried again
    calls = len(campus.calls)
    ring.follow(JOB, runner)
    await asyncio.gather(*ring._sharing.values())
    assert len(campus.calls) == calls, "then it is done"

    lost = msgspec.structs.replace(
        runner.config, members=(*runner.config.members[:2], Seat(campus.nodes("F")[0], b"new"))
    )
    runner.config = lost
    ring.follow(JOB, runner)
    await ring._sharing[JOB]
    assert len(campus.calls) > calls, "who has lost its disk has lost its share"

    campus.gone = {*"ABCD"}
    for name in "EF":
        await campus.boot(name)
        campus.witness(name, "DEF", holder="E", number=1)
    assert await campus.key("E") == campus.vault.key


async def test_shares_are_taken_from_its_runner_or_its_user_alone(campus: Campus) -> None:
    share = Share(b"evil....", 1, 1, bytes(32))
    take = campus.rings["B"].take
    assert not await take(JOB, campus.standing("E"), share) and not await take(b"?" * 16, campus.standing("A"), share)
    assert await take(JOB, campus.standing("D"), share) and await take(JOB, campus.standing("A"), share)
    assert await campus.key("D") == campus.vault.key, "and a wrong one hides no right one"


async def test_what_saves_openly_has_none(campus: Campus) -> None:
    spec: JobSpec = msgspec.structs.replace(campus.spec, lock=None)
    assert await campus.rings["D"].vault(JOB, spec) is None
    campus.parts["B"].witnesses[JOB].spec = spec
    assert await campus.rings["B"].held_for(JOB, campus.standing("A")) is None


async def test_a_share_that_cannot_be_read_is_none(campus: Campus) -> None:
    lock = msgspec.structs.replace(campus.spec.lock, shares=(b"nonsense",) * 3)  # type: ignore[arg-type]
    campus.parts["B"].witnesses[JOB].spec = msgspec.structs.replace(campus.spec, lock=lock)
    held = await campus.rings["B"].held_for(JOB, campus.standing("A"))
    assert held is not None and held.shares == () and opened(campus.vault.realm, held.shares) is None


class Runs:
    """As much of a runner as the keyring looks at."""

    def __init__(self, spec: JobSpec, config: Config) -> None:
        self.spec, self.config = spec, config
