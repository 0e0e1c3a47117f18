"""Gathers under way: streams, lifetimes, graphs, the compiler; nothing waits, compiles anew, or is left behind."""

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows_on_gpu import BOTH_WAYS, LONG, assert_rows, never_waiting, random_ids, rows_of, table, unwritten
from torch import Tensor

import freight
from freight import memory
from freight._units import MiB
from freight.rows._gather import _gather_kernel


@pytest.fixture(autouse=True)
def _poison(request: pytest.FixtureRequest) -> None:
    """What is left unwritten is NaN or the largest integer; but where torch cannot fill such a dtype."""
    if "dtype" not in request.fixturenames:
        request.getfixturevalue("poisoned_memory")


# ---- streams and lifetimes -------------------------------------------------------------------------------


@BOTH_WAYS
def test_runs_behind_the_producer_of_its_ids(ordered: bool) -> None:
    """The ids arrive late, on a stream of their own: a kernel on any other stream would see the old ones."""
    x = table(9000, 16, ordered=ordered)
    old, new = random_ids(9000, 7000), random_ids(9000, 7000).cuda()
    ids = old.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x[ids]  # so that the kernel is compiled, and the stream has memory of its own
        stream.synchronize()
        torch.cuda._sleep(LONG)
        ids.copy_(new)
        rows = x[ids]
        assert not stream.query()
    stream.synchronize()
    assert_rows(rows, x.host(), new)


