"""Recorded answers of engines: Docker 20.10, 26.1 and 28.5, Podman 4.3 and 5.8. Answers that a guest could cause."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from mesh.execution.docker import gpu_visibility
from mesh.execution.docker.engine import no_program
from mesh.execution.docker.hardening import docker_host, traits_of
from mesh.execution.docker.socket import MOST_BYTES, EngineSocket

STARTED = "failed to create task for container: failed to create shim task: OCI runtime create failed: "


PODMAN = {"Version": "5.8.6", "Components": [{"Name": "Podman Engine", "Version": "5.8.6"}, {"Name": "Conmon"}]}
OF_PODMAN = {
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=default", "name=rootless"],
    "Rootless": True,
    "CgroupDriver": "systemd",
    "CgroupVersion": "2",
    "DockerRootDir": "/home/alice/.local/share/containers/storage",
}


def host(user: int | None = None, **changes: object) -> dict[str, object]:
    """Return what Podman 5.8 says of its machine (`/libpod/info`), run by this user or another."""
    maps = [{"container_id": 0, "host_id": os.getuid() if user is None else user, "size": 1}]
    maps += [{"container_id": 1, "host_id": 100000, "size": 65536}]
    told = {"cgroupManager": "systemd", "cgroupVersion": "v2", "cgroupControllers": ["cpu", "memory", "pids"]}
    return {**told, "idMappings": {"gidmap": maps, "uidmap": maps}, **changes}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"SecurityOptions": ["name=seccomp,profile=default"], "CgroupVersion": "1"}, ""),
        ({"SecurityOptions": ["name=seccomp,profile=default", "name=userns"]}, "maps users (userns-remap)"),
        ({"SecurityOptions": None}, ""),
    ],
)
def test_docker_that_maps_users_in_an_unknown_way_runs_no_guests(told: dict[str, object], words: str) -> None:
    traits = traits_of({"Version": "1"}, told, {}, lingers=True)
    assert words in traits.problem and bool(words) == bool(traits.problem)


def test_only_root_gives_files_to_the_users_of_an_engine_that_maps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"SecurityOptions": ["name=userns"], "DockerRootDir": "/var/lib/docker/100000.100001"}
    for user, remapped in ((0, (100_000, 100_001)), (1000, (0, 0))):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        traits = traits_of({"Version": "1"}, told, {}, lingers=True)
        assert (traits.remapped, bool(traits.problem)) == (remapped, user != 0)


OF_DOCKER = {
    "SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless", "name=cgroupns"],
    "CgroupDriver": "systemd",
    "CgroupVersion": "2",
    "MemoryLimit": True,
    "PidsLimit": True,
    "CpuCfsQuota": True,
    "Warnings": ["WARNING: No cpuset support", "WARNING: No io.weight support", "WARNING: No io.max (rbps) support"],
}


def test_rootless_docker_runs_guests_as_its_user() -> None:
    traits = traits_of({}, OF_DOCKER, docker_host(OF_DOCKER, os.getuid()), lingers=True)
    assert (traits.name, traits.problem, traits.userns, traits.disk_rate) == ("Docker", "", "", False)
    assert traits.user == "0:0", "its own user, seen from inside"
    told = {**OF_DOCKER, "Warnings": None}
    assert traits_of({}, told, docker_host(told, os.getuid()), lingers=True).disk_rate


@pytest.mark.parametrize(
    ("told", "owner", "words"),
    [
        ({}, os.getuid() + 1, "not of this daemon's user"),
        ({"CgroupVersion": "1"}, os.getuid(), "control groups of version 2"),
        ({"CgroupDriver": "none"}, os.getuid(), "this user's systemd"),
        ({"CpuCfsQuota": False, "MemoryLimit": False}, os.getuid(), "may not limit cpu, memory"),
        ({"PidsLimit": False}, os.getuid(), "may not limit pids"),
    ],
)
def test_rootless_docker_is_refused_where_it_could_not_keep_a_guest(
    told: dict[str, object], owner: int, words: str
) -> None:
    said = {**OF_DOCKER, **told}
    traits = traits_of({}, said, docker_host(said, owner), lingers=True)
    assert traits.problem.startswith("Docker runs rootless: ") and words in traits.problem


def test_rootless_podman_runs_guests_as_its_user() -> None:
    traits = traits_of(PODMAN, OF_PODMAN, host(), lingers=True)
    assert (traits.name, traits.problem, traits.userns, traits.disk_rate) == ("Podman", "", "keep-id", False)
    assert traits.user != "0:0"
    controllers = ["cpu", "io", "memory", "pids"]
    assert traits_of(PODMAN, OF_PODMAN, host(cgroupControllers=controllers), lingers=True).disk_rate


@pytest.mark.parametrize(
    ("told", "lingers", "words"),
    [
        (host(user=os.getuid() + 1), True, "not of this daemon's user"),
        (host(idMappings={}), True, "not of this daemon's user"),
        (host(cgroupVersion="v1", cgroupControllers=[]), True, "control groups of version 2"),  # Podman 4.3
        (host(cgroupManager="cgroupfs"), True, "this user's systemd"),
        (host(cgroupControllers=["memory", "pids"]), True, "may not limit cpu"),
        (host(cgroupControllers=None), True, "may not limit cpu, memory, pids"),
        (host(), False, "loginctl enable-linger"),
        ({}, True, "not of this daemon's user"),
    ],
)
def test_rootless_podman_is_refused_where_it_could_not_keep_a_guest(
    told: dict[str, object], lingers: bool, words: str
) -> None:
    traits = traits_of(PODMAN, OF_PODMAN, told, lingers=lingers)
    assert traits.problem.startswith("Podman runs rootless: ") and words in traits.problem


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


class Probed:
    """An engine whose container answers `nvidia-smi` with `pieces`, and then with an exit code as this text."""

    def __init__(self) -> None:
        self.pieces, self.sent, self.ended = [b"GPU 0: Fake (UUID: GPU-aa)"], 0, '{"ExitCode": 0}'

    async def executed(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/exec"):
            return web.json_response({"Id": "e"}, status=201)
        if request.path.endswith("/json"):
            return web.Response(text=self.ended)
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(b"\x01\0\0\0" + len(piece).to_bytes(4, "big") + piece)
            self.sent += len(piece)
        return response


@pytest.fixture
async def probed(tmp_path: Path) -> AsyncIterator[tuple[Probed, EngineSocket]]:
    engine, app = Probed(), web.Application()
    app.router.add_route("*", "/{path:.*}", engine.executed)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "engine")).start()
    client = EngineSocket(str(tmp_path / "engine"))
    yield engine, client
    await client.close()
    await runner.cleanup()


async def test_endless_answer_about_gpus_is_none(probed: tuple[Probed, EngineSocket]) -> None:
    engine, client = probed
    assert await gpu_visibility.look(client, "c", 1, ("GPU-aa",)) == ""
    assert "GPU-bb" in await gpu_visibility.look(client, "c", 1, ("GPU-bb",))
    engine.pieces = [bytes(MOST_BYTES)] * 1000
    engine.sent = 0
    with pytest.raises(OSError, match="writes more than"):
        await client.execute("c", gpu_visibility.PROBE, gpu_visibility.PATH)
    assert engine.sent < 500 * MOST_BYTES
    assert await gpu_visibility.look(client, "c", 1, ("GPU-bb",)) == ""


async def test_answer_about_gpus_that_is_no_answer_ends_no_watch(probed: tuple[Probed, EngineSocket]) -> None:
    engine, client = probed
    engine.ended = "no such exec instance"
    assert await gpu_visibility.look(client, "c", 1, ("GPU-bb",)) == ""
