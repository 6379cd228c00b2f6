"""The network edge: time from the kill switch to a guest's last packet, and the owner's flow during a checkpoint.

The owner's flow shares a link with a checkpoint that has a deadline. The machine, its guest and its neighbour are network
namespaces; packets, sockets, queues and programs are the kernel's own.
"""

import asyncio
import bisect
import contextlib
import json
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptstore.bandwidth import SEEN
from mesh.checkpoints.replicator import Replicator
from mesh.daemon.edge_shaping import keep
from mesh.network import bpf
from mesh.network.edge import Edge
from mesh.network.elf import read_object
from mesh.network.program import compile_source
from mesh.network.switch import GUESTS
from mesh.rpc.pacing import Wire
from mesh.util.boottime import boot_s
from tests.bench.harness import not_run, row
from tests.bench.wire import checkpoint
from tests.ckptstore.worlds import open_store
from tests.network.wires import NEIGHBOUR, UP, Wires, inside
from tests.rpc.nodes import Keeper, client_of, leaving, node_named
from tests.tiers import bpf_problem

FLOW = Path(__file__).parent / "flow.py"
FLIPS, FLOOD_MBPS = 1000, 1000.0
CUT_MS = 1.0
FLOWING, FLOWING_S = 100, (0.003, 0.006)  # packets seen before a flip, and the time of flooding
QUIET_S = 0.005  # without a packet, the flow counts as stopped
TRIALS, LINK_MBPS = 8, 200.0
OWN_SHARE, COPY_SHARE, WINDOW_S = 0.60, 0.24, 5.0  # shares of the link; the second over the whole window
DEGRADED = 3.0  # per cent
SETTLE_S, ALONE_S = 0.5, 2.0
PEER = node_named("p").node_id


class Witness:
    """A packet counter on an interface of the namespace in which it is created."""

    def __init__(self, directory: Path, interface: str) -> None:
        made = directory / "witness.o"
        compile_source(Path(__file__).parent / "witness.c", made)
        found = read_object(made.read_bytes())
        self.map = bpf.Map.make(bpf.ARRAY, "witness", 3)
        code = found.programs["tc/witness"].with_maps({"seen": self.map.fd})
        pins = directory / "pins"
        pins.mkdir()
        bpf.mount(pins)
        try:
            bpf.pin(bpf.load_program("witness", code, found.terms), pins / "witness")
            _tc("qdisc", "add", "dev", interface, "clsact")
            _tc("filter", "add", "dev", interface, "ingress", "bpf", "object-pinned", str(pins / "witness"), "da")
        finally:
            bpf.unmount(pins)

    @property
    def count(self) -> int:
        return self.map.get(2) or 0

    def last_ns(self) -> int:
        """Return the time of the last packet, once no more arrive."""
        value: int = struct.unpack("=Q", struct.pack("=II", self.map.get(0), self.map.get(1)))[0]
        return value


def cut(trials: int | None = None) -> Sequence[dict[str, Any]]:
    """Flip the kill switch again and again while a guest floods the machine's neighbour."""
    measure = "map flip -> last guest packet seen at the neighbour (netns, 1,000 flips at 1 Gbit/s)"
    goal = f"p99 < {CUT_MS:g} ms"
    if bpf_problem():
        return [not_run(measure, "ms", goal, bpf_problem())]
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as directory, Wires(1) as wires, contextlib.ExitStack() as stack:
        with inside(wires.neighbour):
            witness = Witness(Path(directory), "eth0")
            sink = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            sink.bind((NEIGHBOUR, 0))  # never read; excess packets are dropped behind the counter
            port = sink.getsockname()[1]
        with inside(wires.machine):
            edge = Edge(Path(directory) / "run" / "node")
            stack.callback(edge.close)
            edge.open()
            edge.attach("g0")
            stack.enter_context(_flow(wires.guests[0], "flood", NEIGHBOUR, str(port), str(FLOOD_MBPS)))
            flips = [_flip(edge, witness, rng) for _ in range(trials or FLIPS)]
    taken = sorted(milliseconds for milliseconds, _ in flips)
    p99, rate_mbps = taken[int(0.99 * len(taken))], statistics.median(mbps for _, mbps in flips)
    found = row(f"{measure}, p99", taken, "ms", goal=goal, met=p99 < CUT_MS if rate_mbps > 0.9 * FLOOD_MBPS else None)
    details = {"median": round(statistics.median(taken), 4), "mbps_before_a_flip": round(rate_mbps)}
    return [{**found, "value": round(p99, 4), **details}]


