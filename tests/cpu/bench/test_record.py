"""Records: written whole or not at all, read strictly, merged without losing anything; and their JSON Schema."""

import dataclasses
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from freight.bench._record import Cell, Measured, Record, Rival, Target, dump, load, merge, parse, save, short
from freight.errors import ArgumentError, DiskError, FreightError, RecordError

SCHEMA = Draft202012Validator(
    json.loads((Path(__file__).parents[3] / "benchmarks" / "schema.json").read_text(encoding="utf-8"))
)
FAST = Measured("freight", 55.5, 55.1, 55.9, 3, (55.1, 55.5, 55.9))
SLOW = Measured("torch", 50.5, 50.1, 50.9, 3, (50.1, 50.5, 50.9))
RIVALS = (Rival("torch", None, SLOW, 1.1, 1.09, 1.11), Rival("kvikio", absent="No module named 'kvikio'"))
TARGETS = (
    Target("against torch", "ratio", 0.98, None, 1.09, True),
    Target("freight, GB/s", "value", None, 60.0, 55.9, True),
    Target("against kvikio", "ratio", 0.98, None, None, False),
)
COPY = Cell(
    id="copy/1GiB",
    group="copy",
    axes={"direction": "h2d", "bytes": 2**30, "share": 0.5, "pinned": True, "layer": None},
    unit="GB/s",
    better="higher",
    subject=FAST,
    rivals=RIVALS,
    targets=TARGETS,
    checked="every byte",
    commit="85f547b0c0ffee",
    dirty=False,
    date="2026-11-18T10:20:30+00:00",
    code="sha256:0123",
    versions={"torch": "2.13.0"},
    quick=False,
    extra={"clock": "gpu", "seconds": 0.25},
    note="both copies at once: \u201c×\u201d 数据",
)
MACHINE = {"gpu": {"name": "NVIDIA H200", "sms": 132}, "sizes": [1, 2.5, [3]], "cufile": None}


def cell(name: str, **changes: Any) -> Cell:
    return dataclasses.replace(COPY, id=name, **changes)


def record(*cells: Cell, **changes: Any) -> Record:
    return dataclasses.replace(Record("links", "Links", "h200", "NVIDIA H200", cells, MACHINE), **changes)


# ---- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", [(), (COPY,), (COPY, cell("other", rivals=(), targets=(), quick=True, note=""))])
def test_there_and_back(cells: tuple[Cell, ...]) -> None:
    text = dump(record(*cells))
    assert parse(text) == record(*cells)
    assert dump(parse(text)) == text
    assert list(SCHEMA.iter_errors(json.loads(text))) == []


@given(
    value=st.floats(1e-12, 1e12),
    axes=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text()),
    versions=st.dictionaries(st.text(), st.text()),
)
def test_whatever_is_measured_comes_back(value: float, axes: dict, versions: dict[str, str]) -> None:
    subject = Measured("freight", value, value, value, 1, (value,))
    kept = parse(dump(record(cell("any", subject=subject, axes=axes, versions=versions)))).cells[0]
    assert kept.subject.median == short(value) == pytest.approx(value, rel=5e-6)
    assert (kept.axes, kept.versions) == (axes, versions)


def test_a_list_of_numbers_takes_one_line() -> None:
    lines = [line.strip() for line in dump(record(COPY)).splitlines()]
    assert '"values": [55.1, 55.5, 55.9]' in lines


def test_what_may_be_left_out() -> None:
    data = json.loads(dump(record(COPY)))
    for name in ("quick", "extra", "note"):
        del data["cells"][0][name]
    del data["cells"][0]["rivals"][0]["absent"]
    assert list(SCHEMA.iter_errors(data)) == []
    assert parse(json.dumps(data)) == record(dataclasses.replace(COPY, extra={}, note=""))


# ---- what is refused -------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]
CELL = r"cells\[copy/1GiB\]"


def first(*path: str | int, **new: Any) -> Change:
    """A change of fields of what lies at `path` below the first cell."""
    return lambda data: _at(data["cells"][0], *path).update(new)


def without(name: str, *path: str | int) -> Change:
    return lambda data: _at(data["cells"][0], *path).pop(name)


def _names(changes: list[tuple[Change, str]]) -> list[str]:
    return [message.replace("\\", "")[:50] for _, message in changes]


def _at(data: Any, *path: str | int) -> dict[str, Any]:
    for step in path:
        data = data[step]
    return data


