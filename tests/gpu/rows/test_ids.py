"""Ids that lie outside their table: nothing outside is read or written, and it is said, at once or at the next look."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rows_on_gpu import BOTH_WAYS, COMPARABLE, OTHERS, assert_rows, order, random_ids, random_rows, rows_of, unwritten
from torch import Tensor

import freight
from freight.errors import OutOfRangeError
from freight.kernels._tolerance import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ROWS = 1000
BAD = [ROWS, ROWS + 1, -ROWS - 1, 2**31 - 1, -(2**31), 2**31 + 3, 2**40, 2**63 - 1, -(2**63)]


def said(bad: int, rows: int = ROWS) -> str:
    """What is said of an id, as a pattern."""
    ends = f"ids go from 0 to {rows - 1:,}, or from {-rows:,} to -1."
    return re.escape(f"id {bad} lies outside the table of {rows:,} rows; {ends}")


def least(dtype: torch.dtype) -> Tensor:
    """What the rows of such ids are made of."""
    if dtype.is_complex:
        return torch.full((1,), complex("nan+nanj"), dtype=dtype)
    if dtype.is_floating_point:
        return torch.tensor([float("nan")]).to(dtype)
    return torch.zeros(1, dtype=dtype) if dtype is torch.bool else torch.tensor([torch.iinfo(dtype).min], dtype=dtype)


def with_bad_ones(ids: Tensor, bad: list[int]) -> tuple[Tensor, Tensor]:
    """The ids with bad ones strewn among them, and where they are."""
    mixed, where = ids.clone(), torch.zeros(len(ids), dtype=torch.bool)
    where[torch.arange(len(bad)) * (len(ids) // len(bad)) + 3] = True
    mixed[where] = torch.tensor(bad)
    return mixed, where


# ---- what is read ----------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [*COMPARABLE, *OTHERS], ids=str)
def test_rows_of_bad_ids_are_nan_or_the_least(dtype: torch.dtype, ordered: bool) -> None:
    """Their neighbours are right, and what lies around the rows is as it was."""
    x = freight.unified(random_rows(ROWS, 7, dtype=dtype))
    order(x, ordered)
    ids, bad = with_bad_ones(random_ids(ROWS, 3000), BAD)
    room = unwritten(3256, 7, dtype=dtype)
    freight.gather_rows(x, ids.cuda(), room[128:3128])
    want = rows_of(x.host(), torch.where(bad, 0, ids))
    want.view(torch.uint8)[bad] = least(dtype).repeat(7).view(torch.uint8)
    assert_same_bits(room[128:3128].cpu(), want)
    assert_same_bits(room[:128], unwritten(128, 7, dtype=dtype))
    assert_same_bits(room[3128:], unwritten(128, 7, dtype=dtype))
    with pytest.raises(OutOfRangeError):
        x.check()


@BOTH_WAYS
@pytest.mark.parametrize("bad", BAD)
def test_every_bad_id_is_said(bad: int, ordered: bool) -> None:
    """One alone; the least whole number there is, which a NaN becomes on the GPU, is one too."""
    x = freight.unified(torch.randn(ROWS, 16))
    order(x, ordered)
    rows = x[torch.tensor([5, bad, 6], device="cuda")]
    with pytest.raises(OutOfRangeError, match=said(bad)):
        x.check()
    assert rows[1].isnan().all()
    assert_rows(rows[::2], x.host(), torch.tensor([5, 6]))
    x.check()


@BOTH_WAYS
@pytest.mark.parametrize("width", [1, 64, 602, 30_000])
def test_nothing_beside_the_table_is_read(width: int, ordered: bool) -> None:
    """The table lies in the middle of a larger tensor, and none of the other rows comes to light."""
    mine = torch.full((300, width), 13.0)
    x = freight.unified(mine[100:200], in_place=True)
    order(x, ordered)
    mine[100:200] = torch.randn(100, width).clamp(-5, 5)
    ids, bad = with_bad_ones(random_ids(100, 900), [*range(100, 130), *range(-130, -100)])
    rows = x[ids.cuda()].cpu()
    assert rows[bad].isnan().all()
    assert_same_bits(rows[~bad], rows_of(mine[100:200], ids[~bad]))
    with pytest.raises(OutOfRangeError, match=r"id -?1\d\d lies outside the table of 100 rows"):
        x.check()


WAYS: dict[str, Callable[[freight.UnifiedTensor, Tensor], Tensor]] = {
    "x[ids]": lambda x, ids: x[ids],
    "x[ids], int32": lambda x, ids: x[ids.int()],
    "columns": lambda x, ids: x[ids, 2:9],
    "elements": lambda x, ids: x[ids, 3],
    "a view": lambda x, ids: x[:][ids],
    "gather_rows": lambda x, ids: freight.gather_rows(x, ids),
    "a cast": lambda x, ids: freight.gather_rows(x, ids, dtype=torch.float64),
    "out=": lambda x, ids: freight.gather_rows(x, ids, unwritten(len(ids), 16)),
    "few multiprocessors": lambda x, ids: freight.gather_rows(x, ids, sms=2),
    "several batches": lambda x, ids: torch.cat(freight.gather_rows(x, [ids[:1], ids[1:]])),
    "embedding": lambda x, ids: torch.nn.functional.embedding(ids, x),
    "index_select": lambda x, ids: x.index_select(0, ids),
    "take": lambda x, ids: x.take(torch.where(ids == ROWS, 16 * ROWS, ids)),
    "every other column": lambda x, ids: x[:, ::2][ids],
}


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_rows_says_it(name: str) -> None:
    x = freight.unified(torch.randn(ROWS, 16))
    rows = WAYS[name](x, torch.tensor([5, ROWS, 6], device="cuda"))
    bad, of = (16 * ROWS, 16 * ROWS) if name == "take" else (ROWS, ROWS)
    with pytest.raises(OutOfRangeError, match=said(bad, of)):
        x.check()
    assert rows.view(3, -1).isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["embedding", "index_select"])
def test_negative_ids_are_bad_where_torch_has_none(name: str) -> None:
    x = freight.unified(torch.randn(ROWS, 16))
    rows = WAYS[name](x, torch.tensor([5, -2, 6], device="cuda"))
    with pytest.raises(OutOfRangeError, match="id -2 lies outside the table of 1,000 rows"):
        x.check()
    assert rows[1].isnan().all()
    with pytest.raises(OutOfRangeError, match="id -2 lies outside the table of 1,000 rows"):
        WAYS[name](x, torch.tensor([5, -2, 6]))


def test_a_cast_of_a_bad_row_is_nan() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        x = freight.unified(torch.ones(ROWS, 16).to(dtype))
        rows = freight.gather_rows(x, torch.tensor([5, ROWS], device="cuda"), dtype=torch.float32)
        with pytest.raises(OutOfRangeError):
            x.check()
        assert rows[0].tolist() == [1.0] * 16
        assert rows[1].isnan().all()


def test_a_table_without_rows() -> None:
    x = freight.unified(torch.zeros(0, 4))
    rows = x[torch.tensor([0, 3], device="cuda")]
    with pytest.raises(OutOfRangeError, match="0 rows"):
        x.check()
    assert rows.isnan().all()


# ---- when it is said -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [lambda x: x.stats(), lambda x: x.check(), lambda x: x.close()],
    ids=["stats", "check", "close"],
)
def test_at_latest(look: Callable[[freight.UnifiedTensor], object]) -> None:
    """By those that wait for the GPU, and once."""
    x = freight.unified(torch.randn(ROWS, 16))
    torch.cuda._sleep(100_000_000)
    x[torch.tensor([5, 4711], device="cuda")]
    with pytest.raises(IndexError, match=said(4711)):
        look(x)
    x.close()
    with pytest.raises(RuntimeError, match="was closed"):
        x[torch.tensor([5])]


@pytest.mark.parametrize("name", WAYS)
def test_by_the_next_call_that_sees_it(name: str) -> None:
    """Once; after that, the table goes on as before."""
    x = freight.unified(torch.randn(ROWS, 16))
    good = torch.tensor([5, 6, 7], device="cuda")
    x[torch.tensor([5, -4711], device="cuda")]
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match=said(-4711)):
        WAYS[name](x, good)
    assert not WAYS[name](x, good).isnan().any()
    assert_rows(x[good], x.host(), good)


@pytest.mark.parametrize("name", WAYS)
def test_at_once_where_asked_for(name: str) -> None:
    x = freight.unified(torch.randn(ROWS, 16))
    with freight.config(check_ids=True):
        with pytest.raises(OutOfRangeError):
            WAYS[name](x, torch.tensor([5, ROWS, 6], device="cuda"))
        WAYS[name](x, torch.tensor([5, 7, 6], device="cuda"))
    x.check()


CPU_WAYS = WAYS | {
    "batches": lambda x, ids: freight.gather_rows(x, [ids, ids])[0],
    "a list": lambda x, ids: x[ids.tolist()],
    "an array": lambda x, ids: x[ids.numpy()],
}


@pytest.mark.parametrize("name", CPU_WAYS)
def test_ids_on_the_cpu_are_looked_at_first(name: str) -> None:
    x = freight.unified(torch.randn(ROWS, 16))
    with pytest.raises(OutOfRangeError, match=r"id (1000|16000) lies outside the table of (1,000|16,000) rows"):
        CPU_WAYS[name](x, torch.tensor([5, ROWS, 6]))
    x.check()


def test_what_a_replay_meets_is_said_too() -> None:
    x = freight.unified(torch.randn(ROWS, 16))
    ids = torch.zeros(100, dtype=torch.int64, device="cuda")
    x[ids]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = x[ids]
    ids[50] = 31_337
    graph.replay()
    with pytest.raises(OutOfRangeError, match=said(31_337)):
        x.check()
    assert rows[50].isnan().all()
    ids[50] = 3
    graph.replay()
    x.check()
    assert_rows(rows, x.host(), ids)


# ---- what is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [(), (2,), (slice(1, 3),)], ids=["rows", "elements", "parts of rows"])
def test_nothing_beside_the_table_is_written(part: tuple[int | slice, ...]) -> None:
    mine = torch.full((300, 7), 13.0)
    x = freight.unified(mine[100:200], in_place=True)
    ids, bad = with_bad_ones(torch.randperm(100), [100, -101, 150, -150, 2**62, -(2**63)])
    want = mine.clone()
    values = torch.randn(want[100:200][(ids.clamp(0, 0), *part)].shape)
    want[100:200][(ids[~bad], *part)] = values[~bad]
    x[(ids.cuda(), *part)] = values.cuda()
    with pytest.raises(OutOfRangeError, match=r"lies outside the table of 100 rows"):
        x.check()
    assert_same_bits(mine, want)


@pytest.mark.parametrize("rows_on", ["cpu", "cuda"])
def test_writing_to_a_bad_id_on_the_cpu_raises_at_once(rows_on: str) -> None:
    host = torch.randn(ROWS, 16)
    x = freight.unified(host)
    for bad in (ROWS, -ROWS - 1):
        with pytest.raises(IndexError):
            x[torch.tensor([5, bad])] = torch.zeros(2, 16, device=rows_on)
    x.check()
    assert torch.equal(x.host(), host)


# ---- torch's own indexing --------------------------------------------------------------------------------

TORCHS_OWN = """
import torch, freight
host = torch.arange(24.0).view(6, 4)
x = freight.unified(host)
WAYS = {
    "pairs": lambda x, at: x[at % 3, at],
    "columns": lambda x, at: x[:, at],
    "index_select": lambda x, at: x.index_select(1, at),
    "gather": lambda x, at: x.gather(1, at[None]),
    "rows of columns": lambda x, at: x.T[at],
    "no rows at all": lambda x, at: x[:0, ::2][at],
    "write columns": lambda x, at: x.__setitem__((slice(None), at), 1.0),
    "write pairs": lambda x, at: x.__setitem__((at % 3, at), 1.0),
}
for name, way in WAYS.items():
    for bad in (4, -5, 10**6):
        for device in ("cpu", "cuda"):
            try:
                way(x, torch.tensor([1, bad], device=device))
                x.check()
                print(name, bad, device, "was taken")
            except (IndexError, RuntimeError) as error:
                if "device-side" in str(error) or "CUDA error" in str(error):
                    print(name, bad, device, "ended the context")
                    raise SystemExit
