"""The unified tensor as a tensor: made of anything, indexed, printed, copied, saved and closed as torch's own are."""

import copy
import gc
import io
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows_on_cpu import BARE, POOR, WHOLE, random_rows, rows_of, unified
from torch import Tensor
from torch.nn.functional import embedding

import freight
from freight import memory
from freight._pages import PAGE
from freight.errors import ArgumentError, ArgumentTypeError, ClosedError, FreightError, UnsupportedError
from freight.kernels._tolerance import assert_same_bits
from freight.rows import RowStats

SHAPES = [(7,), (7, 3), (7, 1), (7, 2, 3), (7, 2, 1, 3), (1, 5), (0, 4), (4, 0), (0,), (0, 0)]
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def table(*shape: int) -> Tensor:
    return torch.arange(float(math.prod(shape))).view(shape)


# ---- made of anything --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WHOLE + POOR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    data = random_rows(math.prod(shape), dtype=dtype).view(shape)
    x = unified(data)
    assert isinstance(x, freight.UnifiedTensor)
    assert isinstance(x, Tensor)
    assert x.is_unified
    assert (x.shape, x.dtype, x.device, x.compute_device) == (data.shape, dtype, CPU, CPU)
    assert_same_bits(x.host(), data)
    assert x.host().data_ptr() != data.data_ptr() or not math.prod(shape)
    assert len(x) == shape[0]
    ids = torch.arange(shape[0])[::2]
    for index in (ids, ids.int(), ids[:, None], ids - shape[0], ids.tolist(), ids.numpy()):
        got = x[index]
        assert type(got) is Tensor
        assert_same_bits(got, rows_of(data, torch.as_tensor(index)))


def test_strided_input() -> None:
    for data in (table(6, 4).t(), table(6, 4)[::2, 1:3], table(1, 4).expand(5, 4), table(2, 3, 4).permute(2, 0, 1)):
        x = unified(data)
        assert x.is_contiguous()
        assert torch.equal(x.host(), data)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16"])
def test_numpy(dtype: str, tmp_path: Path) -> None:
    array = np.arange(24).reshape(6, 4).astype(dtype)
    read_only = array.copy()
    read_only.flags.writeable = False
    np.save(tmp_path / "array.npy", array)
    mapped = np.load(tmp_path / "array.npy", mmap_mode="r")
    for data in (array, read_only, mapped, array.T, array[::-1], array[1:5:2, ::2], np.asfortranarray(array)):
        x = unified(data)
        assert np.array_equal(x.numpy(), data)
        assert not np.shares_memory(x.numpy(), data)


def test_made_empty() -> None:
    x = freight.UnifiedTensor.empty((3, 2), torch.int16, device="cpu")
    assert not x.host().any()
    assert freight.UnifiedTensor.empty(5, device="cpu").dtype is torch.get_default_dtype()
    for shape in ((5,), torch.Size([5]), [5], np.int64(5), (np.int64(5),)):
        assert freight.UnifiedTensor.empty(shape, device="cpu").shape == (5,)  # type: ignore[arg-type]


