"""Errors on the agent's API: `application/problem+json` (RFC 9457), with the exit code that a command ends with."""

from http import HTTPStatus

import msgspec
from aiohttp import web

from mesh.util.errors import ExitCode

CONTENT_TYPE = "application/problem+json"
URI = "tag:campus-mesh,2026:problem:"  # RFC 4151: a name, not an address

# An expected error that depends on the current state is a conflict; 500 is only for unexpected errors.
_KINDS = {
    ExitCode.ERROR: (409, "not-now", "The current state does not allow it"),
    ExitCode.USAGE: (400, "usage", "The request is not understood"),
    ExitCode.NO_DAEMON: (409, "no-daemon", "No daemon answers"),
    ExitCode.NOT_FOUND: (404, "not-found", "There is no such thing"),
    ExitCode.REFUSED: (403, "refused", "It is not allowed"),
    ExitCode.IMPOSSIBLE: (409, "impossible", "No node can do it"),
    ExitCode.TIMED_OUT: (409, "timed-out", "It took too long"),
}


class Problem(msgspec.Struct, frozen=True):
    """`detail` says what failed, why, and what to do; `exit_code` as in docs/reference/cli.md."""

    type: str
    title: str
    status: int
    detail: str
    exit_code: int


def problem(text: str, code: ExitCode) -> web.Response:
    """Return the answer for an expected error."""
    status, name, title = _KINDS.get(code, _KINDS[ExitCode.ERROR])
    return _answer(Problem(URI + name, title, status, text, int(code)))


def http_problem(status: int, text: str) -> web.Response:
    """Return the answer for a protocol error (path, method, size) or an unexpected error."""
    code = {404: ExitCode.NOT_FOUND, 500: ExitCode.ERROR}.get(status, ExitCode.USAGE)
    return _answer(Problem("about:blank", HTTPStatus(status).phrase, status, text, int(code)))


def _answer(answer: Problem) -> web.Response:
    plain = answer.detail.encode(errors="replace").decode()  # a path may have been no UTF-8
    body = msgspec.json.encode(msgspec.structs.replace(answer, detail=plain))
    return web.Response(status=answer.status, body=body, content_type=CONTENT_TYPE)
