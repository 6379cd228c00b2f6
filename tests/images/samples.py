"""Images as their bytes, without an engine."""

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from mesh.images.allowlist import Image
from mesh.images.oci import INDEX, MANIFEST

CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def digest_of(data: bytes) -> str:
    return f"sha256:{sha256(data).hexdigest()}"


def described(data: bytes, kind: str, **more: object) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest_of(data), "size": len(data), **more}


def manifest_of(config: bytes, layers: Sequence[bytes]) -> bytes:
    parts = {"config": described(config, CONFIG), "layers": [described(layer, LAYER) for layer in layers]}
    return json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, **parts}).encode()


def index_of(**manifests: bytes) -> bytes:
    """Return an index of manifests by architecture."""
    rows = [
        described(data, MANIFEST, platform={"architecture": name, "os": "linux"}) for name, data in manifests.items()
    ]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": rows}).encode()


def image_of(config: bytes, manifest: bytes) -> Image:
    return Image(sha256(config).digest(), sha256(manifest).digest())
