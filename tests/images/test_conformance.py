"""The registry against the conformance tests of the OCI distribution specification 1.1, made again as a table.

Titles are those of its folder `conformance` (opencontainers/distribution-spec, v1.1.0), as far as it has the case. Where it
allows several answers, the table has ours.
"""

import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mesh.images.oci import INDEX, MANIFEST
from tests.images.samples import digest_of, index_of, manifest_of
from tests.images.test_registry import BODY as IMAGE
from tests.images.test_registry import Client, campus, client

__all__ = ["campus", "client"]  # fixtures

CONFIG, LAYER, CUT = b'{"rootfs":{}}', os.urandom(3 << 20), 1 << 20
NOWHERE = digest_of(b"nowhere")
BODY, EMPTY = manifest_of(CONFIG, [LAYER]), manifest_of(CONFIG, [])
MANY = index_of(amd64=BODY, riscv64=EMPTY)
KIND, REPOSITORY = {"Content-Type": MANIFEST}, "/v2/lab/tool"
UPLOADS = f"{REPOSITORY}/blobs/uploads/"


def blob(data: bytes, name: str = REPOSITORY) -> str:
    return f"{name}/blobs/{digest_of(data)}"


def manifest(reference: str | bytes) -> str:
    return f"{REPOSITORY}/manifests/{digest_of(reference) if isinstance(reference, bytes) else reference}"


def part(first: int, last: int) -> dict[str, str]:
    return {"Content-Range": f"{first}-{last}", "Content-Type": "application/octet-stream"}


def tags(*names: str) -> bytes:
    return json.dumps({"name": "lab/tool", "tags": names}).encode()


class Case(NamedTuple):
    """`path`: `@` is the location of the last upload. `gives`: the body; `has`: headers of the answer."""

    title: str
    method: str
    path: str
    status: int
    body: bytes | None = None
    sends: Mapping[str, str] = MappingProxyType({})
    gives: bytes | None = None
    has: Mapping[str, str] = MappingProxyType({})