def test_memory_is_exact_and_on_the_account(held_before: int) -> None:
    """Never the next power of two, and no second copy."""
    x = freight.UnifiedTensor.empty((1000, 1000), device="cpu")
    assert memory.stats().held - held_before == 4_000_000 + -4_000_000 % PAGE
    with (
        freight.config(host_bytes=held_before + 4_500_000),
        pytest.raises(freight.errors.HostMemoryError, match="left"),
    ):
        unified(torch.ones(1000, 1000))
    del x
    gc.collect()
    assert memory.stats().held == held_before


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([[1.0]], ArgumentTypeError, "takes a CPU tensor or a numpy array; got list"),
        (
            torch.ones(2, device="meta"),
            ArgumentTypeError,
            r"torch.strided torch.float32 tensor on meta\. Pass data.cpu",
        ),
        (torch.eye(2).to_sparse(), ArgumentTypeError, r"got a torch.sparse_coo .*Pass data.to_dense\(\)"),
        (torch.tensor(1.0), ArgumentError, "a tensor of at least one dimension; got one without"),
        (torch.ones(2, requires_grad=True), UnsupportedError, "requires_grad=True is not offered.* Train a copy"),
        (torch.ones(2, dtype=torch.complex64).conj(), ArgumentError, r"lazily conjugated.*Pass a clone"),
        (np.array(1.0), ArgumentError, r"at least one size, none negative; got \(\)"),
        (np.array([object()]), ArgumentTypeError, r"no dtype for numpy's dtype\('O'\); convert the array first"),
        (np.zeros(2, [("a", "f4")]), ArgumentTypeError, "no dtype for numpy's"),
        (np.zeros(2, ">f4"), ArgumentTypeError, r"no dtype for numpy's dtype\('>f4'\); convert"),
        (np.array(["text"]), ArgumentTypeError, "no dtype for numpy's"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_is_no_table(data: Any, error: type[FreightError], message: str) -> None:
    for in_place in (False, True):
        if not (in_place and isinstance(data, np.ndarray) and data.ndim == 0):
            with pytest.raises(error, match=message):
                unified(data, in_place=in_place)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((), None, ArgumentError, r"at least one size, none negative; got \(\)"),
        ((3, -1), None, ArgumentError, r"got \(3, -1\)"),
        ((3, 1.5), None, ArgumentTypeError, r"shape must be whole numbers; got \(3, 1.5\)"),
        ("ab", None, ArgumentTypeError, "shape must be whole numbers; got 'ab'"),
        (3, "float32", ArgumentTypeError, "one of torch's that needs no scale, such as int8; got 'float32'"),
        (3, torch.qint8, ArgumentTypeError, "got torch.qint8"),
    ],
)
def test_what_cannot_be_made(shape: Any, dtype: Any, error: type[FreightError], message: str) -> None:
    with pytest.raises(error, match=message):
        freight.UnifiedTensor.empty(shape, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, "meta"])
def test_a_gpu_that_is_not_there(device: str | int, held_before: int) -> None:
    with pytest.raises(UnsupportedError, match="needs a GPU and torch sees none; `freight doctor` says why"):
        freight.unified(table(3, 2), device=device)
    assert memory.stats().held == held_before


# ---- in place ----------------------------------------------------------------------------------------


def test_in_place_is_the_callers_memory(held_before: int) -> None:
    for data in (table(6, 4), table(6, 4).t(), table(8, 4)[2:], table(6, 4)[:, 1:]):
        x = unified(data, in_place=True)
        assert memory.stats().held == held_before
        assert x.host().data_ptr() == x.data_ptr() == data.data_ptr()
        assert x.stride() == data.stride()
        data[1] = -5
        assert torch.equal(x[torch.tensor([1])], data[1:2])
        x[0] = 7
        assert (data[0] == 7).all()


def test_in_place_over_numpy() -> None:
    array = np.arange(12.0).reshape(4, 3)
    x = unified(array, in_place=True)
    assert np.shares_memory(x.numpy(), array)
    array[2] = 9
    assert x[[2]].tolist() == [[9, 9, 9]]
    read_only = array.copy()
    read_only.flags.writeable = False
    with pytest.raises(
        ArgumentError, match=r"a read-only array cannot be page-locked in place; leave in_place=True out"
    ):
        unified(read_only, in_place=True)


def test_in_place_memory_lives_as_long_as_the_table() -> None:
    x = unified(np.arange(12.0).reshape(4, 3), in_place=True)
    gc.collect()
    assert x[[3]].tolist() == [[9, 10, 11]]


def test_in_place_at_an_odd_address() -> None:
    odd = torch.frombuffer(bytearray(41), dtype=torch.uint8, offset=1).numpy().view(np.float32)
    with pytest.raises(
        ArgumentError, match=r"does not begin at a multiple of its elements' size; leave in_place=True out"
    ):
        unified(torch.from_numpy(odd), in_place=True)
    assert torch.equal(unified(odd).host(), torch.zeros(10))


