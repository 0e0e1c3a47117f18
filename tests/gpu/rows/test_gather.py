"""The gather by a GPU, against torch on the CPU, bit for bit: every dtype, width, table, id and door."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rows_on_gpu import (
    BOTH_WAYS,
    COMPARABLE,
    OTHERS,
    assert_rows,
    order,
    random_ids,
    random_rows,
    rows_of,
    table,
    unwritten,
)
from torch import Tensor

import freight
from freight._units import GiB, KiB, MiB
from freight.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from freight.kernels._tolerance import assert_same_bits

WIDTHS = [1, 3, 16, 64, 100, 400, 1024, 293 * 4, 602 * 4, 4096, 50_003, 100_000]  # each of them is compiled for


@pytest.fixture(autouse=True)
def _poison(request: pytest.FixtureRequest) -> None:
    """What is left unwritten is NaN or the largest integer; but where torch cannot fill such a dtype."""
    if "dtype" not in request.fixturenames:
        request.getfixturevalue("poisoned_memory")


@pytest.fixture(scope="module")
def ample() -> Iterator[freight.UnifiedTensor]:
    """A little over 2 GiB of words, in which no two rows are equal."""
    count = (2 * GiB + MiB) // 8
    x = freight.UnifiedTensor.empty((count,), torch.int64)
    x.copy_(torch.arange(count, device="cuda") * -0x61C8864680B583EB)
    yield x
    x.close()


def cut(x: freight.UnifiedTensor, row_bytes: int) -> freight.UnifiedTensor:
    """The table's bytes as rows of so many."""
    rows = x._table.nbytes // row_bytes
    return x.view(torch.uint8)[: rows * row_bytes].view(rows, row_bytes)


# ---- dtypes, widths, tables ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@BOTH_WAYS
@pytest.mark.parametrize("dtype", [*COMPARABLE, *OTHERS], ids=str)
def test_every_dtype(dtype: torch.dtype, ordered: bool) -> None:
    """Seven elements a row, so that a byte, 2, 4, 8 and 16 of them are the widest load."""
    x = table(331, 7, ordered=ordered, dtype=dtype)
    ids = random_ids(331, 5001)
    out = unwritten(5001, 7, dtype=dtype)
    assert freight.gather_rows(x, ids.cuda(), out) is out
    assert_rows(out, x.host(), ids)
    assert_rows(x[ids.cuda()], x.host(), ids)
    assert_rows(x[ids], x.host(), ids)


