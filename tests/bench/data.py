"""Data sets through real daemons: adding, adding again, many small files, fetching from three holders, fetching by several nodes
at once, a job's first batch while it is fetched, a cache that jobs fill, and memory.

Beside rsync and restic, tar with zstd, and rsync and aria2c, where these are installed. Every subject ends with `sync`, so each
figure is the time until the bytes are on disk. Writes build/bench/data.json.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mesh.daemon.stack import Stack, StackNode  # noqa: E402
from tests.bench.harness import not_run, row, write  # noqa: E402
from tests.e2e.commands import metric  # noqa: E402

MIB = 1 << 20
FILE_BYTES = 8 * MIB  # of a large file
SMALL_BYTES = 10_000
CHANGED = 0.01
ADD_GOAL, AGAIN_GOAL, SMALL_GOAL, FETCH_GOAL, MEMORY_GOAL_MIB = 1.0, 0.1, 1.2, 0.9, 150.0
HOLDERS = 3
SWARM, SWARM_MBPS = 4, 200.0  # nodes that fetch at once, and what each node sends at most
SENT = "mesh_transfer_sent_bytes_total"
SWARM_GOAL = 1.5  # times as long as one node alone would take (own choice)
PARTS = ("add", "small", "fetch", "swarm", "stream", "cache", "memory")
BATCH, WORKERS = 32, 4  # records of 1 MiB in a batch, and threads that read them, as data loaders do
FIRST_GOAL = 0.05
PRIORITY = "--priority"
CLEAR = "for everybody, in the clear"


def timed(do: Callable[[], object], on: Path) -> float:
    """Return the seconds until something is done and on disk."""
    if PRIORITY in sys.argv:
        schedule(os.SCHED_RR, 5)
    try:
        begun = time.perf_counter()
        do()
        subprocess.run(["sync", "-f", on], check=True)
        return time.perf_counter() - begun
    finally:
        if PRIORITY in sys.argv:
            schedule(os.SCHED_OTHER, 0)


def schedule(policy: int, priority: int) -> None:
    """Set how this process, the processes that it has started, and theirs are scheduled: every thread."""
    for task in tasks():
        with suppress(OSError):  # it has ended
            os.sched_setscheduler(task, policy, os.sched_param(priority))


def tasks() -> Iterator[int]:
    left = [os.getpid()]
    while left:
        for task in Path(f"/proc/{left.pop()}/task").glob("*"):
            with suppress(OSError):
                yield int(task.name)
                left += map(int, (task / "children").read_text().split())


def run(*words: str | Path, **env: str) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL, env={**os.environ, **env})


def mesh(node: StackNode, *words: str | Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "mesh.cli", "--state", node.where.root, *words, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
    return dict(json.loads(done.stdout))


def make_large(root: Path, count: int) -> None:
    """Write files that do not compress, as images and archives do not."""
    root.mkdir(parents=True)
    rng = random.Random(1)
    for number in range(count):
        with (root / f"{number:05d}.bin").open("wb") as file:
            for _ in range(FILE_BYTES // MIB):
                file.write(rng.randbytes(MIB))


def change(root: Path, seed: int) -> None:
    """Change one part in a hundred of the bytes, in whole files where there are many, else within them."""
    rng, files = random.Random(seed), sorted(root.iterdir())
    for path in files if len(files) < 1 / CHANGED else rng.sample(files, round(len(files) * CHANGED)):
        size = path.stat().st_size
        count = max(1, round(size * CHANGED)) if len(files) < 1 / CHANGED else size
        with path.open("r+b") as file:
            file.seek(rng.randrange(max(1, size - count)))
            file.write(rng.randbytes(count))


def settle() -> None:
    time.sleep(2.5)  # files that changed in the last two seconds are read again


def measure_add(options: argparse.Namespace, on: Path) -> list[dict[str, Any]]:
    source, gib = on / "large", options.gib
    make_large(source, max(1, round(gib * 1024 * MIB / FILE_BYTES)))
    settle()
    first: dict[str, list[float]] = {"mesh": [], CLEAR: [], "rsync": [], "restic": []}
    again: dict[str, list[float]] = {"mesh": [], CLEAR: [], "rsync": [], "restic": []}
    for number in range(options.rounds):
        with Stack(1, directory=on / f"stack{number}") as stack:
            stack.start_all()
            subjects: dict[str, Callable[[], object]] = {
                "mesh": lambda stack=stack: mesh(stack.nodes[0], "data", "add", "set", source),  # type: ignore[misc]
                CLEAR: lambda stack=stack: mesh(stack.nodes[0], "data", "add", "open", source, "--everybody"),  # type: ignore[misc]
            }
            if shutil.which("rsync"):
                subjects["rsync"] = lambda: run("rsync", "-a", f"{source}/", on / "copy")
            if shutil.which("restic"):
                where = {"RESTIC_PASSWORD": "x", "RESTIC_REPOSITORY": str(on / "restic"), "HOME": str(on)}
                run("restic", "init", **where)
                subjects["restic"] = lambda where=where: run("restic", "backup", source, **where)  # type: ignore[misc]
            for taken in (first, again):
                for name, do in subjects.items():
                    taken[name].append(timed(do, on))
                change(source, number)
                settle()
        for leftover in ("copy", "restic"):
            shutil.rmtree(on / leftover, ignore_errors=True)
    shutil.rmtree(source)
    rows = [beside(f"add {gib:g} GiB", first, ADD_GOAL)]
    ratio = [after / before for after, before in zip(again["mesh"], first["mesh"], strict=True)]
    rows.append(
        row("add it again with 1 % changed", ratio, "x", goal=f"<= {AGAIN_GOAL:g} x", met=max(ratio) <= AGAIN_GOAL)
    )
    rows += [row(f"add {gib:g} GiB, {CLEAR}", first[CLEAR], "s", goal="-", met=None)]
    return [*rows, beside("add it again, seconds", again, None)]


def beside(measure: str, taken: dict[str, list[float]], goal: float | None) -> dict[str, Any]:
    """Return a row of mesh beside the fastest of its peers."""
    ours = taken["mesh"]
    peers = {name: values for name, values in taken.items() if name not in {"mesh", CLEAR} and values}
    if not peers:
        return row(measure, ours, "s", goal="beside rsync or restic", met=None)
    best = min(peers, key=lambda name: sorted(peers[name])[len(peers[name]) // 2])
    met = None
    if goal is not None:
        met = sorted(ours)[len(ours) // 2] <= goal * sorted(peers[best])[len(peers[best]) // 2]
    goal_text = "-" if goal is None else f"<= {goal:g} x the faster"
    return row(measure, ours, "s", goal=goal_text, met=met, peer=best, peer_values=peers[best])


def measure_small(options: argparse.Namespace, on: Path) -> list[dict[str, Any]]:
    source, rng = on / "small", random.Random(2)
    for number in range(options.files):
        path = source / f"{number // 1000:04d}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(SMALL_BYTES))
    settle()
    taken: dict[str, list[float]] = {"mesh": [], CLEAR: [], "tar | zstd -1": []}
    unchanged: list[float] = []
    scattered: list[list[float]] = [[], []]
    for number in range(options.rounds):
        with Stack(1, directory=on / f"stack{number}") as stack:
            stack.start_all()
            node = stack.nodes[0]
            taken["mesh"].append(timed(lambda node=node: mesh(node, "data", "add", "set", source), on))  # type: ignore[misc]
            clear = ("data", "add", "open", source, "--everybody")
            taken[CLEAR].append(timed(lambda node=node, clear=clear: mesh(node, *clear), on))  # type: ignore[misc]
            unchanged.append(timed(lambda node=node: mesh(node, "data", "add", "set", source), on))  # type: ignore[misc]
            for seconds in scattered:
                for path in rng.sample(sorted(source.glob("*/*")), round(options.files * CHANGED)):
                    path.write_bytes(rng.randbytes(SMALL_BYTES))
                settle()
                seconds.append(timed(lambda node=node: mesh(node, "data", "add", "set", source), on))  # type: ignore[misc]
        if shutil.which("zstd"):
            packed = f"tar -C {source} -cf - . | zstd -1 -q -o {on}/small.tar.zst -f"
            taken["tar | zstd -1"].append(timed(lambda packed=packed: run("sh", "-c", packed), on))  # type: ignore[misc]
    shutil.rmtree(source)
    what = f"{options.files} files of 10 KB"
    return [
        beside(f"add {what}", taken, SMALL_GOAL),
        row(f"add {what}, {CLEAR}", taken[CLEAR], "s", goal="-", met=None),
        row(f"add {what} again", unchanged, "s", goal="-", met=None),
        row(f"add {what} again, 1 % of them changed all over the set", scattered[0], "s", goal="-", met=None),
        row(f"add {what} again, another 1 % of them changed", scattered[1], "s", goal="-", met=None),
    ]


def measure_fetch(options: argparse.Namespace, on: Path) -> list[dict[str, Any]]:
    source = on / "large"
    make_large(source, max(1, round(options.gib * 1024 * MIB / FILE_BYTES)))
    ours: dict[str, list[float]] = {"set": [], "open": []}
    theirs: dict[str, list[float]] = {}
    with Stack(HOLDERS + options.rounds, directory=on / "stack") as stack, web_servers(source) as servers:
        peers: dict[str, Callable[[], object]] = {}
        if shutil.which("rsync"):
            peers["rsync from one"] = lambda: run("rsync", "-a", f"{source}/", on / "copy")
        if shutil.which("aria2c"):
            peers["aria2c from three"] = lambda: fetch_by_aria2c(source, servers, on)
        theirs = {name: [] for name in peers}
        stack.start_all()
        mesh(stack.nodes[0], "data", "add", "set", source)
        mesh(stack.nodes[0], "data", "add", "open", source, "--everybody")
        for node in stack.nodes[1:HOLDERS]:
            for name in ours:
                wait_known(node, 1, name)
                mesh(node, "data", "pin", name)
        for node in stack.nodes[HOLDERS:]:
            for name, taken in ours.items():
                wait_known(node, HOLDERS, name)
                touch_memory(options.gib, on)
                taken.append(timed(lambda node=node, name=name: mesh(node, "data", "pin", name), on))  # type: ignore[misc]
                mesh(node, "data", "rm", "--here", name)
            for name, fetch in peers.items():
                touch_memory(options.gib, on)
                theirs[name].append(timed(fetch, on))
                shutil.rmtree(on / "copy")
    shutil.rmtree(source)
    measure = f"fetch {options.gib:g} GiB from {HOLDERS} holders, verified"
    clear = row(f"{measure}, {CLEAR}", ours["open"], "s", goal="-", met=None)
    if not theirs:
        return [row(measure, ours["set"], "s", goal="beside rsync and aria2c", met=None), clear]
    best = min(theirs, key=lambda name: statistics.median(theirs[name]))
    met = statistics.median(theirs[best]) >= FETCH_GOAL * statistics.median(ours["set"])
    rows = [
        row(
            measure,
            ours["set"],
            "s",
            goal=f"the faster's time >= {FETCH_GOAL:g} x",
            met=met,
            peer=best,
            peer_values=theirs[best],
        ),
        clear,
    ]
    return rows + [row(f"the same by {name}", taken, "s", goal="-", met=None) for name, taken in theirs.items()]


def measure_swarm(options: argparse.Namespace, on: Path) -> list[dict[str, Any]]:
    """Measure until several nodes that fetch at once from one holder all have the data set, beside BitTorrent."""
    source = on / "large"
    make_large(source, max(1, round(options.gib * 1024 * MIB / FILE_BYTES)))
    ours, theirs, copies = list[float](), list[float](), list[float]()
    alone_s = options.gib * 1024 * MIB / (SWARM_MBPS * 1e6 / 8)
    with Stack(1 + SWARM, directory=on / "stack", overrides={"upload_mbps": SWARM_MBPS}) as stack:
        stack.start_all()
        holder, *others = stack.nodes
        mesh(holder, "data", "add", "set", source)
        for node in others:
            wait_known(node, 1)
        for number in range(options.rounds):
            before = metric(holder, SENT)
            ours.append(timed(lambda: pin_at_once(others), on))
            copies.append((metric(holder, SENT) - before) / (options.gib * 1024 * MIB))
            for node in others:
                mesh(node, "data", "pin", "--off", "set")
                mesh(node, "data", "rm", "--here", "--force", "set")
            if shutil.which("aria2c"):
                theirs.append(fetch_by_bittorrent(source, on / f"torrent{number}"))
    shutil.rmtree(source)
    measure = f"{SWARM} nodes fetch {options.gib:g} GiB at once from one, each sends {SWARM_MBPS:g} Mbit/s"
    met = statistics.median(ours) <= SWARM_GOAL * alone_s
    goal = f"<= {SWARM_GOAL:g} x {alone_s:.1f} s, the time of one alone"
    peer = {"peer": "aria2c by BitTorrent", "peer_values": theirs} if theirs else {}
    return [
        row(measure, ours, "s", goal=goal, met=met, **peer),  # type: ignore[arg-type]
        row("copies that the holder sends meanwhile", copies, "x", goal="-", met=None),
    ]


def pin_at_once(nodes: Sequence[StackNode]) -> None:
    command = [sys.executable, "-m", "mesh.cli", "--state"]
    orders = [
        subprocess.Popen([*command, node.where.root, "data", "pin", "set"], stdout=subprocess.DEVNULL, cwd=ROOT)
        for node in nodes
    ]
    if any([order.wait() for order in orders]):
        raise SystemExit("a node could not fetch the data set")


TRACKER = """
import socket, sys
from urllib.parse import parse_qs
from aiohttp import web

