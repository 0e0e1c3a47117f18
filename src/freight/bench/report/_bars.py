"""A group as bars: under the name of each case one bar for each way, its name on the left and its value at its end."""

from freight.bench._record import Cell, Measured
from freight.bench.report import _show
from freight.bench.report._canvas import SMALL, TEXT, Canvas, fit, text_width
from freight.bench.report._group import Group, far_apart, measurements, ways

_CASES = 16  # a plot shows no more; the table has them all
_BAR, _PITCH = 10.0, 14.5


def own_scales(group: Group) -> bool:
    """Whether each case needs a scale of its own, because units differ or values lie far apart."""
    return len(group.cells) > 1 and (group.unit is None or far_apart(group.cells))


def bars(canvas: Canvas, group: Group, y: float) -> float:
    """Draw `group` from `y` down; returns where the drawing ends."""
    cells = group.cells[:_CASES]
    alone = not group.rivals  # then each case is one bar with the case's own name
    names = [name for cell in cells for name in ([_in_one(group, cell)] if alone else dict(ways(cell)))]
    left = 18 + min(0.42 * canvas.width, max(text_width(_show.plain(name), TEXT) for name in names))
    widest = max(
        text_width(_value(group, cell, one), TEXT, bold=True) for cell in cells for one in measurements([cell])
    )
    room = canvas.width - 10 - widest - left
    for cell in cells:
        top = max(measured.high for measured in measurements([cell] if own_scales(group) else cells))
        scale = room / top if top > 0 else 0.0
        if not alone:
            canvas.text(6, y + 10, fit(group.where(cell), canvas.width - 80, TEXT, bold=True), "ink", TEXT, bold=True)
            canvas.text(canvas.width - 6, y + 10, _remark(group, cell), "warn", SMALL, align="right")
            y += 15
        for name, measured in ways(cell):
            subject = measured is cell.subject
            shown = _in_one(group, cell) if alone else name
            canvas.text(12, y + 9.5, fit(shown, left - 18, TEXT), "ink" if subject else "muted", TEXT)
            canvas.line([left, left], [y - 1, y + _PITCH - 1], "rule", 0.8)
            if measured is None:
                canvas.text(left + 5, y + 9.5, "absent", "muted", TEXT)
            else:
                end = _bar(canvas, left, y + 1, scale, "subject" if subject else "rival", measured)
                canvas.text(end + 4, y + 9.5, _value(group, cell, measured), "ink", TEXT, bold=subject)
            y += _PITCH
        y += 2 if alone else 7
    if len(cells) < len(group.cells):
        canvas.text(6, y + 8, f"and {len(group.cells) - len(cells)} more in the table", "muted", SMALL)
        y += 13
    return y


def _bar(canvas: Canvas, x: float, y: float, scale: float, role: str, measured: Measured) -> float:
    """A bar as long as the median, with a tick from quartile to quartile; returns where both have ended."""
    low, middle, high = (x + max(scale * value, 0) for value in (measured.low, measured.median, measured.high))
    canvas.rectangle(x, y, middle - x, _BAR, role)
    canvas.line([low, high], [y + _BAR / 2] * 2, "ink", 0.9)
    for end in (low, high):
        canvas.line([end, end], [y + 2.5, y + _BAR - 2.5], "ink", 0.9)
    return high


def _in_one(group: Group, cell: Cell) -> str:
    remark = _remark(group, cell)
    return group.where(cell) + (f" ({remark})" if remark else "")


def _remark(group: Group, cell: Cell) -> str:
    return ", ".join(text for text, holds in (("stale", group.is_stale(cell)), ("quick", cell.quick)) if holds)


def _value(group: Group, cell: Cell, measured: Measured) -> str:
    return _show.number(measured.median) + ("" if group.unit else f" {_show.plain(cell.unit)}")
