"""When ids are ordered by address: where it was measured to pay, and nowhere else."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight._units import GiB, MiB
from freight.machine import Machine, RandomRead
from freight.machine._known import shipped
from freight.rows import _order
from freight.rows._order import Curve, ordering

SIZES = st.sampled_from([64 * MiB, 256 * MiB, 512 * MiB, GiB, 3 * GiB, 8 * GiB, 32 * GiB, 64 * GiB])
WIDTHS = st.sampled_from([4, 64, 100, 128, 256, 400, 512, 1024, 2408, 4096])


def h200() -> Machine:
    machine = shipped("h200")
    assert machine is not None
    return machine


MEASURED = Curve.of(h200())
UNKNOWN = Curve.of(None)
CURVES = pytest.mark.parametrize("curve", [MEASURED, UNKNOWN], ids=["h200", "unknown"])


def ordered(table_bytes: int, row_bytes: int, n: int, curve: Curve = MEASURED) -> bool:
    return _order._ordering(table_bytes, row_bytes, curve).copiers(n) is not None


# What was measured: GB/s as ids come, and ordered.
@pytest.mark.parametrize(
    ("table_bytes", "log_n", "row_bytes", "as_they_come", "in_order"),
    [
        (8 * GiB, 19, 64, 2.6, 10.4),
        (8 * GiB, 19, 128, 5.0, 20.4),
        (8 * GiB, 19, 256, 9.1, 40),
        (8 * GiB, 19, 400, 13.5, 43.5),
        (8 * GiB, 19, 512, 16.9, 48),
        (8 * GiB, 19, 1024, 32, 49.5),
        (32 * GiB, 19, 64, 2.0, 3.2),
        (32 * GiB, 19, 128, 3.9, 6.8),
        (32 * GiB, 19, 256, 7.5, 12.8),
        (32 * GiB, 19, 400, 11.4, 25),
        (32 * GiB, 19, 512, 14.6, 33),
        (32 * GiB, 19, 1024, 28.8, 48),
        (32 * GiB, 17, 64, 2.0, 2.7),
        (32 * GiB, 17, 256, 7.5, 7.8),
        (32 * GiB, 17, 512, 14.6, 16.7),
        (32 * GiB, 17, 1024, 28.8, 33),
        (32 * GiB, 21, 64, 2.0, 10.9),
        (32 * GiB, 21, 512, 14.6, 50.7),
    ],
)
def test_ordered_where_it_was_measured_to_pay(
    table_bytes: int, log_n: int, row_bytes: int, as_they_come: float, in_order: float
) -> None:
    assert in_order > as_they_come
    assert ordered(table_bytes, row_bytes, 2**log_n)


@CURVES
@given(row_bytes=WIDTHS, log_n=st.integers(0, 32), table_bytes=st.integers(1, 256 * MiB))
def test_never_within_the_reach_of_address_translation(
    curve: Curve, row_bytes: int, log_n: int, table_bytes: int
) -> None:
    assert not ordered(table_bytes, row_bytes, 2**log_n, curve)


@CURVES
def test_of_few_ids_the_passes_would_cost_more(curve: Curve) -> None:
    for table_bytes in (8 * GiB, 32 * GiB):
        assert not ordered(table_bytes, 64, 1024, curve)


@CURVES
@given(table_bytes=SIZES, row_bytes=WIDTHS, ns=st.lists(st.integers(0, 2**33), min_size=2, max_size=5))
def test_more_ids_never_undo_it(curve: Curve, table_bytes: int, row_bytes: int, ns: list[int]) -> None:
    """Once it pays it pays for more too, up to what an int32 can count; and then more programs copy, never fewer."""
    plan = _order._ordering(table_bytes, row_bytes, curve)
    copiers = [plan.copiers(n) for n in sorted(n for n in ns if n < 2**31)]
    known = [count for count in copiers if count is not None]
    assert copiers == [None] * (len(copiers) - len(known)) + sorted(known)
    assert all(count >= 1 for count in known)
    assert plan.copiers(2**31) is None


@given(table_bytes=SIZES, row_bytes=WIDTHS)
def test_it_pays_where_the_sum_says_so(table_bytes: int, row_bytes: int) -> None:
    """The docstring's sum, where it is ordered first and a little before."""

    def gain(n: int) -> float:
        pages = table_bytes / 65536
        hit = pages * (1 - math.exp(-n / pages))
        in_order = max(hit * MEASURED.page, n * row_bytes * MEASURED.byte) + 40e-6 + n * 40e-12
        return n * MEASURED.row(table_bytes, row_bytes) / in_order

    pays = _order._ordering(table_bytes, row_bytes, MEASURED).pays
    if pays < 2**31:
        assert gain(pays) > 1.02
        assert pays < 1100 or gain(int(pays / 1.1)) < 1.04


@given(table_bytes=SIZES, row_bytes=WIDTHS)
def test_a_row_takes_no_less_time_than_its_bytes_over_the_link(table_bytes: int, row_bytes: int) -> None:
    for curve in (MEASURED, UNKNOWN):
        assert curve.row(table_bytes, row_bytes) >= row_bytes * curve.byte


def test_measured_figures_are_used_as_they_are() -> None:
    for read in h200().reads.random:
        seconds = MEASURED.row(read.table_bytes, read.row_bytes)
        assert seconds == pytest.approx(max(read.row_bytes / read.gbs / 1e9, read.row_bytes * MEASURED.byte))


@pytest.mark.parametrize(("table_bytes", "row_bytes"), [(0, 64), (8 * GiB, 0), (0, 0)])
def test_nothing_to_order(table_bytes: int, row_bytes: int) -> None:
    assert ordering(table_bytes, row_bytes).copiers(2**20) is None


def test_a_quick_probe_does_not_replace_what_is_known_of_the_model() -> None:
    """It measures no table past the reach, and would say that random rows are as fast as any."""
    machine = h200()
    quick = dataclasses.replace(
        machine.reads, random=(RandomRead(256 * MiB, 64, 41.0), RandomRead(256 * MiB, 256, 50.0))
    )
    assert _order._curve_of(dataclasses.replace(machine, reads=quick)) == MEASURED
    assert _order._curve_of(None) == UNKNOWN
