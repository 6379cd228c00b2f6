"""Engines that map users: what a rootless one is asked for, and the check of what it did; a guest of one with `userns-remap`.

test_docker_podman.py and test_engines.py run on a rootless engine.
"""

import pwd
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest

from mesh.execution.disk_usage import Disk
from mesh.execution.docker.engine import DockerEngine, Unseen
from mesh.execution.docker.hardening import GUEST_UID, KEEP_ID, Traits, arguments
from mesh.execution.engine import EngineError
from mesh.execution.process.engine import ProcessEngine
from mesh.util.processes import Process
from tests.container_images import import_busybox
from tests.dockerd import dockerd
from tests.execution.bench import Bench
from tests.execution.place import entry


def test_disk_rate_is_asked_of_engines_that_can_limit_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk("8:0", "/dev/sda")
    monkeypatch.setattr("mesh.execution.docker.hardening.disk_of", lambda path: disk)
    launch = Bench(ProcessEngine(), tmp_path, "image").launch("true", disk_bps=1 << 20)
    assert arguments(launch, {}, "none", Traits())["device_read_bps"] == [{"Path": disk.path, "Rate": 1 << 20}]
    assert "device_read_bps" not in arguments(launch, {}, "none", Traits(disk_rate=False)), "crun would start nothing"


@pytest.mark.parametrize(("rootless", "userns"), [(False, ""), (True, KEEP_ID)])
def test_mapping_of_users_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rootless: bool, userns: str
) -> None:
    asked = dict[str, Any]()
    client = docker.DockerClient(base_url=f"unix://{tmp_path}/none", version="1.41")
    monkeypatch.setattr(client.api, "create_container", lambda **made: asked.update(made) or {"Id": "c" * 64})
    launch = Bench(ProcessEngine(), tmp_path, "image").launch("true", memory_mib=64)
    traits = Traits("Podman", rootless=rootless)
    made = Unseen(client).create("sha256:1", traits.userns, **arguments(launch, {}, "none", traits))
    assert made.id == "c" * 64 and asked["image"] == "sha256:1" and asked["user"] != "0:0"
    assert asked["host_config"].get("UsernsMode", "") == userns and asked["host_config"]["Memory"] == 64 << 20


@pytest.mark.parametrize("name", ["Docker", "Podman"])
@pytest.mark.parametrize(
    ("file", "value"),
    [("memory.max", "max"), ("memory.swap.max", "4096"), ("pids.max", "65"), ("cpu.max", "60000 100000")],
)
def test_guest_that_a_rootless_engine_did_not_limit_is_refused(
    tmp_path: Path, bystander: Process, name: str, file: str, value: str
) -> None:
    launch = Bench(ProcessEngine(), tmp_path, "image").launch("true", memory_mib=64, cpus=0.5, pids=64)
    engine, scope = DockerEngine("node"), tmp_path / "libpod-x.scope"
    group = scope / "container"
    group.mkdir(parents=True)
    for limit, (above, own) in {
        "memory.max": ("67108864", "67108864"),
        "memory.swap.max": ("67108864", "0"),  # as crun 1.28 sets it
        "pids.max": ("64", "64"),
        "cpu.max": ("50000 100000", "50000 100000"),
    }.items():
        (scope / limit).write_text(above)
        (group / limit).write_text(own)
    started = entry(engine="docker", container="x", head=bystander, groups=(str(group), str(scope)))
    engine._traits = Traits(name, rootless=True)
    engine._check_limits(launch, started)
    for place in (scope, group):
        (place / file).write_text(value)
    with pytest.raises(EngineError, match=f"did not limit the container: {file}"):
        engine._check_limits(launch, started)
    with pytest.raises(EngineError, match=r"memory\.max"):
        engine._check_limits(launch, replace(started, groups=()))
    engine._check_limits(launch, replace(started, head=Process(bystander.pid, bystander.started - 1)))


REMAP = 'mount --bind "$0/subuid" /etc/subuid && mount --bind "$0/subgid" /etc/subgid && exec "$@"'


@pytest.mark.dockerd
async def test_guest_of_an_engine_that_maps_users_has_its_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`userns-remap`, with ranges that only this engine sees."""
    first, user = 200_000, pwd.getpwnam("nobody")
    for file in ("subuid", "subgid"):
        (tmp_path / file).write_text(f"{user.pw_name}:{first}:65536\n")
    within = ("unshare", "--mount", "sh", "-c", REMAP, str(tmp_path))
    with dockerd(f"--userns-remap={user.pw_uid}", within=within) as own:
        monkeypatch.setenv("DOCKER_HOST", own.host)
        root = tmp_path / "attempt"
        root.mkdir(mode=0o700)
        bench = Bench(DockerEngine("remapped"), root, import_busybox())
        try:
            said = await bench.output(
                "id -u; cat /proc/self/uid_map; for d in $MESH_OUT_DIR .; do echo it > $d/file; done"
            )
            assert said.split()[:3] == [str(GUEST_UID), "0", str(first)]
            for place in ("out", "work"):
                file = root / place / "file"
                assert file.read_text() == "it\n" and file.stat().st_uid == first + GUEST_UID
        finally:
            await bench.engine.close()
