"""One suite for all engines: the promises of docs/reference/job-contract.md, with real processes and containers."""

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from mesh.execution.docker.engine import DockerEngine, Network
from mesh.execution.docker.hardening import LIKE_OURS
from mesh.execution.docker.socket import EngineSocket, Output
from mesh.execution.engine import BadCommand, BadImage, EngineError
from mesh.execution.process.engine import ProcessEngine
from mesh.util.boottime import boot_s
from mesh.util.processes import Process, descendants_of, lives
from tests.container_images import busybox_image
from tests.execution.bench import (
    COUNT,
    LOOP,
    WAIT_S,
    Bench,
    beyond,
    containers,
    processes_with,
    steps_taken,
    steps_when_stopped,
    wait_until,
)


async def test_guest_environment_matches_contract(bench: Bench) -> None:
    text = await bench.output("env; pwd", env={"SEED": "7", "MESH_NODE": "forged"}, resume="step-3", gpus=())
    env = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    base = "/mesh" if bench.image else str(bench.root)
    assert (env["MESH"], env["MESH_JOB_ID"], env["MESH_ATTEMPT"], env["MESH_NODE"]) == ("1", "j" * 26, "2", "desk")
    assert (env["MESH_CKPT_DIR"], env["MESH_RESUME"]) == (f"{base}/ckpt", f"{base}/ckpt/step-3")
    assert (env["MESH_OUT_DIR"], env["MESH_CTL_DIR"], env["MESH_WORK_DIR"]) == (
        f"{base}/out",
        f"{base}/ctl",
        f"{base}/work",
    )
    assert (env["MESH_GRACE_S"], env["MESH_GPU_UUIDS"], env["CUDA_VISIBLE_DEVICES"], env["SEED"]) == ("30", "", "", "7")
    assert text.splitlines()[-1] == f"{base}/work", "the guest starts in its working directory"
    assert "DOCKER_HOST" not in env and "MESH_STATE" not in env, "no variable of the daemon leaks in"


async def test_resume_may_be_whole_directory_or_none(bench: Bench) -> None:
    base = "/mesh" if bench.image else str(bench.root)
    assert f"[{base}/ckpt]" in await bench.output('echo "[$MESH_RESUME]"', resume="")
    assert "[]" in await bench.output('echo "[$MESH_RESUME]"', resume=None)


async def test_guest_writes_and_node_reads_its_directories(bench: Bench) -> None:
    await bench.output("for d in $MESH_CKPT_DIR $MESH_OUT_DIR $MESH_CTL_DIR $MESH_WORK_DIR; do echo it > $d/file; done")
    for name in ("work", "ckpt", "out", "ctl"):
        assert (bench.root / name / "file").read_text() == "it\n"


async def test_programs_of_an_environment_come_first(bench: Bench, tmp_path: Path) -> None:
    tool = tmp_path / "env" / "bin" / "tool"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho tool of $VIRTUAL_ENV\n")
    tool.chmod(0o755)
    script = "tool; echo $PATH; touch $VIRTUAL_ENV/new && echo written"
    text = await bench.output(script, environment=str(tmp_path / "env"))
    base = "/mesh/env" if bench.image else str(tmp_path / "env")
    assert f"tool of {base}\n" in text and f"\n{base}/bin:" in text
    if bench.image:
        assert "written" not in text and not (tmp_path / "env" / "new").exists()


async def test_log_has_both_streams_completely(bench: Bench) -> None:
    logged = await bench.output("echo out; echo err >&2; printf end")
    assert logged in {"out\nerr\nend", "err\nout\nend", "out\nenderr\n"}, "each stream is complete and in order"
    assert (await bench.output("echo again")).endswith("again\n"), "a log is appended to, never replaced"


@pytest.mark.parametrize(("script", "code"), [("true", 0), ("exit 3", 3), ("exit 85", 85), ("kill -9 $$", 137)])
async def test_exit_status_is_reported(bench: Bench, script: str, code: int) -> None:
    guest = await bench.shell(f"sh -c '{script}'; exit $?" if "kill" in script else script)
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).code == code


async def test_notice_reaches_listening_guest(bench: Bench) -> None:
    guest = await bench.shell(f"trap 'echo saved; exit 85' TERM; echo ready; {LOOP}")
    await bench.until_logged("ready")
    with no_free_thread():
        async with asyncio.timeout(WAIT_S):
            assert await guest.catches_term() and await guest.terminate() and await guest.pids() is not None
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).code == 85
    assert "saved" in bench.log


