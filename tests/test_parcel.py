"""What of a call travels by value."""

import importlib
from pathlib import Path

import pytest

from mesh.parcel import _own_modules
from mesh.remote import Call


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
