"""Where an operation computes and lands, cell by cell; what stays unified, what copies, and what refuses to.

Values are small whole numbers, so that sums and products are exact wherever they are computed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows_on_gpu import LONG, never_waiting
from torch import Tensor
from torch.nn import functional

import freight
from freight._units import MiB
from freight.errors import ArgumentError, UnsupportedError

X = torch.arange(24.0).view(6, 4) - 7
OTHER = torch.arange(24.0).flip(0).view(6, 4)
CUDA, CPU = "cuda", "cpu"


@pytest.fixture
def x() -> freight.UnifiedTensor:
    return freight.unified(X)


def assert_plain(got: Any, want: Tensor, device: str) -> None:
    """A tensor of torch's own, on `device`, with the values of `want`."""
    assert type(got) is Tensor
    assert got.device.type == device
    assert got.dtype is want.dtype
    assert torch.equal(got.cpu(), want)


def assert_view(got: Any, want: Tensor, of: freight.UnifiedTensor) -> None:
    """A unified tensor in the memory of `of`, with the values of `want`."""
    assert type(got) is freight.UnifiedTensor
    assert got.is_unified
    assert got.compute_device == of.compute_device
    assert got.device.type == "cpu"
    assert torch.equal(got.host(), want)
    first, last = of.host().data_ptr(), of.host().data_ptr() + of.nbytes
    assert first <= got.host().data_ptr() < last


def test_what_a_table_says_of_itself(x: freight.UnifiedTensor) -> None:
    assert (x.device.type, x.is_cuda, x.is_unified) == ("cpu", False, True)
    assert x.compute_device == torch.device("cuda", torch.cuda.current_device())
    assert (x.shape, x.dtype, len(x), x.nbytes) == (X.shape, X.dtype, 6, 96)
    assert (
        repr(x)
        == "UnifiedTensor(shape=(6, 4), dtype=torch.float32, computes on cuda:0, 96 B of page-locked host memory)"
    )


# ---- the rule --------------------------------------------------------------------------------------------

