"""Where an operation on unified tensors computes, and what it may not do.

    operands beside unified tensors                     computes and lands on
    a tensor on a GPU                                   that GPU, reading the table in place
    none, numbers, tensors without dimensions           the table's compute device, reading in place
    a CPU tensor with dimensions                        the CPU
    indices                                             do not count

Views stay unified. What could only be had by copying the whole table to the GPU is refused with what to write instead.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from freight._config import current
from freight.errors import ArgumentError, UnsupportedError
from freight.rows import _index, _put
from freight.rows._cache import refresh
from freight.rows._op import ids_on, read, rows_contiguous
from freight.rows._table import Table

Function = Callable[..., Any]

# What is read off the memory by the CPU, once the GPU has written what it was told to.
_READ_ON_HOST = {"numpy", "__array__", "tolist", "item", "__dlpack__", "__bool__", "__int__", "__float__", "__index__"}
_READ_ON_HOST |= {"__complex__", "__contains__", "data_ptr", "untyped_storage", "storage", "is_nonzero"}
# What says something of the tensor and looks at none of its elements.
_ABOUT = {"size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "is_contiguous"}
_ABOUT |= {"is_pinned", "is_shared", "__len__", "get_device", "is_floating_point", "is_complex", "is_signed", "is_conj"}
_ABOUT |= {"is_neg", "_is_view", "__dlpack_device__", "is_set_to", "is_same_size", "has_names", "__hash__", "is_tensor"}
_ABOUT |= {"is_inference", "storage_type", "is_coalesced", "dim_order", "_version", "is_distributed"}
# What copies every element as it is, or cast.
_COPIES = {"clone", "contiguous", "reshape", "flatten", "ravel", "float", "double", "half", "bfloat16", "int", "long"}
_COPIES |= {"short", "char", "byte", "bool", "type", "type_as", "cfloat", "cdouble", "reshape_as"}
_COPIES |= {"positive", "__pos__"}
_INDEXED = {  # whose last argument or so is an index, which may lie on either device
    "gather": ("input", "dim", "index"),
    "index_select": ("input", "dim", "index"),
    "take_along_dim": ("input", "indices", "dim"),
    "masked_select": ("input", "mask"),
}
_INDICES = {"index", "indices", "mask"}
# What would make other memory, or another shape, of the tensor itself.
_REMAKES = {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "rename_"}
_REMAKES |= {"resize_", "resize_as_"}


def run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do `func`, an operation of torch's with unified tensors among its arguments."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _property(func, args)
    special = _SPECIAL.get(name)
    if special is not None:
        done = special(func, args, kwargs)
        if done is not NotImplemented:
            return done
    if name in _ABOUT or name in _READ_ON_HOST or (name == "type" and len(args) == 1 and not kwargs):
        for x in unified_in((args, kwargs)):
            x._table.check_open()
            if name in _READ_ON_HOST:
                x._table.wait_for_writes()
        return _without_override(func, *_replaced((args, kwargs), _plain))
    if name in _REMAKES and _is_unified(args[0]):
        another = name in ("resize_", "resize_as_")
        refuse_remaking(f"x.{name}(...)", "x = freight.unified(...)" if another else f"x = x.{name[:-1]}(...)")
    if name in _COPIES:
        _refuse_copy(func, name, args, kwargs)
    return _compute(func, name, args, kwargs)


def traced(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same while torch.compile traces: rows by the operator, and all else only where the CPU computes anyway."""
    x, ids, wrap = _asked(func, args, kwargs)
    if x is not None and ids.dtype in (torch.int64, torch.int32):
        table, plain = x._table, x._plain
        return torch.ops.freight.gather_rows.default(
            plain, ids, device=table.traced_device, dtype=plain.dtype, token=table.token, wrap=wrap
        )
    for x in unified_in((args, kwargs)):
        if x._table.traced_device.type != "cpu":
            raise UnsupportedError(
                "torch.compile takes rows of a unified tensor by x[ids], F.embedding, x.index_select(0, ids) and "
                "freight.gather_rows; do the rest outside of the compiled function."
            )
    return _without_override(func, *_replaced((args, kwargs), _plain))


