"""Dataclasses to JSON and back, strictly: what is missing, of another kind or left over is an error with its path."""

import dataclasses
import json
import sys
import types
import typing
from typing import Any, TypeVar

from freight.errors import RecordError

T = TypeVar("T")
_MOST = 2**63  # no count or size is larger, and more would not even become a float
_REMEDY = "Measure again: `freight doctor --refresh`."


def dump(data: dict[str, Any], schema: int) -> str:
    """`data` as JSON text under `schema`."""
    return json.dumps({"schema": schema, **data}, indent=2, allow_nan=False) + "\n"


def load(kind: type[T], text: str, schema: int) -> T:
    """The `kind` in JSON text that was written under `schema`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"machine facts are not JSON: {error}. {_REMEDY}") from None
    if not isinstance(data, dict) or type(data.get("schema")) is not int:
        raise RecordError(f"machine facts must be an object with a schema number; got {_shown(data)}. {_REMEDY}")
    found = data.pop("schema")
    if found != schema:
        raise RecordError(f"machine facts have schema {found}, and this freight reads {schema}. {_REMEDY}")
    return _object(kind, data, "")


def _object(kind: type[T], data: object, path: str) -> T:
    if not isinstance(data, dict):
        raise _wrong(path or "the whole", "an object", data)
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            raise RecordError(f"machine facts: {_below(path, name)} is not a known field. {_REMEDY}")
    values = {}
    for name, field in known.items():
        if name in data:
            values[name] = _value(hints[name], data[name], _below(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"machine facts: {_below(path, name)} is missing. {_REMEDY}")
    return kind(**values)


def _value(hint: Any, value: object, path: str) -> Any:
    if typing.get_origin(hint) is types.UnionType:
        (hint,) = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None:
            return None
    if dataclasses.is_dataclass(hint):
        return _object(hint, value, path)  # type: ignore[type-var]
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise _wrong(path, "a list", value)
        item = typing.get_args(hint)[0]
        return tuple(_value(item, entry, f"{path}[{index}]") for index, entry in enumerate(value))
    return _plain(hint, value, path)


def _plain(hint: Any, value: object, path: str) -> Any:
    if hint is str and not isinstance(value, str):
        raise _wrong(path, "text", value)
    if hint is bool and not isinstance(value, bool):
        raise _wrong(path, "true or false", value)
    if hint is int and (type(value) is not int or not 0 <= value < _MOST):
        raise _wrong(path, "a whole number of at least 0, of 63 bits", value)
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            raise _wrong(path, "a finite number of at least 0", value)
        return float(value)
    return value


def _wrong(path: str, wanted: str, value: object) -> RecordError:
    return RecordError(f"machine facts: {path} must be {wanted}; got {_shown(value)}. {_REMEDY}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
