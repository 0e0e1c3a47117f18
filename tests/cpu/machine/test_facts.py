"""Facts go to JSON and back unchanged, and what is derived from them is what was measured on an H200."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight._units import GiB, KiB, MiB
from freight.machine import (
    Compute,
    Disk,
    DiskRate,
    Gpu,
    Host,
    Link,
    Machine,
    RandomRead,
    Reads,
    Software,
)
from freight.machine._facts import short
from freight.machine._known import shipped

# useful GB/s of random rows, by bytes a row, read in place by an H200
MEASURED = {
    256 * MiB: {64: 41.0, 128: 49.0, 256: 50.0, 512: 50.0, 1024: 50.0, 4096: 50.0},
    1 * GiB: {64: 7.0, 128: 14.0, 256: 29.0, 512: 50.0, 1024: 50.0, 4096: 50.0},
    8 * GiB: {64: 2.6, 128: 5.0, 256: 9.1, 512: 16.9, 1024: 32.0, 4096: 50.0},
}


def reads(tables: dict[int, dict[int, float]]) -> Reads:
    return Reads(
        random=tuple(RandomRead(table, row, gbs) for table, rows in tables.items() for row, gbs in rows.items())
    )


def at_256(*rates: tuple[int, float]) -> Reads:
    return reads({table: {256: gbs} for table, gbs in rates})


# ---- JSON -------------------------------------------------------------------------------------------


def facts_of(kind: type) -> st.SearchStrategy:
    """Any facts that JSON can carry: whatever the types allow, numbers finite and not negative."""
    plain = {
        int: st.integers(0, 2**63 - 1),
        float: st.floats(0, allow_nan=False, allow_infinity=False),
        str: st.text(st.characters(), max_size=8),  # lone surrogates too: that is how odd file names are read
        bool: st.booleans(),
    }
    values = {name: value_of(hint, plain) for name, hint in hints_of(kind).items()}
    return st.builds(kind, **values)


def hints_of(kind: type) -> dict[str, object]:
    return {field.name: field.type for field in dataclasses.fields(kind)}


def value_of(hint: object, plain: dict[type, st.SearchStrategy]) -> st.SearchStrategy:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return facts_of(hint)
    arguments = getattr(hint, "__args__", ())
    if type(None) in arguments:
        return st.none() | value_of(arguments[0], plain)
    if arguments:  # tuple[item, ...]
        return st.lists(value_of(arguments[0], plain), max_size=2).map(tuple)
    return plain[hint]  # type: ignore[index]


@given(machine=facts_of(Machine))
def test_json_and_back(machine: Machine) -> None:
    assert Machine.from_json(machine.json()) == machine


def test_json_of_a_full_set_of_facts(h200: Machine) -> None:
    """Nothing is left at its default here, so no field can be lost and go unnoticed."""
    text = h200.json()
    assert Machine.from_json(text) == h200
    assert text.isascii()  # for terminals and bug trackers of any kind
    assert '"h2d_gbs": 55.5' in text


def test_facts_are_frozen(h200: Machine) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        h200.link.h2d_gbs = 1.0  # type: ignore[misc]
    assert hash(h200) == hash(Machine.from_json(h200.json()))


# ---- what is derived ----------------------------------------------------------------------------------


def test_reach_and_look_ups_of_an_h200() -> None:
    """Past about 1 GiB, 40 to 47 million distinct pages a second are the limit."""
    found = reads(MEASURED)
    assert found.reach_bytes == 256 * MiB
    assert found.pages_per_second == pytest.approx(2.6e9 / 64)
    assert 40e6 <= (found.pages_per_second or 0) <= 47e6


def test_shipped_defaults_are_what_was_measured() -> None:
    defaults = shipped("h200")
    assert defaults is not None
    assert {(read.table_bytes, read.row_bytes): read.gbs for read in defaults.reads.random} == {
        (table, row): gbs for table, rows in MEASURED.items() for row, gbs in rows.items()
    }
    assert (defaults.link.h2d_gbs, defaults.link.d2h_gbs, defaults.link.both_gbs) == (55.5, 55.3, 101.0)
    assert defaults.reads.sequential_gbs == 51.3
    assert (defaults.disk.write_gbs, defaults.disk.read_gbs) == (4.4, 4.2)
    assert defaults.compute.hbm_gbs == 4300
    assert defaults.complete


@pytest.mark.parametrize(
    ("found", "reach"),
    [
        (Reads(), None),
        (reads({1 * GiB: {64: 7.0}}), None),  # no rows of 256 bytes
        (at_256((64 * MiB, 50.0)), 64 * MiB),
        (at_256((64 * MiB, 50.0), (1 * GiB, 40.0)), 1 * GiB),  # 80 % is enough
        (at_256((64 * MiB, 50.0), (1 * GiB, 39.9)), 64 * MiB),
        (at_256((8 * GiB, 9.1), (64 * MiB, 50.0), (1 * GiB, 45.0)), 1 * GiB),  # in any order
        (at_256((64 * MiB, 50.0), (1 * GiB, 30.0), (8 * GiB, 50.0)), 64 * MiB),  # a gap ends the reach
        (at_256((64 * MiB, 10.0), (1 * GiB, 50.0)), 1 * GiB),
    ],
)
def test_reach(found: Reads, reach: int | None) -> None:
    assert found.reach_bytes == reach


@pytest.mark.parametrize(
    ("found", "pages"),
    [
        (Reads(), None),
        (at_256((64 * MiB, 50.0), (8 * GiB, 45.0)), None),  # within reach: no limit was seen
        (at_256((64 * MiB, 50.0), (8 * GiB, 8.0)), 8e9 / 256),
        (
            reads({MiB: {256: 50.0}, GiB: {64: 3.2, 256: 10.24, 64 * KiB: 6553.6}}),
            50e6,
        ),  # a page at a time says nothing
        (reads({MiB: {256: 50.0}, GiB: {256: 2.56}, 8 * GiB: {64 * KiB: 50.0}}), None),
    ],
)
def test_page_look_ups(found: Reads, pages: float | None) -> None:
    assert found.pages_per_second == (None if pages is None else pytest.approx(pages))


def test_best_disk_rates() -> None:
    disk = Disk(rates=(DiskRate(1, MiB, 2.4, 4.2), DiskRate(8, MiB, 4.4, 2.7)))
    assert (disk.write_gbs, disk.read_gbs) == (4.4, 4.2)
    assert (Disk().write_gbs, Disk().read_gbs) == (None, None)


@pytest.mark.parametrize(
    ("change", "complete"),
    [
        ({}, True),
        ({"disk": Disk(absent="it is full")}, True),
        ({"link": Link(absent="no")}, False),
        ({"reads": Reads(absent="no")}, False),
        ({"compute": Compute(absent="no")}, False),
        ({"host": Host(absent="no")}, False),
        ({"gpu": Gpu("none"), "link": Link("none"), "reads": Reads("none"), "compute": Compute("none")}, True),
        ({"gpu": Gpu("none"), "link": Link("none"), "host": Host(absent="no")}, False),
    ],
)
def test_complete(h200: Machine, change: dict, complete: bool) -> None:
    assert dataclasses.replace(h200, **change).complete == complete


@pytest.mark.parametrize(("value", "told"), [(55.4821, 55.48), (4312.7, 4313.0), (0.000123456, 0.0001235), (0.0, 0.0)])
def test_short(value: float, told: float) -> None:
    assert short(value) == told


def test_defaults_say_nothing() -> None:
    machine = Machine(Software("3.11.7", "2.13.0"))
    assert machine.source == "measured"
    for part in (machine.gpu, machine.link, machine.reads, machine.compute, machine.host, machine.disk):
        assert not any(getattr(part, field.name) for field in dataclasses.fields(part))
