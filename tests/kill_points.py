"""A function that is killed before each of its system calls that change files, one call after the other, by strace(1).

strace counts the calls of each process by kind and kills the process at call number `AT`. The process that it starts only
forks. A child first makes calls in vain, so many that the chosen call of the function is number `AT`. All calls come from one
thread, so their order is the same in each child.
"""

import concurrent.futures
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import msgspec

ROOT = Path(__file__).parents[1]
AT = 150  # more than a function may make of one kind
NO_FILE = 1023  # a descriptor that is not open
NO_PATH = Path("/proc/no-such-file")

IN_VAIN: dict[str, Callable[[], object]] = {
    "pwrite64": lambda: os.pwrite(NO_FILE, b"", 0),
    "ftruncate": lambda: os.ftruncate(NO_FILE, 0),
    "fsync": lambda: os.fsync(NO_FILE),
    "fdatasync": lambda: os.fdatasync(NO_FILE),
    "rename": lambda: NO_PATH.rename(NO_PATH),
    "unlink": NO_PATH.unlink,
}

Say = Callable[[str], None]


class Killed(msgspec.Struct, frozen=True):
    """`said` is what the function had said before the kill."""

    point: str
    root: Path
    said: tuple[str, ...]


def killed_at_each_call(function: Callable[[Path, Say], None], new_root: Callable[[], Path]) -> Iterator[Killed]:
    """Run `function(root, say)` in new directories, killed before each of its calls, and last of each kind to its end."""
    calls = ",".join(IN_VAIN)
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:signal=KILL:when={AT}"]
    command += [sys.executable, "-m", "tests.kill_points", function.__module__, function.__name__]
    # The first import would rename the compiled module into place, later ones not.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env) as forks:
        assert forks.stdin is not None and forks.stdout is not None
        for call in IN_VAIN:
            for number in range(1, AT):
                root = new_root()
                forks.stdin.write(f"{call} {number} {root}\n")
                forks.stdin.flush()
                said: list[str] = []
                while not (line := forks.stdout.readline()).startswith("status "):
                    assert line, "the process that forks has ended"
                    said.append(line.strip())
                status = int(line.split()[1])
                assert status in {-9, 0}, f"{call} {number}: status {status}"
                yield Killed(f"{call} {number}", root, tuple(said))
                if status == 0:
                    break
            else:
                raise AssertionError(f"the function makes {AT} calls of {call} or more")


@contextmanager
def killed_before(pid: int, call: str, *paths: Path) -> Iterator[None]:
    """Kill a running process before the next such call of one of its threads on one of these paths."""
    command = ["strace", "-f", "-qq", "-o", "/dev/null", *(f"-P{path}" for path in paths), "-e", f"trace={call}"]
    command += ["-e", f"inject={call}:signal=KILL:when=1", "-p", str(pid)]
    with subprocess.Popen(command) as tracer:
        try:
            while f"TracerPid:\t{tracer.pid}\n" not in Path(f"/proc/{pid}/status").read_text():
                assert tracer.poll() is None, "strace could not attach"
                time.sleep(0.01)
            yield
        finally:
            tracer.terminate()


# --- in the process that strace starts


class OneThread(concurrent.futures.Executor):
    """Run each function in the thread that submits it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def submit(
        self, function: Callable[..., Any], /, *arguments: Any, **options: Any
    ) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


def run(function: Callable[[Path, Say], None], call: str, number: int, root: Path) -> NoReturn:
    for _ in range(AT - number):
        with suppress(OSError):
            IN_VAIN[call]()
    try:
        function(root, lambda text: print(text, flush=True))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    concurrent.futures.ThreadPoolExecutor = OneThread  # type: ignore[misc,assignment]
    function = getattr(import_module(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        call, number, root = line.split(maxsplit=2)
        child = os.fork()
        if child == 0:
            run(function, call, int(number), Path(root.strip()))
        print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
