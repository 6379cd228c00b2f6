"""Availability traces from files in any format that `placement` reads, and from a node's own journal."""

import gzip
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Literal

from placement import logins, traces
from placement.availability import Trace, TraceError, merge, trace_of_lent

Form = Literal["swf-nodes", "spot-json", "fta", "last", "wtmp", "journal"]
LARGEST = 512 << 20
SQLITES_OWN = ("-wal", "-shm", "-journal")  # beside a database that is in use


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and those in the directories. Raises TraceError if there is none."""
    files: list[Path] = []
    for path in paths:
        inside = path.iterdir() if path.is_dir() else ()
        files += sorted(child for child in inside if child.is_file() and not child.name.endswith(SQLITES_OWN))
        files += [] if path.is_dir() else [path]
    if not files:
        raise TraceError("the directory has no files")
    return files


def read_traces(files: Sequence[Path], form: Form, utc_offset_s: float) -> Trace:
    """Read the files as one trace. Raises TraceError for an invalid trace, OSError for a file that cannot be read."""
    return merge([_read(path, form, utc_offset_s) for path in files])


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
    """Return the data, unpacked if it is in gzip format, as in workload archives."""
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.GzipFile(fileobj=BytesIO(data)) as packed:
            unpacked = packed.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"not a valid gzip file: {error}") from error
    if len(unpacked) > LARGEST:
        raise TraceError(f"larger than {LARGEST >> 20} MiB unpacked: cut it into parts")
    return unpacked


def _own(path: Path) -> Trace:
    """Read the stays in a node's journal (journal.sqlite), which may be in use."""
    path.stat()
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute("SELECT start_ms, end_ms FROM stays WHERE start_ms <= end_ms").fetchall()
    except sqlite3.Error as error:
        raise TraceError(f"not a node's journal: {error}") from error
    if not rows:
        raise TraceError("the journal has no stays yet")
    spans = [(start / 1000, end / 1000) for start, end in rows]
    name = path.stem if path.stem != "journal" else path.resolve().parent.name
    return trace_of_lent({name: spans}, spans[0][0], max(end for _, end in spans))
