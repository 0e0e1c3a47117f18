"""Hot rows: chosen, served from GPU memory by the same kernel, counted, and never other than the table says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rows_on_gpu import BOTH_WAYS, LONG, assert_rows, never_waiting, order, random_ids, random_rows, rows_of
from torch import Tensor

import freight
from freight._units import KiB, MiB
from freight.errors import OutOfRangeError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROWS = 5000
HOT = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))[:700]


def cached(width: int, *, ordered: bool = False, dtype: torch.dtype = torch.float32) -> freight.UnifiedTensor:
    """A table of ROWS, of which 700 also lie in GPU memory."""
    x = freight.unified(random_rows(ROWS, width, dtype=dtype), cache=len(HOT), hot_ids=HOT)
    order(x, ordered)
    return x


def in_cache(ids: Tensor) -> int:
    return int(torch.isin(ids.remainder(ROWS), HOT).sum())


# ---- the same rows -----------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("width", [1, 16, 25, 602, 2500])
def test_the_same_rows(width: int, ordered: bool) -> None:
    x = cached(width, ordered=ordered)
    for ids in (random_ids(ROWS, 3001), HOT[torch.randint(700, (3001,))], torch.full((3001,), int(HOT[5]))):
        assert_rows(x[ids.cuda()], x.host(), ids)
        if width == 16:
            assert_rows(x[ids.int().cuda()], x.host(), ids)


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex128], ids=str)
def test_the_same_rows_of_other_dtypes(dtype: torch.dtype, ordered: bool) -> None:
    x = cached(7, ordered=ordered, dtype=dtype)
    ids = random_ids(ROWS, 3001)
    assert_rows(x[ids.cuda()], x.host(), ids)


@BOTH_WAYS
def test_a_cast_on_the_way(ordered: bool) -> None:
    host = torch.randn(ROWS, 24).bfloat16()
    x = freight.unified(host, cache=700, hot_ids=HOT)
    order(x, ordered)
    ids = random_ids(ROWS, 3001)
    assert_rows(freight.gather_rows(x, ids.cuda(), dtype=torch.float32), host.float(), ids)


def test_a_view_is_read_from_the_host() -> None:
    x = cached(16)
    ids = random_ids(1000, 500)
    for view, plain in ((x[2000:3000], x.host()[2000:3000]), (x[:, 3:9], x.host()[:, 3:9]), (x.T, x.host().T)):
        some = ids % len(plain)
        assert_rows(view[some.cuda()], plain, some)
    assert x.stats().hot_rows == 0


@BOTH_WAYS
def test_bad_ids_beside_hot_ones(ordered: bool) -> None:
    x = cached(16, ordered=ordered)
    ids = torch.stack([HOT[:600], torch.full((600,), ROWS), HOT[:600] - ROWS]).view(-1)
    rows = x[ids.cuda()].cpu().view(3, 600, 16)
    with pytest.raises(OutOfRangeError, match=r"id 5000 lies outside the table of 5,000 rows"):
        x.check()
    assert rows[1].isnan().all()
    want = rows_of(x.host(), HOT[:600])
    for got in (rows[0], rows[2]):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


# ---- which rows --------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """What a neighbour loader gives."""

    n_id: Tensor


def loader(of: Callable[[Tensor], Any]) -> Iterator[Any]:
    """Asks for row 7 five times, row 2 three times, rows 0 and 4999 once, and no other."""
    for ids in ([7, 2, 7], [7, 0, 2], [7, 4999, 2, 7]):
        yield of(torch.tensor(ids))


CHOICES: dict[str, tuple[int, Callable[[], dict[str, Any]], list[int]]] = {
    "ids": (3, lambda: {"hot_ids": torch.tensor([9, 4, 4999])}, [4, 9, 4999]),
    "more ids than there is room for": (2, lambda: {"hot_ids": [9, 4, 4999]}, [4, 9]),
    "ids twice, on the GPU": (3, lambda: {"hot_ids": torch.tensor([9, 4, 4], device="cuda")}, [4, 9]),
    "whole scores": (3, lambda: {"hot": torch.arange(ROWS)}, [4997, 4998, 4999]),
    "scores on the GPU": (3, lambda: {"hot": torch.arange(ROWS, device="cuda").flip(0).float()}, [0, 1, 2]),
    "one score": (4, lambda: {"hot": torch.nn.functional.one_hot(torch.tensor(8), ROWS)}, [8]),
    "a loader": (2, lambda: {"hot": loader(lambda ids: ids)}, [2, 7]),
    "a loader of GPU tensors": (2, lambda: {"hot": loader(Tensor.cuda)}, [2, 7]),
    "a loader of batches": (9, lambda: {"hot": loader(Batch)}, [0, 2, 7, 4999]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_which_rows_are_hot(name: str) -> None:
    cache, how, hot = CHOICES[name]
    x = freight.unified(torch.randn(ROWS, 16), cache=cache, **how())
    x[torch.arange(ROWS, device="cuda")]
    stats = x.stats()
    assert (stats.cached_rows, stats.hot_rows) == (len(hot), len(hot))
    x[torch.tensor(hot, device="cuda")]
    assert x.stats().hot_rows == 2 * len(hot)


@pytest.mark.parametrize("cache", ["32KiB", "1MiB", "8MiB"])
def test_bytes_of_gpu_memory_are_kept_to(cache: str) -> None:
    host = torch.randn(20_000, 64)
    freight.unified(host[:10], cache=1, hot_ids=[0])
    allowed = {"32KiB": 32 * KiB, "1MiB": MiB, "8MiB": 8 * MiB}[cache]
    before = torch.cuda.memory_allocated()
    x = freight.unified(host, cache=cache, hot=torch.arange(20_000))
    taken = torch.cuda.memory_allocated() - before
    stats = x.stats()
    assert 0 < stats.cached_bytes <= min(allowed, taken)
    assert taken < allowed + 4 * KiB  # the allocator rounds up
    assert stats.cached_rows > 0.8 * min(20_000, (allowed - 5000) / 264)
    ids = random_ids(20_000, 5000)
    assert_rows(x[ids.cuda()], host, ids)


def test_none_and_all() -> None:
    host, ids = torch.randn(ROWS, 16), random_ids(ROWS, 4000)
    for cache, share in ((0, 0), (ROWS, 1), (10 * ROWS, 1)):
        x = freight.unified(host, cache=cache, hot=torch.arange(ROWS) + 1)
        assert_rows(x[ids.cuda()], host, ids)
        assert x.stats().hot_rows == share * len(ids)


def test_another_choice_takes_the_place_of_the_first() -> None:
    x = cached(16)
    ids = random_ids(ROWS, 4000)
    x[ids.cuda()]
    first = x.stats()
    assert freight.unified(x, cache=50, hot_ids=torch.arange(50)) is x
    assert_rows(x[ids.cuda()], x.host(), ids)
    stats = x.stats()
    assert (first.cached_rows, stats.cached_rows) == (700, 50)
    assert first.cached_bytes > stats.cached_bytes > 0


# ---- what was served ---------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("width", [4, 20_000])
def test_stats_count_right(width: int, ordered: bool) -> None:
    """Also where a row takes several tiles of the kernel."""
    hot = torch.randperm(400)[:60]
    x = freight.unified(torch.randn(400, width), cache=60, hot_ids=hot)
    order(x, ordered)
    asked, served = 0, 0
    for count in (0, 1, 100, 2**10 + 3):
        ids = random_ids(400, count)
        x[ids.cuda()]
        freight.gather_rows(x, ids.cuda(), sms=2)
        asked, served = asked + 2 * count, served + 2 * int(torch.isin(ids.remainder(400), hot).sum())
    stats = x.stats()
    assert (stats.rows, stats.hot_rows) == (asked, served)
    assert stats.hot_bytes == served * width * 4
    assert stats.host_bytes == (asked - served) * width * 4
    assert (stats.table_bytes, stats.cached_rows) == (400 * width * 4, 60)
    assert stats.cached_bytes >= 60 * width * 4


# ---- writes ------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "x[ids] = rows": lambda x, ids, rows: x.__setitem__(ids, rows),
    "x[ids, 2:5] = parts": lambda x, ids, rows: x.__setitem__((ids, slice(2, 5)), rows[:, 2:5]),
    "x[ids, 3] = elements": lambda x, ids, rows: x.__setitem__((ids, 3), rows[:, 3]),
    "x[at] = row": lambda x, ids, rows: x.__setitem__(int(HOT[0]), rows[0]),
    "x[:, 1] = elements": lambda x, ids, rows: x.__setitem__((slice(None), 1), rows[:1, 0]),
    "x[100:].add_": lambda x, ids, rows: x[100:].add_(1),
    "x.mul_": lambda x, ids, rows: x.mul_(2),
    "index_copy_": lambda x, ids, rows: x.index_copy_(0, ids, rows),
    "out=": lambda x, ids, rows: torch.mul(x, 2, out=x),
}


@BOTH_WAYS
@pytest.mark.parametrize("name", WRITES)
def test_writes_by_the_gpu_reach_host_and_cached_rows(name: str, ordered: bool) -> None:
    """Late, with nobody saying `refresh()`."""
    plain = torch.randn(ROWS, 16)
    x, warm = (freight.unified(plain, cache=700, hot_ids=HOT) for _ in range(2))
    order(x, ordered)
    ids, rows = torch.randperm(ROWS)[:900], torch.randn(900, 16)
    everything = torch.arange(ROWS, device="cuda")
    WRITES[name](warm, ids.cuda(), rows.cuda())
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG // 10)
    WRITES[name](x, ids.cuda(), rows.cuda())
    got = x[everything]
    WRITES[name](plain, ids, rows)
    assert_rows(got, plain, everything)
    assert torch.equal(x.host(), plain)
    assert x.stats().hot_rows == 700


def test_an_id_twice_leaves_one_of_its_rows() -> None:
    """Which one is not said; after `refresh()` the copies agree."""
    x = cached(16)
    at = int(HOT[0])
    x[torch.full((64,), at, device="cuda")] = torch.arange(64.0, device="cuda")[:, None].expand(64, 16)
    x.refresh()
    row = x[torch.tensor([at], device="cuda")].cpu()
    assert row.unique().numel() == 1
    assert torch.equal(row[0], x.host()[at])


def test_writes_by_the_cpu() -> None:
    """Seen at once where nothing is cached, and where the tensor itself was written to; else after `refresh()`."""
    x = cached(16)
    everything = torch.arange(ROWS, device="cuda")
    cold = torch.ones(ROWS, dtype=torch.bool)
    cold[HOT] = False
    host = x.host()
    host.copy_(torch.randn(ROWS, 16))
    assert torch.equal(x[everything].cpu()[cold], host[cold])
    x.refresh()
    assert_rows(x[everything], host, everything)
    x[:2500] = torch.randn(2500, 16)
    x[int(HOT[1])] = 5.0
    x[:, 3] = 2.0
    x += torch.randn(ROWS, 16)
    assert_rows(x[everything], x.host(), everything)


# ---- no surprise -------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_nobody_waits(ordered: bool) -> None:
    x = cached(16, ordered=ordered)
    asked = [random_ids(ROWS, 3000) for _ in range(6)]
    on_gpu, rows = [ids.cuda() for ids in asked], torch.randn(3000, 16, device="cuda")
    once = torch.randperm(ROWS, device="cuda")[:3000]
    held = [x[ids] for ids in on_gpu]
    x[once] = rows
    x.refresh()
    del held
    with never_waiting():
        got = [x[ids] for ids in on_gpu]
        x[once] = rows * 2
        x.refresh()
        got.append(x[once])
    assert torch.equal(got.pop(), rows * 2)
    x[once] = rows
    for ids, found in zip(asked, got, strict=True):
        assert_rows(found, x.host(), ids)


def test_captured_in_a_graph() -> None:
    x = cached(16)
    ids = random_ids(ROWS, 2000).cuda()
    x[ids]
    served = x.stats().hot_rows
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = x[ids]
    for _ in range(3):
        new = random_ids(ROWS, 2000)
        ids.copy_(new)
        graph.replay()
        assert_rows(rows, x.host(), new)
        served += in_cache(new)
    assert x.stats().hot_rows == served


def test_on_another_stream() -> None:
    x = cached(16)
    ids = random_ids(ROWS, 3000)
    late = torch.zeros(3000, dtype=torch.int64, device="cuda")
    on_gpu = ids.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x[late]
        stream.synchronize()
        torch.cuda._sleep(LONG)
        late.copy_(on_gpu)
        rows = x[late]
        assert not stream.query()
    stream.synchronize()
    assert_rows(rows, x.host(), ids)
