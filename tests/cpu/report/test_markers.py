"""Tables and plots between markers: what is written, what is left alone, and what is refused with its line."""

import dataclasses
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from freight.bench._record import Record
from freight.bench.report import _markers
from freight.bench.report._markers import check, update
from freight.errors import DiskError, MissingError, RecordError

TABLE = "# Title\n\n<!-- freight:table links/copy -->\nold\n<!-- freight:end -->\n\nrest\n"
PLOT = "before\n<!-- freight:plot links/copy -->\n<!-- freight:end -->\nafter"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "docs" / "page.md"
    path.parent.mkdir()
    path.write_text(TABLE)
    return path


@pytest.fixture
def plots(tmp_path: Path) -> Path:
    return tmp_path / "docs" / "my plots"


# ---- update and check ------------------------------------------------------------------------------


def test_update_puts_the_table_there(page: Path, links: Record) -> None:
    assert update([page], [links]) == [page]
    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- freight:table links/copy -->\n\n| direction |")
    assert text.endswith("</small>\n\n<!-- freight:end -->\n\nrest\n")
    assert "old" not in text
    assert text.count("\n| host to GPU |") == 6


def test_check_tells_and_writes_nothing(page: Path, links: Record, plots: Path) -> None:
    assert check([page], [links]) == [page]
    assert page.read_text() == TABLE
    update([page], [links])
    before = page.stat().st_mtime_ns
    assert check([page], [links]) == update([page], [links]) == []
    assert page.stat().st_mtime_ns == before
    slower = dataclasses.replace(links.cells[0].subject, median=27.4)
    newer = (dataclasses.replace(links.cells[0], subject=slower), *links.cells[1:])
    assert check([page], [dataclasses.replace(links, cells=newer)]) == [page]


def test_page_without_markers_is_left_alone(page: Path) -> None:
    page.write_bytes(b"no markers\r\n\n")
    assert update([page], []) == []
    assert page.read_bytes() == b"no markers\r\n\n"


def test_all_groups_of_a_benchmark(page: Path, links: Record) -> None:
    page.write_text("<!-- freight:table links.h200 -->\n<!-- freight:end -->")
    update([page], [links])
    assert re.findall(r"^\*\*(.*)\*\*$", page.read_text(), re.MULTILINE) == ["copy", "both directions", "pinning"]


def test_stale_and_quick_cells_are_told(page: Path, links: Record) -> None:
    page.write_text("<!-- freight:table links/pinning -->\n<!-- freight:end -->")
    update([page], [links])
    assert "| caller's own, **stale**<sup>1</sup> |" in page.read_text()
    assert "| huge pages, **quick**<sup>2</sup> |" in page.read_text()


@pytest.mark.parametrize("marker", ["<!--freight:table links/copy-->", "  <!--  freight: table   links/copy  -->  "])
def test_markers_may_be_spaced_otherwise(marker: str, page: Path, links: Record) -> None:
    page.write_text(f"{marker}\n<!--freight:end-->\n")
    update([page], [links])
    assert "| direction |" in page.read_text()
    assert page.read_text().startswith(marker + "\n")


def test_several_markers_on_several_pages(tmp_path: Path, links: Record, plots: Path) -> None:
    first, second = tmp_path / "a.md", tmp_path / "b.md"
    first.write_text(TABLE + TABLE)
    second.write_text("nothing\n")
    assert update([first, second], [links]) == [first]
    assert first.read_text().count("| direction |") == 2


def test_line_ends_are_kept(page: Path, links: Record) -> None:
    page.write_bytes(TABLE.replace("\n", "\r\n").encode())
    update([page], [links])
    data = page.read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n") > 15
    assert b"\r\r" not in data
    assert data.endswith(b"rest\r\n")
    assert check([page], [links]) == []


