"""A fixture for tests that save hundreds of times."""

import pytest


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let saves assume that no process maps a file for writing. Looking at all processes takes most of a small save."""
    monkeypatch.setattr("ckptstore.saver.mapped_for_writing", lambda processes: set())
