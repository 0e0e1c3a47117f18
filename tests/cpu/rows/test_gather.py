"""The kernel that reads rows (interpreted without a GPU) against the reference; the operator; its public function."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows_on_cpu import BARE, POOR, WHOLE, random_rows, rows_of, unified
from torch import Tensor

import freight
from freight.errors import ArgumentError, ArgumentTypeError, OutOfRangeError, UnsupportedError
from freight.kernels._launch import interpreted
from freight.kernels._tolerance import assert_same_bits
from freight.rows import _gather, _op
from freight.rows._gather import Reader, fill_bytes, launch, reference
from freight.rows._hot import HotRows, build_map

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NONE = -(2**63)  # what the words of a fault hold before there is one
UGLY_ROWS = st.sampled_from([1, 2, 3, 7, 12, 16, 100, 128, 257, 400, 602 * 4])  # bytes
SMALL = {"TILE": 64, "num_warps": 4, "programs_per_sm": 1}  # many tiles, several to a row, shared by two programs
WIDENED = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
NOT_COMPARED = ("test_autograd_registration", "test_faketensor")  # what opcheck can do without comparing elements

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@dataclass
class Case:
    """A table of bytes somewhere in memory, ids, and a place for their rows between two walls."""

    table: Tensor
    ids: Tensor
    out: Tensor
    walls: Tensor
    fault: Tensor
    hot: HotRows | None

    @classmethod
    def of(
        cls,
        N: int,
        n: int,
        row: int,
        *,
        gap: int = 0,
        skew: int = 0,
        out_skew: int = 0,
        ids_dtype: torch.dtype = torch.int64,
        hot_share: float | None = None,
    ) -> "Case":
        """`gap` bytes lie between rows, `skew` before the first; now and then an id lies outside the table."""
        memory = torch.randint(256, (skew + N * (row + gap),), dtype=torch.uint8, device=DEVICE)
        table = memory[skew:].as_strided((N, row), (row + gap, 1))
        ids = torch.randint(-N - 1, N + 1, (n,), device=DEVICE).to(ids_dtype)
        walls = torch.full((64 + out_skew + n * row + 64,), 0xA5, dtype=torch.uint8, device=DEVICE)
        out = walls[64 + out_skew :][: n * row].view(n, row)
        fault = torch.full((2,), NONE, device=DEVICE)
        return cls(table, ids, out, walls, fault, None if hot_share is None else hot_rows(table, hot_share))

    def run(self, *, wrap: bool = True, **how: Any) -> None:
        """Gather, and look at all that it may have touched."""
        launch(self.table, self.ids, self.out, hot=self.hot, fault=self.fault, wrap=wrap, **how)
        want, bad = reference(self.table, self.ids, torch.uint8, wrap=wrap)
        N, rows = len(self.table), self.ids.long()
        rows = torch.where(rows < 0, rows + N, rows) if wrap else rows
        if self.hot is not None:
            slot = torch.searchsorted(self.hot.ids, rows).clamp(max=len(self.hot.ids) - 1)
            is_hot = (self.hot.ids[slot] == rows) & ~bad
            want[is_hot] = self.hot.rows[slot[is_hot]]
            assert self.hot.served.tolist() == [int(is_hot.sum())]
        assert_same_bits(self.out, want)
        start = self.out.storage_offset()
        assert (self.walls[:start] == 0xA5).all()
        assert (self.walls[start + self.out.numel() :] == 0xA5).all()
        if bad.any() and self.table.shape[1]:
            assert self.fault[0] in self.ids[bad]
            assert self.fault[1] == N
        else:
            assert self.fault.tolist() == [NONE, NONE]


def hot_rows(table: Tensor, share: float) -> HotRows | None:
    """Some rows' copies, made to differ from the table, so that it is seen which of the two was read."""
    ids = torch.randperm(len(table), device=DEVICE)[: round(share * len(table))].sort().values
    if not len(ids):
        return None
    rows = table[ids] ^ 0xFF
    return HotRows(rows, build_map(ids, len(table)), ids, torch.zeros(1, dtype=torch.int64, device=DEVICE))


# ---- the reference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_reference_is_what_torch_indexes(dtype: torch.dtype) -> None:
    table, ids = random_rows(7, 3, dtype=dtype), torch.tensor([[0, 6, -1], [-7, 3, 3]])
    rows, bad = reference(table, ids, dtype, wrap=True)
    assert_same_bits(rows, table[ids])
    assert not bad.any()


