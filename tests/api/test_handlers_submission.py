"""Checks of a submission that old jobs are not held to."""

from types import SimpleNamespace
from typing import Any

import pytest

from mesh.api.handlers.images import ImageHandlers
from mesh.api.handlers.submission import SubmissionHandlers, _check_order
from mesh.api.requests import SubmitOrder
from mesh.model.spec import DataNeed
from mesh.util.errors import ExitCode, MeshError


@pytest.mark.parametrize("name", ["", "a", "_train", "Night-run.2", "x" * 64])
def test_plain_name_is_taken(name: str) -> None:
    _check_order(SubmitOrder(argv=["true"], name=name, memory_mib=6))


@pytest.mark.parametrize("name", ["-a", "a.", "a b", "<b>", "größe", "x" * 65, "a\n", "a/b"])
def test_name_that_would_ruin_a_table_is_refused(name: str) -> None:
    with pytest.raises(MeshError, match="cannot be a job's name: up to 64") as caught:
        _check_order(SubmitOrder(argv=["true"], name=name))
    assert caught.value.code == ExitCode.USAGE


@pytest.mark.parametrize("memory_mib", [0, 5])
def test_memory_that_nothing_runs_in_is_refused(memory_mib: int) -> None:
    with pytest.raises(MeshError, match="6 MiB of memory at least") as caught:
        _check_order(SubmitOrder(argv=["true"], memory_mib=memory_mib))
    assert caught.value.code == ExitCode.USAGE


def test_image_is_not_left_out_by_the_process_engine() -> None:
    library: Any = SimpleNamespace(rules=SimpleNamespace(is_free=lambda name: True))
    nothing: Any = None
    handlers = ImageHandlers(b"me", nothing, library, nothing, nothing)
    assert handlers.pin(None, "process") is None and handlers.pin("tool", "docker") is None
    with pytest.raises(MeshError, match="the process engine runs no image") as caught:
        handlers.pin("tool", "process")
    assert caught.value.code == ExitCode.USAGE


def test_data_set_that_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.api.handlers.submission.cannot_ever", lambda request, adverts: None)
    monkeypatch.setattr("mesh.api.handlers.submission.placement_request", lambda job, spec, now_ms: None)
    adverts = [SimpleNamespace(data_paths=("imagenet",)), SimpleNamespace(data_paths=())]
    handlers: Any = SimpleNamespace(_jobs=SimpleNamespace(mesh_view=SimpleNamespace(adverts=lambda: adverts)))

    def refuse(*needs: DataNeed) -> None:
        SubmissionHandlers._refuse_impossible(handlers, SimpleNamespace(data=needs))  # type: ignore[arg-type]

    refuse(DataNeed("imagenet"), DataNeed("ada/pictures", b"i" * 32))
    with pytest.raises(MeshError, match="no data set nothere: `mesh data ls` lists them") as caught:
        refuse(DataNeed("imagenet"), DataNeed("nothere"))
    assert caught.value.code == ExitCode.NOT_FOUND
