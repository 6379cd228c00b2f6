"""Errors that reach a person: a text that says what failed, why and what to do, and the exit code it becomes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The command line's exit codes; part of its interface (docs/cli.md)."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NO_DAEMON = 3
    NOT_FOUND = 4
    REFUSED = 5
    IMPOSSIBLE = 6
    JOB_FAILED = 100
    JOB_CANCELLED = 103
    TIMED_OUT = 124


class MeshError(Exception):
    """Something the user asked for cannot be done."""

    def __init__(self, text: str, code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(text)
        self.code = code


class ConfigError(ValueError):
    """The configuration cannot be used; the text names the file, the key and the reason."""
