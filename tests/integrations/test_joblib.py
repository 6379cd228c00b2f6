"""The joblib backend without a daemon. tests/e2e/test_python_api.py tests it with one."""

from pathlib import Path
from typing import Any

import joblib
import pytest

import mesh
from mesh.sdk.integrations.joblib import Backend, places, register
from mesh.sdk.payload import Terms
from mesh.util.errors import MeshError

ROW = {
    "state": "alive",
    "lending": True,
    "slots_free": 3,
    "gpus_free": 5,
    "gpu_room": [{"uuid": "a", "share": 100}, {"uuid": "b", "share": 70}],
}


@pytest.mark.parametrize(
    ("row", "terms", "count"),
    [
        ({}, {}, 3),
        ({}, {"gpus": 0, "memory": "4g"}, 3),
        ({}, {"gpus": 2, "vram": "6g"}, 2),
        ({}, {"gpus": "auto"}, 5),
        ({}, {"gpu_share": 30}, 5),
        ({"lending": False}, {}, 0),
        ({"state": "dead"}, {"gpus": 1}, 0),
    ],
)
def test_places_of_a_node_depend_on_the_request(row: dict[str, Any], terms: Terms, count: int) -> None:
    assert places(ROW | row, terms) == count


def test_effective_n_jobs_follows_n_jobs(tmp_path: Path) -> None:
    backend = Backend(client=mesh.Client(tmp_path))
    assert [backend.effective_n_jobs(number) for number in (7, 1, None)] == [7, 1, 1]
    with pytest.raises(ValueError, match="no meaning"):
        backend.effective_n_jobs(0)
    with pytest.raises(MeshError, match="no daemon answers"):
        backend.effective_n_jobs(-1)


@pytest.mark.parametrize(
    ("terms", "error", "words"),
    [({}, MeshError, "no daemon answers"), ({"gpu": 1}, TypeError, r"no such term: gpu \(did you mean gpus\?\)")],
)
def test_submission_errors_are_raised(
    tmp_path: Path, terms: dict[str, Any], error: type[Exception], words: str
) -> None:
    register()
    with (
        joblib.parallel_config(backend="mesh", client=mesh.Client(tmp_path), **terms),
        pytest.raises(error, match=words),
    ):
        joblib.Parallel(n_jobs=2)(joblib.delayed(pow)(2, number) for number in range(4))