def _flip(edge: Edge, witness: Witness, rng: random.Random) -> tuple[float, float]:
    """Return milliseconds to the last packet (0 if none came after the call began), and the Mbit/s before it."""
    edge.restore(GUESTS)
    start = witness.count
    while witness.count == start:
        pass
    since, first = time.monotonic(), witness.count
    until = since + rng.uniform(*FLOWING_S)
    while time.monotonic() < until or witness.count < first + FLOWING:
        pass
    rate_mbps = (witness.count - first) * 1400 * 8 / (time.monotonic() - since) / 1e6
    begun = time.monotonic_ns()
    edge.cut(GUESTS)
    seen, still = witness.count, time.monotonic()
    while time.monotonic() < still + QUIET_S:
        if witness.count != seen:
            seen, still = witness.count, time.monotonic()
    return max(0, witness.last_ns() - begun) / 1e6, rate_mbps


def background(trials: int | None = None) -> Sequence[dict[str, Any]]:
    """Measure the owner's own moderate flow beside a checkpoint that is sent at full speed, with and without the edge.

    The peer was slow before, so the checkpoint is not expected to meet its deadline.
    """
    measure = "background flow while a migration fills the link (HTB, namespaces): loss of rate"
    goal, in_time = (
        f"< {DEGRADED:g} %, the migration meeting its deadline",
        "migrations that meet their deadline beside it",
    )
    if bpf_problem():
        return [not_run(measure, "%", goal, bpf_problem()), not_run(in_time, "of 1", "1", bpf_problem())]
    lost: dict[bool, list[float]] = {}
    met: dict[bool, list[bool]] = {}
    for shaped in (False, True):
        lost[shaped], met[shaped] = asyncio.run(_beside(shaped, trials or TRIALS))
        print(f"shaped {shaped}: lost {[round(v, 2) for v in lost[shaped]]} %, in time {met[shaped]}", flush=True)
    good = statistics.median(lost[True]) < DEGRADED
    peer = "without the edge"
    return [
        row(measure, lost[True], "%", goal=goal, met=good and all(met[True]), peer=peer, peer_values=lost[False]),
        row(in_time, [statistics.mean(met[True])], "of 1", goal="1", met=all(met[True]), peer=peer)
        | {"n": trials or TRIALS, "peer_value": statistics.mean(met[False])},
    ]


async def _beside(shaped: bool, trials: int) -> tuple[list[float], list[bool]]:
    with tempfile.TemporaryDirectory() as text, Wires(0, LINK_MBPS) as wires, contextlib.ExitStack() as stack:
        directory = Path(text)
        store = open_store(directory / "ours")
        stack.callback(store.close)
        stack.enter_context(inside(wires.machine))  # before any thread: threads stay in the namespace of their start
        taking = stack.enter_context(_flow(wires.neighbour, "take", NEIGHBOUR, talks=True))
        assert taking.stdout is not None
        port = (await asyncio.to_thread(taking.stdout.readline)).strip()
        stack.enter_context(_flow(wires.machine, "stream", NEIGHBOUR, port, str(OWN_SHARE * LINK_MBPS)))
        with inside(wires.neighbour):
            keeper = Keeper(directory / "keeper", identity=node_named("p"))
            there = await keeper.serve(NEIGHBOUR)
        wire = Wire()
        edge = Edge(directory / "run" / "node", shaped, UP if shaped else "", LINK_MBPS)
        stack.callback(edge.close)
        edge.open()
        assert not edge.state().problem, edge.state().problem
        peers = await client_of({PEER: there}, wire)
        replicator = Replicator(peers, store)
        keeping = asyncio.create_task(keep(edge, wire, replicator.departures, print))
        alone, beside, met = [], [], []
        for number in range(trials):
            saved = checkpoint(store, directory / "in", number, int(COPY_SHARE * LINK_MBPS / 8 * 1e6 * WINDOW_S))
            for _ in range(SEEN):
                replicator.bandwidth.record(PEER, 10**7, 10.0)
            await asyncio.sleep(SETTLE_S)
            begun = time.monotonic()
            await asyncio.sleep(ALONE_S)
            alone.append((begun, time.monotonic()))
            begun, deadline = time.monotonic(), boot_s() + WINDOW_S
            copies = await replicator.replicate(saved.id, [PEER], [], 1, loss=leaving(WINDOW_S))
            met.append(copies.holders == (PEER,) and boot_s() <= deadline)
            beside.append((begun, time.monotonic()))
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await peers.close()
        await keeper.close()
        assert taking.stdin is not None
        taking.stdin.close()
        seen = json.loads(await asyncio.to_thread(taking.stdout.read))
        return [
            100 * (1 - _bps(seen, during) / _bps(seen, before)) for before, during in zip(alone, beside, strict=True)
        ], met


def _bps(seen: list[tuple[float, int]], between: tuple[float, float]) -> float:
    first, last = (max(0, bisect.bisect([at for at, _ in seen], moment) - 1) for moment in between)
    return (seen[last][1] - seen[first][1]) / (seen[last][0] - seen[first][0])


@contextlib.contextmanager
def _flow(namespace: str, *words: str, talks: bool = False) -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE if talks else subprocess.DEVNULL
    with inside(namespace):
        process = subprocess.Popen([sys.executable, str(FLOW), *words], stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _tc(*words: str) -> None:
    subprocess.run(["tc", *words], check=True)
