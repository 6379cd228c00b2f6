"""Checkpoints between nodes: the mesh's streams beside `rsync -W`, `iperf3` and `rsync --partial`, on loopback.

Each node is a process with its store and API (agents/store_node.py); the other end is the real replicator. In each round the
tools take turns, each into a new directory. Peers are from Debian: rsync, iperf3; the report names those that are not
installed.
"""

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from ckptstore.chunker import CHUNK_BYTES  # noqa: E402
from ckptstore.messages import MissingQuery, decode_ids, encode_missing_query  # noqa: E402
from ckptstore.store import SavedManifest, Store  # noqa: E402
from membership.envelope import seal  # noqa: E402
from membership.identity import Identity  # noqa: E402
from membership.trust import TrustStore  # noqa: E402
from mesh.checkpoints.replicator import Replicator  # noqa: E402
from mesh.daemon.stack import Stack  # noqa: E402
from mesh.rpc.client import READ_BYTES, Address, PeerClient, PeerError  # noqa: E402
from mesh.rpc.streams import sliced  # noqa: E402
from tests.bench.agents.store_node import open_store  # noqa: E402
from tests.bench.harness import not_run, row, write  # noqa: E402
from tests.ckptstore.worlds import save as stored  # noqa: E402

CASE = "full"  # of checkpoints.py
RATES = (20, 40, 80)  # MB/s of each source of a restore
PLAIN_BYTES = 3 << 30
LISTENS_S = 20.0
STREAM, PLAIN = "stream between two nodes, with TLS, hash, disk and fsync", "plain stream"
RESTORE, RESENT = "restore from three unequal paced sources", "resent after a cut at 50 %"
GOALS = {
    STREAM: ("MB/s", ">= 1.0 x rsync -W"),
    PLAIN: ("MB/s", ">= 0.9 x iperf3"),
    RESTORE: ("MB/s", ">= 0.92 x the sum of their rates"),
    RESENT: ("MB", "<= 1 chunk a stream"),
}


class Bench:
    """A mesh of four nodes: the first is this process, the others start on demand."""

    def __init__(self, home: Path, data: Path) -> None:
        self.home, self.data = home, home / "data"
        shutil.copytree(data, self.data)
        self.size = sum(path.stat().st_size for path in self.data.rglob("*") if path.is_file())
        Stack(1 + len(RATES), directory=home / "mesh").found()
        self.identity, self.trust, self.store = open_store(self.state(0), home / "ours")
        self.saved = save(self.identity, self.trust, self.store, self.data)
        self.others = [Identity.load(self.state(number) / "node.key").node_id for number in range(1, 1 + len(RATES))]
        self.addresses: dict[bytes, Address] = {}

    def state(self, number: int) -> Path:
        return self.home / "mesh" / f"node{number + 1}"

    @contextmanager
    def node(self, number: int, store: Path, rate: int = 0) -> Iterator[dict[str, Any]]:
        agent = Path(__file__).parent / "agents" / "store_node.py"
        arguments = [sys.executable, str(agent), str(self.state(number)), str(store), str(rate)]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            self.addresses[self.others[number - 1]] = Address("127.0.0.1", said["port"])
            yield said
            process.communicate()

    @asynccontextmanager
    async def peers(self) -> AsyncIterator[PeerClient]:
        client = PeerClient(self.identity, self.trust.mesh_id, self.addresses.get)
        await client.open()
        try:
            yield client
        finally:
            await client.close()

    def fresh(self, name: str) -> Path:
        path = self.home / name
        shutil.rmtree(path, ignore_errors=True)
        os.sync()  # flush earlier writes, so that they do not slow down the next tool
        return path


def save(identity: Identity, trust: TrustStore, store: Store, data: Path) -> SavedManifest:
    signed = partial(seal, identity, trust.mesh_id, "manifest")
    return stored(store, data, compress=False, seal=signed)  # the same bytes for all tools


