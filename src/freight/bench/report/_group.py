"""One group of a record as tables and plots see it: which axes vary, who the rivals are, what is stale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from freight.bench._record import Cell, Measured, Record, Rival, Scalar
from freight.bench.report import _show
from freight.errors import RecordError

Stale = Callable[[Cell, str], bool]  # whether a cell is older than the code that it measures in the benchmark


@dataclass(frozen=True)
class Axis:
    """An axis along which the cells of a group differ; numbers ascend, names keep the record's order."""

    name: str
    values: tuple[Scalar, ...]
    ids: bool = False  # stands for the cells' ids, where nothing else tells the cells apart

    @property
    def numeric(self) -> bool:
        """Whether every value is a number."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)

    @property
    def label(self) -> str:
        """The name for people."""
        return _show.axis_name(self.name)

    def show(self, value: Scalar) -> str:
        """One value for people."""
        return _show.axis_value(self.name, value)

    def show_in_full(self, value: Scalar) -> str:
        """One value for people where no heading says what it is: a bare number gets its axis's name."""
        speaks = isinstance(value, str) or (_show.is_bytes(self.name) and self.numeric)
        return self.show(value) if speaks else f"{self.label} {self.show(value)}"


@dataclass(frozen=True)
class Group:
    """Cells that are shown together. `axes` are those that vary; where they do not tell all cells apart, ids do."""

    record: Record
    name: str
    cells: tuple[Cell, ...]
    axes: tuple[Axis, ...]
    stale_ids: frozenset[str]

    @property
    def key(self) -> str:
        """What markers and files call it: `links/copy`."""
        return f"{self.record.benchmark}/{self.name}"

    @cached_property
    def rivals(self) -> tuple[str, ...]:
        """The names of all rivals, in the record's order."""
        return tuple(dict.fromkeys(rival.name for cell in self.cells for rival in cell.rivals))

    @cached_property
    def subject(self) -> str:
        """What freight's own part is called, if all cells agree."""
        names = {cell.subject.name for cell in self.cells}
        return names.pop() if len(names) == 1 else "freight"

    @cached_property
    def unit(self) -> str | None:
        """The unit, if all cells share it and the direction in which it is better."""
        units = {(cell.unit, cell.better) for cell in self.cells}
        return self.cells[0].unit if len(units) == 1 else None

    @property
    def direction(self) -> str:
        """`more is better` or `less is better`."""
        better = {cell.better for cell in self.cells}
        return {"higher": "more is better", "lower": "less is better"}[better.pop()] if len(better) == 1 else ""

    @cached_property
    def shared(self) -> str:
        """What all cells have in common, as `size 1 GiB, dtype bf16`."""
        varying = {axis.name for axis in self.axes}
        fixed = {name: value for name, value in self.cells[0].axes.items() if name not in varying}
        shown = (f"{_show.axis_name(name)} {_show.axis_value(name, value)}" for name, value in fixed.items())
        return ", ".join(shown)

    def place(self, cell: Cell) -> tuple[Scalar, ...]:
        """Where a cell stands on the varying axes."""
        return tuple(cell.id if axis.ids else cell.axes.get(axis.name) for axis in self.axes)

    def where(self, cell: Cell) -> str:
        """Where a cell stands, for people: `h2d · 1 GiB`; a number gets its axis's name."""
        parts = [axis.show_in_full(value) for axis, value in zip(self.axes, self.place(cell), strict=True)]
        return " · ".join(parts) or self.shared or cell.id

    def elsewhere(self, cell: Cell, axis: Axis) -> tuple[str, ...]:
        """Where a cell stands on every axis but one, for people."""
        places = zip(self.axes, self.place(cell), strict=True)
        return tuple(other.show_in_full(value) for other, value in places if other is not axis)

    def is_stale(self, cell: Cell) -> bool:
        """Whether the cell is older than the code it measures."""
        return cell.id in self.stale_ids


def _varying(cells: Sequence[Cell]) -> tuple[Axis, ...]:
    axes = []
    for name in dict.fromkeys(name for cell in cells for name in cell.axes):
        values = dict.fromkeys(cell.axes.get(name) for cell in cells)
        if len(values) > 1:
            axis = Axis(name, tuple(values))
            axes.append(Axis(name, tuple(sorted(values))) if axis.numeric else axis)  # type: ignore[type-var]
    return tuple(axes)


def groups(record: Record, stale: Stale) -> list[Group]:
    """All groups of a record, in its order."""
    found = []
    for name, cells in record.groups().items():
        axes = _varying(cells)
        places = {tuple(cell.axes.get(axis.name) for axis in axes) for cell in cells}
        if len(places) < len(cells):
            axes = (*axes, Axis("case", tuple(cell.id for cell in cells), ids=True))
        old = frozenset(cell.id for cell in cells if stale(cell, record.benchmark))
        group = Group(record, name, tuple(cells), axes, old)
        ordered = sorted(cells, key=lambda cell, group=group: _rank(group, cell))
        found.append(Group(record, name, tuple(ordered), axes, old))
    return found


def _rank(group: Group, cell: Cell) -> tuple[int, ...]:
    return tuple(axis.values.index(value) for axis, value in zip(group.axes, group.place(cell), strict=True))


def select(records: Sequence[Record], key: str, stale: Stale) -> list[Group]:
    """The groups that `key` names.

    It is `links/copy`, or `links` for all groups, or `links.h200/copy` where several GPUs have records.
    """
    benchmark, _, name = key.partition("/")
    matching = [r for r in records if benchmark in (r.benchmark, f"{r.benchmark}.{r.gpu}")]
    if not matching:
        known = ", ".join(sorted(f"{r.benchmark}.{r.gpu}" for r in records)) or "none"
        raise RecordError(f"there is no record {benchmark!r}; records read: {known}. Run `freight bench {benchmark}`.")
    if len(matching) > 1:
        choices = " or ".join(f"{r.benchmark}.{r.gpu}" for r in matching)
        raise RecordError(f"{benchmark!r} was recorded on several GPUs: name one of them, {choices}.")
    every = groups(matching[0], stale)
    found = [group for group in every if name in ("", group.name)]
    if not found:
        known = ", ".join(group.name for group in every) or "none"
        raise RecordError(f"record {benchmark!r} has no group {name!r}; it has: {known}.")
    return found


def ways(cell: Cell) -> list[tuple[str, Measured | None]]:
    """The ways that a cell compares, the subject first; None where one was absent."""
    return [(cell.subject.name, cell.subject), *((rival.name, rival.measured) for rival in cell.rivals)]


def measurements(cells: Sequence[Cell]) -> list[Measured]:
    """All that was measured in `cells`."""
    return [measured for cell in cells for _, measured in ways(cell) if measured]


def far_apart(cells: Sequence[Cell]) -> bool:
    """Whether the values of `cells` differ too much to be seen on one linear scale."""
    medians = [measured.median for measured in measurements(cells)]
    return min(medians) > 0 and max(medians) > _FAR * min(medians)


_FAR = 50


def verdict(rival: Rival) -> str:
    """`ahead`, `behind` or `level` for the subject, `absent` for the rival; the 95 % interval decides."""
    if rival.ratio_low is None or rival.ratio_high is None:
        return "absent"
    if rival.ratio_low > 1:
        return "ahead"
    return "behind" if rival.ratio_high < 1 else "level"
