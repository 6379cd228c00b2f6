"""Bodies of orders: the bounds of their fields, and what an order does that says nothing more."""

from typing import Any

import msgspec
import pytest

from mesh.api import requests
from mesh.api.requests import (
    LONGEST_PAUSE_S,
    AddData,
    ApproveOrder,
    CollectOrder,
    DownOrder,
    InviteOrder,
    MigrateOrder,
    PauseOrder,
    PruneImages,
    PullCheckpoint,
    PullOrder,
    ReclaimOrder,
    RecoverOrder,
    RemoveCheckpoints,
    RemoveData,
    ShareOrder,
    SubmitOrder,
)
from mesh.model.bounds import MAX_CPUS
from mesh.model.spec import MAX_BATCH
from placement.advert import WHOLE

# What an order must have, and a value of each field.
LEAST: dict[type[Any], dict[str, Any]] = {
    SubmitOrder: {"argv": ["true"]},
    PauseOrder: {"paused": True},
    PullCheckpoint: {"job": "j"},
    AddData: {"name": "set"},
}
PATHS: tuple[list[Any], list[Any]] = (["/", "/" + "d" * 4095], ["", "d", "./d", "/d\0", "/" + "d" * 4096])
NUMBERS: tuple[list[Any], list[Any]] = ([0, 2**31 - 1], [-1, 2**31])
MONTH_S = 30 * 86_400


def read(order: type[Any], **fields: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(LEAST.get(order, {}) | fields), type=order)


@pytest.mark.parametrize(
    ("order", "field", "allowed", "refused"),
    [
        (SubmitOrder, "workdir", *PATHS),
        (SubmitOrder, "out", *PATHS),
        (PullOrder, "destination", *PATHS),
        (PullCheckpoint, "destination", *PATHS),
        (AddData, "path", *PATHS),
        (SubmitOrder, "memory_mib", *NUMBERS),
        (SubmitOrder, "array_limit", *NUMBERS),
        (SubmitOrder, "cpus", [0.1, MAX_CPUS], [0, -1, MAX_CPUS + 1]),
        (SubmitOrder, "deadline_unix", [0, 2**43 - 1], [-1, 2**43]),
        (SubmitOrder, "array_batch", [1, MAX_BATCH], [0, MAX_BATCH + 1]),
        (DownOrder, "grace_s", [0, MONTH_S], [-1, MONTH_S + 1]),
        (ReclaimOrder, "grace_s", [0, MONTH_S], [-1, MONTH_S + 1]),
        (ShareOrder, "share", [1, WHOLE - 1], [0, WHOLE]),
        (ShareOrder, "limit", [1, WHOLE], [0, WHOLE + 1]),
        (ShareOrder, "vram_mib", [1, 2**31 - 1], [0, 2**31]),
        (ShareOrder, "vram_limit_mib", [1, 2**31 - 1], [0, 2**31]),
        (PauseOrder, "for_s", [1, LONGEST_PAUSE_S], [0, LONGEST_PAUSE_S + 1]),
        (CollectOrder, "min_age_s", [0], [-1]),
        (PruneImages, "unused_s", [0], [-1]),
        (InviteOrder, "roles", [[], ["provider", "user"]], [["owner"]]),
    ],
)
def test_fields_have_bounds(order: type[Any], field: str, allowed: list[Any], refused: list[Any]) -> None:
    for value in allowed:
        assert getattr(read(order, **{field: value}), field) == value
    for value in refused:
        with pytest.raises(msgspec.ValidationError):
            read(order, **{field: value})


def test_unknown_fields_of_every_order_are_refused() -> None:
    """A misspelt field would else be an order without it."""
    orders = [one for one in vars(requests).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    assert SubmitOrder in orders and all(one.__struct_config__.forbid_unknown_fields for one in orders)
    with pytest.raises(msgspec.ValidationError, match="unknown field `fore`"):
        read(MigrateOrder, fore=True)


def test_order_that_says_nothing_more_does_the_least() -> None:
    assert not read(MigrateOrder).force
    assert not read(RemoveData, name="set").force and not read(RemoveCheckpoints, ids=[]).force
    assert not read(RecoverOrder).go and not read(AddData, path="/d").everybody
    approved, invited, job = read(ApproveOrder, node="n"), read(InviteOrder), read(SubmitOrder)
    assert not approved.admit and not approved.existing and not read(DownOrder).now and not read(ReclaimOrder).now
    assert (invited.uses, invited.ttl_s, invited.mine) == (1, 86_400.0, False)
    assert (job.retries, job.gpus, job.interactive) == (0, 0, False) and read(CollectOrder).min_age_s == 900.0


def test_job_is_held_to_its_share_unless_it_has_a_limit() -> None:
    fields = {"gpus": 2, "gpu_share": 3000, "vram_mib": 7, "vram_limit_mib": 9, "gpu_model": "A100"}
    fields |= {"capability": [8, 0], "driver": [550, 54]}
    terms = fields | {"capability": (8, 0), "driver": (550, 54)}
    assert read(SubmitOrder, **fields).gpu_terms() == terms | {"gpu_share_limit": 3000}
    assert read(SubmitOrder, **fields, gpu_share_limit=5000).gpu_terms() == terms | {"gpu_share_limit": 5000}
