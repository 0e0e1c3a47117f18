"""The page as a text: it needs nothing from elsewhere, says everything, and shows hostile texts as texts."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from freight.bench._record import Cell, Record, save
from freight.bench.report import _main, _show
from freight.bench.report._main import main
from freight.bench.report._page import page
from freight.errors import DiskError

VOID = {"meta", "br"}
KNOWN = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "nav", "figure"),
    *("h1", "h2", "h3", "p", "ul", "ol", "li", "a", "code", "strong", "b", "small", "sup", "span", "div"),
    *("dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    *("svg", "g", "path", "rect", "text", "use", "defs"),
}


class Parsed(HTMLParser):
    """The elements of a page, their attributes and its text; every element must be closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def attributes(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]


def test_page_is_whole_and_needs_nothing_else(gallery: list[Record]) -> None:
    text = page(gallery)
    parsed = Parsed(text)
    assert {tag for tag, _ in parsed.tags} <= KNOWN
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    assert ("meta", policy) in parsed.tags
    for name in ("src", "srcset", "action", "data", "poster"):
        assert parsed.attributes(name) == []
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style


def test_links_lead_to_what_is_on_the_page(gallery: list[Record]) -> None:
    parsed = Parsed(page(gallery))
    ids = parsed.attributes("id")
    assert len(set(ids)) == len(ids)
    targets = [*parsed.attributes("href"), *parsed.attributes("xlink:href")]
    assert len(targets) > 8
    assert {target.removeprefix("#") for target in targets} <= set(ids)
    assert all(target.startswith("#") for target in targets)
    assert set(parsed.attributes("aria-labelledby")) <= set(ids)


def test_hostile_texts_are_texts(hostile: Record, make: SimpleNamespace) -> None:
    parsed = Parsed(page([hostile], problems=[make.hostile]))
    assert {tag for tag, _ in parsed.tags} <= KNOWN
    assert parsed.text.count(_show.plain(make.hostile)) >= 10
    assert all(sign.isprintable() or sign == "\n" for sign in page([hostile]))
    handlers = [name for _, attrs in parsed.tags for name in attrs if name.startswith("on")]
    assert handlers == []


def test_summary_counts(links: Record) -> None:
    text = Parsed(page([links])).text
    assert "Cells 16 1 quick run" in text
    assert "Targets met 8 of 17 8 missed, 1 not judged" in text
    assert "Stale 1 older than the code they measure" in text
    assert "Machine 1 NVIDIA H200" in text
    assert "freight is ahead in 20 of 28 comparisons, level in 1, behind in 7." in text
    assert "12 more could not be made, for the rival was absent." in text


def test_summary_of_little(make: SimpleNamespace) -> None:
    quiet = Record("sums", "Sums", "cpu", "", (make.cell("a", "g", {}, 1.0),))
    text = Parsed(page([quiet], stale=lambda cell, name: False)).text
    assert "Cells 1 in 1 group" in text
    assert "Targets met 0 of 0 none set" in text
    assert "Stale 0 all measure today's code" in text
    assert "Machine 1 no GPU" in text
    assert "Sums sums without a GPU" in text
    assert 'class="balance"' not in page([quiet])
    assert "Machines 0" in Parsed(page([])).text


def test_everything_of_a_cell_is_told(links: Record) -> None:
    text = Parsed(page([links])).text
    for cell in links.cells:
        assert cell.id in text
    for word in (
        *("85f547b", "0123456+", "2026-11-20T01:02", "torch 2.11.0+cu130, triton 3.6.0, numpy 2.4.0"),
        *("stall seconds 0.0012, overlap yes", "Both copies start on one event."),
        *("kvikio was absent: No module named 'kvikio'.", "✓ met ≥ 0.980× against torch copy_, pinned worse end 1.0"),
        *("✗ missed", "– not judged", "▲ 7.39× ahead", "▼ 0.985× behind", "● 1.004× level"),
        *("caller's own 1 stale", "huge pages 2 quick"),
        *("gpu sms 132", "gpu memory 139, 141", "cpu cores 16", "cuda file –"),
    ):
        assert word in text, word
    assert "not judged ≥ 0.900× against kvikio worse end" not in text, "nothing was reached"


def test_machine_facts_of_any_shape(make: SimpleNamespace) -> None:
    machine = {"a": {"b": [{"c_bytes": 2**20}, [1, 2]]}, "d": None, "e": True, "f": [], "g": 1e300, "h": 10**30}
    text = Parsed(page([Record("sums", "Sums", "cpu", "", (), machine)])).text
    for word in ("a b 1 c bytes 1 MiB", "a b 2 1, 2", "d –", "e yes", "g 1e+300", "h 1,000,000"):
        assert word in text, word


def test_record_without_cells(links: Record) -> None:
    text = Parsed(page([Record("empty", "Nothing yet", "h200", "NVIDIA H200", ())])).text
    assert "Nothing yet empty on NVIDIA H200 The record has no cells." in text


def test_problems_are_shown_before_all_else(links: Record) -> None:
    text = Parsed(page([links], ["record x.json is not JSON"])).text
    assert text.index("Problem record x.json is not JSON") < text.index("Cells 16")


def test_without_matplotlib_there_are_tables_and_a_problem(links: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    parsed = Parsed(page([links]))
    assert not any(tag == "svg" for tag, _ in parsed.tags)
    assert "The page has no plots: plots need matplotlib" in parsed.text
    assert parsed.text.count("GB/s, more is better") == 2
    assert sum(tag == "table" for tag, _ in parsed.tags) == 3 + 3 + 1


def test_stale_is_asked_of_each_cell(links: Record) -> None:
    asked: list[tuple[str, str]] = []

    def stale(cell: Cell, benchmark: str) -> bool:
        asked.append((cell.id, benchmark))
        return cell.id == "both"

    assert "Stale 1 " in Parsed(page([links], stale=stale)).text
    assert asked == [(cell.id, "links") for cell in links.cells]


# ---- freight report --------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path, links: Record) -> Path:
    save(links, tmp_path / "benchmarks" / "results" / "links.h200.json")
    return tmp_path / "benchmarks" / "results"


def test_report_writes_the_page(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "page.html"
    for where in (results, results / "links.h200.json"):
        assert main(results=where, out=out) == 0
        assert "Host and GPU" in Parsed(out.read_text()).text
        assert capsys.readouterr().out == f"{out}: 1 of 1 records\n"


def test_report_by_default(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for checkout in (tmp_path, None):
        monkeypatch.setattr(_main, "checkout", lambda checkout=checkout: checkout)
        assert main() == 0
        assert Path("freight-report.html").exists()
        Path("freight-report.html").unlink()


def test_report_shows_a_corrupt_record_as_a_problem(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "disk.h200.json").write_text('{"schema": 1}')
    out = tmp_path / "page.html"
    assert main(results=results, out=out) == 1
    text = Parsed(out.read_text()).text
    assert re.search(r"Problem record .*disk\.h200\.json: benchmark is missing.*Restore it from version control", text)
    assert "Host and GPU" in text
    printed = capsys.readouterr()
    assert printed.out == f"{out}: 1 of 2 records\n"
    assert "disk.h200.json: benchmark is missing" in printed.err


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_report_without_records(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "page.html"
    assert main(results=tmp_path / folder, out=out) == 1
    assert not out.exists()
    assert f"There are no records in {tmp_path / folder}. Make some with `freight bench`" in capsys.readouterr().err


def test_report_that_cannot_be_written(results: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "page.html", tmp_path):
        with pytest.raises(DiskError, match="file could not be written"):
            main(results=results, out=out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmarks", "file"]
