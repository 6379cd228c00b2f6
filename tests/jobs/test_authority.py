"""Authority, asked by the wrong nodes: each question with real keys and certificates, and an answer for each that may not."""

import time

import msgspec
import pytest

from ckptstore.cipher import StateCipher
from ckptstore.manifest import Manifest
from membership.envelope import MeshSealer, seal
from membership.identity import Identity
from membership.trust import PROVIDER, ROLES, USER, TrustStore, admit_node, found_mesh
from mesh.checkpoints.key_shares import seal_shares
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.forced_reconfiguration import ForcedReconfiguration, encode_reconfiguration
from mesh.consensus.messages import Accept, Enlist, Start
from mesh.data.manifest import DataManifest, Group, Reader
from mesh.jobs.authority import (
    REMEMBERED,
    Authority,
    is_user,
    is_writer,
    may_enter,
    may_give_share,
    may_keep_workdir,
    may_order_image,
    may_read_data,
    may_report,
    may_start,
    runs,
)
from mesh.model.record import FIRST_TERM, Attempt, Commit, Config, JobRecord, Voter
from mesh.model.secrets import SealedSecrets
from mesh.model.spec import DataNeed, JobSpec, SpecError, encode_spec, job_id
from tests.consensus.worlds import DISK, make_spec, make_witness

NOW = time.time()


class Town:
    """A mesh of six nodes: ada's two, bob's two (one may only submit), eve's, which may only lend, and one that was revoked."""

    def __init__(self) -> None:
        self.ids = {name: Identity.generate() for name in ("ada", "ada2", "bob", "guest", "lender", "gone")}
        genesis, root_chain = found_mesh(self.ids["ada"], "town", "ada", "ada", NOW - 1000)
        self.trust = TrustStore(genesis)
        self.trust.admit_chain(root_chain, NOW)
        self.chains = {"ada": root_chain}
        sealer = MeshSealer(self.ids["ada"], self.trust.mesh_id)
        for name, user, roles in (
            ("ada2", "ada", ROLES),
            ("bob", "bob", ROLES),
            ("guest", "bob", (USER,)),
            ("lender", "eve", (PROVIDER,)),
            ("gone", "ada", ROLES),
        ):
            node = self.ids[name].node_id
            binding = self.trust.bind(user, node, NOW - 900, existing=name in {"ada2", "guest", "gone"})
            chain = admit_node(sealer, self.trust, root_chain, node, name, binding, roles, False, NOW - 900)
            self.chains[name] = chain
            self.trust.admit_chain(chain, NOW)
        self.trust.revoked.add(self.ids["gone"].node_id)
        self.silent: set[bytes] = set()  # nodes without an advert
        self.authority = Authority(self.sealer("ada"), self.trust, lambda node: node not in self.silent)

    def sealer(self, name: str) -> MeshSealer:
        return MeshSealer(self.ids[name], self.trust.mesh_id)

    def node(self, name: str) -> bytes:
        return self.ids[name].node_id

    def voters(self, *names: str) -> tuple[Voter, ...]:
        return tuple(Voter(self.node(name), DISK) for name in names)

    def credentials(self, name: str):
        found = self.trust.credentials(self.node(name), NOW)
        assert found is not None
        return found

    def user(self, name: str) -> str:
        return self.trust.check_chain(self.chains[name], NOW).user if name != "gone" else "ada"

    def key(self, user: str) -> bytes:
        """Return the key of a user: that of their first node."""
        return self.node({"ada": "ada", "bob": "bob", "eve": "lender"}[user])

    def spec(self, name: str, **changes: object) -> JobSpec:
        fields: dict[str, object] = {
            "submitter": self.node(name),
            "chain": self.chains[name],
            "user": self.user(name),
            "user_key": self.key(self.user(name)),
            "created_unix_ms": int(NOW * 1000),
            "witnesses": tuple(Voter(self.node(one), DISK) for one in ("ada", "bob", "lender")),
        }
        return make_spec(**{**fields, **changes})

    def sealed(self, signer: str, spec: JobSpec, kind: str = "job") -> tuple[bytes, bytes]:
        payload = encode_spec(spec)
        return job_id(payload), seal(self.ids[signer], self.trust.mesh_id, kind, payload)


@pytest.fixture(scope="module")
def town() -> Town:
    return Town()


@pytest.fixture(autouse=True)
def everybody_advertises(town: Town) -> None:
    town.silent = set()


# --- descriptions of jobs


