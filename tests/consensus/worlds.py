"""Specs, views and a small witness group that answers, for tests of job cores."""

from random import Random

from mesh.consensus.effects import Effect, Send, WitnessRecord
from mesh.consensus.leader import Leader
from mesh.consensus.messages import Accept, Accepted, AnyMessage, Introduce, Introduced, Prepare, Refused, Start
from mesh.consensus.runner import Runner
from mesh.consensus.view import Instant, View
from mesh.consensus.witness import Witness
from mesh.model.record import Config, JobRecord, Voter
from mesh.model.spec import Checkpointing, JobSpec
from placement.advert import Advert

A, B, C, D, E = (bytes([number]) * 32 for number in range(1, 6))
JOB = b"j" * 16
DISK = b"a disk's"
SPEC_BYTES = b"the sealed spec"


def voters(*nodes: bytes) -> tuple[Voter, ...]:
    return tuple(Voter(node, DISK) for node in nodes)


def key_of(user: str) -> bytes:
    """Return the key of a user of these tests."""
    return user.encode().ljust(32, b"\0")


def make_spec(**changes: object) -> JobSpec:
    fields: dict[str, object] = {
        "submitter": A,
        "chain": b"",
        "user": "ada",
        "created_unix_ms": 1_000,
        "nonce": b"n" * 16,
        "argv": ("python", "train.py"),
        "witnesses": voters(A, B, C),
        "checkpointing": Checkpointing(),
        "lease_s": 15.0,
    }
    fields |= changes
    return JobSpec(**{"user_key": key_of(str(fields["user"])), **fields})  # type: ignore[arg-type]


def at(now: float) -> Instant:
    return Instant(now, int(now * 1000))


def make_advert(node: bytes, **changes: object) -> Advert:
    fields: dict[str, object] = {
        "version": 1,
        "node": node,
        "nick": f"node-{node[0]}",
        "user": "owner",
        "zone": "",
        "weight": 8,
        "up_since_unix": 0,
        "lending": True,
        "paused": False,
        "gpus": (),
        "free_portions": (),
        "guards": False,
        "gpu_sharing": True,
        "slots": 1,
        "slots_free": 1,
        "cpus": 8,
        "memory_mib": 16_384,
        "engines": ("process",),
        "own_only": (),
        "images": (),
        "accepts": ("*",),
        "store_free_mib": 10_240,
    }
    fields |= changes
    return Advert(**{"user_key": key_of(str(fields["user"])), **fields})  # type: ignore[arg-type]


def make_view(me: bytes, alive: tuple[bytes, ...], **changes: object) -> View:
    fields: dict[str, object] = {
        "me": me,
        "alive": frozenset(alive),
        "adverts": tuple(make_advert(node) for node in alive),
        "disks": dict.fromkeys((A, B, C, D, E), DISK),
    }
    return View(**{**fields, **changes})  # type: ignore[arg-type]


def make_witness(members: tuple[bytes, ...] = (A, B, C), spec: JobSpec | None = None) -> Witness:
    witness_record = WitnessRecord(
        job=JOB,
        disk=DISK,
        spec=SPEC_BYTES,
        config=Config(number=0, term=0, members=voters(*members)),
        promised=0,
        accepted_term=0,
        record=JobRecord(),
        holder=None,
        cancel_wanted=False,
    )
    return Witness(witness_record, spec or make_spec(witnesses=voters(*members)))


def make_start(term: int = 1, record: JobRecord | None = None, members: tuple[bytes, ...] = (A, B, C)) -> Start:
    config = Config(number=0, term=0, members=voters(*members))
    return Start(job=JOB, term=term, config=config, record=record or JobRecord(), spec=SPEC_BYTES)


class RunnerWorld:
    """A runner on node D with three real witnesses. The `silent` ones get no messages."""

    def __init__(self, spec: JobSpec | None = None, start: Start | None = None) -> None:
        self.spec = spec or make_spec()
        start = start or make_start()
        nodes = start.config.nodes
        self.witnesses = {node: make_witness(nodes, self.spec) for node in nodes}
        for witness in self.witnesses.values():  # the leader has won the term from all of them
            witness.handle(A, Prepare(job=JOB, term=start.term), 0.0)
        self.silent: set[bytes] = set()
        self.unable: dict[bytes, str] = {}  # nodes that cannot read the job's spec, with the reason
        self.now = 0.0
        self.runner = Runner(D, "node-d", start, self.spec, at(0.0))
        self.seen: list[Effect] = []

    def begin(self) -> list[Effect]:
        return self.settle(self.runner.begin(at(self.now)))

    def observe(self, view: View) -> list[Effect]:
        return self.settle(self.runner.observe(view, at(self.now)))

    def tell(self, event: object) -> list[Effect]:
        return self.settle(self.runner.handle(event, at(self.now)))  # type: ignore[arg-type]

    def timer(self, name: str) -> list[Effect]:
        """Advance the clock to the latest timer of this name and fire it."""
        from mesh.consensus.effects import SetTimer
        from mesh.consensus.view import Timer

        latest = [effect for effect in self.seen if isinstance(effect, SetTimer) and effect.name == name][-1]
        self.now = max(self.now, latest.at)
        return self.settle(self.runner.on_timer(Timer(latest.name, latest.token), at(self.now)))

    def settle(self, effects: list[Effect]) -> list[Effect]:
        """Deliver messages until none is left and return the other effects in order."""
        others: list[Effect] = []
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            self.seen.append(effect)
            if not isinstance(effect, Send):
                others.append(effect)
                continue
            witness = self.witnesses.get(effect.to)
            if isinstance(effect.message, Introduce) and witness is not None and effect.to not in self.silent:
                introduced = Introduced(JOB, witness.witness_record.disk, self.unable.get(effect.to, ""))
                queue += self.runner.on_introduced(effect.to, introduced, at(self.now))
                continue
            if witness is None or effect.to in self.silent or not isinstance(effect.message, Accept | Prepare):
                continue
            for answer in witness.handle(D, effect.message, self.now):
                if isinstance(answer, Send):
                    queue += self._hear(effect.to, answer.message)
        return others

    def _hear(self, sender: bytes, message: AnyMessage) -> list[Effect]:
        if isinstance(message, Accepted):
            return self.runner.on_accepted(sender, message, at(self.now))
        if isinstance(message, Refused):
            return self.runner.on_refused(sender, message, at(self.now))
        return []


def make_leader(me: bytes = A, witness: Witness | None = None) -> Leader:
    witness = witness or make_witness()
    return Leader(witness, witness.spec, Random(1))
