"""What travels between nodes and stands in their journals, one sample of each, and the bytes of a release's samples.

`python -m tests.versions.vectors NAME` freezes the present ones as `NAME.json`; a release's file is never written again.
"""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from ckptstore.manifest import Manifest
from membership.admission import Knock, KnockAnswer
from membership.records import Body
from membership.trust import Certificate, Genesis, Invite, Revocation
from membership.wire import AnyEvidence, AnyPacket
from mesh.api.peer import Facts
from mesh.api.usage import Told as ToldReceipts
from mesh.images.allowlist import SignedList, Word
from mesh.images.catalogue import Shown
from mesh.jobs.effects import Cell
from mesh.jobs.errands import Errand
from mesh.jobs.events import Event
from mesh.jobs.messages import AnyMessage
from mesh.jobs.recovery import Mandate
from mesh.jobs.shares import Held, Share
from mesh.jobs.spec import JobSpec
from mesh.jobs.status import JobStatus
from mesh.provider.receipts import Receipt
from placement.advert import Advert
from placement.summary import Summary

HERE = Path(__file__).parent
# What a node says of itself or of what was: who reads ignores what it does not know.
STATEMENTS: tuple[Any, ...] = (
    *(Facts, Advert, Summary, JobStatus, Shown, Event, Receipt, ToldReceipts, Body, KnockAnswer, Held),
    *get_args(AnyEvidence),
    *get_args(AnyPacket),
)
# What binds its reader: what it does not know it cannot keep, so it refuses it.
BINDING: tuple[Any, ...] = (
    *(Genesis, Certificate, Revocation, Invite, Knock, JobSpec, Errand, Mandate, Share, Manifest),
    *(SignedList, Word),
    *get_args(AnyMessage),
)
JOURNAL: tuple[Any, ...] = (Cell,)
ALL = {
    kind.__name__ if kind is not ToldReceipts else "ToldReceipts": kind for kind in (*STATEMENTS, *BINDING, *JOURNAL)
}


def sample(kind: Any, full: bool = True) -> Any:
    """A value of this type with all its fields, or with those alone that must be there."""
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
    """Of each type its full sample's bytes, and those of the least one."""
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