# what stands beside a table of X: how it is made, what it is worth, where the operation lands
BESIDE: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "a GPU tensor": (lambda: OTHER.cuda(), OTHER, CUDA),
    "a GPU tensor without dimensions": (lambda: torch.tensor(3.0, device="cuda"), 3.0, CUDA),
    "a number": (lambda: 3, 3, CUDA),
    "a CPU tensor without dimensions": (lambda: torch.tensor(3.0), 3.0, CUDA),
    "another table": (lambda: freight.unified(OTHER), OTHER, CUDA),
    "a view of another table": (lambda: freight.unified(OTHER)[2], OTHER[2], CUDA),
    "a CPU tensor": (OTHER.clone, OTHER, CPU),
    "a CPU tensor of one element": (lambda: torch.tensor([3.0]), 3.0, CPU),
}
OPERATIONS: dict[str, Callable[[Any, Any], Tensor]] = {
    "x + o": lambda x, o: x + o,
    "o + x": lambda x, o: o + x,
    "o - x": lambda x, o: o - x,
    "x > o": lambda x, o: x > o,
    "torch.mul": lambda x, o: torch.mul(x, o),
    "torch.where": lambda x, o: torch.where(x > 0, x, o),
    "x[2:3].mul": lambda x, o: x[2:3].mul(o),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("beside", BESIDE)
def test_placement(x: freight.UnifiedTensor, beside: str, operation: str) -> None:
    make, worth, device = BESIDE[beside]
    compute = OPERATIONS[operation]
    if operation == "torch.where" and device == CPU:  # x > 0 alone lands on the GPU: torch's own refusal of a mixture
        with pytest.raises(RuntimeError, match="same device"):
            compute(x, make())
        return
    assert_plain(compute(x, make()), compute(X, worth), device)
    assert torch.equal(x.host(), X)


ALONE: dict[str, Callable[[Any, Any], Tensor]] = {
    "cat": lambda x, o: torch.cat([x, o]),
    "stack": lambda x, o: torch.stack([x[1], o[2]]),
    "matmul": lambda x, o: x @ o.T,
    "sum": lambda x, o: x.sum(),
    "amax": lambda x, o: x.amax(dim=1),
    "cumsum": lambda x, o: x.cumsum(0),
    "relu": lambda x, o: x.relu(),
    "neg": lambda x, o: -x,
    "argsort": lambda x, o: x.argsort(dim=1, stable=True),
    "eq": lambda x, o: x == o,
    "pad": lambda x, o: functional.pad(x, (1, 1)),
    "max": lambda x, o: x.max(dim=0).values,
    "where": lambda x, o: torch.where(x > o, x, o),
}


@pytest.mark.parametrize("name", ALONE)
def test_tables_alone_compute_on_the_gpu(x: freight.UnifiedTensor, name: str) -> None:
    assert_plain(ALONE[name](x, freight.unified(OTHER)), ALONE[name](X, OTHER), CUDA)


def test_a_gpu_tensor_outweighs_a_cpu_scalar_and_a_table(x: freight.UnifiedTensor) -> None:
    got = torch.addcmul(x, torch.tensor(2.0), OTHER.cuda())
    assert_plain(got, torch.addcmul(X, torch.tensor(2.0), OTHER), CUDA)
    with pytest.raises(RuntimeError, match="same device"):
        torch.addcmul(x, OTHER, OTHER.cuda())


@pytest.mark.parametrize("where", [CPU, CUDA])
def test_indices_do_not_count(x: freight.UnifiedTensor, where: str) -> None:
    """Wherever they are, in whatever way they are said."""
    ids = torch.tensor([5, 0, 3])
    columns = torch.tensor([[1], [0], [3], [3], [2], [0]])
    mask = X > 3
    given = [index.to(where) for index in (ids, columns, mask)]
    ways: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
        "rows": lambda x, ids, columns, mask: x[ids],
        "rows of columns": lambda x, ids, columns, mask: x[ids, 1:3],
        "elements": lambda x, ids, columns, mask: x[ids, 2],
        "pairs": lambda x, ids, columns, mask: x[ids, columns[:3, 0]],
        "columns": lambda x, ids, columns, mask: x[:, ids % 4],
        "rows by a mask": lambda x, ids, columns, mask: x[mask[:, 0]],
        "elements by a mask": lambda x, ids, columns, mask: x[mask],
        "index_select": lambda x, ids, columns, mask: x.index_select(0, ids),
        "index_select of columns": lambda x, ids, columns, mask: x.index_select(1, ids % 4),
        "index_select by name": lambda x, ids, columns, mask: torch.index_select(x, dim=1, index=ids % 4),
        "gather": lambda x, ids, columns, mask: x.gather(1, columns),
        "gather by name": lambda x, ids, columns, mask: torch.gather(x, dim=1, index=columns),
        "take_along_dim": lambda x, ids, columns, mask: x.take_along_dim(columns, 1),
        "take_along_dim by name": lambda x, ids, columns, mask: torch.take_along_dim(x, indices=columns, dim=1),
        "masked_select": lambda x, ids, columns, mask: x.masked_select(mask),
        "masked_select by name": lambda x, ids, columns, mask: torch.masked_select(x, mask=mask),
        "take": lambda x, ids, columns, mask: x.take(ids),
        "take by name": lambda x, ids, columns, mask: torch.take(x, index=ids),
        "embedding": lambda x, ids, columns, mask: functional.embedding(ids, x),
    }
    wrong = {}
    for name, way in ways.items():
        try:
            assert_plain(way(x, *given), way(X, ids, columns, mask), CUDA)
        except Exception as error:
            wrong[name] = repr(error)
    assert wrong == {}


def test_a_gradient_flows_past_a_table(x: freight.UnifiedTensor) -> None:
    """In forward and backward the table is read in place; it has no gradient of its own."""
    host_weight = torch.arange(8.0).view(2, 4).requires_grad_()
    weight = host_weight.detach().cuda().requires_grad_()
    for on_gpu, on_cpu in ((x, X), (x[torch.tensor([5, 1, 1])], X[[5, 1, 1]])):
        out = functional.linear(on_gpu, weight)
        assert out.is_cuda
        (got,) = torch.autograd.grad(out.sum(), weight)
        (want,) = torch.autograd.grad(functional.linear(on_cpu, host_weight).sum(), host_weight)
        assert_plain(got, want, CUDA)
    with pytest.raises(UnsupportedError, match="requires_grad=True is not offered for unified tensors"):
        x.requires_grad_()


