"""All records as one HTML page that needs nothing else: no script, no font, no request.

Texts from records may say anything; each is escaped where it enters the page, and the page's own policy forbids
whatever would come from elsewhere.
"""

import html
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from freight.bench import _registry, report
from freight.bench._record import Cell, Record
from freight.bench.report import _canvas, _show
from freight.bench.report._group import Group, Stale, groups, verdict
from freight.bench.report._plot import plot
from freight.bench.report._table import Goal, Row, Table, Versus, goal_state, table, tally
from freight.errors import MissingError

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_BESIDE = 4  # a table with more columns than these and the subject's goes below its plot, not beside it
_RAISED = ("#f6f8fa", "#151b23")  # the background of boxes and table heads, light and dark


def page(records: Sequence[Record], problems: Sequence[str] = (), *, stale: Stale = _registry.stale) -> str:
    """The page of `records`; `problems` say what could not be shown.

    >>> "<h1>What freight measured</h1>" in page([])
    True
    """
    shown = [(record, f"r{index}", groups(record, stale)) for index, record in enumerate(records, 1)]
    try:
        sections = [_benchmark(record, anchor, found, plots=True) for record, anchor, found in shown]
    except MissingError as error:
        problems = [*problems, f"The page has no plots: {error}"]
        sections = [_benchmark(record, anchor, found, plots=False) for record, anchor, found in shown]
    parts = [
        "<header>",
        "<h1>What freight measured</h1>",
        '<p class="muted">Every number was measured, none was typed. A ratio is how many times better freight did than '
        "a rival in the same run: above 1 it was ahead.</p>",
        *(f'<div class="problem" role="alert"><strong>Problem</strong><p>{_text(one)}</p></div>' for one in problems),
        _summary(records, [group for _, _, found in shown for group in found]),
        _contents(shown),
        "</header>",
        "<main>",
        *sections,
        "</main>",
        '<footer class="muted small"><p>The bars and points are medians, the ticks on them quartiles. A comparison is '
        "level where the 95 % interval of its ratio includes 1; a target is met where the worse end of the interval "
        "meets it. Made by <code>freight report</code>.</p></footer>",
    ]
    return _document("What freight measured", "\n".join(part for part in parts if part))


def _document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title)}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _style() -> str:
    colours = {**_canvas.COLOURS, "raised": _RAISED}
    light, dark = ("".join(f"--{role}: {pair[theme]}; " for role, pair in colours.items()) for theme in (0, 1))
    sheet = resources.files(report).joinpath("page.css").read_text(encoding="utf-8")
    return (
        f":root {{ color-scheme: light dark; --font: {_canvas.FONT}; {light}}}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n\n{sheet}"
    )


# ---- the summary -----------------------------------------------------------------------------------


def _summary(records: Sequence[Record], found: Sequence[Group]) -> str:
    cells = [cell for group in found for cell in group.cells]
    goals = [goal_state(target) for cell in cells for target in cell.targets]
    stale = sum(len(group.stale_ids) for group in found)
    quick = sum(cell.quick for cell in cells)
    machines = list(dict.fromkeys(record.gpu_name or "no GPU" for record in records))
    verdicts = [verdict(rival) for cell in cells for rival in cell.rivals]
    facts = [
        (
            "Cells",
            str(len(cells)),
            _show.plural(quick, "quick run") if quick else f"in {_show.plural(len(found), 'group')}",
        ),
        ("Targets met", f"{goals.count('met')} of {len(goals)}", _targets(goals)),
        ("Stale", str(stale), "older than the code they measure" if stale else "all measure today's code"),
        (
            _show.plural(len(machines), "machine").partition(" ")[2].capitalize(),
            str(len(machines)),
            ", ".join(machines),
        ),
    ]
    boxes = (f"<div><dt>{name}</dt><dd>{value}<small>{_text(note)}</small></dd></div>" for name, value, note in facts)
    return "\n".join(['<dl class="facts">', *boxes, "</dl>", _balance(verdicts)])


def _targets(goals: Sequence[str]) -> str:
    parts = [f"{goals.count(state)} {state}" for state in ("missed", "not judged") if state in goals]
    return ", ".join(parts) or ("none missed" if goals else "none set")


def _balance(verdicts: Sequence[str]) -> str:
    """How all comparisons came out, as a sentence under a bar."""
    counts = {word: verdicts.count(word) for word in ("ahead", "level", "behind")}
    bars = "".join(f'<span class="{word}" style="flex: {count}"></span>' for word, count in counts.items() if count)
    absent = verdicts.count("absent")
    without = f" {absent} more could not be made, for the rival was absent." if absent else ""
    if not bars:
        return ""
    return (
        f'<div class="balance" aria-hidden="true">{bars}</div>\n<p class="muted small">{tally(verdicts)}{without}</p>'
    )


def _contents(shown: Sequence[tuple[Record, str, list[Group]]]) -> str:
    links = [
        f'<li><a href="#{anchor}-{index}">{_text(group.key)}{" · " + _text(record.gpu) if record.gpu else ""}</a></li>'
        for record, anchor, found in shown
        for index, group in enumerate(found, 1)
    ]
    return "\n".join(['<nav aria-label="Contents"><ul>', *links, "</ul></nav>"]) if links else ""


# ---- benchmarks and groups -------------------------------------------------------------------------


