"""Payloads of calls and their results, without a mesh; tests/e2e/test_python_api.py uses a mesh."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from mesh.sdk import remote
from mesh.sdk.futures import JobFailed, _raised
from mesh.sdk.payload import CARRIED, _own_modules, pack
from mesh.sdk.remote import ANSWER, PICKLE, Call


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


def run(call: Call, where: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the call in this process as `launch.py` does; the result is in `where`."""
    monkeypatch.setenv("MESH_OUT_DIR", str(where))
    monkeypatch.setattr(remote, "_running", None)  # monkeypatch restores it afterwards
    pack(call, where, None, "pickle")
    return remote.main(where / CARRIED)


def test_exit_code_of_a_function_fails_only_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(Call(partial(sys.exit, 4)), tmp_path, monkeypatch) == 1
    told = json.loads((tmp_path / ANSWER).read_text())
    assert (told["kind"], told["type"], told["text"]) == ("error", "SystemExit", "4")
    error = _raised("SystemExit: 4", (tmp_path / PICKLE).read_bytes())
    assert isinstance(error, JobFailed) and str(error) == "SystemExit: 4"


def test_function_exiting_with_zero_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(Call(sys.exit), tmp_path, monkeypatch) == 0
    assert json.loads((tmp_path / ANSWER).read_text()) == {"kind": "value", "as": "json", "value": None}
