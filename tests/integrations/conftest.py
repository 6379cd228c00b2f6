"""Fixtures: a working directory with the training programs, and results of undisturbed and killed runs."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.integrations.trainings import SHORT, Attempt, digest_of, make_project


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("job") / "project")


@pytest.fixture(scope="session")
def undisturbed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function from a program and its options to the weight hash of an undisturbed run."""

    @cache
    def digest(program: str, *options: str) -> str:
        done = Attempt(tmp_path_factory.mktemp("undisturbed") / "attempt", project, program).run(*options)
        assert done.returncode == 0, done.stderr[-2000:]
        return digest_of(done.stdout)

    return digest


@pytest.fixture(scope="session")
def killed_in_save(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Attempt]:
    """Return a function from a program to its attempt that got SIGKILL in its second save, after step 12."""

    @cache
    def killed(program: str) -> Attempt:
        attempt = Attempt(tmp_path_factory.mktemp("killed") / "attempt", project, program)
        assert attempt.run(*SHORT, "--die-in-save", "12").returncode == -9
        return attempt

    return killed