def _benchmark(record: Record, anchor: str, found: list[Group], *, plots: bool) -> str:
    where = f"on {record.gpu_name}" if record.gpu_name else "without a GPU"
    parts = [
        f'<section class="benchmark" id="{anchor}" aria-labelledby="{anchor}-title">',
        f'<h2 id="{anchor}-title">{_text(record.title)}</h2>',
        f'<p class="muted"><code>{_text(record.benchmark)}</code> {_text(where)}</p>',
        _facts("The machine", record.machine),
        *(_group(group, f"{anchor}-{index}", plots=plots) for index, group in enumerate(found, 1)),
        "" if found else "<p>The record has no cells.</p>",
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _group(group: Group, anchor: str, *, plots: bool) -> str:
    shown = table(group)
    beside = len(shown.axes) + len(shown.rivals) + shown.has_goals <= _BESIDE
    about = ", ".join(part for part in (group.unit, group.direction, group.shared) if part)
    notes = "".join(f"<li>{_text(note)}.</li>" for note in shown.footnotes)
    parts = [
        f'<section class="group{" beside" if beside else ""}" id="{anchor}" aria-labelledby="{anchor}-title">',
        f'<h3 id="{anchor}-title">{_text(group.name)}</h3>',
        f"<figure>{plot(group, alone=False).svg('page')}</figure>" if plots else f"<p>{_text(about)}</p>",
        _scrolled(f"Table of {group.key}", _table(shown)),
        '<div class="below small muted">',
        f'<p class="tally">{_text(shown.tally)}</p>' if shown.tally else "",
        f'<ol class="notes">{notes}</ol>' if notes else "",
        f"<p>{_text(shown.conditions)}</p>",
        "</div>",
        _cells(group),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _table(shown: Table) -> str:
    heads = [*shown.axes, shown.subject, *shown.rivals, *(["target"] if shown.has_goals else [])]
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in heads)
    rows = "\n".join(_row(row, shown) for row in shown.rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _row(row: Row, shown: Table) -> str:
    *others, last = row.place
    marks = _marks(row.footnotes)
    flags = "".join(f'<small class="remark">{remark}</small>' for remark in row.remarks)
    cells = [f'<th scope="row" title="{_text(text)}">{_text(text)}</th>' for text in others]
    cells.append(f'<th scope="row" title="{_text(last)}">{_text(last)}{marks}{flags}</th>')
    cells.append(f'<td class="number"><b>{_text(row.median)}</b><small>{row.quartiles}</small></td>')
    cells += [_versus(one) for one in row.rivals]
    if shown.has_goals:
        cells.append(f'<td class="wrap">{"".join(map(_goal, row.goals))}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _versus(one: Versus | None) -> str:
    if one is None:
        return "<td></td>"
    if one.verdict == "absent":
        return f'<td class="muted">absent{_marks(one.footnotes)}</td>'
    sign = {"ahead": "▲", "level": "●", "behind": "▼"}[one.verdict]
    return (
        f'<td class="number">{one.median}<small class="{one.verdict}">'
        f"{sign} {one.ratio} {one.verdict}</small><small>{one.interval}</small></td>"
    )


def _goal(goal: Goal) -> str:
    sign = {"met": "✓", "missed": "✗", "not judged": "–"}[goal.state]
    look = "missed" if goal.state == "missed" else ""
    return (
        f'<div class="{look}">{sign} {goal.state}<small>{_text(goal.asks)}</small>'
        f"{'' if goal.state == 'not judged' else f'<small>worse end {goal.reached}</small>'}</div>"
    )


def _marks(footnotes: Sequence[int]) -> str:
    return f"<sup>{','.join(map(str, footnotes))}</sup>" if footnotes else ""


# ---- what is folded away ---------------------------------------------------------------------------


def _cells(group: Group) -> str:
    """Of each cell, where it comes from and what else it tells."""
    rows = ["".join(f'<td class="wrap">{_text(text)}</td>' for text in _origin(cell)) for cell in group.cells]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    heads = ("cell", "commit", "date", "runs", "checked", "versions", "more")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return _folded("Each cell's commit, date and conditions", table)


def _origin(cell: Cell) -> tuple[str, ...]:
    versions = ", ".join(f"{name} {version}" for name, version in cell.versions.items())
    more = ", ".join(f"{name.replace('_', ' ')} {_show.axis_value(name, value)}" for name, value in cell.extra.items())
    return cell.id, _show.commit(cell), cell.date[:16], str(cell.subject.runs), cell.checked, versions, more


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    named = ((name.replace("_", " "), value) for name, value in _flat(facts))
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in named)
    return _folded(title, f"<table><tbody>{rows}</tbody></table>") if rows else ""


def _flat(value: object, name: str = "") -> list[tuple[str, str]]:
    """Nested facts as names and texts."""
    if isinstance(value, Mapping):
        return [fact for key, inner in value.items() for fact in _flat(inner, f"{name} {key}".strip())]
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        return [fact for index, item in enumerate(value, 1) for fact in _flat(item, f"{name} {index}")]
    if isinstance(value, list):
        return [(name, ", ".join(str(item) for item in value))]
    return [(name, _show.axis_value(name, value) if isinstance(value, str | int | float | None) else str(value))]


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{_scrolled(title, content)}</details>"


def _scrolled(name: str, content: str) -> str:
    """A table in a box of its own, in which it scrolls sideways where the screen is narrow."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(name)}">{content}</div>'


def _text(text: str) -> str:
    """Any text as HTML, in an element or an attribute."""
    return html.escape(_show.plain(text))
