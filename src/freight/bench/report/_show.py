"""Numbers, intervals and conditions as text, the same in tables, plots and the page."""

from collections.abc import Iterable, Sequence

from freight._units import show_bytes
from freight.bench._record import Cell, Measured, Rival, Scalar, Target


def plain(text: str) -> str:
    """`text` on one line, without characters that do not print: it may come from anywhere and go anywhere.

    >>> plain("two\\nlines \\x1b[31m")
    'two lines [31m'
    """
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def number(value: float) -> str:
    """`value` in three significant digits, whole above 1000.

    >>> number(55.4321), number(26852.4), number(0.00123), number(100)
    ('55.4', '26,852', '0.00123', '100')
    """
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):.{_decimals(value)}f}"
    return f"{value:.2e}"


def _decimals(value: float) -> int:
    exponent = int(f"{value:.2e}".partition("e")[2])
    return max(0, 2 - exponent)


def ratio(value: float) -> str:
    """A ratio; near 1, where targets lie, with a digit more.

    >>> ratio(0.9912), ratio(3.416), ratio(26.7)
    ('0.991×', '3.42×', '26.7×')
    """
    return f"{value:.3f}×" if 0.9 <= value < 1.1 else f"{number(value)}×"


def quartiles(measured: Measured) -> str:
    """The middle half of the runs, as `55.3–55.5`."""
    return f"{number(measured.low)}–{number(measured.high)}"


def interval(rival: Rival) -> str:
    """The 95 % interval of the ratio to `rival`, as `0.985–0.997`."""
    if rival.ratio_low is None or rival.ratio_high is None:
        return "–"
    return f"{ratio(rival.ratio_low)[:-1]}–{ratio(rival.ratio_high)[:-1]}"


def bound(target: Target) -> str:
    """What a target asks for, as `≥ 0.980×` or `≤ 12`."""
    sign, limit = ("≥", target.at_least) if target.at_least is not None else ("≤", target.at_most)
    return f"{sign} {amount(target, limit)}"


def reached(target: Target) -> str:
    """The end of the interval that a target is judged by, as `0.991×`."""
    return "–" if target.worse_end is None else amount(target, target.worse_end)


def amount(target: Target, value: float | None) -> str:
    """`value` in the notation of a target's kind."""
    if value is None:
        return "–"
    return ratio(value) if target.kind == "ratio" else number(value)


def is_bytes(axis: str) -> bool:
    """Whether an axis counts bytes, by its name: `bytes`, `row_bytes`, `block bytes`."""
    return axis.replace("_", " ").split()[-1:] == ["bytes"]


def axis_name(axis: str) -> str:
    """An axis's name for people; sizes carry their unit, so `row_bytes` is just `row`.

    >>> axis_name("row_bytes"), axis_name("bytes"), axis_name("edge_types")
    ('row', 'size', 'edge types')
    """
    words = axis.replace("_", " ").split()
    return (" ".join(words[:-1]) or "size") if is_bytes(axis) else " ".join(words)


def axis_value(axis: str, value: Scalar) -> str:
    """One value of an axis for people.

    >>> axis_value("bytes", 2**20), axis_value("threads", 8), axis_value("aligned", True), axis_value("layer", None)
    ('1 MiB', '8', 'yes', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return show_bytes(value) if is_bytes(axis) else f"{value:,g}" if abs(value) < 1e6 else f"{value:,}"


def listed(items: Iterable[str], most: int = 3) -> str:
    """Distinct items, first seen first; beyond `most` of them, how many more.

    >>> listed(["a", "b", "a", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    distinct = list(dict.fromkeys(items))
    if len(distinct) <= most:
        return ", ".join(distinct)
    return f"{', '.join(distinct[:most])} and {len(distinct) - most} more"


def span(values: Sequence[str]) -> str:
    """The first and last of `values`, as `a` or `a to b`."""
    first, last = min(values), max(values)
    return first if first == last else f"{first} to {last}"


def plural(count: int, one: str) -> str:
    """A count and its noun.

    >>> plural(1, "cell"), plural(12, "cell")
    ('1 cell', '12 cells')
    """
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def commit(cell: Cell) -> str:
    """A cell's commit, short; with a plus where uncommitted changes were on top of it."""
    return (cell.commit[:7] or "unknown") + ("+" if cell.dirty else "")


def conditions(gpu_name: str, cells: Sequence[Cell]) -> str:
    """One line that says what `cells` were measured on and with, when, and how often."""
    runs = [cell.subject.runs for cell in cells]
    pairs = f"{min(runs)} to {max(runs)} runs" if min(runs) != max(runs) else plural(runs[0], "run")
    names = dict.fromkeys(name for cell in cells for name in cell.versions)
    first = [name for name in ("torch", "triton") if name in names]
    versions = [f"{name} {listed(c.versions[name] for c in cells if name in c.versions)}" for name in first]
    parts = [
        gpu_name or "no GPU",
        *versions,
        f"{pairs}, interleaved: median (quartiles), ratio with its 95 % interval",
        "checked: " + listed(cell.checked or "nothing" for cell in cells),
        ("commits " if len({commit(cell) for cell in cells}) > 1 else "commit ") + listed(map(commit, cells)),
        span([cell.date[:10] for cell in cells]),
    ]
    if any(cell.dirty for cell in cells):
        parts[-2] += " (+: with uncommitted changes)"
    return " · ".join(part for part in parts if part)
