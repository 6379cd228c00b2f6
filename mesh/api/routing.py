"""The parts of a route: the handlers, the call, and what the server and the OpenAPI document need to know."""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, cast, get_args

import msgspec
from aiohttp import web

from mesh.api.handlers.checkpoints import CheckpointHandlers
from mesh.api.handlers.data import DataHandlers
from mesh.api.handlers.files import FileHandlers
from mesh.api.handlers.gpus import GpuHandlers
from mesh.api.handlers.images import ImageHandlers
from mesh.api.handlers.jobs import JobHandlers
from mesh.api.handlers.lending import LendingHandlers
from mesh.api.handlers.logs import LogReader
from mesh.api.handlers.lookup import JobLookup
from mesh.api.handlers.metrics import Metrics
from mesh.api.handlers.node import NodeHandlers
from mesh.api.handlers.placement import PlacementHandlers
from mesh.api.handlers.secrets import SecretHandlers
from mesh.api.handlers.submission import SubmissionHandlers
from mesh.api.handlers.trust import TrustHandlers
from mesh.api.handlers.tunnels import Tunnels
from mesh.api.handlers.usage import UsageHandlers

A = TypeVar("A")
BYTES, FRAMES = "application/octet-stream", "websocket"  # content types of answers that are not JSON
DOCUMENT, TEXT = "application/openapi+json", "text/plain"


class Handlers(msgspec.Struct, frozen=True):
    """The objects that answer requests, one for each resource."""

    node: NodeHandlers
    placement: PlacementHandlers
    trust: TrustHandlers
    lending: LendingHandlers
    gpus: GpuHandlers
    jobs: JobHandlers
    submission: SubmissionHandlers
    data: DataHandlers
    files: FileHandlers
    logs: LogReader
    tunnels: Tunnels
    usage: UsageHandlers
    metrics: Metrics
    checkpoints: CheckpointHandlers
    images: ImageHandlers
    secrets: SecretHandlers
    lookup: JobLookup


class Call(msgspec.Struct, Generic[A], frozen=True):
    """A request with its decoded body (POST) or query (GET)."""

    request: web.Request
    asked: A

    @property
    def job(self) -> str:
        return self.request.match_info["job"]


class Route(msgspec.Struct, frozen=True):
    """`content`: the content type of the answer; empty for the JSON object that `handle` is declared to return."""

    method: str
    path: str
    section: str
    content: str
    handle: Callable[[Handlers, Call[Any]], Awaitable[Any]]

    @property
    def asked(self) -> type[Any]:
        """The struct of the body or query, by the annotation of `handle`."""
        (asked,) = get_args(self.handle.__annotations__["call"])
        return cast(type[Any], asked)

    @property
    def name(self) -> str:
        return self.handle.__name__

    @property
    def title(self) -> str:
        return (self.handle.__doc__ or "").strip()
