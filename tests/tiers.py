"""What this machine can run beyond plain Python. A missing tier is skipped by name, or fails where it is required."""

import os
from functools import cache

REQUIRE = "MESH_REQUIRE_TIERS"


@cache
def docker_problem() -> str:
    """Why there is no Docker engine to test with; empty if there is one."""
    import docker
    import docker.errors

    try:
        client = docker.from_env(timeout=10)
        client.ping()
        client.close()
    except (docker.errors.DockerException, OSError) as error:
        return f"no Docker engine answers ({str(error)[:100]})"
    return ""


PROBES = {"docker": docker_problem}


def required() -> set[str]:
    return {name for name in os.environ.get(REQUIRE, "").split(",") if name}
