"""One save or restore of the store as its own command, to time it beside other tools. Prints the peak memory in KiB.

keep.py save|raw|sealed|restore|unseal STORE NUMBER DIRECTORY    `sealed` encrypts, `unseal` restores what it saved
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ckptstore.cipher import StateCipher
from ckptstore.store import Store

JOB = b"benchmark's job."
CIPHER = StateCipher(b"the key of the benchmark's job..")


def main() -> None:
    order, root, number, directory = sys.argv[1:]
    store = Store(Path(root), lambda sealed: (b"", sealed))
    try:
        keep(store, order, int(number), Path(directory))
    finally:
        store.close()
    print(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line).split()[1])


def keep(store: Store, order: str, number: int, directory: Path) -> None:
    known = {info.seq: info.id for info in store.manifests(JOB)}
    cipher = CIPHER if order in {"sealed", "unseal"} else None
    if order in {"restore", "unseal"}:
        store.restore(known[number], directory, prefix="ckpt", cipher=cipher)
        return
    store.save(
        {"ckpt": directory},
        job=JOB,
        config=0,
        term=1,
        seq=number,
        parent=known.get(number - 1),
        kind="checkpoint",
        created_unix=0,
        seal=lambda payload: payload,
        compress=order != "raw",
        cipher=cipher,
    )


if __name__ == "__main__":
    main()
