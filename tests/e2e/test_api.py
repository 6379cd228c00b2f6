"""The daemon's API against its document: schemathesis makes valid and invalid calls on a real daemon's socket.

`MESH_FUZZ_EXAMPLES=500` is the larger run (one hour). It is the number of valid and of invalid examples for each call.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from requests.adapters import HTTPAdapter
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from mesh.api.openapi import document
from mesh.api.routes import ROUTES
from mesh.daemon.stack import Stack, StackNode
from tests.e2e.commands import finished, ok

pytestmark = pytest.mark.e2e
BASE = "http://mesh"
EXAMPLES = int(os.environ.get("MESH_FUZZ_EXAMPLES", "5"))
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


class SocketAdapter(HTTPAdapter):
    """HTTP over a unix socket, for `requests`."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        super().__init__()

    def get_connection_with_tls_context(self, *arguments: Any, **options: Any) -> HTTPConnectionPool:
        path = self.path

        class Connection(HTTPConnection):
            def _new_conn(self) -> socket.socket:
                connected = socket.socket(socket.AF_UNIX)
                connected.settimeout(60)
                connected.connect(path)
                return connected

        class Pool(HTTPConnectionPool):
            ConnectionCls = Connection

        self.pool = getattr(self, "pool", None) or Pool("mesh")
        return self.pool


def sanitize(case: Case, done: str, room: Path) -> None:
    """Change the case so that it runs no command, packs no file of this machine and does not wait."""
    body = case.body
    if isinstance(body, dict):
        if isinstance(body.get("argv"), list) and body["argv"] and isinstance(body["argv"][0], str):
            body["argv"][0] = "true"
        for name in ("workdir", "out", "destination"):
            if isinstance(body.get(name), str) and body[name].startswith("/"):
                body[name] = str(room / body[name].encode().hex()[:20])
    if case.query and case.path.endswith("/log"):
        case.path_parameters["job"] = done  # following a waiting job would wait too


def operations() -> Iterator[APIOperation]:
    found = [one.ok() for one in schemathesis.openapi.from_dict(document(ROUTES)).get_all_operations()]
    return iter(sorted(found, key=lambda one: one.path == "/v1/down"))  # last, since it ends the daemon


def tried(operation: APIOperation, mode: GenerationMode, call: Callable[[Case], None]) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=SLOW)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        call(case)

    run()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[StackNode, str]]:
    """A disposable daemon with a finished job."""
    with Stack(1, directory=tmp_path / "state", overrides={"slots": 1}) as stack:
        stack.start_all()
        node = stack.nodes[0]
        job = ok(node, "submit", "--no-workdir", "--name", "over", "--", sys.executable, "-c", "print(1)").strip()
        finished(node, job)
        yield node, job


@pytest.mark.long
def test_every_call_conforms_to_the_api_document(alone: tuple[StackNode, str], tmp_path: Path) -> None:
    node, done = alone
    session = requests.Session()
    session.mount(BASE, SocketAdapter(node.where.socket))
    count: dict[int, int] = {}

    def call(case: Case, job: str | None) -> None:
        if job is not None and "job" in case.path_parameters:
            case.path_parameters["job"] = job
        sanitize(case, done, tmp_path)
        if case.path == "/v1/down":
            case.body = {"grace_s": -1}  # a valid body would take effect
        # The daemon may refuse a body that fits the schema: a limit without an array, or a finished job.
        answer = case.call_and_validate(
            base_url=BASE, session=session, timeout=60, excluded_checks=[positive_data_acceptance]
        )
        count[answer.status_code] = count.get(answer.status_code, 0) + 1

    for operation in operations():
        tried(operation, GenerationMode.POSITIVE, lambda case: call(case, done))
        tried(operation, GenerationMode.POSITIVE, lambda case: call(case, None))
        if operation.body or operation.query:
            tried(operation, GenerationMode.NEGATIVE, lambda case: call(case, None))
    print(count)
    assert node.running and not any(status >= 500 for status in count)
    assert {200, 400, 404, 409} <= set(count)
    last = requests.Request("POST", f"{BASE}/v1/down", json={"now": True}).prepare()
    assert session.send(last, timeout=60).json()["pid"] == node.process.pid  # type: ignore[union-attr]