@pytest.mark.parametrize("row_bytes", WIDTHS)
def test_rows_of_1_kib_and_less_come_as_they_are_asked_for(row_bytes: int) -> None:
    x = freight.unified(random_rows(max(1, KiB // row_bytes), row_bytes, dtype=torch.uint8))
    count = min(2**19, 64 * MiB // row_bytes)
    assert x._table.copiers(row_bytes, count) is None
    ids = random_ids(len(x), count)
    assert_rows(x[ids.cuda()], x.host(), ids)


@BOTH_WAYS
@pytest.mark.parametrize("row_bytes", WIDTHS)
def test_rows_of_2_gib(ample: freight.UnifiedTensor, row_bytes: int, ordered: bool) -> None:
    x = cut(ample, row_bytes)
    order(x, ordered)
    count = min(2**19, 64 * MiB // row_bytes) - 1
    ids = random_ids(len(x), count)
    assert torch.equal(x[ids.cuda()], rows_of(x.host(), ids).cuda())


def test_ids_are_ordered_where_that_pays(ample: freight.UnifiedTensor) -> None:
    x = freight.unified(ample.host()[: 2 * GiB // 8].view(-1, 8), in_place=True)
    assert x._table.copiers(64, 2**19) is not None
    assert x._table.copiers(64, 100) is None
    assert freight.unified(torch.zeros(16, 16))._table.copiers(64, 2**19) is None
    ids = random_ids(len(x), 2**19)
    assert_rows(x[ids.cuda()], x.host(), ids)
    x.close()


@BOTH_WAYS
def test_rows_past_31_bits(ample: freight.UnifiedTensor, ordered: bool) -> None:
    """More rows than 2**31, of a byte each; those behind it are asked for by both of their names."""
    x = ample.view(torch.uint8)
    order(x, ordered)
    assert len(x) > 2**31
    behind = torch.arange(2**31 - 5, len(x))
    ids = torch.cat([behind, behind - len(x), random_ids(len(x), 2**19)])
    assert torch.equal(x[ids.cuda()], rows_of(x.host(), ids).cuda())


@BOTH_WAYS
def test_more_than_31_bits_of_rows(ample: freight.UnifiedTensor, ordered: bool) -> None:
    """The rows of one call pass 2**31 bytes."""
    x = cut(ample, 4096)
    order(x, ordered)
    ids = torch.randint(len(x), (2**19 + 77,), device="cuda")
    rows = x[ids]
    assert rows.nbytes > 2**31
    on_gpu = x.to("cuda")
    assert all(torch.equal(got, on_gpu[at]) for got, at in zip(rows.split(2**16), ids.split(2**16), strict=True))


@BOTH_WAYS
@pytest.mark.parametrize("row", [(), (1,), (1, 1), (3, 5, 2), (0,), (2, 0, 3)], ids=str)
def test_rows_of_any_rank(row: tuple[int, ...], ordered: bool) -> None:
    host = torch.randn(97, *row)
    x = freight.unified(host)
    order(x, ordered)
    for shape in ((11,), (3, 4, 1), (0,), (2, 0)):
        ids = torch.randint(-97, 97, shape)
        assert_rows(x[ids.cuda()], host, ids)
    assert_rows(x[torch.tensor(-2, device="cuda")], host, torch.tensor(-2))


def test_no_rows_and_no_ids() -> None:
    x = freight.unified(torch.zeros(0, 4))
    assert x[torch.zeros(0, dtype=torch.int64, device="cuda")].shape == (0, 4)
    assert x[[]].shape == (0, 4)
    y = freight.unified(torch.zeros(3, 4))
    for ids in (torch.zeros(0, dtype=torch.int64), torch.zeros(2, 0, 5, dtype=torch.int32), []):
        assert y[ids].is_cuda
        assert y[ids].numel() == 0


def test_views() -> None:
    """Rows that begin anywhere and lie any distance apart; the last ones do not lie in one piece."""
    host = random_rows(500, 67)
    x = freight.unified(host)
    ids = random_ids(100, 2000)
    parts = [np.s_[3:], np.s_[::4], np.s_[:, 5:], np.s_[2:, 1:66], np.s_[:, 3], np.s_[1::3, :4], np.s_[:, ::2]]
    for at, part in enumerate(parts):
        view, plain = x[part], host[part]
        order(view, at % 2 == 0)
        assert_rows(view[ids.cuda()], plain, ids)
    narrow = random_ids(67, 50)
    assert_rows(x.T[narrow.cuda()], host.T, narrow)
    assert x.T[torch.zeros(0, dtype=torch.int64, device="cuda")].shape == (0, 500)
    for rest in ((3,), (slice(5, 40),), (None, slice(None, None, 2)), (Ellipsis, 66)):
        assert_same_bits(x[(ids.cuda(), *rest)].cpu(), host[(ids, *rest)])


def doors(folder: Path) -> Iterator[tuple[str, Tensor, freight.UnifiedTensor]]:
    """Every way to make a table, with what it was made of."""
    host = random_rows(300, 25)
    yield "a copy", host, freight.unified(host)
    yield "a numpy array", host, freight.unified(host.numpy())
    yield "columns of a tensor", host[:, 3:20], freight.unified(host[:, 3:20])
    mine = host.clone()
    yield "in place", mine, freight.unified(mine, in_place=True)
    yield "in place, behind the beginning", mine[7:], freight.unified(mine[7:], in_place=True)
    yield "in place, columns", mine[:, 3:20], freight.unified(mine[:, 3:20], in_place=True)
    array = host.numpy().copy()
    yield "in place, a numpy array", host, freight.unified(array, in_place=True)
    pinned = host.pin_memory()
    yield "in place, pinned by torch", host, freight.unified(pinned, in_place=True)
    filled = freight.UnifiedTensor.empty((300, 25))
    filled[:100], filled[100:] = host[:100], host[100:].cuda()
    yield "empty", host, filled
    np.save(folder / "rows.npy", host.numpy())
    yield "a .npy file", host, freight.UnifiedTensor.from_file(folder / "rows.npy")
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"rows": host}, folder / "rows.safetensors")
    yield "a .safetensors file", host, freight.UnifiedTensor.from_file(folder / "rows.safetensors")
    yield "a device by name", host, freight.unified(host, device="cuda:0")


def test_every_door(tmp_path: Path) -> None:
    for how, host, x in doors(tmp_path):
        ids = random_ids(len(host), 1000)
        assert x.compute_device == torch.device("cuda", torch.cuda.current_device()), how
        assert torch.equal(x[ids.cuda()].cpu().view(torch.int32), host[ids].view(torch.int32)), how


def test_a_table_on_the_cpu_stays_there() -> None:
    host = torch.randn(5, 3)
    assert torch.equal(freight.unified(host, device="cpu")[torch.tensor([4, 0])], host[[4, 0]])
    assert torch.equal(freight.gather_rows(host, torch.tensor([4, 0], device="cuda")), host[[4, 0]])


@BOTH_WAYS
def test_a_table_in_gpu_memory(ordered: bool) -> None:
    """Rows land where the table is; what is on the GPU is not for the CPU to order."""
    host, ids = random_rows(1000, 33), random_ids(1000, 3000, torch.int32)
    assert_rows(freight.gather_rows(host.cuda(), ids.cuda()), host, ids)
    assert_rows(freight.gather_rows(host.cuda(), ids), host, ids)


# ---- ids -------------------------------------------------------------------------------------------------


def some_ids(rows: int) -> dict[str, Tensor]:
    """Ids as they come in life, 2**19 of each kind."""
    n = 2**19
    uniform = random_ids(rows, n)
    hubs = torch.where(torch.rand(n) < 0.9, torch.randint(3, (n,)), uniform)
    return {
        "uniform": uniform,
        "by degree": (torch.rand(n).pow(4) * rows).long(),
        "hubs": hubs,
        "one and the same": torch.full((n,), rows - 1),
        "sorted": uniform.remainder(rows).sort().values,
        "backwards": torch.arange(n - 1, -1, -1) % rows,
        "neighbours": torch.arange(rows - n, rows) if rows > n else torch.arange(n) % rows,
        "few": uniform[:37],
    }


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_of_every_kind(ample: freight.UnifiedTensor, dtype: torch.dtype, ordered: bool) -> None:
    small = table(16, 16, ordered=ordered)
    large = cut(ample, 64)
    order(large, ordered)
    for x in (small, large):
        for kind, ids in some_ids(len(x)).items():
            got, want = x[ids.to("cuda", dtype)], rows_of(x.host(), ids).cuda()
            assert torch.equal(got.view(torch.int32), want.view(torch.int32)), kind


@BOTH_WAYS
def test_ids_from_everywhere(ordered: bool) -> None:
    """On either device, page-locked, strided, repeated without memory of their own, in lists and arrays, unified."""
    x = table(700, 12, ordered=ordered)
    ids = random_ids(700, 2048)
    host, on_gpu = x.host(), ids.cuda()
    for dtype in (torch.int64, torch.int32, torch.int16):
        assert_rows(x[ids.to(dtype)], host, ids)
        assert_rows(x[on_gpu.to(dtype)], host, ids)
    assert_rows(x[ids.pin_memory()], host, ids)
    assert_rows(x[on_gpu[1:]], host, ids[1:])
    assert_rows(x[on_gpu.int()[3:]], host, ids[3:])
    assert_rows(x[on_gpu[::3]], host, ids[::3])
    assert_rows(x[on_gpu.view(32, 64).T], host, ids.view(32, 64).T)
    assert_rows(x[on_gpu[5].expand(4, 7)], host, ids[5].expand(4, 7))
    assert_rows(x[ids.tolist()], host, ids)
    assert_rows(x[ids.numpy()], host, ids)
    assert_rows(x[freight.unified(ids)], host, ids)
    mask = torch.rand(700) < 0.3
    for some in (mask, mask.cuda(), mask.numpy(), mask.tolist()):
        assert_rows(x[some], host, mask.nonzero().view(-1))


@BOTH_WAYS
def test_what_torch_calls_a_gather(ordered: bool) -> None:
    x = table(700, 12, ordered=ordered)
    host, ids = x.host(), torch.randint(700, (9, 5))
    for given in (ids, ids.cuda(), ids.int().cuda()):
        assert_rows(torch.nn.functional.embedding(given, x), host, ids)
        assert_rows(x.index_select(0, given.view(-1)), host, ids.view(-1))
        assert_rows(torch.index_select(x, dim=0, index=given.view(-1)), host, ids.view(-1))
    places = torch.randint(-8400, 8400, (9, 5))
    for given in (places, places.cuda()):
        assert_same_bits(x.take(given).cpu(), host.view(torch.int32).take(places).view(torch.float32))


# ---- what gather_rows adds -------------------------------------------------------------------------------


def numbers(dtype: torch.dtype) -> Tensor:
    """Rows that are numbers, some at the ends of what `dtype` has; a NaN has no payload to compare after a cast."""
    values = torch.randn(400, 24) * 100
    values[0], values[1, 0] = 0.0, -0.0
    if dtype is torch.float32:
        values[2] = torch.tensor([1e-45, 1e38, 65519.0, 65520.0]).repeat(6)
    return values.to(dtype)


@pytest.mark.parametrize(
    ("source", "to"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.float32),
        (torch.float8_e4m3fnuz, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.int32, torch.float32),
        (torch.bool, torch.float32),
        (torch.float32, torch.complex64),
    ],
    ids=str,
)
def test_cast_on_the_way(source: torch.dtype, to: torch.dtype) -> None:
    host = numbers(source)
    x = freight.unified(host)
    order(x, source is torch.bfloat16)  # one for all: each of them is compiled for
    ids = random_ids(400, 3001)
    want = rows_of(host, ids).to(to)
    got = freight.gather_rows(x, ids.cuda(), dtype=to)
    assert_same_bits(got.cpu(), want)
    out = unwritten(3001, 24, dtype=to)
    assert freight.gather_rows(x, ids.cuda(), out=out) is out
    assert_same_bits(out.cpu(), want)


@BOTH_WAYS
def test_several_batches_in_one_call(ordered: bool) -> None:
    x = table(5000, 16, ordered=ordered)
    shapes = [(3000,), (0,), (7, 11), (1,), (2, 0)]
    batches = [torch.randint(-5000, 5000, shape) for shape in shapes]
    mixed = [batch.cuda().int() if at % 2 else batch for at, batch in enumerate(batches)]
    for given in ([batch.cuda() for batch in batches], mixed, tuple(mixed)):
        parts = freight.gather_rows(x, given)
        assert isinstance(parts, tuple)
        assert len(parts) == len(batches)
        for rows, ids in zip(parts, batches, strict=True):
            assert_rows(rows, x.host(), ids)
    assert freight.gather_rows(x, []) == ()
    [halves] = freight.gather_rows(x, [batches[0].cuda()], dtype=torch.float16)
    assert halves.dtype is torch.float16


@BOTH_WAYS
def test_out_may_lie_anywhere(ordered: bool) -> None:
    """At any address and in strides; what lies around it stays as it was."""
    x = table(900, 7, ordered=ordered)
    ids = random_ids(900, 500)
    want = rows_of(x.host(), ids)
    for start in (0, 1, 2, 3, 4, 32):
        room = unwritten(4000)
        out = room[start : start + 3500].view(500, 7)
        freight.gather_rows(x, ids.cuda(), out)
        assert_same_bits(out.cpu(), want)
        assert_same_bits(room[:start], unwritten(start))
        assert_same_bits(room[start + 3500 :], unwritten(500 - start))
    room = unwritten(500, 10)
    freight.gather_rows(x, ids.cuda(), room[:, 2:9])
    assert_same_bits(room[:, 2:9].cpu(), want)
    assert_same_bits(room[:, [0, 1, 9]], unwritten(500, 3))
    transposed = unwritten(7, 500).T
    assert_same_bits(freight.gather_rows(x, ids.cuda(), transposed).cpu(), want)


def test_out_that_does_not_fit() -> None:
    x, ids = freight.unified(torch.zeros(9, 4)), torch.zeros(3, dtype=torch.int64, device="cuda")
    for out in (torch.empty(3, 5, device="cuda"), torch.empty(3, 4), torch.empty(4, 4, device="cuda")):
        with pytest.raises(ArgumentError, match=r"out must be torch.float32 of shape \(3, 4\) on cuda:0; got"):
            freight.gather_rows(x, ids, out)
    with pytest.raises(ArgumentError, match=r"out must be torch.float16 .*got torch.float32"):
        freight.gather_rows(x, ids, torch.empty(3, 4, device="cuda"), torch.float16)
    with pytest.raises(ArgumentError, match="out takes the rows of one batch"):
        freight.gather_rows(x, [ids], torch.empty(3, 4, device="cuda"))


def test_what_cannot_be_gathered() -> None:
    x = freight.unified(torch.zeros(9, 4))
    for ids in (torch.zeros(3, device="cuda"), torch.zeros(3, dtype=torch.bool, device="cuda")):
        with pytest.raises(ArgumentTypeError, match="ids must be"):
            freight.gather_rows(x, ids)
    with pytest.raises(UnsupportedError, match="no gradient for its table"):
        freight.gather_rows(torch.zeros(3, 4, device="cuda", requires_grad=True), torch.tensor([0], device="cuda"))


@BOTH_WAYS
@pytest.mark.parametrize("sms", [1, 3, 10_000])
def test_few_multiprocessors(sms: int, ordered: bool) -> None:
    x = table(20_000, 25, ordered=ordered)
    ids = random_ids(20_000, 50_001)
    assert_rows(freight.gather_rows(x, ids.cuda(), sms=sms), x.host(), ids)
