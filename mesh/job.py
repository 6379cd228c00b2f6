"""For programs that run as jobs: notices, progress, and checkpoints that appear whole. Standard library only, one file.

Works without a mesh too: then there is never a notice, and checkpoints are plain directories. Copy it into an image as it is.
Tensors of torch and arrays of numpy are known when the program brings some; neither is imported here.
"""

import copy
import json
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

EXIT_SAVED = 85  # what a job that has saved ends with: run me again
WRITER_NICE = 5  # of the thread that writes: on a busy core a third of what the training has, and never nothing; ours


@dataclass(frozen=True)
class Notice:
    """The node wants this job to save (`checkpoint`) or to save and go (`vacate`) before `deadline_unix` (seconds)."""

    seq: int
    kind: str
    deadline_unix: float
    grace_s: float
    reason: str


_last: tuple[int, Notice | None] = (-1, None)


def notice() -> Notice | None:
    """The latest notice, or None. Costs one stat while nothing has changed, so ask at every step."""
    global _last  # noqa: PLW0603 - the cache of one file
    control = os.environ.get("MESH_CTL_DIR")
    if not control:
        return None
    path = Path(control) / "notice.json"
    try:
        changed = path.stat().st_mtime_ns
        if changed != _last[0]:
            fields = json.loads(path.read_text())
            _last = (changed, Notice(**{name: fields[name] for name in Notice.__dataclass_fields__}))
    except (OSError, ValueError, KeyError, TypeError):
        return _last[1]
    return _last[1]


def should_yield() -> bool:
    """Whether this job has been asked to save and go."""
    latest = notice()
    return latest is not None and latest.kind == "vacate"


class _Timetable:
    """What the mesh has said of when to save, as far as it was read; and when that was done without it."""

    def __init__(self) -> None:
        self.seen = (-1, -1)
        self.number = self.answered = -1
        self.due_unix = float("inf")
        self.notice = 0
        self.saved_s = time.monotonic()

    def read(self, path: Path) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            status = path.stat()
            if (status.st_mtime_ns, status.st_ino) != self.seen:
                fields = json.loads(path.read_text())
                self.number, self.due_unix = int(fields["number"]), float(fields["due_unix"])
                self.seen = (status.st_mtime_ns, status.st_ino)


_timetable = _Timetable()


def should_checkpoint(every_s: float | None = None) -> bool:
    """Whether to save now. True once each time that the mesh says so: when it does depends on how likely this machine is to leave
    and on what a checkpoint costs. Costs one stat while nothing has changed, so ask at every step.

    Where no mesh says when: once `every_s` seconds have passed since the last time, or never. Of several processes ask in one,
    and tell the others; on several nodes, in that of rank 0.
    """
    control, table = os.environ.get("MESH_CTL_DIR"), _timetable
    if control:
        table.read(Path(control) / "schedule.json")
    if table.number >= 0:
        due = table.number != table.answered and time.time() >= table.due_unix
        if due:
            table.answered = table.number
        return due
    latest = notice()
    if latest is not None and latest.kind == "checkpoint" and latest.seq != table.notice:
        table.notice = latest.seq
        return True
    if every_s is None or time.monotonic() - table.saved_s < every_s:
        return False
    table.saved_s = time.monotonic()
    return True


def stalled(seconds: float) -> None:
    """Tell the mesh for how long a checkpoint has held the program up. `Checkpoint` does so by itself."""
    _timetable.saved_s = time.monotonic()
    control = os.environ.get("MESH_CTL_DIR")
    if control:
        with suppress(OSError):
            temporary = Path(control) / "stall.tmp"
            temporary.write_text(json.dumps({"seconds": seconds}))
            temporary.rename(Path(control) / "stall.json")


def resume_path() -> Path | None:
    """The newest verified checkpoint to go on from, or None for a fresh start."""
    path = os.environ.get("MESH_RESUME")
    return Path(path) if path else None