def test_lock_of_another_job_is_refused(town: Town) -> None:
    """The witnesses would open their shares for the user of the job that they are asked about."""
    cipher, nodes = StateCipher.generate(), [town.node(name) for name in ("ada", "bob", "lender")]
    bare = town.spec("ada")
    theirs = msgspec.structs.replace(bare, lock=seal_shares(cipher, nodes, bare.author))
    assert town.authority.open_spec(*town.sealed("ada", theirs)) == theirs
    assert theirs.lock is not None
    unproven = msgspec.structs.replace(theirs.lock, proof=b"")
    for name, lock in (("bob", theirs.lock), ("bob", unproven), ("ada2", theirs.lock), ("ada", unproven)):
        copied = town.sealed(name, town.spec(name, lock=lock))
        with pytest.raises(SpecError, match="its key is its own"):
            town.authority.open_spec(*copied)
        if name == "bob":  # by the word of its witnesses, as if its certificate had ended
            with pytest.raises(SpecError, match="its key is its own"):
                town.authority.read_ended_spec(*copied)


def test_description_of_a_member_is_taken(town: Town) -> None:
    for name in ("ada", "ada2", "bob", "guest"):
        job, sealed = town.sealed(name, town.spec(name))
        assert town.authority.open_spec(job, sealed).user == town.credentials(name).user


def test_description_is_signed_by_its_submitter(town: Town) -> None:
    job, sealed = town.sealed("bob", town.spec("ada"))
    for read in (town.authority.open_spec, town.authority.read_spec):
        with pytest.raises(SpecError, match="not the one its submitter signed"):
            read(job, sealed)


def test_description_has_the_hash_that_is_its_job(town: Town) -> None:
    _, sealed = town.sealed("ada", town.spec("ada"))
    other, _ = town.sealed("ada", town.spec("ada", argv=("other",)))
    for read in (town.authority.open_spec, town.authority.read_spec):
        with pytest.raises(SpecError, match="not the one its submitter signed"):
            read(other, sealed)


def test_description_is_signed_as_a_description_and_for_this_mesh(town: Town) -> None:
    spec = town.spec("ada")
    job, sealed = town.sealed("ada", spec, "manifest")
    foreign = seal(town.ids["ada"], b"m" * 16, "job", encode_spec(spec))
    for data in (sealed, foreign, b"", sealed[:-1]):
        with pytest.raises(SpecError, match="not signed by a node of this mesh"):
            town.authority.open_spec(job, data)


def test_description_carries_the_certificate_of_its_own_node(town: Town) -> None:
    spec = town.spec("bob", chain=town.chains["ada2"], user="ada", user_key=town.key("ada"))
    with pytest.raises(SpecError, match="certificate of another user"):
        town.authority.open_spec(*town.sealed("bob", spec))


def test_description_names_the_user_of_its_certificate(town: Town) -> None:
    with pytest.raises(SpecError, match="certificate of another user"):
        town.authority.open_spec(*town.sealed("bob", town.spec("bob", user="ada")))


def test_node_without_the_role_submits_nothing(town: Town) -> None:
    with pytest.raises(SpecError, match="lender may lend, but not submit"):
        town.authority.open_spec(*town.sealed("lender", town.spec("lender")))


def test_revoked_node_submits_nothing(town: Town) -> None:
    with pytest.raises(SpecError, match="not a member"):
        town.authority.open_spec(*town.sealed("gone", town.spec("gone")))


def test_description_from_the_future_is_refused(town: Town) -> None:
    spec = town.spec("ada", created_unix_ms=int((time.time() + 600) * 1000))
    with pytest.raises(SpecError, match="in the future"):
        town.authority.open_spec(*town.sealed("ada", spec))


# --- orders


DAY_S = 86_400


class OldTown:
    """A mesh of 200 days: ada's machines are members, bob's certificate has ended."""

    def __init__(self, wanted: str = "carl") -> None:
        self.ids = {name: Identity.generate() for name in ("ada", "bob", "bob2", "carl")}
        genesis, root_chain = found_mesh(self.ids["ada"], "town", "ada", "ada", NOW - 200 * DAY_S)
        self.trust = TrustStore(genesis)
        self.trust.admit_chain(root_chain, NOW)
        self.chains = {"ada": root_chain}
        self.admit("bob", "bob", NOW - 150 * DAY_S)
        self.admit("bob2", "bob", NOW - 10 * DAY_S, existing=True)
        self.admit("carl", "carl", NOW - 10 * DAY_S)
        self.authority = Authority(self.sealer(wanted), self.trust)

    def sealer(self, name: str) -> MeshSealer:
        return MeshSealer(self.ids[name], self.trust.mesh_id)

    def admit(self, name: str, user: str, when: float, existing: bool = False, roles: tuple[str, ...] = ROLES) -> None:
        node, sealer = self.ids[name].node_id, self.sealer("ada")
        binding = self.trust.bind(user, node, when, existing=existing)
        self.chains[name] = admit_node(sealer, self.trust, self.chains["ada"], node, name, binding, roles, False, when)
        self.trust.admit_chain(self.chains[name], when + 1)

    def sealed(self, days_ago: float) -> tuple[bytes, bytes]:
        """Return a job of bob's first machine, created that many days ago, as they say."""
        bob = self.ids["bob"].node_id
        created = int((NOW - days_ago * DAY_S) * 1000)
        spec = make_spec(submitter=bob, user="bob", user_key=bob, chain=self.chains["bob"], created_unix_ms=created)
        payload = encode_spec(spec)
        return job_id(payload), seal(self.ids["bob"], self.trust.mesh_id, "job", payload)


