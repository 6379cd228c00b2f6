"""Answers of the API for tests, from the few fields that a test is about."""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

T = TypeVar("T")


def answer(kind: type[T], fields: dict[str, Any]) -> T:
    """Return a `kind` with these fields, given as JSON values; the others are neutral: 0, "", False, None, empty."""
    return msgspec.convert(_filled(kind, fields), kind)


def _filled(hint: Any, value: Any) -> Any:
    match get_origin(hint), get_args(hint):
        case (origin, kinds) if origin in {Union, UnionType}:
            return value if value is None else _filled(next(one for one in kinds if one is not NoneType), value)
        case (origin, (kind, *_)) if origin is Annotated:
            return _filled(kind, value)
        case (origin, (kind, *_)) if origin is list:
            return [_filled(kind, one) for one in value]
    if not (isinstance(hint, type) and issubclass(hint, msgspec.Struct)):
        return value
    fields = {field.encode_name: field for field in msgspec.structs.fields(hint)}
    given = {name: _filled(fields[name].type, one) for name, one in value.items()}
    return {name: _neutral(field.type) for name, field in fields.items() if field.required} | given


def _neutral(hint: Any) -> Any:
    kinds = get_args(hint)
    match get_origin(hint):
        case origin if origin in {Union, UnionType}:
            return None if NoneType in kinds else _neutral(kinds[0])
        case origin if origin is Annotated:
            return _neutral(kinds[0])
        case origin if origin is Literal:
            return kinds[0]
        case origin if origin is tuple:
            return [_neutral(kind) for kind in kinds if kind is not ...] if ... not in kinds else []
        case None if issubclass(hint, msgspec.Struct):
            return _filled(hint, {})
        case origin:
            return (origin or hint)()
