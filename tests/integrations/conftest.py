"""One working directory with the training programs, and what each of them ends with when nothing happens to it."""

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
    """The hash that a program ends with, by its name and options."""

    @cache
    def digest(program: str, *options: str) -> str:
        done = Attempt(tmp_path_factory.mktemp("undisturbed") / "attempt", project, program).run(*options)
        assert done.returncode == 0, done.stderr[-2000:]
        return digest_of(done.stdout)

    return digest


@pytest.fixture(scope="session")
def killed_in_save(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Attempt]:
    """The attempt of a program that got SIGKILL in the middle of its second save, after step 12."""

    @cache
    def killed(program: str) -> Attempt:
        attempt = Attempt(tmp_path_factory.mktemp("killed") / "attempt", project, program)
        assert attempt.run(*SHORT, "--die-in-save", "12").returncode == -9
        return attempt

    return killed
