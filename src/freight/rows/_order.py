"""From how many ids on it pays to order them by address, and how many programs then copy, from the machine's facts.

as they come   every row takes the time that a random row of a table of this size was measured to take
ordered        every page that an id falls on takes one look-up, or the bytes take the time of the link, whichever
               is longer; and the three passes over the ids come before it

pages hit by n random ids of P pages = P (1 - exp(-n / P))
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from freight._units import GiB, KiB, MiB
from freight.machine import Machine
from freight.machine._known import known, shipped
from freight.rows._gather import WINDOW

_PASSES = 40e-6  # s, the passes over few ids
_PASS = 40e-12  # s, for each further id
_MARGIN = 0.97  # a gain below 3 % is noise
_FEWEST, _MOST = 2**10, 2**31
_LARGE = 4 * GiB


@dataclass(frozen=True)
class Curve:
    """What reading random rows in place costs: seconds a row by table and row size, a page look-up, a byte."""

    rows: tuple[tuple[int, int, float], ...]  # table bytes, row bytes, seconds
    page: float
    byte: float
    reach: int  # the largest table that fits the translation's caches, in bytes

    @classmethod
    def of(cls, machine: Machine | None) -> "Curve":
        """From measured facts; without any, those of a GPU that looks up 43 million pages a second over 50 GB/s."""
        sequential = None if machine is None else machine.reads.sequential_gbs
        if machine is None or sequential is None or not machine.reads.random:
            narrow = {256 * MiB: 64 / 40e9, GiB: 64 / 7e9, 8 * GiB: 64 / 2.6e9}
            wide = tuple((table, 4 * KiB, 4 * KiB / 50e9) for table in narrow)
            return cls((*((table, 64, took) for table, took in narrow.items()), *wide), 1 / 43e6, 1 / 50e9, 256 * MiB)
        reads = machine.reads
        seen = [read for read in reads.random if read.gbs]
        rows = tuple((read.table_bytes, read.row_bytes, read.row_bytes / read.gbs / 1e9) for read in seen)
        rate = reads.pages_per_second
        link = max(sequential, machine.link.h2d_gbs or 0.0)
        return cls(rows, 1 / (rate or 43e6), 1 / link / 1e9, reads.reach_bytes or 0)

    def row(self, table_bytes: int, row_bytes: int) -> float:
        """Seconds for one random row of the measured table that is nearest in size; no less than its bytes take."""
        nearest = min({table for table, _, _ in self.rows}, key=lambda table: abs(math.log(table / table_bytes)))
        measured = sorted((width, seconds) for table, width, seconds in self.rows if table == nearest)
        widths, seconds = [width for width, _ in measured], [seconds for _, seconds in measured]
        expected = float(np.interp(row_bytes, widths, seconds)) * max(1.0, row_bytes / widths[-1])
        return max(expected, row_bytes * self.byte)


@dataclass(frozen=True)
class Ordering:
    """What to do with so many ids: as they come below `pays`, then ordered, by how many programs from which number on.

    Where look-ups are the limit, rows under way beyond the few thousand that the look-ups can serve only push each
    other out of the translation's caches; the nearer the link's own limit, the more of them are needed to fill it.
    """

    pays: int
    steps: tuple[tuple[int, int], ...]  # from this number of ids on, so many programs

    def copiers(self, n: int) -> int | None:
        """How many programs copy the rows of `n` ids once they are ordered; None where they are taken as they come."""
        if not self.pays <= n < _MOST:
            return None
        return next(copiers for least, copiers in reversed(self.steps) if n >= least)


_NEVER = Ordering(_MOST, ((0, 1),))
_COPIERS = ((1.5, 32), (1.0, 64))  # by how many times longer look-ups take than bytes, at most; else
_FEW = 16


@functools.lru_cache(maxsize=1024)
def _ordering(table_bytes: int, row_bytes: int, curve: Curve) -> Ordering:
    if table_bytes <= curve.reach:
        return _NEVER
    pages = max(1, table_bytes // WINDOW)
    pays, steps, n = _MOST, [(0, _FEW)], _FEWEST
    waiting = list(_COPIERS)
    while n < _MOST:
        lookups, moved = pages * -math.expm1(-n / pages) * curve.page, n * row_bytes * curve.byte
        ordered = max(lookups, moved) + _PASSES + n * _PASS
        if pays == _MOST and ordered < _MARGIN * n * curve.row(table_bytes, row_bytes):
            pays = n
        while waiting and lookups < waiting[0][0] * moved:
            steps.append((n, waiting.pop(0)[1]))
        n = n * 17 // 16
    return Ordering(pays, tuple(steps))


def ordering(table_bytes: int, row_bytes: int) -> Ordering:
    """What to do with ids of a table of this size.

    >>> ordering(64 * MiB, 4096).copiers(2**17) is None
    True
    """
    if not table_bytes or not row_bytes:
        return _NEVER
    return _ordering(table_bytes, row_bytes, _curve())


def _curve() -> Curve:
    return _curve_of(known())


def _past_reach(machine: Machine | None) -> bool:
    """Whether tables were measured that are well past the reach of any translation; a quick probe measures none."""
    return machine is not None and any(read.table_bytes >= _LARGE for read in machine.reads.random)


@functools.lru_cache(maxsize=16)
def _curve_of(machine: Machine | None) -> Curve:
    if machine is not None and not _past_reach(machine):
        machine = shipped(machine.gpu.slug)
    return Curve.of(machine)
