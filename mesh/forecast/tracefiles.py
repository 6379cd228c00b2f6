"""Traces of who came and went, from files of any form that `placement` can read, and from a node's own journal."""

import gzip
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Literal

from placement import logins, traces
from placement.stays import Trace, TraceError, of_lent, together

Form = Literal["swf-nodes", "spot-json", "fta", "last", "wtmp", "journal"]
FORMS: tuple[Form, ...] = ("swf-nodes", "spot-json", "fta", "last", "wtmp", "journal")
LARGEST = 512 << 20
SQLITES_OWN = ("-wal", "-shm", "-journal")  # beside a database that is in use


def files_of(paths: Sequence[Path]) -> list[Path]:
    """A directory stands for the files in it; TraceError if there is none."""
    files: list[Path] = []
    for path in paths:
        inside = path.iterdir() if path.is_dir() else ()
        files += sorted(child for child in inside if child.is_file() and not child.name.endswith(SQLITES_OWN))
        files += [] if path.is_dir() else [path]
    if not files:
        raise TraceError("there is no file in it")
    return files


def read_traces(files: Sequence[Path], form: Form, utc_offset_s: float) -> Trace:
    """One trace of all these files; TraceError for what is no such trace, OSError for what cannot be read."""
    return together([_read(path, form, utc_offset_s) for path in files])


def _read(path: Path, form: Form, utc_offset_s: float) -> Trace:
    try:
        if form == "journal":
            return _own(path)
        if path.stat().st_size > LARGEST:
            raise TraceError(f"larger than {LARGEST >> 20} MiB: cut it into parts")
        data = _unpacked(path.read_bytes())
        if form == "wtmp":
            return logins.read_wtmp(data, path.stem)
        text = data.decode("utf-8-sig", errors="replace")
        if form == "last":
            return logins.read_last(text, path.stem, utc_offset_s)
        if form == "spot-json":
            return traces.read_availability(text, path.stem)
        return traces.read_fta(text) if form == "fta" else traces.read_nodes(text)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def _unpacked(data: bytes) -> bytes:
    """The file in it, if it was packed by gzip, as archives of workloads have them."""
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.GzipFile(fileobj=BytesIO(data)) as packed:
            unpacked = packed.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"it is packed by gzip, and broken: {error}") from error
    if len(unpacked) > LARGEST:
        raise TraceError(f"larger than {LARGEST >> 20} MiB when it is unpacked: cut it into parts")
    return unpacked


def _own(path: Path) -> Trace:
    """The stays in a node's journal (journal.sqlite), which may be in use."""
    path.stat()
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute("SELECT start_ms, end_ms FROM stays WHERE start_ms <= end_ms").fetchall()
    except sqlite3.Error as error:
        raise TraceError(f"it is no journal of a node: {error}") from error
    if not rows:
        raise TraceError("it has no stays yet")
    spans = [(start / 1000, end / 1000) for start, end in rows]
    name = path.stem if path.stem != "journal" else path.resolve().parent.name
    return of_lent({name: spans}, spans[0][0], max(end for _, end in spans))