def test_reference_of_ids_outside() -> None:
    table = torch.arange(6.0).view(3, 2)
    rows, bad = reference(table, torch.tensor([2, 3, -3, -4]), torch.float32, wrap=True)
    assert bad.tolist() == [False, True, False, True]
    assert torch.equal(rows[~bad], table[[2, 0]])
    assert rows[bad].isnan().all()
    _, bad = reference(table, torch.tensor([2, -1]), torch.float32, wrap=False)
    assert bad.tolist() == [False, True]


@pytest.mark.parametrize(("N", "row"), [(0, 2), (3, 0), (0, 0)])
def test_reference_of_nothing(N: int, row: int) -> None:
    rows, bad = reference(torch.ones(N, row), torch.tensor([[0], [9]]), torch.float32, wrap=True)
    assert rows.shape == (2, 1, row)
    assert bad.tolist() == [[N == 0], [True]]
    assert reference(torch.ones(N, row), torch.zeros(0, dtype=torch.int64), torch.float32, wrap=True)[0].shape == (
        0,
        row,
    )


@pytest.mark.parametrize("dtype", WHOLE + POOR, ids=str)
def test_what_stands_for_a_row_outside(dtype: torch.dtype) -> None:
    fill = fill_bytes(dtype)
    assert fill.shape == (dtype.itemsize,)
    if dtype in WHOLE and dtype.is_complex:
        assert torch.view_as_real(fill.view(dtype)).isnan().all()
    elif dtype is torch.complex32:
        assert fill.view(torch.float16).isnan().all()
    elif dtype.is_floating_point:
        assert fill.view(dtype).float().isnan().all()
    else:
        assert fill.view(dtype).item() == (0 if dtype is torch.bool else torch.iinfo(dtype).min)


# ---- the kernel --------------------------------------------------------------------------------------


@given(
    N=st.sampled_from([1, 2, 37, 300]),
    n=st.sampled_from([1, 3, 65, 257]),
    row=UGLY_ROWS,
    gap=st.sampled_from([0, 1, 4, 16, 24, 128]),
    skew=st.sampled_from([0, 1, 2, 4, 8, 16, 72]),
    out_skew=st.sampled_from([0, 1, 4, 16]),
    ids_dtype=st.sampled_from([torch.int64, torch.int32]),
    hot_share=st.sampled_from([None, 0.3, 1.0]),
    ordered=st.booleans(),
    wrap=st.booleans(),
    sms=st.sampled_from([None, 1]),
    config=st.sampled_from([None, SMALL]),
)
def test_kernel_against_reference(
    N: int, n: int, row: int, ordered: bool, wrap: bool, sms: int | None, config: Any, **where: Any
) -> None:
    case = Case.of(N, n if config is None or row < 100 else min(n, 3), row, **where)  # the interpreter is slow
    case.run(ordered=ordered, wrap=wrap, sms=sms, config=config)


@pytest.mark.parametrize("copiers", [1, 2, 3, 100])
def test_every_tile_is_copied_by_however_few(copiers: int) -> None:
    """Programs that only order run before those that copy here, and must leave every tile to them."""
    config = {"TILE": 64, "num_warps": 4, "programs_per_sm": 2}
    table = torch.arange(300 * 8, device=DEVICE).view(300, 8)
    ids = torch.randint(300, (90,), device=DEVICE)
    out = torch.full((90, 8), -1, device=DEVICE)
    _gather.launch(table, ids, out, ordered=True, copiers=copiers, config=config)
    assert_same_bits(out, table[ids])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("row", [1, 2, 3, 7, 12, 16, 100, 400, 602 * 4])
def test_every_width(row: int, ordered: bool) -> None:
    """Each at the addresses that allow its widest word, and one byte further on."""
    for skew in (0, 1):
        Case.of(41, 130, row, skew=skew, gap=0 if row % 16 else 16, hot_share=0.2).run(ordered=ordered)


@pytest.mark.parametrize("row", [5 * 4096, 33_000, 4099])
@pytest.mark.parametrize("skew", [0, 8, 72, 3])
def test_rows_wider_than_a_tile(row: int, skew: int) -> None:
    for ordered in (False, True):
        Case.of(3, 4, row, skew=skew, gap=8, hot_share=0.5).run(ordered=ordered, config=SMALL | {"TILE": 2048})


