"""A group as lines along a numeric axis: a panel for each place on the other axes, names at the lines' ends."""

import math
from dataclasses import dataclass
from itertools import cycle

from freight.bench._record import Cell, Measured
from freight.bench.report import _show
from freight.bench.report._canvas import COLOURS, SMALL, TEXT, Canvas, fit, text_width
from freight.bench.report._group import Axis, Group, far_apart, measurements, ways

_PANELS = 8  # a plot shows no more; the table has them all
_HEIGHT = 118.0  # of a panel without its headings
_SERIES = [role for role in COLOURS if role.startswith("series")]
_MARKERS = "sD^vP"

Look = tuple[str, str]  # the colour's role and the marker of a way
Series = dict[str, list[tuple[Cell, Measured]]]


def line_axis(group: Group) -> Axis | None:
    """The axis that lines can run along, bytes first: numbers, on average at least three in a panel; or None."""
    if group.unit is None or any(axis.ids for axis in group.axes):
        return None
    found = []
    for axis in group.axes:
        panels = {group.elsewhere(cell, axis) for cell in group.cells}
        if axis.numeric and len(group.cells) >= 3 * len(panels):
            found.append(axis)
    return max(found, key=lambda axis: (_show.is_bytes(axis.name), len(axis.values)), default=None)


def lines(canvas: Canvas, group: Group, along: Axis, y: float) -> float:
    """Draw `group` from `y` down; returns where the drawing ends."""
    panels: dict[tuple[str, ...], list[Cell]] = {}
    for cell in group.cells:
        panels.setdefault(group.elsewhere(cell, along), []).append(cell)
    looks = _looks(group)
    for place, cells in list(panels.items())[:_PANELS]:
        if place:
            canvas.text(6, y + 10, fit(" · ".join(place), canvas.width - 12, TEXT, bold=True), "ink", TEXT, bold=True)
            y += 15
        y = _panel(canvas, group, along, cells, looks, y)
    notes = []
    if any(cell.quick or group.is_stale(cell) for cell in group.cells):
        notes.append("hollow: stale or a quick run")
    if len(panels) > _PANELS:
        notes.append(f"and {len(panels) - _PANELS} more in the table")
    if notes:
        canvas.text(6, y + 8, ", ".join(notes), "warn", SMALL)
        y += 13
    return y


def _looks(group: Group) -> dict[str, Look]:
    """How each way is drawn, the same in all panels."""
    subjects = dict.fromkeys(cell.subject.name for cell in group.cells)
    rivals = zip(group.rivals, cycle(_SERIES), cycle(_MARKERS), strict=False)  # the cycles never end
    return {name: (role, marker) for name, role, marker in rivals} | dict.fromkeys(subjects, ("subject", "o"))


def _panel(canvas: Canvas, group: Group, along: Axis, cells: list[Cell], looks: dict[str, Look], y: float) -> float:
    series: Series = {}
    for cell in cells:
        for name, measured in ways(cell):
            if measured:
                series.setdefault(name, []).append((cell, measured))
    up, ticks = _upwards(cells, y + 6, y + _HEIGHT, log=far_apart(group.cells))
    labels = {name: fit(name, 0.36 * canvas.width, TEXT, bold=True) for name in series}
    left = 12 + max(text_width(_tick(tick), SMALL) for tick in ticks)
    right = canvas.width - 14 - max(text_width(label, TEXT, bold=True) for label in labels.values())
    for tick in ticks:
        canvas.line([left, right], [up(tick)] * 2, "rule", 0.7)
        canvas.text(left - 4, up(tick) + 2.5, _tick(tick), "muted", SMALL, align="right")
    across = _across(along, left + 6, right - 6)
    for name in reversed(series):  # the subject last, above the others
        _line(canvas, group, along, series[name], looks[name], across, up)
    ends = {name: up(points[-1][1].median) for name, points in series.items()}
    for name, at in _spread(ends, lowest=y + _HEIGHT).items():
        role = looks[name][0]
        canvas.text(right + 5, at + 3, labels[name], role, TEXT, bold=role == "subject")
    y = _tick_labels(canvas, along, across, right + 5, y + _HEIGHT + 11)
    absent = dict.fromkeys(name for cell in cells for name, measured in ways(cell) if measured is None)
    if absent:
        text = fit("absent: " + ", ".join(absent), canvas.width - left - 6, SMALL)
        canvas.text(left, y + 11, text, "muted", SMALL)
        y += 12
    return y + 8


def _line(
    canvas: Canvas,
    group: Group,
    along: Axis,
    points: list[tuple[Cell, Measured]],
    look: Look,
    across: "_Scale",
    up: "_Scale",
) -> None:
    role, marker = look
    xs = [across(cell.axes[along.name]) for cell, _ in points]  # type: ignore[arg-type]
    canvas.line(xs, [up(measured.median) for _, measured in points], role, 2.0 if role == "subject" else 1.4)
    for x, (cell, measured) in zip(xs, points, strict=True):
        canvas.line([x, x], [up(measured.low), up(measured.high)], role, 1.0)
        canvas.point(x, up(measured.median), marker, role, hollow=cell.quick or group.is_stale(cell))


# ---- scales and labels -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """Where values between `low` and `high` lie on the page, from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log2(low), math.log2(high), math.log2(max(value, self.low))
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def _across(along: Axis, start: float, end: float) -> _Scale:
    """Bytes, and counts that grow by factors, lie on a log2 axis."""
    low, high = float(along.values[0]), float(along.values[-1])  # type: ignore[arg-type]
    log = low > 0 and (_show.is_bytes(along.name) or high >= 8 * low)
    return _Scale(low, high, start, end, log)


def _upwards(cells: list[Cell], top: float, bottom: float, *, log: bool) -> tuple[_Scale, list[float]]:
    """The scale of the values and its ticks: from zero up, or in factors of ten."""
    from matplotlib.ticker import MaxNLocator

    found = measurements(cells)
    low, high = min(one.low for one in found), max(one.high for one in found)
    if log and low > 0:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        step = math.ceil((last - first) / 5)
        scale = _Scale(10.0**first, 10.0**last, bottom, top, log=True)
        return scale, [10.0**power for power in range(first, last + 1, step)]
    low, high = min(low, 0.0), max(high, 0.0)
    ticks = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return _Scale(float(ticks[0]), float(ticks[-1]), bottom, top, log=False), [float(tick) for tick in ticks]


def _tick(value: float) -> str:
    return f"{value:,g}" if 1e-4 <= abs(value) < 1e6 or value == 0 else f"{value:.0e}"


def _spread(ends: dict[str, float], *, lowest: float, gap: float = 11.5) -> dict[str, float]:
    """`ends` moved as little as keeps labels apart and above `lowest`."""
    order = sorted(ends, key=lambda name: ends[name])
    placed: dict[str, float] = {}
    last = -math.inf
    for name in order:
        last = placed[name] = max(ends[name], last + gap)
    limit = lowest
    for name in reversed(order):
        placed[name] = min(placed[name], limit)
        limit = placed[name] - gap
    return placed


def _tick_labels(canvas: Canvas, along: Axis, across: _Scale, x_label: float, y: float) -> float:
    """The values below the panel, as many as fit, and behind them what they are."""
    free = -math.inf
    for value in along.values:
        text, x = along.show(value), across(value)  # type: ignore[arg-type]
        half = text_width(text, SMALL) / 2
        if x - half > free:
            canvas.text(x, y, text, "muted", SMALL, align="center")
            free = x + half + 4
    canvas.text(max(x_label, free + 2), y, along.label, "muted", SMALL)
    return y
