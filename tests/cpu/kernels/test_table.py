"""What a launch is given: the nearest bucket known, this machine's own table first, the default where there is none."""

import contextlib
import errno
import importlib
import importlib.metadata
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import freight
from freight import _config
from freight._gpuname import slug
from freight.errors import ArgumentError, DiskError
from freight.kernels import _table
from freight.kernels._compile import kernels
from freight.kernels._table import Config, Entry, Shape, Tunable, bucket, distance, register, save

GPU_NAME = "NVIDIA RTX 9999"
GPU = torch.device("cuda", 0)
DEFAULT = {"BLOCK": 64, "num_warps": 4}
SPACE = {"BLOCK": (16, 32, 64, 128), "num_warps": (4, 8)}
SIZES = st.integers(0, 2**40)


def make(op: str = "scale", dims: tuple[str, ...] = ("rows",), **changes: Any) -> Tunable:
    parts: dict[str, Any] = {
        "default": DEFAULT,
        "space": SPACE,
        "cells": (),
        "inputs": lambda shape, dtype, device: (),
        "launch": lambda config: None,
        "check": lambda inputs, got: None,
    }
    return Tunable(op, dims, **{**parts, **changes})


def block(size: int, warps: int = 4) -> Config:
    return {"BLOCK": size, "num_warps": warps}


def line(shape: Shape, config: Any, op: Any = "scale", dtype: Any = "float32") -> dict[str, Any]:
    return {"op": op, "shape": list(shape), "dtype": dtype, "config": config}


def table(*entries: Any, gpu: Any = GPU_NAME, schema: Any = 1) -> str:
    return json.dumps({"schema": schema, "gpu": gpu, "entries": list(entries)})


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place of the shipped table, empty; and a GPU by name, which is all that a lookup asks of it."""
    monkeypatch.setattr(_table, "_SHIPPED", tmp_path)
    monkeypatch.setattr(_table, "_gpu_at", lambda index: slug(GPU_NAME))
    _table.forget()
    yield tmp_path / "rtx9999.json"
    _table.forget()


@pytest.fixture
def own() -> Path:
    """The place of this machine's own table, its folder made."""
    path = _table._tuned_file(slug(GPU_NAME), _config.current())
    path.parent.mkdir()
    return path


def looked_up(shape: Shape = (1,), dtype: str = "float32", tunable: Tunable | None = None) -> Config:
    return (tunable or make()).config(shape, dtype, GPU)


# ---- buckets -----------------------------------------------------------------------------------------


@given(shape=st.lists(SIZES, max_size=4))
def test_a_bucket_is_the_next_powers_of_two(shape: list[int]) -> None:
    for size, rounded in zip(shape, bucket(tuple(shape)), strict=True):
        assert rounded == 2 ** math.ceil(math.log2(max(1, size)))


@given(one=st.integers(0, 40), other=st.integers(0, 40), columns=st.integers(0, 20))
def test_distance_counts_doublings(one: int, other: int, columns: int) -> None:
    a, b = (2**one, 2**columns), (2**other, 1)
    assert distance(a, b) == distance(b, a) == abs(one - other) + columns


@given(known=st.sets(st.tuples(SIZES, SIZES).map(bucket), min_size=1, max_size=8), at=st.tuples(SIZES, SIZES))
def test_the_nearest_bucket_serves(known: set[Shape], at: Shape) -> None:
    """Every entry has a configuration of its own, so that what is found tells where."""
    configs = [block(2**i) for i in range(1, len(known) + 1)]
    entries = zip(sorted(known), configs, strict=True)
    _table._tuned_file(slug(GPU_NAME), _config.current()).unlink(missing_ok=True)
    save([Entry("scale", shape, "float32", config, 1.0, None) for shape, config in entries], GPU_NAME)
    space = {"BLOCK": (1, *(config["BLOCK"] for config in configs)), "num_warps": (4,)}
    found = looked_up(at, tunable=make(dims=("rows", "columns"), default=block(1), space=space))

    def doublings(shape: Shape) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(shape, bucket(at), strict=True))

    assert doublings(sorted(known)[configs.index(found)]) == min(map(doublings, known))


