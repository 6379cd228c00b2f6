"""Observer of one job on a private mesh: the nodes' answers about it, and the files in their directories.

The job needs no change: its steps are read where the mesh reads them, only more often, and checkpoints are compared by the
digests in their manifests.
"""

import hashlib
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from mesh.consensus.contract import decode_progress
from mesh.daemon.stack import Stack
from mesh.rehearsal.observations import Attempt, Checkpoint, Departure, DirectoryState, Entry, Run

STATE_S = 0.2  # between two calls to the nodes
TREES_S = 0.25  # between two scans of checkpoints, as in mesh/jobs/attempt.py
STRAYS_S = 1.0
FILES_SCANNED = 2000  # per directory: data sets are not scanned whole
STRAYS_TOLD = 5
LINES_KEPT = 200
NOT_STORED = "checkpoint not stored: "

Tree = dict[str, tuple[int, int]]  # size and time of each file below an entry; "" is the entry itself


class _AttemptFiles:
    """The files of one attempt on one node, while they exist."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.steps: list[tuple[float, int]] = []
        self.entries: dict[str, float] = {}  # when each was last written
        self.trees: dict[str, tuple[int, Tree]] = {}
        self.unfinished: tuple[str, ...] = ()


class Observer:
    def __init__(self, stack: Stack, job: str, mesh_id: bytes, mode: str) -> None:
        self._stack, self.job, self._mesh_id, self._mode = stack, job, mesh_id, mode
        self.state: dict[str, Any] = {}
        self.torn: dict[str, None] = {}
        self._files: dict[int, _AttemptFiles] = {}
        self._commits: dict[str, tuple[int, Checkpoint]] = {}  # with the term each was made under
        self._attempts: dict[int, dict[str, Any]] = {}
        self._directory_state = DirectoryState()
        self._due = {"state": 0.0, "trees": 0.0, "outside": 0.0}

    # --- reading

    def poll(self) -> None:
        """Read what is new. Cheap enough for twenty calls a second."""
        for node in self._stack.nodes:
            with suppress(OSError):
                for base in (node.where.jobs / self.job).iterdir():
                    if base.name.isdigit():
                        self._files.setdefault(int(base.name), _AttemptFiles(base))
        trees = self._is_due("trees", TREES_S)
        for seen in self._files.values():
            self._read_step(seen)
            with suppress(OSError):
                self._read_entries(seen, trees)
        if self._is_due("state", STATE_S):
            self._read_state()
        if not self._commits and self._is_due("outside", STRAYS_S):
            self._read_outside()

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        due = now >= self._due[what]
        if due:
            self._due[what] = now + every_s
        return due

    def _read_state(self) -> None:
        self.state = self._stack.job(self.job) or self.state
        self._attempts |= {attempt["number"]: attempt for attempt in self.state.get("attempts", [])}
        detail = str(self.state.get("detail", ""))
        if detail.startswith(NOT_STORED):
            self._directory_state = msgspec.structs.replace(
                self._directory_state, trouble=detail.removeprefix(NOT_STORED)
            )
        commit = self.state.get("checkpoint")
        if commit is not None and commit["manifest"] not in self._commits:
            self._read_manifest(commit)

    @staticmethod
    def _read_step(seen: _AttemptFiles) -> None:
        path = seen.base / "ctl" / "progress.json"
        try:
            at, progress = path.stat().st_mtime, decode_progress(path.read_bytes())
        except OSError:
            return
        if progress is not None and (not seen.steps or seen.steps[-1][1] != progress.step):
            seen.steps.append((at, progress.step))

    def _read_entries(self, seen: _AttemptFiles, trees: bool) -> None:
        from mesh.checkpoints.commit_modes import MARKER, unfinished

        waiting = []
        for path in (seen.base / "ckpt").iterdir():
            if unfinished(path.name):
                waiting.append(path.name)
                continue
            with suppress(OSError):  # the job may prune meanwhile, and make a loop of links
                info = path.stat()
                seen.entries[path.name] = max(info.st_mtime, seen.entries.get(path.name, 0.0))
                if trees:
                    tree = _tree(path)
                    newest = max((time_ns for _, time_ns in tree.values()), default=0) / 1e9
                    seen.entries[path.name] = max(newest, seen.entries[path.name])
                    complete = self._mode == "rename" or (self._mode == "marker" and MARKER in tree)
                    inode, before = seen.trees.get(path.name, (0, {}))
                    if inode == info.st_ino and any(before.get(file) != now for file, now in tree.items() if file):
                        self.torn[path.name] = None
                    if complete:
                        seen.trees[path.name] = (info.st_ino, tree)
        seen.unfinished = tuple(sorted(waiting))

    def _read_outside(self) -> None:
        """Read the checkpoint directory, and files outside of it, while no checkpoint is committed."""
        if not self._files:
            return
        from mesh.checkpoints.commit_modes import MARKER, look_at, open_for_writing, unfinished

        seen = self._files[max(self._files)]
        begun, now = self._running_unix(max(self._files)), time.time()
        entries = []
        with suppress(OSError):
            for path in sorted((seen.base / "ckpt").iterdir()):
                tree = _tree(path)
                newest = max((time_ns for _, time_ns in tree.values()), default=0) / 1e9
                final = not unfinished(path.name)
                entries.append(Entry(path.name, final, MARKER in tree, now - newest))
        outside: list[tuple[str, int]] = []
        with suppress(OSError):
            found = _tree(seen.base / "work").items()
            outside = [(name, size) for name, (size, time_ns) in found if name and begun and time_ns / 1e9 > begun]
        if entries or outside or not self._directory_state.entries:
            largest = sorted(outside, key=lambda stray: -stray[1])[:STRAYS_TOLD] or self._directory_state.outside
            entries, opened = entries or list(self._directory_state.entries), self._directory_state.open
            with suppress(OSError):  # the job may delete files meanwhile
                opened = open_for_writing(seen.base / "ckpt", look_at(seen.base / "ckpt").values())
            self._directory_state = DirectoryState(
                tuple(entries), opened, tuple(largest), self._directory_state.trouble
            )

    def _running_unix(self, term: int) -> float:
        found = [attempt["running_unix_ms"] for attempt in self.attempts if attempt["term"] == term]
        return found[0] / 1000 if found else 0.0

    # --- checkpoints

    def _read_manifest(self, commit: dict[str, Any]) -> None:
        from ckptstore.manifest import decode_manifest
        from membership.envelope import open_envelope

        for node in self._stack.nodes:
            try:
                sealed = (node.where.store / "manifests" / commit["manifest"]).read_bytes()
            except OSError:
                continue
            _, manifest = decode_manifest(sealed, lambda data: open_envelope(data, self._mesh_id, "manifest"))
            tree = manifest.open()  # the private mesh does not encrypt, so that equal files have equal digests
            files = {
                entry.path.removeprefix("ckpt/"): hashlib.blake2b(
                    b"".join(manifest.content(entry)), digest_size=16
                ).hexdigest()
                + (f" -> {entry.target}" if entry.target is not None else "")
                for entry in tree.files
                if entry.path.startswith("ckpt/") and not stat.S_ISDIR(entry.mode)
            }
            resume, committed = tree.note.get("resume", ""), commit["created_unix_ms"] / 1000
            seen = self._files.get(manifest.term)
            written = committed
            if seen is not None:
                times = seen.entries.values() if not resume else [seen.entries.get(resume, committed)]
                written = min(max(times, default=committed), committed)
            whole = f"ckpt/{resume}".rstrip("/")
            size = sum(e.size for e in tree.files if e.path == whole or e.path.startswith(f"{whole}/"))
            self._commits[commit["manifest"]] = (
                manifest.term,
                Checkpoint(commit["seq"], -1, committed, written, size, resume, files),
            )
            return

    def commits(self, number: int) -> int:
        """Return the number of checkpoints committed since an attempt began, including those between two polls."""
        seqs = [checkpoint.seq for checkpoint in self.checkpoints() if checkpoint.attempt >= number]
        before = [checkpoint.seq for checkpoint in self.checkpoints() if checkpoint.attempt < number]
        return max(seqs) - max(before, default=0) if seqs else 0

    def checkpoints(self) -> list[Checkpoint]:
        numbers = {attempt["term"]: attempt["number"] for attempt in self.attempts}
        return [
            msgspec.structs.replace(checkpoint, attempt=numbers[term])
            for term, checkpoint in self._commits.values()
            if term in numbers
        ]

    # --- answers

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Return all attempts; the nodes list only the last few."""
        return [self._attempts[number] for number in sorted(self._attempts)]

    @property
    def over(self) -> bool:
        return self.state.get("outcome") is not None

    def running(self, number: int) -> dict[str, Any] | None:
        """Return the attempt that runs now, if it is this or a later one: a job may ask to be run again."""
        found = [a for a in self.attempts if a["number"] >= number and a["running_unix_ms"] and not a["reason"]]
        return found[-1] if found and self.state["state"] == "running" else None

    def started(self, number: int) -> dict[str, Any] | None:
        """Return an attempt if its guest runs or has run."""
        attempt = self._attempts.get(number)
        return attempt if attempt is not None and attempt["running_unix_ms"] else None

    def unfinished(self, number: int) -> tuple[str, ...]:
        """Return the unfinished entries of an attempt's checkpoint directory at the last poll."""
        terms = [attempt["term"] for attempt in self.attempts if attempt["number"] == number]
        return self._files[terms[0]].unfinished if terms and terms[0] in self._files else ()

    def directory_state(self) -> DirectoryState:
        return self._directory_state

    def run(
        self, noticed: Departure | None = None, sudden: Departure | None = None, published: dict[str, str] | None = None
    ) -> Run:
        """Return all observations so far."""
        outcome = self.state.get("outcome") or {}
        return Run(
            attempts=tuple(self._attempt(attempt) for attempt in self.attempts),
            checkpoints=tuple(self.checkpoints()),
            noticed=noticed,
            sudden=sudden,
            outcome=outcome.get("kind", ""),
            detail=str(outcome.get("detail") or self.state.get("detail", "")),
            exit_code=outcome.get("exit_code"),
            published=published,
            torn=tuple(self.torn),
        )

    def _attempt(self, attempt: dict[str, Any]) -> Attempt:
        seen = self._files.get(attempt["term"])
        running = attempt["running_unix_ms"] / 1000
        entries = sorted(seen.entries.items(), key=lambda item: item[1]) if seen is not None else []
        return Attempt(
            number=attempt["number"],
            node=attempt["node"],
            running_unix=running,
            ended_unix=attempt["ended_unix_ms"] / 1000,
            exit_code=attempt["exit_code"],
            reason=attempt["reason"],
            steps=tuple(seen.steps) if seen is not None else (),
            written=tuple(name for name, written in entries if written > running),
            output=self._output(attempt["node"], attempt["number"]),
        )

    def _output(self, nick: str, number: int) -> tuple[str, ...]:
        path = self._stack.node(nick).where.logs / self.job / f"{number:03d}.txt"
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            return ()
        return tuple(lines if len(lines) <= 2 * LINES_KEPT else lines[:LINES_KEPT] + lines[-LINES_KEPT:])


def _tree(path: Path) -> Tree:
    """Return size and time of the files below; of the first two thousand, if there are more."""
    info = path.lstat()
    found: Tree = {"": (info.st_size, info.st_mtime_ns)}
    for parent, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                file = Path(parent) / name
                info = file.lstat()
                found[file.relative_to(path).as_posix()] = (info.st_size, info.st_mtime_ns)
        if len(found) > FILES_SCANNED:
            break
    if not path.is_dir():
        found[path.name] = found[""]
    return found