def test_link_and_mode_are_kept(page: Path, tmp_path: Path, links: Record) -> None:
    page.chmod(0o640)
    link = tmp_path / "README.md"
    link.symlink_to(page)
    assert update([link], [links]) == [link]
    assert link.is_symlink()
    assert "| direction |" in page.read_text()
    assert page.stat().st_mode & 0o777 == 0o640


# ---- plots -----------------------------------------------------------------------------------------


def test_plots_are_files_in_two_themes(page: Path, plots: Path, links: Record) -> None:
    page.write_text(PLOT)
    files = [plots / f"links.copy.h200.{theme}.svg" for theme in ("light", "dark")]
    assert update([page], [links], plots=plots) == [page, *files]
    assert page.read_text() == (
        "before\n<!-- freight:plot links/copy -->\n\n<picture>\n"
        '<source media="(prefers-color-scheme: dark)" srcset="my%20plots/links.copy.h200.dark.svg">\n'
        '<img src="my%20plots/links.copy.h200.light.svg" '
        'alt="Host and GPU, copy: freight arena, torch copy_, pinned, torch copy_, pageable, kvikio" width="440">\n'
        "</picture>\n\n<!-- freight:end -->\nafter"
    )
    for file in files:
        assert ET.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_plots_are_drawn_again_only_where_they_must_be(page: Path, plots: Path, links: Record) -> None:
    """Another matplotlib would draw them a little differently; that alone is no reason."""
    page.write_text(PLOT)
    _, light, dark = update([page], [links], plots=plots)
    by_another = light.read_text().replace("M 22", "M 22.001")
    light.write_text(by_another)
    assert check([page], [links], plots=plots) == []
    dark.unlink()
    assert update([page], [links], plots=plots) == [dark]
    assert light.read_text() == by_another
    newer = dataclasses.replace(links, cells=(dataclasses.replace(links.cells[0], note="new"), *links.cells[1:]))
    assert check([page], [newer], plots=plots) == [light, dark]
    elsewhere = dataclasses.replace(links, cells=(*links.cells[:-1], dataclasses.replace(links.cells[-1], note="new")))
    assert check([page], [elsewhere], plots=plots) == []


