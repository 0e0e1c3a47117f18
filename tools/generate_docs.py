"""Write the parts of the pages that are taken from the code, between `<!-- generated:NAME -->` and its end.

python tools/generate_docs.py
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from freight._config import Config, variable
from freight._units import show_bytes

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- generated:(\w+) -->\n).*?(<!-- generated:end -->)", re.DOTALL)


def config_table() -> str:
    """Every setting once: name, variable, default, meaning."""
    lines = ["| `freight.config(...)` | variable | default | meaning |", "|---|---|---|---|"]
    for knob in dataclasses.fields(Config):
        default = shown(knob.name, knob.default)
        lines.append(f"| `{knob.name}` | `{variable(knob.name)}` | {default} | {knob.metadata['doc']} |")
    return "\n".join(lines) + "\n"


def shown(name: str, default: object) -> str:
    """A default as one would write it."""
    if default is None:
        return "unset"
    if isinstance(default, int) and name.endswith("_bytes"):
        return f"`{show_bytes(default).replace(' ', '')}`"
    return f"`{str(default).lower()}`"


PARTS: dict[str, Callable[[], str]] = {"config": config_table}


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
