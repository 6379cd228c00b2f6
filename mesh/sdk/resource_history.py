"""History of resource needs: `gpus="auto"` requests what earlier runs of the same code needed (future work of GPUnion)."""

import sqlite3
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

KEPT = 20  # runs of one code; older ones say little (own choice)
MARGIN = 1.2  # times the observed maximum: the next arguments may be larger (own choice)
BUSY_S = 5.0  # for another process that writes

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    code TEXT NOT NULL, unix_ms INTEGER NOT NULL, job TEXT NOT NULL UNIQUE, vram_mib INTEGER, ran_s REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS of_code ON runs (code, unix_ms);
"""


class Needs(NamedTuple):
    """Needs of earlier runs. `vram_mib`: their maximum on one GPU, None if not measured; `ran_s`: their median."""

    runs: int
    vram_mib: int | None
    ran_s: float | None

    def gpu_terms(self) -> dict[str, int]:
        """Return the request: a GPU with this much memory and a margin; a whole GPU while nothing is known."""
        return {"gpus": 1} if not self.vram_mib else {"gpus": 1, "vram": round(self.vram_mib * MARGIN)}


class NeedsTable:
    """A table in the state directory. Each call opens it, because several programs may submit at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def learn(self, code: str, job: str, vram_mib: int | None, ran_s: float) -> None:
        """Store the needs of a successful run."""
        with closing(self._open()) as db, db:
            row = (code, time.time_ns() // 1_000_000, job, vram_mib, ran_s)
            db.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?, ?)", row)
            old = "SELECT rowid FROM runs WHERE code = ? ORDER BY unix_ms DESC LIMIT -1 OFFSET ?"
            db.execute(f"DELETE FROM runs WHERE rowid IN ({old})", (code, KEPT))

    def of(self, code: str) -> Needs:
        if not self._path.exists():
            return Needs(0, None, None)
        with closing(self._open()) as db:
            rows = db.execute("SELECT vram_mib, ran_s FROM runs WHERE code = ?", (code,)).fetchall()
        peaks = [vram_mib for vram_mib, _ in rows if vram_mib is not None]
        return Needs(
            len(rows), max(peaks, default=None), statistics.median(ran_s for _, ran_s in rows) if rows else None
        )

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=BUSY_S)
        db.executescript(_SCHEMA)
        return db


def code_hash(function: Any, *around: str) -> str:
    """Return a digest of a function's code, without its arguments. `around`: other inputs, such as the image."""
    function = getattr(function, "func", function)  # of functools.partial
    code = getattr(function if hasattr(function, "__code__") else type(function).__call__, "__code__", None)
    parts = [*around, getattr(function, "__qualname__", type(function).__qualname__)]
    parts += _parts(code) if code is not None else []
    return blake2b("\0".join(parts).encode(errors="replace"), digest_size=16).hexdigest()


def _parts(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield from (repr(names) for names in (code.co_names, code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
        elif not isinstance(constant, frozenset):  # their order differs between processes
            yield repr(constant)
