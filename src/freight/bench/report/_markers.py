"""Tables and plots in README and docs, put between markers and kept equal to the records.

    <!-- freight:table links/copy -->
    what stands here is replaced
    <!-- freight:end -->

`freight:plot` puts a plot there. A key is `<benchmark>/<group>`, `<benchmark>` for all its groups, or
`<benchmark>.<gpu>/<group>` where several GPUs have records. A marker stands alone on its line; fenced code is left
alone.
"""

import html
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from freight.bench import _registry
from freight.bench._code import checkout
from freight.bench._record import Record
from freight.bench.report import _show
from freight.bench.report._group import Group, select
from freight.bench.report._plot import describe, digest, plot
from freight.bench.report._table import escape, markdown
from freight.bench.report._write import write
from freight.errors import RecordError

_MARKER = re.compile(r"\s*<!--\s*freight:\s*(\S*)\s*(.*?)\s*-->\s*")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")  # behind backticks no more of them, or it is code in a line
_THEMES = ("light", "dark")

_Plan = dict[Path, Callable[[], str]]  # files to write, and how their text is made


def update(paths: Sequence[Path], records: Sequence[Record], *, plots: Path | None = None) -> list[Path]:
    """Bring the files `paths` up to date with `records`; returns the files that changed, plots among them.

    Plots are files in the folder `plots`, by default docs/assets/plots of the checkout. Where any of `paths` has a
    mistake, nothing is written.

    >>> update([], [])
    []
    """
    texts = {path: make() for path, make in _plan(paths, records, plots).items()}
    for path, text in texts.items():
        write(path, text)
    return list(texts)


def check(paths: Sequence[Path], records: Sequence[Record], *, plots: Path | None = None) -> list[Path]:
    """The files that `update` would change: none where all are up to date.

    >>> check([], [])
    []
    """
    return list(_plan(paths, records, plots))


def _plan(paths: Sequence[Path], records: Sequence[Record], plots: Path | None) -> _Plan:
    folder = plots if plots is not None else (checkout() or Path.cwd()) / "docs" / "assets" / "plots"
    planned: _Plan = {}
    for path in map(Path, paths):
        text = _read(path)
        page = _Page(path, records, folder)
        filled = page.filled(text)
        if filled != text:
            planned[path] = lambda filled=filled: filled
        for file, (group, theme) in page.plots.items():
            if not _is_current(file, group):
                planned[file] = lambda group=group, theme=theme: plot(group).svg(theme)
    return planned


@dataclass
class _Page:
    """One file with markers. `plots` are the plots that it shows, known once it is filled."""

    path: Path
    records: Sequence[Record]
    folder: Path
    plots: dict[Path, tuple[Group, str]] = field(default_factory=dict)

    def filled(self, text: str) -> str:
        """`text` with everything between markers made anew."""
        kept: list[str] = []
        opened: tuple[int, str] | None = None  # the line of the marker that waits for its end, and the text to put
        for number, line, marker in _lines(text):
            if opened is None:
                kept.append(line)
            if marker is None:
                continue
            kind, key = marker
            if kind == "end" and opened is None:
                self._fail(number, "`freight:end` has no marker before it; remove it")
            elif opened is not None and kind != "end":
                self._fail(opened[0], f"the marker is not closed before line {number}; add <!-- freight:end -->")
            elif opened is not None:
                ending = "\r\n" if line.endswith("\r") else "\n"
                kept += [opened[1].replace("\n", ending).removesuffix("\n"), line]
                opened = None
            elif kind in ("table", "plot"):
                opened = number, f"\n{self._generated(number, kind, key)}\n"
            else:
                self._fail(number, f"there is no marker `freight:{kind}`; there are table, plot and end")
        if opened is not None:
            self._fail(opened[0], "the marker is never closed; add <!-- freight:end -->")
        return "\n".join(kept)

    def _generated(self, number: int, kind: str, key: str) -> str:
        try:
            chosen = select(self.records, key, _registry.stale)
        except RecordError as error:
            self._fail(number, str(error))
        make = markdown if kind == "table" else self._picture
        if len(chosen) == 1:
            return make(chosen[0])
        return "\n".join(f"**{escape(group.name)}**\n\n{make(group)}" for group in chosen)

    def _picture(self, group: Group) -> str:
        links = {}
        for theme in _THEMES:
            file = self.folder / _file_name(group, theme)
            self.plots[file] = group, theme
            links[theme] = quote(Path(os.path.relpath(file, self.path.parent)).as_posix())
        return (
            f'<picture>\n<source media="(prefers-color-scheme: dark)" srcset="{links["dark"]}">\n'
            f'<img src="{links["light"]}" alt="{html.escape(_show.plain(describe(group)))}" width="440">\n</picture>\n'
        )

    def _fail(self, number: int, problem: str) -> NoReturn:
        raise RecordError(f"{self.path}, line {number}: {problem}")


def _lines(text: str) -> Iterator[tuple[int, str, tuple[str, str] | None]]:
    """The lines of a page with their numbers, and the kind and key of each marker outside of fenced code."""
    fence = ""
    for number, line in enumerate(text.split("\n"), 1):
        rail = _FENCE.match(line)
        if fence:
            if rail and rail[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif rail:
            fence = rail[1]
        marker = None if fence else _MARKER.fullmatch(line)
        yield number, line, (marker[1], marker[2]) if marker else None


def _file_name(group: Group, theme: str) -> str:
    parts = (group.record.benchmark, group.name, group.record.gpu)
    return ".".join([*(re.sub(r"[^\w-]+", "-", part) for part in parts), theme, "svg"])


def _is_current(file: Path, group: Group) -> bool:
    try:
        with file.open(encoding="utf-8") as lines:
            return digest(group) in lines.readline()
    except (OSError, UnicodeDecodeError):
        return False


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}.") from None
