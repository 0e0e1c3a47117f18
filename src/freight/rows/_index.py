"""What an index asks for: rows by number, a view, or something that only torch's own indexing can say."""

import operator
from typing import Any

import torch
from torch import Tensor

from freight.errors import ArgumentError, OutOfRangeError

_WIDENED = (torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64)  # what torch itself does not index with


def rows_and_rest(index: Any, n_rows: int) -> tuple[Tensor, tuple[Any, ...]] | None:
    """Row numbers and what follows them, where an index is that: `ids`, `(ids, 3, slice(None))`; else None.

    A mask over the rows is the numbers of the rows where it is true.
    """
    if isinstance(index, list) and any(_is_nested(part) for part in index):
        raise ArgumentError(
            "a list that holds lists, tensors or slices is a tuple of indices to some versions of torch and one tensor "
            f"to others: write x[tuple(index)] or x[torch.tensor(index)]; got {repr(index)[:80]}."
        )
    first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    if not all(_is_basic(part) for part in rest) or sum(part is Ellipsis for part in rest) > 1:
        return None
    ids = as_ids(first, n_rows)
    return None if ids is None else (ids, rest)


def as_ids(index: Any, n_rows: int) -> Tensor | None:
    """Row numbers as a tensor, from a tensor, list, array or mask; None where the index is something else."""
    index = _as_tensor(index)
    if not isinstance(index, Tensor):
        return None
    if index.dtype is torch.bool:
        return index.nonzero().view(-1) if index.shape == (n_rows,) else None
    return index if index.dtype in (torch.int32, torch.int64) else None


def is_basic(index: Any) -> bool:
    """Whether an index gives a view: whole numbers, slices, None and Ellipsis."""
    return all(_is_basic(part) for part in (index if isinstance(index, tuple) else (index,)))


def _is_basic(part: Any) -> bool:
    if part is None or part is Ellipsis or isinstance(part, slice):
        return True
    if isinstance(part, bool) or (isinstance(part, Tensor) and (part.dim() or part.device.type != "cpu")):
        return False
    try:
        operator.index(part)
    except TypeError:
        return False
    return not isinstance(part, Tensor) or part.dtype is not torch.bool


def on_device(index: Any, device: torch.device) -> Any:
    """An index with its tensors, lists and arrays on `device`."""
    if isinstance(index, tuple):
        return tuple(on_device(part, device) for part in index)
    index = _as_tensor(index)
    return index.to(device) if isinstance(index, Tensor) else index


def check_range(index: Any, shape: torch.Size) -> None:
    """Raise where a tensor in an index names what is not there; on a GPU, torch would end the context instead."""
    parts = index if isinstance(index, tuple) else (index,)
    used = sum(_dimensions(part) for part in parts)
    dimension = 0
    for part in parts:
        if part is Ellipsis:
            dimension += len(shape) - used
        elif isinstance(part, Tensor) and part.dtype is not torch.bool and part.numel():
            least, most = (int(end) for end in torch.aminmax(part))
            size = shape[dimension]
            if most >= size or least < -size:
                bad = most if most >= size else least
                raise OutOfRangeError(f"index {bad} is out of bounds for dimension {dimension} with size {size}.")
        dimension += _dimensions(part)


def check_numbers(index: Tensor, size: int, dimension: int | None) -> None:
    """Raise where a number lies outside 0 to `size`; the functions that take such an index count none from the end."""
    if index.numel():
        least, most = (int(end) for end in torch.aminmax(index))
        if least < 0 or most >= size:
            bad = least if least < 0 else most
            where = "the flattened tensor" if dimension is None else f"dimension {dimension}"
            raise OutOfRangeError(f"index {bad} is out of bounds for {where} with size {size}.")


def _dimensions(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype is torch.bool else 1


def _as_tensor(index: Any) -> Any:
    """A list or array as the tensor that torch's own indexing takes it for; anything else as it is."""
    if isinstance(index, list) or (hasattr(index, "__array__") and not isinstance(index, Tensor)):
        index = torch.as_tensor(index)
        if index.numel() == 0 and index.dtype is not torch.bool:
            return index.to(torch.int64)
    if isinstance(index, Tensor) and index.dtype in _WIDENED:
        ids = index.to(torch.int64)
        if index.dtype is torch.uint64 and bool((ids < 0).any()):
            raise OutOfRangeError("an id of the index lies beyond 2**63, where no table reaches; got uint64.")
        return ids
    return index


def _is_nested(part: Any) -> bool:
    return part is None or part is Ellipsis or isinstance(part, list | tuple | slice | Tensor) or _has_shape(part)


def _has_shape(part: Any) -> bool:
    return bool(getattr(part, "shape", ()))