RECORDS = [make_witness().witness_record] * 2


def test_job_outlives_the_certificate_of_its_submitter_by_the_word_of_its_witnesses() -> None:
    town = OldTown()
    job = town.sealed(days_ago=149)
    with pytest.raises(SpecError, match="not a member"):
        town.authority.open_spec(*job)
    assert town.authority.take_word(job[0], RECORDS)
    assert town.authority.open_spec(*job).user == "bob"
    other = town.sealed(days_ago=148)
    with pytest.raises(SpecError, match="not a member"):
        town.authority.open_spec(*other)


def test_one_witness_alone_vouches_for_no_ended_certificate() -> None:
    town = OldTown()
    job = town.sealed(days_ago=149)
    assert not town.authority.take_word(job[0], RECORDS[:1])
    with pytest.raises(SpecError, match="not a member"):
        town.authority.open_spec(*job)


@pytest.mark.parametrize("days_ago", [151, 30])
def test_ended_certificate_signs_nothing_outside_its_time(days_ago: float) -> None:
    town = OldTown()
    job = town.sealed(days_ago)
    assert town.authority.take_word(job[0], RECORDS)
    with pytest.raises(SpecError, match="not valid when the job was created"):
        town.authority.open_spec(*job)


def test_revoked_submitter_is_refused_whatever_the_witnesses_say() -> None:
    town = OldTown()
    job = town.sealed(days_ago=149)
    assert town.authority.take_word(job[0], RECORDS)
    town.trust.revoked.add(town.ids["bob"].node_id)
    with pytest.raises(SpecError, match="revoked"):
        town.authority.open_spec(*job)


def test_machine_of_the_user_takes_no_word_for_their_ended_certificate() -> None:
    """There, the job could do what its user can."""
    town = OldTown(wanted="bob2")
    job = town.sealed(days_ago=149)
    assert town.authority.take_word(job[0], RECORDS)
    with pytest.raises(SpecError, match="a machine of its user"):
        town.authority.open_spec(*job)


def test_name_that_belongs_to_another_user_now_is_refused() -> None:
    town = OldTown()
    job = town.sealed(days_ago=149)
    forgetful = TrustStore(town.trust.genesis_bytes)  # it has never met the first bob
    forgetful.admit_chain(town.chains["ada"], NOW)
    town.trust = forgetful
    town.admit("carl", "bob", NOW - 10 * DAY_S)
    town.authority = Authority(town.sealer("carl"), forgetful)
    assert town.authority.take_word(job[0], RECORDS)
    with pytest.raises(SpecError, match="belongs to another user"):
        town.authority.open_spec(*job)


def test_jobs_taken_on_by_the_word_of_witnesses_are_bounded() -> None:
    town = OldTown()
    for number in range(REMEMBERED + 10):
        town.authority.take_word(b"%016d" % number, RECORDS)
    assert len(town.authority._accepted_before) == REMEMBERED


def test_only_the_user_of_a_job_cancels_it(town: Town) -> None:
    other = Authority(town.sealer("lender"), town.trust)
    spec = town.spec("ada2")
    assert other.may_cancel(town.node("ada"), "ada", spec) and other.may_cancel(town.node("ada2"), "ada", spec)
    for name, user in (("bob", "ada"), ("bob", "bob"), ("guest", "ada"), ("gone", "ada"), ("ada", "bob")):
        assert not other.may_cancel(town.node(name), user, spec), name
    assert not other.may_cancel(Identity.generate().node_id, "ada", spec), "a stranger"


def recovery(town: Town, signer: str, job: bytes, term: int, config: Config, kind: str = "recovery") -> Accept:
    word = encode_reconfiguration(ForcedReconfiguration(job, term, config))
    sealed = seal(town.ids[signer], town.trust.mesh_id, kind, word)
    return Accept(job, term, 1, config, JobRecord(), None, reconfiguration=sealed)


def test_only_the_user_of_a_job_recovers_it(town: Town) -> None:
    spec = town.spec("ada2")
    job, config = job_id(encode_spec(spec)), Config(9, 9, spec.witnesses[:1])

    def allowed(asked: Accept, spec: JobSpec) -> bool:
        stated = town.authority.read_recovery(asked.reconfiguration or b"", asked.job, spec)
        return stated == ForcedReconfiguration(asked.job, asked.term, asked.config)

    good = recovery(town, "ada", job, 9, config)
    assert allowed(good, spec)
    for name in ("bob", "guest", "lender", "gone"):
        assert not allowed(recovery(town, name, job, 9, config), spec), name
    assert not allowed(recovery(town, "ada", job, 9, config, "job"), spec), "signed for another purpose"
    for changes in ({"term": 10}, {"job": b"k" * 16}, {"config": Config(9, 9, spec.witnesses)}):
        assert not allowed(msgspec.structs.replace(good, **changes), spec), changes
    assert not allowed(msgspec.structs.replace(good, reconfiguration=b"ada says so"), spec)
    eves = town.spec("lender")
    assert not allowed(recovery(town, "lender", job, 9, config), eves), "of her own job, but she may only lend"