@contextlib.contextmanager
def no_free_thread() -> Iterator[None]:
    """Fill the threads of the event loop, as saves and restores do."""
    over = threading.Event()
    for _ in range(64):
        asyncio.get_running_loop().run_in_executor(None, over.wait)
    try:
        yield
    finally:
        over.set()


async def test_notice_spares_helper_with_a_session_of_its_own(bench: Bench) -> None:
    """W&B's helper ends at SIGTERM; the program that catches it still needs it then."""
    helper = f"trap 'echo helper hit; exit 1' TERM; echo helper ready; {LOOP}"
    setsid = "busybox setsid" if bench.image else "setsid"
    script = f"{setsid} sh -c \"{helper}\" & trap 'echo saved; sleep 0.5; exit 85' TERM; {LOOP}"
    guest = await bench.shell(script)
    await bench.until_logged("helper ready")
    async with asyncio.timeout(WAIT_S):
        while not (await guest.catches_term() and await guest.terminate()):
            await asyncio.sleep(0.02)
        assert (await guest.wait()).code == 85
    assert "saved" in bench.log and "helper hit" not in bench.log


async def test_notice_does_not_harm_other_guests(bench: Bench) -> None:
    guest = await bench.shell("echo ready; sleep 1; echo unhurt; exit 4")
    await bench.until_logged("ready")
    assert not await guest.catches_term() and not await guest.terminate()
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).code == 4
    assert "unhurt" in bench.log


async def test_stopped_guest_can_be_inspected_and_notified(bench: Bench) -> None:
    guest = await bench.shell(f"trap 'echo saved; exit 85' TERM; echo ready; {LOOP}")
    await bench.until_logged("ready")
    assert not await guest.stands_still()
    guest.allow_until(0.0)
    async with asyncio.timeout(WAIT_S):
        while not await guest.stands_still():
            await asyncio.sleep(0.01)
    assert await guest.catches_term() and await guest.terminate()
    guest.allow_until(math.inf)
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).code == 85
    assert "saved" in bench.log


async def test_stopped_guest_can_be_killed(bench: Bench) -> None:
    guest = await bench.shell(f"echo ready; {LOOP}")
    await bench.until_logged("ready")
    guest.allow_until(0.0)
    async with asyncio.timeout(WAIT_S):
        while not await guest.stands_still():
            await asyncio.sleep(0.01)
        await guest.kill()
        assert (await guest.wait()).code == 137


async def test_kill_leaves_no_process(bench: Bench) -> None:
    mark = f"{time.time_ns()}"
    script = (
        f"trap '' TERM; (sleep 9{mark[-8:]} &) ; sh -c '(trap \"\" TERM HUP; sleep 8{mark[-8:]}) &'; echo ready; {LOOP}"
    )
    guest = await bench.shell(script)
    await bench.until_logged("ready")
    async with asyncio.timeout(WAIT_S):
        await guest.kill()
        assert (await guest.wait()).code == 137
        while processes_with(mark[-8:]):
            await asyncio.sleep(0.02)
    await guest.kill()  # a second kill is no error


async def test_orphans_end_with_guest(bench: Bench) -> None:
    mark = f"7{time.time_ns()}"[-9:]
    guest = await bench.shell(f"sh -c 'sleep {mark} &'; exit 0")
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).code == 0
        while processes_with(mark):
            await asyncio.sleep(0.02)


async def test_guest_stops_after_lease_and_resumes(bench: Bench) -> None:
    guest = await bench.shell(COUNT)
    await beyond(bench, 3)
    for _ in range(2):
        guest.allow_until(boot_s() + 0.2)
        steps = await steps_when_stopped(bench)
        guest.allow_until(math.inf)
        await beyond(bench, steps + 3)


async def test_lease_ends_without_daemon(bench: Bench) -> None:
    for lease_s in (1.0, 5.0, 20.0):  # on a busy machine, a short lease may end before the first step
        lease = boot_s() + lease_s
        guest = await bench.shell(COUNT, until=lease)
        while steps_taken(bench) <= 3 and boot_s() < lease:
            await asyncio.sleep(0.01)
        if steps_taken(bench) > 3:
            break
        await guest.kill()
    async with asyncio.timeout(WAIT_S):
        while not await guest.stands_still():
            await asyncio.sleep(0.02)
    assert boot_s() >= lease and await steps_when_stopped(bench) > 3, "the guest ran until the lease ended"
    guest.allow_until(boot_s() - 5.0)
    assert await steps_when_stopped(bench), "a lease in the past changes nothing"


