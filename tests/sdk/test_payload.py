"""Payloads of calls and their results, without a mesh; tests/e2e/test_python_api.py uses a mesh."""

import errno
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

import mesh
from mesh.job import EXIT_SAVED
from mesh.sdk import remote
from mesh.sdk.futures import JobFailed, _raised
from mesh.sdk.payload import CARRIED, _own_modules, order_of, pack
from mesh.sdk.remote import ANSWER, PICKLE, Call
from mesh.util.processes import catches
from tests.test_job_module import write_notice


def test_payload_excludes_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name, place in {"own_steps": "project", "their_arrays": "lib/python3/dist-packages"}.items():
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / f"{name}.py").write_text("class Thing: ...\ndef f(): ...\n")
        monkeypatch.syspath_prepend(tmp_path / place)
        found[name] = importlib.import_module(name)
    own, theirs = found.values()
    assert _own_modules(Call(own.f, theirs.Thing(), Path(), 1), None) == [own]
    assert _own_modules(Call(theirs.f, thing=own.Thing()), None) == [own]
    assert _own_modules(Call(own.f), tmp_path) == []


def test_interpreter_is_named_by_a_path_that_a_guest_can_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/home/ann/notebooks/../venv/bin/python")
    assert order_of(Call(len), {})["argv"][0] == "/home/ann/venv/bin/python"


def test_empty_directories_of_the_working_directory_are_packed(tmp_path: Path) -> None:
    (tmp_path / "project" / "logs").mkdir(parents=True)
    (tmp_path / "project" / "data.txt").write_text("x")
    pack(Call(len, "x"), tmp_path / "packed", tmp_path / "project", "pickle")
    assert (tmp_path / "packed" / "logs").is_dir() and (tmp_path / "packed" / "data.txt").is_file()


@pytest.mark.parametrize("one_file_system", [True, False])
def test_link_in_the_working_directory_stays_a_link(
    one_file_system: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not one_file_system:
        monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "data.txt").write_text("x")
    (tmp_path / "project" / "last").symlink_to("data.txt")
    pack(Call(len, "x"), tmp_path / "packed", tmp_path / "project", "pickle")
    assert (tmp_path / "packed" / "last").readlink() == Path("data.txt")


