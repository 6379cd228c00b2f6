"""Support for system checkpoints on a machine, and hostile dumps."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from mesh.execution.docker.checkpoint import IMAGES, MADE, MAX_MADE_BYTES, Made, copy, dump, made_of, reason, restore
from mesh.execution.docker.criu import (
    Facts,
    Probe,
    closes_connections,
    cpu_features,
    judge,
    kernel_series,
    last_words,
    version_of,
)
from mesh.execution.docker.engine import DockerEngine
from mesh.execution.docker.hardening import traits_of
from mesh.execution.engine import EngineError
from mesh.execution.process.engine import ProcessEngine
from mesh.util.processes import Process
from tests.execution.bench import Bench
from tests.execution.place import entry

GOOD = Facts(True, True, "Docker", "20.10.24", True, "4.2", "", "6.18.44-fc", "x86_64 0a1b2c3d")
GPU = msgspec.structs.replace(GOOD, driver="570.86.15", gpus=("NVIDIA H200",), plugin=True, tool=True)


def changed(facts: Facts, **changes: object) -> Facts:
    return msgspec.structs.replace(facts, **changes)


def test_judge_accepts_capable_machine() -> None:
    found = judge(GOOD)
    assert found.platform == "x86_64 0a1b2c3d, Linux 6.18, Docker 20.10.24, CRIU 4.2" and found.problem == ""
    assert found.gpu_platform == "" and found.gpu_problem == "this machine has no NVIDIA GPU"
    podman = changed(GOOD, engine="Podman", engine_version="28.1", runtime="runc")
    assert judge(podman).platform.endswith("Podman 28.1, CRIU 4.2"), "what Docker 28 cannot do says nothing of Podman"
    assert (
        judge(GPU).gpu_platform == f"{found.platform}, driver 570.86.15, NVIDIA H200" and judge(GPU).gpu_problem == ""
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"allowed": False}, "its owner has not allowed them"),
        ({"engine": "Lima"}, "they need Docker or Podman; its engine is Lima"),
        ({"engine": ""}, "its engine is none"),
        ({"engine": "Podman", "engine_version": "4.3.1"}, "not tried with Podman older than 5.8"),
        ({"engine": "Podman", "engine_version": "5.8.6", "runtime": "crun"}, "runs containers by crun, not runc"),
        ({"engine_version": "28.5.2+dfsg4"}, "Docker 28 restores no container"),
        ({"root": False}, "its daemon is not root"),
        ({"experimental": False}, "not started as experimental"),
        ({"criu": ""}, "criu is not installed"),
        ({"criu": "unknown"}, "version is unknown"),
        (
            {"check": "vdso: Unexpected rt vDSO area bounds"},
            "`criu check` fails with CRIU 4.2 on Linux 6.18.44-fc: vdso",
        ),
    ],
)
def test_judge_names_first_problem(changes: dict[str, object], words: str) -> None:
    found = judge(changed(GPU, **changes))
    assert found.platform == found.gpu_platform == "" and words in found.problem and words in found.gpu_problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"driver": "565.57.01"}, "GPU jobs need driver 570 or newer, it has 565.57.01"),
        ({"criu": "3.19"}, "GPU jobs need CRIU 4 or newer, it has 3.19"),
        ({"plugin": False}, "cuda_plugin.so"),
        ({"tool": False}, "cuda-checkpoint"),
    ],
)
def test_gpu_jobs_need_driver_and_plugin(changes: dict[str, object], words: str) -> None:
    found = judge(changed(GPU, **changes))
    assert found.platform and not found.gpu_platform and words in found.gpu_problem


def test_checkpoint_kind_names_required_matches() -> None:
    base = judge(GPU)
    for changes in ({"cpu": "x86_64 ffffffff"}, {"kernel": "6.17.1"}, {"engine_version": "20.10.25"}, {"criu": "4.3"}):
        assert (
            judge(changed(GPU, **changes)).platform != base.platform
            and judge(changed(GPU, **changes)).gpu_platform != base.gpu_platform
        )
    for changes in ({"driver": "571.0"}, {"gpus": ("NVIDIA H100",)}):
        assert (
            judge(changed(GPU, **changes)).platform == base.platform
            and judge(changed(GPU, **changes)).gpu_platform != base.gpu_platform
        )
    assert judge(changed(GPU, kernel="6.18.45-other")) == base, "the patch level of the kernel may differ"
    assert judge(changed(GPU, closes=True)).platform == f"{base.platform}, closes connections"
    assert closes_connections("# x\n tcp-close # y\n") and not closes_connections("#tcp-close\ntcp-closed")


@given(
    st.builds(
        Facts,
        **{field: st.text() for field in ("engine", "engine_version", "criu", "check", "kernel", "cpu", "driver")},
    )
)
def test_advert_accepts_any_program_output(facts: Facts) -> None:
    for seen in (
        facts,
        changed(facts, allowed=True, root=True, engine="Docker", experimental=True, check="", criu="4.2"),
    ):
        found = judge(seen)
        assert (
            found.valid
            and bool(found.platform) != bool(found.problem)
            and bool(found.gpu_platform) != bool(found.gpu_problem)
        )


@given(st.text())
def test_version_parser_accepts_any_text(text: str) -> None:
    assert all(number >= 0 for number in version_of(text))
    assert len(kernel_series(text).split(".")) <= 2 and last_words(text) is not None
    assert cpu_features("m", text).startswith("m ")


def test_version_parser_finds_first_version() -> None:
    assert version_of("Version: 4.2\nGitID: v4.2-1") == (4, 2) and version_of("") == ()
    assert kernel_series("6.1.0-18-amd64") == "6.1" and version_of("570.86.15") > (570, 0) > version_of("565.77")


def test_cpu_features_ignore_order_and_later_processors() -> None:
    info = "vendor_id : A\nmodel : 1\nflags : b a\ncpu MHz : 1\n\nvendor_id : B\n"
    assert cpu_features("x86_64", info) == cpu_features(
        "x86_64", info.replace("b a", "a b").replace("MHz : 1", "MHz : 2")
    )
    assert cpu_features("x86_64", info) != cpu_features("x86_64", info.replace("b a", "b a avx"))


def test_first_log_errors_are_reported() -> None:
    said = (
        "(00.1) Warn (criu/x.c:1): no\n(00.2)  1: Error (criu/sk-inet.c:191): inet: Connected TCP socket\n"
        "(00.3) Error (a.c:2): Dumping FAILED.\n"
    )
    assert last_words(said) == "inet: Connected TCP socket; Dumping FAILED."
    assert last_words("no such thing") == "no such thing"


def test_criu_timeout_is_reported(tmp_path: Path) -> None:
    def post(url: str, timeout: float, **options: Any) -> None:
        raise requests.ReadTimeout(f"HTTPConnectionPool: Read timed out. (read timeout={timeout})")

    container: Any = SimpleNamespace(
        id="c", client=SimpleNamespace(api=SimpleNamespace(post=post, base_url="", api_version=""))
    )
    with pytest.raises(EngineError, match=r"could not be saved: it takes longer than 10 minutes$"):
        dump(container, tmp_path / "dump", Made("sha256:1", "alike"))
    (tmp_path / "saved" / IMAGES).mkdir(parents=True)
    with pytest.raises(EngineError, match=r"could not be restored: it takes longer than 10 minutes$"):
        restore(container, tmp_path / "saved", tmp_path / "engine")
    assert not (tmp_path / "engine/containers/c/checkpoints/mesh").exists(), "temporary copies are removed"


def test_restored_guest_outside_its_control_group_is_refused(tmp_path: Path, bystander: Process) -> None:
    launch = Bench(ProcessEngine(), tmp_path, "image").launch("true", memory_mib=64, dump=str(tmp_path / "dump"))
    engine, lost = DockerEngine("node"), entry(engine="docker", container="x", head=bystander, groups=())
    with pytest.raises(EngineError, match="container's control group"):
        engine._check_limits(launch, lost)
    made = tmp_path / "docker-x.scope"  # by CRIU, where the engine makes no groups: nothing limits it
    made.mkdir()
    engine._traits = traits_of({}, {"CgroupVersion": "2"}, {}, lingers=True)
    with pytest.raises(EngineError, match=r"did not limit the container: .*memory\.max"):
        engine._check_limits(launch, replace(lost, groups=(str(made),)))


def test_probe_reruns_only_after_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, calls = tmp_path / "criu", tmp_path / "calls"

    def write(version: str, code: int) -> None:
        program.write_text(
            f"#!/bin/sh\necho $1 >> {calls}\n[ $1 = --version ] && echo 'Version: {version}' && exit 0\n"
            f"echo '(0.1) Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds' >&2\nexit {code}\n"
        )
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    write("3.17", 1)
    probe = Probe(True)
    first = probe.look("Docker", "20.10", True)
    assert "CRIU 3.17" in first.problem and "vdso: Unexpected rt vDSO area bounds" in first.problem
    assert probe.look("Docker", "20.10", True) == first and calls.read_text().split() == ["--version", "check"]
    assert "experimental" in probe.look("Docker", "20.10", False).problem
    write("4.2", 0)
    os.utime(program, ns=(1, 1))
    assert probe.look("Docker", "20.10", True).platform.endswith("Docker 20.10, CRIU 4.2")
    monkeypatch.setattr("mesh.execution.docker.criu.RUNC_CONF", tmp_path / "runc.conf")
    (tmp_path / "runc.conf").write_text("tcp-close\n")
    assert probe.look("Docker", "20.10", True).platform.endswith("CRIU 4.2, closes connections")
    before = calls.read_text()
    assert Probe(False).look("Docker", "20.10", True).problem.startswith("its owner") and calls.read_text() == before


@given(st.binary(max_size=200))
def test_dump_description_decodes_or_raises(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    directory = tmp_path_factory.mktemp("dump")
    (directory / MADE).write_bytes(data)
    try:
        assert isinstance(made_of(directory), Made)
    except EngineError as error:
        assert "not a system checkpoint" in str(error)


def test_dump_description_is_read_to_its_bound_only(tmp_path: Path) -> None:
    written = msgspec.json.encode(Made("sha256:1", "linux"))
    (tmp_path / MADE).write_bytes(written.ljust(MAX_MADE_BYTES))
    assert made_of(tmp_path) == Made("sha256:1", "linux")
    (tmp_path / MADE).write_bytes(written[:-1].ljust(MAX_MADE_BYTES) + written[-1:])
    with pytest.raises(EngineError, match="not a system checkpoint"):
        made_of(tmp_path)


def test_restore_copies_regular_files_only(tmp_path: Path) -> None:
    images, own, secret = tmp_path / IMAGES, tmp_path / "own", tmp_path / "secret"
    images.mkdir()
    secret.write_text("root's")
    (images / "core-1.img").write_text("state")
    (images / "link").symlink_to(secret)
    (images / "directory").mkdir()
    os.mkfifo(images / "pipe")
    copy(images, own)
    assert [path.name for path in own.iterdir()] == ["core-1.img"]
    (tmp_path / "elsewhere").symlink_to(images)
    with pytest.raises(OSError, match="is a link"):
        copy(tmp_path / "elsewhere", tmp_path / "more")


def test_reason_comes_from_criu_log(tmp_path: Path) -> None:
    log = tmp_path / "criu-dump.log"
    log.write_text("(0.1) Error (criu/tty.c:1): tty: no\n")
    assert reason(OSError(f"criu failed: type NOTIFY errno 0 path= {log}: unknown")) == "tty: no (CRIU)"
    log.unlink()
    assert reason(OSError(f"criu failed\nlog file: {log}: unknown")) == "criu failed"
