"""Membership without processes: packets a second through the real core, and meshes in virtual time."""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from random import Random
from typing import Any

import msgspec

from membership.config import SwimConfig
from membership.core import Core
from membership.effects import Effect, SendPacket
from membership.envelope import MeshSealer
from membership.node import SystemClock
from membership.trust import TrustStore
from membership.wire import Alive, Ping, encode
from sim.protocol.fakes import members
from sim.protocol.faults import FaultPlan
from sim.protocol.membership import MembershipWorld
from sim.protocol.membership_checkers import all_checkers
from tests.bench.harness import row

QUIET = FaultPlan(loss=0.01, news_every_s=0.0, until_s=1e9)


def rows(quick: bool) -> list[dict[str, Any]]:
    large, seeds = (100, 3) if quick else (500, 4)
    dst_seeds = 20 if quick else 200
    return [
        packets(3 if quick else 5),
        joins(large, 5),
        heals(60, seeds),
        restarts(large, seeds),
        real_time(200 if quick else 1000),
        weather(dst_seeds),
    ]


def packets(rounds: int, count: int = 4000) -> dict[str, Any]:
    """Measure signed pings from fifty members, each verified, handled and answered with a signed ack, on one core."""
    mesh = members(51)
    trust = TrustStore(mesh.genesis)
    clock = SystemClock()
    for chain in mesh.chains:
        trust.admit_chain(chain, 1_800_000_000.0)
    sent = 0

    def perform(effects: list[Effect]) -> None:
        nonlocal sent
        for effect in effects:
            if isinstance(effect, SendPacket):
                core.seal_packet(effect.to, effect.packet)
                sent += 1

    me, *others = mesh.identities
    config = msgspec.structs.replace(SwimConfig.lan(), source_packets_s=1e9)
    core = Core(
        MeshSealer(me, trust.mesh_id),
        trust,
        mesh.chains[0],
        config,
        Random(1),
        clock,
        perform,
        host="10.0.0.1",
        port=1,
        epoch=1,
    )
    core.start()
    writers = [MeshSealer(other, trust.mesh_id) for other in others]
    for writer in writers:
        word = Alive(writer.node_id, 1, 0, "10.0.0.2", 1, False, 1)
        core.swim.on_evidence(writer.node_id, word, writer.seal("member", encode(word)), clock.boot())
    rates = []
    for number in range(rounds):
        root = core.swim.root()
        data = [writers[n % 50].seal_to(me.node_id, encode(Ping(number * count + n, root, ()))) for n in range(count)]
        before, begun = sent, time.process_time()
        for packet in data:
            core.on_datagram(packet, ("10.0.0.2", 1))
        rates.append(count / (time.process_time() - begun))
        assert sent - before >= count, "all pings answered"
    goal = ">= 10,000 a second a core"
    return row(
        "signed packets accepted (verified, handled, answered)", rates, "1/s", goal=goal, met=min(rates) >= 10_000
    )


def together(count: int, seed: int, spread_s: float = 5.0) -> MembershipWorld:
    """Return a mesh of this many nodes that has converged."""
    world = MembershipWorld(seed, nodes=count, faults=QUIET, checkers=[])
    world.begin(spread_s)
    world.kernel.run(spread_s)
    world.until(world.converged, 120.0, "M8")
    return world


def joins(count: int, times: int) -> dict[str, Any]:
    """Measure the time from a new node's start until it sees all others."""
    world = together(count, 1)
    took = []
    for node in world.nodes[-times:]:
        node.leave()
        world.kernel.run(world.kernel.now + 10.0)
        begun = world.kernel.now
        node.start()
        while node.core.swim.table.present_count < count:
            world.kernel.run(world.kernel.now + 0.01)
        took.append(world.kernel.now - begun)
    name = f"join to full view, {count} nodes (simulated)"
    return row(name, took, "s (virtual)", goal="<= 1 s", met=max(took) <= 1.0)


def heals(count: int, seeds: int) -> dict[str, Any]:
    """Measure the time from the end of a partition of five minutes, after mutual death, until all see all."""
    took = []
    for seed in range(seeds):
        world = together(count, seed)
        side = {node.id for node in world.nodes[: count * (seed % 5 + 1) // 10 + 1]}
        cut = {(a.id, b.id) for a in world.nodes for b in world.nodes if (a.id in side) != (b.id in side)}
        world.cuts.append(cut)
        world.kernel.run(world.kernel.now + 300.0)
        for node in world.nodes:
            present = {member.node for member in node.core.swim.table.present()}
            assert present == (side if node.id in side else {n.id for n in world.nodes} - side)
        world.cuts.clear()
        took.append(world.until(world.converged, 300.0, "M7"))
    name = f"partition heal, {count} nodes (simulated)"
    return row(name, took, "s (virtual)", goal="<= 35 s", met=max(took) <= 35.0)


def restarts(count: int, seeds: int) -> dict[str, Any]:
    """Measure the time until all see all, after all nodes crash within 3 s and restart 4 to 30 s later."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        took = list(workers.map(_restart, [(count, seed) for seed in range(seeds)]))
    line = row(f"mass restart, {count} nodes (simulated)", took, "s (virtual)", goal="<= 60 s, 1,000 seeds", met=None)
    line["why"] = f"{seeds} seeds, not 1,000: each takes a minute of a core"
    return line


def _restart(what: tuple[int, int]) -> float:
    count, seed = what
    world = together(count, seed)
    rng = world.streams.get("bench", "restart")
    begun = world.kernel.now
    for node in world.nodes:
        world.kernel.after(rng.uniform(0.0, 3.0), node.crash)
        world.kernel.after(rng.uniform(4.0, 30.0), node.start)
    world.kernel.run(begun + 30.0)
    world.until(world.converged, 120.0, "M8")
    return world.kernel.now - begun


def real_time(count: int) -> dict[str, Any]:
    """Return virtual seconds a second of CPU time in a converged mesh in which one node leaves and one returns."""
    world = together(count, 1)
    while any(len(node.core.swim.rumours) for node in world.nodes):  # until the messages of the start have ended
        world.kernel.run(world.kernel.now + 5.0)
    rates = []
    for node in world.nodes[-3:]:
        node.crash()
        begun, from_s = time.process_time(), world.kernel.now
        world.kernel.run(from_s + 20.0)
        rates.append(20.0 / (time.process_time() - begun))
        node.start()
        world.kernel.run(world.kernel.now + 5.0)
    name = f"{count} nodes simulated, multiple of real time"
    return row(name, rates, "x", goal=">= 1", met=min(rates) >= 1.0)


def weather(seeds: int) -> dict[str, Any]:
    """Run all faults with all checkers, on all cores."""
    begun = time.monotonic()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        violations = sum(workers.map(_play, range(seeds)))
    took = time.monotonic() - begun
    assert not violations, f"{violations} violations"
    name = f"{seeds} seeds x 20 nodes x 30 virtual minutes, all faults, 0 violations"
    return row(name, [took], "s", goal="<= 180 s for 200 seeds", met=took <= 180 if seeds >= 200 else None)


def _play(seed: int) -> int:
    MembershipWorld(seed, checkers=all_checkers()).run()
    return 0
