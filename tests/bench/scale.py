"""`mesh ps` and the memory of a daemon that knows 500 nodes and 10,000 jobs.

One real daemon; one more member runs in this process and tells it, by real gossip over TCP, the sealed statements and records
that 499 nodes with 20 jobs each would publish. Nobody answers for them, so some are suspected while the figures are taken.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from membership.addresses import parse_seed  # noqa: E402
from membership.config import SwimConfig  # noqa: E402
from membership.envelope import MeshSealer  # noqa: E402
from membership.identity import Identity  # noqa: E402
from membership.node import MembershipNode  # noqa: E402
from membership.records import TRUST, encode_body  # noqa: E402
from membership.trust import TrustStore  # noqa: E402
from membership.wire import Alive, encode  # noqa: E402
from mesh.consensus.status import JobStatus, encode_status  # noqa: E402
from mesh.daemon.stack import Stack, StackNode  # noqa: E402
from mesh.model.record import Attempt, Config, Outcome, Voter  # noqa: E402
from mesh.model.spec import format_job  # noqa: E402
from placement.advert import encode_advert  # noqa: E402
from tests.bench.harness import command, interleave, resident_mib, row, write  # noqa: E402
from tests.chains import admitted  # noqa: E402
from tests.consensus.worlds import make_advert  # noqa: E402

TTL_S = 3600
GOAL_MS, GOAL_MIB = 200.0, 120.0
RUNNING_SHARE = 10  # one in so many jobs runs, the others have ended
EPOCH = 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    write("scale", asyncio.run(measure(options.nodes, options.jobs, options.rounds)))


async def measure(nodes: int, jobs: int, rounds: int) -> list[dict[str, Any]]:
    with Stack(1) as stack, tempfile.TemporaryDirectory(prefix="mesh-bench-") as directory:
        await asyncio.to_thread(stack.start_all)
        daemon = stack.nodes[0]
        assert daemon.process is not None
        before = resident_mib(daemon.process.pid)
        fleet = Fleet(daemon, nodes - 1)
        teller = await Teller.started(fleet, Path(directory), daemon.client.get("/v1/status")["address"])
        try:
            begun = time.monotonic()
            teller.tell(fleet, jobs)
            while (known := await asyncio.to_thread(records_taken, daemon)) < teller.told:
                print(f"the daemon knows {known:,} of {teller.told:,} records", file=sys.stderr)
                teller.exchange()
                await asyncio.sleep(0.2)
            told_s = time.monotonic() - begun
            after = resident_mib(daemon.process.pid)
            commands = {words: mesh(daemon, *words.split()) for words in ("ps", "ps -a", "nodes", "--version")}
            taken = await asyncio.to_thread(interleave, commands, rounds)
            assert await asyncio.to_thread(counts, daemon) == (nodes, jobs)
        finally:
            await teller.node.stop()
    what = f"{nodes} nodes, {jobs:,} jobs known"
    ms = {words: [1000 * seconds for seconds in each] for words, each in taken.items()}
    soon = statistics.median(ms["ps"]) <= GOAL_MS
    return [
        row(f"mesh ps, {what}, a tenth unfinished", ms["ps"], "ms", goal=f"<= {GOAL_MS:g}", met=soon),
        row(f"mesh ps -a, {what}", ms["ps -a"], "ms", goal="none: told beside", met=None),
        row(f"mesh nodes, {what}", ms["nodes"], "ms", goal="none: told beside", met=None),
        row("mesh --version", ms["--version"], "ms", goal="none: told beside", met=None),
        row(f"memory of the daemon, {what}", [after], "MiB", goal=f"<= {GOAL_MIB:g}", met=after <= GOAL_MIB),
        row("memory of a daemon alone", [before], "MiB", goal="none: told beside", met=None),
        row(f"until the daemon knows {what}", [told_s], "s", goal="none: told beside", met=None),
    ]


def records_taken(node: StackNode) -> int:
    """Return how many records of others a daemon has taken in."""
    metrics = b"".join(node.client.stream("/metrics")).decode()
    found = [line for line in metrics.splitlines() if line.startswith('mesh_gossip_total{event="records_in"}')]
    return int(float(found[0].split()[-1])) if found else 0


def counts(node: StackNode) -> tuple[int, int]:
    """Return how many nodes and jobs a daemon knows."""
    known = len(node.client.get("/v1/nodes", timeout_s=60)["nodes"])
    return known - 1, len(node.client.get("/v1/jobs?over=true", timeout_s=60)["jobs"])  # without the teller


def mesh(node: StackNode, *words: str) -> Callable[[], None]:
    return command([sys.executable, "-m", "mesh.cli", *words], {"MESH_STATE": str(node.where.root)})


class Fleet:
    """Members of a daemon's mesh that exist as keys and certificates only."""

    def __init__(self, founder: StackNode, count: int) -> None:
        self.now = time.time()
        root = Identity.load(founder.where.key)
        self.genesis, chain = founder.where.genesis.read_bytes(), founder.where.chain.read_bytes()
        trust = TrustStore(self.genesis)
        self.mesh_id, user = trust.mesh_id, trust.admit_chain(chain, self.now).binding
        self.identities = [Identity.generate() for _ in range(count + 1)]
        self.chains = [
            admitted(root, self.genesis, chain, one.node_id, f"lab{number:03d}", user, self.now)
            for number, one in enumerate(self.identities)
        ]

    def evidence(self) -> Iterator[bytes]:
        for number, one in enumerate(self.identities[:-1]):
            alive = Alive(one.node_id, EPOCH, 0, "127.0.0.1", 20_000 + number, False, EPOCH)
            yield MeshSealer(one, self.mesh_id).seal("member", encode(alive))

    def records(self, jobs: int) -> Iterator[bytes]:
        """Yield what each node publishes: its certificates, its advert, and its share of the jobs."""
        for number, (one, chain) in enumerate(zip(self.identities[:-1], self.chains, strict=False)):
            sealer, until = MeshSealer(one, self.mesh_id), int(self.now) + TTL_S
            bodies = {TRUST: chain, "advert": encode_advert(make_advert(one.node_id, nick=f"lab{number:03d}"))}
            for place in range(number, jobs, len(self.identities) - 1):
                status = self._job(place, number)
                bodies[f"jobs/{format_job(status.job)}"] = encode_status(status)
            for section, body in bodies.items():
                yield sealer.seal("record", encode_body(EPOCH, 1, section, until, body))

    def _job(self, place: int, number: int) -> JobStatus:
        nodes = [self.identities[(number + step) % (len(self.identities) - 1)].node_id for step in range(3)]
        draw = Random(place)
        began = int(self.now * 1000) - draw.randrange(3_600_000, 80_000_000)
        runs = place % RUNNING_SHARE == 0
        ended = None if runs else began + 1_800_000
        outcome = None if ended is None else Outcome("done", "done", 0, None, (), ended)
        attempt = Attempt(
            number=0, node=nodes[0], nick=f"lab{number:03d}", term=1, started_unix_ms=began, seen_unix_ms=began,
            running_unix_ms=began, reason="" if runs else "done", ended_unix_ms=ended or 0,
        )  # fmt: skip
        return JobStatus(
            job=draw.randbytes(16), name=f"train-{place}", user="student", submitter=nodes[0], command="python train.py",
            created_unix_ms=began, state="running" if runs else "done", detail="", rank=(int(not runs), 1, 5, 2),
            config=Config(number=0, term=1, members=tuple(Voter(node, node[:8]) for node in nodes)), gpus=1,
            attempts=(attempt,), outcome=outcome, runner=nodes[0] if runs else None, step=100,
        )  # fmt: skip


class Teller:
    """The last member of the fleet, which runs here and has what all would publish."""

    def __init__(self, node: MembershipNode, daemon: str) -> None:
        self.node, self._daemon = node, parse_seed(daemon, 0)
        self.told = 0

    @classmethod
    async def started(cls, fleet: Fleet, directory: Path, seed: str) -> "Teller":
        node = MembershipNode(
            fleet.identities[-1],
            TrustStore(fleet.genesis),
            fleet.chains[-1],
            SwimConfig.local(),
            directory,
            bind_host="127.0.0.1",
            port=0,
            seeds=[seed],
        )
        await node.start()
        await node.first_contact(30.0)
        return cls(node, seed)

    def tell(self, fleet: Fleet, jobs: int) -> None:
        """Take up what the fleet says."""
        records = list(fleet.records(jobs))
        self.told = len(records)
        for sealed in records:
            self.node._core._apply_record(sealed, rumoured=False)
        for sealed in fleet.evidence():
            self.node._core._apply_evidence(sealed, rumoured=False)

    def exchange(self) -> None:
        """Reconcile with the daemon: the next exchange would be with any node of the fleet, and none answers."""
        self.node._core.want_reconcile(b"", *self._daemon)


if __name__ == "__main__":
    main()