peers = set()

async def announce(request):
    port = int(parse_qs(request.query_string, encoding="latin-1")["port"][0])
    print("heard", flush=True)
    peers.add(socket.inet_aton("127.0.0.1") + port.to_bytes(2, "big"))
    known = b"".join(sorted(peers))
    return web.Response(body=b"d8:intervali1e5:peers%d:%se" % (len(known), known))

app = web.Application()
app.router.add_get("/announce", announce)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
web.run_app(app, sock=listener, print=None)
"""


def bencoded(value: object) -> bytes:
    match value:
        case int():
            return b"i%de" % value
        case bytes():
            return b"%d:%s" % (len(value), value)
        case list():
            return b"l" + b"".join(map(bencoded, value)) + b"e"
        case dict():
            return b"d" + b"".join(bencoded(key) + bencoded(value[key]) for key in sorted(value)) + b"e"
    raise TypeError(type(value))


def torrent(source: Path, tracker: str) -> bytes:
    """Describe a directory of files for BitTorrent, in pieces of 1 MiB."""
    files = sorted(source.iterdir())
    whole = b"".join(path.read_bytes() for path in files)
    pieces = b"".join(hashlib.sha1(whole[at : at + MIB]).digest() for at in range(0, len(whole), MIB))
    listed = [{b"length": path.stat().st_size, b"path": [path.name.encode()]} for path in files]
    about = {b"files": listed, b"name": source.name.encode(), b"piece length": MIB, b"pieces": pieces}
    return bencoded({b"announce": tracker.encode(), b"info": about})


def fetch_by_bittorrent(source: Path, on: Path) -> float:
    """Return the seconds until as many clients of aria2c have what another one has, all started at once."""
    on.mkdir()
    with subprocess.Popen([sys.executable, "-c", TRACKER], stdout=subprocess.PIPE, text=True) as tracker:
        assert tracker.stdout is not None
        file = on / "set.torrent"
        file.write_bytes(torrent(source, f"http://127.0.0.1:{tracker.stdout.readline().strip()}/announce"))
        words = ["aria2c", "-q", "--enable-dht=false", "--bt-tracker-interval=1", "--file-allocation=none"]
        words += ["--seed-ratio=0", "--check-integrity=true", "--bt-request-peer-speed-limit=1000M"]
        words += [f"--max-overall-upload-limit={round(SWARM_MBPS * 1e6 / 8)}"]
        clients = [subprocess.Popen([*words, "-d", source.parent, "--listen-port=26881", file])]
        try:
            tracker.stdout.readline()  # the first one has hashed what it has, and says that it is there
            begun = time.perf_counter()
            for number in range(SWARM):
                (on / str(number)).mkdir()
                clients.append(
                    subprocess.Popen([*words, "-d", on / str(number), f"--listen-port={26882 + number}", file])
                )
            places = [on / str(number) / source.name for number in range(SWARM)]
            waited(lambda: all(place.exists() and not unfinished(place) for place in places), "the torrent", 0.05)
            subprocess.run(["sync", "-f", on], check=True)
            return time.perf_counter() - begun
        finally:
            for process in (*clients, tracker):
                process.terminate()
                process.wait()
            shutil.rmtree(on)


def unfinished(place: Path) -> bool:
    return place.with_name(f"{place.name}.aria2").exists()


FIRST_BATCH = """
import json, os, random, time
from concurrent.futures import ThreadPoolExecutor
root = os.environ["MESH_DATA_SET"]
files = sorted(os.listdir(root))
begun, places = time.time(), [(name, at << 20) for name in files for at in range(os.stat(f"{root}/{name}").st_size >> 20)]
if %r:
    random.Random(1).shuffle(places)

