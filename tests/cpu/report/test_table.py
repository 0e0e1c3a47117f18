"""Tables: which axes they have, what each verdict, footnote and condition says, and that Markdown stays a table."""

import dataclasses
import html
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown import markdown as mkdocs_markdown
from markdown_it import MarkdownIt

from freight.bench._record import Cell, Record
from freight.bench.report import _show
from freight.bench.report._group import groups, select
from freight.bench.report._table import Table, escape, markdown, table, tally
from freight.errors import RecordError

TAGS = {"table", "thead", "tbody", "tr", "th", "td", "p", "small", "sup", "br", "strong"}
GITHUB = MarkdownIt("commonmark").enable("table").render
MKDOCS = partial(mkdocs_markdown, extensions=["tables"])
RENDERERS = pytest.mark.parametrize("render", [GITHUB, MKDOCS], ids=["github", "mkdocs"])


def never_stale(cell: Cell, benchmark: str) -> bool:
    return False


def record(*cells: Cell, **changes: str) -> Record:
    return dataclasses.replace(Record("sums", "Sums", "h200", "NVIDIA H200", cells), **changes)


def shown(*cells: Cell, **changes: str) -> Table:
    [group] = groups(record(*cells, **changes), lambda cell, _: cell.code == "old")
    return table(group)


