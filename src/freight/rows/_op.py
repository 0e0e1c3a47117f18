"""The operator `freight::gather_rows`: which table, which device, which way; and the public function.

    table on the CPU and unified    the rows land where the table computes, read in place where that is a GPU
    table on a GPU                  the rows land there
    any other table on the CPU      the rows land on the CPU, by the reference

It is registered by `torch.library.Library`, not by `custom_op`: a gather of few rows is a matter of microseconds, and
half of them would be the decorator's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from freight._config import current
from freight.errors import ArgumentError, ArgumentTypeError, OutOfRangeError, UnsupportedError
from freight.rows import _gather
from freight.rows._gather import casts, fill_bytes
from freight.rows._table import Table, fault_of, out_of_range, table_of

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
    if ids.dtype is not torch.int64 and ids.dtype is not torch.int32:
        raise ArgumentTypeError(f"ids must be int32 or int64; got {ids.dtype}.")
    if table.is_conj() or table.is_neg() or out.is_conj() or out.is_neg():
        _lazily(table, ids, out, token=token, wrap=wrap, sms=sms)
        return
    held = table_of(token)
    if held is not None:
        held.check_fault()
        held.count(ids, table)
    elif table.device.type == "cuda":
        fault_of(table.device).check()
    device = out.device
    if device.type == "cpu":
        _on_cpu(table, ids, out, wrap)
        return
    if held is None and table.device != device:
        raise ArgumentError(
            f"rows of a table on {table.device} cannot be read by {device}: make the table with freight.unified."
        )
    ids = ids_on(device, ids, len(table), wrap=wrap)
    if not ids.is_contiguous():
        ids = ids.contiguous()
    if held is not None and table is held.base and sms is None and held.rows_in_one_piece and _plain_to(out):
        _read_all(held, ids, out, wrap)
    elif rows_contiguous(table):
        _read_part(held, table, ids, out, wrap, sms)
    else:
        fault = (fault_of(device) if held is None else held.fault).on_gpu
        _by_torch(table if held is None else held.on_gpu(table), ids, out, fault, wrap)
    if current().check_ids:
        torch.cuda.synchronize(device)
        (fault_of(device) if held is None else held.fault).check()


def _lazily(table: Tensor, ids: Tensor, out: Tensor, **how: Any) -> None:
    """Rows of a table, or to a place, that torch has conjugated or negated in name only: first as their bits lie."""
    if out.is_conj() or out.is_neg():
        out.copy_(_functional(table, ids, device=out.device, dtype=out.dtype, **how))
    elif table.is_neg():
        _into(torch._neg_view(table), ids, out, **how)
        out.neg_()
    else:
        _into(table.conj(), ids, out, **how)
        out.conj_physical_()


def _plain_to(out: Tensor) -> bool:
    """Whether rows can be put there as they come."""
    return out.is_contiguous() and out.data_ptr() % 16 == 0


def _read_all(held: Table, ids: Tensor, out: Tensor, wrap: bool) -> None:
    """From the table itself: the way that every call but the odd one takes."""
    base = held.base
    if out.dtype is base.dtype or casts(base.dtype, out.dtype, out.device):
        held.reader(out.dtype, wrap=wrap)(ids, out, held.copiers(held.row_bytes, ids.numel()))
    else:
        rows = torch.empty(out.shape, dtype=base.dtype, device=out.device)
        out.copy_(held.reader(base.dtype, wrap=wrap)(ids, rows, held.copiers(held.row_bytes, ids.numel())))


def _read_part(held: Table | None, table: Tensor, ids: Tensor, out: Tensor, wrap: bool, sms: int | None) -> None:
    """From a part of a table or one in GPU memory, to anywhere, or by few multiprocessors."""
    source, hot, copiers = table, None, None
    fault = fault_of(table.device).on_gpu if held is None else held.fault.on_gpu
    if held is not None:
        source = held.on_gpu(table)
        hot = held.hot if held.is_whole(table) else None
        copiers = held.copiers(table.stride(0) * table.element_size(), ids.numel()) if len(table) > 1 else None
    direct = out.is_contiguous() and (out.dtype is table.dtype or casts(table.dtype, out.dtype, out.device))
    to = out if direct else torch.empty(out.shape, dtype=table.dtype, device=out.device)
    grain = _gather.grain_of(to.data_ptr())
    reader = _gather.Reader(source, to.dtype, out.device, grain=grain, hot=hot, fault=fault, wrap=wrap, sms=sms)
    reader(ids, to, copiers)
    if not direct:
        out.copy_(to)


def ids_on(device: torch.device, ids: Tensor, rows: int, *, wrap: bool) -> Tensor:
    """Ids on `device`; those that come from the CPU are known to lie in the table, and may be overwritten at once."""
    if ids.device == device:
        return ids
    if ids.device.type != "cpu":
        raise ArgumentError(f"ids are on {ids.device} and the rows land on {device}; move them there.")
    _check_range(ids, rows, wrap)
    # From pageable memory the driver has read them when the call returns; page-locked memory it reads later.
    return (ids.clone() if ids.is_pinned() else ids).to(device, non_blocking=True)


def _by_torch(source: Tensor, ids: Tensor, out: Tensor, fault: Tensor | None, wrap: bool) -> None:
    """Rows that do not lie in one piece, such as those of a transposed view: read in place, by torch's own kernel."""
    if not out.numel():
        return
    ids = ids.to(torch.int64)
    rows = torch.where(ids < 0, ids + len(source), ids) if wrap else ids
    bad = (rows < 0) | (rows >= len(source))
    near = as_integers(source if len(source) else source.new_empty((1, *source.shape[1:])))
    read = near.index_select(0, rows.clamp(0, len(near) - 1).view(-1)).view(out.shape)
    fill = as_integers(fill_bytes(source.dtype).view(source.dtype)).to(source.device)
    out.copy_(torch.where(bad.view(*bad.shape, *[1] * (source.dim() - 1)), fill, read).view(source.dtype))
    if fault is not None:
        first = bad.view(-1).to(torch.int8).argmax()
        words = torch.stack([ids.view(-1)[first], torch.full_like(first, len(source))])
        fault.copy_(torch.where(bad.any(), words, fault))