def test_of_two_as_near_the_smaller_serves(shipped: Path) -> None:
    shipped.write_text(table(line((64,), block(16)), line((16,), block(32))))
    assert looked_up((32,)) == block(32)


def test_other_operators_dtypes_and_ranks_do_not_serve(shipped: Path) -> None:
    entries = line((8,), block(16), op="other"), line((8,), block(16), dtype="int8"), line((8, 8), block(16))
    shipped.write_text(table(*entries))
    assert looked_up((8,)) == DEFAULT
    assert looked_up((8,), "int8") == block(16)


def test_without_a_gpu_the_default_serves(shipped: Path) -> None:
    shipped.write_text(table(line((8,), block(16))))
    assert make().config((8,), "float32", torch.device("cpu")) == DEFAULT
    assert make().config((8,), "float32", GPU) == block(16)


# ---- two files, one table ----------------------------------------------------------------------------


def test_without_files_the_default_serves(caplog: pytest.LogCaptureFixture) -> None:
    assert looked_up() == DEFAULT
    assert caplog.records == []


def test_own_table_before_the_shipped_one(shipped: Path, own: Path) -> None:
    shipped.write_text(table(line((8,), block(16)), line((512,), block(32))))
    own.write_text(table(line((8,), block(128)), line((2**20,), block(64, 8))))
    assert looked_up((8,)) == block(128)
    assert looked_up((512,)) == block(32)  # which only the shipped one knows
    assert looked_up((2**14,)) == block(32)  # 5 doublings from the shipped one's, 6 from the own one's
    assert looked_up((2**15,)) == block(64, 8)


def test_each_cache_directory_has_its_own_table(tmp_path: Path) -> None:
    save([Entry("scale", (8,), "float32", block(16), 1.0, None)], GPU_NAME)
    with freight.config(cache_dir=tmp_path / "another"):
        assert looked_up((8,)) == DEFAULT
    assert looked_up((8,)) == block(16)


def test_what_is_shipped_is_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """An operator that has changed leaves no stale line behind."""
    for module in kernels():
        importlib.import_module(module)
    ops = _table.registered()
    files = sorted((Path(_table.__file__).parent / "tuned").glob("*.json"))
    assert files
    for path in files:
        assert path.stem == slug(json.loads(path.read_text())["gpu"])
        for entry in _table._entries(path, path.stem):
            op, shape = ops[entry["op"]], tuple(entry["shape"])
            assert op.offers(entry["config"]), entry
            assert (bucket(shape), len(shape)) == (shape, len(op.dims)), entry
    assert caplog.records == []


# ---- tables that are none ----------------------------------------------------------------------------

GOOD = line((8,), block(16))
BAD = {
    "empty": "",
    "cut off": table(GOOD)[:-20],
    "another kind of JSON": "[1, 2]",
    "a number": "7",
    "endlessly nested": "[" * 100_000,
    "no schema": json.dumps({"gpu": GPU_NAME, "entries": [GOOD]}),
    "an older schema": table(GOOD, schema=0),
    "another GPU's": table(GOOD, gpu="NVIDIA H200"),
    "no GPU's": table(GOOD, gpu=None),
    "no entries": json.dumps({"schema": 1, "gpu": GPU_NAME}),
    "an entry that is none": table(GOOD, 7),
    "an entry without a shape": table(GOOD, {"op": "scale", "dtype": "float32", "config": {}}),
    "a configuration that is a list": table(GOOD, line((8,), [16, 4])),
    "a configuration of text": table(GOOD, line((8,), {"BLOCK": "16", "num_warps": 4})),
    "a configuration of booleans": table(GOOD, line((8,), {"BLOCK": True, "num_warps": 4})),
    "a configuration of fractions": table(GOOD, line((8,), {"BLOCK": 16.0, "num_warps": 4})),
    "a negative size": table(GOOD, line((-8,), block(16))),
    "an operator without a name": table(GOOD, line((8,), block(16), op=None)),
    "a dtype without a name": table(GOOD, line((8,), block(16), dtype=["float32"])),
}


