"""Records: what a benchmark measured, as frozen dataclasses and as JSON, read strictly and written whole or not at all.

    Record            one benchmark on one GPU: `benchmarks/results/<benchmark>.<gpu>.json`
    └── Cell          one comparison, with its own commit, date, versions and fingerprint of the measured code
        ├── Measured  the subject: median, quartiles and every value
        ├── Rival     another way to do the same, measured in turn with the subject; or why it is absent
        └── Target    what the cell must reach, and whether the worse end of the 95 % interval does

`benchmarks/schema.json` describes the JSON; `benchmarks/README.md` explains it.
"""

import dataclasses
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from freight.bench._fields import Fields
from freight.errors import ArgumentError, DiskError, RecordError

SCHEMA = 1
DIGITS = 6  # significant ones that a measured number keeps: far below the noise, and short in a diff

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Measured:
    """What was measured of one way to do the work; `low` and `high` are the quartiles."""

    name: str
    median: float
    low: float
    high: float
    runs: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Rival:
    """A rival's measurement and the subject's ratio to it (above 1: the subject is better); or why it is `absent`."""

    name: str
    absent: str | None = None
    measured: Measured | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@dataclass(frozen=True)
class Target:
    """A bound on a ratio, or on the subject's own value; `worse_end` is None where its rival was absent."""

    what: str
    kind: str
    at_least: float | None
    at_most: float | None
    worse_end: float | None
    met: bool


@dataclass(frozen=True)
class Cell:
    """One comparison: a subject and its rivals at one point of the axes."""

    id: str
    group: str
    axes: Mapping[str, Scalar]
    unit: str
    better: str
    subject: Measured
    rivals: tuple[Rival, ...]
    targets: tuple[Target, ...]
    checked: str
    commit: str
    dirty: bool
    date: str
    code: str
    versions: Mapping[str, str]
    quick: bool = False
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Record:
    """All cells of one benchmark on one GPU, and the machine that the newest of them were measured on."""

    benchmark: str
    title: str
    gpu: str
    gpu_name: str
    cells: tuple[Cell, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)

    def groups(self) -> dict[str, list[Cell]]:
        """The cells by group, both in the record's order."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.group, []).append(cell)
        return found


def load(path: str | os.PathLike[str]) -> Record:
    """The record in file `path`; a RecordError names the file, the field and the remedy where it is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"record {path} cannot be read: {error}. {_REMEDY}") from None
    return parse(text, str(path))


def parse(text: str, file: str = "<text>") -> Record:
    """The record that JSON `text` describes; `file` is named in errors."""
    try:
        data = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant, parse_float=_finite)
        json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair reads well and cannot be written
    except (ValueError, RecursionError) as error:
        raise RecordError(f"record {file} is not JSON: {error}. {_REMEDY}") from None
    fields = Fields(data, "record " + file, "", _REMEDY)
    schema = fields.integer("schema")
    if schema != SCHEMA:
        known = f"this freight reads schema {SCHEMA}"
        fields.fail("schema", f"is {schema}, and {known}; use the freight that wrote it")
    record = Record(
        benchmark=fields.text("benchmark"),
        title=fields.text("title"),
        gpu=fields.text("gpu"),
        gpu_name=fields.text("gpu_name"),
        cells=tuple(_read_cell(cell) for cell in fields.objects("cells")),
        machine=fields.mapping("machine"),
    )
    fields.finish()
    ids = [cell.id for cell in record.cells]
    for cell_id in ids:
        if ids.count(cell_id) > 1:
            fields.fail("cells", f"has the id {cell_id!r} more than once")
    return record


def dump(record: Record) -> str:
    """`record` as JSON text, a list of numbers on one line each."""
    data = {
        "schema": SCHEMA,
        "benchmark": record.benchmark,
        "title": record.title,
        "gpu": record.gpu,
        "gpu_name": record.gpu_name,
        "cells": [_cell_json(cell) for cell in record.cells],
        "machine": dict(record.machine),
    }
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[\n\s*([-+\d.e,\s]*?)\n\s*\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


def save(record: Record, path: str | os.PathLike[str]) -> None:
    """Write `record` to `path`, whole or not at all: what was there stays until the new file is complete."""
    path = Path(path)
    text = dump(record)
    parse(text, str(path))  # what cannot be read back is not worth writing
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DiskError(error.errno, f"record could not be saved ({error.strerror})", str(path)) from None
        raise


def merge(old: Record, new: Record, *, defined: tuple[str, ...] | None = None) -> Record:
    """`old` with the cells of `new` put in; each cell keeps its own commit and date.

    A quick cell never replaces a full one. With `defined`, the ids that the benchmark has today, cells of `old` that
    it no longer has are left out and the rest follows that order.
    """
    if (old.benchmark, old.gpu) != (new.benchmark, new.gpu):
        raise ArgumentError(
            f"records of {old.benchmark} on {old.gpu} and of {new.benchmark} on {new.gpu} do not merge: "
            "keep one file for each benchmark and GPU."
        )
    cells = {cell.id: cell for cell in old.cells}
    for cell in new.cells:
        before = cells.get(cell.id)
        if before is None or before.quick or not cell.quick:
            cells[cell.id] = cell
    if defined is not None:
        cells = {name: cells[name] for name in defined if name in cells}
    return dataclasses.replace(new, cells=tuple(cells.values()), machine=new.machine or old.machine)


# ---- JSON to dataclasses ---------------------------------------------------------------------------

_REMEDY = "Restore it from version control, or move it away and measure again with `freight bench`."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a record may hold")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_constant(digits)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of two fields with one name, as a careless merge leaves behind, neither is the right one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} stands twice in one object")
    return found


