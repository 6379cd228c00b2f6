"""The agent's API as an OpenAPI 3.1 document, made from the routes, the structs that they take and what they answer."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

from mesh.api.problems import CONTENT_TYPE, Problem
from mesh.api.queries import Nothing
from mesh.api.routing import DOCUMENT, FRAMES, Route
from mesh.util.version import VERSION

SECTIONS = {
    "mesh": "Nodes, and what they offer (adverts).",
    "jobs": "Workloads: what runs, has run and waits.",
    "owner": "What is lent, and emergency control: pause, reclaim, leave.",
    "gpus": "This node's GPUs, shares of them, and receipts.",
    "checkpoints": "What this node's store keeps.",
    "images": "Container images that may be run.",
    "data": "Data sets that jobs may read.",
    "trust": "Who belongs to the mesh.",
}
IN_PATH = {
    "job": "A job's id, the beginning of it, its name, or ARRAY_INDEX.",
    "node": "A node's nick, id, or the beginning of its id.",
    "name": "A file's name.",
    "way": "What is to be reached (docs/explanation/tunnels.md).",
}
DESCRIPTION = (
    "What a daemon answers to programs of its own user, over the unix socket `mesh.sock` in its state directory. "
    "Only that user can open the socket; there is no other authentication. Every JSON answer has `schema`, which grows when a "
    "field changes its meaning; new fields may come at any time. Errors are problems (RFC 9457) with the `exit_code` that a "
    "command would end with."
)
_REFERENCE = "#/components/schemas/{name}"
_VERSIONED = {"type": "object", "properties": {"schema": {"type": "integer"}}, "required": ["schema"]}
_ERRORS = {
    "400": "The request is not understood.",
    "403": "It is not allowed.",
    "404": "There is no such thing.",
    "409": "The current state does not allow it.",
    "413": "The body is over 1 MiB.",
    "500": "Something broke in the daemon; its log says what.",
}


@cache
def encoded(routes: tuple[Route, ...]) -> bytes:
    return msgspec.json.encode(document(routes))


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document as plain JSON values; the same for the same code."""
    bodies = [route.asked for route in routes if route.method == "POST"]
    kinds = [kind for route in routes for kind in answers_of(route)]
    types = list(dict.fromkeys([Problem, *bodies, *kinds]))
    _, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "campus-mesh agent",
            "version": VERSION,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name, "description": text} for name, text in SECTIONS.items()],
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: Route) -> dict[str, Any]:
    named = re.findall(r"{(\w+)}", route.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "description": IN_PATH[name], "schema": {"type": "string"}}
        for name in named
    ]
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.title,
        "tags": [route.section],
        "responses": {**_success(route), **{status: _error(text) for status, text in _ERRORS.items()}},
    }
    if route.method == "GET":
        parameters += _in_query(route.asked)
    else:
        operation["requestBody"] = {
            "required": bool(_schema(route.asked).get("required")),
            "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name=route.asked.__name__)}}},
        }
    if parameters:
        operation["parameters"] = parameters
    return operation


def _in_query(asked: type[Any]) -> list[dict[str, Any]]:
    if asked is Nothing:
        return []
    text = (asked.__doc__ or "").strip()
    query = _schema(asked)
    return [
        {"name": name, "in": "query", "required": name in query["required"], "description": text, "schema": schema}
        for name, schema in query["properties"].items()
    ]


def _schema(asked: type[Any]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([asked], ref_template=_REFERENCE)
    found: dict[str, Any] = components[asked.__name__]
    return found


def _success(route: Route) -> dict[str, Any]:
    if route.content == FRAMES:
        return {"101": {"description": "A WebSocket of frames."}}
    if route.content:
        schema: dict[str, Any] = {"type": "object"} if route.content == DOCUMENT else {}
        return {"200": {"description": route.title, "content": {route.content: {"schema": schema}}}}
    references = [{"$ref": _REFERENCE.format(name=kind.__name__)} for kind in answers_of(route)]
    answer = {"allOf": [_VERSIONED, references[0] if len(references) == 1 else {"anyOf": references}]}
    return {"200": {"description": route.title, "content": {"application/json": {"schema": answer}}}}


def answers_of(route: Route) -> tuple[Any, ...]:
    """Return the structs that the route's function is declared to answer; none if the answer is not JSON."""
    if route.content:
        return ()
    declared = get_type_hints(route.handle)["return"]
    return get_args(declared) or (declared,)


def _error(text: str) -> dict[str, Any]:
    return {
        "description": text,
        "content": {CONTENT_TYPE: {"schema": {"$ref": _REFERENCE.format(name="Problem")}}},
    }
