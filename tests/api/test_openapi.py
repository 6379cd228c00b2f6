"""The OpenAPI document matches the agent's API: routes, schemas, and errors as problem details."""

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from mesh.api.openapi import SECTIONS, document
from mesh.api.problems import CONTENT_TYPE, Problem
from mesh.api.routes import ROUTES
from mesh.api.routing import FRAMES
from mesh.api.server import MAX_BODY_BYTES, application
from mesh.cli.main import cli
from mesh.util.errors import ExitCode, MeshError


def test_document_matches_the_routes() -> None:
    served = {
        (route.method, route.resource.canonical)
        for route in application(Mock(), Mock()).router.routes()
        if route.resource
    }
    told = document(ROUTES)
    assert served == {(method.upper(), path) for path, methods in told["paths"].items() for method in methods}
    assert len(served) == len(ROUTES) == len({route.name for route in ROUTES})
    operations = [operation for methods in told["paths"].values() for operation in methods.values()]
    assert {tag for operation in operations for tag in operation["tags"]} == set(SECTIONS)
    assert all(operation["summary"].endswith(".") for operation in operations)


def test_parameters_without_a_default_are_required() -> None:
    paths = document(ROUTES)["paths"]
    required = {
        (path, field["name"])
        for path, methods in paths.items()
        for field in methods.get("get", {}).get("parameters", [])
        if field["in"] == "query" and field["required"]
    }
    assert required == {("/v1/data/show", "name"), ("/v1/data/work", "kind"), ("/v1/data/work", "name")}


def test_document_is_valid_openapi() -> None:
    import schemathesis

    schema = schemathesis.openapi.from_dict(json.loads(CliRunner().invoke(cli, ["debug", "api"]).output))
    schema.validate()
    assert {found.ok().label for found in schema.get_all_operations()} == {f"{r.method} {r.path}" for r in ROUTES}


def test_every_field_of_an_answer_is_described() -> None:
    """Check that each field has a type, except the free-form submission of a job."""

    def bare(schema: dict[str, Any], where: str) -> Iterator[str]:
        parts = [schema.get("items"), schema.get("additionalProperties"), *schema.get("anyOf", [])]
        inside = [part for part in [*parts, *schema.get("prefixItems", [])] if isinstance(part, dict)]
        fields = schema.get("properties", {})
        if (
            not inside
            and not fields
            and not {"$ref", "enum"} & set(schema)
            and schema.get("type") in {None, "object", "array"}
        ):
            yield where
        for part in inside:
            yield from bare(part, where)
        for name, field in fields.items():
            yield from bare(field, f"{where}.{name}")

    components = document(ROUTES)["components"]["schemas"]
    assert all(name.isidentifier() for name in components), (
        "two structs of the same name: the document then uses their modules"
    )
    found = [place for name, schema in components.items() for place in bare(schema, name)]
    assert [place for place in found if place != "Nothing"] == ["Described.asked"]
    nodes = document(ROUTES)["paths"]["/v1/nodes"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert {"$ref": "#/components/schemas/Nodes"} in nodes["allOf"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/v1/nowhere", b"", 404, "Not Found"),
        ("DELETE", "/v1/jobs", b"", 405, "Method Not Allowed"),
        ("GET", "/v1/jobs?fit=x", b"", 400, "unknown field `fit`"),
        ("GET", "/v1/jobs?fits=x&fits=y", b"", 400, "given twice"),
        ("GET", "/v1/events?after=-1", b"", 400, ">= 0"),
        ("GET", "/v1/events?after=9223372036854775808", b"", 400, "after"),
        ("GET", "/v1/status?now=1", b"", 400, "unknown field"),
        ("GET", "/v1/jobs/x/why?would=perhaps", b"", 400, "bool"),
        ("POST", "/v1/pause?paused=1", b"", 400, "in its body"),
        ("POST", "/v1/pause", b'{"paused": true, "gup": 1}', 400, "unknown field `gup`"),
        ("POST", "/v1/pause", b"\xff\xfe", 400, "not understood"),
        (
            "POST",
            "/v1/jobs/x/pull",
            b'{"destination": "here"}',
            400,
            "destination",
        ),  # a relative path: the daemon has another working directory
        ("POST", "/v1/pause", b"[" * 100_000, 400, "not understood"),
        ("POST", "/v1/jobs", b" " * (MAX_BODY_BYTES + 1), 413, "Too Large"),
        ("GET", "/v1/pending", b"", 409, "not now ??"),
        ("GET", "/v1/trust", b"", 500, "nobody foresaw"),
    ],
)
async def test_errors_are_problems(method: str, path: str, body: bytes, status: int, words: str) -> None:
    handlers = Mock()
    handlers.trust.pending.side_effect = MeshError("not now \udcff?")
    handlers.trust.trusted.side_effect = KeyError("nobody foresaw")
    async with TestClient(TestServer(application(handlers, Mock()))) as client:
        answer = await client.request(method, path, data=body)
        assert answer.status == status and answer.content_type == CONTENT_TYPE
        told = msgspec.json.decode(await answer.read(), type=Problem)
    assert told.status == status and words in told.detail and told.title and told.type
    assert told.exit_code == {404: ExitCode.NOT_FOUND, 409: 1, 500: 1}.get(status, ExitCode.USAGE)
    assert status != 405 or answer.headers["Allow"]


def test_every_route_but_the_websocket_answers_200() -> None:
    for route in ROUTES:
        answers = document(ROUTES)["paths"][route.path][route.method.lower()]["responses"]
        assert ("101" in answers) == (route.content == FRAMES) != ("200" in answers)
