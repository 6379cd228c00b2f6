"""Acceptance: a job is judged by the clock of the node that takes it on, and by the members that it knows."""

from random import Random
from typing import Any

import msgspec
import pytest

from membership.envelope import MeshSealer, seal
from membership.identity import Identity
from membership.trust import (
    TrustError,
    TrustStore,
    User,
    found_mesh,
    make_invite,
    make_revocation,
    parse_invite,
    renew_chain,
)
from mesh.consensus.messages import Accept, Start
from mesh.consensus.participant import Participant, Rules
from mesh.jobs.authority import Authority
from mesh.model.record import Config, JobRecord
from mesh.model.spec import SpecError, encode_spec, job_id
from tests.chains import admitted
from tests.consensus.worlds import DISK, at, make_spec, make_start, voters

DAY_S = 86_400
NOW = 1_800_000_000.0
OLD = NOW - 200 * DAY_S  # the mesh's founding


class Lab:
    """A mesh with a founder, ada, and a member, bob, and the authority of a third node."""

    def __init__(self) -> None:
        self.now = NOW
        self.founder, self.bob, self.me = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
        self.genesis, self.chain = found_mesh(self.founder, "lab", "desk", "ada", OLD)
        self.trust = TrustStore(self.genesis)
        self.trust.admit_chain(self.chain, NOW)
        self.authority = Authority(MeshSealer(self.me, self.trust.mesh_id), self.trust, clock=lambda: self.now)

    def bobs_chain(self, at: float) -> bytes:
        user = User("bob", self.bob.node_id, int(OLD) + 10)
        return admitted(self.founder, self.genesis, self.chain, self.bob.node_id, "rack", user, at)

    def job(self, chain: bytes, signer: Identity | None = None, **changes: Any) -> tuple[bytes, bytes]:
        """Return the id and the sealed spec of a job of bob."""
        signer = signer or self.bob
        fields = {
            "submitter": signer.node_id,
            "chain": chain,
            "user": "bob",
            "user_key": self.bob.node_id,
            "created_unix_ms": int(self.now * 1000),
            **changes,
        }
        payload = encode_spec(make_spec(**fields))
        return job_id(payload), seal(signer, self.trust.mesh_id, "job", payload)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_member_of_now_submits(lab: Lab) -> None:
    spec = lab.authority.open_spec(*lab.job(lab.bobs_chain(NOW)))
    assert (spec.user, spec.user_key) == ("bob", lab.bob.node_id)


def test_ended_certificate_signs_no_job_whatever_time_it_claims(lab: Lab) -> None:
    """A back-dated job does not make an ended certificate valid again (finding 2)."""
    old = NOW - 91 * DAY_S
    chain = lab.bobs_chain(old)
    for created in (NOW, old + 3600):
        with pytest.raises(SpecError, match="has expired"):
            lab.authority.open_spec(*lab.job(chain, created_unix_ms=int(created * 1000)))
    with pytest.raises(SpecError, match="future"):
        lab.authority.open_spec(*lab.job(lab.bobs_chain(NOW), created_unix_ms=int((NOW + 300) * 1000)))


def test_ended_invite_signs_no_job(lab: Lab) -> None:
    """The key of an invite is in no chain, so it signs no job for anybody, during its life or after it (finding 2)."""
    issuer = lab.trust.check_chain(lab.chain, NOW)
    text = make_invite(lab.founder, lab.trust, issuer, (), 3600, NOW - 10 * DAY_S, user="ghost")
    invite = parse_invite(text, NOW - 10 * DAY_S)
    key, ghost = Identity(invite.seed), Identity.generate()
    (root,) = msgspec.msgpack.decode(lab.chain, type=list[bytes])
    (real,) = msgspec.msgpack.decode(lab.bobs_chain(NOW), type=list[bytes])
    forged = seal(key, lab.trust.mesh_id, "certificate", real[97:])
    for links in ([forged], [root, forged], [invite.grant, forged]):
        chain = msgspec.msgpack.encode(links)
        for signer in (ghost, lab.bob, key):
            with pytest.raises(SpecError):
                lab.authority.open_spec(*lab.job(chain, signer, created_unix_ms=int((NOW - 10 * DAY_S) * 1000)))


