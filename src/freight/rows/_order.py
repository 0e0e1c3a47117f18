"""From how many ids on it pays to order them by address, from what was measured of the machine.

as they come   every row takes the time that a random row of a table of this size was measured to take
ordered        every page that an id falls on takes one look-up, or the bytes take the time of the link, whichever
               is longer; and the three passes over the ids come before it

pages hit by n random ids of P pages = P (1 - exp(-n / P))
"""

import functools
import math
from dataclasses import dataclass

from freight._units import GiB, MiB
from freight.machine import Machine
from freight.machine._known import known
from freight.rows._gather import WINDOW

_PASSES = 40e-6  # s, the passes over few ids
_PASS = 40e-12  # s, for each further id
_MARGIN = 0.97  # a gain below 3 % is noise
_FEWEST, _MOST = 2**10, 2**31


@dataclass(frozen=True)
class Curve:
    """What reading random rows in place costs: seconds a row by table and row size, a page look-up, a byte."""

    rows: tuple[tuple[int, int, float], ...]  # table bytes, row bytes, seconds
    page: float
    byte: float

    @classmethod
    def of(cls, machine: Machine | None) -> "Curve":
        """From measured facts; without any, those of a GPU that looks up 43 million pages a second over 50 GB/s."""
        sequential = None if machine is None else machine.reads.sequential_gbs
        if machine is None or sequential is None or not machine.reads.random:
            return cls(((256 * MiB, 64, 64 / 40e9), (GiB, 64, 64 / 7e9), (8 * GiB, 64, 64 / 2.6e9)), 1 / 43e6, 1 / 50e9)
        reads = machine.reads
        rows = tuple((read.table_bytes, read.row_bytes, read.row_bytes / read.gbs / 1e9) for read in reads.random)
        rate = reads.pages_per_second
        link = max(sequential, machine.link.h2d_gbs or 0.0)
        return cls(rows, 1 / (rate or 43e6), 1 / link / 1e9)

    def row(self, table_bytes: int, row_bytes: int) -> float:
        """Seconds for one random row of the measured table that is nearest in size; no less than its bytes take."""
        nearest = min({table for table, _, _ in self.rows}, key=lambda table: abs(math.log(table / table_bytes)))
        least = min((width, seconds) for table, width, seconds in self.rows if table == nearest)[1]
        widths = [(width, seconds) for table, width, seconds in self.rows if table == nearest and width <= row_bytes]
        measured = max(widths)[1] if widths else least
        return max(measured, row_bytes * self.byte)


@functools.lru_cache(maxsize=1024)
def _pays_from(table_bytes: int, row_bytes: int, curve: Curve) -> int:
    pages = max(1, table_bytes // WINDOW)
    n = _FEWEST
    while n < _MOST:
        hit = pages * -math.expm1(-n / pages)
        ordered = max(hit * curve.page, n * row_bytes * curve.byte) + _PASSES + n * _PASS
        if ordered < _MARGIN * n * curve.row(table_bytes, row_bytes):
            return n
        n *= 2
    return _MOST


def pays_from(table_bytes: int, row_bytes: int) -> int:
    """The least number of ids that is worth ordering; more than there can be where it never pays.

    >>> pays_from(64 * MiB, 4096) == 2**31
    True
    """
    if not table_bytes or not row_bytes:
        return _MOST
    return _pays_from(table_bytes, row_bytes, _curve())


def _curve() -> Curve:
    return _curve_of(known())


@functools.lru_cache(maxsize=16)
def _curve_of(machine: Machine | None) -> Curve:
    return Curve.of(machine)