def test_record_names_a_recovered_group_by_the_users_word_only(town: Town) -> None:
    job, sealed = town.sealed("ada2", spec := town.spec("ada2"))
    config = Config(9, 9, spec.witnesses[:1])

    def named(signer: str, **changes: object) -> Config | None:
        word = recovery(town, signer, job, 9, config).reconfiguration or b""
        fields = {"job": job, "spec": sealed, "reconfiguration": word, **changes}
        return town.authority.recovered_group(known(town, spec, **fields))

    assert named("ada") == config
    for name in ("bob", "guest", "lender", "gone"):
        assert named(name) is None, name
    other, other_sealed = town.sealed("ada2", town.spec("ada2", argv=("other",)))
    assert named("ada", job=other, spec=other_sealed) is None, "another job's"
    assert named("ada", spec=b"x") is None and named("ada", reconfiguration=b"") is None


# --- leases


def known(town: Town, described: JobSpec, **changes: object) -> WitnessRecord:
    fields: dict[str, object] = {
        "job": job_id(encode_spec(described)),
        "disk": DISK,
        "spec": b"",
        "config": Config(0, 0, described.witnesses),
        "promised": 5,
        "accepted_term": 4,
        "record": JobRecord(),
        "holder": None,
        "cancel_wanted": False,
    }
    return WitnessRecord(**{**fields, **changes})  # type: ignore[arg-type]


def lease(town: Town, spec: JobSpec, runner: str, *givers: str, **changes: object) -> Accept:
    job = job_id(encode_spec(spec))
    group = Config(0, 0, spec.witnesses)
    warrants = tuple(
        Authority(town.sealer(giver), town.trust).warrant(job, 5, town.node(runner), group) for giver in givers
    )
    accept = Accept(job, 5, 1, Config(0, 0, spec.witnesses), JobRecord(1), town.node(runner), warrants=warrants)
    return msgspec.structs.replace(accept, **changes)


def test_lease_needs_the_word_of_a_witness(town: Town) -> None:
    spec = town.spec("ada")
    at = known(town, spec)

    def may(sender: str, message: Accept) -> bool:
        return town.authority.may_propose(town.node(sender), message, at, spec, False)

    assert may("ada2", lease(town, spec, "ada2", "bob"))
    assert may("ada2", lease(town, spec, "ada2", "ada2", "guest", "lender")), "one witness among them is enough"
    assert not may("ada2", lease(town, spec, "ada2")), "without any"
    assert not may("ada2", lease(town, spec, "ada2", "ada2")), "its own, which is no witness"
    assert not may("ada2", lease(town, spec, "ada2", "guest")), "of a node that is no witness"
    assert not may("ada2", lease(town, spec, "bob", "bob", holder=town.node("ada2"))), "for another node"
    assert not may("ada2", lease(town, spec, "ada2", "bob", term=6)), "of another term"
    other = town.spec("ada", argv=("other",))
    theirs = lease(town, other, "ada2", "bob", job=job_id(encode_spec(spec)))
    assert not may("ada2", theirs), "for another job"
    forged = seal(town.ids["bob"], town.trust.mesh_id, "job", b"")
    assert not may("ada2", lease(town, spec, "ada2", warrants=(forged, b"", b"x" * 200)))
    assert not may("bob", lease(town, spec, "bob")), "a witness takes no lease without a leader's word either"


def test_records_prove_the_witnesses_that_warrants_lead_to(town: Town) -> None:
    spec = town.spec("ada", witnesses=town.voters("ada", "bob"))
    job = job_id(encode_spec(spec))

    def by(name: str, config: Config) -> bytes:
        return Authority(town.sealer(name), town.trust).warrant(job, 5, town.node(name), config)

    def record(*groups: tuple[Config, tuple[bytes, ...]]) -> WitnessRecord:
        """Return a record with these groups, the present one last."""
        (config, warrants), earlier = groups[-1], tuple(reversed(groups[:-1]))
        return msgspec.structs.replace(
            make_witness().witness_record, job=job, config=config, warrants=warrants, earlier=earlier
        )

    def proven(*groups: tuple[Config, tuple[bytes, ...]], other: WitnessRecord | None = None) -> set[str]:
        """Return those whom a record with these groups proves, or another one with it."""
        found = town.authority.witnesses_by([record(*groups), *([other] if other else [])], spec).nodes
        return {name for name in town.ids if town.node(name) in found}

    first = {"ada", "bob"}
    joint = Config(1, 5, town.voters("bob", "guest"), spec.witnesses)
    last = Config(2, 6, town.voters("guest", "lender"))
    assert proven((Config(0, 0, spec.witnesses), ())) == first
    assert proven((last, (by("lender", last), by("guest", last)))) == first, "nobody of the first group names it"
    assert proven((joint, (by("bob", joint),)), (last, (by("guest", last),))) == {*first, "guest", "lender"}
    assert proven((joint, (by("bob", last),)), (last, (by("guest", last),))) == first, "the warrant names another group"
    late = proven((last, (by("guest", last),)), other=record((joint, (by("bob", joint),))))
    assert late == {*first, "guest", "lender"}, "it joined late, and another record has the change before"