def progress(step: int, of: int) -> None:
    """Tell the mesh how far the job is; shown by `mesh ps`, and used to count what a departure cost."""
    control = os.environ.get("MESH_CTL_DIR")
    if control:
        temporary = Path(control) / "progress.tmp"
        temporary.write_text(json.dumps({"step": step, "of": of}))
        temporary.rename(Path(control) / "progress.json")


class Checkpoint:
    """Checkpoints as directories `step-NNNNNNNN` that appear under their names only when they are whole and on disk.

    `save` writes while the program waits, `snapshot` while it goes on. Call them from one thread. As a context manager it ends
    with `finish`.
    """

    def __init__(self, directory: str | Path | None = None, keep: int = 2) -> None:
        chosen = directory or os.environ.get("MESH_CKPT_DIR") or "ckpts"
        self.directory = Path(chosen)
        self.keep = keep
        self.directory.mkdir(parents=True, exist_ok=True)
        self._buffers = _Buffers()
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None  # of the write in the background, until it is raised

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a new directory, make it durable, publish it; the newest `keep` stay."""
        begun = time.monotonic()
        self.finish()
        return self._publish(step, write, lambda: stalled(time.monotonic() - begun))

    def snapshot(
        self, step: int, state: Any, write: Callable[[Path, Any], None] | None = None, *, wait: bool = False
    ) -> bool:
        """Copy `state` as it is now, and save the copy in the background: `write` gets a new directory and the copy.

        `state`: dicts, lists and tuples, one within another, of torch tensors, numpy arrays and whatever `copy.deepcopy` takes.
        Tensors of a GPU are copied to the host. Without `write`: `state.pt` by `torch.save`, or `state.pkl` by `pickle` if
        there is no tensor in it. The memory of the copy is kept for the next one, so `write` must not keep it.

        One is written at a time: while an earlier one still is, nothing is copied and the answer is False, or with `wait` it is
        waited for. Once this job has been asked to go, both are waited for, so that it may leave with EXIT_SAVED. Whatever was
        raised in the background is raised by the next call of `snapshot`, `save` or `finish`, which then does nothing else. A
        program that ends waits for the write, but its exit says nothing of an error there: call `finish`.
        """
        leaving = should_yield()
        if self._writer is not None and self._writer.is_alive() and not (wait or leaving):
            return False
        begun = time.monotonic()
        self.finish()
        copied, chosen = self._buffers.copy(state), write or _dump
        if leaving:
            self._publish(step, lambda path: chosen(path, copied))
            return True
        # A thread for each write, since an unprivileged one cannot take back its priority, and no daemon, so that the program's
        # end waits for it.
        self._writer = threading.Thread(target=self._write, args=(step, copied, chosen), name=f"step-{step}")
        self._writer.start()
        stalled(time.monotonic() - begun)
        return True

    def finish(self) -> None:
        """Wait until the last snapshot is on disk under its name. Raises what its `write` raised."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, step: int, copied: Any, write: Callable[[Path, Any], None]) -> None:
        _stand_back()
        try:
            self._publish(step, lambda path: write(path, copied))
        except BaseException as error:
            print(f"mesh.job: step {step} was not saved: {error!r}", file=sys.stderr, flush=True)
            self._error = error

    def _publish(self, step: int, write: Callable[[Path], None], done: Callable[[], None] = lambda: None) -> Path:
        final = self.directory / f"step-{step:08d}"
        temporary = self.directory / f".step-{step:08d}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        for directory, _, files in os.walk(temporary, topdown=False):
            for name in files:
                _sync(Path(directory) / name)
            _sync(Path(directory))
        self._remove(final)
        done()  # before it can be seen
        temporary.rename(final)
        _sync(self.directory)
        for old in sorted(self.directory.glob("step-*"))[: -self.keep]:
            self._remove(old)
        return final

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        return max(self.directory.glob("step-*"), default=None)

    def _remove(self, path: Path) -> None:
        """Under a name that is not final: half-deleted it would look like a checkpoint, and like the newest."""
        doomed = self.directory / f".{path.name}.old"
        shutil.rmtree(doomed, ignore_errors=True)
        if path.exists():
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_Key = tuple[Any, ...]
_Take = Callable[[_Key, Callable[[], Any]], Any]