def _read_cell(fields: Fields) -> Cell:
    cell = Cell(
        id=fields.text("id"),
        group=fields.text("group"),
        axes=fields.scalars("axes"),
        unit=fields.text("unit"),
        better=fields.choice("better", ("higher", "lower")),
        subject=_read_measured(subject := fields.object("subject")),
        rivals=tuple(_read_rival(rival) for rival in fields.objects("rivals")),
        targets=tuple(_read_target(target) for target in fields.objects("targets")),
        checked=fields.text("checked"),
        commit=fields.text("commit"),
        dirty=fields.flag("dirty"),
        date=fields.text("date"),
        code=fields.text("code"),
        versions=fields.texts("versions"),
        quick=fields.flag("quick", default=False),
        extra=fields.scalars("extra", default={}),
        note=fields.text("note", default=""),
    )
    subject.finish()
    fields.finish()
    return cell


def _read_measured(fields: Fields) -> Measured:
    measured = Measured(
        name=fields.text("name"),
        median=fields.number("median"),
        low=fields.number("low"),
        high=fields.number("high"),
        runs=fields.integer("runs"),
        values=fields.numbers("values"),
    )
    if measured.runs != len(measured.values) or not measured.values:
        fields.fail("runs", f"is {measured.runs}, and there are {len(measured.values)} values")
    if not measured.low <= measured.median <= measured.high:
        fields.fail("median", "must lie between low and high")
    return measured


def _read_rival(fields: Fields) -> Rival:
    absent = fields.optional_text("absent")
    if absent is not None:
        rival = Rival(fields.text("name"), absent=absent)
    else:
        measured = _read_measured(fields)
        ratios = [fields.number(name) for name in ("ratio", "ratio_low", "ratio_high")]
        rival = Rival(measured.name, None, measured, *ratios)
    fields.finish()
    return rival


def _read_target(fields: Fields) -> Target:
    target = Target(
        what=fields.text("what"),
        kind=fields.choice("kind", ("ratio", "value")),
        at_least=fields.optional_number("at_least"),
        at_most=fields.optional_number("at_most"),
        worse_end=fields.optional_number("worse_end"),
        met=fields.flag("met"),
    )
    if (target.at_least is None) == (target.at_most is None):
        fields.fail("at_least", "and at_most: a target has exactly one of them")
    fields.finish()
    return target


# ---- dataclasses to JSON ---------------------------------------------------------------------------


def short(value: float) -> float:
    """`value` with the digits that a record keeps."""
    return float(f"{value:.{DIGITS}g}")


def _cell_json(cell: Cell) -> dict[str, Any]:
    return {
        "id": cell.id,
        "group": cell.group,
        "axes": dict(cell.axes),
        "unit": cell.unit,
        "better": cell.better,
        "subject": _measured_json(cell.subject),
        "rivals": [_rival_json(rival) for rival in cell.rivals],
        "targets": [_target_json(target) for target in cell.targets],
        "checked": cell.checked,
        "extra": {name: short(value) if isinstance(value, float) else value for name, value in cell.extra.items()},
        "note": cell.note,
        "commit": cell.commit,
        "dirty": cell.dirty,
        "date": cell.date,
        "code": cell.code,
        "versions": dict(cell.versions),
        "quick": cell.quick,
    }


def _measured_json(measured: Measured) -> dict[str, Any]:
    return {
        "name": measured.name,
        "median": short(measured.median),
        "low": short(measured.low),
        "high": short(measured.high),
        "runs": measured.runs,
        "values": [short(value) for value in measured.values],
    }


def _rival_json(rival: Rival) -> dict[str, Any]:
    if rival.measured is None:
        return {"name": rival.name, "absent": rival.absent}
    ratios = {name: short(getattr(rival, name)) for name in ("ratio", "ratio_low", "ratio_high")}
    return {**_measured_json(rival.measured), **ratios, "absent": None}


def _target_json(target: Target) -> dict[str, Any]:
    bounds = {name: getattr(target, name) for name in ("at_least", "at_most") if getattr(target, name) is not None}
    worse_end = None if target.worse_end is None else short(target.worse_end)
    return {"what": target.what, "kind": target.kind, **bounds, "worse_end": worse_end, "met": target.met}