def test_group_is_agreed_on_by_most_of_the_one_before(town: Town) -> None:
    """Regression: what a job's last witness says counted for nothing, whoever had agreed to it, so jobs after it never began."""
    job, sealed = town.sealed("ada", spec := town.spec("ada", witnesses=town.voters("ada", "bob", "guest")))
    first = spec.witnesses

    def record(*groups: tuple[Config, tuple[str, ...]]) -> WitnessRecord:
        """Return a record with these groups and those who accepted them, the present one last."""
        signed = [
            (
                group,
                tuple(
                    Authority(town.sealer(name), town.trust).warrant(job, 5, town.node(name), group) for name in names
                ),
            )
            for group, names in groups
        ]
        (config, warrants), earlier = signed[-1], tuple(reversed(signed[:-1]))
        return known(town, spec, job=job, spec=sealed, config=config, warrants=warrants, earlier=earlier)

    def agreed(*groups: tuple[Config, tuple[str, ...]]) -> set[tuple[Voter, ...]]:
        return town.authority.witnesses_by([record(*groups)], spec).agreed

    alone, pair = town.voters("ada"), town.voters("ada", "lender")
    joint = Config(1, 5, alone, first)
    last = (Config(1, 6, alone), ("ada",))
    assert agreed((joint, ("ada", "guest")), last) == {first, alone}
    assert agreed((joint, ("ada",)), last) == {first}, "it has made the group up"
    assert agreed((joint, ("ada", "lender", "gone")), last) == {first}, "others do not vote on it"
    named = Config(5, 7, alone, town.voters("ada", "bob"))
    two = Config(4, 6, town.voters("ada", "bob"), first)
    assert alone not in agreed((two, ("ada", "bob")), (named, ("ada",))), "half of a group is no majority"
    assert agreed(last) == {first}
    made_up = Config(1, 5, pair, town.voters("ada", "gone"))
    assert agreed((made_up, ("ada", "gone")), last) == {first}, "the group before was never agreed on"
    back = Config(3, 7, pair, alone)
    assert agreed((joint, ("ada", "bob")), last, (back, ("ada",)), (Config(3, 8, pair), ())) == {first, alone, pair}
    halves = [record((joint, (name,))) for name in ("ada", "bob")]
    assert town.authority.witnesses_by(halves, spec).agreed == {first, alone}, "witnesses hold different warrants"
    named = msgspec.structs.replace(
        record(last), reconfiguration=recovery(town, "ada2", job, 9, Config(9, 9, pair)).reconfiguration or b""
    )
    assert town.authority.witnesses_by([named], spec).agreed == {first, pair}, "their user has named it"


def test_user_recovers_a_job_from_the_records_of_its_witnesses(town: Town) -> None:
    """Regression: whichever member answered with the highest term had its record taken."""
    job, sealed = town.sealed("ada", spec := town.spec("ada", witnesses=town.voters("ada", "bob")))
    true = known(town, spec, job=job, spec=sealed)
    false = msgspec.structs.replace(true, accepted_term=99, promised=99)
    ada, bob, guest = (town.node(name) for name in ("ada", "bob", "guest"))
    believed = town.authority.records_of_witnesses
    assert believed(job, {guest: false, bob: true}) == {bob: true}
    assert believed(job, {guest: false}) == {guest: false}, "a record is better than none"
    _, other_sealed = town.sealed("ada", town.spec("ada", argv=("other",)))
    for unread in (b"", other_sealed):
        wrong = msgspec.structs.replace(true, spec=unread)
        assert believed(job, {ada: wrong, bob: true}) == {bob: true}
        assert believed(job, {ada: wrong}) == {}


def test_warrant_names_one_group(town: Town) -> None:
    spec = town.spec("ada")
    job, group = job_id(encode_spec(spec)), Config(0, 0, spec.witnesses)
    warrant = Authority(town.sealer("bob"), town.trust).warrant(job, 5, town.node("lender"), group)
    assert town.authority.warrants_group(warrant, job, group) == town.node("bob")
    others = [Config(0, 0, group.members[:2]), Config(1, 0, group.members), Config(0, 0, group.members, group.members)]
    assert [town.authority.warrants_group(warrant, job, other) for other in others] == [None] * 3
    assert town.authority.warrants_group(warrant, b"k" * 16, group) is None
    assert town.authority.warrants_group(b"x" * 200, job, group) is None


