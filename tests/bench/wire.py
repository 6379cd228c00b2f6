"""Checkpoint streams: accuracy of pacing, checkpoints that meet their deadline, and the time to plan them.

Real connections with TLS on loopback, the project's own client, real stores under `--on`; the receiver counts. Writes
build/bench/wire.json; `ckptstore.py` includes the same rows.
"""

import argparse
import asyncio
import os
import random
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from aiohttp import web  # noqa: E402

from ckptstore.deadline import Upload, plan  # noqa: E402
from ckptstore.pacing import AIM, Background  # noqa: E402
from ckptstore.store import SavedManifest, Store  # noqa: E402
from mesh.checkpoints.replicator import Replicator  # noqa: E402
from mesh.rpc.client import Address  # noqa: E402
from mesh.rpc.pacing import Wire  # noqa: E402
from mesh.rpc.server import PeerServer  # noqa: E402
from mesh.util.boottime import boot_s  # noqa: E402
from tests.bench.harness import row, write  # noqa: E402
from tests.ckptstore.worlds import open_store, save  # noqa: E402
from tests.rpc.nodes import Keeper, Link, client_of, leaving, node_named, serve  # noqa: E402

MB = 10**6
PEER = node_named("p").node_id
RATES_BPS = (12.5e6, 50e6, 117e6)  # Fast Ethernet to gigabit
SETTLE_S, WINDOW_S = 0.5, 2.0
LINK_BPS = 40e6  # a slow, shared gigabit port
WINDOWS_S = (0.5, 0.8)
FILLED = (0.4, AIM)  # share of the link's capacity in the window
BATCH = 20  # trials with the same stores


class Counter:
    """A receiver that records when how much had arrived."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    async def serve(self) -> tuple[PeerServer, Address]:
        app = web.Application()
        app.add_routes([web.put("/", self._take)])
        return await serve(app, node_named("p"))

    async def _take(self, request: web.Request) -> web.Response:
        count = 0
        self.seen = []
        async for data in request.content.iter_any():
            count += len(data)
            self.seen.append((time.monotonic(), count))
        return web.Response()

    def rate_bps(self) -> float:
        """Return the rate over the window, after settling."""
        start = self.seen[0][0] + SETTLE_S
        inside = [(at, count) for at, count in self.seen if start <= at <= start + WINDOW_S]
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        return (last - first) / (last_at - first_at)


async def pacing_errors(directory: Path, rounds: int) -> dict[float, list[float]]:
    counter = Counter()
    server, address = await counter.serve()
    found: dict[float, list[float]] = {rate: [] for rate in RATES_BPS}
    for _ in range(rounds):
        for rate in RATES_BPS:
            wire = Wire(rate)
            peers = await client_of({PEER: address}, wire)
            lane = wire.lane(Background())
            body = pieces(int(rate * (SETTLE_S + WINDOW_S + 0.2)))
            async with lane, peers.stream(PEER, "PUT", "/", body, lane) as response:
                await response.read()
            await peers.close()
            found[rate].append(abs(counter.rate_bps() / rate - 1))
            print(f"asked {rate / MB:g} MB/s: wrong by {found[rate][-1]:.2%}", flush=True)
    await server.close()
    return found


async def pieces(count: int) -> Any:
    block = memoryview(os.urandom(1 << 20))
    for start in range(0, count, len(block)):
        yield block[: min(len(block), count - start)]


class Trials:
    """Checkpoints that must reach another node over a link of LINK_BPS by a deadline."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._directory, self._rng = directory, rng
        self.met: list[bool] = []
        self.torn = self.hopeless = self.shown = 0

    async def run(self, count: int) -> None:
        for start in range(0, count, BATCH):
            here = self._directory / str(start)
            keeper, store = Keeper(here / "keeper", Link(LINK_BPS), node_named("p")), open_store(here / "ours")
            peers = await client_of({PEER: await keeper.serve()})
            replicator = Replicator(peers, store)
            try:
                for number in range(min(BATCH, count - start)):
                    await self._possible(replicator, store, keeper, here / "in", number)
                await self._impossible(replicator, store, keeper, here / "in", BATCH)
                await self._impossible(replicator, store, keeper, here / "in", BATCH + 1)
            finally:
                await peers.close()
                await keeper.close()
                store.close()
                shutil.rmtree(here)
            print(f"{sum(self.met)} of {len(self.met)} in time, {self.torn} torn", flush=True)

    async def _possible(self, replicator: Replicator, store: Store, keeper: Keeper, source: Path, number: int) -> None:
        window_s = self._rng.uniform(*WINDOWS_S)
        saved = checkpoint(store, source, number, int(self._rng.uniform(*FILLED) * LINK_BPS * window_s))
        deadline = boot_s() + window_s
        copies = await replicator.replicate(saved.id, [PEER], [], 1, loss=leaving(window_s))
        self.met.append(copies.holders == (PEER,) and boot_s() <= deadline)
        self.torn += keeper.torn()

    async def _impossible(
        self, replicator: Replicator, store: Store, keeper: Keeper, source: Path, number: int
    ) -> None:
        """Try three times what fits; the node leaves at the deadline."""
        window_s = self._rng.uniform(*WINDOWS_S)
        saved = checkpoint(store, source, number, int(3 * LINK_BPS * window_s))
        sending = asyncio.create_task(replicator.replicate(saved.id, [PEER], [], 1, loss=leaving(window_s)))
        await asyncio.wait([sending], timeout=window_s)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        self.hopeless += 1
        self.shown += saved.id in keeper.manifests
        self.torn += keeper.torn()