def record(place):
    name, at = place
    with open(f"{root}/{name}", "rb", buffering=0) as file:
        file.seek(at)
        return len(file.read(1 << 20))

with ThreadPoolExecutor(%d) as pool:
    for number, length in enumerate(pool.map(record, places)):
        assert length == 1 << 20
        if number + 1 == %d:
            first = time.time()
print(json.dumps({"first": first, "all": time.time()}), flush=True)
time.sleep(600)
"""


def measure_stream(options: argparse.Namespace, on: Path) -> list[dict[str, Any]]:
    """Measure a job's first batch and its first epoch, from when its node begins to fetch, in turn with a fetch of its own."""
    from mesh.data.streams import problem

    if why := problem():
        return [not_run("first batch while streaming", f"<= {FIRST_GOAL:g} of the fetch", "-", why)]
    source = on / "large"
    make_large(source, max(1, round(options.gib * 1024 * MIB / FILE_BYTES)))
    orders = {"in order": False, "shuffled": True}
    taken: dict[str, dict[str, list[float]]] = {name: {"first": [], "epoch": [], "whole": []} for name in orders}
    fetched: list[float] = []
    overrides = {"upload_mbps": options.stream_mbps} if options.stream_mbps else {}
    with Stack(HOLDERS + 1, directory=on / "stack", overrides=overrides) as stack:
        stack.start_all()
        mesh(stack.nodes[0], "data", "add", "set", source)
        for node in stack.nodes[1:HOLDERS]:
            wait_known(node, 1)
            mesh(node, "data", "pin", "set")
        node = stack.nodes[HOLDERS]
        wait_known(node, HOLDERS)
        for holder in stack.nodes[:HOLDERS]:
            told_by(holder, "pause")
        paused = lambda: sum(found["paused"] for found in mesh(node, "nodes")["nodes"]) == HOLDERS  # noqa: E731
        waited(paused, "the pauses")
        if PRIORITY in sys.argv:  # a guest's control group takes no real-time processes
            for task in tasks():
                os.setpriority(os.PRIO_PROCESS, task, -20)
        for _ in range(options.rounds):
            touch_memory(options.gib, on)
            begun = time.perf_counter()
            mesh(node, "data", "pin", "set")
            fetched.append(time.perf_counter() - begun)
            drop_once_free(node)
            for name, shuffled in orders.items():
                touch_memory(options.gib, on)
                program = FIRST_BATCH % (shuffled, WORKERS, BATCH)
                words = ("submit", "--no-workdir", "--data", "set", "--", sys.executable, "-c", program)
                job = told_by(node, *words).strip()
                told = until_told(node, job)
                begun, whole = times_of(node, job)
                told_by(node, "cancel", job)
                taken[name]["first"].append(told["first"] - begun)
                taken[name]["epoch"].append(told["all"] - begun)
                taken[name]["whole"].append(whole - begun)
                drop_once_free(node)
    shutil.rmtree(source)
    rows = [row(f"fetch {options.gib:g} GiB without a reader", fetched, "s", goal="-", met=None)]
    for name, times in taken.items():
        parts = [first / whole for first, whole in zip(times["first"], fetched, strict=True)]
        met = statistics.median(parts) <= FIRST_GOAL
        batch = f"first {BATCH} records of 1 MiB, {name}"
        rows += [
            row(f"{batch}, while {options.gib:g} GiB stream", times["first"], "s", goal="-", met=None),
            row(f"{batch}: part of the fetch", parts, "x", goal=f"<= {FIRST_GOAL:g} x", met=met),
            row(
                f"all records, {name}",
                times["epoch"],
                "s",
                goal="-",
                met=None,
                peer="whole",
                peer_values=times["whole"],
            ),
        ]
    return rows


