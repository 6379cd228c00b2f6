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
