"""Secrets in guests: as variables and as files in memory, and on no disk, in no argument and no text of the engine."""

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.execution.engine import EngineError, Launch
from mesh.execution.process.engine import ProcessEngine
from mesh.execution.process.sandbox import Sandbox
from mesh.execution.secret_files import (
    IN_MEMORY,
    VARIABLES,
    GuestSecrets,
    NoMemoryFiles,
    SecretFiles,
    file_system_of,
    own_directories,
    shell_lines,
)
from tests.execution.bench import Bench

NASTY = "canary-4711 ' \" $HOME `id` \\ \n end \n"
NODE = os.urandom(32)


@pytest.fixture
def files() -> Iterator[SecretFiles]:
    made = SecretFiles(NODE)
    yield made
    made.clear()


def test_files_are_in_memory_and_closed_to_others(files: SecretFiles) -> None:
    place = files.put("job-1", {"key": b"canary"})
    assert file_system_of(place) in IN_MEMORY and (place / "key").read_bytes() == b"canary"
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700 and stat.S_IMODE((place / "key").stat().st_mode) == 0o400
    again = files.put("job-1", {"other": b"x"})
    assert again == place and {path.name for path in place.iterdir()} == {"other"}
    files.put("job-2", {"key": b"canary"})
    files.remove("job-1")
    assert not place.exists() and (place.parent / "job-2").exists()
    SecretFiles(NODE).clear()  # as the next start of the node does
    assert not place.parent.exists()


