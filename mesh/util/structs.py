"""Copies between structs."""

from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


def copy_as(kind: type[S], source: object, **given: Any) -> S:
    """Return a `kind` with the fields `given`, and all others from the attributes of `source` with the same names."""
    taken = {name: getattr(source, name) for name in kind.__struct_fields__ if name not in given}
    return kind(**taken, **given)
