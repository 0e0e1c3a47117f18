"""One group as rows of texts, which the page lays out, and as a Markdown table for README and docs."""

from collections.abc import Sequence
from dataclasses import dataclass

from freight.bench._record import Cell, Rival, Target
from freight.bench.report import _show
from freight.bench.report._group import Group, verdict


@dataclass(frozen=True)
class Versus:
    """The subject against one rival. Of an absent rival there is no more than the footnote with its reason."""

    verdict: str
    median: str = ""
    ratio: str = ""
    interval: str = ""
    footnotes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Goal:
    """A target: what it asks for, what was reached, and whether that is `met`, `missed` or `not judged`."""

    asks: str
    reached: str
    state: str


@dataclass(frozen=True)
class Row:
    """One cell. `rivals` has None where the cell was never compared with that rival."""

    cell: Cell
    place: tuple[str, ...]
    median: str
    quartiles: str
    rivals: tuple[Versus | None, ...]
    goals: tuple[Goal, ...]
    remarks: tuple[str, ...]  # `stale`, `quick`
    footnotes: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """A group as texts; footnotes count from 1."""

    group: Group
    axes: tuple[str, ...]
    subject: str
    rivals: tuple[str, ...]
    rows: tuple[Row, ...]
    footnotes: tuple[str, ...]
    tally: str
    conditions: str

    def ever_ran(self, rival: int) -> bool:
        """Whether the rival of that column was measured in any row."""
        return any(one is not None and one.verdict != "absent" for one in (row.rivals[rival] for row in self.rows))

    @property
    def has_goals(self) -> bool:
        """Whether any row has a target."""
        return any(row.goals for row in self.rows)


def table(group: Group) -> Table:
    """The table of a group."""
    footnotes: list[str] = []
    rows = tuple(_row(group, cell, footnotes) for cell in group.cells)
    return Table(
        group=group,
        axes=tuple(axis.label for axis in group.axes) or ("case",),
        subject=group.subject + (f" ({group.unit})" if group.unit else ""),
        rivals=group.rivals,
        rows=rows,
        footnotes=tuple(footnotes),
        tally=tally([one.verdict for row in rows for one in row.rivals if one], group.subject),
        conditions=_show.conditions(group.record.gpu_name, group.cells),
    )


def tally(verdicts: Sequence[str], subject: str = "freight") -> str:
    """How the comparisons came out; empty where there was none.

    >>> tally(["ahead", "behind", "ahead", "absent"])
    'freight is ahead in 2 of 3 comparisons, behind in 1.'
    """
    counts = {word: verdicts.count(word) for word in ("ahead", "level", "behind")}
    total = sum(counts.values())
    if total == 0:
        return ""
    (first, count), *others = [(word, count) for word, count in counts.items() if count]
    rest = "".join(f", {word} in {number}" for word, number in others)
    return f"{subject} is {first} in {count} of {_show.plural(total, 'comparison')}{rest}."


def goal_state(target: Target) -> str:
    """`met`, `missed`, or `not judged` where the rival was absent."""
    if target.worse_end is None:
        return "not judged"
    return "met" if target.met else "missed"


def _row(group: Group, cell: Cell, footnotes: list[str]) -> Row:
    stale = group.is_stale(cell)
    marks = []
    if stale:
        again = f"freight bench {group.record.benchmark}"
        marks.append(_footnote(footnotes, f"older than the code it measures; measure again with {again}"))
    if cell.quick:
        marks.append(_footnote(footnotes, "a quick run: too few pairs to quote"))
    if cell.note:
        marks.append(_footnote(footnotes, cell.note.rstrip(". ")))
    by_name = {rival.name: rival for rival in cell.rivals}
    return Row(
        cell=cell,
        place=tuple(axis.show(value) for axis, value in zip(group.axes, group.place(cell), strict=True))
        or (group.where(cell),),
        median=_show.number(cell.subject.median) + ("" if group.unit else f" {cell.unit}"),
        quartiles=_show.quartiles(cell.subject),
        rivals=tuple(_versus(by_name[name], footnotes) if name in by_name else None for name in group.rivals),
        goals=tuple(_goal(cell, target) for target in cell.targets),
        remarks=tuple(word for word, holds in (("stale", stale), ("quick", cell.quick)) if holds),
        footnotes=tuple(marks),
    )