STRUCTURE: list[tuple[Change, str]] = [
    (lambda data: data.clear(), r"schema is missing; expected a whole number"),
    (lambda data: data.update(schema=2), r"schema is 2, and this freight reads schema 1; use the freight that wrote"),
    (lambda data: data.update(schema=True), r"schema must be a whole number of at least 0; got True"),
    (lambda data: data.update(schema="1"), r"schema must be a whole number"),
    (lambda data: data.pop("title"), r"title is missing; expected text"),
    (lambda data: data.update(benchmark=None), r"benchmark must be text; got None"),
    (lambda data: data.update(machine=[]), r"machine must be an object; got \[\]"),
    (lambda data: data.update(cells={}), r"cells must be a list; got \{\}"),
    (lambda data: data.update(cells=["x" * 99]), r"cells\[0\] must be an object; got 'x{56}\.\.\."),
    (lambda data: data.update(comment=""), r"comment is not a field of this schema"),
    (first(speed=1), r"speed is not a field of this schema"),
    (first("subject", mean=1), r"subject\.mean is not a field"),
    (first("rivals", 0, mean=1), r"rivals\[0\]\.mean is not a field"),
    (first("rivals", 1, median=1), r"rivals\[1\]\.median is not a field"),
    (first("targets", 0, by=1), r"targets\[0\]\.by is not a field"),
    (without("id"), r"cells\[0\]\.id is missing; expected text"),
    (without("code"), r"code is missing"),
    (without("values", "subject"), r"subject\.values is missing; expected a list of finite numbers"),
    (without("ratio_low", "rivals", 0), r"rivals\[0\]\.ratio_low is missing"),
    (without("name", "rivals", 1), r"rivals\[1\]\.name is missing"),
    (without("met", "targets", 0), r"targets\[0\]\.met is missing"),
    (first(unit=3), r"unit must be text; got 3"),
    (first(dirty=0), r"dirty must be true or false; got 0"),
    (first(quick="no"), r"quick must be true or false"),
    (first(better="faster"), r"better must be one of higher, lower; got 'faster'"),
    (first(better=["higher"]), r"better must be one of"),
    (first(axes=None), r"axes must be an object of plain values"),
    (first(axes={"bytes": [1]}), r"axes must be an object of plain values"),
    (first(extra={"clock": {}}), r"extra must be an object of plain values"),
    (first(versions={"torch": 2.13}), r"versions must be an object of texts"),
    (first(subject=[]), r"subject must be an object"),
    (first("subject", median="55"), r"subject\.median must be a finite number; got '55'"),
    (first("subject", median=True), r"subject\.median must be a finite number; got True"),
    (first("subject", runs=-1), r"subject\.runs must be a whole number of at least 0; got -1"),
    (first("subject", runs=2.5), r"subject\.runs must be a whole number"),
    (first("subject", values=[55, "55", 55]), r"subject\.values must be a list of finite numbers"),
    (first("subject", values={}, runs=0), r"subject\.values must be a list of finite numbers; got \{\}"),
    (first("subject", values=[], runs=0), r"subject\.runs is 0, and there are 0 values"),
    (first("rivals", 0, absent=False), r"rivals\[0\]\.absent must be text or null; got False"),
    (first("rivals", 0, absent="gone"), r"rivals\[0\]\.(median|low|high|runs|values) is not a field"),
    (first("rivals", 1, absent=None), r"rivals\[1\]\.median is missing"),
    (first("targets", 0, kind="speed"), r"targets\[0\]\.kind must be one of ratio, value"),
    (first("targets", 0, worse_end="1"), r"targets\[0\]\.worse_end must be a finite number or null"),
    (first("targets", 0, at_most=2), r"targets\[0\]\.at_least and at_most: a target has exactly one of them"),
    (first("targets", 0, at_least=None), r"targets\[0\]\.at_least and at_most: a target has exactly one of them"),
]
MEANING: list[tuple[Change, str]] = [
    (first("subject", runs=4), r"subject\.runs is 4, and there are 3 values"),
    (first("subject", low=56), r"subject\.median must lie between low and high"),
    (first("rivals", 0, high=1), r"rivals\[0\]\.median must lie between low and high"),
    (lambda data: data["cells"].append(data["cells"][0]), r"cells has the id 'copy/1GiB' more than once"),
    (first("subject", median=10**400), r"subject\.median must be a finite number"),
]


@pytest.mark.parametrize(("change", "message"), STRUCTURE + MEANING, ids=_names(STRUCTURE + MEANING))
def test_reader_refuses(change: Change, message: str) -> None:
    data = json.loads(dump(record(COPY)))
    change(data)
    with pytest.raises(RecordError, match=rf"^record some\.json: ({CELL}\.)?{message}.*Restore it from ver"):
        parse(json.dumps(data), "some.json")


@pytest.mark.parametrize("change", [change for change, _ in STRUCTURE], ids=_names(STRUCTURE))
def test_schema_refuses_the_same(change: Change) -> None:
    data = json.loads(dump(record(COPY)))
    change(data)
    assert list(SCHEMA.iter_errors(data)) != []