def test_a_cell_that_has_become_stale_is_drawn_so(
    page: Path, plots: Path, links: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.write_text(PLOT)
    update([page], [links], plots=plots)
    monkeypatch.setattr("freight.bench._registry.stale", lambda cell, name: True)
    assert len(check([page], [links], plots=plots)) == 2


def test_the_same_plot_on_two_pages_is_one_file(page: Path, plots: Path, links: Record, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    for path in (page, readme):
        path.write_text(PLOT)
    assert len(update([page, readme], [links], plots=plots)) == 4
    assert 'src="docs/my%20plots/links.copy.h200.light.svg"' in readme.read_text()


def test_check_of_tables_needs_no_matplotlib(
    page: Path, plots: Path, links: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.write_text(TABLE + PLOT)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert len(check([page], [links], plots=plots)) == 3
    with pytest.raises(MissingError, match=r"pip install 'freight\[plot\]'"):
        update([page], [links], plots=plots)
    assert page.read_text() == TABLE + PLOT
    assert not plots.exists()


# ---- fenced code -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fenced",
    [
        "```\n{}\n```\n",
        "```html\n{}\n```   \n",
        "~~~\n{}\n~~~\n",
        "   ````\n{}\n```\n{}\n````\n",
        "```\n{}\n~~~\n{}\n``` no end\n{}\n```\n",
        "```\n{}\n",  # a fence that is never closed holds the rest of the page
    ],
)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_fenced_code_is_left_alone(fenced: str, ends: str, page: Path) -> None:
    text = fenced.replace("{}", "<!-- freight:table no/record -->\nx\n<!-- freight:end -->").replace("\n", ends)
    page.write_bytes(text.encode())
    assert update([page], []) == []
    assert page.read_bytes() == text.encode()


@pytest.mark.parametrize(
    "before", ["```\ncode\n```\n", "```code``` in a line\n", "    ```\n", "text ```\n", "~~~\n```\n~~~\n"]
)
def test_what_comes_after_code_is_filled(before: str, page: Path, links: Record) -> None:
    page.write_text(before + TABLE)
    assert update([page], [links]) == [page]
    assert page.read_text().startswith(before + "# Title\n\n<!-- freight:table links/copy -->\n\n| direction |")


def test_text_in_a_line_is_no_marker(page: Path) -> None:
    page.write_text("write `<!-- freight:table links/copy -->` there\n<!-- freight: is a comment\nof two lines -->\n")
    assert update([page], []) == []


# ---- what is refused -------------------------------------------------------------------------------

BEGIN, END = "<!-- freight:table links/copy -->", "<!-- freight:end -->"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"x\n{BEGIN}\n", "line 2: the marker is never closed; add <!-- freight:end -->"),
        (f"{BEGIN}\n\n{BEGIN}\n{END}\n", "line 1: the marker is not closed before line 3; add <!-- freight:end -->"),
        (f"{BEGIN}\n```\n{END}\n", "line 1: the marker is never closed"),
        (f"\n\n{END}\n", "line 3: `freight:end` has no marker before it; remove it"),
        ("<!-- freight:tabel x -->\n", "line 1: there is no marker `freight:tabel`; there are table, plot and end"),
        ("<!-- freight: -->\n", "line 1: there is no marker `freight:`"),
        ("<!-- freight:table -->\n", "line 1: there is no record ''"),
        ("<!-- freight:table disk/copy -->\n", r"line 1: there is no record 'disk'; records read: links\.h200\. Run"),
        ("<!-- freight:plot links/coffee -->\n", "line 1: record 'links' has no group 'coffee'; it has: copy, both"),
    ],
)
def test_mistakes_are_told_with_their_line(text: str, message: str, page: Path, links: Record, plots: Path) -> None:
    other = page.with_name("other.md")
    other.write_text(TABLE + PLOT)
    page.write_text(text)
    for attempt in (update, check):
        with pytest.raises(RecordError, match=rf"^{re.escape(str(page))}, {message}"):
            attempt([other, page], [links], plots=plots)
    assert page.read_text() == text
    assert other.read_text() == TABLE + PLOT, "where any page has a mistake, nothing is written"
    assert not plots.exists()


def test_pages_that_cannot_be_read(page: Path, links: Record) -> None:
    page.write_bytes(b"\xff\xfe")
    for path in (page, page.with_name("absent.md")):
        with pytest.raises(RecordError, match=rf"^{re.escape(str(path))} cannot be read: "):
            update([path], [links])


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_write_that_fails_leaves_the_page(
    step: str, page: Path, links: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(DiskError, match=r"file could not be written \(No space left on device\)"):
        update([page], [links])
    assert page.read_text() == TABLE
    assert os.listdir(page.parent) == [page.name]


def test_plots_of_a_checkout_lie_in_its_docs(page: Path, links: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    root = page.parents[1]
    monkeypatch.setattr(_markers, "checkout", lambda: root)
    page.write_text(PLOT)
    assert update([page], [links])[1] == root / "docs" / "assets" / "plots" / "links.copy.h200.light.svg"


def test_hostile_record_between_markers(page: Path, hostile: Record, plots: Path) -> None:
    """Its texts, with `-->` and markup in them, neither end the marker nor begin another one."""
    page.write_text("<!-- freight:table hostile -->\n<!-- freight:end -->\n<!-- freight:plot hostile -->\n" + END)
    assert len(update([page], [hostile], plots=plots)) == 1 + 2 * 4
    assert check([page], [hostile], plots=plots) == []
    assert page.read_text().count("-->") == 4
    assert "<script" not in page.read_text()
    for file in plots.iterdir():
        assert re.fullmatch(r"[\w.-]+", file.name)
        ET.parse(file)
