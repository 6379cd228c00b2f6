"""API of programs that run as jobs: notices, progress and atomic checkpoints. Standard library only, one file.

It works without a mesh too: then there is never a notice, and checkpoints are plain directories. It can be copied into an image.
It handles torch tensors and numpy arrays, but imports neither.
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

EXIT_SAVED = 85  # exit code of a job that has saved and wants to run again
WRITER_NICE = 5  # of the writing thread: a third of the training's share of a busy core, never zero (own choice)


@dataclass(frozen=True)
class Notice:
    """A request to save (`checkpoint`) or to save and exit (`vacate`) before `deadline_unix` (Unix seconds)."""

    seq: int
    kind: str
    deadline_unix: float
    grace_s: float
    reason: str


class _File:
    """The last content that the mesh wrote into a file of the control directory."""

    def __init__(self, name: str, decode: Callable[[dict[str, Any]], Any]) -> None:
        self._name, self._decode = name, decode
        self._seen, self._content = (-1, -1), None

    def read(self) -> Any:
        """Return it; None if there is none yet. Malformed content is ignored. Costs one stat while nothing has changed."""
        control = os.environ.get("MESH_CTL_DIR")
        if not control:
            return None
        path = Path(control) / self._name
        with suppress(OSError, ValueError, KeyError, TypeError):
            status = path.stat()
            seen = (status.st_mtime_ns, status.st_ino)  # two files may have one time
            if seen != self._seen:
                self._content = self._decode(json.loads(path.read_text()))
                self._seen = seen
        return self._content


def _tell(name: str, content: dict[str, Any]) -> None:
    """Replace a file of the control directory, if it can be: several processes may at a time."""
    control = os.environ.get("MESH_CTL_DIR")
    if control:
        with suppress(OSError):
            temporary = Path(control) / f".{name}.{os.getpid()}.{threading.get_ident()}.tmp"
            temporary.write_text(json.dumps(content))
            temporary.rename(Path(control) / name)


_notice = _File("notice.json", lambda fields: Notice(**{name: fields[name] for name in Notice.__dataclass_fields__}))


def notice() -> Notice | None:
    """Return the latest notice, or None. Costs one stat while nothing has changed: call it at every step."""
    found: Notice | None = _notice.read()
    return found


def should_yield() -> bool:
    """Return whether this job should save and exit."""
    latest = notice()
    return latest is not None and latest.kind == "vacate"


class _Timetable:
    """The state of `should_checkpoint`: requests that were read, and own saves."""

    def __init__(self) -> None:
        self.requests = _File("schedule.json", lambda fields: (int(fields["number"]), float(fields["due_unix"])))
        self.answered = -1
        self.notice = 0
        self.saved_s = time.monotonic()


_timetable = _Timetable()


def should_checkpoint(every_s: float | None = None) -> bool:
    """Return whether to save now: True once for each request of the mesh.

    The mesh requests a save by the departure risk of this machine and the cost of a checkpoint. Costs one stat while nothing has
    changed: call it at every step. Without a mesh: True when `every_s` seconds have passed since the last save, or never. Of
    several processes, call it in rank 0 only and share the answer.
    """
    table = _timetable
    request = table.requests.read()
    if request is not None:
        number, due_unix = request
        due = bool(number != table.answered and time.time() >= due_unix)
        if due:
            table.answered = number
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
    """Report how long a checkpoint has stalled the program. `Checkpoint` does so itself."""
    _timetable.saved_s = time.monotonic()
    _tell("stall.json", {"seconds": seconds})


def resume_path() -> Path | None:
    """Return the newest verified checkpoint to resume from, or None for a fresh start."""
    path = os.environ.get("MESH_RESUME")
    return Path(path) if path else None


def progress(step: int, of: int) -> None:
    """Report progress, for `mesh ps` and for the cost of departures."""
    _tell("progress.json", {"step": step, "of": of})


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
        self._error: BaseException | None = None  # error of the background write, until it is raised

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a new directory, make it durable and publish it; keep the newest `keep`."""
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
        """Wait until the last snapshot is on disk under its final name. Raise the error of its `write`."""
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
        for old in sorted(self.directory.glob("step-*"), key=_step_of)[: -self.keep]:
            if old != final:  # a program that resumed before a higher step writes lower ones
                self._remove(old)
        return final

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        return max(self.directory.glob("step-*"), key=_step_of, default=None)

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint under a temporary name, so that a half-deleted one does not look complete."""
        doomed = self.directory / f".{path.name}.old"
        shutil.rmtree(doomed, ignore_errors=True)
        if path.exists():
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _step_of(path: Path) -> int:
    number = path.name.partition("-")[2]
    return int(number) if number.isdecimal() else -1


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_Key = tuple[Any, ...]
_Take = Callable[[_Key, Callable[[], Any]], Any]


class _Buffers:
    """Copies of states in reused memory: touching new memory is slower than copying (measured)."""

    def __init__(self) -> None:
        self._free: dict[_Key, list[Any]] = {}

    def copy(self, state: Any) -> Any:
        """Return a copy that is valid until the next call. Tensors that share memory share it in the copy."""
        kept: dict[_Key, list[Any]] = {}

        def buffer(key: _Key, make: Callable[[], Any]) -> Any:
            free = self._free.get(key)
            taken = free.pop() if free else make()
            kept.setdefault(key, []).append(taken)
            return taken

        copies: dict[int, Any] = {}  # deepcopy's memo by id: deepcopy then copies only the containers
        storages: dict[_Key, Any] = {}
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        leaves = list(_leaves(state))  # kept alive, so that no id is reused
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
    """Yield the leaves of a state, each once."""
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
    """Copy a tensor to the host by its whole storage, as torch.save does, so that views stay views."""
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
    """Lower the priority of the calling thread below the training's."""
    if sys.platform == "linux":  # threads have priorities of their own there
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(WRITER_NICE, os.getpriority(os.PRIO_PROCESS, thread)))