def test_more_ids_than_one_block_counts() -> None:
    """And windows of which some are never asked for."""
    for hot_share in (None, 0.05):
        Case.of(70_001, 2500, 4, hot_share=hot_share).run(ordered=True)


def test_more_windows_than_one_block_adds_up() -> None:
    N, stride = 2100, 2**16  # each row has a window of its own
    memory = torch.zeros(N * stride, dtype=torch.uint8, device=DEVICE)
    table = memory.as_strided((N, 3), (stride, 1))
    table.random_(0, 256)
    ids = torch.randint(-N, N, (1500,), device=DEVICE)
    out = torch.empty(1500, 3, dtype=torch.uint8, device=DEVICE)
    assert_same_bits(launch(table, ids, out, ordered=True), table[ids])


@pytest.mark.skipif(not interpreted(), reason="looks between the passes, which a GPU runs as one kernel")
def test_ids_are_grouped_by_address() -> None:
    """All that fall on one page come one after the other; hot ones and bad ones are spread evenly between them."""
    N, n, row = 5000, 3000, 400
    table = torch.zeros(N, row, dtype=torch.uint8)
    ids = torch.randint(-N, N, (n,))
    ids[::30] = N + 7
    hot = hot_rows(table, 0.1)
    assert hot is not None
    reader = Reader(table, torch.uint8, table.device, hot=hot)
    windows = reader._windows
    work = torch.zeros(_gather._WORDS_BEFORE + windows + 2 * n, dtype=torch.int32)
    out = torch.empty(n, row, dtype=torch.uint8)
    for one_pass in reader._prepare(ordered=True)[:3]:
        one_pass(4, (0, 0, 0), (n, 4), lambda: (ids, reader._words(out), work))
    order = work[-n:].long()
    assert torch.equal(order.sort().values, torch.arange(n))
    assert 25 < windows < 64
    asked = ids[order] % N
    cold = (ids[order] < N) & ~torch.isin(asked, hot.ids)
    pages = asked[cold] // (_gather.WINDOW // 512)  # rows a window: the power of two below 65536 / 400
    changes = int((pages.diff() != 0).sum()) + 1
    assert changes == len(pages.unique())
    kinds = [~cold[part].numpy() for part in torch.arange(n).chunk(10)]
    assert all(0.5 < part.mean() / (~cold).double().mean().item() < 1.5 for part in kinds)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ordered", [False, True])
def test_ids_at_the_ends_of_their_dtype(ids_dtype: torch.dtype, ordered: bool) -> None:
    ends = torch.iinfo(ids_dtype)
    for bad in (ends.min, ends.max, 37, -38):
        case = Case.of(37, 5, 12, ids_dtype=ids_dtype)
        case.ids[:] = torch.tensor([0, bad, 36, bad, -37])
        case.run(ordered=ordered)
        assert case.fault.tolist() == [bad, 37]


@pytest.mark.parametrize("ordered", [False, True])
def test_table_of_no_rows_has_no_ids(ordered: bool) -> None:
    out = torch.zeros(3, 4, device=DEVICE)
    fault = torch.full((2,), NONE, device=DEVICE)
    ids = torch.tensor([0, 5, -1], device=DEVICE)
    launch(torch.empty(0, 4, device=DEVICE), ids, out, fault=fault, ordered=ordered)
    assert out.isnan().all()
    assert fault[0] in ids
    assert fault[1] == 0


@pytest.mark.parametrize(("n", "row"), [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("ordered", [False, True])
def test_nothing_to_gather(n: int, row: int, ordered: bool) -> None:
    case = Case.of(5, n, row)
    case.run(ordered=ordered)


def test_without_a_fault_word() -> None:
    table, out = torch.ones(3, 4, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    launch(table, torch.tensor([9, 1], device=DEVICE), out)
    assert out[0].isnan().all()
    assert torch.equal(out[1], table[1])


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 3), (1, 5)], ids=str)
@pytest.mark.parametrize("dtype", WHOLE + POOR, ids=str)
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    table = random_rows(math.prod(shape), dtype=dtype).view(shape).to(DEVICE)
    ids = torch.tensor([0, shape[0] - 1, -1, shape[0], -shape[0], 77], device=DEVICE)
    want, _ = reference(table, ids, dtype, wrap=True)
    for ordered in (False, True):
        out = random_rows(want.numel(), dtype=dtype).view(want.shape).to(DEVICE)
        assert_same_bits(launch(table, ids, out, ordered=ordered), want)


