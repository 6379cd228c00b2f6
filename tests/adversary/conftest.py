"""Real daemons for the cases of this folder, with their logs in the report of a failure."""

from tests.e2e.conftest import make_stack, pytest_runtest_makereport

__all__ = ["make_stack", "pytest_runtest_makereport"]