def test_lease_needs_the_role_provider_and_an_advert(town: Town) -> None:
    spec = town.spec("ada")
    at = known(town, spec)
    assert not town.authority.may_propose(town.node("guest"), lease(town, spec, "guest", "bob"), at, spec, False)
    assert not town.authority.may_propose(town.node("gone"), lease(town, spec, "gone", "bob"), at, spec, False)
    ours = lease(town, spec, "ada2", "bob")
    town.silent = {town.node("ada2")}
    assert not town.authority.may_propose(town.node("ada2"), ours, at, spec, False), "no advert"
    held = known(town, spec, holder=town.node("ada2"))
    assert town.authority.may_propose(town.node("ada2"), ours, held, spec, False), "a node that withdraws it finishes"


def test_lease_is_for_nodes_that_the_jobs_user_lets_run_it(town: Town) -> None:
    """A witness that lends could otherwise give itself any job."""
    lender, ada2 = town.node("lender"), town.node("ada2")
    bare = town.spec("ada")
    witnesses = [voter.node for voter in bare.witnesses]
    secrets = SealedSecrets(seal_shares(StateCipher.generate(), witnesses, bare.author), b"", (("KEY", "KEY"),))
    sealed = msgspec.structs.replace(secrets, readers=((ada2, b""),))
    for spec in (
        town.spec("ada", on=(ada2,)),
        town.spec("ada", not_on=(lender,)),
        town.spec("ada", secrets=sealed),
        town.spec("ada", on=(ada2, lender), secrets=sealed),
    ):
        at = known(town, spec)
        assert not town.authority.may_propose(lender, lease(town, spec, "lender", "lender"), at, spec, False)
        assert town.authority.may_propose(lender, lease(town, spec, "lender", holder=None), at, spec, False)
        assert town.authority.may_propose(ada2, lease(town, spec, "ada2", "lender"), at, spec, False)
    for spec in (bare, town.spec("ada", on=(lender,)), town.spec("ada", secrets=secrets)):
        message = lease(town, spec, "lender", "lender")
        assert town.authority.may_propose(lender, message, known(town, spec), spec, False)


def test_holder_renews_and_releases_only_its_own_term(town: Town) -> None:
    spec = town.spec("ada")
    held = known(town, spec, holder=town.node("ada2"))
    for holder in (town.node("ada2"), None):
        message = lease(town, spec, "ada2", holder=holder)
        assert town.authority.may_propose(town.node("ada2"), message, held, spec, False)
        assert not town.authority.may_propose(town.node("guest"), message, held, spec, False)
        later = msgspec.structs.replace(message, term=6)
        assert not town.authority.may_propose(town.node("ada2"), later, held, spec, False)


def test_only_witnesses_propose_without_a_lease(town: Town) -> None:
    spec = town.spec("ada")
    at, waits = known(town, spec), lease(town, spec, "ada2", holder=None)
    for name, may in (("ada", True), ("bob", True), ("lender", True), ("ada2", False), ("guest", False)):
        assert town.authority.may_propose(town.node(name), waits, at, spec, False) is may, name
    given = msgspec.structs.replace(lease(town, spec, "guest", "bob"), holder=None)
    assert town.authority.may_propose(town.node("guest"), given, at, spec, False), "it has the term, and lends nothing"


def test_submission_is_an_empty_record_in_the_first_term(town: Town) -> None:
    spec = town.spec("ada")
    at, guest = known(town, spec), town.node("guest")
    blank = Accept(at.job, FIRST_TERM, 1, at.config, JobRecord(), None)

    def may(sender: bytes = guest, config: Config = at.config, **changes: object) -> bool:
        message = msgspec.structs.replace(blank, **changes)
        return town.authority.may_propose(sender, message, known(town, spec, config=config), spec, False)

    assert may(), "it may come again"
    assert not may(term=FIRST_TERM + 1)
    assert not may(holder=guest), "it takes no lease"
    assert not may(config=Config(1, 2, at.config.members)), "the group has changed since"
    assert not may(town.node("ada"), term=FIRST_TERM - 1), "no witness has such a term either"