async def timed(work: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


async def command(*arguments: str | Path) -> bytes:
    process = await asyncio.create_subprocess_exec(*map(str, arguments), stdout=subprocess.PIPE)
    said, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"{arguments}: {process.returncode}")
    return said


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def listens(port: int) -> None:
    """Wait until a server listens."""
    deadline = time.monotonic() + LISTENS_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise SystemExit(f"nobody listens on {port}")


@contextmanager
def rsync_daemon(bench: Bench, target: Path) -> Iterator[int]:
    port, config = free_port(), bench.home / "rsyncd.conf"
    config.write_text(
        f"use chroot = no\nlog file = /dev/null\n[to]\npath = {target}\nread only = no\nuid = {os.getuid()}\n"
    )
    target.mkdir(parents=True)
    words = ["rsync", "--daemon", "--no-detach", f"--config={config}", f"--port={port}", "--address=127.0.0.1"]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    try:
        listens(port)
        yield port
    finally:
        process.terminate()
        process.wait()


async def copies(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Measure MB/s of whole copies into an empty store or directory."""

    async def ours() -> float:
        with bench.node(1, bench.fresh("theirs")):
            async with bench.peers() as peers:
                replicator = Replicator(peers, bench.store)
                taken = await timed(replicator.replicate(bench.saved.id, bench.others[:1], (), 1))
        copy = Store(bench.home / "theirs", bench.store.unseal)
        if copy.missing(bench.saved.manifest.chunks) or not copy.has(bench.saved.id):
            raise SystemExit("the copy is incomplete")
        copy.close()
        return taken

    async def rsync(*options: str) -> float:
        with rsync_daemon(bench, bench.fresh("theirs")) as port:
            return await timed(command("rsync", "-rW", *options, f"{bench.data}/", f"rsync://127.0.0.1:{port}/to/"))

    subjects: dict[str, Callable[[], Awaitable[float]]] = {"ours": ours}
    if shutil.which("rsync"):
        subjects |= {"rsync -W": rsync, "rsync -W --fsync": lambda: rsync("--fsync")}
    return await in_turns(subjects, rounds, bench.size)


async def plain(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Measure MB/s of bytes that are neither read from disk nor stored."""
    frame = memoryview(bytearray(CHUNK_BYTES))
    with bench.node(1, bench.fresh("theirs")) as said:
        async with bench.peers() as peers:

            async def ours() -> None:
                async with peers.stream(bench.others[0], "PUT", "/sink", sliced(iter(frames()))) as response:
                    await response.read()

            async def without() -> None:
                url = f"http://127.0.0.1:{said['open_port']}/sink"
                async with session.put(url, data=sliced(iter(frames()))) as response:
                    await response.read()

            async def iperf3() -> float:
                port = free_port()
                server = subprocess.Popen(["iperf3", "-s", "-1", "-p", str(port)], stdout=subprocess.DEVNULL)
                try:
                    for _ in range(100):  # a probe would count as its only client
                        if f":{port:04X} " in Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text():
                            break
                        await asyncio.sleep(0.05)
                    words = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-n", str(PLAIN_BYTES), "-J"]
                    return float(json.loads(await command(*words))["end"]["sum_received"]["seconds"])
                finally:
                    server.wait()

            def frames() -> Iterator[memoryview]:
                return (frame for _ in range(PLAIN_BYTES // CHUNK_BYTES))

            async with aiohttp.ClientSession(read_bufsize=READ_BYTES) as session:
                subjects: dict[str, Callable[[], Awaitable[float]]] = {
                    "ours, with TLS": lambda: timed(ours()),
                    "ours": lambda: timed(without()),
                }
                if shutil.which("iperf3"):
                    subjects["iperf3"] = iperf3
                return await in_turns(subjects, rounds, PLAIN_BYTES)


async def restores(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Measure MB/s of a restore from three holders with different speeds."""
    for number in range(1, 1 + len(RATES)):
        shutil.copytree(bench.home / "ours", bench.home / f"source{number}")

    async def ours() -> float:
        store, of = (
            Store(bench.fresh("restored"), bench.store.unseal),
            (bench.saved.manifest.job, bench.saved.manifest.user),
        )
        with ExitStack() as stack:
            for number, rate in enumerate(RATES, 1):
                stack.enter_context(bench.node(number, bench.home / f"source{number}", rate * 1_000_000))
            async with bench.peers() as peers:
                taken = await timed(Replicator(peers, store).fetch(bench.saved.id, bench.others, of))
        if store.missing(bench.saved.manifest.chunks) or not store.has(bench.saved.id):
            raise SystemExit("the restored checkpoint is incomplete")
        store.close()
        return taken

    return await in_turns({"ours": ours}, rounds, bench.size)


class Proxy:
    """A proxy that counts the client's bytes and cuts all connections after some number of bytes."""

    def __init__(self, port: int, cut_after: int | None) -> None:
        self._port, self._left = port, cut_after
        self.passed = 0
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with server:
            yield int(server.sockets[0].getsockname()[1])
            self._cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, next_placement = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, next_placement]
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._pass(reader, next_placement, True), self._pass(there, writer, False))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: bool) -> None:
        while data := await reader.read(1 << 18):
            if counted and self._left is not None:
                data = data[: self._left]
                self._left -= len(data)
            writer.write(data)
            await writer.drain()
            self.passed += len(data) if counted else 0
            if self._left == 0:
                self._cut()
        if writer.can_write_eof():
            writer.write_eof()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.close()


async def cuts(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Measure the extra MB of a copy that is cut at half and retried, over an undisturbed copy."""

    async def ours() -> float:
        passed = []
        for half in (None, bench.size // 2):
            with bench.node(1, bench.fresh("theirs")) as said:
                for cut_after in (half, None) if half else (None,):
                    proxy = Proxy(said["port"], cut_after)
                    async with proxy.serve() as port, bench.peers() as peers:
                        address = bench.addresses[bench.others[0]]
                        bench.addresses[bench.others[0]] = Address("127.0.0.1", port)
                        replicator = Replicator(peers, bench.store)
                        with suppress(PeerError):
                            await replicator.send_chunks(bench.others[0], bench.saved.id)
                        bench.addresses[bench.others[0]] = address
                        await settled(peers, bench)
                    passed.append(proxy.passed)
        whole, first, second = passed
        return (first + second - whole) / 1e6

    async def rsync() -> float:
        passed = []
        for half in (None, bench.size // 2):
            with rsync_daemon(bench, bench.fresh("theirs")) as there:
                for cut_after in (half, None) if half else (None,):
                    proxy = Proxy(there, cut_after)
                    async with proxy.serve() as port:
                        words = ["rsync", "-r", "--partial", f"{bench.data}/", f"rsync://127.0.0.1:{port}/to/"]
                        process = await asyncio.create_subprocess_exec(*words, stderr=subprocess.DEVNULL)
                        await process.wait()
                    passed.append(proxy.passed)
        whole, first, second = passed
        return (first + second - whole) / 1e6

    subjects: dict[str, Callable[[], Awaitable[float]]] = {"ours": ours}
    if shutil.which("rsync"):
        subjects["rsync --partial"] = rsync
    return await in_turns(subjects, rounds, None)


async def settled(peers: PeerClient, bench: Bench) -> None:
    """Wait until the node has stored the received chunks."""
    chunks = bench.saved.manifest.chunks
    deadline = time.monotonic() + LISTENS_S
    while time.monotonic() < deadline:
        with suppress(PeerError):
            question = encode_missing_query(MissingQuery(chunks))
            answer = await peers.call(bench.others[0], "POST", "/v1/chunks/missing", question)
            if len(decode_ids(answer)) < len(chunks):
                return
        await asyncio.sleep(0.05)
    raise SystemExit("no received data was stored")


async def in_turns(
    subjects: dict[str, Callable[[], Awaitable[float]]], rounds: int, size: int | None
) -> dict[str, list[float]]:
    """Run each subject in each round; return MB/s where `size` bytes were moved."""
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds):
        for name in list(subjects)[:: 1 if number % 2 == 0 else -1]:
            taken = await subjects[name]()
            found[name].append(taken if size is None else size / taken / 1e6)
            print(f"{name}: {found[name][-1]:.1f} {'MB' if size is None else 'MB/s'}", flush=True)
    return found


def line(
    measure: str, found: dict[str, list[float]], mine: str, peer: str, times: float, where: str, judged: bool = True
) -> dict[str, Any]:
    """Return a row; `found` are rates, and more is better."""
    unit, goal = GOALS[measure]
    name = f"{measure}{mine.removeprefix('ours')}, on {where}" if where else f"{measure}{mine.removeprefix('ours')}"
    if peer not in found:
        return not_run(name, unit, goal, f"{peer.partition(' ')[0]} is not installed")
    made = row(name, found[mine], unit, goal=goal if judged else "-", met=None, peer=peer, peer_values=found[peer])
    return {**made, "met": made["value"] >= times * made["peer_value"] if judged else None}


async def measure(place: Path, data: Path, where: str, rounds: int, only: list[str]) -> list[dict[str, Any]]:
    bench, lines = Bench(place, data), []
    try:
        if "copies" in only:
            found = await copies(bench, rounds)
            lines.append(line(STREAM, found, "ours", "rsync -W", 1.0, where))
            lines.append(line(STREAM, found, "ours", "rsync -W --fsync", 1.0, where, judged=False))
        if "plain" in only:
            found = await plain(bench, rounds)
            lines.append(line(PLAIN, found, "ours", "iperf3", 0.9, ""))
            lines.append(line(PLAIN, found, "ours, with TLS", "iperf3", 0.9, "", judged=False))
        if "restores" in only:
            rates = await restores(bench, rounds)
            together = float(sum(RATES))
            made = row(
                f"{RESTORE} of {', '.join(map(str, RATES))} MB/s, on {where}",
                rates["ours"],
                GOALS[RESTORE][0],
                goal=GOALS[RESTORE][1],
                met=None,
                peer="their sum",
                peer_values=[together],
            )
            lines.append({**made, "met": made["value"] >= 0.92 * together})
        if "cuts" in only:
            sent = await cuts(bench, rounds)
            made = row(
                f"{RESENT}, of {bench.size / 1e6:.0f} MB",
                sent["ours"],
                GOALS[RESENT][0],
                goal=GOALS[RESENT][1],
                met=None,
                peer="rsync --partial" if "rsync --partial" in sent else "",
                peer_values=sent.get("rsync --partial", ()),
            )
            lines.append({**made, "met": made["max"] <= CHUNK_BYTES / 1e6})
    finally:
        bench.store.close()
    return lines


PARTS = ("copies", "plain", "restores", "cuts")


def make(python: str, data: Path, case: str) -> None:
    """Make the checkpoints of a case with a Python that has torch, unless they exist."""
    if not (data / case / "2" / "model.pt").exists():
        print(f"making the checkpoints of {case}", flush=True)
        subprocess.run([python, str(Path(__file__).parent / "checkpoints.py"), str(data), case], check=True)


def rows(data: Path, places: list[str], rounds: int, only: Sequence[str] = PARTS) -> list[dict[str, Any]]:
    """Return the rows of the report; `data` has the checkpoints."""
    lines: list[dict[str, Any]] = []
    for number, place in enumerate(places):
        home = Path(place) / f"bench-streams-{os.getpid()}"
        parts = (
            only if number == 0 else [part for part in only if part == "copies"]
        )  # the other parts hardly use the disk
        try:
            lines += asyncio.run(measure(home, data / CASE / "2", place, rounds, parts))
        finally:
            shutil.rmtree(home, ignore_errors=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on", nargs="+", default=["/dev/shm", "/var/tmp"])
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "checkpoints")
    parser.add_argument("--torch", default=str(ROOT / ".venv-frameworks" / "bin" / "python"))
    options = parser.parse_args()
    make(options.torch, options.data, CASE)
    write("streams", rows(options.data, options.on, options.rounds, options.only))


if __name__ == "__main__":
    main()
