"""Secrets of a job: only the node that runs it, and that its user allows, opens them; nobody can put them into another job."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptstore.cipher import REALM_BYTES, StateCipher
from membership.identity import Identity
from mesh.api.handlers.secrets import SecretHandlers
from mesh.api.requests import SubmitOrder
from mesh.checkpoints.key_shares import combine_shares, decode_share
from mesh.checkpoints.keys import SECRETS_KEY, KeyRules, NoKey
from mesh.checkpoints.secrets import PADDED, open_secrets, seal_secrets
from mesh.data.keys import open_key
from mesh.data.manifest import FetchFailed
from mesh.jobs.authority import may_give_secrets_share, may_read_secrets, runs
from mesh.jobs.secret_vault import SecretVault
from mesh.model.record import Config
from mesh.model.secrets import (
    MOST_BOX_BYTES,
    MOST_BYTES,
    MOST_READERS,
    MOST_SEALED,
    MOST_SECRETS,
    SealedSecrets,
    SecretError,
    check_lock,
    check_uses,
    parse_use,
)
from mesh.model.spec import (
    Checkpointing,
    DataNeed,
    JobSpec,
    SpecError,
    check_spec,
    decode_spec,
    encode_spec,
    placement_request,
)
from placement.filters import refusals
from tests.checkpoints.test_keys import USERS, Campus, Runs
from tests.consensus.worlds import JOB, make_advert, make_spec, voters

USES = [("API_KEY", "API_KEY"), ("CLOUD", "/run/secrets/cloud.json")]
VALUES = [b"canary-4711", b'{"key": "x"}']
CIPHER = StateCipher.generate()


def bare_spec(**changes: object) -> JobSpec:
    return make_spec(witnesses=voters(*(Identity.generate().node_id for _ in range(3))), **changes)


def sealed_spec(readers: list[bytes] | None = None, **changes: object) -> JobSpec:
    spec = bare_spec(**changes)
    return msgspec.structs.replace(spec, secrets=seal_secrets(spec, CIPHER, USES, VALUES, readers or []))


def secrets_of(spec: JobSpec) -> SealedSecrets:
    assert spec.secrets is not None
    return spec.secrets


def test_values_come_back_with_the_key_only() -> None:
    spec = sealed_spec()
    assert decode_spec(encode_spec(spec)) == spec
    assert open_secrets(secrets_of(spec), CIPHER, Identity.generate()) == VALUES
    assert all(value not in encode_spec(spec) for value in VALUES)
    with pytest.raises(SecretError, match="cannot be opened here"):
        open_secrets(secrets_of(spec), StateCipher.generate(), Identity.generate())
    damaged = msgspec.structs.replace(secrets_of(spec), box=secrets_of(spec).box[:-1])
    with pytest.raises(SecretError, match="cannot be opened here"):
        open_secrets(damaged, CIPHER, Identity.generate())


def test_length_of_the_box_tells_no_length_of_a_value() -> None:
    spec = bare_spec()
    boxes = {len(seal_secrets(spec, CIPHER, USES[:1], [b"x" * size], []).box) for size in (1, 40, PADDED // 2)}
    assert len(boxes) == 1


def test_node_that_is_not_a_reader_opens_nothing_even_with_the_key() -> None:
    """All witnesses together have the key; that is not enough where the user has named nodes."""
    reader, other = Identity.generate(), Identity.generate()
    spec = sealed_spec([reader.node_id])
    assert open_secrets(secrets_of(spec), CIPHER, reader) == VALUES
    with pytest.raises(SecretError, match="cannot be opened here"):
        open_secrets(secrets_of(spec), CIPHER, other)
    stolen = msgspec.structs.replace(secrets_of(spec), readers=())
    with pytest.raises(SecretError, match="cannot be opened here"):
        open_secrets(stolen, CIPHER, other)


def test_job_is_placed_on_readers_only() -> None:
    reader, other = Identity.generate().node_id, Identity.generate().node_id
    request = placement_request(JOB, sealed_spec([reader]), 0)
    assert "is not to open the job's secrets (--secret-nodes)" in refusals(request, make_advert(other))
    assert not any("secret" in reason for reason in refusals(request, make_advert(reader)))
    anywhere = placement_request(JOB, sealed_spec(), 0)
    assert not any("secret" in reason for reason in refusals(anywhere, make_advert(other)))


def test_secrets_cannot_be_copied_into_another_job() -> None:
    """With the same witnesses, a member's own job would make them give its runner the shares of the victim's key."""
    victim = sealed_spec()
    for changes in ({"submitter": Identity.generate().node_id}, {"nonce": os.urandom(16)}):
        with pytest.raises(SpecError, match="copied from another job"):
            encode_spec(msgspec.structs.replace(victim, **changes))
    lock = msgspec.structs.replace(secrets_of(victim).lock, proof=b"")
    with pytest.raises(SpecError, match="copied from another job"):
        encode_spec(msgspec.structs.replace(victim, secrets=msgspec.structs.replace(secrets_of(victim), lock=lock)))


def test_secrets_are_never_in_a_system_checkpoint() -> None:
    rules = Checkpointing(mode="system", every="auto")
    with pytest.raises(SpecError, match="a system checkpoint would save the secrets"):
        encode_spec(sealed_spec(checkpointing=rules, image="train"))


async def test_key_of_a_data_set_opens_with_the_secrets_of_its_job(tmp_path: Path) -> None:
    """No guest has it, so a system checkpoint may be. Each job of an array has a lock of its own."""
    need, key, witnesses = (
        DataNeed("ada/pictures", b"d" * 32),
        StateCipher.generate(),
        [Identity.generate() for _ in range(3)],
    )
    bare = make_spec(
        witnesses=voters(*(one.node_id for one in witnesses)),
        data=(need, DataNeed("offered")),
        checkpointing=Checkpointing(mode="system", every="auto"),
        image="train",
    )
    nodes: Any = SimpleNamespace(named=list)
    handlers = SecretHandlers(SecretVault(tmp_path, Identity.generate()), nodes)
    specs = await handlers.sealed([bare, bare], SubmitOrder(argv=["true"]), {need.manifest: key})
    for spec in specs:
        assert decode_spec(encode_spec(spec)) == spec and key.key not in encode_spec(spec)
        lock, (brings, offered) = secrets_of(spec).lock, spec.data
        shares = [decode_share(one.decrypt(box)) for one, box in zip(witnesses, lock.shares, strict=True)]
        cipher = combine_shares(lock.realm, shares[:2])
        assert cipher is not None and open_key(cipher, brings) == key.key and offered == DataNeed("offered")
        assert combine_shares(lock.realm, shares[:1]) is None
    with pytest.raises(FetchFailed, match="cannot be opened"):
        open_key(cipher, specs[0].data[0])
    with pytest.raises(SpecError, match="neither used nor keys"):
        check_spec(msgspec.structs.replace(spec, data=(need,)))


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("KEY", ("KEY", "KEY")),
        ("KEY=OTHER", ("KEY", "OTHER")),
        ("KEY:/run/secrets/a.json", ("KEY", "/run/secrets/a.json")),
    ],
)
def test_use_is_a_variable_or_a_file(text: str, use: tuple[str, str]) -> None:
    assert parse_use(text) == use


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "1KEY",
            "1KEY=OTHER",
            "../KEY=OTHER",
            "K" * 65,
            "K\n",
            "KEY=",
            "KEY=a b",
            "KEY=MESH_JOB_ID",
            "KEY=LD_PRELOAD",
            "PATH",
            "KEY=/run/secrets/a",
        ),
        *("KEY:x", "KEY:/etc/passwd", "KEY:/run/secrets/../x", "KEY:/run/secrets/.variables", "KEY:/run/secrets/a/b"),
    ],
)
def test_other_uses_are_refused(text: str) -> None:
    with pytest.raises(SecretError):
        parse_use(text)


def test_secrets_are_bounded() -> None:
    many = [(f"K{number}", f"K{number}") for number in range(MOST_SECRETS + 1)]
    check_uses(many[:-1])
    check_uses([])
    for wrong in (many, [("A", "X"), ("B", "X")]):
        with pytest.raises(SecretError):
            check_uses(wrong)
    spec = bare_spec()
    assert seal_secrets(spec, CIPHER, USES[:1], [bytes(MOST_BYTES)], [])
    with pytest.raises(SecretError, match="32 KiB"):
        seal_secrets(spec, CIPHER, USES, [bytes(MOST_BYTES), b"x"], [])
    nodes = [Identity.generate().node_id for _ in range(MOST_READERS + 1)]
    with pytest.raises(SecretError, match="at most 64 nodes"):
        seal_secrets(spec, CIPHER, USES, VALUES, nodes)
    assert seal_secrets(spec, CIPHER, USES, VALUES, nodes[1:])
    whole = sealed_spec()
    readers = tuple((node, b"") for node in nodes)
    for changes in ({"box": bytes(41 * 1024)}, {"readers": readers}, {"readers": ((b"short", b""),)}, {"uses": ()}):
        with pytest.raises(SpecError):
            encode_spec(
                msgspec.structs.replace(whole, secrets=msgspec.structs.replace(secrets_of(whole), **changes))  # type: ignore[arg-type]
            )


# --- who gets the key


class SecretCampus(Campus):
    """The job has secrets, whose key is that of its data otherwise."""

    rules = KeyRules(lambda caller, user_key: False, runs, may_give_secrets_share, may_read_secrets)
    kind = SECRETS_KEY

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.seal()

    def seal(self, readers: str = "") -> None:
        sealed = seal_secrets(self.spec, self.cipher, USES, VALUES, self.nodes(readers))
        self.spec = msgspec.structs.replace(self.spec, lock=None, secrets=sealed)


@pytest.fixture
async def campus(tmp_path: Path) -> AsyncIterator[SecretCampus]:
    made = SecretCampus(tmp_path)
    await made.start()
    yield made
    for journal in made.journals:
        await journal.close()


async def test_runner_gets_the_key_and_forgets_it(campus: SecretCampus) -> None:
    campus.gone = {"A"}
    assert await campus.key("D") == campus.cipher.key
    campus.gone = {"A", "B"}
    assert await campus.key("D") == campus.cipher.key, "in memory while the job runs"
    campus.rings["D"].forget(campus.spec)
    with pytest.raises(NoKey, match="it is gone"):
        await campus.key("D")


async def test_key_of_secrets_is_on_no_disk(campus: SecretCampus) -> None:
    assert await campus.key("D") == campus.cipher.key
    for path in campus.root.iterdir():
        assert campus.cipher.key not in path.read_bytes(), path
    await campus.boot("D")
    campus.gone = {"A", "B"}
    with pytest.raises(NoKey):
        await campus.key("D")


async def test_keys_of_what_jobs_save_are_left_alone(campus: SecretCampus) -> None:
    """They are in the same journal, and none of them opens secrets."""
    await campus.rings["D"]._journal.save_key(CIPHER.realm, CIPHER.key, True)
    await campus.boot("D")
    await campus.rings["D"].tidy(frozenset)
    assert CIPHER.realm in await campus.rings["D"]._journal.keys() and campus.rings["D"].known(CIPHER.realm) is None


@pytest.mark.parametrize("who", ["A", "B", "E"])
async def test_neither_the_user_nor_a_witness_nor_another_member_gets_it(campus: SecretCampus, who: str) -> None:
    with pytest.raises(NoKey, match="not for you"):
        await campus.key(who)
    assert await campus.rings["C"].held_for(JOB, campus.credentials(who)) is None


async def test_other_node_of_the_user_gets_no_secret(campus: SecretCampus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(USERS, "E", "ada")
    assert await campus.rings["C"].held_for(JOB, campus.credentials("E")) is None


async def test_former_runner_gets_nothing(campus: SecretCampus) -> None:
    for name in "ABC":
        campus.witness(name, "ABC", holder="E")
    with pytest.raises(NoKey, match="not for you"):
        await campus.key("D")
    assert await campus.key("E") == campus.cipher.key


async def test_runner_that_the_user_has_not_named_gets_no_share(campus: SecretCampus) -> None:
    campus.seal(readers="EF")
    for name in "ABC":
        campus.witness(name, "ABC", holder="D")
    with pytest.raises(NoKey, match="not for you"):
        await campus.key("D")
    for name in "ABC":
        campus.witness(name, "ABC", holder="E")
    assert await campus.key("E") == campus.cipher.key


async def test_later_witnesses_get_shares_from_the_runner_only(campus: SecretCampus) -> None:
    await campus.key("D")
    for name in "DEF":
        campus.witness(name, "DEF", holder="D", number=1)
    runner: Any = Runs(campus.spec, Config(1, 1, voters(*campus.nodes("DEF"))))
    campus.rings["D"].share_with_new_witnesses(JOB, runner)
    await campus.rings["D"]._sharing[JOB]
    share = campus.rings["E"]._shares[JOB][0]
    assert not await campus.rings["F"].store_share(JOB, campus.credentials("A"), share), "the user does not run it"
    campus.gone = {*"ABC"}
    campus.rings["D"].forget(campus.spec)
    for name in "EF":
        await campus.boot(name)
        campus.witness(name, "DEF", holder="E", number=1)
    assert await campus.key("E") == campus.cipher.key, "shares are on disk"
    assert await campus.rings["F"]._journal.shares() == {}, "apart from those of the other key"


NODE, SEALED = bytes(32), bytes(MOST_SEALED)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"box": bytes(MOST_BOX_BYTES + 1)}, "have at most 32 KiB together"),
        ({"uses": (("1KEY", "KEY"),)}, "a secret is named"),
        ({"readers": tuple((number.to_bytes(32), b"") for number in range(MOST_READERS + 1))}, "different nodes"),
        ({"readers": ((NODE, b""), (NODE, b""))}, "different nodes"),
        ({"readers": ((NODE[1:], b""),)}, "not a node with a sealed key"),
        ({"readers": ((NODE, SEALED + b"x"),)}, "not a node with a sealed key"),
    ],
)
def test_sealed_secrets_of_others_are_bounded(changes: dict[str, Any], words: str) -> None:
    spec = sealed_spec()
    with pytest.raises(SpecError, match=words):
        check_spec(msgspec.structs.replace(spec, secrets=msgspec.structs.replace(secrets_of(spec), **changes)))
    most = {"box": bytes(MOST_BOX_BYTES), "readers": ((NODE, SEALED),)}
    check_spec(msgspec.structs.replace(spec, secrets=msgspec.structs.replace(secrets_of(spec), **most)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"realm": b""}, "a share for each witness"),
        ({"shares": (SEALED,) * 2}, "a share for each witness"),
        ({"shares": (SEALED, SEALED, SEALED + b"x")}, "a share of a job's key is too long"),
        ({"proof": SEALED + b"x"}, "a share of a job's key is too long"),
    ],
)
@pytest.mark.parametrize("of", ["secrets", "state"])
def test_lock_has_a_bounded_share_for_each_witness(changes: dict[str, Any], words: str, of: str) -> None:
    spec = sealed_spec()
    lock = msgspec.structs.replace(secrets_of(spec).lock, **changes)
    bad = {"lock": lock} if of == "state" else {"secrets": msgspec.structs.replace(secrets_of(spec), lock=lock)}
    with pytest.raises(SpecError, match=words):
        check_spec(msgspec.structs.replace(spec, **bad))
    check_lock(msgspec.structs.replace(lock, realm=NODE[:REALM_BYTES], shares=(SEALED,) * 3, proof=SEALED), 3)
