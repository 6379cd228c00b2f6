"""Ask an image for its Python: hostile answers are refused, and a guest that never answers is ended."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mesh.execution.engine import BadCommand, EngineError, Guest, Launch
from mesh.execution.process.engine import ProcessEngine
from mesh.jobs import image_python
from mesh.jobs.image_python import ImagePython, ask, parse
from mesh.model.environment import EnvironmentRefused

MACHINE = os.uname().machine


def told(
    path: Any = "/usr/bin/python3.12", version: Any = (3, 12, 1), kind: Any = "cpython", libc: Any = "musl"
) -> bytes:
    return json.dumps([path, version, kind, libc]).encode()


@pytest.mark.parametrize(
    ("libc", "platform"),
    [
        ("musl", "unknown-linux-musl"),
        ("glibc 2.17", "manylinux_2_17"),
        ("glibc 2.29", "manylinux_2_28"),
        ("glibc 2.36", "manylinux_2_36"),
        ("glibc 2.99", "manylinux_2_40"),
    ],
)
def test_platform_is_the_newest_that_the_image_can_run(libc: str, platform: str) -> None:
    found = parse(told(libc=libc), "it")
    assert found == ImagePython("/usr/bin/python3.12", "3.12.1", f"{MACHINE}-{platform}") and found.name == "python3.12"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"hello",
        b"[" * 5000,
        told() + b"x",
        told(version=[3, 12]),
        told(version=[3, 12, -1]),
        told(version=[3, 12, 10**30]),
        told(version=["3", "12", "1"]),
        told(kind="pypy"),
        told(libc="glibc 2.5"),
        told(libc="glibc 3.1"),
        told(libc="glibc 2.36 --find-links /"),
        *(
            told(path=path)
            for path in ("python3", "", "/", "/a/../b", "/a\nhome = /b", "//x", "/a b", "/./a", "/a/..", None, 3)
        ),
    ],
)
def test_hostile_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(EnvironmentRefused):
        parse(answer, "it")


@pytest.mark.parametrize(
    ("wanted", "fits"), [(">=3.11", True), ("==3.12.*", True), (">=3.11, <3.12", False), ("!=3.12.1", False)]
)
def test_lock_names_the_versions_that_it_is_for(wanted: str, fits: bool) -> None:
    python = parse(told(), "it")
    if fits:
        python.check(wanted)
        return
    with pytest.raises(EnvironmentRefused, match=r"its image has 3\.12\.1"):
        python.check(wanted)


def test_versions_that_mean_nothing_are_refused() -> None:
    with pytest.raises(EnvironmentRefused, match="names no versions"):
        parse(told(), "it").check("<>=1")


class Engine(ProcessEngine):
    """An engine of plain processes, whose "image" is this machine; it runs `instead` if that is given."""

    def __init__(self, *instead: str) -> None:
        super().__init__()
        self.instead, self.guests = instead, list[Guest]()

    async def start(self, launch: Launch) -> Guest:
        self.guests.append(await super().start(msgspec.structs.replace(launch, argv=self.instead or launch.argv)))
        return self.guests[-1]


@pytest.mark.parametrize(
    ("unlike", "kind"),
    [
        ("sys.abiflags = 't'", "cpython without a GIL"),  # it has wheels and a directory of packages of its own
        ("sys.maxsize = 2**31 - 1", "cpython of 32 bits"),  # on a kernel of 64, as an image of i386
    ],
)
def test_python_with_other_wheels_is_refused(unlike: str, kind: str) -> None:
    program = f"import sys; {unlike}\n{image_python.TELL}"
    answer = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, check=True).stdout
    with pytest.raises(EnvironmentRefused, match=f"the python3 of image it is '{kind}': environments are for"):
        parse(answer, "it")


async def test_image_tells_its_python(tmp_path: Path) -> None:
    engine = Engine()
    found = await ask(engine, tmp_path / "python", "it", None, "j" * 26, "desk")
    assert Path(found.path).is_file() and found.version.startswith("3.") and found.platform.startswith(MACHINE)
    await engine.close()


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("exit 127", EnvironmentRefused, "has no python3"),
        ("exit 3", EngineError, "ended with 3"),
        ("head -c 100000 /dev/zero", EnvironmentRefused, "does not say what it is"),
        ("sleep 600", EngineError, "did not say in"),
        ("cd $MESH_OUT_DIR; head -c 8000000 /dev/zero > file; sleep 600", EnvironmentRefused, "writes files before"),
        (
            "cd $MESH_OUT_DIR; for a in $(seq 200); do : > $a; done; sleep 600",
            EnvironmentRefused,
            "writes files before",
        ),
        ("head -c 8000000 /dev/zero; sleep 600", EnvironmentRefused, "writes files before"),
    ],
)
async def test_image_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: type[Exception], words: str
) -> None:
    monkeypatch.setattr(image_python, "WITHIN_S", 1.0 if script.startswith("sleep") else 60.0)
    engine = Engine("sh", "-c", script)
    with pytest.raises(error, match=words):
        async with asyncio.timeout(20):
            await ask(engine, tmp_path / "python", "it", None, "j" * 26, "desk")
    assert not await engine.guests[0].pids()
    await engine.close()


async def test_image_without_the_program(tmp_path: Path) -> None:
    class Without(ProcessEngine):
        async def start(self, launch: Launch) -> Guest:
            raise BadCommand("no python3", 127)

    with pytest.raises(EnvironmentRefused, match="image it has no python3 for an environment"):
        await ask(Without(), tmp_path / "python", "it", None, "j" * 26, "desk")
