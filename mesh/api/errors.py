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
    INTERRUPTED = 130  # 128 + SIGINT, as shells have it


MEANS = {
    ExitCode.OK: "done",
    ExitCode.ERROR: "it failed; the text says what, why and what next",
    ExitCode.USAGE: "wrong usage, of a command, a job file or a setting",
    ExitCode.NO_DAEMON: "no daemon answers here",
    ExitCode.NOT_FOUND: "no such job, node or file",
    ExitCode.REFUSED: "refused: not yours, or not allowed",
    ExitCode.IMPOSSIBLE: "nobody in the mesh could ever run it",
    ExitCode.JOB_FAILED: "`run`, `wait`: the job failed without an exit code",
    ExitCode.JOB_CANCELLED: "`run`, `wait`: the job was cancelled",
    ExitCode.TIMED_OUT: "`wait --timeout`: it is not over yet",
    ExitCode.INTERRUPTED: "Ctrl-C",
}


class MeshError(Exception):
    """Something the user asked for cannot be done."""

    def __init__(self, text: str, code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(text)
        self.code = code


class ConfigError(ValueError):
    """The configuration cannot be used; the text names the file, the key and the reason."""
