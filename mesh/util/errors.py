"""Errors that reach a person: a text that says what failed, why and what to do, with an exit code."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line (docs/reference/cli.md)."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NO_DAEMON = 3
    NOT_FOUND = 4
    REFUSED = 5
    IMPOSSIBLE = 6
    TIMED_OUT = 124  # as timeout(1)
    NO_EXIT_CODE = 125  # 125 to 127 as `docker run`
    CANNOT_EXECUTE = 126
    COMMAND_NOT_FOUND = 127
    INTERRUPTED = 130  # 128 + SIGINT, as shells have it
    READER_GONE = 141  # 128 + SIGPIPE


MEANS = {
    ExitCode.OK: "success",
    ExitCode.ERROR: "failure; the message says what failed, why, and what to do next",
    ExitCode.USAGE: "wrong usage of a command, a job file or a setting",
    ExitCode.NO_DAEMON: "no daemon answers on this machine",
    ExitCode.NOT_FOUND: "no such job, node or file",
    ExitCode.REFUSED: "refused: not permitted, or another user's",
    ExitCode.IMPOSSIBLE: "no node of the mesh can ever run the job",
    ExitCode.TIMED_OUT: "`wait --timeout`: a job has not ended yet",
    ExitCode.NO_EXIT_CODE: "`run`, `wait`, `job attach`, `job jupyter`: the job ended without an exit code, for example because "
    "it was cancelled; `run`: also every failure of mesh itself",
    ExitCode.CANNOT_EXECUTE: "`run`, `wait`, `exec`: the command cannot be executed",
    ExitCode.COMMAND_NOT_FOUND: "`run`, `wait`, `exec`: the command was not found",
    ExitCode.INTERRUPTED: "Ctrl-C",
    ExitCode.READER_GONE: "nobody reads the output any more (`head`); a job that was followed goes on",
}


class MeshError(Exception):
    """A user's request failed; the text says why and what to do."""

    def __init__(self, text: str, code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(text)
        self.code = code


class ConfigError(ValueError):
    """The configuration cannot be used; the text names the file, the key and the reason."""
