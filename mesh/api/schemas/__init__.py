"""Answers of the daemon on its socket, field by field: a module for each section of the API.

Handlers return these structs, the OpenAPI document is made from them (mesh.api.openapi), and clients decode them.
`_unix` is seconds of wall time since 1970, `_unix_ms` milliseconds; `_s` is seconds, `_h` hours, `_mib` mebibytes. A node
is given by its nick where a field does not say otherwise. A field that is added later has a default, so that newer clients read
answers of older daemons; clients ignore fields that they do not know.
"""

from mesh.api.schemas import checkpoints, data, gpus, images, jobs, mesh, owner, secrets, trust

__all__ = ["checkpoints", "data", "gpus", "images", "jobs", "mesh", "owner", "secrets", "trust"]