class _Buffers:
    """Copies of states in memory that is kept for the next: touching new memory is slower than copying (own measurement)."""

    def __init__(self) -> None:
        self._free: dict[_Key, list[Any]] = {}

    def copy(self, state: Any) -> Any:
        """The same, in memory that is valid until the next call. What shares memory in it shares it in the copy."""
        kept: dict[_Key, list[Any]] = {}

        def buffer(key: _Key, make: Callable[[], Any]) -> Any:
            free = self._free.get(key)
            taken = free.pop() if free else make()
            kept.setdefault(key, []).append(taken)
            return taken

        copies: dict[int, Any] = {}  # by id, as deepcopy's memo: it then copies only what is around them
        storages: dict[_Key, Any] = {}
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        leaves = list(_leaves(state))  # all alive until the end, so that no id is used twice
        for leaf in leaves:
            if torch is not None and isinstance(leaf, torch.Tensor):
                copies[id(leaf)] = _copy_tensor(torch, leaf, storages, buffer, copies)
            elif numpy is not None and type(leaf) is numpy.ndarray and not leaf.dtype.hasobject:
                copies[id(leaf)] = _copy_array(numpy, leaf, buffer)
        for device in {key[0] for key in storages if key[0].type == "cuda"}:
            torch.cuda.synchronize(device)  # type: ignore[union-attr]
        copied = copy.deepcopy(state, copies)
        self._free = kept
        return copied


def _leaves(state: Any) -> Iterator[Any]:
    """What is in the containers of a state, each once."""
    seen: set[int] = set()
    around = [state]
    while around:
        value = around.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            around += value.values()
        elif isinstance(value, list | tuple):
            around += value
        else:
            yield value


def _copy_tensor(torch: Any, tensor: Any, storages: dict[_Key, Any], buffer: _Take, memo: Any) -> Any:
    """On the host, and a view of a copied storage as it is a view of its own: by whole storages, as torch.save does it."""
    plain = (
        type(tensor) in {torch.Tensor, torch.nn.Parameter}
        and tensor.layout == torch.strided
        and tensor.device.type in {"cpu", "cuda"}
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
        and tensor.untyped_storage().nbytes() > 0
    )
    if not plain:
        return copy.deepcopy(tensor if tensor.is_leaf else tensor.detach(), memo)
    empty = partial(torch.empty, device="cpu")  # whatever the default device is
    source = tensor.untyped_storage()
    size, pinned = source.nbytes(), tensor.device.type == "cuda"
    key = (tensor.device, source.data_ptr(), size)
    if key not in storages:
        held = buffer(("torch", size, pinned), lambda: empty(size, dtype=torch.uint8, pin_memory=pinned))
        there = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(source)
        held.copy_(there, non_blocking=pinned)
        storages[key] = held.untyped_storage()
    view = empty(0, dtype=tensor.dtype)
    view.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(view, requires_grad=tensor.requires_grad)
    return view.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _copy_array(numpy: Any, array: Any, buffer: _Take) -> Any:
    held = buffer(("numpy", array.dtype, array.shape, array.strides), lambda: numpy.empty_like(array))
    numpy.copyto(held, array)
    return held


def _dump(path: Path, state: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(leaf, torch.Tensor) for leaf in _leaves(state)):
        torch.save(state, path / "state.pt")
    else:
        with (path / "state.pkl").open("wb") as file:
            pickle.dump(state, file, protocol=pickle.HIGHEST_PROTOCOL)


def _stand_back() -> None:
    """Let the training's threads have the cores first."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):  # its priority is lower than that, and stays so
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICE)
