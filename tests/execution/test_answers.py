"""Recorded answers of engines: Docker 20.10 and 26.1, Podman 4.3."""

import pytest

from mesh.execution.docker.engine import no_program
from mesh.execution.docker.hardening import traits_of

STARTED = "failed to create task for container: failed to create shim task: OCI runtime create failed: "


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"SecurityOptions": ["name=seccomp,profile=default"], "CgroupVersion": "1"}, ""),
        ({"SecurityOptions": ["name=seccomp,profile=default"], "Rootless": True}, "runs rootless"),  # Podman
        ({"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}, "runs rootless"),  # Docker
        ({"SecurityOptions": ["name=seccomp,profile=default", "name=userns"]}, "maps users (userns-remap)"),
        ({"SecurityOptions": None}, ""),
    ],
)
def test_engine_with_user_mapping_runs_no_guests(told: dict[str, object], words: str) -> None:
    problem = traits_of({"Version": "1"}, told).problem
    assert words in problem and bool(words) == bool(problem)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (
            "nope",
            STARTED + 'unable to start container process: exec: "nope": executable file not found in $PATH: unknown',
        ),
        ("/bin", 'runc: runc create failed: unable to start container process: exec: "/bin": permission denied'),
    ],
)
def test_missing_program_is_job_fault(program: str, told: str) -> None:
    assert no_program(program, told)


def test_broken_runtime_is_node_fault() -> None:
    told = (
        STARTED + "unable to retrieve OCI runtime error (open /run/docker/log.json: no such file or directory): unknown"
    )
    assert not no_program("true", told)