# ---- views -----------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Any], Any]] = {
    "x[2]": lambda x: x[2],
    "x[-1, 1:]": lambda x: x[-1, 1:],
    "x[1:5:2]": lambda x: x[1:5:2],
    "x[:, 2]": lambda x: x[:, 2],
    "x[..., None]": lambda x: x[..., None],
    "x.T": lambda x: x.T,
    "x.mT": lambda x: x.mT,
    "x.t()": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "view": lambda x: x.view(3, 8),
    "view of another dtype": lambda x: x.view(torch.int32),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x[:1].squeeze(0),
    "narrow": lambda x: x.narrow(0, 2, 3),
    "select": lambda x: x.select(1, 3),
    "expand": lambda x: x[:1].expand(5, 4),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "as_strided": lambda x: x.as_strided((3, 2), (8, 3)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "contiguous, which it is": lambda x: x.contiguous(),
    "split": lambda x: x.split(4)[1],
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "a view of a view": lambda x: x[1:].T[1:3],
    "by iterating": lambda x: list(x)[3],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_stays_unified(x: freight.UnifiedTensor, name: str) -> None:
    view = VIEWS[name](x)
    assert_view(view, VIEWS[name](X), x)
    view.fill_(50)
    plain = X.clone()
    VIEWS[name](plain).fill_(50)
    assert torch.equal(x.host(), plain)


def test_complex_views() -> None:
    values = torch.complex(X, OTHER)
    x = freight.unified(values)
    assert_view(x.real, values.real, x)
    assert_view(torch.view_as_real(x), torch.view_as_real(values), x)


# ---- copies ----------------------------------------------------------------------------------------------


def test_what_shares_the_memory(x: freight.UnifiedTensor) -> None:
    start = x.data_ptr()
    for shared in (x.host(), x.cpu(), x.to("cpu"), torch.from_numpy(x.numpy()), torch.as_tensor(x.numpy())):
        assert_plain(shared, X, CPU)
        assert shared.data_ptr() == start
    x[0] = 9.0
    assert x.host()[0].tolist() == x.numpy()[0].tolist() == x.tolist()[0] == [9.0] * 4


@pytest.mark.parametrize(
    ("copy", "dtype"),
    [
        (lambda x: x.to("cuda"), torch.float32),
        (lambda x: x.to(torch.device("cuda", 0)), torch.float32),
        (lambda x: x.cuda(), torch.float32),
        (lambda x: x.to("cuda", non_blocking=True), torch.float32),
        (lambda x: x.to("cuda", torch.float16), torch.float16),
        (lambda x: x.to(torch.zeros(1, dtype=torch.int64, device="cuda")), torch.int64),
    ],
    ids=["to", "to a device", "cuda", "without waiting", "to another dtype too", "to what another is"],
)
def test_what_copies_to_the_gpu(
    x: freight.UnifiedTensor, copy: Callable[[freight.UnifiedTensor], Tensor], dtype: torch.dtype
) -> None:
    got = copy(x)
    assert_plain(got, X.to(dtype), CUDA)
    got.zero_()
    assert torch.equal(x.host(), X)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "clone": lambda x: x.clone(),
    "torch.clone": lambda x: torch.clone(x),
    "half": lambda x: x.half(),
    "double": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "int": lambda x: x.int(),
    "long": lambda x: x.long(),
    "short": lambda x: x.short(),
    "char": lambda x: x.char(),
    "byte": lambda x: x.byte(),
    "bool": lambda x: x.bool(),
    "cfloat": lambda x: x.cfloat(),
    "to": lambda x: x.to(torch.float16),
    "type": lambda x: x.type(torch.float16),
}