# a negative index where torch has none
for name in ("index_select", "gather"):
    for device in ("cpu", "cuda"):
        try:
            WAYS[name](x, torch.tensor([1, -2], device=device))
            x.check()
            print(name, "negative", device, "was taken")
        except (IndexError, RuntimeError) as error:
            if "device-side" in str(error) or "CUDA error" in str(error):
                print(name, "negative", device, "ended the context")
                raise SystemExit
torch.cuda.synchronize()
assert torch.equal(x[torch.arange(6, device="cuda")].cpu(), host)
print("the GPU still works")
"""


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: what it tries may end the GPU's context."""
    names = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "FREIGHT_CACHE_DIR": str(folder)} | environment
    run = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(run, env=names, capture_output=True, text=True, timeout=120, check=False)


def test_torchs_own_indexing_does_not_end_the_context(tmp_path: Path) -> None:
    """torch's kernels stop for a bad index, and with them all that this process has on the GPU."""
    done = python(TORCHS_OWN, tmp_path)
    assert done.stdout.splitlines() == ["the GPU still works"], done.stderr


AT_EXIT = """
import torch, freight
x = freight.unified(torch.randn(1000, 16))
y = freight.unified(torch.randn(1000, 16))
torch.cuda._sleep(100_000_000)
x[torch.tensor([5, 4711], device="cuda")]
print("done")
"""


def test_at_exit(tmp_path: Path) -> None:
    done = python(AT_EXIT, tmp_path)
    assert done.stdout.splitlines() == ["done"]
    assert "id 4711 lies outside the table of 1,000 rows; ids go from 0 to 999, or from -1,000 to -1." in done.stderr
    assert done.stderr.count("Traceback") == 1
