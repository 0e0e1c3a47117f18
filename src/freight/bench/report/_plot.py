"""One group as a plot, drawn with matplotlib: bars, or lines where the group runs along a numeric axis.

The subject is blue, ticks show quartiles, and everything is named where it is drawn, so that a plot can be read
without a legend, on a phone, and without telling colours apart.
"""

import dataclasses
import hashlib
import math
from dataclasses import dataclass

from freight.bench._code import fingerprint
from freight.bench._record import dump
from freight.bench.report import _show
from freight.bench.report._bars import bars, own_scales
from freight.bench.report._canvas import SMALL, Canvas, element, fit, settings, wrap
from freight.bench.report._group import Group, far_apart
from freight.bench.report._lines import line_axis, lines

WIDTH = 330.0  # points, which are 440 pixels: narrow enough for text to keep its size on a phone
_DRAWN_BY = ("_bars", "_canvas", "_group", "_lines", "_plot", "_show")


@dataclass(frozen=True)
class Plot:
    """A drawing that is yet to be coloured."""

    group: Group
    drawing: str
    height: float

    def svg(self, theme: str) -> str:
        """The SVG: a file in the `light` or `dark` theme, or an element for a `page`."""
        text = element(self.drawing, WIDTH, self.height, describe(self.group), theme=theme)
        return text if theme == "page" else f"<!-- {digest(self.group)} -->\n{text}"


def plot(group: Group, *, alone: bool = True) -> Plot:
    """Draw `group`; with a title and the conditions where the plot is to stand alone."""
    with settings(salt=f"{group.record.gpu}/{group.key}"):  # the ids of markers differ where plots share a page
        canvas, inner, y = Canvas(WIDTH), WIDTH - 12, 11.0
        if alone:
            canvas.text(6, y + 2, fit(group.record.title, inner, 11, bold=True), "ink", 11, bold=True)
            y += 16
        along = line_axis(group)
        scale = "log scale" if along and far_apart(group.cells) else ""
        scale = "each case on its own scale" if not along and own_scales(group) else scale
        head = [group.name if alone else "", group.unit or "", group.direction, group.shared, scale]
        for line in wrap(" · ".join(part for part in head if part), inner, SMALL):
            canvas.text(6, y, line, "muted", SMALL)
            y += 11
        y = lines(canvas, group, along, y) if along else bars(canvas, group, y)
        if alone:
            for line in wrap(_show.conditions(group.record.gpu_name, group.cells), inner, SMALL):
                y += 10.5
                canvas.text(6, y, line, "muted", SMALL)
        height = math.ceil(y + 6)
        return Plot(group, canvas.drawing(height), height)


def describe(group: Group) -> str:
    """What a plot shows, for those who cannot see it; the table next to it has the numbers."""
    ways = ", ".join((group.subject, *group.rivals))
    return f"{group.record.title}, {group.name}: {ways}"


def digest(group: Group) -> str:
    """Names the data and the code that a plot was drawn from: a file that has it is up to date, whatever drew it.

    Drawing it again would not tell: another matplotlib draws the same plot a little differently.
    """
    data = dump(dataclasses.replace(group.record, cells=group.cells, machine={}))
    code = fingerprint(f"freight.bench.report.{name}" for name in _DRAWN_BY)
    facts = "\n".join([data, *sorted(group.stale_ids), code])
    return f"freight plot sha256:{hashlib.sha256(facts.encode()).hexdigest()[:32]}"