def _versus(rival: Rival, footnotes: list[str]) -> Versus:
    if rival.measured is None or rival.ratio is None:
        return Versus("absent", footnotes=(_footnote(footnotes, f"{rival.name} was absent: {rival.absent}"),))
    return Versus(verdict(rival), _show.number(rival.measured.median), _show.ratio(rival.ratio), _show.interval(rival))


def _goal(cell: Cell, target: Target) -> Goal:
    """A bound on the subject's own value needs no more words than the unit, for its column is there."""
    asks = f"{_show.bound(target)} {target.what if target.kind == 'ratio' else cell.unit}"
    return Goal(asks, _show.reached(target), goal_state(target))


def _footnote(footnotes: list[str], text: str) -> int:
    """The number of footnote `text`, which is added where it is new."""
    if text not in footnotes:
        footnotes.append(text)
    return footnotes.index(text) + 1


# ---- Markdown --------------------------------------------------------------------------------------


def markdown(group: Group) -> str:
    """The table as Markdown that GitHub and MkDocs show alike, footnotes and conditions below it."""
    shown = table(group)
    heads = [*map(escape, shown.axes), escape(shown.subject)]
    aligns = [*("---" for _ in shown.axes), "---:"]
    for index, name in enumerate(shown.rivals):
        ratio = shown.ever_ran(index)
        heads += [escape(name), "ratio (95 %)"] if ratio else [escape(name)]
        aligns += ["---:", "---"] if ratio else ["---"]
    if shown.has_goals:
        heads.append("target")
        aligns.append("---")
    lines = [heads, aligns, *(_cells(row, shown) for row in shown.rows)]
    below = [escape(text) for text in (_about(group), shown.tally) if text]
    below += [f"{_marks((number,))} {escape(text)}." for number, text in enumerate(shown.footnotes, 1)]
    below.append(escape(shown.conditions))
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n<small>" + "<br>\n".join(below) + "</small>\n"


def _about(group: Group) -> str:
    """The axes that do not vary and the direction, as one sentence."""
    shared = group.shared if group.axes else ""  # without axes, it is what the row is called
    about = ", ".join(part for part in (shared, group.direction) if part)
    return about[:1].upper() + about[1:] + "." if about else ""


def _cells(row: Row, shown: Table) -> list[str]:
    *places, last = map(escape, row.place)
    last += "".join(f", **{remark}**" for remark in row.remarks) + _marks(row.footnotes)
    cells = [*places, last, f"{escape(row.median)} ({row.quartiles})"]
    for index, versus in enumerate(row.rivals):
        if versus is None:
            both = ["", ""]
        elif versus.verdict == "absent":
            both = ["absent" + _marks(versus.footnotes), ""]
        else:
            word = {"ahead": "", "level": " level", "behind": " **behind**"}[versus.verdict]
            both = [versus.median, f"{versus.ratio} ({versus.interval}){word}"]
        cells += both if shown.ever_ran(index) else both[:1]
    if shown.has_goals:
        words = {"met": "met", "missed": "**missed**", "not judged": "not judged"}
        cells.append("<br>".join(f"{words[g.state]}: {escape(g.asks)} ({g.reached})" for g in row.goals))
    return cells


def _marks(footnotes: Sequence[int]) -> str:
    return f"<sup>{','.join(map(str, footnotes))}</sup>" if footnotes else ""


_ENTITIES = {ord(sign): f"&#{ord(sign)};" for sign in "<>|~$"} | {ord("&"): "&amp;"}
_ESCAPES = {ord(sign): f"\\{sign}" for sign in "\\`*_[]"}


def escape(text: str) -> str:
    """`text` for Markdown, in a table or out of it: nothing in it is markup, a marker or a line break.

    >>> escape("copy_ <b>|*x*")
    'copy\\\\_ &#60;b&#62;&#124;\\\\*x\\\\*'
    """
    return _show.plain(text).translate(_ENTITIES | _ESCAPES)