@BOTH_WAYS
def test_ids_may_go_as_soon_as_the_call_returns(ordered: bool) -> None:
    x = table(9000, 16, ordered=ordered)
    want = random_ids(9000, 7000)
    x[want.cuda()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ids = want.to("cuda")
        stream.synchronize()
        torch.cuda._sleep(LONG)
        rows = x[ids]
        del ids
        others = [torch.zeros(7000, dtype=torch.int64, device="cuda") for _ in range(4)]  # in the memory of the ids
        assert not stream.query()
    stream.synchronize()
    assert_rows(rows, x.host(), want)
    del others


@BOTH_WAYS
@pytest.mark.parametrize("kind", ["pageable", "page-locked", "unified"])
def test_ids_on_the_cpu_may_be_written_as_soon_as_the_call_returns(kind: str, ordered: bool) -> None:
    """As they may be with torch itself: nobody said `non_blocking`."""
    x = table(9000, 16, ordered=ordered)
    want = random_ids(9000, 70_000)
    owner = freight.unified(want)
    ids = {"pageable": want.clone(), "page-locked": want.pin_memory(), "unified": owner.host()}[kind]
    x[want.cuda()]
    torch.cuda._sleep(LONG // 4)
    rows = x[ids]
    ids.zero_()
    assert_rows(rows, x.host(), want)
    torch.cuda._sleep(LONG // 4)
    ids.copy_(want)
    [batch] = freight.gather_rows(x, [ids])
    ids.zero_()
    assert_rows(batch, x.host(), want)


def test_two_streams_at_once() -> None:
    """Ordering has the whole grid meet: two of them at once must not wait for each other."""
    x = table(2**20, 16, ordered=True, dtype=torch.int32)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    asked = [[torch.randint(len(x), (2**17,), device="cuda") for _ in range(6)] for _ in streams]
    torch.cuda.synchronize()
    rows: list[list[Tensor]] = [[], []]
    for turn in range(6):
        for stream, ids, got in zip(streams, asked, rows, strict=True):
            with torch.cuda.stream(stream):
                got.append(x[ids[turn]])
    torch.cuda.synchronize()
    for ids, got in zip(itertools.chain(*asked), itertools.chain(*rows), strict=True):
        assert_rows(got, x.host(), ids)


@BOTH_WAYS
def test_captured_in_a_graph(ordered: bool) -> None:
    """Ids change between replays, and a replay leaves nothing behind for the next one."""
    x = table(9000, 16, ordered=ordered)
    ids = random_ids(9000, 7000).cuda()
    x[ids]  # compiled and looked up before, as anything that is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = x[ids]
        halves = freight.gather_rows(x, ids, dtype=torch.float64)
    for _ in range(3):
        new = random_ids(9000, 7000)
        ids.copy_(new)
        for _ in range(2):
            graph.replay()
            assert_rows(rows, x.host(), new)
        assert halves.dtype is torch.float64
        assert torch.equal(halves.isnan(), rows.isnan())


def test_writes_captured_in_a_graph() -> None:
    host = torch.randn(500, 16)
    x = freight.unified(host)
    ids, rows = torch.zeros(3, dtype=torch.int64, device="cuda"), torch.zeros(3, 16, device="cuda")
    x[ids] = rows
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x[ids] = rows
    for at in ([5, 6, 7], [8, -1, 100]):
        ids.copy_(torch.tensor(at))
        rows.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x.host()[at], rows.cpu())


# ---- compiled --------------------------------------------------------------------------------------------


# The first backend only traces. What the tools of the second warn of is not freight's.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "ordered"), [("aot_eager", False), ("inductor", True)])
def test_compiles_whole(backend: str, ordered: bool) -> None:
    torch._dynamo.reset()
    x = table(300, 8, ordered=ordered, dtype=torch.int32)
    ways: list[tuple[Callable[[Any, Tensor], Any], Callable[[Tensor], Tensor]]] = [
        (lambda x, ids: x[ids] * 2, lambda rows: rows * 2),
        (lambda x, ids: freight.gather_rows(x, ids + 0, dtype=torch.float32) + 1, lambda rows: rows.float() + 1),
    ]
    for way, on_rows in ways:
        compiled = torch.compile(way, fullgraph=True, backend=backend, dynamic=True)
        for count in (3, 5, 1000):
            ids = random_ids(300, count)
            assert torch.equal(compiled(x, ids.cuda()).cpu(), on_rows(rows_of(x.host(), ids)))


def test_a_compiled_gather_is_one_operator_of_ours() -> None:
    torch._dynamo.reset()
    x = freight.unified(torch.randn(300, 8))
    called: list[Any] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    ids = random_ids(300, 40)
    for way in (lambda ids: x[ids], lambda ids: freight.gather_rows(x, ids)):
        called.clear()
        assert_rows(torch.compile(way, fullgraph=True, backend=look)(ids.cuda()), x.host(), ids)
        assert called == [torch.ops.freight.gather_rows.default]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    """On a table in GPU memory: opcheck copies what it is given, and a copy of a page-locked table is not one."""
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tests = tests if dtype is torch.float8_e4m3fn else ["test_schema", *tests]  # which compares elements
    rows = torch.arange(15 * dtype.itemsize).remainder(2).to(torch.uint8).view(dtype).view(5, 3).cuda()  # no NaN
    ids, out = torch.tensor([4, -5, 0], device="cuda"), torch.zeros_like(rows[:3])
    given = {"device": rows.device, "dtype": dtype}
    torch.library.opcheck(torch.ops.freight.gather_rows.default, (rows, ids), given, test_utils=tests)
    torch.library.opcheck(torch.ops.freight.gather_rows_out.default, (rows, ids, out), test_utils=tests)


# ---- no surprise -----------------------------------------------------------------------------------------


@BOTH_WAYS
def test_numbers_of_ids_compile_nothing(ordered: bool, compilations: Callable[[Any], int]) -> None:
    x, other = table(9000, 16, ordered=ordered), table(77, 16, ordered=ordered)
    x[random_ids(9000, 50).cuda()]
    before = compilations(_gather_kernel)
    assert before > 0
    for count in (0, 1, 2, 15, 16, 17, 1000, 4097, 65_537, 2**19):
        ids = random_ids(77, count)
        assert_rows(x[ids.cuda()], x.host(), ids)
        assert_rows(other[ids.cuda()], other.host(), ids)
    assert compilations(_gather_kernel) == before


@BOTH_WAYS
def test_a_steady_loop_never_waits(ordered: bool) -> None:
    x, halves = table(9000, 16, ordered=ordered), table(9000, 16, ordered=ordered, dtype=torch.bfloat16)
    out = unwritten(7000, 16)
    asked = [random_ids(9000, 7000) for _ in range(5)]
    on_gpu = [ids.cuda() for ids in asked]

    def step(ids: Tensor) -> list[Tensor]:
        return [
            x[ids],
            freight.gather_rows(x, ids, out),
            freight.gather_rows(x, ids, sms=4),
            freight.gather_rows(halves, ids, dtype=torch.float32),
            *freight.gather_rows(x, [ids[:100], ids[100:]]),
            torch.nn.functional.embedding(ids.clamp(min=0), x),
            x[2:][ids.clamp(0, 5)],
        ]

    held = [step(ids) for ids in on_gpu]
    del held
    with never_waiting():
        results = [step(ids) for ids in on_gpu]
    for ids, (rows, _, few, _, first, rest, *_) in zip(asked, results, strict=True):
        for got in (rows, few, torch.cat([first, rest])):
            assert_rows(got, x.host(), ids)


def test_rows_take_no_more_gpu_memory_than_they_are() -> None:
    """The table has 512 MiB, and nothing of that size is ever set aside on the GPU."""
    x = freight.UnifiedTensor.empty((2**20, 128))
    ids = torch.randint(len(x), (2**17,), device="cuda")
    x[ids]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rows = x[ids]
    assert rows.nbytes == 64 * MiB
    assert torch.cuda.max_memory_allocated() - before < rows.nbytes + 16 * MiB


def test_host_memory_comes_back() -> None:
    gc.collect()  # what earlier tests left behind
    before = memory.stats()
    x = freight.unified(torch.randn(50_000, 16), cache=100, hot_ids=torch.arange(100))
    rows = x[torch.randint(50_000, (1000,), device="cuda")]
    assert memory.stats().held >= before.held + 3_200_000
    assert memory.stats().locked >= before.locked + 3_200_000
    del x
    assert (memory.stats().held, memory.stats().locked) == (before.held, before.locked)
    assert rows.shape == (1000, 16)
