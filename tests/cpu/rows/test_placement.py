"""Where operations compute and what they give: without a GPU always the CPU, and what torch gives for the same rows."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rows_on_cpu import unified
from torch import Tensor

import freight
from freight import memory
from freight.errors import ArgumentError, UnsupportedError

DATA = torch.arange(1.0, 13.0).view(4, 3)
CPU = torch.device("cpu")


def same(got: Any, want: Any) -> None:
    """Plain tensors, numbers, or tuples of them, on the CPU and equal."""
    if isinstance(want, tuple | list):
        assert type(got) is type(want)
        for one, other in zip(got, want, strict=True):
            same(one, other)
    elif isinstance(want, Tensor):
        assert type(got) is Tensor
        assert got.device == CPU
        assert got.dtype is want.dtype
        assert torch.equal(got, want)
    else:
        assert got == want


COMPUTES: dict[str, Callable[[Any], Any]] = {
    "number": lambda x: x * 2,
    "number first": lambda x: 1 - x,
    "scalar tensor": lambda x: x + torch.tensor(2.0),
    "itself": lambda x: x @ x.t(),
    "a plain tensor": lambda x: x + torch.ones(4, 3),
    "a plain tensor first": lambda x: torch.ones(4, 3) - x,
    "one that is spread": lambda x: x * torch.ones(3),
    "numpy": lambda x: x + torch.from_numpy(np.ones(3, np.float32)),
    "several": lambda x: torch.cat([x, torch.ones(1, 3), x]),
    "stack": lambda x: torch.stack((x, x)),
    "where": lambda x: torch.where(x > 3, x, 0.0),
    "sum": lambda x: x.sum(),
    "mean of a dimension": lambda x: torch.mean(x, dim=0),
    "two results": lambda x: x.max(0),
    "two results of torch": lambda x: torch.sort(x, dim=1, descending=True),
    "topk": lambda x: x.topk(2),
    "list of results": lambda x: torch.meshgrid(x[:, 0] * 1, x[0] * 1, indexing="ij"),
    "comparison": lambda x: x == 5,
    "equal": lambda x: torch.equal(x, DATA),
    "allclose": lambda x: torch.allclose(x, DATA),
    "cast": lambda x: x.double(),
    "cast by to": lambda x: x.to(torch.float16),
    "cast to another's": lambda x: x.type_as(torch.ones(1, dtype=torch.int64)),
    "copy by to": lambda x: x.to(torch.float32, copy=True),
    "clone": lambda x: x.clone(),
    "new": lambda x: x.new_zeros(2, 2),
    "like": lambda x: torch.ones_like(x),
    "linear": lambda x: torch.nn.functional.linear(x, torch.ones(2, 3)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "gather": lambda x: x.gather(1, torch.zeros(4, 1, dtype=torch.int64)),
    "gather by name": lambda x: torch.gather(x, dim=1, index=torch.zeros(4, 1, dtype=torch.int64)),
    "masked_select": lambda x: x.masked_select(DATA > 4),
    "mask": lambda x: x[x > 4],
    "nonzero": lambda x: (x > 4).nonzero(),
    "rest of rows": lambda x: x[1:].sum(0),
    "negation": operator.neg,
    "as float": lambda x: float(x.sum()),
}


@pytest.mark.parametrize("name", COMPUTES)
def test_computes_what_torch_computes(name: str) -> None:
    x = unified(DATA)
    same(COMPUTES[name](x), COMPUTES[name](DATA))
    assert torch.equal(x.host(), DATA)


def test_every_operator() -> None:
    x, y = unified(DATA.int()), DATA.int()
    other = torch.full((4, 3), 3, dtype=torch.int32)
    names = "add sub mul truediv floordiv mod pow and_ or_ xor lshift rshift eq ne lt le gt ge"
    for name in names.split():
        work = getattr(operator, name)
        for value in (2, other, torch.tensor(2, dtype=torch.int32)):
            same(work(x, value), work(y, value))
            same(work(value, x), work(value, y))
        same(work(x, x), work(y, y))
    for name in ("neg", "abs", "invert"):
        same(getattr(operator, name)(x), getattr(operator, name)(y))
    assert (+x).host().equal(y)


# ---- writes ------------------------------------------------------------------------------------------

IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "add_": lambda x: x.add_(1),
    "mul_ by a tensor": lambda x: x.mul_(torch.tensor([1.0, 2.0, 3.0])),
    "copy_": lambda x: x.copy_(torch.zeros(4, 3)),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(2),
    "clamp_": lambda x: x.clamp_(2, 5),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 3)),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([3]), torch.ones(1, 3)),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0]), -1),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 3, dtype=torch.int64), 9.0),
    "masked_fill_": lambda x: x.masked_fill_(DATA > 3, 0),
    "put_": lambda x: x.put_(torch.tensor([0, 11]), torch.tensor([5.0, 6.0])),
    "torch.add to out": lambda x: torch.add(DATA, 1, out=x),
    "torch.mul to itself": lambda x: torch.mul(x, 3, out=x),
    "torch.relu_": lambda x: torch.relu_(x),
    "init": lambda x: torch.nn.init.constant_(x, 4.0),
    "+=": lambda x: operator.iadd(x, 1),
    "-= itself": lambda x: operator.isub(x, x),
    "@": lambda x: torch.matmul(DATA, torch.ones(3, 3), out=x),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_gives_the_very_object(name: str) -> None:
    x, plain = unified(DATA), DATA.clone()
    address = x.data_ptr()
    assert IN_PLACE[name](x) is x
    assert torch.equal(x.host(), IN_PLACE[name](plain))
    assert x.data_ptr() == address


def test_what_is_written_to_a_plain_tensor_is_plain() -> None:
    x, plain = unified(DATA), torch.zeros(4, 3)
    assert plain.copy_(x) is plain
    assert torch.add(x, 1, out=plain) is plain
    plain += x
    assert type(plain) is Tensor
    assert torch.equal(plain, 2 * DATA + 1)
    plain[torch.tensor([0, 1])] = x[2:]
    assert torch.equal(plain[:2], DATA[2:])
    plain[2:] = x[:2]
    assert torch.equal(plain[2:], DATA[:2])


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, 5),
        (-1, torch.ones(3)),
        (slice(1, 3), torch.ones(2, 3, dtype=torch.float64)),
        (..., 2.5),
        ((slice(None), 1), torch.arange(4)),
        ((2, 2), 7),
        (torch.tensor([3, 0]), torch.ones(2, 3)),
        (torch.tensor([3, -4], dtype=torch.int32), -1),
        ([1, 2], torch.tensor([4.0, 5.0, 6.0])),
        (np.array([1, 2]), 0),
        (torch.tensor([True, False, False, True]), torch.ones(2, 3)),
        ((torch.tensor([1, 2]), 1), torch.tensor([8.0, 9.0])),
        ((torch.tensor([1, 2]), slice(1, 3)), 0),
        ((slice(None), torch.tensor([0, 2])), 6),
        ((torch.tensor([1, 2]), torch.tensor([0, 2])), torch.tensor([8.0, 9.0])),
        (DATA > 6, 0),
        (torch.zeros(0, dtype=torch.int64), 5),
        ([], 5),
    ],
    ids=str,
)
def test_rows_written(index: Any, value: Any) -> None:
    x, plain = unified(DATA), DATA.clone()
    x[index] = value
    plain[index] = value
    assert torch.equal(x.host(), plain)
    y = unified(DATA)
    view = y[:]
    view[index] = unified(value) if isinstance(value, Tensor) and value.dim() else value
    assert torch.equal(y.host(), plain)


def test_rows_written_through_a_view_and_by_others() -> None:
    x = unified(DATA)
    x[1:3][0] = -1
    x.t()[2] = -2
    x.host()[3] = -3
    x.numpy()[0, 0] = -4
    x[2:] += 10
    for row in x:
        row[1] = 0
    assert x.tolist() == [[-4, 0, -2], [-1, 0, -2], [17, 0, 8], [7, 0, 7]]


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, torch.ones(4)),
        (torch.tensor([0, 1]), torch.ones(3, 3)),
        (9, 1),
        ((0, 0, 0), 1),
        (torch.tensor([9]), 1),
        (1.5, 1),
    ],
    ids=str,
)
def test_what_does_not_fit_changes_nothing(index: Any, value: Any) -> None:
    x, plain = unified(DATA), DATA.clone()
    with pytest.raises(Exception) as theirs:
        plain[index] = value
    with pytest.raises(theirs.type):
        x[index] = value
    assert torch.equal(x.host(), DATA)


# ---- to the CPU, to another process, to a GPU ----------------------------------------------------------


def test_to_the_cpu_is_the_memory_itself() -> None:
    x = unified(DATA)
    for plain in (
        x.host(),
        x.cpu(),
        x.to("cpu"),
        x.to(CPU),
        x.to(torch.ones(1)),
        x.to("cpu", torch.float32),
        x.to(device=CPU),
    ):
        assert type(plain) is Tensor
        assert plain.data_ptr() == x.data_ptr()
        plain[0] += 1
    assert (x.host()[0] == DATA[0] + 7).all()
    assert x.to(torch.float32) is x
    assert x.to(x) is not None
    assert x.to("cpu", torch.float64).dtype is torch.float64
    assert torch.ones(2).to(x).dtype is torch.float32
    strided = unified(DATA)[::2, 1:]
    assert torch.equal(strided.cpu(), DATA[::2, 1:])
    assert strided.cpu().stride() == (6, 1)


def test_what_is_lent_can_be_moved_without_the_table(held_before: int) -> None:
    """Torch moves a tensor's memory to send it to another process; the table stays where the GPU knows it."""
    x = unified(DATA)
    address = x.data_ptr()
    for lent in (x.host(), x.cpu(), x.to("cpu"), x[1:].host()):
        lent.share_memory_()
    assert x.data_ptr() == x._table.block.address == address
    assert x.share_memory_() is x
    assert x.data_ptr() == address
    x.host()[0] = 0
    assert x[torch.tensor([0])].sum() == 0


