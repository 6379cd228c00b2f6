"""Manifests and indexes from anybody: what is no image is refused, and what one names is bounded."""

import json
import platform
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.images.oci import (
    INDEX,
    MACHINES,
    MANIFEST,
    MAX_BLOB_BYTES,
    MAX_BLOBS,
    MAX_MANIFEST_BYTES,
    ManifestError,
    decode_oci,
    digest_hash,
    digest_text,
)

DIGEST = "sha256:" + "0a" * 32


def blob(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {"digest": f"sha256:{number:064x}", "size": 5, **changes}


def document(**changes: Any) -> bytes:
    return json.dumps({"schemaVersion": 2, "config": blob(1), "layers": [blob(2)], **changes}).encode()


def index(*manifests: dict[str, Any]) -> bytes:
    return json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        document(schemaVersion=1),
        document(config=None),
        document(manifests=[]),
        document(layers=[blob(2, size=-1)]),
        document(layers=[blob(2, size=MAX_BLOB_BYTES + 1)]),
        document(layers=[blob(2, digest="sha512:" + "0a" * 64)]),
        document(layers=[blob(2, digest="sha256:" + "0A" * 32)]),
        document(layers=[blob(2, digest=DIGEST + "\n")]),
        document(layers=[blob(2, digest="../../etc/passwd")]),
        document(config=blob(1, digest="")),
        document(layers=[blob(number) for number in range(MAX_BLOBS)]),
        document(annotations="x" * MAX_MANIFEST_BYTES),
        index(blob(1, size=MAX_MANIFEST_BYTES + 1)),
        index(blob(1, digest="latest")),
        index(*(blob(number) for number in range(MAX_BLOBS + 1))),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_oci(data)


def test_manifest_may_reach_its_bounds() -> None:
    most = decode_oci(document(layers=[blob(number, size=MAX_BLOB_BYTES) for number in range(2, MAX_BLOBS + 1)]))
    assert len(most.blobs) == MAX_BLOBS and most.blobs[0].digest == blob(1)["digest"]
    whole = document(annotations="")
    assert decode_oci(document(annotations="x" * (MAX_MANIFEST_BYTES - len(whole)))).media_type == MANIFEST
    assert len(decode_oci(index(*(blob(n, size=MAX_MANIFEST_BYTES) for n in range(MAX_BLOBS)))).manifests) == MAX_BLOBS


def test_blob_is_named_once_and_one_that_is_elsewhere_is_not_held() -> None:
    manifest = decode_oci(document(layers=[blob(2), blob(2), blob(3, urls=["https://example.org"])]))
    assert [one.digest for one in manifest.blobs] == [blob(1)["digest"], blob(2)["digest"]]


def test_media_type_is_one_that_registries_know() -> None:
    docker = "application/vnd.docker.distribution.manifest.v2+json"
    assert decode_oci(document(mediaType=docker)).media_type == docker
    assert decode_oci(document(mediaType="text/html")).media_type == MANIFEST
    assert decode_oci(index(blob(1))).media_type == INDEX


def test_index_gives_the_manifest_for_this_machine() -> None:
    here = MACHINES.get(platform.machine(), platform.machine())
    places = [("windows", here), ("linux", "s390x"), ("linux", here), ("linux", here)]
    rows = [blob(n, platform={"os": os, "architecture": machine}) for n, (os, machine) in enumerate(places)]
    found = decode_oci(index(*rows)).for_here
    assert found is not None and found.digest == rows[2]["digest"]
    assert decode_oci(index(*rows[:2])).for_here is None and decode_oci(document()).for_here is None


def test_digest_is_written_as_it_was_read() -> None:
    assert digest_text(digest_hash(DIGEST)) == DIGEST


@given(st.binary(max_size=200))
def test_other_bytes_raise_a_manifest_error(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_oci(data)