def test_schema_describes_every_field() -> None:
    Draft202012Validator.check_schema(SCHEMA.schema)
    parts = [SCHEMA.schema, *SCHEMA.schema["$defs"].values(), *SCHEMA.schema["$defs"]["rival"]["oneOf"]]
    assert all(part["description"] for part in parts)
    fields = [field for part in parts for field in part.get("properties", {}).values()]
    assert [field for field in fields if not field.keys() & {"description", "$ref"} and field != {"type": "null"}] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value: line 1"),
        ("\ufeff{}", "BOM"),
        ("[]", "the file must be an object; got"),
        ('{"schema": 1,', "Expecting property name"),
        ("<<<<<<< HEAD\n{}", "Expecting value"),
        ('{"schema": NaN}', "NaN is not a number that a record may hold"),
        ('{"schema": -Infinity}', "-Infinity is not a number"),
        ('{"schema": 1, "machine": {"cores": 1e999}}', "1e999 is not a number"),
        ('{"schema": 1, "machine": {"a": 1, "b": 2, "a": 3}}', "the field 'a' stands twice in one object"),
        ('{"schema": 1, "title": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "recursion"),
        ('{"schema": ' + "9" * 5000 + "}", "digits"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_no_json_of_ours(text: str, message: str) -> None:
    with pytest.raises(RecordError, match=rf"^record x\.json.*{message}(?s:.*)Restore it"):
        parse(text, "x.json")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    text = dump(record(COPY)).rstrip()
    for end in range(0, len(text), 7):
        with pytest.raises(RecordError):
            parse(text[:end])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name in ("absent.json", "binary.json", "."):
        with pytest.raises(RecordError, match=rf"^record .*{tmp_path.name}.* cannot be read: .*Restore it"):
            load(tmp_path / name)


# ---- whole or not at all ---------------------------------------------------------------------------


def test_save_makes_the_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results" / "links.h200.json"
    for one in (record(), record(COPY)):
        save(one, path)
        assert load(path) == one
    assert os.listdir(path.parent) == ["links.h200.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """The system itself refuses to write more than 4 KiB into a file: as on a full disk, a part is written before."""
    path = tmp_path / "links.h200.json"
    save(record(), path)
    many = record(*(cell(f"copy/{n}") for n in range(20)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(DiskError, match=r"record could not be saved \(File too large\)") as caught:
            save(many, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert load(path) == record()
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_step_that_fails_leaves_what_was_there(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "links.h200.json"
    save(record(), path)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises((DiskError, KeyboardInterrupt)):
        save(record(COPY), path)
    monkeypatch.undo()
    assert load(path) == record()
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="record could not be saved"):
        save(record(), tmp_path / "file" / "links.json")


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(FreightError, match="more than once"):
        save(record(COPY, COPY), tmp_path / "x.json")
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(record(COPY, machine={"x": float("nan")}), tmp_path / "x.json")
    assert os.listdir(tmp_path) == []


# ---- merging ---------------------------------------------------------------------------------------


def test_each_cell_keeps_its_own_commit_and_date() -> None:
    old = record(cell("a", commit="old", date="2026-01-01"), cell("b", commit="old", date="2026-01-02"))
    new = record(cell("b", commit="new", date="2026-02-02"), cell("c", commit="new", date="2026-02-03"), machine={})
    merged = merge(old, new)
    assert [(one.id, one.commit, one.date) for one in merged.cells] == [
        ("a", "old", "2026-01-01"),
        ("b", "new", "2026-02-02"),
        ("c", "new", "2026-02-03"),
    ]
    assert merged.machine == MACHINE


def test_title_and_machine_are_the_newest() -> None:
    merged = merge(record(title="Before"), record(title="After", machine={"cores": 16}))
    assert (merged.title, merged.machine) == ("After", {"cores": 16})


@pytest.mark.parametrize(("before", "after", "kept"), [(0, 0, 2), (0, 1, 1), (1, 0, 2), (1, 1, 2)])
def test_quick_never_replaces_full(before: int, after: int, kept: int) -> None:
    old, new = (record(cell("a", quick=bool(q), commit=str(n))) for n, q in ((1, before), (2, after)))
    assert merge(old, new).cells[0].commit == str(kept)


def test_defined_cells_follow_the_benchmark() -> None:
    old = record(cell("a"), cell("gone"), cell("c"))
    merged = merge(old, record(cell("b")), defined=("c", "b", "a", "never measured"))
    assert [one.id for one in merged.cells] == ["c", "b", "a"]


def test_records_of_different_things_do_not_merge() -> None:
    for other in (record(benchmark="disk"), record(gpu="cpu")):
        with pytest.raises(ArgumentError, match=r"links on h200 and of (disk on h200|links on cpu) do not merge"):
            merge(record(), other)


def test_groups_keep_the_order() -> None:
    cells = [cell("a", group="x"), cell("b", group="y"), cell("c", group="x")]
    assert {name: [one.id for one in found] for name, found in record(*cells).groups().items()} == {
        "x": ["a", "c"],
        "y": ["b"],
    }