def grid(page: str) -> list[list[str]]:
    """The rows of the table on an HTML page, as text."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [[plain(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)] for row in rows]


def plain(cell: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", cell)).strip()


# ---- groups and axes -------------------------------------------------------------------------------


def test_axes_are_those_that_vary(make: SimpleNamespace) -> None:
    cells = [
        make.cell(f"{direction}/{size}", "g", {"direction": direction, "bytes": size, "dtype": "bf16"}, 1.0)
        for direction in ("to host", "to GPU")
        for size in (2**30, 2**20)
    ]
    [group] = groups(record(*cells), never_stale)
    assert [axis.name for axis in group.axes] == ["direction", "bytes"]
    assert group.shared == "dtype bf16"
    assert [row.place for row in table(group).rows] == [
        ("to host", "1 MiB"),  # numbers ascend, names keep the record's order
        ("to host", "1 GiB"),
        ("to GPU", "1 MiB"),
        ("to GPU", "1 GiB"),
    ]
    assert table(group).axes == ("direction", "size")


def test_cells_that_no_axis_tells_apart_are_told_apart_by_id(make: SimpleNamespace) -> None:
    result = shown(make.cell("one", "g", {"n": 1}, 1.0), make.cell("two", "g", {"n": 1}, 2.0))
    assert result.axes == ("case",)
    assert [row.place for row in result.rows] == [("one",), ("two",)]


def test_a_single_cell_is_called_by_what_it_is(make: SimpleNamespace) -> None:
    assert shown(make.cell("one", "g", {"bytes": 2**30}, 1.0)).rows[0].place == ("size 1 GiB",)
    assert shown(make.cell("one", "g", {}, 1.0)).rows[0].place == ("one",)


def test_an_axis_that_some_cells_lack(make: SimpleNamespace) -> None:
    result = shown(make.cell("a", "g", {"row_bytes": 64}, 1.0), make.cell("b", "g", {}, 1.0))
    assert [row.place for row in result.rows] == [("64 B",), ("–",)]


def test_unit_is_in_the_head_where_all_share_it(make: SimpleNamespace) -> None:
    cells = [make.cell(str(n), "g", {"n": n}, 1.5, unit=unit) for n, unit in ((1, "ms"), (2, "s"))]
    assert shown(cells[0]).subject == "freight arena (ms)"
    assert shown(cells[0]).rows[0].median == "1.50"
    assert shown(*cells).subject == "freight arena"
    assert [row.median for row in shown(*cells).rows] == ["1.50 ms", "1.50 s"]


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("sums/a", ["sums/a"]),
        ("sums", ["sums/a", "sums/b"]),
        ("sums.h200", ["sums/a", "sums/b"]),
        ("sums.h200/b", ["sums/b"]),
    ],
)
def test_select(key: str, found: list[str], make: SimpleNamespace) -> None:
    one = record(make.cell("1", "a", {}, 1.0), make.cell("2", "b", {}, 1.0))
    assert [group.key for group in select([one, record(benchmark="other")], key, never_stale)] == found


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("sum/a", r"no record 'sum'; records read: sums\.cpu, sums\.h200\. Run `freight bench sum`"),
        ("sums", r"'sums' was recorded on several GPUs: name one of them, sums\.h200 or sums\.cpu"),
        ("sums.h200/c", r"record 'sums\.h200' has no group 'c'; it has: a\."),
        ("", "there is no record ''"),
    ],
)
def test_select_what_is_not_there(key: str, message: str, make: SimpleNamespace) -> None:
    one = record(make.cell("1", "a", {}, 1.0))
    with pytest.raises(RecordError, match=message):
        select([one, dataclasses.replace(one, gpu="cpu")], key, never_stale)
    with pytest.raises(RecordError, match="records read: none"):
        select([], key, never_stale)


# ---- verdicts, footnotes, goals --------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "verdict"), [(1.02, "ahead"), (0.98, "behind"), (1.005, "level"), (0.995, "level")])
def test_the_interval_decides(ratio: float, verdict: str, make: SimpleNamespace) -> None:
    [versus] = shown(make.cell("a", "g", {}, 1.0, [make.rival("torch", 1.0, ratio, spread=0.01)])).rows[0].rivals
    assert versus is not None
    assert versus.verdict == verdict


def test_every_rival_has_its_column(make: SimpleNamespace) -> None:
    result = shown(
        make.cell("a", "g", {"n": 1}, 1.0, [make.rival("torch", 1.0, 2.0), make.absent("kvikio", "no module")]),
        make.cell("b", "g", {"n": 2}, 1.0, [make.absent("kvikio", "no module"), make.rival("raw", 1.0, 0.5)]),
    )
    assert result.rivals == ("torch", "kvikio", "raw")
    assert [result.ever_ran(index) for index in range(3)] == [True, False, True]
    verdicts = [[one.verdict if one else None for one in row.rivals] for row in result.rows]
    assert verdicts == [["ahead", "absent", None], [None, "absent", "behind"]]
    assert result.footnotes == ("kvikio was absent: no module",)
    assert result.rows[0].rivals[1].footnotes == result.rows[1].rivals[1].footnotes == (1,)  # type: ignore[union-attr]
    assert result.tally == "freight arena is ahead in 1 of 2 comparisons, behind in 1."


def test_remarks_and_notes_become_footnotes(make: SimpleNamespace) -> None:
    result = shown(
        make.cell("a", "g", {"n": 1}, 1.0, code="old", note="Warm."),
        make.cell("b", "g", {"n": 2}, 1.0, quick=True, code="old"),
        make.cell("c", "g", {"n": 3}, 1.0, note="Warm."),
    )
    assert [row.remarks for row in result.rows] == [("stale",), ("stale", "quick"), ()]
    assert [row.footnotes for row in result.rows] == [(1, 2), (1, 3), (2,)]
    assert result.footnotes[0] == "older than the code it measures; measure again with freight bench sums"
    assert result.footnotes[1:] == ("Warm", "a quick run: too few pairs to quote")


def test_goals(make: SimpleNamespace) -> None:
    targets = [
        make.target("against torch", 0.98, 0.991),
        make.target("against torch", 0.98, 0.975),
        make.target("against kvikio", 0.98, None),
        make.ceiling("freight arena, GB/s", 12.0, 11.5),
    ]
    result = shown(make.cell("a", "g", {}, 1.0, targets=targets))
    assert [(goal.asks, goal.reached, goal.state) for goal in result.rows[0].goals] == [
        ("≥ 0.980× against torch", "0.991×", "met"),
        ("≥ 0.980× against torch", "0.975×", "missed"),
        ("≥ 0.980× against kvikio", "–", "not judged"),
        ("≤ 12.0 GB/s", "11.5", "met"),
    ]


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ([], ""),
        (["absent"], ""),
        (["ahead"], "freight is ahead in 1 of 1 comparison."),
        (["behind", "behind"], "freight is behind in 2 of 2 comparisons."),
        (["level", "behind", "ahead"], "freight is ahead in 1 of 3 comparisons, level in 1, behind in 1."),
    ],
)
def test_tally_hides_no_loss(verdicts: list[str], text: str) -> None:
    assert tally(verdicts) == text


def test_conditions_say_all_commits_dates_and_versions(make: SimpleNamespace) -> None:
    cells = [
        make.cell("a", "g", {"n": 1}, 1.0, commit="1" * 40, date="2026-11-18T00:00:00+00:00"),
        make.cell("b", "g", {"n": 2}, 1.0, commit="2" * 40, date="2026-12-01T00:00:00+00:00", dirty=True),
        make.cell("c", "g", {"n": 3}, 1.0, commit="", versions={"torch": "2.13.0"}, checked=""),
    ]
    text = shown(*cells).conditions
    assert text.startswith("NVIDIA H200 · torch 2.11.0+cu130, 2.13.0 · triton 3.6.0 · 30 runs, interleaved")
    assert "checked: every byte, nothing" in text
    assert "commits 1111111, 2222222+, unknown (+: with uncommitted changes)" in text
    assert text.endswith("2026-11-18 to 2026-12-01")
    assert shown(cells[0], gpu_name="").conditions.startswith("no GPU · ")
    fewer = dataclasses.replace(cells[1], subject=dataclasses.replace(cells[1].subject, runs=3))
    assert "3 to 30 runs" in shown(cells[0], fewer).conditions


# ---- Markdown --------------------------------------------------------------------------------------


@RENDERERS
def test_markdown_is_the_table(render: Callable[[str], str], make: SimpleNamespace) -> None:
    rivals = [make.rival("torch copy_", 50.0, 1.1), make.absent("kvikio", "no module")]
    behind = [make.rival("torch copy_", 60.0, 0.917)]
    met, missed = (make.target("against torch copy_", 0.98, end) for end in (1.09, 0.9))
    cells = [
        make.cell("a", "g", {"bytes": 2**20}, 55.0, rivals, [met]),
        make.cell("b", "g", {"bytes": 2**30}, 55.0, behind, [missed], quick=True),
    ]
    [group] = groups(record(*cells), never_stale)
    page = render(markdown(group))
    asked = "≥ 0.980× against torch copy_"
    assert grid(page) == [
        ["size", "freight arena (GB/s)", "torch copy_", "ratio (95 %)", "kvikio", "target"],
        ["1 MiB", "55.0 (54.5–56.1)", "50.0", "1.10× (1.089–1.11)", "absent1", f"met: {asked} (1.090×)"],
        ["1 GiB, quick2", "55.0 (54.5–56.1)", "60.0", "0.917× (0.908–0.926) behind", "", f"missed: {asked} (0.900×)"],
    ]
    assert page.count("<br>") == 4, "each of these, and the conditions, on a line of its own"
    below = plain(page.partition("<small>")[2])
    assert below.splitlines()[:4] == [
        "More is better.",
        "freight arena is ahead in 1 of 2 comparisons, behind in 1.",
        "1 kvikio was absent: no module.",
        "2 a quick run: too few pairs to quote.",
    ]


@RENDERERS
def test_hostile_texts_stay_texts(render: Callable[[str], str], hostile: Record, make: SimpleNamespace) -> None:
    for group in groups(hostile, never_stale):
        text = markdown(group)
        page = render(text)
        assert set(re.findall(r"<(\w+)", page)) <= TAGS
        rows = grid(page)
        assert len(rows) == len(group.cells) + 1
        assert {len(row) for row in rows} == {len(rows[0])}
        assert "-->" not in text
        assert all(sign.isprintable() or sign == "\n" for sign in text)
    first = groups(hostile, never_stale)[0]
    assert grid(render(markdown(first)))[1][0].startswith(_show.plain(make.hostile))


@RENDERERS
@given(text=st.text() | st.text("\\`*_{}[]()<>#+-=.!|~$&;:/\"'@^% \n\tabc12"))
def test_escaped_text_is_shown_as_it_is(render: Callable[[str], str], text: str) -> None:
    """In a table's cell, and in a paragraph."""
    page = render(f"| a | b |\n| --- | --- |\n| x{escape(text)}x | y |\n\nx {escape(text)} x\n")
    assert grid(page)[1] == [f"x{_show.plain(text)}x", "y"]
    assert plain(page.partition("</table>")[2]) == f"x {_show.plain(text)} x"


@given(value=st.floats(1e-12, 1e12))
def test_numbers_keep_three_digits(value: float) -> None:
    text = _show.number(value)
    shown_value = float(text.replace(",", ""))
    assert shown_value == pytest.approx(value, rel=0.5e-2)
    assert len(text) <= 9
