"""The checkpoint store beside backup and copy tools: size of a second checkpoint, times to save and restore.

`--rounds` of each; `--cases` of checkpoints.py; `--on` the directories to work in (a tmpfs and a disk). `--torch`, a Python
that has torch, makes the checkpoints first, unless they are in `--data`. Peers are restic, borgbackup, casync, rsync and zstd
from Debian; the report names those that are not installed. In each round, every tool starts with an empty store, saves the
first checkpoint, saves the second one (timed), and restores it (timed) with a comparison of all bytes. The rows of streams.py,
wire.py and snapshot.py, which also run alone, come last.
"""

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from ckptstore.store import Store  # noqa: E402
from tests.bench import snapshot, streams, wire  # noqa: E402
from tests.bench.harness import not_run, row, write  # noqa: E402
from tests.bench.keep import keep  # noqa: E402
from tests.ckptstore.test_crash_states import play  # noqa: E402
from tests.ckptstore.worlds import CIPHER  # noqa: E402

CASES = ("full", "froz", "emb", "lora")
KEEP = [sys.executable, str(Path(__file__).parent / "keep.py")]
QUIET = {
    "RESTIC_PASSWORD": "benchmark",
    "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
    "BORG_RELOCATED_REPO_ACCESS_IS_OK": "yes",
}

Taken = dict[str, dict[str, list[float]]]  # tool -> bytes, save, restore -> each round


