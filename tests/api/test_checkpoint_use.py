"""What `mesh ckpt ls` says that the mesh needs a checkpoint for."""

import msgspec
import pytest

from ckptstore.store import ManifestInfo
from mesh.api.handlers.checkpoints import _use
from mesh.consensus.status import status_of
from mesh.model.record import Commit
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
