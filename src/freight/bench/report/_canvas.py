"""Drawing on a page of fixed width with matplotlib's SVG writer, in the colours of the light theme.

Sizes are points, down from the top left corner. The drawing is recoloured as text: for the dark theme, or to the CSS
variables of a page, so that all of them are the same drawing.
"""

import html
import io
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from freight.bench.report._show import plain
from freight.errors import MissingError

# Each role in the light and in the dark theme. A colour of the light theme names its role, so they all differ.
# The series stay apart under the common kinds of colour blindness, and carry text on their background.
COLOURS = {
    "background": ("#ffffff", "#0d1117"),
    "ink": ("#1b1f24", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "rule": ("#d8dee4", "#30363d"),
    "subject": ("#0b64b0", "#58aef5"),
    "rival": ("#8c96a0", "#768390"),
    "warn": ("#b34000", "#f0883e"),
    "series1": ("#b84a00", "#f5924a"),
    "series2": ("#00785a", "#3fc89b"),
    "series3": ("#97467c", "#e39cc8"),
    "series4": ("#7c6200", "#d9b93b"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_MEASURED = "DejaVu Sans"  # comes with matplotlib; it is wide, so what fits in it fits in other fonts
_ELLIPSIS = "…"


@contextmanager
def settings(salt: str) -> Iterator[None]:
    """matplotlib's own defaults, whatever the user's are, and nothing in the SVG that varies from run to run."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingError(f"plots need matplotlib ({error}): pip install 'freight[plot]'.") from None
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # the reader's fonts will have it
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": _MEASURED})
        yield


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """The width of `text`."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    properties = FontProperties(family=_MEASURED, size=size, weight="bold" if bold else "normal")
    return text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0]


def fit(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """`text`, shortened at its end to `width`."""
    text = plain(text)
    if text_width(text, size, bold=bold) <= width:
        return text
    fitting = bisect_right(range(len(text)), width, key=lambda end: text_width(text[:end] + _ELLIPSIS, size, bold=bold))
    return text[: max(0, fitting - 1)].rstrip() + _ELLIPSIS


def wrap(text: str, width: float, size: float) -> list[str]:
    """`text` in lines of at most `width`."""
    lines = [""]
    for word in plain(text).split(" "):
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(fit(word, width, size))
        else:
            lines[-1] = fit(longer, width, size)
    return lines


TEXT, SMALL = 9.5, 8.5  # sizes of text; a phone shows them at some 11 and 10 pixels


class Canvas:
    """A page that grows downwards; used inside `settings`."""

    def __init__(self, width: float) -> None:
        from matplotlib.figure import Figure
        from matplotlib.transforms import Affine2D

        self.width = width
        self._figure = Figure(dpi=72)
        self._figure.patch.set_visible(False)
        self._down = Affine2D()  # set when the height is known

    def text(
        self, x: float, y: float, text: str, role: str, size: float, *, bold: bool = False, align: str = "left"
    ) -> None:
        """One line of text; `y` is its baseline."""
        from matplotlib.text import Text

        look: dict[str, Any] = {"color": COLOURS[role][0], "size": size, "weight": "bold" if bold else "normal"}
        shown = Text(x, y, plain(text), ha=align, va="baseline", parse_math=False, **look)
        self._add(shown)

    def rectangle(self, x: float, y: float, width: float, height: float, role: str) -> None:
        """A filled rectangle; `y` is its upper edge."""
        from matplotlib.patches import Rectangle

        self._add(Rectangle((x, y), width, height, facecolor=COLOURS[role][0], linewidth=0))

    def line(self, xs: Sequence[float], ys: Sequence[float], role: str, width: float = 1.0) -> None:
        """A line through points."""
        from matplotlib.lines import Line2D

        self._add(Line2D(xs, ys, color=COLOURS[role][0], linewidth=width, solid_joinstyle="round"))

    def point(self, x: float, y: float, marker: str, role: str, *, hollow: bool = False) -> None:
        """A marker, filled or hollow."""
        from matplotlib.lines import Line2D

        fill = COLOURS["background" if hollow else role][0]
        look = {"marker": marker, "markersize": 4.5, "markeredgewidth": 1.2}
        self._add(Line2D([x], [y], color=COLOURS[role][0], markerfacecolor=fill, linewidth=0, zorder=2.5, **look))

    def drawing(self, height: float) -> str:
        """Everything drawn, as the inside of an SVG element that is `width` wide and `height` high."""
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        self._down.scale(1, -1).translate(0, height)
        self._figure.set_size_inches(self.width / 72, height / 72)
        out = io.StringIO()
        FigureCanvasSVG(self._figure).print_svg(out)
        return _inside(out.getvalue())

    def _add(self, artist: Any) -> None:
        artist.set_transform(self._down)
        self._figure.add_artist(artist)


def _inside(svg: str) -> str:
    """What matplotlib drew, without its frame, names and fonts, which would clash where drawings share a page."""
    start, end = svg.index('<g id="figure_1">'), svg.rindex("</svg>")
    body = re.sub(r'<g id="[^"]*">', "<g>", svg[start:end])
    body = re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", body)
    body = re.sub(rf"""(style="[^"]*?)'{_MEASURED}'[^;"]*""", rf"\g<1>{FONT}", body)
    return re.sub(r"\s*\n\s*", "\n", body).strip()


def recoloured(drawing: str, theme: str) -> str:
    """`drawing` in the `light` or `dark` theme, or for a `page` that has the colours as CSS variables."""

    def colour(match: re.Match[str]) -> str:
        for role, (light, dark) in COLOURS.items():
            if match[0] == light:
                return {"light": light, "dark": dark, "page": f"var(--{role})"}[theme]
        return match[0]

    return re.sub(r'style="[^"]*"', lambda style: re.sub(r"#[0-9a-f]{6}\b", colour, style[0]), drawing)


def element(drawing: str, width: float, height: float, title: str, *, theme: str) -> str:
    """The SVG element around `drawing`: a file of its own in a theme, or a part of a page."""
    name = html.escape(plain(title))
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width * 4 / 3:g}" height="{height * 4 / 3:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {size} role="img"'
    parts = [f'{head} aria-label="{name}" stroke-linejoin="round">']
    if theme != "page":
        fill = COLOURS["background"][theme == "dark"]
        parts += [f"<title>{name}</title>", f'<rect width="100%" height="100%" rx="6" fill="{fill}"/>']
    return "\n".join([*parts, recoloured(drawing, theme), "</svg>", ""])