def run(*arguments: str | Path, cwd: Path | None = None, home: Path) -> None:
    env = {**os.environ, **QUIET, "XDG_CACHE_HOME": str(home / "cache"), "BORG_BASE_DIR": str(home / "borg")}
    done = subprocess.run([str(a) for a in arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(str(a) for a in arguments)}: {done.returncode}\n{done.stderr[-2000:]}")


class Tool:
    """A tool to measure. `save` stores checkpoint 1 or 2; `restore` writes the second one to `out/model.pt`."""

    needs = ""

    def __init__(self, home: Path) -> None:
        self.home, self.repository, self.out = home, home / "repository", home / "out"

    def begin(self) -> None:
        self.repository.mkdir(parents=True)

    def save(self, number: int, directory: Path) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def run(self, *arguments: str | Path, cwd: Path | None = None) -> None:
        run(*arguments, cwd=cwd, home=self.home)


class Ours(Tool):
    order, back = "save", "restore"

    def save(self, number: int, directory: Path) -> None:
        self.run(*KEEP, self.order, self.repository, str(number), directory)

    def restore(self) -> None:
        self.run(*KEEP, self.back, self.repository, "2", self.out)


class OursRaw(Ours):
    order = "raw"


class OursSealed(Ours):
    order, back = "sealed", "unseal"


class OursInside(Tool):
    """The store as the daemon uses it: open, without starting a process."""

    def begin(self) -> None:
        super().begin()
        self.store = Store(self.repository, lambda sealed: (b"", sealed))

    def save(self, number: int, directory: Path) -> None:
        keep(self.store, "raw", number, directory)

    def restore(self) -> None:
        keep(self.store, "restore", 2, self.out)
        self.store.close()


class Copy(Tool):
    needs = "cp"

    def save(self, number: int, directory: Path) -> None:
        self.run("sh", "-c", f"cp -r '{directory}' '{self.repository / str(number)}' && sync -f '{self.repository}'")

    def restore(self) -> None:
        self.run("cp", "-r", self.repository / "2", self.out)


class Rsync(Tool):
    needs = "rsync"

    def save(self, number: int, directory: Path) -> None:
        self.run("rsync", "-rI", "--no-whole-file", f"{directory}/", f"{self.repository}/")

    def restore(self) -> None:
        self.run("rsync", "-rIW", f"{self.repository}/", f"{self.out}/")


class Restic(Tool):
    needs = "restic"

    def begin(self) -> None:
        self.run("restic", "init", "-r", self.repository, "--repository-version", "2")

    def save(self, number: int, directory: Path) -> None:
        self.run("restic", "backup", "-r", self.repository, "--tag", str(number), ".", cwd=directory)

    def restore(self) -> None:
        self.run("restic", "restore", "-r", self.repository, "--tag", "2", "latest", "--target", self.out)


class Borg(Tool):
    needs = "borg"
    options: tuple[str, ...] = ("--compression", "zstd,1")

    def begin(self) -> None:
        self.run("borg", "init", "-e", "none", self.repository)

    def save(self, number: int, directory: Path) -> None:
        self.run("borg", "create", *self.options, f"{self.repository}::{number}", ".", cwd=directory)

    def restore(self) -> None:
        self.out.mkdir()
        self.run("borg", "extract", f"{self.repository}::2", cwd=self.out)


class BorgFixed(Borg):
    options = ("--compression", "none", "--chunker-params", "fixed,4194304")


class Casync(Tool):
    needs = "casync"

    def save(self, number: int, directory: Path) -> None:
        store = self.repository / "store"
        self.run("casync", "make", f"--store={store}", self.repository / f"{number}.catar.caidx", directory)

    def restore(self) -> None:
        store = self.repository / "store"
        self.run("casync", "extract", f"--store={store}", self.repository / "2.catar.caidx", self.out)


class Zstd(Tool):
    needs = "zstd"

    def save(self, number: int, directory: Path) -> None:
        source, target = directory / "model.pt", self.repository / f"{number}.zst"
        former = ["--patch-from", str(directory.parent / "1" / "model.pt")] if number == 2 else []
        self.run("zstd", "-q", "-1", "--long=30", "-T2", *former, source, "-o", target)
        self.former = directory.parent / "1" / "model.pt"

    def restore(self) -> None:
        self.out.mkdir()
        patch, target = self.repository / "2.zst", self.out / "model.pt"
        self.run("zstd", "-q", "-d", "--long=30", "--patch-from", self.former, patch, "-o", target)


TOOLS: dict[str, type[Tool]] = {
    "ours": Ours,
    "ours, sealed": OursSealed,
    "ours, raw": OursRaw,
    "ours, raw, in the daemon": OursInside,
    "cp + sync": Copy,
    "rsync delta": Rsync,
    "restic": Restic,
    "borg zstd": Borg,
    "borg fixed": BorgFixed,
    "casync": Casync,
    "zstd --patch-from": Zstd,
}


def stored(tool: Tool) -> int:
    return sum(path.stat().st_size for path in tool.repository.rglob("*") if path.is_file())


def one_round(tool: Tool, data: Path, taken: dict[str, list[float]]) -> None:
    shutil.rmtree(tool.home, ignore_errors=True)
    tool.home.mkdir(parents=True)
    tool.begin()
    tool.save(1, data / "1")
    before = stored(tool)
    os.sync()
    taken["save"].append(timed(lambda: tool.save(2, data / "2")))
    # rsync stores one copy, so the bytes it sent differ from the bytes stored.
    taken["bytes"].append(stored(tool) - before)
    os.sync()
    taken["restore"].append(timed(tool.restore))
    (back,) = tool.out.rglob("model.pt")
    if not filecmp.cmp(back, data / "2" / "model.pt", shallow=False):
        raise SystemExit(f"{type(tool).__name__} restored other bytes")
    shutil.rmtree(tool.home)


def timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(place: Path, data: Path, cases: list[str], rounds: int) -> dict[str, Taken]:
    found: dict[str, Taken] = {}
    for case in cases:
        here = place / "data" / case
        shutil.copytree(data / case, here)
        taken: Taken = defaultdict(lambda: defaultdict(list))
        for number in range(rounds):
            names = [name for name, tool in TOOLS.items() if not tool.needs or shutil.which(tool.needs)]
            for name in names if number % 2 == 0 else reversed(names):
                one_round(TOOLS[name](place / "tool"), here, taken[name])
                print(f"{place} {case} {name}: { {k: round(v[-1], 3) for k, v in taken[name].items()} }", flush=True)
        found[case] = taken
        shutil.rmtree(here)
    return found


SHOWN = [  # the cost of encryption, without a goal
    ("save of checkpoint 2, encrypted, with the command's start", "full", "ours, sealed", "save", "ours"),
    ("verified restore, delta, encrypted", "full", "ours, sealed", "restore", "ours"),
]

GOALS = [  # measure, case, subject, value, peers (the best counts), factor of the goal
    ("bytes of checkpoint 2", "full", "ours", "bytes", ("borg zstd", "restic", "casync"), 0.84),
    ("bytes of checkpoint 2", "froz", "ours", "bytes", ("casync",), 0.85),
    ("bytes of checkpoint 2", "emb", "ours", "bytes", ("borg zstd", "restic", "casync"), 0.07),
    ("bytes of checkpoint 2", "emb", "ours", "bytes", ("zstd --patch-from",), 0.80),
    ("bytes of checkpoint 2", "lora", "ours", "bytes", ("casync",), 0.1),
    ("save of checkpoint 2, with the command's start", "full", "ours", "save", ("borg fixed",), 0.9),
    ("save of checkpoint 2, with the command's start", "froz", "ours", "save", ("borg fixed",), 0.6),
    ("save of checkpoint 2, with the command's start", "emb", "ours", "save", ("borg fixed",), 0.6),
    ("save raw, in the daemon", "full", "ours, raw, in the daemon", "save", ("cp + sync",), 1.4),
    ("verified restore, raw", "full", "ours, raw", "restore", ("borg zstd", "borg fixed"), 0.5),
    ("verified restore, delta", "full", "ours", "restore", ("borg zstd", "borg fixed"), 1.0),
]


MOST_MB = 200.0  # of memory, for a save or a restore of any size


def memory(place: Path, data: Path) -> list[dict[str, Any]]:
    """Return the peak memory of each command, for a checkpoint that is much larger."""
    if not (data / "full").exists():
        return []
    store, rows = place / "memory" / "store", []
    store.mkdir(parents=True)
    for what, *arguments in (
        ("of the first save", "sealed", store, "1", data / "full" / "1"),
        ("of a save with differences, encrypted", "sealed", store, "2", data / "full" / "2"),
        ("of a verified restore", "unseal", store, "2", place / "memory" / "out"),
    ):
        done = subprocess.run([*KEEP, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True)
        peak = int(done.stdout) * 1024 / 1e6
        rows.append(row(f"peak memory {what}", [peak], "MB", goal=f"<= {MOST_MB:g}", met=peak <= MOST_MB))
    shutil.rmtree(place / "memory")
    return rows


def crashes(place: Path) -> list[dict[str, Any]]:
    """Check every state that a crash can leave in a store; the first wrong one ends the benchmark."""
    states = [play(place / name, cipher) for name, cipher in (("open", None), ("sealed", CIPHER))]
    rows = [row("crash states that satisfy I1 to I8", [100.0], "%", goal="100 %", met=True)]
    rows[0]["n"] = sum(states)
    return rows


def report(found: dict[str, Taken], where: str) -> list[dict[str, Any]]:
    rows = []
    for what, case, mine, key, peers, times in GOALS:
        taken = found.get(case, {})
        name = f"{what}: {case}, on {where}"
        unit = "MB" if key == "bytes" else "s"
        scale = 1e6 if key == "bytes" else 1.0
        there = [peer for peer in peers if taken.get(peer)]
        goal = f"<= {times} x {' or '.join(peers)}"
        if not taken or not there:
            rows.append(not_run(name, unit, goal, "left out" if not taken else f"not installed: {', '.join(peers)}"))
            continue
        best = min(there, key=lambda peer: median(taken[peer][key]))
        ours, theirs = ([value / scale for value in taken[who][key]] for who in (mine, best))
        met = median(ours) <= times * median(theirs)
        rows.append(row(name, ours, unit, goal=goal, met=met, peer=best, peer_values=theirs))
    for what, case, mine, key, other in SHOWN:
        taken = found.get(case, {})
        if taken.get(mine) and taken.get(other):
            name = f"{what}: {case}, on {where}"
            rows.append(row(name, taken[mine][key], "s", goal="", met=None, peer=other, peer_values=taken[other][key]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--on", nargs="+", default=["/dev/shm", "/var/tmp"])
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "checkpoints")
    parser.add_argument("--torch", default=str(ROOT / ".venv-frameworks" / "bin" / "python"))
    options = parser.parse_args()
    for case in {*options.cases, streams.CASE}:
        streams.make(options.torch, options.data, case)
    rows: list[dict[str, Any]] = []
    for place in options.on:
        home = Path(place) / f"bench-ckptstore-{os.getpid()}"
        try:
            rows += report(measure(home, options.data, options.cases, options.rounds), place)
            if place == options.on[0]:
                rows += memory(home, options.data) + crashes(home)
        finally:
            shutil.rmtree(home, ignore_errors=True)
    rows += streams.rows(options.data, options.on, options.rounds)
    rows += snapshot.rows(options.torch, Path(options.on[-1]), options.rounds)
    rows += wire.rows(Path(options.on[0]))
    write("ckptstore", rows)


if __name__ == "__main__":
    main()
