"""A Python function as a job: what runs it there, saves it when its node is to be left, and publishes what it gives or raises.

Travels with the function, so it is of the standard library, `mesh.job` and cloudpickle, which travel too.
docs/how-to/python-api.md.
"""

import json
import os
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mesh import job

CALL, HEADER = "call.pkl", "call.json"
ANSWER, PICKLE = "answer.json", "answer.pkl"
DEEPEST = 50  # nested lists in a JSON result (own choice)
EXITS = (job.EXIT_SAVED, 75, 137, 143)  # codes that ask for another attempt: docs/reference/job-contract.md


class Call:
    """A function with its arguments, to be called later: what `checkpoint()` of a callable object may return."""

    def __init__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"Call({self.function!r}, *{self.args!r}, **{self.kwargs!r})"


class _Running:
    """The call that runs in this process, with its checkpoints."""

    def __init__(self, call: Call, number: int) -> None:
        self._call, self._number = call, number
        self._process = os.getpid()
        self.saves = hasattr(call.function, "checkpoint")
        self.cooperates = False

    def save(self) -> None:
        import cloudpickle

        again = self._call.function.checkpoint(*self._call.args, **self._call.kwargs)  # type: ignore[attr-defined]
        data = cloudpickle.dumps(again if isinstance(again, Call) else self._call)
        self._number += 1
        job.Checkpoint().save(self._number, lambda path: _write(path / CALL, data))

    def leave(self) -> NoReturn:
        self.save()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(job.EXIT_SAVED)  # the user's code could catch an exception

    def on_term(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # it came before `forked`
            self.forked()
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self.cooperates:
            self.leave()

    def forked(self) -> None:
        """Leave saving to the process of the call: let SIGTERM end its forked workers, so that a notice spares them."""
        global _running  # noqa: PLW0603 - see main
        _running = None
        if signal.getsignal(signal.SIGTERM) == self.on_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_running: _Running | None = None


def checkpoint(step: int | None = None, of: int = 0) -> bool:
    """A place where the callable object that runs as this job may be saved: call it at every step.

    Saves it by its `checkpoint` method when the mesh says that it is time; when the node is to be left, saves it and ends this
    attempt. Whether it was saved. `step` of `of`: tell the mesh how far it is. Does nothing where no job runs.
    """
    if step is not None:
        job.progress(step, of)
    running = _running
    if running is None or not running.saves:
        return False
    running.cooperates = True
    if job.should_yield():
        running.leave()
    if not job.should_checkpoint():
        return False
    running.save()
    return True


def main(here: Path) -> int:
    """Run the call in `here`, or resume the saved one; return its exit code."""
    global _running  # noqa: PLW0603 - a process has one job
    out = Path(os.environ["MESH_OUT_DIR"])
    resumed = job.resume_path()
    header = json.loads((here / HEADER).read_text())
    try:
        call = _load((resumed or here) / CALL, header)
    except BaseException as error:
        return _failed(out, header, error, "before it was called")
    found = re.search(r"(\d+)$", resumed.name) if resumed is not None else None
    _running = _Running(call, int(found[1]) if found else 0)
    if _running.saves:
        os.register_at_fork(after_in_child=_running.forked)
        signal.signal(signal.SIGTERM, _running.on_term)
    try:
        value = call()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the call is done, and the rest is quick
        _publish(out, header, value)
    except BaseException as error:
        return _failed(out, header, error)
    return 0


def _load(path: Path, header: dict[str, Any]) -> Call:
    python = list(sys.version_info[:2])
    if header["python"] != python:
        mine, here = (".".join(map(str, version)) for version in (header["python"], python))
        raise RuntimeError(
            f"the function was packed by Python {mine}, and {sys.executable} on this node is {here}: "
            "name another with python=, or an image= that has it"
        )
    call = pickle.loads(path.read_bytes())
    assert isinstance(call, Call)
    return call


def _publish(out: Path, header: dict[str, Any], value: Any) -> None:
    if _is_plain(value, DEEPEST):
        _answer(out, {"kind": "value", "as": "json", "value": value})
    elif header["results"] == "json":
        raise TypeError(
            f"results='json', but the function gave a {type(value).__name__}, which JSON would not give back"
        )
    else:
        import cloudpickle

        _write(out / PICKLE, cloudpickle.dumps(value))
        _answer(out, {"kind": "value", "as": "pickle"})


def _failed(out: Path, header: dict[str, Any], error: BaseException, when: str = "") -> int:
    """Write the exception as text, and pickled if possible."""
    if isinstance(error, SystemExit) and (error.code is None or error.code == 0):
        _answer(out, {"kind": "value", "as": "json", "value": None})
        return 0
    if isinstance(error, SystemExit) and error.code in EXITS:  # as Lightning's and Transformers' integrations leave
        return int(error.code)
    words = "".join(traceback.format_exception(error))
    print(words, file=sys.stderr, flush=True)
    reply = {"kind": "error", "as": "json", "type": type(error).__qualname__, "text": str(error), "when": when}
    if header["results"] == "pickle":
        try:
            import cloudpickle

            _write(out / PICKLE, cloudpickle.dumps(error))
            reply["as"] = "pickle"
        except Exception as unpackable:
            print(f"mesh: the exception cannot be packed: {unpackable!r}", file=sys.stderr, flush=True)
    _answer(out, {**reply, "traceback": words})
    return 1


def _answer(out: Path, reply: dict[str, Any]) -> None:
    _write(out / ANSWER, json.dumps(reply).encode())


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


def _is_plain(value: Any, deep: int) -> bool:
    """Return whether a value survives JSON unchanged."""
    if type(value) in {list, dict} and not deep:
        return False
    if type(value) is list:
        return all(_is_plain(one, deep - 1) for one in value)
    if type(value) is dict:
        return all(type(key) is str and _is_plain(one, deep - 1) for key, one in value.items())
    return value is None or type(value) in {bool, int, float, str}
