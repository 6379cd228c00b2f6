"""An environment made of packages from an index, and of those that another node has, on one machine and by real daemons.

Writes build/bench/environments.json. Needs uv. The index is on loopback: one that is farther away is slower, and the node is not.
"""

import argparse
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from mesh.daemon.stack import Stack, StackNode
from tests.bench.harness import interleave, row, save
from tests.e2e.commands import ok
from tests.wheels import Index, index

FILLER_BYTES = 40 << 20  # beside numpy (own choice)
MADE = "job in a new environment of numpy and a package of 40 MiB, from submission to its end"


def clear(node: StackNode) -> None:
    """Remove all environments and packages of a node that runs."""
    for place in node.where.environments.iterdir():
        if place.name not in {"packages", "scratch"}:
            shutil.rmtree(place)
    for path in (node.where.environments / "packages" / "blobs").iterdir():
        path.unlink()


def measure(served: Index, directory: Path, rounds: int) -> list[dict[str, Any]]:
    served.offer_installed(Path(sysconfig.get_path("purelib")), "numpy")
    work = served.project(directory / "work", "numpy")
    sizes = [wheel.stat().st_size for wheel in served.wheels.parent.rglob("*.whl")]
    with Stack(2, overrides={"uv_index": served.address}) as stack:
        stack.start_all()
        first, second = stack.nodes

        def run(node: StackNode) -> None:
            ok(first, "run", "--uv", "--on", node.nick, "--", "python", "train.py", cwd=work)

        taken: dict[str, list[float]] = {"mesh": [], "index": []}
        for number in range(1 + rounds):
            for name, times in taken.items():
                clear(first)
                clear(second)
                if name == "mesh":
                    run(first)
                served.paths.clear()
                (seconds,) = interleave({name: lambda: run(second)}, 1, warmup=0)[name]
                assert bool(served.paths) == (name == "index"), served.paths
                if number:
                    times.append(seconds)
    about = f"{MADE} ({sum(sizes) >> 20} MiB of wheels)"
    return [row(about, taken["mesh"], "s", goal="", met=None, peer="an index on loopback", peer_values=taken["index"])]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    with tempfile.TemporaryDirectory() as directory, index(Path(directory), filler=FILLER_BYTES) as served:
        rows = measure(served, Path(directory), options.parse_args().rounds)
    print(save("environments", rows).read_text())


if __name__ == "__main__":
    main()
