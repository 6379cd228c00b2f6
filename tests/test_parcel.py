"""A call on its way to a job, and what comes back, without a mesh (with one: tests/e2e/test_python_api.py)."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from mesh import remote
from mesh.futures import JobFailed, _raised
from mesh.parcel import CARRIED, _own_modules, pack
from mesh.remote import ANSWER, PICKLE, Call


def test_what_is_installed_for_any_python_does_not_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """As `launch.py` does, in this process; its answer is in `where`."""
    monkeypatch.setenv("MESH_OUT_DIR", str(where))
    monkeypatch.setattr(remote, "_running", None)  # and afterwards again
    pack(call, where, None, "pickle")
    return remote.main(where / CARRIED)


def test_a_function_that_exits_ends_its_job_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(Call(partial(sys.exit, 4)), tmp_path, monkeypatch) == 1
    told = json.loads((tmp_path / ANSWER).read_text())
    assert (told["kind"], told["type"], told["text"]) == ("error", "SystemExit", "4")
    error = _raised("SystemExit: 4", (tmp_path / PICKLE).read_bytes())
    assert isinstance(error, JobFailed) and str(error) == "SystemExit: 4"


def test_one_that_exits_well_has_done_what_it_was_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(Call(sys.exit), tmp_path, monkeypatch) == 0
    assert json.loads((tmp_path / ANSWER).read_text()) == {"kind": "value", "as": "json", "value": None}
