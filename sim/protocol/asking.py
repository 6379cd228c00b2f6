"""Questions to a job's witnesses, whose answers a simulated node believes by the production rules.

Any node knows the description of any job here; production asks others for it, and its submitter has signed it.
"""

from collections.abc import Callable, Sequence
from functools import partial

from membership.identity import NodeId
from mesh.checkpoints.witness_group import Present, Records, Words, follow_groups, is_outdated, last_words, nodes_to_ask
from mesh.consensus.effects import WitnessRecord
from mesh.jobs.authority import Authority
from mesh.model.record import Config
from mesh.model.spec import JobSpec
from sim.protocol.checkpoints import StoringNode
from sim.protocol.status_board import StatusBoard


class AskingNode(StoringNode):
    """A node that asks witnesses, and answers as one. `lies`: what a malicious one says of its jobs."""

    authority: Authority
    board: StatusBoard
    lies: dict[bytes, WitnessRecord]

    def described(self, job: bytes) -> JobSpec:
        raise NotImplementedError

    def witness_record(self, job: bytes) -> WitnessRecord | None:
        witness = self.participant.witnesses.get(job)
        return self.lies.get(job, witness.witness_record) if witness is not None else None

    def words(self, job: bytes, then: Callable[[Words], None]) -> None:
        """Ask a job's witnesses as `Vouching.words` does; `then` gets what they say."""
        own, spec = self.participant.witnesses.get(job), self.described(job)
        known = [spec.first_group]
        known += [own.witness_record.config] if own is not None else []
        heard: dict[NodeId, WitnessRecord] = {}

        def found(present: Present | None) -> None:
            if present is not None and not is_outdated(present):
                then(Words(present[1]))
            elif present is None and known:
                self._follow(job, known.pop(0), heard, found)
            else:
                named = (node for view in self.board.table.views_of(job) for node in view.witnesses)
                self._records(job, nodes_to_ask(present, named, heard), partial(asked, present))

        def asked(present: Present | None, answers: Records) -> None:
            heard.update(answers)
            witnesses = self.authority.witnesses_by(heard.values(), spec)
            proven = {node: record for node, record in heard.items() if node in witnesses.nodes}
            then(last_words(present, proven, len(spec.witnesses), witnesses.agreed))

        found(None)

    def _follow(
        self,
        job: bytes,
        known: Config,
        heard: dict[NodeId, WitnessRecord],
        found: Callable[[Present | None], None],
    ) -> None:
        walk = follow_groups(known, self.authority.recovered_group, heard)

        def answered(records: Records) -> None:
            try:
                config = walk.send(records)
            except StopIteration as end:
                found(end.value)
            else:
                self._records(job, config.nodes, answered)

        self._records(job, next(walk).nodes, answered)

    def _records(self, job: bytes, nodes: Sequence[NodeId], then: Callable[[Records], None]) -> None:
        """Ask these nodes; `then` gets what those have answered that could be reached."""
        records: dict[NodeId, WitnessRecord] = {}
        waiting = set(nodes)

        def called(node: NodeId, other: StoringNode | None) -> None:
            record = other.witness_record(job) if isinstance(other, AskingNode) else None
            if record is not None:
                records[node] = record
            waiting.discard(node)
            if not waiting:
                then(records)

        for node in nodes:
            if node == self.id:
                self.after(0.0, called, node, self)
            else:
                self.call(node, called)
        if not nodes:
            then(records)