async def test_guest_stopped_by_signal_can_be_killed(bench: Bench) -> None:
    guest = await bench.shell(f"echo ready; {LOOP}")
    await bench.until_logged("ready")
    guest.allow_until(0.0)
    async with asyncio.timeout(WAIT_S):
        await guest.kill()
        assert (await guest.wait()).code == 137


async def test_missing_command_is_reported(bench: Bench) -> None:
    """Accept an error at the start or, where an init starts the command, exit code 127 and a line in the log."""
    try:
        guest = await bench.start("no-such-command")
    except BadCommand as error:
        assert "no-such-command" in str(error)
        return
    async with asyncio.timeout(WAIT_S):
        assert bench.image and (await guest.wait()).code == 127
    assert "no-such-command" in bench.log


async def test_guests_run_in_parallel(bench: Bench) -> None:
    guests = [await bench.shell(f"exit {number}") for number in range(5)]
    async with asyncio.timeout(WAIT_S):
        assert [(await guest.wait()).code for guest in guests] == list(range(5))


async def test_long_environment_and_command_arrive_complete(bench: Bench) -> None:
    long = "x" * 100_000
    guest = await bench.start("sh", "-c", "echo ${#LONG} ${#1}", "sh", long, env={"LONG": long})
    await guest.wait()
    assert f"{len(long)} {len(long)}" in bench.log


async def test_only_the_guest_over_memory_limit_ends(bench: Bench) -> None:
    if bench.image:
        script, limit = "tail /dev/zero", 64
    else:
        script, limit = f"{sys.executable} -c 'bytearray(400 << 20)'", 256
    guest = await bench.shell(f"{script}; exit $?", memory_mib=limit)
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert end.code != 0
    if bench.image:
        assert end.oom or end.code == 137


async def test_engine_names_limits_of_isolation(bench: Bench) -> None:
    words = (await bench.engine.availability()).isolation
    assert ("shares the kernel" if bench.image else "no sandbox") in words


# --- single engines


async def test_guest_in_namespaces_sees_only_itself(tmp_path: Path) -> None:
    engine = ProcessEngine()
    if "namespaces" not in (await engine.availability()).isolation:
        pytest.skip("this kernel or container lets nobody make namespaces")
    bench = Bench(engine, tmp_path, None)
    text = await bench.output("ls /proc")
    assert sum(name.isdigit() for name in text.split()) <= 4 and os.path.exists(f"/proc/{os.getpid()}")  # noqa: PTH110