def refusal(name: str) -> str:
    return (
        rf"x\.{name}\(\) would copy the whole table to cuda:0\. Take the rows you need .*x\.to\('cuda'\).*x\.host\(\)"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_the_whole_table_is_not_copied_unasked(x: freight.UnifiedTensor, name: str) -> None:
    with pytest.raises(UnsupportedError, match=refusal(name.removeprefix("torch."))):
        REFUSED[name](x)
    with pytest.raises(UnsupportedError, match=refusal(name.removeprefix("torch."))):
        REFUSED[name](x[:])


@pytest.mark.parametrize(
    ("name", "copy"),
    [
        ("contiguous", lambda x: x.T.contiguous()),
        ("reshape", lambda x: x.T.reshape(-1)),
        ("flatten", lambda x: x.T.flatten()),
        ("clone", lambda x: x.T.clone()),
        ("clone", lambda x: x.view(-1).clone()),
        ("half", lambda x: x.view(3, 8).half()),
    ],
)
def test_nor_is_all_of_it_under_another_look(
    x: freight.UnifiedTensor, name: str, copy: Callable[[freight.UnifiedTensor], object]
) -> None:
    with pytest.raises(UnsupportedError, match=refusal(name)):
        copy(x)


def test_a_part_is_copied_as_torch_would(x: freight.UnifiedTensor) -> None:
    assert_plain(x[1:3].clone(), X[1:3], CUDA)
    assert_plain(x[2].half(), X[2].half(), CUDA)
    assert_plain(x[:2].to(torch.int64), X[:2].long(), CUDA)


def test_what_copies_nothing_is_not_refused(x: freight.UnifiedTensor) -> None:
    """torch gives the tensor itself; here too what is unified stays so."""
    for same in (x.float(), x.to(torch.float32), x.type(torch.float32), x.contiguous(), x.reshape(6, 4)):
        assert_view(same, X, x)
    assert x.type() == "torch.FloatTensor"
    with pytest.raises(ArgumentError, match="shape"):
        x.reshape(5, 5)


def test_what_is_read_as_a_whole_takes_no_gpu_memory() -> None:
    """64 MiB are summed on the GPU without being there."""
    host = torch.randint(-1000, 1000, (16 * MiB,), dtype=torch.int32)
    x = freight.unified(host)
    x[:4].sum()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total, most, count = x.sum(), x.amax(), (x[: 4 * MiB] == 7).sum()
    assert torch.cuda.max_memory_allocated() - before < 8 * MiB
    assert_plain(total, host.sum(), CUDA)
    assert_plain(most, host.amax(), CUDA)
    assert_plain(count, (host[: 4 * MiB] == 7).sum(), CUDA)


# ---- writes ----------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda x, on: x.add_(1),
    "mul_ by a tensor": lambda x, on: x.mul_(on(OTHER)),
    "zero_": lambda x, on: x.zero_(),
    "copy_": lambda x, on: x.copy_(on(OTHER)),
    "clamp_ of a view": lambda x, on: x[1:3].clamp_(0, 2),
    "index_add_": lambda x, on: x.index_add_(0, on(torch.tensor([1, 4])), on(OTHER[:2])),
    "index_copy_": lambda x, on: x.index_copy_(0, on(torch.tensor([1, 4])), on(OTHER[:2])),
    "masked_fill_": lambda x, on: x.masked_fill_(on(X > 3), -1),
    "out=": lambda x, on: torch.add(on(OTHER), 1, out=x),
    "+=": lambda x, on: x.__iadd__(on(OTHER)),
    "a row": lambda x, on: x.__setitem__(2, on(OTHER[0])),
    "rows": lambda x, on: x.__setitem__(on(torch.tensor([5, 0, -2])), on(OTHER[:3])),
    "rows, int32": lambda x, on: x.__setitem__(on(torch.tensor([5, 0, -2], dtype=torch.int32)), on(OTHER[:3])),
    "rows by ids on the CPU": lambda x, on: x.__setitem__(torch.tensor([5, 0, -2]), on(OTHER[:3])),
    "rows by a list": lambda x, on: x.__setitem__([5, 0, -2], on(OTHER[:3])),
    "rows, one for all": lambda x, on: x.__setitem__(on(torch.tensor([5, 0])), on(OTHER[1])),
    "rows, a number": lambda x, on: x.__setitem__(on(torch.tensor([5, 0])), 8),
    "rows, none": lambda x, on: x.__setitem__(on(torch.zeros(0, dtype=torch.int64)), on(OTHER[:0])),
    "rows of ids of two dimensions": lambda x, on: x.__setitem__(on(torch.tensor([[5, 0], [1, 2]])), on(OTHER[:2])),
    "elements": lambda x, on: x.__setitem__((on(torch.tensor([5, 0])), 1), on(OTHER[:2, 1])),
    "parts of rows": lambda x, on: x.__setitem__((on(torch.tensor([5, 0])), slice(1, 3)), on(OTHER[:2, :2])),
    "pairs": lambda x, on: x.__setitem__((on(torch.tensor([5, 0])), on(torch.tensor([1, 3]))), on(OTHER[0, :2])),
    "a slice": lambda x, on: x.__setitem__(slice(2, 4), on(OTHER[:2])),
    "columns": lambda x, on: x.__setitem__((slice(None), 1), on(OTHER[:, 0])),
    "by a mask": lambda x, on: x.__setitem__(on(X > 3), 0),
    "rows by a mask": lambda x, on: x.__setitem__(on(X[:, 0] > 3), on(OTHER[1])),
    "rows of a view": lambda x, on: x[2:].__setitem__(on(torch.tensor([3, 0])), on(OTHER[:2])),
    "rows of columns": lambda x, on: x.T.__setitem__(on(torch.tensor([3, 0])), on(OTHER.T[:2])),
    "another table": lambda x, on: x.__setitem__(
        slice(None), freight.unified(OTHER) if type(x) is not Tensor else OTHER
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_by_the_gpu_reach_host_memory(x: freight.UnifiedTensor, name: str) -> None:
    """Late: the GPU is busy when it is told to write, and who looks at the memory waits for it."""
    plain = X.clone()
    WRITES[name](plain, lambda tensor: tensor)
    WRITES[name](freight.unified(X), lambda tensor: tensor.cuda())  # compiles what there is to compile
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG // 10)
    WRITES[name](x, lambda tensor: tensor.cuda())
    assert torch.equal(x.host(), plain)
    assert torch.equal(x[torch.arange(6, device="cuda")].cpu(), plain)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.host(),
        lambda x: x.cpu(),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.stack([row.host() for row in x]),
        lambda x: x.to("cuda").cpu(),
        lambda x: x + torch.zeros(4),
        lambda x: torch.as_tensor([float(x[0, 0])]).expand(6, 4),
    ],
    ids=["host", "cpu", "numpy", "tolist", "iteration", "to", "with a CPU tensor", "float"],
)
def test_who_looks_waits_for_writes_under_way(look: Callable[[freight.UnifiedTensor], Tensor]) -> None:
    x = freight.unified(torch.zeros(6, 4))
    ids, rows = torch.arange(6, device="cuda"), torch.full((6, 4), 3.0, device="cuda")
    x[ids] = torch.zeros_like(rows)  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG // 4)
    x[ids] = rows
    assert not torch.cuda.current_stream().query()
    assert torch.equal(look(x), torch.full((6, 4), 3.0))


def test_writing_rows_never_waits() -> None:
    x = freight.unified(torch.zeros(1000, 16))
    ids, rows = torch.randperm(1000, device="cuda"), torch.randn(1000, 16, device="cuda")
    x[ids, 3:9] = rows[:, 3:9]
    x[ids] = rows
    x.mul_(2)
    with never_waiting():
        for _ in range(4):
            x[ids] = rows
            x.mul_(2)
            x[ids, 3:9] = rows[:, 3:9]
    want = torch.empty(1000, 16)
    want[ids.cpu()] = rows.cpu() * 2
    want[ids.cpu(), 3:9] = rows.cpu()[:, 3:9]
    assert torch.equal(x.host(), want)


def test_rows_that_do_not_fit(x: freight.UnifiedTensor) -> None:
    with pytest.raises(ArgumentError, match=r"rows of shape \(2, 3\) do not fit into \(2, 4\), the shape of x\[ids\]"):
        x[torch.tensor([0, 1], device="cuda")] = torch.zeros(2, 3, device="cuda")
    assert torch.equal(x.host(), X)