def _asked(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
    """The table and the ids of a call that asks for rows, and whether negative ids count from the end."""
    if func is torch.Tensor.__getitem__ and _is_unified(args[0]) and isinstance(args[1], Tensor) and args[1].dim():
        return args[0], args[1], True
    if func is torch.nn.functional.embedding and _is_unified(args[1]) and kwargs.get("max_norm") is None:
        return args[1], args[0], False
    if func in (torch.Tensor.index_select, torch.index_select) and len(args) == 3 and args[1] == 0:
        return (args[0], args[2], False) if _is_unified(args[0]) else (None, None, False)
    return None, None, False


def unified_in(tree: Any) -> Iterator[Any]:
    """The unified tensors in nested arguments."""
    for leaf in _leaves(tree):
        if _is_unified(leaf):
            yield leaf


def wrap(result: Any, table: Table) -> Any:
    """A result with every view of the table's memory as a unified tensor."""
    from freight.rows._tensor import UnifiedTensor

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or _is_unified(leaf):
            return leaf
        plain = table.on_cpu(leaf)
        return leaf if plain is None else UnifiedTensor._wrap(plain, table)

    return _replaced(result, one)


# ---- the rule --------------------------------------------------------------------------------------


def _compute(func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in _INDEXED:
        given = dict(zip(_INDEXED[name], args, strict=False)) | kwargs
        args, kwargs = (given.pop("input"),), given  # which a method takes by place alone
    unified = list(unified_in((args, kwargs)))
    written = _written(name, args, kwargs)
    if written:
        _refuse_gradient_in((args, kwargs))
    device = _place(unified, name, args, kwargs)
    for x in unified:
        x._table.check_open()
        if device.type == "cpu":
            x._table.wait_for_writes()
    table = unified[0]._table
    if name in _INDEXED and device.type == "cuda":
        kwargs = _with_index_on(device, args[0], kwargs)
    swap = _plain if device.type == "cpu" else _on_gpu
    result = _without_override(func, *_replaced((args, kwargs), swap))
    for x in written:
        _after_write(x, device)
    target = kwargs.get("out", _first(args, kwargs))
    if any(x is target for x in written):
        return target
    return wrap(result, table)


def _place(unified: list[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if name in _INDEXED:
        kwargs = {key: value for key, value in kwargs.items() if key not in _INDICES}
    others = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor) and not _is_unified(leaf)]
    on_gpu = [other.device for other in others if other.device.type == "cuda"]
    if on_gpu:
        return on_gpu[0]
    if any(other.dim() for other in others):
        return torch.device("cpu")
    return unified[0]._table.device


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The unified tensors that a function writes to: its first argument where it works in place, and `out`."""
    in_place = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")
    targets = [_first(args, kwargs)] if in_place or kwargs.get("inplace") else []
    return list(unified_in((targets, kwargs.get("out"))))


def _after_write(x: Any, device: torch.device) -> None:
    if device.type == "cuda":
        x._table.mark_written()
    x.refresh()


def _with_index_on(device: torch.device, x: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the index on `device`, and known to lie in range: there, torch would end the context."""
    [key] = kwargs.keys() & _INDICES
    index = _index.on_device(kwargs[key], device)
    if isinstance(index, Tensor) and index.dtype is not torch.bool:
        shape, dim = x.shape, kwargs.get("dim")
        _index.check_numbers(index, shape.numel() if dim is None else shape[dim], dim)
    return {**kwargs, key: index}


# ---- what has a way of its own ---------------------------------------------------------------------


def _property(func: Function, args: tuple[Any, ...]) -> Any:
    """Properties speak of the memory, which is the CPU's; those that are views stay unified."""
    x = args[0]
    if func.__name__ == "__set__":
        if func.__self__ is torch.Tensor.requires_grad and args[1]:  # type: ignore[attr-defined]
            refuse_grad()
        if func.__self__ is torch.Tensor.data:  # type: ignore[attr-defined]
            refuse_remaking("x.data = ...", "x[:] = ...")
    x._table.check_open()
    return wrap(_without_override(func, *_replaced((args, {}), _plain)), x._table)


def refuse_grad() -> None:
    """Tables are data; a gradient as large as one would have to live somewhere."""
    raise UnsupportedError(
        "requires_grad=True is not offered for unified tensors: they are data, read in place. Train a copy of the rows "
        "you need, or a torch.nn.Embedding."
    )


def _refuse_gradient_in(values: Any) -> None:
    """What is written with a gradient would ask the table to pass it on."""
    if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in _leaves(values)):
        raise UnsupportedError(
            "what is to be written requires a gradient, which a unified tensor cannot pass on: write "
            "value.detach(), or write under torch.no_grad()."
        )


def refuse_remaking(call: str, instead: str) -> None:
    """What would give `x` other memory, or another shape, under the same name."""
    raise UnsupportedError(f"{call} would part x from its table, whose memory and shape stay; write {instead}.")


def _requires_grad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, wanted = (*args, kwargs.get("requires_grad", True))[:2]
    if wanted is not False:
        refuse_grad()
    return x


def _share_memory(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """It is shared already; torch would move it elsewhere."""
    args[0]._table.check_shareable()
    return args[0]


def _getitem(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index = args
    if not _is_unified(x):
        return NotImplemented
    x._table.check_open()
    return getitem(x, index)


def getitem(x: Any, index: Any) -> Any:
    """`x[index]`: rows by the operator, views as views, and the rest by torch's own indexing of the memory in place."""
    table, plain = x._table, x._plain
    if isinstance(index, Tensor) and index.dtype is torch.int64 and index.dim():
        return torch.ops.freight.gather_rows.default(
            plain, index, device=table.device, dtype=plain.dtype, token=table.token
        )
    if _index.is_basic(index):
        return wrap(plain[index], table)
    found = _index.rows_and_rest(index, len(plain))
    if found is not None:
        ids, rest = found
        rows = plain[(slice(None), *rest)] if rest else plain
        return torch.ops.freight.gather_rows.default(
            rows, ids, device=table.device, dtype=rows.dtype, token=table.token
        )
    index = _index.on_device(index, table.device)
    _index.check_range(index, plain.shape)
    return (table.on_gpu(plain) if table.device.type == "cuda" else plain)[index]


def _setitem(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index, value = args
    if not _is_unified(x):
        return NotImplemented
    table, plain = x._table, x._plain
    table.check_open()
    _refuse_gradient_in(value)
    if _is_unified(value):
        value = value._table.on_gpu(value._plain) if table.device.type == "cuda" else value._plain
    found = None if _index.is_basic(index) else _index.rows_and_rest(index, len(plain))
    by_gpu = table.device.type == "cuda" and (found is not None or _on_a_gpu(value) or not _index.is_basic(index))
    if not by_gpu:
        table.wait_for_writes()
        plain[_index.on_device(index, torch.device("cpu"))] = value.cpu() if isinstance(value, Tensor) else value
        x.refresh()
        return None
    if found is not None and _put_rows(table, plain, *found, value):
        return None
    index = _index.on_device(index, table.device)
    _index.check_range(index, plain.shape)
    table.on_gpu(plain)[index] = value.to(table.device) if isinstance(value, Tensor) else value
    _after_write(x, table.device)
    return None


def _put_rows(table: Table, plain: Tensor, ids: Tensor, rest: tuple[Any, ...], value: Any) -> bool:
    """`plain[ids, *rest] = value` by the GPU, hot copies included; False where such rows do not lie in one piece."""
    rows = plain[(slice(None), *rest)] if rest else plain
    if not rows_contiguous(rows):
        return False
    table.check_fault()
    ids = ids_on(table.device, ids, len(rows), wrap=True)
    whole = table.is_whole(rows)
    hot = table.hot if whole else None
    _put.put(rows, ids, value, source=table.on_gpu(rows), hot=hot, fault=table.fault.on_gpu)
    table.mark_written()
    if table.hot is not None and not whole:
        refresh(table, table.hot)
    if current().check_ids:
        table.wait()
    return True


def _index_select(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    x, dim, ids = given.get("input"), given.get("dim"), given.get("index")
    if not isinstance(x, Tensor) or not _is_unified(x) or not isinstance(ids, Tensor) or given.get("out") is not None:
        return NotImplemented
    if dim not in (0, -x.dim()) or ids.dim() > 1:  # torch says what is wrong with the latter
        return NotImplemented
    return _rows(x, ids.view(-1) if ids.dim() == 0 else ids)


def _embedding(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    if func is torch.embedding:
        names = ("weight", "input")
    given = dict(zip(names, args, strict=False)) | kwargs
    if not _is_unified(given.get("weight")) or not isinstance(given.get("input"), Tensor):
        return NotImplemented
    if given.get("max_norm") is not None:
        raise UnsupportedError("embedding with max_norm writes to its table; call it on x.host() if that is meant.")
    return _rows(given["weight"], given["input"])


def _rows(x: Any, ids: Tensor) -> Tensor:
    """Rows as torch's own functions define them: no negative ids."""
    return read(x._table, x._plain, ids, wrap=False)


def _take(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, ids = args[0], args[1] if len(args) > 1 else kwargs.get("index")
    if not _is_unified(x) or not isinstance(ids, Tensor) or not x._plain.is_contiguous() or "out" in kwargs:
        return NotImplemented
    return read(x._table, x._plain.view(-1), ids)


def _to(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """To a GPU: a copy, as asked. To the CPU: the memory itself. To another dtype alone: a copy nobody asked for."""
    x = args[0]
    if not _is_unified(x):
        return NotImplemented
    x._table.check_open()
    x._table.wait_for_writes()
    plain = x._plain
    if func.__name__ == "cuda":
        return _without_override(func, (plain, *args[1:]), kwargs)
    if func.__name__ == "cpu":
        return x._table.lent(plain)
    device, dtype, _, _ = torch._C._nn._parse_to(  # type: ignore[attr-defined]
        *_replaced(args[1:], _plain), **{k: v for k, v in kwargs.items() if k != "copy"}
    )
    if device is not None:
        moved = _without_override(func, (plain, *args[1:]), kwargs)
        return x._table.lent(plain) if moved is plain else moved
    if dtype in (None, plain.dtype) and not kwargs.get("copy"):
        return x
    _refuse_copy(func, "to", args, kwargs)
    return NotImplemented


def _refuse_copy(func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = args[0]
    if not _is_unified(x) or x._table.device.type != "cuda" or not 0 < x._table.base.nbytes <= x._plain.nbytes:
        return
    empty = torch.empty_strided(x._plain.shape, x._plain.stride(), dtype=x._plain.dtype, device="meta")
    try:
        result = _without_override(func, (empty, *_replaced(args[1:], _plain)), kwargs)
        if result._is_view() or result is empty:
            return
    except NotImplementedError:  # it would leave the device
        pass
    except RuntimeError as error:
        raise ArgumentError(str(error)) from None
    raise UnsupportedError(
        f"x.{name}() would copy the whole table to {x._table.device}. Take the rows you need (x[ids], or "
        "freight.gather_rows(x, ids, dtype=...)), say x.to('cuda') if all of it is meant, or work on x.host()."
    )


_SPECIAL: dict[str, Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]] = {
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "index_select": _index_select,
    "embedding": _embedding,
    "take": _take,
    "to": _to,
    "cuda": _to,
    "cpu": _to,
    "requires_grad_": _requires_grad,
    "share_memory_": _share_memory,
}


# ---- arguments -------------------------------------------------------------------------------------


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next(iter((*args, *kwargs.values())), None)


def _is_unified(value: object) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "_table")


def _plain(leaf: Any) -> Any:
    return leaf._plain if _is_unified(leaf) else leaf


def _on_gpu(leaf: Any) -> Any:
    return leaf._table.on_gpu(leaf._plain) if _is_unified(leaf) else leaf


def _on_a_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _without_override(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, tuple | list):
        for branch in tree:
            yield from _leaves(branch)
    else:
        yield tree


def _replaced(tree: Any, swap: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _replaced(branch, swap) for key, branch in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*(_replaced(branch, swap) for branch in tree))
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, tuple | list):
        return type(tree)(_replaced(branch, swap) for branch in tree)
    return swap(tree)
