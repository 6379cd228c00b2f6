"""Processes of a world, each with a driver of its own: what they do is a function of the test's."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fake.client import Driver
from tests.fake.world import World

PATIENCE_S = 30.0

# A clean process that forks the others: quick, and nothing of the test's own is open in them.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.fake.child"])


class Talk:
    """The child's end of the line to its test."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def say(self, word: Any) -> None:
        self._line.send(("said", word))

    def hear(self) -> Any:
        return self._line.recv()


def _main(
    function: Callable[..., Any], library: Path, environment: Mapping[str, str], line: Connection, words: Any
) -> None:
    os.environ.update(environment)
    try:
        line.send(("returned", function(Driver(library), *words, **({"talk": Talk(line)} if _talks(function) else {}))))
    except BaseException:
        line.send(("raised", traceback.format_exc()))


def _talks(function: Callable[..., Any]) -> bool:
    return (
        "talk" in function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
    )


class Child:
    """`function(driver, *words)`, or `function(driver, *words, talk=...)` where it wants to talk, in a process of its own. The
    library is the fake driver itself, or one that stands before it."""

    def __init__(
        self,
        world: World,
        function: Callable[..., Any],
        *words: Any,
        library: Path | None = None,
        environment: Mapping[str, str] | None = None,
        fail: str = "",
    ) -> None:
        self._line, theirs = _context.Pipe()
        settings = {**world.environment(fail=fail), **(environment or {})}
        self._process = _context.Process(
            target=_main, args=(function, library or world.fakes.cuda, settings, theirs, words), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _receive(self, wanted: str) -> Any:
        if not self._line.poll(PATIENCE_S):
            raise TimeoutError(f"process {self.pid} has {wanted} nothing for {PATIENCE_S} s")
        kind, word = self._line.recv()
        if kind == "raised":
            raise AssertionError(f"in process {self.pid}:\n{word}")
        assert kind == wanted, f"{kind} {word!r} instead of {wanted}"
        return word

    def hear(self) -> Any:
        return self._receive("said")

    def tell(self, word: Any = None) -> None:
        self._line.send(word)

    def silent(self, seconds: float) -> bool:
        """Return True if the child reports nothing for this time."""
        return not self._line.poll(seconds)

    def result(self) -> Any:
        try:
            return self._receive("returned")
        finally:
            self._process.join(PATIENCE_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def run(world: World, function: Callable[..., Any], *words: Any, **settings: Any) -> Any:
    """Run the function in a process of its own and return its result."""
    with Child(world, function, *words, **settings) as child:
        return child.result()
