"""One job on a private mesh, watched from outside: what the nodes say of it, and what lies in their directories.

Nothing is asked of the job. Its steps are read where the mesh reads them, only oftener; checkpoints are told apart by the
digests that their manifests hold.
"""

import hashlib
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from mesh.jobs.contract import decode_progress
from mesh.rehearsal.facts import Attempt, Checkpoint, Departure, Entry, Play, Sight
from mesh.stack import Stack

STATE_S = 0.2  # between two questions to the nodes
TREES_S = 0.25  # between two looks into checkpoints; the mesh's own pace (mesh/jobs/attempt.py)
STRAYS_S = 1.0
FILES_LOOKED_AT = 2000  # of one directory; a data set need not be read through
STRAYS_TOLD = 5
LINES_KEPT = 200
NOT_STORED = "checkpoint not stored: "

Tree = dict[str, tuple[int, int]]  # size and time of each file below an entry, "" being itself


class _Stay:
    """One attempt's directory on one node, for as long as it is there."""

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
        self._stays: dict[int, _Stay] = {}
        self._commits: dict[str, tuple[int, Checkpoint]] = {}  # with the term each was made under
        self._attempts: dict[int, dict[str, Any]] = {}
        self._sight = Sight()
        self._due = {"state": 0.0, "trees": 0.0, "strays": 0.0}

    # --- looking

    def look(self) -> None:
        """Take in what is new; cheap enough to be called twenty times a second."""
        for node in self._stack.nodes:
            with suppress(OSError):
                for base in (node.where.jobs / self.job).iterdir():
                    if base.name.isdigit():
                        self._stays.setdefault(int(base.name), _Stay(base))
        trees = self._is_due("trees", TREES_S)
        for stay in self._stays.values():
            self._look_at_step(stay)
            with suppress(OSError):
                self._look_at_entries(stay, trees)
        if self._is_due("state", STATE_S):
            self._ask()
        if not self._commits and self._is_due("strays", STRAYS_S):
            self._look_around()

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        due = now >= self._due[what]
        if due:
            self._due[what] = now + every_s
        return due

    def _ask(self) -> None:
        self.state = self._stack.job(self.job) or self.state
        self._attempts |= {attempt["number"]: attempt for attempt in self.state.get("attempts", [])}
        detail = str(self.state.get("detail", ""))
        if detail.startswith(NOT_STORED):
            self._sight = msgspec.structs.replace(self._sight, trouble=detail.removeprefix(NOT_STORED))
        commit = self.state.get("checkpoint")
        if commit is not None and commit["manifest"] not in self._commits:
            self._read_manifest(commit)

    @staticmethod
    def _look_at_step(stay: _Stay) -> None:
        path = stay.base / "ctl" / "progress.json"
        try:
            at, progress = path.stat().st_mtime, decode_progress(path.read_bytes())
        except OSError:
            return
        if progress is not None and (not stay.steps or stay.steps[-1][1] != progress.step):
            stay.steps.append((at, progress.step))

    def _look_at_entries(self, stay: _Stay, trees: bool) -> None:
        from mesh.jobs.commits import MARKER, unfinished

        waiting = []
        for path in (stay.base / "ckpt").iterdir():
            if unfinished(path.name):
                waiting.append(path.name)
                continue
            with suppress(FileNotFoundError):  # the job prunes while we look
                info = path.stat()
                stay.entries[path.name] = max(info.st_mtime, stay.entries.get(path.name, 0.0))
                if trees:
                    tree = _tree(path)
                    newest = max((time_ns for _, time_ns in tree.values()), default=0) / 1e9
                    stay.entries[path.name] = max(newest, stay.entries[path.name])
                    complete = self._mode == "rename" or (self._mode == "marker" and MARKER in tree)
                    inode, before = stay.trees.get(path.name, (0, {}))
                    if inode == info.st_ino and any(before.get(file) != now for file, now in tree.items() if file):
                        self.torn[path.name] = None
                    if complete:
                        stay.trees[path.name] = (info.st_ino, tree)
        stay.unfinished = tuple(sorted(waiting))

    def _look_around(self) -> None:
        """What there is while no checkpoint comes: in its directory, and beside it."""
        if not self._stays:
            return
        from mesh.jobs.commits import MARKER, open_for_writing, unfinished

        stay = self._stays[max(self._stays)]
        begun, now = self._running_unix(max(self._stays)), time.time()
        entries = []
        with suppress(OSError):
            for path in sorted((stay.base / "ckpt").iterdir()):
                tree = _tree(path)
                newest = max((time_ns for _, time_ns in tree.values()), default=0) / 1e9
                final = not unfinished(path.name)
                entries.append(Entry(path.name, final, MARKER in tree, now - newest))
        strays: list[tuple[str, int]] = []
        with suppress(OSError):
            found = _tree(stay.base / "work").items()
            strays = [(name, size) for name, (size, time_ns) in found if name and begun and time_ns / 1e9 > begun]
        if entries or strays or not self._sight.entries:
            largest = sorted(strays, key=lambda stray: -stray[1])[:STRAYS_TOLD] or self._sight.strays
            opened = open_for_writing(stay.base / "ckpt")
            entries = entries or list(self._sight.entries)
            self._sight = Sight(tuple(entries), opened, tuple(largest), self._sight.trouble)

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
            tree = manifest.open()  # the stage does not encrypt, so that what is alike can be seen
            files = {
                entry.path.removeprefix("ckpt/"): hashlib.blake2b(
                    b"".join(manifest.content(entry)), digest_size=16
                ).hexdigest()
                + (f" -> {entry.target}" if entry.target is not None else "")
                for entry in tree.files
                if entry.path.startswith("ckpt/") and not stat.S_ISDIR(entry.mode)
            }
            resume, committed = tree.note.get("resume", ""), commit["created_unix_ms"] / 1000
            stay = self._stays.get(manifest.term)
            written = committed
            if stay is not None:
                times = stay.entries.values() if not resume else [stay.entries.get(resume, committed)]
                written = min(max(times, default=committed), committed)
            whole = f"ckpt/{resume}".rstrip("/")
            size = sum(e.size for e in tree.files if e.path == whole or e.path.startswith(f"{whole}/"))
            self._commits[commit["manifest"]] = (
                manifest.term,
                Checkpoint(commit["seq"], -1, committed, written, size, resume, files),
            )
            return

    def commits(self, number: int) -> int:
        """How many checkpoints were committed since an attempt began, those between two looks too."""
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

    # --- telling

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """All of them; the nodes tell of the last few only."""
        return [self._attempts[number] for number in sorted(self._attempts)]

    @property
    def over(self) -> bool:
        return self.state.get("outcome") is not None

    def running(self, number: int) -> dict[str, Any] | None:
        """The attempt whose guest runs now, if it is this one or a later one: a job may ask to be run again by itself."""
        found = [a for a in self.attempts if a["number"] >= number and a["running_unix_ms"] and not a["reason"]]
        return found[-1] if found and self.state["state"] == "running" else None

    def started(self, number: int) -> dict[str, Any] | None:
        """An attempt, if its guest runs or has run."""
        attempt = self._attempts.get(number)
        return attempt if attempt is not None and attempt["running_unix_ms"] else None

    def unfinished(self, number: int) -> tuple[str, ...]:
        """What lay in an attempt's checkpoint directory under no final name, when it was last seen."""
        terms = [attempt["term"] for attempt in self.attempts if attempt["number"] == number]
        return self._stays[terms[0]].unfinished if terms and terms[0] in self._stays else ()

    def sight(self) -> Sight:
        return self._sight

    def play(
        self, noticed: Departure | None = None, sudden: Departure | None = None, published: dict[str, str] | None = None
    ) -> Play:
        """What was seen so far."""
        outcome = self.state.get("outcome") or {}
        return Play(
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
        stay = self._stays.get(attempt["term"])
        running = attempt["running_unix_ms"] / 1000
        entries = sorted(stay.entries.items(), key=lambda item: item[1]) if stay is not None else []
        return Attempt(
            number=attempt["number"],
            node=attempt["node"],
            running_unix=running,
            ended_unix=attempt["ended_unix_ms"] / 1000,
            exit_code=attempt["exit_code"],
            reason=attempt["reason"],
            steps=tuple(stay.steps) if stay is not None else (),
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
    """Size and time of what lies below; of the first two thousand files, if there are more."""
    info = path.lstat()
    found: Tree = {"": (info.st_size, info.st_mtime_ns)}
    for parent, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                file = Path(parent) / name
                info = file.lstat()
                found[file.relative_to(path).as_posix()] = (info.st_size, info.st_mtime_ns)
        if len(found) > FILES_LOOKED_AT:
            break
    if not path.is_dir():
        found[path.name] = found[""]
    return found