@pytest.mark.parametrize("place", ["shipped", "own"])
@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_ignored_with_one_line_in_the_log(
    place: str, text: str, shipped: Path, own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = (shipped, own) if place == "shipped" else (own, shipped)
    bad.write_text(text)
    for rows in (1, 8, 2**20):
        assert looked_up((rows,)) == DEFAULT
    [record] = caplog.records
    assert (record.name, record.levelno) == ("freight.kernels._table", logging.WARNING)
    assert f"the tuning table {bad} is ignored; `freight bench --tune` writes it anew (" in record.getMessage()
    good.write_text(table(GOOD))
    _table.forget()
    assert looked_up((8,)) == block(16)


def test_the_log_says_what_is_wrong(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text, reason in (
        ("an older schema", "its schema is 0, expected 1"),
        ("another GPU's", "tuned on 'NVIDIA H200'"),
    ):
        own.write_text(BAD[text])
        _table.forget()
        looked_up()
        assert reason in caplog.messages[-1]


@pytest.mark.parametrize("spoil", [lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff\xfe\x00")])
def test_what_cannot_be_read_is_ignored(
    spoil: Callable[[Path], Any], own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(own)
    assert looked_up() == DEFAULT
    [message] = caplog.messages
    assert f"the tuning table {own} cannot be read and is ignored: " in message


def test_saving_over_a_corrupt_table_writes_it_anew(own: Path) -> None:
    own.write_text(BAD["cut off"])
    assert save([Entry("scale", (8,), "float32", block(16), 1.0, None)], GPU_NAME) == own
    assert looked_up((8,)) == block(16)


@pytest.mark.parametrize(
    "old",
    [{"BLOCK": 16}, {**block(16), "num_stages": 3}, {"SIZE": 16, "num_warps": 4}, block(0), block(17), {}],
    ids=str,
)
def test_an_operator_whose_knobs_changed_has_its_default(old: Config, own: Path) -> None:
    own.write_text(table(line((8,), old), line((2**20,), block(16))))
    assert looked_up((8,)) == DEFAULT
    assert looked_up((2**20,)) == block(16)


# ---- saving ------------------------------------------------------------------------------------------


def test_what_is_saved_is_looked_up_at_once() -> None:
    assert looked_up((1000,)) == DEFAULT
    path = save([Entry("scale", (1000,), "float32", block(32, 8), 12.5, 14.0)], GPU_NAME)
    assert looked_up((1000,)) == block(32, 8)
    assert json.loads(path.read_text()) == {
        "schema": 1,
        "gpu": GPU_NAME,
        "versions": _table._versions(),
        "entries": [
            {**line((1024,), block(32, 8)), "microseconds": 12.5, "default_microseconds": 14.0},
        ],
    }


def test_saving_keeps_other_cells_and_replaces_its_own() -> None:
    def entry(rows: int, config: Config, op: str = "scale", dtype: str = "float32") -> Entry:
        return Entry(op, (rows,), dtype, config, 1.0, None)

    save([entry(8, block(16)), entry(512, block(32)), entry(8, block(64, 8), dtype="int8")], GPU_NAME)
    path = save([entry(7, block(128)), entry(8, block(16), op="other")], GPU_NAME)
    assert [looked_up((8,)), looked_up((512,)), looked_up((8,), "int8")] == [block(128), block(32), block(64, 8)]
    assert len(json.loads(path.read_text())["entries"]) == 4


def test_versions_are_in_the_name_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save([Entry("scale", (8,), "float32", block(16), 1.0, None)], GPU_NAME)
    triton = importlib.metadata.version("triton")
    assert path.parent == Path(os.environ["FREIGHT_CACHE_DIR"], "tuned")
    assert path.name == f"rtx9999-freight{freight.__version__}-torch{torch.__version__}-triton{triton}.json"
    assert looked_up((8,)) == block(16)
    for name in ("freight", "torch", "triton"):
        other = {**_table._versions(), name: "99.0"}
        with monkeypatch.context() as patch:
            patch.setattr(_table, "_versions", lambda other=other: other)
            _table.forget()
            assert looked_up((8,)) == DEFAULT
            assert save([], GPU_NAME) != path


def test_the_old_table_stands_until_the_new_one_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save([Entry("scale", (8,), "float32", block(16), 1.0, None)], GPU_NAME)
    replace, seen = os.replace, []

    def watched(source: str, target: Path) -> None:
        seen.append([len(json.loads(Path(at).read_text())["entries"]) for at in (source, target)])
        assert Path(source).parent == Path(target).parent  # of one file system, or it would be a copy
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    save([Entry("scale", (512,), "float32", block(32), 1.0, None)], GPU_NAME)
    assert seen == [[2, 1]]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_fault_while_saving_leaves_the_old_table(fault: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save([Entry("scale", (8,), "float32", block(16), 1.0, None)], GPU_NAME)
    before = path.read_bytes()

    def broken(source: str, target: Path) -> None:
        raise fault

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises((DiskError, KeyboardInterrupt)) as caught:
        save([Entry("scale", (8,), "float32", block(32), 1.0, None)], GPU_NAME)
    if isinstance(fault, OSError):
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
        assert "the tuning table was not saved (No space left on device)" in str(caught.value)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert looked_up((8,)) == block(16)


@contextlib.contextmanager
def bound_by_modes() -> Iterator[None]:
    """As a user whom the modes of files bind, which root is not."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_read_only_cache_is_read() -> None:
    with tempfile.TemporaryDirectory(prefix="freight-") as place, freight.config(cache_dir=place):
        path = save([Entry("scale", (8,), "float32", block(16), 1.0, None)], GPU_NAME)
        path.chmod(0o444)
        path.parent.chmod(0o555)
        Path(place).chmod(0o555)
        with bound_by_modes():
            with pytest.raises(DiskError, match="was not saved") as caught:
                save([Entry("scale", (8,), "float32", block(32), 1.0, None)], GPU_NAME)
            assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(path))
            _table.forget()
            assert looked_up((8,)) == block(16)
            assert list(path.parent.iterdir()) == [path]
        for folder in (Path(place), path.parent):
            folder.chmod(0o755)


def test_no_place_for_a_cache_is_no_fault_until_saving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with freight.config(cache_dir=tmp_path / "file"):
        assert looked_up() == DEFAULT
        with pytest.raises(DiskError, match="was not saved"):
            save([], GPU_NAME)
    assert ["cannot be read and is ignored" in message for message in caplog.messages] == [True, True]


# ---- declaring ---------------------------------------------------------------------------------------


def test_candidates_are_every_combination() -> None:
    candidates = list(make().candidates())
    assert len(candidates) == 8
    assert {(c["BLOCK"], c["num_warps"]) for c in candidates} == {(b, w) for b in SPACE["BLOCK"] for w in (4, 8)}
    assert all(make().offers(candidate) for candidate in candidates)


def test_what_cannot_be_declared() -> None:
    with pytest.raises(ArgumentError, match=r"'scale': its default \{'BLOCK': 7, 'num_warps': 4\} is not in its space"):
        make(default=block(7))
    with pytest.raises(ArgumentError, match=r"'scale' has the dimensions \('rows',\); got a cell \(8, 8\)"):
        make(cells=(((8, 8), "float32"),))


def test_an_operator_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_table, "_registered", {})
    tunable = register(make())
    with pytest.raises(ArgumentError, match="a tunable operator 'scale' already"):
        register(make())
    assert _table.registered() == {"scale": tunable}
