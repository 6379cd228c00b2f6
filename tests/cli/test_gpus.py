"""GPU options of submissions, and the display of GPUs and their shares."""

import re
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mesh.cli import describe, gpus, nodes
from mesh.cli.job_options import job_options, make_order


def ordered(*arguments: str) -> tuple[int, int, int | None, int, int]:
    command = click.command()(job_options(lambda **_: None))
    options = command.make_context("submit", [*arguments, "--", "true"]).params
    order = make_order(options.pop("command"), options)
    return order["gpus"], order["gpu_share"], order["gpu_share_limit"], order["vram_mib"], order["vram_limit_mib"]


def test_gpu_share_implies_one_gpu_by_default() -> None:
    assert ordered() == (0, 100, None, 0, 0)
    assert ordered("--gpus", "2", "--vram", "20g") == (2, 100, None, 20 * 1024, 0)
    soft = "--gpu-share", "30", "--gpu-share-limit", "90", "--vram", "6g", "--vram-limit", "20g"
    assert ordered(*soft) == (1, 30, 90, 6 * 1024, 20 * 1024)
    assert ordered("--gpu-share", "100") == (1, 100, None, 0, 0)
    assert ordered("--gpus", "3", "--gpu-share", "30") == (3, 30, None, 0, 0)


def test_gpu_kind_options_take_model_and_versions() -> None:
    command = click.command()(job_options(lambda **_: None))

    def kind(*arguments: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        options = command.make_context("submit", [*arguments, "--", "true"]).params
        order = make_order(options.pop("command"), options)
        return order["gpu_model"], order["capability"], order["driver"]

    assert kind() == ("", (0, 0), ())
    assert kind("--gpu-model", "A6000", "--compute-capability", "8", "--driver", "550.54.14") == (
        "A6000",
        (8, 0),
        (550, 54, 14),
    )
    for wrong in ("8.x", "", "1.2.3.4.5", "-1", "9" * 12, "\u0661"):
        with pytest.raises(click.BadParameter, match="is not a version: write"):
            kind("--driver", wrong)


@pytest.mark.parametrize("option", ["--gpu-share", "--gpu-share-limit"])
@pytest.mark.parametrize("value", ["0", "101"])
def test_gpu_share_is_1_to_100_per_cent(option: str, value: str) -> None:
    with pytest.raises(click.BadParameter, match=f"{value} is not in the range 1<=x<=100."):
        ordered(option, value)


def shown(monkeypatch: pytest.MonkeyPatch, module: Any, command: click.Command, *arguments: str, answer: Any) -> str:
    monkeypatch.setattr(module, "client", lambda ctx: SimpleNamespace(get=lambda path: answer))
    return CliRunner().invoke(command, arguments, catch_exceptions=False).output


@pytest.mark.parametrize(
    ("room", "words"),
    [
        ([("a", 100, 80_000), ("b", 70, 60_000)], "1.7/2 GPUs"),
        ([("a", 100, 80_000), ("b", 100, 80_000)], "2/2 GPUs"),
        ([("a", 35, 10), ("b", 70, 0)], "0.35/2 GPUs"),
        ([], "0/2 GPUs"),
    ],
)
def test_nodes_shows_free_gpu_capacity(
    monkeypatch: pytest.MonkeyPatch, room: list[tuple[str, int, int]], words: str
) -> None:
    row = {"nick": "n", "me": True, "state": "alive", "since_unix": 0, "lending": True, "slots": 0, "jobs": 1}
    row |= {"engines": [], "interactive": True, "user": "ada", "address": "h:1", "gpus": [{}, {}]}
    row["gpu_room"] = [{"uuid": uuid, "share": share, "vram_mib": vram} for uuid, share, vram in room]
    assert f"  {words}  " in shown(monkeypatch, nodes, nodes.nodes, answer={"nodes": [row]})


@pytest.mark.parametrize(
    ("asked", "has", "words"),
    [
        ((0, 100, 100, 0, 0), (), "-"),
        ((2, 100, 100, 0, 0), ("GPU-a", "GPU-b"), "2 whole: GPU-a, GPU-b"),
        ((1, 100, 100, 6144, 0), (), "1 whole, of 6144 MiB at least"),
        ((1, 30, 30, 6144, 0), ("GPU-a",), "30 % and 6144 MiB of 1: GPU-a"),
        ((2, 30, 90, 6144, 0), (), "30 % and 6144 MiB of 2, up to 90 % while others leave it idle"),
        ((1, 30, 30, 6144, 9000), (), "30 % and 6144 MiB of 1, up to 9000 MiB while no other job needs it"),
    ],
)
def test_describe_shows_gpus_of_a_job(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[int, int, int, int, int], has: tuple[str, ...], words: str
) -> None:
    gpus = dict(zip(("gpus", "gpu_share", "gpu_share_limit", "vram_mib", "vram_limit_mib"), asked, strict=True))
    state: dict[str, Any] = {name: "" for name in ("job", "name", "user", "submitter", "state", "detail", "node")}
    state |= {"created_unix_ms": 0, "witnesses": [], "checkpoint": None, "heeds_notice": None, "at_risk_s": 0}
    state["next_checkpoint"] = state["saving"] = None
    state |= {"attempts": [], **gpus, "gpu_portions": [{"uuid": uuid, "share": 1, "vram_mib": 1} for uuid in has]}
    answer = {"job": state, "asked": {"argv": [], **gpus}, "group": 0, "events": []}
    text = shown(monkeypatch, describe, describe.describe, "job", answer=answer)
    assert "saving      -\n" in text
    state["saving"] = {
        "kind": "checkpoint",
        "seq": 4,
        "since_unix_ms": 0,
        "sent": 1 << 20,
        "bytes": 3 << 20,
        "nodes": 2,
    }
    far = shown(monkeypatch, describe, describe.describe, "job", answer=answer)
    assert "saving      checkpoint 4: 1.0 of 3.0 MiB sent to 2 nodes\n" in far
    state["saving"] |= {"bytes": 0}
    assert "saving      checkpoint 4 is being stored\n" in shown(
        monkeypatch, describe, describe.describe, "job", answer=answer
    )
    assert f"GPUs        {words}\n" in text and "share" not in text.replace(words, "")


def test_gpus_shows_local_gpus_with_the_share_of_each_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    gpu = {"uuid": "GPU-0123456789ab", "model": "H200", "vram_mib": 143_360, "share_free": 70, "vram_free_mib": 137_216}
    job = {"job": "abcdefghij", "name": "", "share": 30, "limit": 90, "vram_mib": 6144, "guarded": True}
    job["vram_limit_mib"] = 6144
    seen = {"share_now": 60.0, "gate": "open", "memory": 3 << 30, "gpu_s": 12.34, "refused": 2, "memory_now": 8 << 30}
    whole = {"job": "x", "name": "big", "share": 100, "limit": 100, "vram_mib": 81_920, "guarded": False}
    whole["vram_limit_mib"] = 81_920
    jobs = [
        {**job, **seen, "unguarded_calls": ["cuMemAllocNext"]},
        {**job, **seen, "job": "klmnopqrst", "limit": 30, "gate": "closed", "unguarded_calls": []},
        {
            **job,
            **seen,
            "vram_limit_mib": 10_240,
            "job": "uvwxyz2345",
            "gate": "closed",
            "closed_by": ["lease", "owner"],
            "refused": 0,
        },
    ]
    jobs[1]["findings"] = [{"detail": "process 7 uses 300 MiB of the GPU without the guard"}]
    idle = {"uuid": "GPU-b", "model": "T4", "vram_mib": 16_384, "share_free": 100, "vram_free_mib": 16_384, "jobs": []}
    full = {"uuid": "GPU-c", "model": "T4", "vram_mib": 16_384, "share_free": 0, "vram_free_mib": 0, "jobs": [whole]}
    answer = {"problem": "GPUs cannot be shared: it rains", "gpus": [{**gpu, "jobs": jobs}, idle, full]}
    lines = [re.sub(" {2,}", " | ", line) for line in shown(monkeypatch, gpus, gpus.gpus, answer=answer).splitlines()]
    assert lines == [
        "GPU | MODEL | FREE | JOB | SHARE (now) | MEMORY | GPU TIME | REFUSED",
        "GPU-01234567 | H200, 140 GiB | 70 %, 134 GiB | abcdefgh | 30 % to 90 % (60 %) | 3/6 GiB | 12.3 s | 2",
        " | klmnopqr | 30 % (gate closed) | 3/6 GiB | 12.3 s | 2",
        " | uvwxyz23 | 30 % to 90 % (paused) | 3/6 to 10 GiB (now 8) | 12.3 s | 0",
        "GPU-b | T4, 16 GiB | 100 %, 16 GiB | - | - | - | - | -",
        "GPU-c | T4, 16 GiB | 0 %, 0 GiB | big | 100 % | 80 GiB | - | -",
        "mesh: GPUs cannot be shared: it rains",
        "mesh: guard degraded: a program of job abcdefgh may call cuMemAllocNext, which the guard does not support",
        "mesh: job klmnopqr bypasses the guard: process 7 uses 300 MiB of the GPU without the guard",
    ]


def test_receipts_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    use = {"uuid": "GPU-0123456789ab", "gpu_ns": 12_340_000_000, "byte_s": 9 << 42, "launches": 7, "peak": 3 << 30}
    row = {"job": "abcdefghij", "attempt": 2, "user": "ada"}
    known, unknown = {**use, "nvml_ns": 13_000_000_000}, {**use, "uuid": "GPU-b", "nvml_ns": None}
    answer = {"receipts": [{**row, "devices": [known, unknown]}]}
    told = shown(monkeypatch, gpus, gpus.gpus, "--receipts", answer=answer)
    assert [re.sub(" {2,}", " | ", line) for line in told.splitlines()] == [
        "JOB | ATTEMPT | USER | GPU | GPU TIME | BY NVML | MEMORY | PEAK | LAUNCHES",
        "abcdefgh | 2 | ada | GPU-01234567 | 12.3 s | 13.0 s | 10.2 GiB h | 3 GiB | 7",
        "abcdefgh | 2 | ada | GPU-b | 12.3 s | - | 10.2 GiB h | 3 GiB | 7",
    ]


@pytest.mark.parametrize(
    ("command", "answer", "words"),
    [
        ("pause", {"freed": True, "problem": ""}, "paused; its GPU memory is free. `mesh gpus resume j` resumes it"),
        (
            "pause",
            {"freed": False, "problem": "it rains"},
            "paused; its GPU memory is not freed: it rains. `mesh gpus resume j`",
        ),
        ("resume", {}, "resumed"),
    ],
)
def test_pause_reports_the_effect_on_gpu_memory(
    monkeypatch: pytest.MonkeyPatch, command: str, answer: dict[str, Any], words: str
) -> None:
    asked: list[tuple[str, Any]] = []

    def post(path: str, order: Any, timeout_s: float | None) -> dict[str, Any]:
        asked.append((path, order))
        return answer

    monkeypatch.setattr(gpus, "client", lambda ctx: SimpleNamespace(post=post))
    assert words in CliRunner().invoke(gpus.gpus, [command, "j"], catch_exceptions=False).output
    assert asked == [("/v1/jobs/j/gpu-pause", {"paused": command == "pause"})]


def test_gpus_set_requires_an_option_and_valid_values() -> None:
    result = CliRunner().invoke(gpus.gpus, ["set", "job"])
    assert result.exit_code == 2 and "--share, --limit, --vram or --vram-limit" in result.output
    assert CliRunner().invoke(gpus.gpus, ["set", "job", "--share", "100"]).exit_code == 2