FILL = 'cd "$MESH_CACHE_FILLED"; for n in $(seq "$1"); do head -c "$2" /dev/urandom > "$n"; done'


def measure_cache(options: argparse.Namespace, on: Path) -> list[dict[str, Any]]:
    """A job on another node fills a cache, and two later ones begin with it: the first fetches it, the second copies it."""
    count = max(1, round(options.gib * 1024 * MIB / FILE_BYTES))
    taken: dict[str, list[float]] = {name: [] for name in ("plain", "ended", "written", "fetched", "copied", "cp")}
    empty, again = ("run", "--no-workdir", "--", "true"), ("run", "--no-workdir", "--cache", "filled", "--", "true")
    fill = ("--no-workdir", "--cache", "filled", "--", "sh", "-ec", FILL, "sh", str(count), str(FILE_BYTES))
    source, copy = on / "source", on / "copy"
    make_large(source, count)
    with Stack(2, directory=on / "stack", overrides={"process_engine_for": "all"}) as stack:
        stack.start_all()
        user = stack.nodes[0]
        mesh(user, "pause")
        for _ in range(options.rounds):
            taken["plain"].append(timed(lambda: told_by(user, *empty), on))
            job = told_by(user, "submit", *fill).strip()
            at = waited(partial(written_back, user, job), "the write-back")
            taken["ended"].append(at[1] - at[0])
            taken["written"].append(at[2] - at[1])
            for name in ("fetched", "copied"):
                touch_memory(options.gib, on)
                taken[name].append(timed(lambda: told_by(user, *again), on) - taken["plain"][-1])
            touch_memory(options.gib, on)
            taken["cp"].append(timed(lambda: run("cp", "-r", source, copy), on))
            shutil.rmtree(copy)
            mesh(user, "data", "rm", "filled")
    size = f"{options.gib:g} GiB"
    return [
        row(f"a job adds {size} to a cache: from its exit to its end", taken["ended"], "s", goal="-", met=None),
        row(f"from its end until {size} are in the cache", taken["written"], "s", goal="-", met=None),
        row(f"a job begins with {size} that its node fetches", taken["fetched"], "s", goal="-", met=None),
        row(
            f"a job begins with {size} that its node has",
            taken["copied"],
            "s",
            goal="-",
            met=None,
            peer="cp",
            peer_values=taken["cp"],
        ),
    ]


