"""What `mesh ckpt ls` says that the mesh needs a checkpoint for."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptstore.store import ManifestInfo
from mesh.api.handlers.checkpoints import CheckpointHandlers, _use
from mesh.consensus.status import status_of
from mesh.model.record import Commit
from mesh.util.errors import MeshError
from tests.consensus.worlds import JOB, A, B, make_witness


def info(seq: int) -> ManifestInfo:
    return ManifestInfo(b"%032d" % seq, JOB, "checkpoint", 0, 1, seq, None, 0, 0, 0, False, "ada", 0, 0)


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