# ---- what it is --------------------------------------------------------------------------------------


def test_iteration() -> None:
    x = unified(table(4, 3))
    rows = list(x)
    assert [row.tolist() for row in rows] == table(4, 3).tolist()
    assert all(row.is_unified for row in rows)
    rows[2][:] = -1
    assert (x.host()[2] == -1).all()
    assert list(unified(torch.ones(0, 3))) == []
    assert [float(value) for value in unified(table(3))] == [0, 1, 2]
    assert torch.equal(next(iter(reversed(x))), x.host()[3])


@pytest.mark.parametrize(
    "index", [0, -1, slice(1, 3), slice(2, 2), ..., None, (1, 2), (slice(None), 1), (..., 0)], ids=str
)
def test_views_share_and_stay_unified(index: Any) -> None:
    x = unified(table(4, 3))
    view = x[index]
    assert view.is_unified
    assert torch.equal(view.host(), table(4, 3)[index])
    x.host()[:] = 8
    assert (view.host() == 8).all()


VIEWS = {
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(0, 1),
    "view": lambda x: x.view(3, 4),
    "view_as": lambda x: x.view_as(torch.ones(12)),
    "view of a dtype": lambda x: x.view(torch.int32),
    "reshape": lambda x: x.reshape(2, 6),
    "flatten": lambda x: x.flatten(),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "unbind": lambda x: x.unbind()[1],
    "split": lambda x: x.split(2)[1],
    "chunk": lambda x: torch.chunk(x, 2)[0],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x[None].squeeze(0),
    "expand": lambda x: x[:1].expand(5, 3),
    "select": lambda x: x.select(1, 2),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (3, 1)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "movedim": lambda x: torch.movedim(x, 0, 1),
    "contiguous": lambda x: x.contiguous(),
    "same dtype": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("shape", [(4, 3), (0, 3)], ids=str)
def test_views_by_every_name(name: str, shape: tuple[int, ...]) -> None:
    plain, view = table(4, 3), VIEWS[name]
    x = unified(plain)
    got = view(x)
    assert got.is_unified
    assert torch.equal(got.host(), view(plain))
    x.host().fill_(3)
    assert torch.equal(got.host(), view(torch.full((4, 3), 3.0)))


def test_empty_views_stay_unified() -> None:
    for x in (unified(table(4, 3))[4:], unified(torch.ones(0, 3)), unified(torch.ones(3, 0))):
        for view in (x[:0], x.t(), x[..., :0], x.view(-1), x[None]):
            assert view.is_unified
            assert view.host().shape == view.shape


def test_views_of_complex_tables() -> None:
    data = torch.randn(4, 3, dtype=torch.complex64)
    x = unified(data)
    for view in (torch.view_as_real, torch.real, torch.imag, torch.conj, lambda c: c.mH, lambda c: c.conj().imag):
        assert view(x).is_unified
        assert torch.equal(view(x).host(), view(data))
        assert torch.equal(view(x) + 1, view(data) + 1)
        assert torch.equal(copy.deepcopy(view(x)).host(), view(data))
    x.conj()[torch.tensor([1])] = 2 + 3j
    assert x.host()[1].tolist() == [2 - 3j] * 3


def test_printing() -> None:
    x = unified(torch.zeros(1000, 256, dtype=torch.float16))
    shown = repr(x)
    assert shown == str(x) == f"{x}"
    kind = "page-locked" if torch.cuda.is_available() else "pageable"
    assert shown == (
        f"UnifiedTensor(shape=(1000, 256), dtype=torch.float16, computes on cpu, 500 KiB of {kind} host memory)"
    )
    assert "shape=(10, 256)" in repr(x[:10])
    assert repr(x[:10]).endswith("5 KiB of " + kind + " host memory, a view of 500 KiB)")
    assert f"{x[0, 0]:.2f}" == "0.00"
    x.close()
    assert repr(x) == "UnifiedTensor(closed, shape=(1000, 256), dtype=torch.float16)"


def test_statistics() -> None:
    x = unified(table(10, 4))
    assert x.stats() == RowStats(0, 0, 0, 0, 160, 0, 0)
    x[torch.tensor([1, 2, 2])]
    x[1:3][torch.tensor([0])]
    x.index_select(0, torch.tensor([3]))
    stats = x.stats()
    assert (stats.rows, stats.hot_rows, stats.host_bytes, stats.hot_bytes) == (5, 0, 80, 0)
    x[3], x[1:2], x.sum()
    assert x.stats().rows == 5


def test_bare_dtypes_can_be_held() -> None:
    for dtype in BARE:
        data = random_rows(4, 3, dtype=dtype)
        for x in (unified(data), unified(data, in_place=True)):
            assert_same_bits(x.host(), data)
            assert str(dtype) in repr(x)


def test_questions_to_the_cpu() -> None:
    x = unified(table(2, 2))
    assert x.tolist() == [[0, 1], [2, 3]]
    assert x[1, 1].item() == 3
    assert float(x[1, 0]) == 2
    assert int(x[0, 1]) == 1
    assert not bool(x[0, 0])
    assert x[1, 1].is_nonzero()
    assert 3.0 in x
    assert [10, 20][unified(torch.tensor([1]))[0]] == 20  # type: ignore[call-overload]
    assert np.shares_memory(np.asarray(x), x.numpy())
    assert torch.from_dlpack(x).data_ptr() == x.data_ptr()
    assert x.numel() == 4
    assert x.element_size() == 4
    assert x.type() == "torch.FloatTensor"
    assert len({x, x}) == 1


# ---- rows by torch's other names -----------------------------------------------------------------------


def test_rows_by_other_names() -> None:
    data = table(6, 4)
    x, ids = unified(data), torch.tensor([5, 0, 5])
    for rows in (
        x.index_select(0, ids),
        x.index_select(dim=-2, index=ids.int()),
        torch.index_select(x, 0, ids),
        torch.index_select(input=x, dim=0, index=ids),
        embedding(ids, x),
        embedding(ids.int(), weight=x, padding_idx=0),
        torch.nn.Embedding.from_pretrained(x)(ids),
        torch.index_select(x, 0, ids, out=torch.empty(3, 4)),
        x.gather(0, ids[:, None].expand(3, 4)),
        x.take_along_dim(ids[:, None], 0),
    ):
        assert type(rows) is Tensor
        assert torch.equal(rows, data[ids])
    assert torch.equal(embedding(ids.view(3, 1), x), data[ids.view(3, 1)])
    assert torch.equal(x.index_select(1, torch.tensor([2])), data[:, 2:3])
    assert torch.equal(x.index_select(0, torch.tensor(2)), data[2:3])
    assert torch.equal(x.take(torch.tensor([[23, -24]])), data.take(torch.tensor([[23, -24]])))
    assert torch.equal(x.t().take(torch.tensor([1])), data.t().take(torch.tensor([1])))
    out = torch.empty(1)
    assert torch.take(x, torch.tensor([7]), out=out) is out
    assert out.item() == 7


@pytest.mark.parametrize(
    "ids", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1], dtype=torch.uint8)], ids=str
)
def test_ids_that_are_no_integers(ids: Tensor) -> None:
    x = unified(table(6, 4))
    for call in (lambda: x.index_select(0, ids), lambda: embedding(ids, x), lambda: x.take(ids)):
        with pytest.raises(ArgumentTypeError, match=r"ids must be int32 or int64; got torch\."):
            call()