async def test_processes_of_guest_are_listed_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing the thousands of processes that a guest may have takes longer than the loop may wait."""
    bench, on_the_loop = Bench(ProcessEngine(), tmp_path, None), list[bool]()
    guest = await bench.shell(LOOP)

    def noted(pid: int) -> set[int]:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return descendants_of(pid)

    monkeypatch.setattr("mesh.execution.process.engine.descendants_of", noted)
    for ask in (guest.pids, guest.stands_still, guest.catches_term, guest.terminate):
        await ask()
    assert on_the_loop == [False] * 4
    await guest.kill()
    await bench.engine.close()


async def test_relative_command_is_found_in_working_directory(tmp_path: Path) -> None:
    bench = Bench(ProcessEngine(), tmp_path, None)
    script = tmp_path / "work" / "go.sh"
    script.write_text("#!/bin/sh\necho went\n")
    guest = await bench.start("./go.sh")
    assert (await guest.wait()).code == 126, "not executable"
    script.chmod(0o755)
    guest = await bench.start("./go.sh")
    assert (await guest.wait()).code == 0 and "went" in bench.log
    guest = await bench.start("./missing.sh")
    assert (await guest.wait()).code == 127 and "cannot run './missing.sh'" in bench.log


@pytest.mark.docker
async def test_container_has_few_rights(tmp_path: Path) -> None:
    engine = DockerEngine(f"test-{os.getpid()}")
    await engine.availability()
    bench = Bench(engine, tmp_path, busybox_image())
    try:
        text = await bench.output(
            "id; touch /bin/x || echo read-only; ls /sys/class/net; cat /proc/self/status /proc/self/uid_map; "
            "touch /tmp/ok && echo tmp"
        )
        assert ("uid=0" in text) == (engine._traits.user == LIKE_OURS)
        if engine._traits.user == LIKE_OURS:
            assert os.getuid() != 0 and ["0", str(os.getuid()), "1"] in [line.split() for line in text.splitlines()]
        assert "read-only" in text and "eth0" not in text and "tmp" in text
        assert "CapEff:\t0000000000000000" in text and "NoNewPrivs:\t1" in text
    finally:
        await engine.close()


@pytest.mark.docker
async def test_output_is_not_awaited_after_the_container_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attach to the output of a container that ended: Docker never closes it. An engine under load reports the exit that late."""
    ended, attach, attached = EngineSocket.ended, EngineSocket.attach, list[str]()

    async def late(engine: EngineSocket, container: str) -> int:
        code = await ended(engine, container)
        async with asyncio.timeout(WAIT_S):
            while len(attached) < 2:
                await asyncio.sleep(0.01)
        return code

    async def noted(engine: EngineSocket, container: str) -> Output:
        output = await attach(engine, container)
        attached.append(container)
        return output

    monkeypatch.setattr(EngineSocket, "ended", late)
    monkeypatch.setattr(EngineSocket, "attach", noted)
    monkeypatch.setattr("mesh.execution.docker.engine.ATTACH_AGAIN_S", 0.1)
    monkeypatch.setattr("mesh.execution.docker.engine.lives", lambda head: True)  # it ends right after this is asked
    engine = DockerEngine(f"test-{os.getpid()}-ended")
    if not (answer := await engine.availability()).ok or answer.detail.startswith("Podman"):
        await engine.close()
        pytest.skip(f"not an engine of Docker, which alone takes that: {answer.detail}")
    bench = Bench(engine, tmp_path, busybox_image())
    try:
        guest = await bench.shell("while test ! -e go; do sleep 0.05; done; echo said; exit 7")
        (tmp_path / "work" / "go").touch()
        async with asyncio.timeout(WAIT_S):
            end = await guest.wait()
        assert (end.code, end.fault, bench.log) == (7, "", "said\n")
    finally:
        await engine.close()
    assert not containers(f"test-{os.getpid()}-ended")


@pytest.mark.parametrize("bench", [pytest.param("docker", marks=pytest.mark.docker)], indirect=True)
async def test_ended_container_is_not_attached_to_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report an exit late, as an engine under load does. Podman makes an ended container anew to attach to it."""
    ended, attach, attached, looks = EngineSocket.ended, EngineSocket.attach, list[str](), list[Process]()

    async def late(engine: EngineSocket, container: str) -> int:
        code = await ended(engine, container)
        async with asyncio.timeout(WAIT_S):
            while len(looks) < 3:
                await asyncio.sleep(0.01)
        return code

    async def noted(engine: EngineSocket, container: str) -> Output:
        attached.append(container)
        return await attach(engine, container)

    def looked(head: Process) -> bool:
        looks.append(head)
        return lives(head)

    monkeypatch.setattr(EngineSocket, "ended", late)
    monkeypatch.setattr(EngineSocket, "attach", noted)
    monkeypatch.setattr("mesh.execution.docker.engine.ATTACH_AGAIN_S", 0.1)
    monkeypatch.setattr("mesh.execution.docker.engine.lives", looked)
    guest = await bench.shell("while test ! -e go; do sleep 0.05; done; echo said; exit 7")
    (bench.root / "work" / "go").touch()
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert (end.code, end.fault, bench.log, len(attached)) == (7, "", "said\n", 1)


@pytest.mark.docker
async def test_slow_engine_is_waited_for_at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, answers = EngineSocket.ended, EngineSocket.answers
    looks: asyncio.Queue[bool] = asyncio.Queue()

    async def late(engine: EngineSocket, container: str) -> int:
        code = await ended(engine, container)
        for _ in range(3):
            assert await looks.get(), "the engine answers"
        return code

    async def look(engine: EngineSocket, within_s: float) -> bool:
        looks.put_nowait(await answers(engine, WAIT_S))
        return True

    monkeypatch.setattr("mesh.execution.docker.engine.ENGINE_TELLS_S", 0.1)
    monkeypatch.setattr(EngineSocket, "ended", late)
    monkeypatch.setattr(EngineSocket, "answers", look)
    engine = DockerEngine(f"slow-{os.getpid()}")
    try:
        assert (await engine.availability()).ok
        guest = await Bench(engine, tmp_path, busybox_image()).shell("while test ! -e go; do sleep 0.05; done; exit 3")
        (tmp_path / "work" / "go").touch()
        async with asyncio.timeout(WAIT_S):
            assert (await guest.wait()).code == 3
    finally:
        await engine.close()


async def test_network_is_removed_while_the_engine_counts_as_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> None:
        raise requests.ConnectionError("no answer")

    engine, removed = DockerEngine(f"away-{os.getpid()}"), list[tuple[object, str]]()
    engine._client, engine._answers = SimpleNamespace(ping=silent, close=print), True
    monkeypatch.setattr(engine._bridges, "remove", lambda *asked: removed.append(asked))
    assert not (await engine.availability()).ok
    engine._remove(SimpleNamespace(remove=lambda **how: None, id="c"), Network("m1"))
    assert removed == [(engine._client, "m1")] and engine._client is not None
    await engine.close()


@pytest.mark.docker
async def test_unknown_exit_is_engine_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman reports -1 on a busy machine."""

    async def unknown(engine: EngineSocket, container: str) -> int:
        return -1

    monkeypatch.setattr(EngineSocket, "ended", unknown)
    engine = DockerEngine(f"unknown-{os.getpid()}")
    try:
        assert (await engine.availability()).ok
        guest = await Bench(engine, tmp_path, busybox_image()).shell("exit 3")
        async with asyncio.timeout(WAIT_S):
            end = await guest.wait()
        assert end.code == 137 and "does not know how it ended" in end.fault
    finally:
        await engine.close()


