"""Plots by what is in them: lengths and heights that are the numbers, names, themes, and nothing beyond the edge."""

import dataclasses
import itertools
import re
import sys
import warnings
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from freight.bench import _registry
from freight.bench._record import Cell, Measured, Record
from freight.bench.report import _canvas
from freight.bench.report._canvas import COLOURS, fit, settings, text_width, wrap
from freight.bench.report._group import Group, groups
from freight.bench.report._plot import WIDTH, plot
from freight.errors import MissingError

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"


def group_of(record: Record, name: str) -> Group:
    return next(group for group in groups(record, _registry.stale) if group.name == name)


def one_group(*cells: Cell) -> Group:
    [group] = groups(Record("links", "Links", "h200", "NVIDIA H200", cells), lambda cell, _: cell.code == "old")
    return group


def drawn(group: Group, theme: str = "page") -> ET.Element:
    return ET.fromstring(plot(group).svg(theme))


def texts(svg: ET.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


def colour(element: ET.Element, what: str) -> str:
    found = re.search(rf"(?:^|[ ;]){what}: ([^;]+)", element.get("style", ""))
    return found[1] if found else ""


def bars(svg: ET.Element, role: str) -> list[float]:
    """The lengths of the bars in a colour, from above."""
    paths = [path for path in svg.iter(f"{SVG}path") if colour(path, "fill") == f"var(--{role})"]
    return [max(xs) - min(xs) for xs in (points(path)[0] for path in paths)]


def points(path: ET.Element) -> tuple[list[float], list[float]]:
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", path.get("d", ""))]
    return numbers[::2], numbers[1::2]


def line(svg: ET.Element, role: str) -> tuple[list[float], list[float]]:
    """The line of a way: the path in its colour that has the most points."""
    paths = [path for path in svg.iter(f"{SVG}path") if path.get("id") is None]
    own = [points(path) for path in paths if colour(path, "stroke") == f"var(--{role})"]
    return max(own, key=lambda found: len(found[0]))


# ---- bars ------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_the_medians(links: Record) -> None:
    svg = drawn(group_of(links, "pinning"))
    subject, rival = bars(svg, "subject"), bars(svg, "rival")
    scale = subject[0] / 5.1
    assert subject == pytest.approx([scale * median for median in (5.1, 8.6, 12.4)])
    assert rival == pytest.approx([scale * 9.8] * 3)
    assert max(subject) > 0.5 * WIDTH


def test_bars_are_named_where_they_are_drawn(links: Record) -> None:
    found = texts(drawn(group_of(links, "pinning")))
    assert found[0] == "Host and GPU"
    assert found[1] == "pinning · s · less is better · size 32 GiB"
    assert {"fresh", "caller's own", "huge pages", "stale", "quick"} <= set(found)
    assert found.count("freight arena") == found.count("Tensor.pin_memory") == 3
    assert {"5.10", "8.60", "12.4", "9.80"} <= set(found)


def test_ticks_are_quartiles(make: SimpleNamespace) -> None:
    wide = Measured("freight", 2.0, 1.0, 4.0, 3, (1.0, 2.0, 4.0))
    svg = drawn(one_group(dataclasses.replace(make.cell("a", "g", {}, 1.0), subject=wide)))
    [bar] = [path for path in svg.iter(f"{SVG}path") if colour(path, "fill") == "var(--subject)"]
    ticks = [points(path)[0] for path in svg.iter(f"{SVG}path") if colour(path, "stroke") == "var(--ink)"]
    start, length = min(points(bar)[0]), max(points(bar)[0]) - min(points(bar)[0])
    ends = sorted({round(x, 2) for xs in ticks for x in xs})
    assert ends == pytest.approx([start + length / 2, start + 2 * length], abs=0.02)
    [value] = [text for text in svg.iter(f"{SVG}text") if text.text == "2.00"]
    assert float(value.get("x", "")) > ends[1], "behind the tick, not upon it"


def test_absent_rivals_are_named_so(make: SimpleNamespace) -> None:
    svg = drawn(one_group(make.cell("a", "g", {}, 1.0, [make.absent("kvikio", "no module")])))
    assert {"kvikio", "absent"} <= set(texts(svg))
    assert len(bars(svg, "rival")) == 0


def test_values_far_apart_get_scales_of_their_own(make: SimpleNamespace) -> None:
    cells = [make.cell(str(n), "g", {"kind": str(n)}, n, [make.rival("torch", n / 2, 2.0)]) for n in (1.0, 1000.0)]
    svg = drawn(one_group(*cells))
    one, other = bars(svg, "subject")
    assert one == pytest.approx(other)
    assert "g · GB/s · more is better · each case on its own scale" in texts(svg)
    together = drawn(one_group(cells[0], dataclasses.replace(cells[1], subject=cells[0].subject, rivals=())))
    assert not any("own scale" in text for text in texts(together))


def test_cases_without_rivals_are_one_bar_each_and_keep_their_remark(make: SimpleNamespace) -> None:
    cold = make.cell("b", "g", {"kind": "cold"}, 2.0, quick=True, code="old")
    cells = [make.cell("a", "g", {"kind": "warm"}, 1.0), cold]
    found = texts(drawn(one_group(*cells)))
    assert {"warm", "cold (stale, quick)"} <= set(found)
    assert "freight arena" not in found


def test_many_cases_end_in_the_table(hostile: Record) -> None:
    svg = drawn(group_of(hostile, "many"))
    assert "and 8 more in the table" in texts(svg)
    assert len(bars(svg, "subject")) == 16


# ---- lines -----------------------------------------------------------------------------------------


def test_lines_run_along_bytes(links: Record) -> None:
    svg = drawn(group_of(links, "copy"))
    found = texts(svg)
    assert [found.count(name) for name in ("host to GPU", "GPU to host", "size", "absent: kvikio")] == [1, 1, 2, 2]
    assert [found.count(name) for name in ("freight arena", "torch copy_, pinned")] == [2, 2]
    xs, ys = line(svg, "subject")
    steps = [after - before for before, after in itertools.pairwise(xs)]
    assert len(xs) == 6
    assert steps == pytest.approx([steps[0]] * 5), "sizes grow by factors: the axis is logarithmic"
    assert ys == sorted(ys, reverse=True), "more is higher up"


def test_heights_are_the_medians(links: Record) -> None:
    cells = links.cells[:6]
    svg = drawn(one_group(*cells))
    ticks = {text.text: float(text.get("y", "")) - 2.5 for text in svg.iter(f"{SVG}text") if text.text in ("0", "60")}
    per_unit = (ticks["0"] - ticks["60"]) / 60
    _, ys = line(svg, "subject")
    assert ys == pytest.approx([ticks["0"] - per_unit * cell.subject.median for cell in cells], abs=0.01)


def test_lines_begin_at_zero(make: SimpleNamespace) -> None:
    """Cut off below, a small difference would look like a large one."""
    svg = drawn(one_group(*(make.cell(str(n), "g", {"n": n}, 50.0 + n) for n in (1, 2, 3))))
    assert "0" in texts(svg)


def test_values_far_apart_get_a_log_scale(make: SimpleNamespace) -> None:
    cells = [make.cell(str(n), "g", {"n": n}, 10.0**n) for n in (1, 2, 3, 4)]
    svg = drawn(one_group(*cells))
    assert "g · GB/s · more is better · log scale" in texts(svg)
    assert {"10", "100", "1,000", "10,000"} <= set(texts(svg))
    _, ys = line(svg, "subject")
    steps = [after - before for before, after in itertools.pairwise(ys)]
    assert steps == pytest.approx([steps[0]] * 3)
    ticks = {text.text: float(text.get("y", "")) - 2.5 for text in svg.iter(f"{SVG}text")}
    assert ys == pytest.approx([ticks["10"], ticks["100"], ticks["1,000"], ticks["10,000"]], abs=0.01)


def test_a_panel_of_one_power_of_ten(make: SimpleNamespace) -> None:
    ten, thousand = (Measured("freight", value, value, value, 1, (value,)) for value in (10.0, 1000.0))
    cells = [
        dataclasses.replace(make.cell(f"{kind}{n}", "g", {"kind": kind, "n": n}, 1.0), subject=subject)
        for kind, subject in (("a", ten), ("b", thousand))
        for n in (1, 2, 3)
    ]
    assert {"10", "100", "1,000", "10,000"} <= set(texts(drawn(one_group(*cells))))


@pytest.mark.parametrize("axes", [[{"n": n} for n in (1, 2)], [{"k": str(n)} for n in range(5)], [{}] * 5])
def test_bars_where_no_line_can_run(axes: list[dict], make: SimpleNamespace) -> None:
    svg = drawn(one_group(*(make.cell(str(i), "g", each, 1.0) for i, each in enumerate(axes))))
    assert len(bars(svg, "subject")) == len(axes)


def test_stale_and_quick_points_are_hollow(make: SimpleNamespace) -> None:
    cells = [make.cell(str(n), "g", {"n": n}, 1.0, quick=n == 2, code="old" if n == 3 else "") for n in (1, 2, 3, 4)]
    svg = drawn(one_group(*cells))
    marks = [use for use in svg.iter(f"{SVG}use") if colour(use, "stroke") == "var(--subject)"]
    fills = {colour(use, "fill") for use in marks}
    assert "hollow: stale or a quick run" in texts(svg)
    assert len(marks) == 4
    assert [colour(use, "fill") for use in marks].count("var(--background)") == 2, fills


@pytest.mark.parametrize("level", [50.0, 1.0], ids=["high", "low"])
def test_labels_at_the_ends_do_not_touch(level: float, make: SimpleNamespace) -> None:
    rivals = [make.rival(f"rival {n}", level + 0.1 * n, 1.0) for n in range(6)]
    svg = drawn(one_group(*(make.cell(str(n), "g", {"n": n}, 50.0, rivals) for n in (1, 2, 3))))
    names = {"freight arena", *(f"rival {n}" for n in range(6))}
    heights = sorted(float(text.get("y", "")) for text in svg.iter(f"{SVG}text") if text.text in names)
    assert len(heights) == 7
    assert min(after - before for before, after in itertools.pairwise(heights)) >= _canvas.TEXT
    [below] = [float(text.get("y", "")) for text in svg.iter(f"{SVG}text") if text.text == "n"]
    assert heights[-1] < below, "above what stands below the panel"


def test_labels_below_do_not_touch(make: SimpleNamespace) -> None:
    rivals = [make.rival("a name that takes a third of the width, and is cut off", 50.0, 1.0)]
    svg = drawn(one_group(*(make.cell(str(n), "g", {"row_bytes": 1000 + n}, 50.0, rivals) for n in range(40))))
    below = [text for text in svg.iter(f"{SVG}text") if (text.text or "").endswith(" B")]
    assert 2 <= len(below) <= 8
    with settings(""):
        half = max(text_width(text.text or "", _canvas.SMALL) for text in below) / 2
    centres = [float(text.get("x", "")) for text in below]
    assert min(after - before for before, after in itertools.pairwise(centres)) > 2 * half
    assert any(text.startswith("a name that") and text.endswith("…") for text in texts(svg))
    xs, _ = line(svg, "subject")
    assert xs == sorted(xs)
    assert xs[-1] - xs[0] > WIDTH / 3


def test_many_panels_end_in_the_table(make: SimpleNamespace) -> None:
    cells = [make.cell(f"{k}/{n}", "g", {"kind": str(k), "n": n}, 1.0) for k in range(10) for n in (1, 2, 3)]
    svg = drawn(one_group(*cells))
    assert "and 2 more in the table" in texts(svg)
    assert texts(svg).count("n") == 8


def test_zero_and_equal_values_can_be_drawn(make: SimpleNamespace) -> None:
    for median in (0.0, 1e-30, 5.0, 1e30):
        lines = one_group(*(make.cell(str(n), "g", {"n": n}, median) for n in (1, 2, 3)))
        alone = one_group(make.cell("a", "g", {}, median))
        for group in (lines, alone):
            assert "nan" not in plot(group).svg("page")


# ---- themes, edges, texts --------------------------------------------------------------------------


def test_themes_are_one_drawing_in_other_colours(links: Record) -> None:
    group = group_of(links, "copy")
    light, dark, page = (plot(group).svg(theme) for theme in ("light", "dark", "page"))
    used = {role for role, (colour, _) in COLOURS.items() if colour in light}
    assert {"background", "ink", "muted", "rule", "subject", "series1"} <= used
    for role in used:
        assert COLOURS[role][1] in dark
        assert COLOURS[role][0] not in dark
        assert not (set(re.findall(r"#[0-9a-f]{6}", page)))
        assert role == "background" or f"var(--{role})" in page
    assert re.sub(r"#[0-9a-f]{6}", "", light) == re.sub(r"#[0-9a-f]{6}", "", dark)


def test_every_colour_names_its_role() -> None:
    light = [pair[0] for pair in COLOURS.values()]
    assert len(set(light)) == len(light)


@pytest.mark.parametrize("role", ["ink", "muted", "subject", "warn", "series1", "series2", "series3", "series4"])
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_told_from_its_background(role: str, theme: int) -> None:
    """The contrast that WCAG asks of small text."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dim, bright = sorted(luminance(COLOURS[name][theme]) for name in (role, "background"))
    assert (bright + 0.05) / (dim + 0.05) >= 4.5


def test_nothing_is_beyond_the_edge(gallery: list[Record]) -> None:
    for group in (group for record in gallery for group in groups(record, _registry.stale)):
        svg = drawn(group)
        _, _, width, height = map(float, svg.get("viewBox", "").split())
        assert width == WIDTH
        for text in svg.iter(f"{SVG}text"):
            size = float(re.sub("px", "", colour(text, "font-size")))
            with settings(""):
                wide = text_width(text.text or "", size, bold=colour(text, "font-weight") == "700")
            x, y = float(text.get("x", "")), float(text.get("y", ""))
            left = {"start": x, "middle": x - wide / 2, "end": x - wide}[colour(text, "text-anchor") or "start"]
            assert left >= 0, (group.key, text.text)
            assert left + wide <= width, (group.key, text.text)
            assert size <= y <= height, (group.key, text.text)
        for path in svg.iter(f"{SVG}path"):
            if path.get("id") is None:  # those with an id are markers, drawn elsewhere
                xs, ys = points(path)
                assert min(xs) >= 0, group.key
                assert max(xs) <= width, group.key
                assert max(ys) <= height, group.key


def test_hostile_texts_are_texts(hostile: Record) -> None:
    for group in groups(hostile, _registry.stale):
        for theme in ("light", "page"):
            svg = drawn(group, theme)
            assert {element.tag.removeprefix(SVG) for element in svg.iter()} <= {
                *("svg", "title", "rect", "g", "path", "text", "use", "defs", "clipPath"),
            }
    assert any(text.startswith('<script>alert("x")') for text in texts(drawn(groups(hostile, _registry.stale)[0])))


def test_a_plot_says_what_it_is(links: Record) -> None:
    group = group_of(links, "pinning")
    what = "Host and GPU, pinning: freight arena, Tensor.pin_memory"
    for theme in ("light", "page"):
        assert drawn(group, theme).get("aria-label") == what
        assert drawn(group, theme).get("role") == "img"
    assert drawn(group, "light").findtext(f"{SVG}title") == what


def test_a_plot_on_a_page_leaves_out_what_the_page_says(links: Record) -> None:
    group = group_of(links, "pinning")
    alone, beside = (texts(ET.fromstring(plot(group, alone=alone).svg("page"))) for alone in (True, False))
    assert "Host and GPU" in alone
    assert any("interleaved" in text for text in alone)
    assert "Host and GPU" not in beside
    assert not any("interleaved" in text for text in beside)
    assert beside[0] == "s · less is better · size 32 GiB"


def test_the_same_data_give_the_same_file(links: Record) -> None:
    import matplotlib

    group = group_of(links, "copy")
    first = plot(group).svg("light")
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red", "lines.marker": "x"}):
        assert plot(group).svg("light") == first
        assert matplotlib.rcParams["font.size"] == 30
    assert not re.search(r"\d{4}-\d\d-\d\dT", first), "no time of day"


def test_plots_on_a_page_share_no_ids(links: Record) -> None:
    other = dataclasses.replace(links, gpu="a100")
    drawings = [drawn(group_of(record, "copy")) for record in (links, other)]
    ids = [[element.get("id") for element in svg.iter() if element.get("id")] for svg in drawings]
    assert ids[0]
    assert not set(ids[0]) & set(ids[1])
    for svg, known in zip(drawings, ids, strict=True):
        assert {use.get(f"{XLINK}href", "")[1:] for use in svg.iter(f"{SVG}use")} <= set(known)


def test_signs_that_the_font_lacks_are_no_warning(hostile: Record) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "数据 😀" in " ".join(texts(drawn(group_of(hostile, "数据 😀"))))


def test_without_matplotlib(links: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingError, match=r"plots need matplotlib \(.*\): pip install 'freight\[plot\]'\."):
        plot(group_of(links, "copy"))


def test_fit_and_wrap_keep_to_the_width() -> None:
    with settings(""):
        assert fit("short", 100, 8) == "short"
        for width in (5, 20, 60):
            shortened = fit("a long name that is cut", width, 8, bold=True)
            assert shortened.endswith("…")
            assert text_width(shortened, 8, bold=True) <= max(width, text_width("…", 8, bold=True))
        longest = fit("iiiiiiiiiiiiiiiiiiii", 30, 8)
        assert text_width("i" + longest, 8) > 30, "no more is cut than must be"
        lines = wrap("many words " * 20 + "and-one-that-is-far-longer-than-any-line-can-be", 100, 8)
        assert all(text_width(line, 8) <= 100 for line in lines)
        assert " ".join(lines).startswith("many words " * 20)
