"""Generate requests that a hostile member could send: valid ones with some of their fields, ids and paths replaced.

Everything comes from one seed. Values are drawn from what the member can know: ids of jobs, nodes and manifests, signed
descriptions, terms in use, and values at the edges of their types.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from ckptstore.messages import ChunkRequest, MissingQuery
from mesh.checkpoints.key_shares import Share
from mesh.consensus.messages import AnyMessage
from tests.versions.vectors import sample

INTEGERS = (0, 1, 2, 3, 7, 255, 2**31, 2**40, 2**63 - 1, -1)
TEXTS = ("", "x", "mallory", "../../node.key", "\x1b[2J", "\u202e", "x" * 70_000)
JUNK = (b"", b"\xc1", b"\x00" * 16, b"\xff" * 32, b"\x91" * 5000, b"x" * 70_000)
MESSAGES = get_args(AnyMessage)

# Method and path of each route; `{...}` is drawn by its name.
ROUTES = (
    ("POST", "/v1/messages"),
    ("POST", "/v1/chunks/missing"),
    ("PUT", "/v1/chunks?of={user}"),
    ("POST", "/v1/chunks/frames"),
    ("PUT", "/v1/manifests/{manifest}"),
    ("GET", "/v1/manifests/{manifest}"),
    ("GET", "/v1/jobs/{job}/spec"),
    ("GET", "/v1/jobs/{job}/witness-record"),
    ("GET", "/v1/jobs/{job}/key"),
    ("PUT", "/v1/jobs/{job}/share"),
    ("GET", "/v1/jobs/{job}/tunnel/{way}"),
    ("GET", "/v1/jobs/{job}/control/{name}"),
    ("GET", "/v1/jobs/{job}/events"),
    ("GET", "/v1/jobs/{job}/files?path={user}"),
    ("GET", "/v1/jobs/{job}/log/{number}/{node}?offset={number}"),
    ("PUT", "/v1/jobs/{job}/log/{number}?offset={number}"),
    ("GET", "/v1/usage?since={number}"),
    ("PUT", "/v1/submissions/{job}"),
    ("DELETE", "/v1/submissions/{job}"),
    ("GET", "/v1/images/{image}/blobs/{digest}"),
    ("POST", "/v1/images/{image}/pieces"),
    ("GET", "/v1/images/{image}/fetch"),
    ("POST", "/v1/images/{image}/fetch"),
    ("POST", "/v1/packages"),
    ("POST", "/v1/packages/{digest}"),
    ("GET", "/v1/data/{manifest}"),
    ("GET", "/v1/data/{manifest}/held"),
    ("POST", "/v1/data/{manifest}/fetch"),
    ("POST", "/v1/data/{manifest}/chunks?job={job}"),
    ("POST", "/v1/data/{manifest}/missing?job={job}"),
    ("GET", "/v1/{name}"),
)


class Known(NamedTuple):
    """What the hostile member knows of the mesh."""

    jobs: Sequence[bytes]
    nodes: Sequence[bytes]
    manifests: Sequence[bytes]
    sealed: Sequence[bytes]  # signed descriptions and manifests of others
    terms: Sequence[int]


class Request(NamedTuple):
    method: str
    path: str
    body: bytes


class Generator:
    def __init__(self, known: Known, seed: int) -> None:
        self._known, self._random = known, random.Random(seed)

    def requests(self, count: int) -> Iterator[Request]:
        for number in range(count):
            method, path = ROUTES[number % len(ROUTES)] if number % 2 else ROUTES[0]  # half are job messages
            yield Request(method, self._path(path), self._body(path) if method in {"POST", "PUT"} else b"")

    def messages(self, count: int) -> Iterator[Request]:
        """Yield job messages only, as a witness of the known jobs sends them."""
        for _ in range(count):
            yield Request("POST", ROUTES[0][1], self._body(ROUTES[0][1]))

    def _path(self, template: str) -> str:
        known, draw = self._known, self._random
        values = {
            "user": draw.choice(("zz", "616461", "6d616c6c6f7279", "2e2e2f2e2e2f6e6f64652e6b6579", "")),
            "manifest": self._hex(known.manifests, 32),
            "job": self._hex(known.jobs, 16),
            "node": self._hex(known.nodes, 32),
            "image": self._hex((), 32),
            "digest": self._hex((), 32),
            "way": draw.choice(("exec", "attach", "port-80", "port-70000", "socket-..", "jupyter")),
            "name": draw.choice(("notice.json", "..%2f..%2fnode.key", "progress", "%00", "status")),
            "number": str(draw.choice((0, 1, 2, 2**40, "x", -1))),
        }
        return template.format_map(values)

    def _hex(self, known: Sequence[bytes], size: int) -> str:
        kind = self._random.random()
        if known and kind < 0.8:
            return self._random.choice(known).hex()
        return self._random.randbytes(size if kind < 0.95 else self._random.randrange(40)).hex() or "0"

    def _body(self, path: str) -> bytes:
        draw = self._random
        if draw.random() < 0.05:
            return draw.choice(JUNK)
        if path == "/v1/messages":
            batch = [self._mutated(draw.choice(MESSAGES)) for _ in range(draw.randint(1, 3))]
            return msgspec.msgpack.encode(batch)
        if path.startswith(("/v1/chunks/", "/v1/data/")):
            return self._mutated(MissingQuery if "missing" in path else ChunkRequest)
        if path.startswith("/v1/packages"):
            return msgspec.msgpack.encode(self._replaced([draw.randbytes(32), 0]))
        if path.endswith("/share"):
            return self._mutated(Share)
        if path.startswith(("/v1/manifests", "/v1/submissions")):
            return self._scratched(draw.choice(self._known.sealed))
        return self._mutated(draw.choice((ChunkRequest, Share)))

    def _scratched(self, data: bytes) -> bytes:
        """Return signed bytes of another node as they are, or with one byte changed."""
        changed = bytearray(data)
        if self._random.random() < 0.7:
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _mutated(self, kind: type) -> bytes:
        """Return a message of this kind with some of its leaves replaced, and those of its fields that name things filled in."""
        value = msgspec.msgpack.decode(msgspec.msgpack.encode(sample(kind)), strict=False)
        return msgspec.msgpack.encode(self._replaced(value))

    def _field(self, name: str, value: Any) -> Any:
        pools = {"job": self._known.jobs, "term": self._known.terms, "spec": self._known.sealed, "type": (value,)}
        if name in pools and self._random.random() < 0.95:
            return self._random.choice(pools[name])
        return self._replaced(value)

    def _replaced(self, value: Any) -> Any:
        draw, known = self._random, self._known
        match value:
            case dict():
                return {key: self._field(key, one) for key, one in value.items()}
            case list():
                return [self._replaced(one) for one in value]
            case _ if draw.random() < 0.03:
                return draw.choice((None, True, 1.5, "text", b"bytes", [], {}, -1))
            case bool() | None | float():
                return value
            case int():
                return draw.choice((value, *INTEGERS, *known.terms, *known.terms))
            case bytes():
                pool = (known.jobs, known.nodes, known.manifests, known.sealed, (value,), JUNK)
                return draw.choice(draw.choices(pool, (4, 3, 2, 2, 1, 0.3))[0])
            case str():
                return value if draw.random() < 0.8 else draw.choice(TEXTS)
        return value
