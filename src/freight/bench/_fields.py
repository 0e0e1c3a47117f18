"""Reading a JSON object strictly: each field once, by kind; what is missing, misfit or left over is an error."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from freight.errors import RecordError

_REQUIRED: Any = object()


class Fields:
    """One JSON object being read. Errors name the file, the path of the field, and what to do."""

    def __init__(self, data: object, file: str, path: str, remedy: str) -> None:
        self._file, self._path, self._remedy = file, path, remedy
        if not isinstance(data, dict):
            self.fail(None, f"must be an object; got {_shown(data)}")
        self._left: dict[str, Any] = dict(data)

    def fail(self, name: str | None, problem: str) -> NoReturn:
        """Raise for field `name` of this object, or for the object itself."""
        where = ".".join(part for part in (self._path, name) if part) or "the file"
        raise RecordError(f"{self._file}: {where} {problem}. {self._remedy}")

    def finish(self) -> None:
        """Raise if a field was not read: it is one that this version does not know."""
        if self._left:
            self.fail(next(iter(self._left)), "is not a field of this schema")

    def text(self, name: str, default: str = _REQUIRED) -> str:
        """A string."""
        return self._take(name, "text", lambda value: isinstance(value, str), default)

    def optional_text(self, name: str) -> str | None:
        """A string, null, or nothing."""
        return self._take(name, "text or null", lambda value: value is None or isinstance(value, str), None)

    def choice(self, name: str, known: tuple[str, ...]) -> str:
        """One of the strings `known`."""
        return self._take(name, "one of " + ", ".join(known), lambda value: value in known)

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        """True or false."""
        return self._take(name, "true or false", lambda value: isinstance(value, bool), default)

    def integer(self, name: str) -> int:
        """A whole number, not negative."""
        return self._take(name, "a whole number of at least 0", lambda value: type(value) is int and value >= 0)

    def number(self, name: str) -> float:
        """A finite number."""
        return float(self._take(name, "a finite number", _is_number))

    def optional_number(self, name: str) -> float | None:
        """A finite number, null, or nothing."""
        value = self._take(name, "a finite number or null", lambda value: value is None or _is_number(value), None)
        return None if value is None else float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        values = self._take(name, "a list of finite numbers", lambda value: _is_list(value, _is_number))
        return tuple(float(value) for value in values)

    def object(self, name: str) -> "Fields":
        """An object, to be read in turn."""
        return Fields(self._take(name, "an object", lambda value: True), self._file, self._below(name), self._remedy)

    def objects(self, name: str) -> Iterator["Fields"]:
        """The objects of a list, to be read in turn; those with an id are named by it in errors."""
        items = self._take(name, "a list", lambda value: isinstance(value, list))
        for index, item in enumerate(items):
            label = item.get("id", index) if isinstance(item, dict) else index
            yield Fields(item, self._file, self._below(f"{name}[{label}]"), self._remedy)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object taken as it is."""
        return self._take(name, "an object", lambda value: isinstance(value, dict))

    def scalars(self, name: str, default: dict[str, Any] = _REQUIRED) -> dict[str, Any]:
        """An object of texts, finite numbers, booleans and nulls."""
        return self._take(name, "an object of plain values", lambda value: _is_object(value, _is_scalar), default)

    def texts(self, name: str) -> dict[str, str]:
        """An object of texts."""
        return self._take(name, "an object of texts", lambda value: _is_object(value, lambda v: isinstance(v, str)))

    def _below(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _take(self, name: str, wanted: str, fits: Callable[[Any], bool], default: Any = _REQUIRED) -> Any:
        if name not in self._left:
            if default is _REQUIRED:
                self.fail(name, f"is missing; expected {wanted}")
            return default
        value = self._left.pop(name)
        if not fits(value):
            self.fail(name, f"must be {wanted}; got {_shown(value)}")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | bool) or _is_number(value)


def _is_list(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(fits(item) for item in value)


def _is_object(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(fits(item) for item in value.values())