def _on_cpu(table: Tensor, ids: Tensor, out: Tensor, wrap: bool) -> None:
    ids = ids.cpu().reshape(-1)
    _check_range(ids, len(table), wrap)
    rows = ids.to(torch.int64)
    rows = torch.where(rows < 0, rows + len(table), rows) if wrap else rows
    if not out.numel():
        return
    if out.dtype is table.dtype and out.is_contiguous():
        to = as_integers(out).view(len(rows), *table.shape[1:])
        torch.index_select(as_integers(table), 0, rows, out=to)
    else:
        out.copy_(as_integers(table)[rows].view(table.dtype).view(out.shape))


def as_integers(x: Tensor) -> Tensor:
    """The same elements as integers of their size: torch cannot index every dtype on the CPU."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds[x.element_size()]) if x.element_size() in kinds else x


def _check_range(ids: Tensor, rows: int, wrap: bool) -> None:
    """Ids on the CPU are looked at before anything is read."""
    if ids.numel() == 0:
        return
    least, most = (int(end) for end in torch.aminmax(ids))
    if most >= rows or least < (-rows if wrap else 0):
        raise OutOfRangeError(out_of_range(most if most >= rows else least, rows, wrap=wrap))


def rows_contiguous(table: Tensor) -> bool:
    if table.is_conj() or table.is_neg():
        return False
    expected = 1
    for size, stride in zip(reversed(table.shape[1:]), reversed(table.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return table.stride(0) >= expected or len(table) <= 1


_library.impl("gather_rows", _functional, "CompositeExplicitAutograd")
_library.impl("gather_rows_out", _into, "CompositeExplicitAutograd")
for _key in ("Conjugate", "Negative"):  # or torch would resolve all of a table before its rows are read
    for _name in ("gather_rows", "gather_rows_out"):
        _library.impl(_name, torch.library.fallthrough_kernel, _key)


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
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"dtype must be torch's, such as torch.float32; got {dtype!r}.")
    if isinstance(ids, Tensor):
        if out is not None:
            return _put_into(out, table, ids, dtype, device, token, sms)
        dtype = dtype or table.dtype
        return torch.ops.freight.gather_rows.default(table, ids, device=device, dtype=dtype, token=token, sms=sms)
    batches = list(ids) if isinstance(ids, Sequence) else [ids]
    for batch in batches:
        if not isinstance(batch, Tensor):
            raise ArgumentTypeError(
                f"ids must be an int32 or int64 tensor, or several of them; got {type(batch).__name__}. "
                "Make it one with torch.as_tensor(ids)."
            )
    if out is not None:
        raise ArgumentError("out takes the rows of one batch; gather several without it, or one after the other.")
    if not batches:
        return ()
    on_gpu = [ids_on(device, batch.reshape(-1), len(table), wrap=True) for batch in batches]
    dtype, every = dtype or table.dtype, torch.cat(on_gpu)
    rows = torch.ops.freight.gather_rows.default(table, every, device=device, dtype=dtype, token=token, sms=sms)
    parts = rows.split([batch.numel() for batch in batches])
    return tuple(part.view(*batch.shape, *table.shape[1:]) for part, batch in zip(parts, batches, strict=True))


def _put_into(
    out: Tensor,
    table: Tensor,
    ids: Tensor,
    dtype: torch.dtype | None,
    device: torch.device,
    token: int,
    sms: int | None,
) -> Tensor:
    shape = (*ids.shape, *table.shape[1:])
    if not isinstance(out, Tensor) or hasattr(out, "_table"):
        raise ArgumentTypeError(
            f"out must be a plain tensor; got {type(out).__name__}. To write rows, say x[ids] = rows."
        )
    if out.shape != shape or out.device != device or (dtype is not None and out.dtype is not dtype):
        raise ArgumentError(
            f"out must be {dtype or out.dtype} of shape {tuple(shape)} on {device}; got {out.dtype} of shape "
            f"{tuple(out.shape)} on {out.device}."
        )
    torch.ops.freight.gather_rows_out.default(table, ids, out, token=token, sms=sms)
    return out


def _plain(x: Tensor) -> tuple[Tensor, torch.device, int]:
    """The table as a plain tensor, where its rows land, and its token."""
    held: Table | None = getattr(x, "_table", None)
    if held is not None:
        return x._plain, held.traced_device if torch.compiler.is_compiling() else held.device, held.token  # type: ignore[attr-defined]
    if not isinstance(x, Tensor) or x.dim() == 0:
        got = "one of no dimensions" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentTypeError(f"x must be a tensor with rows; got {got}.")
    if x.requires_grad:
        raise UnsupportedError(
            "gather_rows has no gradient for its table; use torch.nn.functional.embedding on a tensor that needs one."
        )
    return x, x.device, 0