def written_back(node: StackNode, job: str) -> tuple[float, float, float] | None:
    """Return when a job's command had ended, when the job was over, and when what it added was in the cache."""
    told = mesh(node, "job", "events", job)["events"]
    found = {event["text"].partition(":")[0]: event["unix_ms"] / 1000 for event in reversed(told)}
    names = ("saving", "the job is over", "written back")
    return (found[names[0]], found[names[1]], found[names[2]]) if all(name in found for name in names) else None


def told_by(node: StackNode, *words: str) -> str:
    command = [sys.executable, "-m", "mesh.cli", "--state", str(node.where.root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def waited(look: Callable[[], Any], what: str, every_s: float = 0.5) -> Any:
    deadline = time.monotonic() + 600
    while not (found := look()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(every_s)
    return found


def until_told(node: StackNode, job: str) -> dict[str, Any]:
    """Wait for what the job prints after its last record."""

    def printed() -> dict[str, Any]:
        lines = told_by(node, "logs", job).splitlines()
        return dict(json.loads(lines[-1])) if lines else {}

    return dict(waited(printed, "the job"))


def times_of(node: StackNode, job: str) -> tuple[float, float]:
    """Return when a job's node began to fetch, and when it had all."""

    def events() -> tuple[float, float] | None:
        told = node.client.get("/v1/events?after=0")["events"]
        found = {event["text"]: event["unix_ms"] / 1000 for event in told if event["job"] == job}
        begun = [at for words, at in found.items() if "fetching its files" in words]
        whole = [at for words, at in found.items() if "is whole on this node" in words]
        return (begun[0], whole[0]) if begun and whole else None

    begun, whole = waited(events, "the whole data set")
    return begun, whole


def drop_once_free(node: StackNode) -> None:
    """Drop the data set here, once the job that was cancelled uses it no more."""

    def dropped() -> bool:
        with suppress(subprocess.CalledProcessError):
            mesh(node, "data", "rm", "--here", "set")
            return True
        return False

    waited(dropped, "the end of the job")


def touch_memory(gib: float, on: Path) -> None:
    """Write and remove as much as is fetched.

    A virtual machine may have returned free memory to its host, and the first program to write pays for getting it back. So
    each one begins with memory that was used a moment ago.
    """
    subprocess.run(["sync", "-f", on], check=True)
    with (on / "touched").open("wb") as file:
        for _ in range(round(1.25 * gib * 1024)):
            file.write(bytes(MIB))
    (on / "touched").unlink()


@contextmanager
def web_servers(source: Path) -> Iterator[list[str]]:
    """Serve a directory from as many processes as there are holders, without TLS; yield their addresses."""
    code = (
        "import socket, sys\nfrom aiohttp import web\napp = web.Application()\napp.router.add_static('/', sys.argv[1])\n"
        "listener = socket.create_server(('127.0.0.1', 0))\nprint(listener.getsockname()[1], flush=True)\n"
        "web.run_app(app, sock=listener, print=None)"
    )
    servers = [
        subprocess.Popen([sys.executable, "-c", code, source], stdout=subprocess.PIPE, text=True)
        for _ in range(HOLDERS)
    ]
    try:
        yield [
            f"http://127.0.0.1:{server.stdout.readline().strip()}" for server in servers if server.stdout is not None
        ]
    finally:
        for server in servers:
            server.terminate()
            server.wait()


def fetch_by_aria2c(source: Path, servers: list[str], on: Path) -> None:
    """Fetch each file from all servers at once, several files at a time."""
    (on / "files").write_text(
        "".join("\t".join(f"{one}/{path.name}" for one in servers) + "\n" for path in source.iterdir())
    )
    run("aria2c", "-q", "-i", on / "files", "-d", on / "copy", "-s", str(HOLDERS), "-j", "6", "--file-allocation=none")


def wait_known(node: StackNode, holders: int, name: str = "set") -> None:
    def known() -> bool:
        rows = mesh(node, "data", "ls")["data"]
        return any(found["name"].endswith(f"/{name}") and len(found["nodes"]) >= holders for found in rows)

    deadline = time.monotonic() + 60
    while not known():
        if time.monotonic() > deadline:
            raise SystemExit("the holders were not heard of")
        time.sleep(0.5)


def measure_memory(options: argparse.Namespace, on: Path) -> list[dict[str, Any]]:
    source = on / "sparse"
    with source.open("wb") as file:
        for at in range(0, options.sparse_gib << 30, 1 << 30):  # a chunk of data in each GiB
            file.seek(at)
            file.write(os.urandom(MIB))
        file.truncate(options.sparse_gib << 30)
    settle()
    with Stack(1, directory=on / "stack") as stack:
        stack.start_all()
        node = stack.nodes[0]
        assert node.process is not None
        before = peak_mib(node.process.pid)
        begun = time.perf_counter()
        mesh(node, "data", "add", "sparse", source)
        took, peak = time.perf_counter() - begun, peak_mib(node.process.pid)
    source.unlink()
    met = peak <= MEMORY_GOAL_MIB
    measure = f"peak memory of the daemon, adding {options.sparse_gib} GiB (sparse)"
    return [
        row(measure, [peak], "MiB", goal=f"<= {MEMORY_GOAL_MIB:g}", met=met, peer="before", peer_values=[before]),
        row(f"add {options.sparse_gib} GiB (sparse)", [took], "s", goal="-", met=None),
    ]


def peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("the daemon has ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of what is added and fetched")
    parser.add_argument("--files", type=int, default=10_000, help="number of small files")
    parser.add_argument("--sparse-gib", type=int, default=200)
    parser.add_argument(
        "--stream-mbps", type=float, default=0.0, help="what each holder sends at most while a job reads"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--on", type=Path, help="directory to work in (default: a temporary one)")
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part only; repeatable")
    parser.add_argument(
        PRIORITY, action="store_true", help="real-time priority while timed, where others work; needs root"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part in options.only or PARTS:
        with tempfile.TemporaryDirectory(dir=options.on) as name:
            try:
                rows += globals()[f"measure_{part}"](options, Path(name))
            except subprocess.CalledProcessError as error:
                rows.append(not_run(part, "", "-", f"{error.cmd[0]} failed with {error.returncode}"))
    write("data", rows, scale=f"{options.gib:g} GiB, {options.files} files")


if __name__ == "__main__":
    main()