def test_group_is_changed_by_no_other_member(town: Town) -> None:
    spec = town.spec("ada")
    at = known(town, spec)
    thief = town.node("guest")
    mine = Config(1, 6, (Voter(thief, DISK),))
    for term in (0, 6):
        for holder in (None, thief):
            for record in (JobRecord(), JobRecord(1)):
                message = Accept(
                    at.job, term, 1, mine, record, holder, warrants=lease(town, spec, "guest", "guest").warrants
                )
                assert not town.authority.may_propose(thief, message, at, spec, False)
    first = Config(0, 0, (Voter(thief, DISK),))
    blank = Accept(at.job, 1, 1, first, JobRecord(), None)
    assert not town.authority.may_propose(thief, blank, at, spec, True), "the first group is the description's"
    anyone = msgspec.structs.replace(blank, config=at.config)
    assert town.authority.may_propose(thief, anyone, at, spec, True), "anybody may bring a submission"
    full = msgspec.structs.replace(anyone, record=JobRecord(1, commit=Commit(1, 1, b"", None, (), None, 0)))
    assert not town.authority.may_propose(thief, full, at, spec, True)
    late = msgspec.structs.replace(at.config, term=2**52)
    ahead = msgspec.structs.replace(blank, config=late)
    new = msgspec.structs.replace(at, config=late)  # a new witness takes the group that the message names
    assert not town.authority.may_propose(thief, ahead, new, spec, True), "it would refuse the group of the submission"
    assert town.authority.may_propose(town.node("ada"), ahead, at, spec, True), "a witness proposes it under its term"
    beside = msgspec.structs.replace(full, config=msgspec.structs.replace(at.config, previous=mine.members))
    assert not town.authority.may_propose(thief, beside, msgspec.structs.replace(at, config=beside.config), spec, True)


def start(town: Town, spec: JobSpec, config: Config, term: int = 6) -> Start:
    return Start(job_id(encode_spec(spec)), term, config, JobRecord(), b"")


def test_only_the_leader_starts_a_job(town: Town) -> None:
    spec = town.spec("ada")
    first, later = Config(0, 0, spec.witnesses), Config(3, 5, (*spec.witnesses[:2], Voter(town.node("ada2"), DISK)))
    for name, may in (("bob", True), ("ada2", False), ("guest", False)):
        assert may_start(town.node(name), start(town, spec, first), spec, None, ()) is may, name
    mine = Config(0, 0, (Voter(town.node("guest"), DISK),))
    assert not may_start(town.node("guest"), start(town, spec, mine), spec, None, ()), "a group of its own"
    promised = [known(town, spec, config=later, promised=term) for term in (6, 6, 5)]
    for name, may in (("bob", True), ("ada2", True), ("lender", False), ("guest", False)):
        assert may_start(town.node(name), start(town, spec, later), spec, later, promised) is may, name
    for term in (5, 7):
        assert not may_start(town.node("bob"), start(town, spec, later, term), spec, later, promised), (
            "a term it has not won"
        )


def test_only_the_runner_enlists_a_gang(town: Town) -> None:
    spec = town.spec("ada")
    config = Config(0, 0, spec.witnesses)
    enlist = Enlist(job_id(encode_spec(spec)), 6, 0, b"")
    held = [known(town, spec, promised=6, holder=town.node(name)) for name in ("ada2", "ada2", "bob")]
    assert may_start(town.node("ada2"), enlist, spec, config, held)
    assert not may_start(town.node("bob"), enlist, spec, config, held), "of one witness only"
    assert not may_start(town.node("ada2"), msgspec.structs.replace(enlist, term=5), spec, config, held)
    assert not may_start(town.node("bob"), enlist, spec, None, ()), "no leader enlists"


def checkpoint(**changes: object) -> Manifest:
    whole = Manifest(2, b"j" * 16, 0, 4, 1, None, "checkpoint", 0, b"", (), 0, 0, b"", user="ada")
    return msgspec.structs.replace(whole, **changes)


def test_manifest_is_signed_by_a_holder_of_its_term(town: Town) -> None:
    spec, bob, ada2 = town.spec("ada"), town.node("bob"), town.node("ada2")
    record = JobRecord(1, Commit(1, 3, b"c" * 32, None, (), None, 0), (Attempt(0, bob, "bob", 4, 0),))
    held = known(town, spec, promised=5, holder=ada2, record=record)
    assert is_writer(bob, checkpoint(term=4), b"i" * 32, held) and is_writer(ada2, checkpoint(term=5), b"i" * 32, held)
    for signer, term in (
        (bob, 5),
        (bob, 3),
        (ada2, 4),
        (ada2, 1 << 40),
        (town.node("guest"), 4),
        (town.node("guest"), 5),
    ):
        assert not is_writer(signer, checkpoint(term=term), b"i" * 32, held)
    assert is_writer(town.node("guest"), checkpoint(term=3), b"c" * 32, held), "what the witnesses have committed"


def test_workdir_belongs_to_its_signer(town: Town) -> None:
    workdir = checkpoint(kind="workdir", job=bytes(16), term=0, seq=0)
    assert may_keep_workdir(workdir, town.credentials("ada2")) and not may_keep_workdir(
        workdir, town.credentials("bob")
    )
    assert not may_keep_workdir(workdir, None), "of a node that is no member"
    assert not may_keep_workdir(msgspec.structs.replace(workdir, user="eve"), town.credentials("lender"))
    for changes in ({"job": b"j" * 16}, {"term": 1}, {"config": 1}, {"seq": 1}):
        assert not may_keep_workdir(msgspec.structs.replace(workdir, **changes), town.credentials("ada2"))