LAST = len(LAYER) - 1
PUSH = [
    Case("determine support", "GET", "/v2/", 200),
    # Streamed and monolithic uploads
    Case("GET nonexistent blob", "GET", blob(CONFIG), 404),
    Case("POST request to begin a streamed upload", "POST", UPLOADS, 202),
    Case("PATCH with blob in request", "PATCH", "@", 202, LAYER[:CUT], has={"Range": f"0-{CUT - 1}"}),
    Case("PATCH with more, without a range", "PATCH", "@", 202, LAYER[CUT:], has={"Range": f"0-{LAST}"}),
    Case(
        "PUT request to session URL with digest",
        "PUT",
        f"@?digest={digest_of(LAYER)}",
        201,
        has={"Location": blob(LAYER)},
    ),
    Case("the upload is over", "GET", "@", 404),
    Case(
        "POST with digest and blob",
        "POST",
        f"{UPLOADS}?digest={digest_of(CONFIG)}",
        201,
        CONFIG,
        has={"Location": blob(CONFIG)},
    ),
    Case("GET request to existing blob URL", "GET", blob(CONFIG), 200, gives=CONFIG),
    Case("POST request yields a session ID", "POST", UPLOADS, 202),
    Case(
        "PUT upload of a blob", "PUT", f"@?digest={digest_of(b'mono')}", 201, b"mono", has={"Location": blob(b"mono")}
    ),
    Case("GET blob after it", "GET", blob(b"mono"), 200, gives=b"mono"),
    # Chunked uploads
    Case("POST to begin a chunked upload", "POST", UPLOADS, 202),
    Case("Out-of-order blob upload", "PATCH", "@", 416, b"nked", part(3, 6)),
    *(
        Case(f"range {wrong}", "PATCH", "@", 416, b"x", {"Content-Range": wrong})
        for wrong in ("1-0", "x", "0-", "9" * 30 + "-1")
    ),
    Case("PATCH request with first chunk", "PATCH", "@", 202, b"chu", part(0, 2), has={"Range": "0-2"}),
    Case("Retry previous blob chunk", "PATCH", "@", 416, b"chu", part(0, 2)),
    Case("Get on stale blob upload", "GET", "@", 204, has={"Range": "0-2"}),
    Case("PATCH request with second chunk", "PATCH", "@", 202, b"nk", part(3, 4), has={"Range": "0-4"}),
    Case("PUT request with final chunk", "PUT", f"@?digest={digest_of(b'chunked')}", 201, b"ed", part(5, 6)),
    Case("GET blob after chunks", "GET", blob(b"chunked"), 200, gives=b"chunked"),
    # Cross-repository mounts
    Case("POST mount with from", "POST", f"/v2/other/blobs/uploads/?mount={digest_of(CONFIG)}&from=lab/tool", 201),
    Case("GET mounted blob", "GET", blob(CONFIG, "/v2/other"), 200, gives=CONFIG),
    Case("POST mount without from", "POST", f"/v2/third/blobs/uploads/?mount={digest_of(CONFIG)}", 201),
    Case("Cross-mounting of nonexistent blob", "POST", f"{UPLOADS}?mount={NOWHERE}&from=other", 202),
    Case("cancel an upload", "DELETE", "@", 204),
    # Manifests
    Case("GET nonexistent manifest", "GET", manifest("1"), 404),
    Case("PUT with a tag", "PUT", manifest("1"), 201, BODY, KIND, has={"Location": manifest(BODY)}),
    Case("PUT with a digest", "PUT", manifest(BODY), 201, BODY, KIND, has={"Docker-Content-Digest": digest_of(BODY)}),
    Case("manifest upload with no layers", "PUT", manifest("3"), 201, EMPTY, KIND),
    Case("PUT with an index", "PUT", manifest("2"), 201, MANY, {"Content-Type": INDEX}),
    Case("400 response body is OCI-conforming JSON", "PUT", manifest("sha256:totallywrong"), 400, BODY, KIND),
]
PULL = [
    Case("HEAD request to nonexistent blob", "HEAD", f"{REPOSITORY}/blobs/{NOWHERE}", 404),
    Case("HEAD request to existing blob", "HEAD", blob(LAYER), 200, gives=b"", has={"Content-Length": str(len(LAYER))}),
    Case("GET nonexistent blob", "GET", f"{REPOSITORY}/blobs/{NOWHERE}", 404),
    Case(
        "GET request to existing blob URL",
        "GET",
        blob(LAYER),
        200,
        gives=LAYER,
        has={"Docker-Content-Digest": digest_of(LAYER)},
    ),
    Case("a range of a blob", "GET", blob(LAYER), 206, sends={"Range": "bytes=5-9"}, gives=LAYER[5:10]),
    Case("a range outside", "GET", blob(b"mono"), 416, sends={"Range": "bytes=90-99"}),
    Case("HEAD request to nonexistent manifest", "HEAD", manifest(NOWHERE), 404),
    Case("GET nonexistent manifest", "GET", manifest("none"), 404),
    *(
        Case(
            f"{method} manifest {reference[:9]}",
            method,
            manifest(reference),
            200,
            gives=data,
            has=KIND | {"Content-Length": str(len(BODY))},
        )
        for reference in ("1", digest_of(BODY))
        for method, data in (("HEAD", b""), ("GET", BODY))
    ),
    Case("GET index", "GET", manifest("2"), 200, gives=MANY, has={"Content-Type": INDEX}),
]
DISCOVERY = [
    Case("GET request to list tags", "GET", f"{REPOSITORY}/tags/list", 200, gives=tags("1", "2", "3")),
    Case(
        "GET number of tags",
        "GET",
        f"{REPOSITORY}/tags/list?n=2",
        200,
        gives=tags("1", "2"),
        has={"Link": f'<{REPOSITORY}/tags/list?n=2&last=2>; rel="next"'},
    ),
    Case("GET start of tag is set by last", "GET", f"{REPOSITORY}/tags/list?n=2&last=2", 200, gives=tags("3")),
    Case("no tags", "GET", f"{REPOSITORY}/tags/list?n=0", 200, gives=tags()),
    Case("not a number", "GET", f"{REPOSITORY}/tags/list?n=x", 400),
    Case("GET tags of an unknown repository", "GET", "/v2/none/tags/list", 404),
    Case("GET referrers: clients use the tag schema", "GET", f"{REPOSITORY}/referrers/{digest_of(BODY)}", 404),
]
MANAGEMENT = [
    Case("DELETE request to manifest tag", "DELETE", manifest("3"), 202),
    Case("DELETE request to deleted tag", "DELETE", manifest("3"), 404),
    Case("GET request to deleted tag", "GET", manifest("3"), 404),
    Case("DELETE request to manifest digest", "DELETE", manifest(BODY), 202),
    Case("GET request to deleted manifest URL", "GET", manifest(BODY), 404),
    Case("its tag is gone", "GET", f"{REPOSITORY}/tags/list", 200, gives=tags("2")),
    Case("DELETE request to blob URL", "DELETE", blob(LAYER), 405),
]


async def test_registry_conforms_to_specification(client: Client) -> None:
    place, wrong = "", list[str]()
    for case in (*PUSH, *PULL, *DISCOVERY, *MANAGEMENT):
        path = case.path.replace("@", place)
        status, headers, body = await client.ask(case.method, path, case.body, dict(case.sends))
        expected: Any = {"status": case.status, "body": body if case.gives is None else case.gives, **case.has}
        told: Any = {"status": status, "body": body, **{name: headers.get(name) for name in case.has}}
        if "application/json" in headers.get("Content-Type", "") and case.gives is not None:
            expected["body"], told["body"] = json.loads(case.gives), json.loads(body)
        if told != expected:
            differs = {key: (told[key], value) for key, value in expected.items() if told[key] != value}
            wrong.append(f"{case.title}: {str(differs)[:300]}")
        if case.path == UPLOADS or status == 202:
            place = headers.get("Location", place)
    assert not wrong, "\n".join(wrong)


async def test_listed_image_is_not_deleted_by_a_client(client: Client, campus: Any) -> None:
    await client.push_image()
    campus.allowed.add(bytes.fromhex(digest_of(IMAGE).removeprefix("sha256:")))
    assert (await client.ask("DELETE", manifest(IMAGE)))[0] == 405