@pytest.mark.docker
@pytest.mark.parametrize("image", ["no/such:image", "not a name", None])
async def test_missing_image_is_reported_with_next_step(tmp_path: Path, image: str | None) -> None:
    engine = DockerEngine(f"test-{os.getpid()}")
    await engine.availability()
    bench = Bench(engine, tmp_path, image)
    try:
        with pytest.raises(BadImage):
            await bench.start("true")
        with pytest.raises(BadImage, match="image gone is not on this node"):  # removed after its lookup
            await bench.start("true", image="gone", image_id=f"sha256:{'0' * 64}")
        assert containers(f"test-{os.getpid()}") == []
    finally:
        await engine.close()


async def test_missing_engine_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    engine = DockerEngine("test")
    answer = await engine.availability()
    assert not answer.ok and "does not exist" in answer.detail
    with pytest.raises(EngineError, match="no Docker engine"):
        await engine.start(Bench(engine, tmp_path, "x").launch("true"))
    await engine.close()


DAEMON = """
import asyncio, os, sys
from tests.execution.bench import Bench, LOOP
from collections.abc import Iterator
from pathlib import Path
async def main():
    if sys.argv[1] == "docker":
        from mesh.execution.docker.engine import DockerEngine
        engine, image = DockerEngine(sys.argv[3]), sys.argv[5]
    else:
        from mesh.execution.process.engine import ProcessEngine
        engine, image = ProcessEngine(namespaces=sys.argv[1] == "process"), None
    await engine.availability()
    bench = Bench(engine, Path(sys.argv[2]), image)
    await bench.shell(f"trap '' TERM HUP; sleep {sys.argv[4]} & echo ready; {LOOP}")
    await bench.until_logged("ready")
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["process", "session", pytest.param("docker", marks=pytest.mark.docker)])
def test_guests_die_with_daemon(kind: str, tmp_path: Path) -> None:
    mark, label = f"6{time.time_ns()}"[-9:], f"crash-{os.getpid()}-{kind}"
    command = [
        sys.executable,
        "-c",
        DAEMON,
        kind,
        str(tmp_path),
        label,
        mark,
        busybox_image() if kind == "docker" else "",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert processes_with(mark)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_until(lambda: not processes_with(mark), "its processes to end")
    if kind == "docker":
        wait_until(lambda: not containers(label), "its container to be removed")


@pytest.mark.docker
async def test_next_start_removes_leftovers(tmp_path: Path) -> None:
    import docker

    label = f"sweep-{os.getpid()}"
    client = docker.from_env()
    client.containers.create(busybox_image(), ["sleep", "60"], labels={"campus-mesh.node": label})
    other = client.containers.create(busybox_image(), ["sleep", "60"], labels={"campus-mesh.node": label + "-other"})
    try:
        engine = DockerEngine(label)
        await engine.availability()
        assert containers(label) == [] and containers(label + "-other") != []
        await engine.close()
    finally:
        other.remove(force=True)
        client.close()
