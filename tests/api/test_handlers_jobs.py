"""Orders about jobs: whom a cancellation reaches, when a move is refused, and which jobs a list has."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.api.handlers import jobs as module
from mesh.api.handlers.jobs import JobHandlers
from mesh.api.handlers.lookup import JobLookup
from mesh.api.queries import JobsQuery
from mesh.api.requests import MigrateOrder
from mesh.util.errors import ExitCode, MeshError

JOB = b"j" * 16
HERE, THERE, SPARE = b"h" * 32, b"t" * 32, b"s" * 32


def status(job: bytes = JOB, **fields: Any) -> Any:
    told = {"job": job, "outcome": None, "user": "ada", "state": "running", "array": None, "runner": HERE}
    told |= {"witnesses": (THERE,), "submitter": SPARE, "standby": None, "commit": None, "created_unix_ms": 5}
    told |= {"attempts": (SimpleNamespace(number=2, nick="here", running_unix_ms=9, reason="", node=HERE),)}
    return SimpleNamespace(**told | fields)


class Lab:
    """Handlers of user ada with these jobs; what they ask of the parts is in `steps`."""

    def __init__(self, *found: Any) -> None:
        self.steps: list[Any] = []
        self.found = list(found)
        self.views: dict[bytes, list[Any]] = {one.job: [one] for one in found}
        candidates = [SimpleNamespace(node=node, nick=node.decode()[0]) for node in (HERE, THERE, SPARE)]
        self.ranking = SimpleNamespace(candidates=candidates, refused=[])
        self.spec = SimpleNamespace(checkpointing=object())

        async def withdraw(job: bytes) -> None:
            self.steps.append(("withdraw", job))

        async def spec_of(status: Any) -> Any:
            return self.spec

        async def restore(*given: Any) -> Any:
            self.steps.append(("restore", *given[1:]))
            return SimpleNamespace(files=3)

        async def ended_since(since: int) -> list[Any]:
            self.steps.append(("since", since))
            return [status(b"a" * 16, outcome=SimpleNamespace(ended_unix_ms=since + 1))]

        async def find_own(text: str) -> Any:
            return self.found[0]

        async def runner_of(job: bytes) -> bytes | None:
            return None if self.found[0].outcome else self.found[0].runner

        async def check_owner(one: Any) -> None:
            self.steps.append(("owner", one.job))

        self.lookup = SimpleNamespace(
            user="ada",
            find_jobs=lambda text: self.found,
            find_job=lambda text: self.found[0],
            find_own=find_own,
            check_owner=check_owner,
            spec_of=spec_of,
            runner_of=runner_of,
            seen_by=lambda runner, status: status,
            restore=restore,
            statuses=lambda: {one.job: one for one in self.found},
        )
        view = SimpleNamespace(
            hierarchy=lambda: SimpleNamespace(rank=lambda request, adverts: self.ranking), adverts=list
        )
        jobs: Any = SimpleNamespace(
            job_table=SimpleNamespace(views_of=lambda job: self.views[job]),
            cancel=lambda job, user, nodes: self.steps.append(("cancel", job, user, nodes)),
            migrate=lambda *given: self.steps.append(("migrate", *given)),
            mesh_view=view,
            archive=SimpleNamespace(ended_since=ended_since, count=7),
        )
        submissions, lookup, nothing = SimpleNamespace(withdraw=withdraw), self.lookup, None
        parts: Any = (nothing, nothing, SimpleNamespace(members=list), nothing, jobs, submissions, lookup)
        self.handlers = JobHandlers(*parts)


async def test_cancellation_reaches_all_who_have_a_part_in_the_job() -> None:
    lab = Lab(status())
    told = await lab.handlers.cancel("j")
    assert ("cancel", JOB, "ada", sorted([HERE, THERE, SPARE])) in lab.steps and ("withdraw", JOB) in lab.steps
    assert [(row.state, row.already) for row in told.jobs] == [("cancelling", False)]
    waiting = Lab(status(runner=None))
    await waiting.handlers.cancel("j")
    assert ("cancel", JOB, "ada", sorted([THERE, SPARE])) in waiting.steps


async def test_job_that_is_over_is_not_cancelled_and_its_owner_not_asked() -> None:
    over = Lab(status(outcome="its end", state="done"))
    told = await over.handlers.cancel("j")
    assert [(row.state, row.already) for row in told.jobs] == [("done", True)] and over.steps == [("withdraw", JOB)]
    false = Lab(status(outcome="its end", state="done"))
    false.views[JOB] = [status(outcome="its end"), status(), status(user="eve")]
    told = await false.handlers.cancel("j")
    assert ("cancel", JOB, "ada", sorted([HERE, THERE, SPARE])) in false.steps, "one who lies does not prevent it"


async def test_jobs_of_others_are_not_cancelled() -> None:
    lab = Lab(status(user="eve"))

    async def refuse(one: Any) -> None:
        raise MeshError("eve's", ExitCode.REFUSED)

    lab.lookup.check_owner = refuse
    with pytest.raises(MeshError, match="eve's"):
        await lab.handlers.cancel("j")
    assert not lab.steps


@pytest.fixture(autouse=True)
def request_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "attempt_request", lambda *given: None)
    nodes = {"here": HERE, "there": THERE, "spare": SPARE}
    found = lambda members, text: SimpleNamespace(node_id=nodes[text], nick=text)  # noqa: E731
    monkeypatch.setattr(module, "find_node", found)


async def test_job_moves_to_the_named_the_standby_or_the_best_node() -> None:
    for order, standby, wanted, to in (
        (MigrateOrder(), None, None, "t"),
        (MigrateOrder(), SPARE, None, "s"),
        (MigrateOrder(to="there"), SPARE, THERE, "t"),
    ):
        lab = Lab(status(standby=standby))
        told = await lab.handlers.migrate("j", order)
        assert lab.steps == [("migrate", JOB, "ada", HERE, wanted)] and (told.to, told.attempt) == (to, 2)


async def test_job_moves_by_the_word_of_its_witnesses_and_its_runner() -> None:
    """Any member can publish that the job is over, or that it runs there, and that it may go nowhere."""
    lab = Lab(status(outcome="done", runner=SPARE, attempts=(), rank=(1, 9, 9, 0)))
    views = {HERE: status(rank=(0, 1, 3, 2)), THERE: status(rank=(0, 1, 2, 0)), SPARE: lab.found[0]}
    jobs: Any = SimpleNamespace(job_table=SimpleNamespace(views_by_node=lambda job: views))
    none: Any = None

    async def runner_of(job: bytes) -> bytes:
        return HERE

    lab.lookup.runner_of, lab.lookup.seen_by = runner_of, JobLookup(b"me", none, none, none, jobs, none).seen_by
    told = await lab.handlers.migrate("j", MigrateOrder())
    assert lab.steps == [("migrate", JOB, "ada", HERE, None)] and told.attempt == 2
    views[b""], lab.lookup.seen_by = views.pop(HERE), JobLookup(HERE, none, none, none, jobs, none).seen_by
    assert (await lab.handlers.migrate("j", MigrateOrder())).attempt == 2, "it runs here"


@pytest.mark.parametrize(
    ("changes", "order", "words", "code"),
    [
        ({"runner": None, "state": "pending"}, {}, "does not run now .it is pending", ExitCode.ERROR),
        ({"attempts": ()}, {}, "does not run now", ExitCode.ERROR),
        ({"outcome": "done"}, {}, "does not run now", ExitCode.ERROR),
        ({}, {"to": "here"}, "runs on here already", ExitCode.ERROR),
        ({"candidates": [HERE]}, {}, "no other node could take job", ExitCode.IMPOSSIBLE),
        ({"candidates": [HERE, SPARE]}, {"to": "there"}, "there cannot take job .*: too small", ExitCode.IMPOSSIBLE),
        ({"plain": True}, {}, "so it would start over; --force", ExitCode.ERROR),
    ],
)
async def test_move_that_cannot_be_is_refused(
    changes: dict[str, Any], order: dict[str, Any], words: str, code: ExitCode
) -> None:
    candidates, plain = changes.pop("candidates", None), changes.pop("plain", False)
    lab = Lab(status(**changes))
    if candidates is not None:
        lab.ranking.candidates = [one for one in lab.ranking.candidates if one.node in candidates]
        lab.ranking.refused = [SimpleNamespace(node=THERE, reasons=("too small",))]
    lab.spec.checkpointing = None if plain else object()
    with pytest.raises(MeshError, match=words) as refused:
        await lab.handlers.migrate("j", MigrateOrder(**order))
    assert refused.value.code == code and not lab.steps
    if plain:
        await lab.handlers.migrate("j", MigrateOrder(force=True))
        assert lab.steps


async def test_list_has_archived_jobs_of_the_time_that_is_asked_for() -> None:
    now_ms = int(time.time() * 1000)
    rows = [
        status(b"1" * 16, created_unix_ms=3),
        status(b"2" * 16, outcome=SimpleNamespace(ended_unix_ms=now_ms - 5_000), created_unix_ms=2),
        status(b"3" * 16, outcome=SimpleNamespace(ended_unix_ms=now_ms - 500_000), created_unix_ms=1),
    ]
    lab = Lab(*rows)
    listed: Any = lab.handlers
    listed._around = lambda: ({}, set(), {})
    listed.show = lambda one, around: one.job[:1]
    with pytest.MonkeyPatch.context() as here:
        here.setattr(module.schemas.jobs, "Jobs", lambda jobs, archived: (b"".join(jobs), archived))
        jobs: Any = listed.jobs
        assert await jobs(JobsQuery()) == (b"321", 7), "oldest first"
        assert await jobs(JobsQuery(over=False)) == (b"1", 7) and not lab.steps
        found, _ = await jobs(JobsQuery(since_s=60.0))
        assert sorted(found) == sorted(b"12a") and abs(lab.steps[0][1] - (now_ms - 60_000)) < 5_000
        lab.steps.clear()
        found, _ = await jobs(JobsQuery(since_s=60.0, fits="x"))
        assert sorted(found) == sorted(b"12") and not lab.steps, "an archived one is found by its name elsewhere"


async def test_files_of_a_job_without_any_are_not_fetched(tmp_path: Path) -> None:
    lab = Lab(status())
    outcome: Any = SimpleNamespace(manifest=None, holders=(THERE,))
    assert await lab.handlers.deliver(JOB, str(tmp_path / "out"), outcome) == "" and not lab.steps
    outcome.manifest = b"m"
    told = await lab.handlers.deliver(JOB, str(tmp_path / "out"), outcome)
    assert told == f"3 files in {tmp_path / 'out'}"
    assert lab.steps == [("restore", b"m", (THERE,), "out", tmp_path / "out")]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(MeshError):
        await lab.handlers.deliver(JOB, str(tmp_path / "out"), outcome)
    assert len(lab.steps) == 1, "what is there is not overwritten"