def test_shared_in_place() -> None:
    x = unified(DATA.clone(), in_place=True)
    with pytest.raises(UnsupportedError, match=r"in_place=True\) cannot go to other processes; leave in_place out"):
        x.share_memory_()


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda x: x.t_(), r"x\.t_\(\.\.\.\) would part x from its table.*write x = x\.t\(\.\.\.\)"),
        (lambda x: x.transpose_(0, 1), r"x = x\.transpose\("),
        (lambda x: x.unsqueeze_(0), r"x = x\.unsqueeze\("),
        (lambda x: x.squeeze_(), r"x = x\.squeeze\("),
        (lambda x: x.resize_(2, 2), r"x = freight\.unified\("),
        (lambda x: x.set_(torch.ones(2)), r"x = freight\.unified\("),
        (lambda x: setattr(x, "data", torch.ones(2)), r"x\.data = \.\.\. would part x.*write x\[:\] = \.\.\."),
    ],
)
def test_what_would_part_it_from_its_table(call: Callable[[Any], Any], instead: str) -> None:
    x = unified(DATA)
    with pytest.raises(UnsupportedError, match=instead):
        call(x)
    assert torch.equal(x.host(), DATA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")
def test_to_a_gpu_that_is_not_there() -> None:
    x = unified(DATA)
    for ask in (x.cuda, lambda: x.to("cuda")):
        with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
            ask()


# ---- what a GPU is not to do unasked -------------------------------------------------------------------


def on_a_gpu() -> Any:
    """A table that says it computes on a GPU. What is refused is refused before anything goes there."""
    block = memory.allocate(DATA.nbytes, shareable=True)
    plain = block.tensor(DATA.dtype, tuple(DATA.shape))
    return freight.UnifiedTensor._over(block, plain.copy_(DATA), torch.device("cuda", 0))


WHOLE_COPIES: dict[str, Callable[[Any], Any]] = {
    "clone": lambda x: x.clone(),
    "torch.clone": torch.clone,
    "float": lambda x: x.half(),
    "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.float64),
    "to copy": lambda x: x.to(torch.float32, copy=True),
    "type": lambda x: x.type(torch.int64),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.int8)),
    "bool": lambda x: x.bool(),
    "clone of a view": lambda x: x[:].clone(),
    "clone of elements": lambda x: x._wrap(x._plain.view(-1), x._table).clone(),
    "contiguous": lambda x: x.T.contiguous(),
    "reshape": lambda x: x.T.reshape(12),
    "flatten": lambda x: x.T.flatten(),
}


@pytest.mark.parametrize("name", WHOLE_COPIES)
def test_copies_of_a_whole_table_are_refused(name: str) -> None:
    x = on_a_gpu()
    with pytest.raises(
        UnsupportedError,
        match=r"would copy the whole table to cuda:0\. Take the rows you need.*say x\.to\('cuda'\).*x\.host",
    ):
        WHOLE_COPIES[name](x)


def test_a_reshape_that_fits_no_shape_says_so() -> None:
    with pytest.raises(ArgumentError, match=r"shape '\[5\]' is invalid"):
        on_a_gpu().reshape(5)


def test_questions_do_not_copy() -> None:
    x = on_a_gpu()
    assert x.type() == "torch.FloatTensor"
    assert x.to(torch.float32) is x
    assert x.cpu().data_ptr() == x.data_ptr()
    assert (x.shape, x.device, x.compute_device) == ((4, 3), CPU, torch.device("cuda", 0))
    assert x.tolist() == DATA.tolist()
    assert x[1:].is_unified
    assert x.T.is_unified
    assert torch.equal(copy.copy(x).host(), DATA)
    assert "computes on cuda:0" in repr(x)
