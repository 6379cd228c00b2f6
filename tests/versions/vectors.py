"""Samples of all structs on the wire and in journals, and the frozen samples of a release.

`python -m tests.versions.vectors NAME` freezes the current samples as `NAME.json`. The file of a release never changes.
"""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from ckptstore.manifest import Manifest
from membership.admission import Decision, JoinAnswer, JoinRequest, Published
from membership.records import Body
from membership.trust import Certificate, Genesis, Grant, Invite, Promotion, Revocation
from membership.wire import AnyEvidence, AnyPacket
from mesh.api.handlers.usage import Told as ToldReceipts
from mesh.checkpoints.key_shares import Held, Share
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.forced_reconfiguration import ForcedReconfiguration
from mesh.consensus.messages import AnyMessage
from mesh.consensus.status import JobStatus
from mesh.consensus.submission_retry import PendingSubmission
from mesh.data.manifest import Announced, DataManifest
from mesh.gpus.receipts import Receipt
from mesh.images.allowlist import Entry, SignedList
from mesh.images.catalogue import Shown
from mesh.model.events import Event
from mesh.model.spec import JobSpec
from mesh.rpc.client import Facts
from placement.advert import Advert
from placement.summary import Summary

HERE = Path(__file__).parent
# Statements about a node or about the past. Readers ignore unknown fields.
STATEMENTS: tuple[Any, ...] = (
    *(
        Facts,
        Advert,
        Summary,
        JobStatus,
        Shown,
        Announced,
        Event,
        Receipt,
        ToldReceipts,
        Body,
        JoinAnswer,
        Decision,
        Held,
    ),
    *get_args(AnyEvidence),
    *get_args(AnyPacket),
)
# Messages that bind their reader. It cannot honor unknown fields, so it refuses them.
BINDING: tuple[Any, ...] = (
    *(
        Genesis,
        Certificate,
        Revocation,
        Promotion,
        Grant,
        Invite,
        JoinRequest,
        Published,
        JobSpec,
        PendingSubmission,
        ForcedReconfiguration,
        Share,
        Manifest,
    ),
    *(SignedList, Entry),
    DataManifest,
    *get_args(AnyMessage),
)
JOURNAL: tuple[Any, ...] = (WitnessRecord,)
WITHDRAWN = {"Endorsement"}  # of 0.1.0; nodes take none: it did not show that the machine's owner had asked for it
ALL = {
    kind.__name__ if kind is not ToldReceipts else "ToldReceipts": kind for kind in (*STATEMENTS, *BINDING, *JOURNAL)
}


def sample(kind: Any, full: bool = True) -> Any:
    """Return a value of this type with all its fields, or with the required fields only."""
    return msgspec.convert(_raw(inspect.type_info(kind), full), kind, builtin_types=(bytes,))


def _raw(info: Any, full: bool) -> Any:
    match info:
        case inspect.StructType():
            fields = [field for field in info.fields if full or field.required]
            named = {field.encode_name: _raw(field.type, full) for field in fields}
            if info.array_like:
                return ([info.tag] if info.tag is not None else []) + list(named.values())
            return named | ({info.tag_field: info.tag} if info.tag is not None else {})
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return max(1, info.ge or 0)
        case inspect.FloatType():
            return 1.5
        case inspect.StrType():
            return "x"
        case inspect.BytesType():
            return b"\x01" * 32
        case inspect.NoneType():
            return None
        case inspect.LiteralType():
            return info.values[0]
        case inspect.VarTupleType() | inspect.ListType():
            return [_raw(info.item_type, full)]
        case inspect.TupleType():
            return [_raw(item, full) for item in info.item_types]
        case inspect.DictType():
            return {_raw(info.key_type, full): _raw(info.value_type, full)}
        case inspect.UnionType():
            return _raw(next(one for one in info.types if not isinstance(one, inspect.NoneType)), full)
    raise TypeError(f"no sample of {info}")


def frozen(name: str) -> dict[str, tuple[bytes, bytes]]:
    """Return the bytes of the full and of the smallest sample for each type."""
    told = json.loads((HERE / f"{name}.json").read_text())
    return {kind: (bytes.fromhex(full), bytes.fromhex(least)) for kind, (full, least) in told.items()}


def main(name: str) -> None:
    path = HERE / f"{name}.json"
    if path.exists():
        raise SystemExit(f"{path} is there already: what was released stays as it was")
    encode = msgspec.msgpack.encode
    told = {key: [encode(sample(kind)).hex(), encode(sample(kind, False)).hex()] for key, kind in ALL.items()}
    path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