def test_packing_leaves_the_pickling_of_modules_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_steps.py").write_text("def f(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    steps = importlib.import_module("their_steps")
    before = cloudpickle.list_registry_pickle_by_value()
    pack(Call(steps.f), tmp_path / "packed", None, "pickle")
    assert cloudpickle.list_registry_pickle_by_value() == before


def run(call: Call, where: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the call in this process as `launch.py` does; the result is in `where`."""
    monkeypatch.setenv("MESH_OUT_DIR", str(where))
    monkeypatch.setattr(remote, "_running", None)  # monkeypatch restores it afterwards
    pack(call, where, None, "pickle")
    before = signal.getsignal(signal.SIGTERM)
    try:
        return remote.main(where / CARRIED)
    finally:
        signal.signal(signal.SIGTERM, before)


class Workers:
    """A callable object that forks, as a pool or a data loader does."""

    def __call__(self) -> tuple[list[Any], int | None]:
        fork = multiprocessing.get_context("fork")
        mine, theirs = fork.Pipe()
        worker = fork.Process(target=lambda: (theirs.send(mesh.checkpoint()), time.sleep(10)), daemon=True)
        worker.start()
        assert worker.pid is not None
        found = [mine.poll(20) and mine.recv(), catches(worker.pid, signal.SIGTERM)]
        worker.terminate()
        worker.join(20)
        return found, worker.exitcode

    def checkpoint(self) -> None: ...


def test_forked_workers_neither_save_nor_catch_the_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "ckpt"
    monkeypatch.setenv("MESH_CKPT_DIR", str(saved))
    monkeypatch.setenv("MESH_CTL_DIR", str(tmp_path))
    write_notice(tmp_path)
    assert run(Call(Workers()), tmp_path, monkeypatch) == 0
    assert json.loads((tmp_path / ANSWER).read_text())["kind"] == "value"
    assert pickle.loads((tmp_path / PICKLE).read_bytes()) == ([False, False], -signal.SIGTERM)
    assert not saved.exists()


def test_sigterm_that_outruns_the_hook_of_a_fork_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    assert run(Call(Workers()), tmp_path, monkeypatch) == 0
    assert pickle.loads((tmp_path / PICKLE).read_bytes()) == ([False, True], -signal.SIGTERM)


@pytest.mark.parametrize("code", [EXIT_SAVED, 75, 143])
def test_exit_code_that_asks_for_another_attempt_is_the_job_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    assert run(Call(sys.exit, code), tmp_path, monkeypatch) == code
    assert not (tmp_path / ANSWER).exists()


def test_exit_code_of_a_function_fails_only_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(Call(partial(sys.exit, 4)), tmp_path, monkeypatch) == 1
    told = json.loads((tmp_path / ANSWER).read_text())
    assert (told["kind"], told["type"], told["text"]) == ("error", "SystemExit", "4")
    error = _raised("SystemExit: 4", (tmp_path / PICKLE).read_bytes())
    assert isinstance(error, JobFailed) and str(error) == "SystemExit: 4"


def test_function_exiting_with_zero_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(Call(sys.exit), tmp_path, monkeypatch) == 0
    assert json.loads((tmp_path / ANSWER).read_text()) == {"kind": "value", "as": "json", "value": None}


def square(x: int) -> int:
    return x * x


class Saves:
    def __call__(self) -> None: ...

    def checkpoint(self) -> None: ...


def test_terms_become_the_order_of_a_submission() -> None:
    class Running:
        id = "j" * 26

    order = order_of(
        Call(square),
        {
            "vram": "6g",
            "vram_limit": 7000,
            "memory": "512m",
            "grace": "2m",
            "max_time": 90,
            "after": [Running(), "any:train"],
            "gpu_share": 30,
            "workdir": "/srv",
            "results": "json",
            "python": "/opt/python",
        },
    )
    assert order["argv"] == ["/opt/python", f"{CARRIED}/launch.py"] and order["name"] == "square"
    assert (order["vram_mib"], order["vram_limit_mib"], order["memory_mib"]) == (6144, 7000, 512)
    assert (order["grace_s"], order["max_time_s"], order["gpus"]) == (120.0, 90.0, 1)
    assert order["after"] == ["j" * 26, "any:train"]
    assert not {"workdir", "results", "python", "vram", "grace", "ckpt", "checkpoint_every"} & order.keys()
    assert order_of(Call(square), {"gpu_share": 30, "gpus": 2})["gpus"] == 2
    assert order_of(Call(lambda: None), {"image": "torch"})["argv"][0] == "python3"
    assert order_of(Call(lambda: None), {})["name"] == "lambda"


def test_object_with_a_checkpoint_is_saved_as_its_terms_say() -> None:
    saved = order_of(Call(Saves()), {})
    assert (saved["ckpt"], saved["ckpt_mode"], saved["ckpt_every"]) == ("mesh-checkpoints", "rename", "auto")
    assert order_of(Call(Saves()), {"checkpoint_every": "5m"})["ckpt_every"] == 300.0
    assert "ckpt_every" not in order_of(Call(square), {"checkpoint_every": 5})


def test_unknown_term_is_named_with_one_that_reads_alike() -> None:
    with pytest.raises(TypeError, match=r"no such term: gpu \(did you mean gpus\?\)"):
        order_of(Call(square), {"gpu": 1})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match=r"no such term: zzz\. What"):
        order_of(Call(square), {"zzz": 1})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, True),
        ([1, 2.5, "x", True, {"a": [None]}], True),
        ((1, 2), False),
        ({1: 2}, False),
        ([{"a": (1,)}], False),
        (True + 0j, False),
    ],
)
def test_result_that_json_changes_is_pickled_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, plain: bool
) -> None:
    assert remote._is_plain(value, remote.DEEPEST) is plain
    remote._publish(tmp_path, {"results": "pickle"}, value)
    told = json.loads((tmp_path / ANSWER).read_text())
    assert told["as"] == ("json" if plain else "pickle") and (tmp_path / PICKLE).exists() is not plain
    assert (told["value"] if plain else pickle.loads((tmp_path / PICKLE).read_bytes())) == value
    if not plain:
        with pytest.raises(TypeError, match=type(value).__name__):
            remote._publish(tmp_path, {"results": "json"}, value)


def test_nested_lists_are_plain_to_a_bound() -> None:
    value: Any = 1
    for _ in range(remote.DEEPEST):
        value = [value]
    assert remote._is_plain(value, remote.DEEPEST) and not remote._is_plain([value], remote.DEEPEST)


@pytest.mark.parametrize("results", ["pickle", "json"])
def test_error_of_a_function_is_written_with_its_traceback(tmp_path: Path, results: str) -> None:
    try:
        raise KeyError("epoch")
    except KeyError as error:
        assert remote._failed(tmp_path, {"results": results}, error, "before it was called") == 1
    told = json.loads((tmp_path / ANSWER).read_text())
    assert (told["kind"], told["type"], told["text"], told["as"]) == ("error", "KeyError", "'epoch'", results)
    assert told["when"] == "before it was called" and "test_payload.py" in told["traceback"]
    assert (tmp_path / PICKLE).exists() is (results == "pickle"), "a pickle can run code"


def test_call_for_another_python_is_not_unpickled(tmp_path: Path) -> None:
    (tmp_path / "call.pkl").write_bytes(b"no pickle")
    with pytest.raises(RuntimeError, match=r"packed by Python 2\.7, and .*name another with python="):
        remote._load(tmp_path / "call.pkl", {"python": [2, 7]})


def test_checkpoint_saves_when_it_is_time_and_ends_the_attempt_when_the_node_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[Any] = []
    due = {"yield": False, "checkpoint": False}
    running = SimpleNamespace(saves=True, cooperates=False)
    running.save = lambda: steps.append("save")
    running.leave = lambda: steps.append("leave")
    monkeypatch.setattr(remote.job, "progress", lambda step, of: steps.append((step, of)))
    monkeypatch.setattr(remote.job, "should_yield", lambda: due["yield"])
    monkeypatch.setattr(remote.job, "should_checkpoint", lambda: due["checkpoint"])
    monkeypatch.setattr(remote, "_running", None)
    assert not remote.checkpoint(3, 9) and steps == [(3, 9)], "no job runs here"
    monkeypatch.setattr(remote, "_running", running)
    steps.clear()
    assert not remote.checkpoint() and not steps and running.cooperates, "SIGTERM leaves it to the next step"
    due["checkpoint"] = True
    assert remote.checkpoint() and steps == ["save"]
    due["yield"] = True
    remote.checkpoint()
    assert steps[1] == "leave"
    running.saves, running.cooperates = False, False
    assert not remote.checkpoint() and not running.cooperates


def test_answer_is_replaced_as_a_whole_and_no_notice_disturbs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").write_bytes(b"old")
    with (tmp_path / "answer").open("rb") as reader:
        remote._write(tmp_path / "answer", b"new")
        assert reader.read() == b"old" and (tmp_path / "answer").read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [tmp_path / "answer"]
    handlers: list[Any] = []
    monkeypatch.setattr(remote, "_publish", lambda *what: handlers.append(signal.getsignal(signal.SIGTERM)))
    assert run(Call(square, 2), tmp_path, monkeypatch) == 0 and handlers == [signal.SIG_IGN]


def test_name_of_a_job_has_a_bound() -> None:
    def function() -> None: ...

    function.__name__ = "é-" + "x" * 100
    assert order_of(Call(function), {})["name"] == "x" * 64
