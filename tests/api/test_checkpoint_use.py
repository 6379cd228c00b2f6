"""What `mesh ckpt ls` says that the mesh needs a checkpoint for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptstore.errors import StoreError
from ckptstore.store import ManifestInfo
from mesh.api.handlers.checkpoints import CheckpointHandlers, _named, _needing, _use
from mesh.checkpoints.replicator import Expected, FetchError
from mesh.consensus.status import status_of
from mesh.model.record import Commit, Outcome
from mesh.util.errors import ExitCode, MeshError
from tests.consensus.worlds import JOB, A, B, make_witness


def info(seq: int) -> ManifestInfo:
    return ManifestInfo(b"%032d" % seq, JOB, "checkpoint", 0, 1, seq, None, 0, 0, 0, b"", "ada", 0, 0)


def commit(seq: int, *holders: bytes) -> Commit:
    return Commit(seq, 1, b"%032d" % seq, None, holders, None, 0, wanted=2)


@pytest.mark.parametrize(
    ("seq", "use"),
    [
        (1, ("older", ())),
        (2, ("predecessor", (A, B))),
        (3, ("older", ())),
        (4, ("at risk", (A,))),
        (5, ("not committed", ())),
    ],
)
def test_use_of_a_checkpoint(seq: int, use: tuple[str, tuple[bytes, ...]]) -> None:
    status = status_of(JOB, make_witness(), None, "running", "", None)
    status = msgspec.structs.replace(status, commit=commit(4, A), predecessor=commit(2, A, B))
    assert _use(info(seq), status) == use
    assert _use(info(4), msgspec.structs.replace(status, commit=commit(4, A, B)))[0] == "committed"


async def test_checkpoint_that_a_job_needs_is_removed_by_force_only() -> None:
    status = status_of(JOB, make_witness(), None, "running", "", None)
    status = msgspec.structs.replace(status, commit=commit(4, A), predecessor=commit(2, A, B))
    gone: list[bytes] = []
    workdir = msgspec.structs.replace(info(6), kind="workdir")
    kept = [info(seq) for seq in range(1, 5)] + [workdir]
    store: Any = SimpleNamespace(manifests=lambda: kept, forget=gone.append)
    lookup: Any = SimpleNamespace(statuses=lambda: {JOB: msgspec.structs.replace(status, workdir=workdir.id)})
    nothing: Any = None
    handlers = CheckpointHandlers(nothing, store, nothing, lookup)
    for needed, use in ((2, "predecessor"), (4, "at risk"), (6, "in use")):
        with pytest.raises(MeshError, match=f"is {use}: job .* may need it"):
            await handlers.remove([info(1).id.hex(), info(needed).id.hex()], force=False)
    assert gone == []
    await handlers.remove([info(1).id.hex()], force=False)
    await handlers.remove([info(4).id.hex()], force=True)
    assert gone == [info(1).id, info(4).id]


def test_checkpoint_is_named_by_enough_of_its_id() -> None:
    infos = [msgspec.structs.replace(info(1), id=bytes.fromhex(text * 8)) for text in ("abcd0001", "abcd0002")]
    assert _named(infos, "ABCD0001") is infos[0]
    for name, words, code in (
        ("abcd", "fits 2 checkpoints", ExitCode.USAGE),
        ("abc", "no checkpoint 'abc' is here", ExitCode.NOT_FOUND),
        ("ffff", "no checkpoint 'ffff' is here", ExitCode.NOT_FOUND),
    ):
        with pytest.raises(MeshError, match=words) as told:
            _named(infos, name)
        assert told.value.code == code


def test_what_an_ended_job_needs_is_its_result_and_last_checkpoint() -> None:
    status = status_of(JOB, make_witness(), None, "done", "", None)
    outcome = Outcome("done", 0, "", info(9).id, (B,), 0)
    over = msgspec.structs.replace(status, commit=commit(4, A), predecessor=commit(2, A), outcome=outcome)
    assert [_use(info(seq), over)[0] for seq in (4, 2, 9, 5, 1)] == ["kept", "over", "result", "over", "over"]
    assert _use(msgspec.structs.replace(info(6), kind="workdir"), over)[0] == "over" and _use(info(1), None) == (
        "unknown",
        (),
    )


def test_working_directory_is_needed_by_a_job_that_goes_on() -> None:
    workdir = msgspec.structs.replace(info(6), kind="workdir")
    rows = {
        bytes([number]): SimpleNamespace(workdir=of, outcome=outcome, job=bytes([number]))
        for number, of, outcome in ((1, workdir.id, "over"), (3, workdir.id, None), (2, b"other", None))
    }
    statuses: Any = rows
    assert _needing(workdir, statuses) is rows[b"\3"] and _needing(info(1), statuses) is None


async def test_damaged_checkpoint_is_fetched_again_or_told_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    report = SimpleNamespace(chunks=5, bad_chunks=2, quarantined=("c",), damaged_manifests=(b"good", b"lost", b"gone"))
    monkeypatch.setattr("mesh.api.handlers.checkpoints.verify", lambda store: report)
    asked: list[Any] = []

    async def fetch(identity: bytes, sources: list[bytes], of: Expected) -> None:
        assert (of.job, of.user) == (JOB, "ada")
        asked.append((identity, sources))
        if identity == b"lost":
            raise FetchError("no node has it")

    def manifest(identity: bytes) -> Any:
        if identity == b"gone":
            raise StoreError("it is not here")
        return SimpleNamespace(job=JOB, user="ada")

    store: Any = SimpleNamespace(manifest=manifest, quarantine="/q")
    jobs: Any = SimpleNamespace(replicator=SimpleNamespace(fetch=fetch))
    nothing: Any = None
    handlers: Any = CheckpointHandlers(nothing, store, jobs, nothing)
    handlers._sources = lambda job, identity: [B]
    told = await handlers.verify()
    assert told.repaired == [b"good".hex()] and asked == [(b"good", [B]), (b"lost", [B])]
    assert told.lost == {b"lost".hex(): "no node has it", b"gone".hex(): "it is not here"} and told.bad_chunks == 2


def test_holders_are_asked_first_and_each_node_once() -> None:
    lookup: Any = SimpleNamespace(me=b"me", statuses=lambda: {JOB: status})
    status = SimpleNamespace(commit=commit(4, A, b"me"), attempts=[SimpleNamespace(node=node) for node in (B, A)])
    members = [SimpleNamespace(node_id=node, present=here) for node, here in ((b"c", True), (b"d", False), (B, True))]
    membership: Any = SimpleNamespace(members=lambda: members)
    nothing: Any = None
    handlers = CheckpointHandlers(membership, nothing, nothing, lookup)
    assert handlers._sources(JOB, info(4).id) == [A, B, b"c"]
    assert handlers._sources(JOB, info(3).id) == [B, A, b"c"], "these hold another one"
    members += [SimpleNamespace(node_id=b"%d" % number, present=True) for number in range(99)]
    assert len(handlers._sources(JOB, info(4).id)) == 16


async def test_checkpoint_by_number_is_the_committed_or_a_stored_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[Any] = []

    async def restore(status: object, manifest: bytes, holders: object, part: str, target: Path) -> Any:
        restored.append((manifest, holders, part))

    monkeypatch.setattr("mesh.api.handlers.checkpoints.copy_as", lambda kind, report, **given: given["seq"])
    status = SimpleNamespace(job=JOB, commit=commit(4, A))
    checked: list[Any] = []

    async def check_owner(one: Any) -> None:
        checked.append(one)

    lookup: Any = SimpleNamespace(find_job=lambda text: status, check_owner=check_owner, restore=restore)
    infos = [info(2), msgspec.structs.replace(info(3), kind="result")]
    store: Any = SimpleNamespace(manifests=lambda job: infos)
    nothing: Any = None
    handlers = CheckpointHandlers(nothing, store, nothing, lookup)
    target = str(tmp_path / "new")
    for seq, found in ((None, 4), (4, 4), (2, 2)):
        assert await handlers.pull("j", seq, target) == found
    assert restored == [(info(4).id, (A,), "ckpt")] * 2 + [(info(2).id, (), "ckpt")]
    assert checked == [status] * 3, "files of a job are for its user"
    with pytest.raises(MeshError, match=r"checkpoint 3 of job .* is not in this node's store") as told:
        await handlers.pull("j", 3, target)
    assert told.value.code == ExitCode.NOT_FOUND
    status.commit = None
    with pytest.raises(MeshError, match="has no committed checkpoint yet"):
        await handlers.pull("j", None, target)