def checkpoint(store: Store, source: Path, number: int, size: int) -> SavedManifest:
    source.mkdir(parents=True, exist_ok=True)
    (source / "model.bin").write_bytes(os.urandom(size))
    return save(store, source, job=b"%016d" % number, compress=False)


def planning(rng: random.Random, count: int) -> list[float]:
    """Measure the seconds to tell which of 64 checkpoints can meet their deadline."""
    taken = []
    for _ in range(count):
        uploads = [
            Upload(rng.uniform(1, 1e6), rng.randrange(10**7, 10**11), rng.uniform(5, 600), rng.uniform(1e7, 1e9))
            for _ in range(64)
        ]
        begun = time.perf_counter()
        plan(uploads, 0.0)
        taken.append(time.perf_counter() - begun)
    return taken


def rows(place: Path, rounds: int = 5, trials: int = 200) -> list[dict[str, Any]]:
    """Return the rows of the report; the stores are in `place`."""
    home = place / f"bench-wire-{os.getpid()}"
    home.mkdir(parents=True)
    rng = random.Random(1)
    try:
        errors = asyncio.run(pacing_errors(home, rounds))
        done = Trials(home, rng)
        asyncio.run(done.run(trials))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    found = [
        row(
            f"pacing error over {WINDOW_S:g} s, {rate / MB:g} MB/s asked, loopback, TLS",
            taken,
            "of the rate",
            goal="<= 0.02",
            met=statistics.median(taken) <= 0.02,  # other load on the machine causes occasional misses
        )
        for rate, taken in errors.items()
    ]
    share = sum(done.met) / len(done.met)
    met = row(
        "deadline met when bytes <= 0.8 x bandwidth x window", [share], "of trials", goal=">= 0.99", met=share >= 0.99
    )
    quick = planning(rng, 50)
    return [
        *found,
        {**met, "n": len(done.met)},
        visible(done),
        row("feasibility of 64 jobs", quick, "s", goal="< 0.1", met=max(quick) < 0.1),
    ]


def visible(done: Trials) -> dict[str, Any]:
    """Return the row of checkpoints that the receiver shows although they did not arrive whole."""
    wrong = done.torn + done.shown
    made = row("torn or partial checkpoints visible", [wrong], "checkpoints", goal="0", met=wrong == 0)
    return {**made, "n": len(done.met) + done.hopeless}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--on", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    write("wire", rows(options.on, options.rounds, options.trials))


if __name__ == "__main__":
    main()