def test_job_of_another_user_or_a_revoked_one_is_refused(lab: Lab) -> None:
    chain = lab.bobs_chain(NOW)
    for changes in ({"user": "ada"}, {"user_key": lab.founder.node_id}, {"submitter": lab.founder.node_id}):
        with pytest.raises(SpecError):
            lab.authority.open_spec(*lab.job(chain, **changes))
    stolen = lab.job(chain, lab.founder)
    with pytest.raises(SpecError):
        lab.authority.open_spec(*stolen)
    lab.trust.admit_statement(make_revocation(lab.founder, lab.trust, lab.bob.node_id, "", NOW))
    with pytest.raises(SpecError, match="revoked"):
        lab.authority.open_spec(*lab.job(chain))


def renewed(lab: Lab, sealed_at: float) -> tuple[bytes, bytes]:
    """Submit a job with the certificate of then, and renew bob's certificate until now."""
    first = lab.bobs_chain(sealed_at)
    job, sealed = lab.job(first, created_unix_ms=int(sealed_at * 1000))
    root = MeshSealer(lab.founder, lab.trust.mesh_id)
    at = sealed_at
    lab.trust.admit_chain(first, at)
    while at < NOW - 60 * DAY_S:
        at += 60 * DAY_S
        lab.trust.admit_chain(renew_chain(root, lab.trust, lab.chain, lab.bob.node_id, at), at)
    return job, sealed


def participant(lab: Lab) -> Participant:
    rules = Rules(
        open_spec=lab.authority.open_spec, admit=lambda job, spec, start: None, may_cancel=lambda *asked: True
    )
    return Participant(lab.me.node_id, DISK, "me", rules, Random(1))


def accept(lab: Lab, job: bytes, sealed: bytes) -> Accept:
    return Accept(job=job, term=1, round=1, config=group(lab), record=JobRecord(), holder=None, spec=sealed)


def group(lab: Lab) -> Config:
    return Config(0, 0, voters(lab.bob.node_id, lab.me.node_id))


def test_job_of_100_days_gains_a_witness_and_moves(lab: Lab) -> None:
    """A node that never heard of an old job takes it on: its submitter is a member by a renewed certificate (V6)."""
    job, sealed = renewed(lab, NOW - 100 * DAY_S)
    with pytest.raises(TrustError, match="expired"):
        lab.trust.check_chain(lab.authority.read_spec(job, sealed).chain, NOW)
    witness = participant(lab)
    witness.receive(lab.bob.node_id, accept(lab, job, sealed), at(0))
    assert job in witness.witnesses and witness.refused == 0
    runner = participant(lab)
    runner.receive(lab.bob.node_id, start(lab, job, sealed), at(0))
    assert job in runner.runners


def start(lab: Lab, job: bytes, sealed: bytes) -> Start:
    return msgspec.structs.replace(make_start(), job=job, config=group(lab), spec=sealed)


def test_job_that_a_node_has_taken_on_is_not_judged_again(lab: Lab) -> None:
    """A witness starts a job after its submitter's end; a node that hears of it only then does not take it on."""
    job, sealed = lab.job(lab.bobs_chain(NOW))
    witness, late = participant(lab), participant(lab)
    witness.receive(lab.bob.node_id, accept(lab, job, sealed), at(0))
    lab.now = NOW + 100 * DAY_S
    witness.receive(lab.bob.node_id, start(lab, job, sealed), at(1))
    assert job in witness.runners
    late.receive(lab.bob.node_id, accept(lab, job, sealed), at(1))
    late.receive(lab.bob.node_id, start(lab, job, sealed), at(1))
    assert job not in late.witnesses and job not in late.runners and late.refused == 2
    # Other bytes for the same job are judged, so that no forgery is passed on.
    other = participant(lab)
    lab.now = NOW
    other.receive(lab.bob.node_id, accept(lab, job, sealed), at(0))
    other.receive(lab.bob.node_id, start(lab, job, sealed[:-1]), at(1))
    assert job not in other.runners and other.refused == 1
