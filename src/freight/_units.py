"""Sizes as people write them: `"2GiB"` to a number of bytes and back."""

import operator
import re
from typing import SupportsIndex

from freight.errors import ArgumentError, ArgumentTypeError

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_BINARY = {"kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = {"": 1, "b": 1, **_BINARY, **_DECIMAL}
_PATTERN = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: SupportsIndex | str, what: str = "size") -> int:
    """Bytes meant by `size`, a whole number or text such as `"2GiB"`, `"1.5 MB"`, `"4096"`.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 kB"), parse_bytes(7)
    (2147483648, 1500, 7)
    """
    nbytes = _parse(size, what) if isinstance(size, str) else _whole(size, what)
    if nbytes < 0:
        raise ArgumentError(f"{what} must not be negative; got {size!r}.")
    return nbytes


def _parse(text: str, what: str) -> int:
    match = _PATTERN.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ArgumentError(f"{what} must look like '2GiB', '500MB' or '4096'; got {text!r}.")
    return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _whole(number: SupportsIndex, what: str) -> int:
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:  # a float, or an array that is no whole number
        pass
    raise ArgumentTypeError(f"{what} must be a whole number of bytes or text such as '2GiB'; got {number!r}.")


def show_bytes(nbytes: float) -> str:
    """`nbytes` for people, in binary units.

    >>> show_bytes(512), show_bytes(65536), show_bytes(3 * 2**30 // 2)
    ('512 B', '64 KiB', '1.5 GiB')
    """
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:.0f} B"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`.

    >>> round_up(1, 4096), round_up(8192, 4096)
    (4096, 8192)
    """
    return -(-value // multiple) * multiple