@pytest.mark.parametrize("dtype", BARE, ids=str)
def test_dtypes_that_torch_can_only_store(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even their uninitialised memory can be poisoned."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    table, ids = random_rows(6, 3, dtype=dtype), torch.tensor([0, -1, 5])
    want = rows_of(table, ids)
    assert_same_bits(launch(table.to(DEVICE), ids.to(DEVICE), random_rows(3, 3, dtype=dtype).to(DEVICE)), want)
    assert_same_bits(freight.gather_rows(table, ids), want)
    x = unified(table)
    assert_same_bits(x[ids], want)
    assert_same_bits(copy.deepcopy(x).host(), table)
    assert fill_bytes(dtype).tolist() == [0] * dtype.itemsize


@pytest.mark.parametrize("dtype", WIDENED, ids=str)
@pytest.mark.parametrize(("row", "skew"), [(1, 0), (16, 0), (37, 1), (602, 0), (640, 3)])
def test_casts_on_the_way(dtype: torch.dtype, row: int, skew: int) -> None:
    """Every value that the narrow type has becomes the float32 that torch makes of it."""
    patterns = torch.arange(256 ** min(2, dtype.itemsize)).to(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    memory = patterns.view(dtype)[torch.arange(skew + 110 * row) * 7 % len(patterns)].to(DEVICE)
    table = memory[skew:].view(110, row)
    ids = torch.tensor([*range(110), 110, -1, -111], device=DEVICE)
    want, bad = reference(table, ids, torch.float32, wrap=True)
    assert bad.sum() == 2
    looked_at = ~want.isnan()
    if interpreted() and dtype is not torch.float16:  # whose own casts of the others are not right
        looked_at &= want.isfinite() & ((want == 0) | (want.abs() >= torch.finfo(dtype).smallest_normal))
    else:
        bad = want.isnan()
    for ordered in (False, True):
        got = launch(table, ids, torch.zeros(len(ids), row, device=DEVICE), ordered=ordered)
        assert got[bad].isnan().all()
        assert_same_bits(got[looked_at], want[looked_at])


def test_casts_of_hot_rows() -> None:
    table = torch.randn(9, 40).half().to(DEVICE)
    ids = torch.tensor([1, 4, 8], device=DEVICE)
    hot = HotRows(-table[ids], build_map(ids, 9), ids, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    asked = torch.tensor([0, 1, -1, 4, 5], device=DEVICE)
    got = launch(table, asked, torch.zeros(5, 40, device=DEVICE), hot=hot)
    want = table[asked].float() * torch.tensor([1, -1, -1, -1, 1], device=DEVICE)[:, None]
    assert_same_bits(got, want)


def test_one_reader_serves_many_calls() -> None:
    """Ids of other lengths, dtypes and alignments, other places for the rows, both ways."""
    table = torch.randn(50, 13, device=DEVICE)
    reader = Reader(table, torch.float32, table.device, grain=4)
    for n, start, ids_dtype, copiers in (
        (5, 0, torch.int64, None),
        (300, 1, torch.int64, 16),
        (7, 3, torch.int32, None),
    ):
        ids = torch.randint(-50, 50, (start + n,), device=DEVICE).to(ids_dtype)[start:]
        out = torch.full((start + n, 13), -1.0, device=DEVICE)[start:]
        assert_same_bits(reader(ids, out, copiers), table[ids.long()])


# ---- the operator ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WHOLE + POOR, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    """In every dtype; where torch cannot compare, cast or multiply elements, only what needs none of it."""
    table, ids = torch.ones(5, 3, dtype=torch.uint8).to(dtype), torch.tensor([[4, 0], [-1, 2]])
    utils: Any = {} if dtype in WHOLE else {"test_utils": NOT_COMPARED}
    how = {"device": table.device, "dtype": dtype}
    torch.library.opcheck(torch.ops.freight.gather_rows.default, (table, ids), how, **utils)
    out = torch.zeros(2, 2, 3, dtype=torch.uint8).to(dtype)
    torch.library.opcheck(torch.ops.freight.gather_rows_out.default, (table, ids, out), **utils)


@pytest.mark.parametrize("dtype", WHOLE + POOR, ids=str)
def test_every_dtype_on_the_cpu(dtype: torch.dtype) -> None:
    table = random_rows(7, 3, dtype=dtype)
    for ids in (torch.tensor([6, -7, 3, 3]), torch.tensor([[0], [-1]], dtype=torch.int32), torch.tensor(4)):
        want = rows_of(table, ids)
        assert_same_bits(freight.gather_rows(table, ids), want)
        assert_same_bits(freight.gather_rows(unified(table), ids), want)
        out = random_rows(*want.shape, dtype=dtype)
        assert freight.gather_rows(table, ids, out) is out
        assert_same_bits(out, want)


def test_rows_that_lie_in_pieces() -> None:
    table = torch.randn(6, 5, 4).permute(2, 0, 1)
    x = unified(torch.randn(5, 6)).t()
    assert_same_bits(freight.gather_rows(table, torch.tensor([3, -4])), table[[3, -4]])
    assert_same_bits(freight.gather_rows(x, torch.tensor([3, -4])), x.host()[[3, -4]])


@pytest.mark.parametrize("dtype", WHOLE + POOR, ids=str)
def test_by_torch_is_the_reference(dtype: torch.dtype) -> None:
    """What rows in pieces go through on a GPU; its operations are torch's and the same on the CPU."""
    table = random_rows(4, 6, dtype=dtype).t()
    for ids in (torch.tensor([0, 5, -1, 6, -7]), torch.tensor([[2], [9]]), torch.zeros(0, dtype=torch.int64)):
        for wrap in (True, False):
            want, _ = reference(table.contiguous(), ids, dtype, wrap=wrap)
            out = random_rows(*want.shape, dtype=dtype)
            _op._by_torch(table, ids, out, None, wrap)
            assert_same_bits(out, want)
    out = torch.zeros(2, 2)
    _op._by_torch(torch.empty(2, 0).t(), torch.tensor([0, -1]), out, None, True)
    assert out.isnan().all()


def test_int32_ids_from_the_end_of_a_very_long_table() -> None:
    table = torch.zeros(1, 1, dtype=torch.uint8).expand(2**31 + 9, 1)
    assert freight.gather_rows(table, torch.tensor([-1, 0], dtype=torch.int32)).shape == (2, 1)


@pytest.mark.parametrize("lazily", [torch.conj, lambda x: x.conj().imag, lambda x: x.mH], ids=["conj", "imag", "mH"])
def test_lazy_views_are_what_they_show(lazily: Any) -> None:
    table = torch.randn(6, 6, dtype=torch.complex64)
    x, ids = unified(table), torch.tensor([5, -6, 2])
    view, want = lazily(x), lazily(table)[ids]
    assert view.is_unified
    for got in (view[ids], freight.gather_rows(view, ids), view.index_select(0, ids % 6), view[[5, 0, 2]]):
        assert torch.equal(got, want)
    out = torch.zeros_like(want.resolve_conj()).conj()
    assert torch.equal(freight.gather_rows(view, ids, out), want)


def test_lazy_views_are_not_resolved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = unified(torch.randn(6, 3, dtype=torch.complex64))
    seen: list[Tensor] = []
    into = _op._on_cpu
    monkeypatch.setattr(_op, "_on_cpu", lambda table, *rest: (seen.append(table), into(table, *rest)))
    freight.gather_rows(x.conj(), torch.tensor([1]))
    assert [table.data_ptr() for table in seen] == [x.data_ptr()]


# ---- under torch.compile -----------------------------------------------------------------------------


class Graphs:
    """A backend that keeps what it is given to compile."""

    def __init__(self) -> None:
        self.all: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.all.append(graph)
        return graph.forward

    def ours(self) -> list[str]:
        """Which operators of freight's are in the one graph there is; nobody else may have the table."""
        [graph] = self.all
        nodes = [node for node in graph.graph.nodes if "freight" in str(node.target)]
        for node in nodes:
            assert list(node.args[0].users) == [node], "something else reads the table"
        return [str(node.target) for node in nodes]


GATHERS = {
    "getitem": lambda x, ids: x[ids],
    "gather_rows": lambda x, ids: freight.gather_rows(x, ids),
    "index_select": lambda x, ids: x.index_select(0, ids.view(-1)),
    "torch.index_select": lambda x, ids: torch.index_select(x, 0, ids.view(-1)),
    "embedding": lambda x, ids: torch.nn.functional.embedding(ids, x),
    "cast": lambda x, ids: freight.gather_rows(x, ids, dtype=torch.float64),
}


@pytest.mark.parametrize("name", GATHERS)
def test_a_compiled_gather_is_one_operator(name: str) -> None:
    gather, graphs, x = GATHERS[name], Graphs(), unified(torch.randn(7, 4))
    compiled = torch.compile(lambda ids: gather(x, ids) * 2, fullgraph=True, backend=graphs)
    for ids in (torch.tensor([6, 0]), torch.tensor([3, 1])):
        assert torch.equal(compiled(ids), gather(x, ids) * 2)
    assert graphs.ours() == ["freight.gather_rows.default"]


@pytest.mark.parametrize("name", ["index_select", "torch.index_select", "embedding"])
def test_a_compiled_gather_has_the_ids_that_torch_has(name: str) -> None:
    x = unified(torch.randn(7, 4))
    compiled = torch.compile(lambda ids: GATHERS[name](x, ids), fullgraph=True, backend="eager")
    with pytest.raises(OutOfRangeError, match="id -1 lies outside the table of 7 rows"):
        compiled(torch.tensor([-1]))


def test_a_compiled_gather_of_any_length_and_rank() -> None:
    graphs, x = Graphs(), unified(torch.randn(7, 4))
    compiled = torch.compile(lambda table, ids: table[ids] + 1, fullgraph=True, backend=graphs, dynamic=True)
    for n in (2, 3, 50):
        ids = torch.randint(-7, 7, (n,))
        assert torch.equal(compiled(x, ids), x[ids] + 1)
    assert len(graphs.all) == 1
    assert torch.equal(compiled(x[2:], ids := torch.tensor([[1, -1]], dtype=torch.int32)), x[2:][ids] + 1)


def test_compiled_into_place() -> None:
    graphs, x, out = Graphs(), unified(torch.randn(7, 4)), torch.zeros(2, 4)
    compiled = torch.compile(lambda ids, out: freight.gather_rows(x, ids, out), fullgraph=True, backend=graphs)
    assert compiled(torch.tensor([6, 0]), out) is out
    assert torch.equal(out, x.host()[[6, 0]])
    assert graphs.ours() == ["freight.gather_rows_out.default"]


def test_compiled_through_autograd_and_batches() -> None:
    x, weight = unified(torch.randn(7, 4)), torch.randn(4, 3, requires_grad=True)

    def step(first: Tensor, second: Tensor) -> Tensor:
        one, other = freight.gather_rows(x, [first, second])
        return (one @ weight).sum() + (other @ weight).square().sum()

    batches = (torch.tensor([6, 0]), torch.tensor([[3], [1]]))
    graph = torch.compile(step, fullgraph=True, backend="aot_eager")(*batches)
    [got] = torch.autograd.grad(graph, weight)
    [want] = torch.autograd.grad(step(*batches), weight)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "index",
    [torch.tensor([True, False] * 3 + [True]), slice(1, 3), 2, (torch.tensor([0, -1]), 1), [0, 5], None],
    ids=["mask", "slice", "int", "tuple", "list", "None"],
)
def test_compiled_with_other_indices(index: Any) -> None:
    """Their numbers are torch's, whatever they are compiled to."""
    x = unified(torch.randn(7, 4))
    compiled = torch.compile(lambda factor: x[index] * factor, backend="eager")
    assert torch.equal(compiled(torch.tensor(2.0)), x.host()[index] * 2)


def test_compiled_on_a_gpu_all_else_is_refused() -> None:
    """A table that says it computes on a GPU; the refusal comes before anything is computed."""
    x = unified(torch.randn(7, 4))
    x._table.traced_device = torch.device("cuda", 0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="takes rows of a unified tensor by x"):
        torch.compile(lambda factor: x[2:4] * factor, fullgraph=True, backend="eager")(torch.tensor(2.0))


# ---- the public function -----------------------------------------------------------------------------


def test_several_batches_at_once() -> None:
    x = unified(torch.randn(7, 2, 3))
    batches = [torch.tensor([1, -1]), torch.zeros(0, dtype=torch.int64), torch.tensor([[2], [0]], dtype=torch.int32)]
    before = x.stats().rows
    rows = freight.gather_rows(x, batches)
    assert isinstance(rows, tuple)
    for got, ids in zip(rows, batches, strict=True):
        assert_same_bits(got, x.host()[ids.long()])
    assert x.stats().rows - before == 4
    assert freight.gather_rows(x, []) == ()
    assert [part.dtype for part in freight.gather_rows(x, (batches[0],), dtype=torch.float64)] == [torch.float64]


@pytest.mark.parametrize("dtype", WIDENED, ids=str)
def test_cast(dtype: torch.dtype) -> None:
    x, ids = unified(torch.randn(7, 3).to(dtype)), torch.tensor([3, -1])
    want = x.host().float()[ids]
    assert_same_bits(freight.gather_rows(x, ids, dtype=torch.float32), want)
    out = torch.zeros(2, 3)
    assert_same_bits(freight.gather_rows(x, ids, out), want)
    assert_same_bits(freight.gather_rows(x, ids, out.double(), torch.float64), want.double())


def test_out_of_any_layout() -> None:
    x, ids = unified(torch.randn(7, 3)), torch.tensor([3, -1])
    for out in (torch.zeros(3, 2).t(), torch.zeros(2, 6)[:, ::2], torch.zeros(4, 3)[::2]):
        assert freight.gather_rows(x, ids, out=out) is out
        assert torch.equal(out, x.host()[ids])


def test_x_may_be_any_tensor() -> None:
    table, ids = torch.randn(5, 2), torch.tensor([4, 0])
    assert torch.equal(freight.gather_rows(table, ids), table[ids])
    assert torch.equal(freight.gather_rows(unified(table)[1:], torch.tensor([-1])), table[[4]])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0], torch.tensor([0])), ArgumentTypeError, "x must be a tensor with rows; got list"),
        ((torch.tensor(1.0), torch.tensor([0])), ArgumentTypeError, "got one of no dimensions"),
        ((torch.ones(3, 2, requires_grad=True), torch.tensor([0])), UnsupportedError, "use torch.nn.functional.emb"),
        ((torch.ones(3, 2), 1), ArgumentTypeError, r"ids must be an int32 or int64 tensor.*got int\. Make it one with"),
        ((torch.ones(3, 2), None), ArgumentTypeError, "got NoneType"),
        ((torch.ones(3, 2), [0, 1]), ArgumentTypeError, "got int"),
        ((torch.ones(3, 2), torch.tensor([1.0])), ArgumentTypeError, "must be int32 or int64; got torch.float32"),
        ((torch.ones(3, 2), torch.tensor([True])), ArgumentTypeError, "must be int32 or int64; got torch.bool"),
        ((torch.ones(3, 2), [torch.tensor([0])], torch.ones(1, 2)), ArgumentError, "gather several without it"),
        ((torch.ones(3, 2), torch.tensor([0]), [1]), ArgumentTypeError, "out must be a plain tensor; got list"),
        (
            (torch.ones(3, 2), torch.tensor([0]), torch.ones(2)),
            ArgumentError,
            r"out must be torch.float32 of shape \(1, 2\) on cpu; got torch.float32 of shape \(2,\) on cpu",
        ),
        (
            (torch.ones(3, 2), torch.tensor([0]), torch.ones(1, 2), torch.float16),
            ArgumentError,
            "out must be torch.float16 of shape .* got torch.float32",
        ),
        ((torch.ones(3, 2), torch.tensor([0]), None, "float16"), ArgumentTypeError, "torch.float32; got 'float16'"),
        ((torch.ones(3, 2), torch.tensor([3])), OutOfRangeError, "id 3 lies outside .* 3 rows; ids go from 0 to 2"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)  # fmt: skip
def test_what_is_refused(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        freight.gather_rows(*arguments)


def test_out_that_is_a_table() -> None:
    x = unified(torch.ones(3, 2))
    with pytest.raises(ArgumentTypeError, match=r"got UnifiedTensor\. To write rows, say x\[ids\] = rows"):
        freight.gather_rows(x, torch.tensor([0]), out=unified(torch.ones(1, 2)))
