"""The `apptainer` engine where its program does not matter: when it is offered, and what it is told."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from mesh.daemon.adverts import judged
from mesh.execution.apptainer import engine as apptainer
from mesh.execution.engine import Availability, BadImage, EngineError, Shown
from mesh.execution.process import engine as process
from mesh.execution.secret_files import GuestSecrets
from mesh.images.apptainer import ApptainerImages
from mesh.images.engine import Registry
from mesh.util.processes import Process
from tests.apptainer import DIGEST, apptainer_engine, unpacked
from tests.execution.bench import Bench

ALL = frozenset(process.LIMITS)


@pytest.fixture
def user_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a program `apptainer`, all limits and namespaces, for an ordinary user; return the program."""
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "${0%/*}/words"\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(process, "_probe_groups", lambda: ALL)
    monkeypatch.setattr(process, "_probe_kernel", lambda: process.Kernel(True, 6, True))
    return program


async def availability(root: Path) -> Availability:
    return await apptainer_engine(root).availability()


async def test_offered_to_a_user_with_limits_and_says_what_is_weaker(user_with: Path, tmp_path: Path) -> None:
    state = await availability(tmp_path)
    assert state.ok and "weaker than Docker" in state.isolation and state.proxies


@pytest.mark.parametrize(("kind", "name"), [("memory", "memory"), ("pids", "processes"), ("cpu", "CPU")])
async def test_not_offered_without_limits(
    user_with: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.setattr(process, "_probe_groups", lambda: ALL - {kind})
    state = await availability(tmp_path)
    assert not state.ok and f"({name})" in state.detail
    assert state.limits_by and state.limits_by in state.detail, "it says how to get them"


async def test_not_offered_to_root(user_with: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert "root" in (await availability(tmp_path)).detail


async def test_not_offered_without_namespaces_or_program(
    user_with: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_probe_kernel", lambda: process.Kernel(False, 6, True))
    assert not (await availability(tmp_path)).ok
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in (await availability(tmp_path)).detail


def test_offered_only_where_docker_is_not() -> None:
    ready, not_ready = Availability(ok=True, detail=""), Availability(ok=False, detail="")
    states = judged({"process": ready, "docker": ready, "apptainer": ready})
    assert states["docker"].ok and states["process"].ok and not states["apptainer"].ok
    assert judged({"docker": not_ready, "apptainer": ready})["apptainer"].ok
    assert judged({"process": ready, "apptainer": ready})["apptainer"].ok


def test_command_is_kept_from_the_machine(tmp_path: Path) -> None:
    engine, attempt = apptainer_engine(tmp_path), tmp_path / "attempt"
    attempt.mkdir()
    image = unpacked(tmp_path / "images")
    bench = Bench(engine, attempt, "busybox", image)
    launch = bench.launch("true", data=(Shown("/data/set", "/mesh/data/set", "SET"),))
    launch = msgspec.structs.replace(launch, secrets=GuestSecrets(directory="/secret"))
    words = engine._wrap(launch)
    assert {"--userns", "--contain", "--cleanenv", "--no-eval"} <= set(words)
    binds = {words[place + 1] for place, word in enumerate(words) if word == "--bind"}
    assert {"/data/set:/mesh/data/set:ro", "/run/secrets:/run/secrets:ro"} <= binds
    assert str(tmp_path / "images" / DIGEST) in words
    assert str(tmp_path / "images" / DIGEST) in engine._reads(launch), "a guest cannot change the image"
    with pytest.raises(EngineError, match="cannot show"):
        engine._wrap(msgspec.structs.replace(launch, work_dir="/a:/etc:rw"))
    with pytest.raises(EngineError, match="cannot set"):
        engine._environment(msgspec.structs.replace(launch, env={"A-B": "x"}))


@pytest.mark.parametrize("image_id", [None, "busybox:latest", "sha256:../bin", f"sha256:{'cd' * 32}"])
async def test_image_is_one_of_the_store_by_its_digest(user_with: Path, tmp_path: Path, image_id: str | None) -> None:
    engine, attempt = apptainer_engine(tmp_path), tmp_path / "attempt"
    attempt.mkdir()
    unpacked(tmp_path / "images")
    with pytest.raises(BadImage):
        await engine.start(Bench(engine, attempt, "busybox", image_id).launch("true"))
    await engine.close()


# --- the store of images


async def reached(process: Process) -> None:
    """Every process reaches it."""


def store(root: Path) -> ApptainerImages:
    return ApptainerImages(root / "images", lambda: Registry("127.0.0.1:5", "secret", reached))


async def test_image_is_pulled_by_its_digest(user_with: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="did not unpack"):
        await store(tmp_path).pull(bytes.fromhex(DIGEST), "tag")
    words = (user_with.parent / "words").read_text().split()
    assert words[-1] == f"docker://127.0.0.1:5/campus-mesh/fetched@sha256:{DIGEST}"
    assert await store(tmp_path).images() == [], "nothing half unpacked is an image"


async def test_images_are_listed_found_and_removed(tmp_path: Path) -> None:
    image, images = unpacked(tmp_path / "images"), store(tmp_path)
    (tmp_path / "images" / "else").mkdir()
    (tmp_path / "images" / ("ee" * 32)).symlink_to(tmp_path)
    (found,) = await images.images()
    assert found.id.hex() == DIGEST and found.fetched and found.size > 100_000 and not found.names
    assert await images.find(image) == found and await images.find("busybox") is None
    assert await images.find(f"sha256:{'ee' * 32}") is None, "a link is no image"
    assert await images.remove(found) and await images.find(image) is None
    assert await images.remove(found), "it is gone already"
    assert (tmp_path / "images" / "else").is_dir()


async def test_removal_follows_no_link(tmp_path: Path) -> None:
    image = unpacked(tmp_path / "images")
    (found,) = await store(tmp_path).images()
    (tmp_path / "images" / DIGEST).rename(tmp_path / "precious")
    (tmp_path / "images" / DIGEST).symlink_to(tmp_path / "precious")
    with pytest.raises(EngineError):
        await store(tmp_path).remove(found)
    assert (tmp_path / "precious" / "bin" / "busybox").exists() and image


async def test_image_in_use_stays(tmp_path: Path) -> None:
    engine, attempt = apptainer_engine(tmp_path), tmp_path / "attempt"
    attempt.mkdir()
    bench = Bench(engine, attempt, "busybox", unpacked(tmp_path / "images"))
    (found,) = await store(tmp_path).images()
    held = await asyncio.to_thread(engine._hold, bench.launch("true"))
    assert not await store(tmp_path).remove(found)
    os.close(held)
    assert await store(tmp_path).remove(found)
    await engine.close()


def test_words_say_what_is_not_isolated() -> None:
    for word in ("user namespaces", "/proc", "user id", "/bin/sh"):
        assert word in apptainer.WEAKER


# --- what a real guest reaches


@pytest.fixture
async def guest_bench(tmp_path: Path) -> AsyncIterator[Bench]:
    (tmp_path / "attempt").mkdir()
    (tmp_path / "key").write_text("the daemon's key")
    bench = Bench(apptainer_engine(tmp_path), tmp_path / "attempt", "busybox", unpacked(tmp_path / "images"))
    yield bench
    for guest in bench.guests:
        await guest.kill()
    await bench.engine.close()


@pytest.mark.apptainer
async def test_guest_cannot_reach_the_machine(guest_bench: Bench, tmp_path: Path) -> None:
    script = f"""
    busybox cat {tmp_path}/key && echo KEY
    touch /bin/new && echo IMAGE
    for max in $(busybox find /sys/fs/cgroup -name 'memory.max' -o -name 'memory.limit_in_bytes' -o -name pids.max); do
      echo LIMIT
      (echo max > $max) 2>/dev/null && echo RAISED
    done
    busybox grep -v 'lo:' /proc/net/dev | busybox grep : && echo NETWORK
    busybox ps | busybox grep -e '-m pytes[t]' && echo PROCESSES
    busybox chroot / busybox mount -t tmpfs none /bin 2>/dev/null && echo MOUNT
    busybox env | busybox grep PYTEST_CURRENT && echo ENVIRONMENT
    id -u
    """
    said = await guest_bench.output(script)
    seen = ("KEY", "IMAGE", "RAISED", "NETWORK", "PROCESSES", "MOUNT", "ENVIRONMENT")
    assert "LIMIT" in said, "its control groups are in view, to be read only"
    assert str(os.getuid()) in said.splitlines() and not [word for word in seen if word in said.splitlines()], said


@pytest.mark.apptainer
async def test_image_of_a_running_guest_stays(guest_bench: Bench, tmp_path: Path) -> None:
    guest = await guest_bench.shell("echo ready; sleep 600")
    await guest_bench.until_logged("ready")
    (found,) = await store(tmp_path).images()
    assert not await store(tmp_path).remove(found)
    await guest.kill()
    assert await store(tmp_path).remove(found)