def test_directory_of_another_user_takes_no_secrets(
    files: SecretFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(NoMemoryFiles, match="not a closed directory of this user"):
            files.put("job-1", {"key": b"canary"})
    assert not list(files.root.iterdir())
    (tmp_path / "mesh-secrets-1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert own_directories(("",), "mesh-secrets") == [] and len(own_directories((str(tmp_path),), "mesh-secrets")) == 1


def test_no_file_is_written_to_a_disk_or_into_a_directory_of_others(tmp_path: Path, files: SecretFiles) -> None:
    with pytest.raises(NoMemoryFiles, match="no directory in memory"):
        SecretFiles(NODE, (str(tmp_path),) if file_system_of(tmp_path) not in IN_MEMORY else ("/proc",)).put("a", {})
    root = files.root
    root.mkdir(mode=0o755)
    with pytest.raises(NoMemoryFiles, match="not a closed directory"):
        files.put("job-1", {"key": b"canary"})
    root.rmdir()
    root.symlink_to(tmp_path)
    try:
        with pytest.raises(OSError, match=r"exists|not a closed directory"):
            files.put("job-1", {"key": b"canary"})
        files.clear()
        assert root.is_symlink() and list(tmp_path.iterdir()) == []
    finally:
        root.unlink()


def test_known_name_that_is_taken_keeps_no_job_from_its_secrets(files: SecretFiles) -> None:
    taken = files.root.with_name(f"mesh-secrets-{NODE.hex()[:16]}")
    taken.mkdir(mode=0o755)
    try:
        assert (files.put("job-1", {"key": b"canary"}) / "key").read_bytes() == b"canary"
        assert SecretFiles(NODE).root != files.root, "each run draws its own"
    finally:
        taken.rmdir()


def test_attempt_whose_files_found_no_place_can_be_removed() -> None:
    """Regression: the attempt's end failed with it, and its proxy, data sets, environment and directory stayed."""
    nowhere = SecretFiles(NODE, bases=())
    with pytest.raises(NoMemoryFiles):
        nowhere.put("job-1", {"key": b"canary"})
    nowhere.remove("job-1")


def test_text_of_secrets_shows_no_value() -> None:
    launch_text = repr(GuestSecrets({"KEY": "canary"}, "/dev/shm/x"))
    assert "canary" not in launch_text and "KEY" not in launch_text


def test_shell_reads_every_value_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / VARIABLES
    path.write_bytes(shell_lines({"KEY": NASTY, "EMPTY": ""}))
    script = f'. {path} && exec "$@"'
    shown = subprocess.run(
        ["/bin/sh", "-c", script, "mesh", "printenv", "KEY"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == NASTY + "\n"


def test_process_with_secrets_makes_no_core_dump() -> None:
    code = (
        "import resource, subprocess\n"
        "from mesh.util.processes import no_core_dumps\n"
        "no_core_dumps()\n"
        "no_core_dumps()\n"
        "subprocess.run(['grep', 'core file', '/proc/self/limits'])\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    assert said.split()[-3:-1] == ["1" if hard else "0"] * 2, "with 0, they are still piped to a handler"


async def test_variable_reaches_the_guest(bench: Bench, files: SecretFiles) -> None:
    contained = bench.image is not None
    place = files.put("job-1", {VARIABLES: shell_lines({"KEY": NASTY})}) if contained else None
    secrets = GuestSecrets({"KEY": NASTY}, str(place) if place is not None else None)
    shown = await bench.output("env; cat /proc/$$/cmdline", secrets=secrets)
    assert f"KEY={NASTY}\n" in shown and shown.count("canary") == 1
    assert bench.engine.name != "docker" or "canary" not in _kept(bench)


def _kept(bench: Bench) -> str:
    """Return what the engine keeps of all containers of this bench: what it tells of them, and its files."""
    import docker

    client = docker.from_env()
    try:
        label = f"campus-mesh.node=test-{os.getpid()}"
        found = client.containers.list(all=True, filters={"label": label}, ignore_removed=True)
        kept = "".join(str(container.attrs) for container in found)
        for container in found:
            place = Path(client.info()["DockerRootDir"], "containers", container.id)
            kept += "".join(path.read_text(errors="replace") for path in place.rglob("*") if path.is_file())
        return kept
    finally:
        client.close()


@pytest.mark.docker
@pytest.mark.parametrize("bench", [pytest.param("docker", marks=pytest.mark.docker)], indirect=True)
async def test_container_has_files_and_variables_that_its_engine_does_not_keep(
    bench: Bench, files: SecretFiles
) -> None:
    place = files.put("job-1", {VARIABLES: shell_lines({"KEY": "canary-4711"}), "cloud.json": b"canary-4712"})
    secrets = GuestSecrets({"KEY": "canary-4711"}, str(place))
    await bench.shell(
        "cat /run/secrets/cloud.json; echo; echo [$KEY]; touch /run/secrets/x; echo ready; sleep 600", secrets=secrets
    )
    for words in ("ready", "Read-only file system"):  # of two streams
        await bench.until_logged(words)
    printed = [line for line in bench.log.splitlines() if "Read-only file system" not in line]
    assert printed == ["canary-4712", "[canary-4711]", "ready"]
    kept = _kept(bench)
    assert "/run/secrets" in kept and "canary" not in kept


async def test_plain_process_sees_its_files_read_only_and_others_do_not(tmp_path: Path, files: SecretFiles) -> None:
    place, other = files.put("job-1", {"cloud.json": b"canary-4712"}), files.put("job-2", {"key": b"canary-4713"})
    root = tmp_path / "attempt"
    root.mkdir()
    engine = ProcessEngine(sandbox=Sandbox(tmp_path / "home", [], os.environ))
    assert (await engine.availability()).ok
    if not engine._kernel or not engine._kernel.namespaces:
        pytest.skip("no namespaces here")
    bench = Bench(engine, root, None)
    try:
        script = (
            f"ls /run/secrets; cat /run/secrets/cloud.json; echo; touch /run/secrets/x; ls {place} {other}; echo over"
        )
        shown = await bench.output(script, secrets=GuestSecrets({}, str(place)))
        assert "cloud.json\ncanary-4712\n" in shown and "Read-only file system" in shown
        assert "canary-4713" not in shown and shown.count("cloud.json") == 1, "host paths are hidden"
    finally:
        await engine.close()
    assert (place / "cloud.json").read_bytes() == b"canary-4712"


async def test_process_that_cannot_have_its_files_does_not_start(tmp_path: Path, files: SecretFiles) -> None:
    root = tmp_path / "attempt"
    root.mkdir()
    engine = ProcessEngine()  # hides nothing
    await engine.availability()
    launch: Launch = Bench(engine, root, None).launch("true", secrets=GuestSecrets({}, str(files.put("job-1", {}))))
    with pytest.raises(EngineError, match="no /run/secrets of its own here"):
        await engine.start(launch)
    await engine.close()