def test_index_select_of_too_many_dimensions() -> None:
    with pytest.raises(IndexError, match="supposed to be a vector"):
        unified(table(6, 4)).index_select(0, torch.tensor([[1]]))


def test_embedding_that_would_write() -> None:
    with pytest.raises(UnsupportedError, match=r"max_norm writes to its table; call it on x\.host\(\)"):
        embedding(torch.tensor([0]), unified(table(6, 4)), max_norm=1.0)


# ---- no gradients --------------------------------------------------------------------------------------


def test_gradients_are_refused_by_name() -> None:
    x = unified(table(3, 2))
    for ask in (
        lambda: x.requires_grad_(),
        lambda: x.requires_grad_(True),
        lambda: x.requires_grad_(requires_grad=True),
        lambda: setattr(x, "requires_grad", True),
        lambda: torch.nn.Parameter(x),
    ):
        with pytest.raises(UnsupportedError, match="requires_grad=True is not offered for unified tensors"):
            ask()
    x.requires_grad_(False)
    x.requires_grad = False
    assert not x.requires_grad
    assert torch.nn.Parameter(x, requires_grad=False).is_unified  # type: ignore[attr-defined]


def test_gradients_pass_beside_it() -> None:
    weight = torch.randn(2, 4, requires_grad=True)
    x = unified(torch.randn(3, 2))
    [got] = torch.autograd.grad((x @ weight).square().sum(), weight)
    [want] = torch.autograd.grad((x.host() @ weight).square().sum(), weight)
    assert torch.equal(got, want)


