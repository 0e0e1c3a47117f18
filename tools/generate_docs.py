"""Write the parts of the pages that are taken from the code, between `<!-- generated:NAME -->` and its end.

python tools/generate_docs.py
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from freight._config import Config, variable
from freight._units import show_bytes
from freight.bench._record import Cell, load

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- generated:(\w+) -->\n).*?(<!-- generated:end -->)", re.DOTALL)


def config_table() -> str:
    """Every setting once: name, variable, default, meaning."""
    lines = ["| `freight.config(...)` | variable | default | meaning |", "|---|---|---|---|"]
    for knob in dataclasses.fields(Config):
        default = shown(knob.name, knob.default)
        lines.append(f"| `{knob.name}` | `{variable(knob.name)}` | {default} | {knob.metadata['doc']} |")
    return "\n".join(lines) + "\n"


def transfer_table() -> str:
    """What the ways through the CPU cost beside freight's, by row width; from the record on the H200."""
    cells = load(ROOT / "benchmarks" / "results" / "gather.h200.json").groups()["cpu"]
    cells = sorted(cells, key=lambda cell: int(str(cell.axes["row_bytes"])))
    ways = [cells[0].subject.name, *(rival.name for rival in cells[0].rivals)]
    priced = [cell for cell in cells if f"{ways[0]}, joules a GB" in cell.extra]
    lines = ["| way | mean transfer time | CPU seconds a GB | GPU joules a GB |", "|---|---|---|---|"]
    for way in ways:
        shares = [seconds(cell, ways[0]) / seconds(cell, way) - 1 for cell in cells]
        time = "" if way == ways[0] else f"freight takes {mean(shares):+.0%}"
        spent = [f"{mean(amounts(priced, way, what)):.3g}" for what in ("CPU seconds a GB", "joules a GB")]
        lines.append(f"| {way} | {time} | {spent[0]} | {spent[1]} |")
    least, most = (f"{cells[at].axes['row_bytes']}" for at in (0, -1))
    widths = ", ".join(f"{cell.axes['row_bytes']}" for cell in priced)
    note = f"Means over rows of {least} to {most} bytes, of CPU seconds and joules over {widths}; random ids, 8 GiB."
    return "\n".join(lines) + f"\n\n{note}\n"


def seconds(cell: Cell, way: str) -> float:
    """What a way takes for the same rows, up to a factor that all share."""
    measured = {rival.name: rival.measured for rival in cell.rivals} | {cell.subject.name: cell.subject}
    found = measured[way]
    assert found is not None
    return 1 / found.median


def amounts(cells: list[Cell], way: str, what: str) -> list[float]:
    """One of the costs that the cells note beside time."""
    return [float(str(cell.extra[f"{way}, {what}"])) for cell in cells]


def shown(name: str, default: object) -> str:
    """A default as one would write it."""
    if default is None:
        return "unset"
    if isinstance(default, int) and name.endswith("_bytes"):
        return f"`{show_bytes(default).replace(' ', '')}`"
    return f"`{str(default).lower()}`"


PARTS: dict[str, Callable[[], str]] = {"config": config_table, "transfer": transfer_table}


def fill(page: str) -> str:
    """`page` with every generated part as it is now."""
    return PLACE.sub(lambda place: place[1] + PARTS[place[2]]() + place[3], page)


def pages() -> list[Path]:
    """The pages that have such parts."""
    return [page for page in sorted(ROOT.glob("docs/**/*.md")) if PLACE.search(page.read_text())]


if __name__ == "__main__":
    for page in pages():
        page.write_text(fill(page.read_text()))
        print(page.relative_to(ROOT))
