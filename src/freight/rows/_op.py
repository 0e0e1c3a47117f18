"""The operator `freight::gather_rows`: which table, which device, which way; and the public function.

    table on the CPU and unified    the rows land where the table computes, read in place where that is a GPU
    table on a GPU                  the rows land there
    any other table on the CPU      the rows land on the CPU, by the reference

It is registered by `torch.library.Library`, not by `custom_op`: a gather of few rows is a matter of microseconds, and
half of them would be the decorator's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from freight._config import current
from freight.errors import ArgumentError, ArgumentTypeError, OutOfRangeError, UnsupportedError
from freight.rows import _gather
from freight.rows._gather import casts, fill_bytes
from freight.rows._table import Table, out_of_range, table_of

_library = torch.library.Library("freight", "FRAGMENT")
_library.define(
    "gather_rows(Tensor table, Tensor ids, *, Device device, ScalarType dtype, int token=0, bool wrap=True, "
    "int? sms=None) -> Tensor"
)
_library.define(
    "gather_rows_out(Tensor table, Tensor ids, Tensor(a!) out, *, int token=0, bool wrap=True, int? sms=None) -> ()"
)


def _functional(
    table: Tensor,
    ids: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
    token: int = 0,
    wrap: bool = True,
    sms: int | None = None,
) -> Tensor:
    out = _empty(table, ids, device=device, dtype=dtype)
    _into(table, ids, out, token=token, wrap=wrap, sms=sms)
    return out


def _empty(table: Tensor, ids: Tensor, *, device: torch.device, dtype: torch.dtype, **_: object) -> Tensor:
    return torch.empty((*ids.shape, *table.shape[1:]), dtype=dtype, device=device)


def _into(
    table: Tensor, ids: Tensor, out: Tensor, *, token: int = 0, wrap: bool = True, sms: int | None = None
) -> None:
    held = table_of(token)
    if held is not None:
        held.check_fault()
        held.rows_asked += ids.numel()
        held.bytes_asked += out.numel() * table.element_size()
    if out.device.type == "cpu":
        _on_cpu(table, ids, out, wrap)
        return
    if held is None and table.device != out.device:
        raise ArgumentError(
            f"rows of a table on {table.device} cannot be read by {out.device}: make the table with freight.unified."
        )
    if ids.device.type == "cpu":
        _check_range(ids, len(table), wrap)
        ids = ids.to(out.device, non_blocking=True)
    elif ids.device != out.device:
        raise ArgumentError(f"ids are on {ids.device} and the rows land on {out.device}; move them there.")
    source = table if held is None else held.on_gpu(table)
    if _rows_contiguous(table):
        _launch(source, ids.contiguous(), out, held, table, wrap, sms)
    else:
        _by_torch(source, ids, out, held, wrap)
    if held is not None and current().check_ids:
        held.wait()


def _launch(
    source: Tensor, ids: Tensor, out: Tensor, held: Table | None, table: Tensor, wrap: bool, sms: int | None
) -> None:
    hot, fault, ordered = None, None, False
    if held is not None:
        fault = held.fault.on_gpu
        ordered = held.ordered(table.stride(0) * table.element_size(), ids.numel())
        hot = held.hot if held.hot is not None and held.is_whole(table) else None
    to = out
    if out.dtype is not table.dtype and not casts(table.dtype, out.dtype, out.device):
        to = torch.empty(out.shape, dtype=table.dtype, device=out.device)
    elif not out.is_contiguous():
        to = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    _gather.launch(source, ids, to, hot=hot, fault=fault, ordered=ordered, wrap=wrap, sms=sms)
    if to is not out:
        out.copy_(to)


def _by_torch(source: Tensor, ids: Tensor, out: Tensor, held: Table | None, wrap: bool) -> None:
    """Rows that do not lie in one piece, such as those of a transposed view: read in place, by torch's own kernel."""
    ids = ids.to(torch.int64)
    rows = torch.where(ids < 0, ids + len(source), ids) if wrap else ids
    bad = (rows < 0) | (rows >= len(source))
    read = source.index_select(0, rows.clamp(0, len(source) - 1).view(-1)).view(out.shape)
    fill = fill_bytes(source.dtype).view(source.dtype).to(source.device)
    out.copy_(torch.where(bad.view(*bad.shape, *[1] * (source.dim() - 1)), fill, read))
    if held is not None:
        first = bad.view(-1).to(torch.int8).argmax()
        words = torch.stack([ids.view(-1)[first], torch.full_like(first, len(source))])
        held.fault.on_gpu.copy_(torch.where(bad.any(), words, held.fault.on_gpu))


def _on_cpu(table: Tensor, ids: Tensor, out: Tensor, wrap: bool) -> None:
    ids = ids.cpu()
    _check_range(ids, len(table), wrap)
    rows = torch.where(ids < 0, ids + len(table), ids).view(-1) if wrap else ids.reshape(-1)
    if not out.numel():
        return
    if out.dtype is table.dtype and out.is_contiguous():
        to = _as_integers(out).view(len(rows), *table.shape[1:])
        torch.index_select(_as_integers(table), 0, rows.to(torch.int64), out=to)
    else:
        out.copy_(_as_integers(table)[rows.to(torch.int64)].view(table.dtype).view(out.shape))


