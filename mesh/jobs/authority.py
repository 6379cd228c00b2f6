"""Who may do what with a job: judged from signatures and certificates alone."""

import time

from membership.envelope import EnvelopeError, open_envelope
from membership.identity import NodeId
from membership.trust import CLOCK_GRACE_S, NODE_CERTIFICATE_S, USER, TrustError, TrustStore
from mesh.jobs.messages import Accept
from mesh.jobs.recovery import Mandate, decode_mandate
from mesh.jobs.spec import JobSpec, SpecError, decode_spec, job_id


class Authority:
    def __init__(self, me: NodeId, trust: TrustStore) -> None:
        self._me = me
        self._trust = trust

    def open_spec(self, job: bytes, sealed: bytes) -> JobSpec:
        """The job as its submitter signed it, the submitter being a member under the user's name; else SpecError."""
        spec = self.read_spec(job, sealed)
        now, created = time.time(), spec.created_unix_ms / 1000
        if not now - NODE_CERTIFICATE_S < created < now + CLOCK_GRACE_S:
            raise SpecError("the job's description is from another time: is the clock right?")
        try:
            # Its certificate may have ended since: what counts is that it held when the job was submitted.
            standing = self._trust.check_chain(spec.chain, min(now, created))
        except TrustError as error:
            raise SpecError(f"the job's submitter is not a member of this mesh: {error}") from error
        if standing.node_id != spec.submitter or standing.user != spec.user:
            raise SpecError("the job's description carries somebody else's certificate")
        if USER not in standing.roles:
            raise SpecError(f"{standing.nick} may lend, but not submit")
        return spec

    def read_spec(self, job: bytes, sealed: bytes) -> JobSpec:
        """The job, for one that was let in before."""
        try:
            signer, payload = open_envelope(sealed, self._trust.mesh_id, "job")
        except EnvelopeError as error:
            raise SpecError(f"the job's description is not signed by a node of this mesh: {error}") from error
        spec = decode_spec(payload)
        if signer != spec.submitter or job_id(payload) != job:
            raise SpecError("the job's description is not the one its submitter signed")
        return spec

    def may_cancel(self, sender: NodeId, user: str, spec: JobSpec) -> bool:
        """The user who submitted it, from any of his nodes."""
        standing = self._trust.standing(sender, time.time())
        return sender == self._me or (standing is not None and standing.user == user == spec.user)

    def is_mandated(self, message: Accept, spec: JobSpec) -> bool:
        """Signed by the job's user, at whichever of his nodes."""
        try:
            signer, payload = open_envelope(message.mandate or b"", self._trust.mesh_id, "recovery")
        except EnvelopeError:
            return False
        standing = self._trust.standing(signer, time.time())
        is_user = standing is not None and standing.user == spec.user and USER in standing.roles
        return is_user and decode_mandate(payload) == Mandate(message.job, message.term, message.config)
