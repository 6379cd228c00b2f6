"""Checks of a submission that old jobs are not held to."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.api.handlers import submission as module
from mesh.api.handlers.images import ImageHandlers
from mesh.api.handlers.submission import SubmissionHandlers, _check_order
from mesh.api.requests import SubmitOrder
from mesh.model.spec import DataNeed
from mesh.util.errors import ExitCode, MeshError
from tests.consensus.worlds import JOB, make_spec


async def test_job_is_handed_over_although_the_client_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it may run, while it is not tried again without a majority, and its files are not delivered."""
    handed, wanted, answers = list[Any](), list[tuple[bytes, str]](), asyncio.Event()

    async def submit(spec: Any) -> tuple[bytes, str]:
        handed.append(spec)
        await answers.wait()
        return JOB, ""

    async def nothing(*asked: Any) -> Any:
        return []

    async def no_keys(needs: Any) -> Any:
        return {}

    async def same(specs: Any, order: Any, keys: Any) -> Any:
        return specs

    async def want(job: bytes, place: str) -> None:
        wanted.append((job, place))

    membership = SimpleNamespace(credentials=SimpleNamespace(roles=("user",)), members=lambda: [])
    parts: dict[int, Any] = {
        2: membership,
        6: SimpleNamespace(submit=submit),
        8: SimpleNamespace(sealed=same),
        9: SimpleNamespace(want=want),
        13: SimpleNamespace(encrypt=False),
        14: SimpleNamespace(needs=nothing, keys=no_keys),
    }
    handlers = SubmissionHandlers(*(parts.get(place) for place in range(15)))
    monkeypatch.setattr(handlers, "_spec", lambda *given: make_spec())
    monkeypatch.setattr(handlers, "_refuse_impossible", lambda spec: None)
    monkeypatch.setattr(module, "require_free", nothing)
    client = asyncio.create_task(handlers.submit(SubmitOrder(argv=["true"], out="/results")))
    async with asyncio.timeout(20):
        while not handed:
            await asyncio.sleep(0.01)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        answers.set()
        while not wanted:
            await asyncio.sleep(0.01)
    assert client.cancelled() and wanted == [(JOB, "/results")]


@pytest.mark.parametrize("name", ["", "a", "_train", "Night-run.2", "x" * 64])
def test_plain_name_is_taken(name: str) -> None:
    _check_order(SubmitOrder(argv=["true"], name=name, memory_mib=6))


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"retries": -1}, "retries is a number from 0, not -1"),
        ({"retry_on": [3]}, "add --retries N"),
        ({"ckpt_mode": "rename"}, "add --ckpt DIR"),
        ({"argv": [".venv/bin/python", "t.py"], "workdir": "/w"}, r"`\.venv` is never copied\. Use --uv"),
        ({"argv": ["./venv/bin/python"], "workdir": "/w"}, "`venv` is never copied"),
    ],
)
def test_terms_that_could_have_no_effect_are_refused(terms: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshError, match=words) as caught:
        _check_order(SubmitOrder(**{"argv": ["true"], **terms}))
    assert caught.value.code == ExitCode.USAGE


@pytest.mark.parametrize(
    "terms",
    [
        {"retries": 2, "retry_on": [3]},
        {"ckpt": "c", "ckpt_mode": "rename"},
        {"ckpt_mode": "system"},
        {"argv": [".venv/bin/python"]},
        {"argv": ["/opt/venv/bin/python"], "workdir": "/w"},
        {"argv": ["python3", ".venv/x"], "workdir": "/w"},
    ],
)
def test_terms_that_have_one_are_taken(terms: dict[str, Any]) -> None:
    _check_order(SubmitOrder(**{"argv": ["true"], **terms}))


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