# --- what a job has


def test_only_the_user_of_a_job_reads_enters_and_orders(town: Town) -> None:
    ada, bob, guest, lender = (town.credentials(name) for name in ("ada2", "bob", "guest", "lender"))
    adas, bobs, eves = (town.key(user) for user in ("ada", "bob", "eve"))
    assert is_user(ada, adas) and not is_user(bob, adas) and is_user(guest, bobs)
    assert may_enter(ada, adas) and not may_enter(bob, adas) and not may_enter(lender, eves), "eve may only lend"
    assert may_order_image(ada, town.credentials("ada"), ()) and not may_order_image(bob, ada, ("eve",))
    assert may_order_image(bob, ada, ("bob",)) and may_order_image(bob, ada, ("*",))


def test_data_set_is_for_its_readers_and_runners_of_their_jobs(town: Town) -> None:
    ada, bob, lender = (town.credentials(name) for name in ("ada2", "bob", "lender"))
    named, other = b"d" * 32, b"e" * 32
    private = DataManifest(1, "pictures", "ada", town.key("ada"), b"", 1, 0)
    shared = msgspec.structs.replace(private, readers=(Reader(town.key("bob"), "bob"),))
    assert may_read_data(ada, (private,), named) and not may_read_data(bob, (private,), named)
    assert may_read_data(bob, (shared,), named) and not may_read_data(lender, (shared,), named)
    assert may_read_data(lender, (msgspec.structs.replace(private, everybody=True),), named)
    adas, bobs = (town.spec(name, data=(DataNeed(f"{name}/x", named),)) for name in ("ada", "bob"))
    assert may_read_data(lender, (private,), named, adas), "it runs a job that the owner gave the data set"
    assert not may_read_data(lender, (private,), other, adas), "that job names another data set"
    assert not may_read_data(lender, (private,), named, bobs), "a job of somebody who may not read it gives nothing"
    assert may_read_data(lender, (shared,), named, bobs)
    vision = Group(town.key("eve"), "eve", "vision")
    grouped = msgspec.structs.replace(private, groups=(vision,))
    assert not may_read_data(bob, (grouped,), named) and not may_read_data(lender, (grouped,), named, bobs)
    for caller, running in ((bob, None), (lender, bobs)):
        assert may_read_data(caller, (grouped, grouped), named, running, {vision: {town.key("bob")}}.__getitem__)
        assert not may_read_data(caller, (grouped,), named, running, {vision: {town.key("ada")}}.__getitem__)
        assert not may_read_data(caller, (grouped, private), named, running, {vision: {town.key("bob")}}.__getitem__)
    assert not may_read_data(bob, (shared, private), named), "bob is no reader of the newest version"
    assert not may_read_data(lender, (shared, private), named, bobs) and may_read_data(ada, (shared, private), named)


def test_only_the_holder_and_its_gang_run_a_job(town: Town) -> None:
    attempt = Attempt(0, town.node("bob"), "bob", 5, 0, gang=((town.node("lender"), "lender"),))
    record = JobRecord(1, attempts=(attempt,))
    holder = town.node("bob")
    assert runs(holder, holder, record) and runs(town.node("lender"), holder, record)
    assert not runs(town.node("guest"), holder, record)
    assert not runs(town.node("lender"), None, record), "nobody has the lease"
    ended = JobRecord(1, attempts=(msgspec.structs.replace(attempt, reason="vacated"),))
    assert not runs(town.node("lender"), holder, ended)


def test_events_come_from_those_that_take_part(town: Town) -> None:
    spec = town.spec("ada", witnesses=(Voter(town.node("ada"), DISK),))
    ended = Attempt(0, town.node("bob"), "bob", 4, 0, reason="vacated", gang=((town.node("guest"), "guest"),))
    for names, record in (
        ({"ada", "ada2"}, known(town, spec)),
        ({"ada", "ada2", "lender"}, known(town, spec, holder=town.node("lender"))),
        ({"ada", "ada2", "bob", "guest"}, known(town, spec, record=JobRecord(1, attempts=(ended,)))),
    ):
        everybody = ("ada", "ada2", "bob", "guest", "lender")
        assert {name for name in everybody if may_report(town.credentials(name), record, spec)} == names


def test_shares_come_from_the_holder(town: Town) -> None:
    spec = town.spec("ada")
    held = known(town, spec, holder=town.node("bob"))
    for name, share in (("bob", True), ("ada2", True), ("guest", False), ("lender", False)):
        assert may_give_share(town.credentials(name), held, spec) is share, name