def _as_integers(x: Tensor) -> Tensor:
    """The same elements as integers of their size: torch cannot index every dtype on the CPU."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds[x.element_size()]) if x.element_size() in kinds else x


def _check_range(ids: Tensor, rows: int, wrap: bool) -> None:
    """Ids on the CPU are looked at before anything is read."""
    if ids.numel() == 0:
        return
    least, most = (int(end) for end in torch.aminmax(ids))
    if most >= rows or least < (-rows if wrap else 0):
        raise OutOfRangeError(out_of_range(most if most >= rows else least, rows))


def _rows_contiguous(table: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(table.shape[1:]), reversed(table.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return table.stride(0) >= expected or len(table) <= 1


_library.impl("gather_rows", _functional, "CompositeExplicitAutograd")
_library.impl("gather_rows_out", _into, "CompositeExplicitAutograd")


torch.library.register_fake("freight::gather_rows")(_empty)
torch.library.register_fake("freight::gather_rows_out")(lambda table, ids, out, **_: None)


def read(held: Table, rows: Tensor, ids: Tensor, *, wrap: bool = True) -> Tensor:
    """Rows `ids` of a plain tensor inside an open table, where the table computes."""
    held.check_open()
    return torch.ops.freight.gather_rows.default(
        rows, ids, device=held.device, dtype=rows.dtype, token=held.token, wrap=wrap
    )


# ---- public function -----------------------------------------------------------------------------


def gather_rows(
    x: Tensor,
    ids: Tensor | Sequence[Tensor],
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    sms: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Rows `ids` of `x`: what `x[ids]` gives, with a place to put them, a cast on the way, or several batches at once.

    `ids` are int32 or int64 of any shape, on either device; negative ones count from the end. A sequence of tensors
    is gathered in one call, which looks fewer pages of a large table up, and gives a tuple. `out` takes the rows;
    `dtype` is theirs (float16, bfloat16 and float8 become float32 without another pass). `sms` bounds the
    multiprocessors that copy, so that other kernels go on beside it; the current stream is the one it runs on.

    >>> import freight, torch
    >>> x = freight.unified(torch.arange(6.0).view(3, 2))
    >>> freight.gather_rows(x, torch.tensor([2, 0])).tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    >>> [rows.shape[0] for rows in freight.gather_rows(x, [torch.tensor([1]), torch.tensor([0, 2])])]
    [1, 2]
    """
    table, device, token = _plain(x)
    if isinstance(ids, Tensor):
        _check_ids(ids)
        return _gathered(table, ids, out, dtype, device, token, sms)
    batches = list(ids)
    for batch in batches:
        _check_ids(batch)
    if out is not None:
        raise ArgumentError("out takes the rows of one batch; gather several without it, or one after the other.")
    if not batches:
        return ()
    on_gpu = [batch.reshape(-1).to(device, non_blocking=True) for batch in batches]
    rows = _gathered(table, torch.cat(on_gpu), None, dtype, device, token, sms)
    parts = rows.split([batch.numel() for batch in batches])
    return tuple(part.view(*batch.shape, *table.shape[1:]) for part, batch in zip(parts, batches, strict=True))


def _gathered(
    table: Tensor,
    ids: Tensor,
    out: Tensor | None,
    dtype: torch.dtype | None,
    device: torch.device,
    token: int,
    sms: int | None,
) -> Tensor:
    if out is None:
        dtype = dtype or table.dtype
        return torch.ops.freight.gather_rows.default(table, ids, device=device, dtype=dtype, token=token, sms=sms)
    shape = (*ids.shape, *table.shape[1:])
    if out.shape != shape or out.device != device or (dtype is not None and out.dtype is not dtype):
        raise ArgumentError(
            f"out must be {dtype or out.dtype} of shape {tuple(shape)} on {device}; got {out.dtype} of shape "
            f"{tuple(out.shape)} on {out.device}."
        )
    torch.ops.freight.gather_rows_out.default(table, ids, out, token=token, sms=sms)
    return out


def _plain(x: Tensor) -> tuple[Tensor, torch.device, int]:
    """The table as a plain tensor, where its rows land, and its token."""
    from freight.rows._tensor import UnifiedTensor

    if isinstance(x, UnifiedTensor):
        table = x._table
        if torch.compiler.is_compiling():
            return x._plain, table.traced_device, table.token
        table.check_open()
        return x._plain, table.device, table.token
    if not isinstance(x, Tensor) or x.dim() == 0:
        raise ArgumentTypeError(f"x must be a tensor with rows; got {x!r}.")
    if x.requires_grad:
        raise UnsupportedError(
            "gather_rows has no gradient for its table; use torch.nn.functional.embedding on a tensor that needs one."
        )
    return x, x.device, 0


def _check_ids(ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        got = f"{ids.dtype}" if isinstance(ids, Tensor) else repr(ids)
        raise ArgumentTypeError(f"ids must be an int32 or int64 tensor; got {got}.")
