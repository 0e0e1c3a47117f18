"""The tree of errors: as drawn, each also a builtin, each whole after a trip between processes."""

import builtins
import errno
import pickle
import re

import pytest

from freight import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]
DRAWN = re.compile(r"^( *)[│├└─ ]*(\w+Error)\b(?: +\((.*?)\))?", re.MULTILINE)


def test_all_lists_every_class() -> None:
    defined = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert sorted(defined) == sorted(errors.__all__) == errors.__all__


def test_drawn_as_it_is() -> None:
    """The docstring's tree has every class once, with the builtin that it also is."""
    drawn = {match[2]: match[3] for match in DRAWN.finditer(errors.__doc__ or "") if match[2] in errors.__all__}
    assert sorted(drawn) == errors.__all__
    for kind in CLASSES:
        own = [base.__name__ for base in kind.__bases__ if base.__module__ == "builtins" and base is not Exception]
        assert (drawn[kind.__name__] or "").split(", ") == (own or [""]), kind


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_one_root_and_a_builtin(kind: type[errors.FreightError]) -> None:
    assert issubclass(kind, errors.FreightError)
    if kind is not errors.FreightError:
        caught_by = [base for base in kind.__mro__ if base.__module__ == builtins.__name__]
        assert caught_by[0] not in (Exception, BaseException, object)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_survives_pickling(kind: type[errors.FreightError]) -> None:
    """Worker processes hand errors back pickled."""
    args = (errno.ENOSPC, "no room", "data.bin") if issubclass(kind, OSError) else ("no room",)
    error = pickle.loads(pickle.dumps(kind(*args)))
    assert type(error) is kind
    assert error.args == kind(*args).args
    if isinstance(error, OSError):
        assert (error.errno, error.filename) == (errno.ENOSPC, "data.bin")