WRITES = {
    "x[0] =": lambda x, value: x.__setitem__(0, value),
    "x[ids] =": lambda x, value: x.__setitem__(torch.tensor([0, 1]), value),
    "x[:] =": lambda x, value: x.__setitem__(slice(None), value),
    "add_": lambda x, value: x.add_(value),
    "copy_": lambda x, value: x.copy_(value),
    "view": lambda x, value: x[1:].mul_(value),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_has_a_gradient_is_not_written(name: str) -> None:
    """The table would pass it on, and keep every step's graph."""
    x, value = unified(torch.zeros(3, 2)), torch.ones(2, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"requires a gradient.*write value\.detach\(\), or write under"):
        WRITES[name](x, value)
    assert not x.requires_grad
    assert not x.host().any()
    WRITES[name](x, value.detach())
    with torch.no_grad():
        WRITES[name](x, value)
    assert not x.requires_grad


# ---- copies --------------------------------------------------------------------------------------------


def test_copy_is_another_name_and_deepcopy_another_table() -> None:
    x = unified(table(4, 3))
    same, other = copy.copy(x), copy.deepcopy(x)
    assert isinstance(other, freight.UnifiedTensor)
    x.host()[0] = 9
    assert (same.host()[0] == 9).all()
    assert torch.equal(other.host(), table(4, 3))
    twice = copy.deepcopy([x, x])
    assert twice[0] is twice[1]
    view = copy.deepcopy(x[1:3])
    assert view.is_unified
    assert torch.equal(view.host(), table(4, 3)[1:3])
    x.close()
    assert torch.equal(other.host(), table(4, 3))


@pytest.mark.parametrize("dtype", WHOLE + POOR, ids=str)
def test_deepcopy_of_every_dtype(dtype: torch.dtype) -> None:
    data = random_rows(4, 3, dtype=dtype)
    assert_same_bits(copy.deepcopy(unified(data)).host(), data)


def test_pickled_as_a_plain_tensor() -> None:
    x = unified(table(4, 3))
    for part in (x, x[1:3], x.t(), x[:, 1:]):
        got = pickle.loads(pickle.dumps(part))
        assert type(got) is Tensor
        assert torch.equal(got, part.host())
    assert len(pickle.dumps(unified(table(10_000, 3))[:2])) < 2000  # a view goes as what it shows


def test_saved_as_a_plain_tensor(tmp_path: Path) -> None:
    """It loads without freight, with weights_only too, and alone or among others."""
    x = unified(table(4, 3))
    torch.save({"x": x, "view": x[1:], "half": unified(table(2, 2).bfloat16())}, tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert {name: type(tensor) for name, tensor in loaded.items()} == dict.fromkeys(("x", "view", "half"), Tensor)
    code = (
        "import sys; sys.modules['freight'] = None\n"
        "import torch; loaded = torch.load(sys.argv[1])\n"
        "print(loaded['x'].tolist(), loaded['view'].shape, loaded['half'].dtype)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "saved.pt")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == f"{table(4, 3).tolist()} torch.Size([3, 3]) torch.bfloat16\n"
    x.host()[0] = 5
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file), x.host())


def test_in_a_module() -> None:
    module = torch.nn.Module()
    module.register_buffer("features", unified(table(4, 3)))
    assert module.features.is_unified
    assert torch.equal(module.state_dict()["features"].host(), table(4, 3))
    module.load_state_dict({"features": torch.full((4, 3), 2.0)})
    assert (module.features.host() == 2).all()
    module.share_memory()
    assert (module.features[torch.tensor([0])] == 2).all()


# ---- the end -------------------------------------------------------------------------------------------


def test_closed() -> None:
    x = unified(table(4, 3))
    view, row, array = x[1:], x[0], x.numpy()
    x.close()
    x.close()
    uses: list[Any] = [
        lambda: x[0],
        lambda: x[torch.tensor([0])],
        lambda: x[[0]],
        lambda: x[torch.zeros(0, dtype=torch.int64)],
        lambda: x.__setitem__(0, 1),
        lambda: x.sum(),
        lambda: x + 1,
        lambda: x.host(),
        lambda: x.cpu(),
        lambda: x.to("cpu"),
        lambda: x.numpy(),
        lambda: x.tolist(),
        lambda: x.stats(),
        lambda: x.check(),
        lambda: x.refresh(),
        lambda: len(x),
        lambda: list(x),
        lambda: x.shape,
        lambda: x.t(),
        lambda: copy.deepcopy(x),
        lambda: pickle.dumps(x),
        lambda: x.share_memory_(),
        lambda: freight.gather_rows(x, torch.tensor([0])),
        lambda: freight.gather_rows(x, torch.tensor([0]), out=torch.empty(1, 3)),
        lambda: x.index_select(0, torch.tensor([0])),
        lambda: x.take(torch.tensor([0])),
        lambda: embedding(torch.tensor([0]), x),
        lambda: unified(x, cache=1, hot_ids=[0]).stats(),
        lambda: view[torch.tensor([0])],
        lambda: row.item(),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="was closed; make a new one"):
            use()
    assert repr(x).startswith("UnifiedTensor(closed")
    assert array.tolist() == table(4, 3).tolist()  # what was lent lasts


def test_memory_goes_with_the_last_that_can_reach_it(held_before: int) -> None:
    x = unified(table(1000, 100))
    view, host, rows = x[5:7], x.host(), x[torch.tensor([1])]
    assert memory.stats().held > held_before
    del x
    gc.collect()
    assert view[torch.tensor([0])].tolist() == table(1000, 100)[5:6].tolist()
    del view
    gc.collect()
    assert memory.stats().held > held_before
    assert host[2, 3] == 203
    del host
    gc.collect()
    assert memory.stats().held == held_before
    assert rows[0, 0] == 100


def test_closed_memory_goes(held_before: int) -> None:
    x = unified(table(1000, 100))
    x.close()
    del x
    gc.collect()
    assert memory.stats().held == held_before


def test_no_cycle_keeps_a_table(held_before: int) -> None:
    """The memory of a large table must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        x = unified(table(1000, 100))
        x[torch.tensor([1])], x[1:3], x.sum(), repr(x), list(x), x.stats(), x.host()
        x[torch.tensor([1])] = 3
        freight.gather_rows(x, [torch.tensor([0])])
        del x
        assert memory.stats().held == held_before
    finally:
        gc.enable()
