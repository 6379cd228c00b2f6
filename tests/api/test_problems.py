"""The answers to requests that fail: their status, and the exit code of the command that asked."""

from typing import Any

import msgspec
import pytest

from mesh.api.problems import CONTENT_TYPE, http_problem, problem
from mesh.util.errors import ExitCode


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ExitCode.ERROR, 409),
        (ExitCode.USAGE, 400),
        (ExitCode.NOT_FOUND, 404),
        (ExitCode.REFUSED, 403),
        (ExitCode.IMPOSSIBLE, 409),
        (ExitCode.TIMED_OUT, 409),
        (ExitCode.CANNOT_EXECUTE, 409),
    ],
)
def test_expected_error_has_its_status_and_exit_code(code: ExitCode, status: int) -> None:
    answer = problem("why \udcff", code)
    body: Any = answer.body
    told = msgspec.json.decode(body)
    assert (answer.status, answer.content_type) == (status, CONTENT_TYPE)
    assert (told["status"], told["exit_code"], told["detail"]) == (status, code, "why ?")


@pytest.mark.parametrize(
    ("status", "code"), [(404, ExitCode.NOT_FOUND), (405, ExitCode.USAGE), (413, ExitCode.USAGE), (500, ExitCode.ERROR)]
)
def test_error_of_the_protocol_has_an_exit_code_too(status: int, code: ExitCode) -> None:
    body: Any = http_problem(status, "why").body
    assert msgspec.json.decode(body)["exit_code"] == code
