"""One network for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.lan import Lan


@pytest.fixture
def lan(tmp_path: Path) -> Iterator[Lan]:
    with Lan(tmp_path) as made:
        yield made
