"""What the daemon answers on its socket, field by field: plain JSON values. The desks are held to it by the type checker, and the
document of the API is made of it (mesh.api.openapi); a module for each of its sections.

`_unix` is seconds of wall time since 1970, `_unix_ms` milliseconds; `_s` is seconds, `_h` hours, `_mib` mebibytes. A node is told
by its nick where a field does not say otherwise. New fields come without notice: who reads passes over what he does not know.
"""

from mesh.api.answers import checkpoints, gpus, images, jobs, mesh, owner, trust

__all__ = ["checkpoints", "gpus", "images", "jobs", "mesh", "owner", "trust"]
