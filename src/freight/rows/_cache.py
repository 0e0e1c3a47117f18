"""Choosing the rows that also lie in GPU memory, and keeping their copies equal to the table.

how many   `cache`: a number of rows, or bytes of GPU memory, the map of which rows are hot included
which      `hot_ids` as they are; or the rows with the highest scores in `hot`; or, where `hot` is a loader, the
           rows that its batches ask for most often, seen in one pass over it
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from freight._units import parse_bytes, show_bytes
from freight.errors import ArgumentError, ArgumentTypeError, OutOfRangeError
from freight.rows import _gather
from freight.rows._hot import HotRows, build_map
from freight.rows._table import Table

Hotness = Tensor | Iterable[Any]
_UNKNOWN = 0.5  # of the reads, where nobody said how often each row is read


def build(table: Table, base: Tensor, cache: int | str, hot: Hotness | None, hot_ids: Any | None) -> HotRows | None:
    """The hot rows of a table on the GPU; None where there is no GPU, or nothing is hot."""
    n_rows, row_bytes = len(base), base[0].nbytes if len(base) else 0
    most = _most_rows(cache, n_rows, row_bytes)
    share = _UNKNOWN
    if hot_ids is not None:
        ids = _first(_checked_ids(hot_ids, n_rows), most)
    elif hot is not None:
        scores = _scores(hot, n_rows)
        ids = _hottest(scores, most)
        share = _share(scores, ids)
    else:
        raise ArgumentError("cache= needs to know which rows are hot: pass hot= (scores or a loader) or hot_ids=.")
    if table.device.type != "cuda" or ids.numel() == 0:
        return None
    ids = ids.to(table.device)
    hot_rows = HotRows(
        rows=torch.empty((len(ids), *base.shape[1:]), dtype=base.dtype, device=table.device),
        map=build_map(ids, n_rows),
        ids=ids,
        served=torch.zeros(1, dtype=torch.int64, device=table.device),
        share=share,
    )
    refresh(table, hot_rows)
    return hot_rows


def refresh(table: Table, hot: HotRows) -> None:
    """Copy the hot rows from the table anew."""
    base = table.base
    copiers = table.copiers(base[0].nbytes, len(hot.ids))
    _gather.Reader(table.on_gpu(base), base.dtype, hot.rows.device)(hot.ids, hot.rows, copiers)


def _most_rows(cache: int | str, n_rows: int, row_bytes: int) -> int:
    """How many rows `cache` allows: a number is a number of rows, text is bytes of GPU memory."""
    if isinstance(cache, str):
        room = parse_bytes(cache, "cache")
        map_bytes = 8 * -(-n_rows // 32)  # two words for 32 rows
        if room < map_bytes:
            raise ArgumentError(
                f"cache={cache!r} has no room for the map of which of {n_rows:,} rows are hot, "
                f"{show_bytes(map_bytes)}; make it larger."
            )
        return min(n_rows, (room - map_bytes) // max(1, row_bytes + 8))  # and 8 bytes for the row's number
    try:
        most = operator.index(cache)
    except TypeError:
        raise ArgumentTypeError(f"cache must be a number of rows, or bytes such as '2GiB'; got {cache!r}.") from None
    if most < 0 or isinstance(cache, bool):
        raise ArgumentError(f"cache must be a number of rows of at least 0; got {cache!r}.")
    return min(n_rows, most)


def _checked_ids(hot_ids: Any, n_rows: int, what: str = "hot_ids") -> Tensor:
    ids = torch.as_tensor(hot_ids).reshape(-1)
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool):
        raise ArgumentTypeError(f"{what} must be row numbers; got {ids.dtype}.")
    ids = ids.to(torch.int64)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n_rows):
        raise OutOfRangeError(
            f"{what} must lie between 0 and {n_rows - 1:,}; got {int(ids.min())} to {int(ids.max())}."
        )
    return ids


def _first(ids: Tensor, most: int) -> Tensor:
    """The first `most` different ids, sorted."""
    different, which = ids.unique(return_inverse=True)
    at = torch.full_like(different, len(ids)).scatter_reduce_(0, which, torch.arange(len(ids)).to(which), "amin")
    return different[at.argsort()[:most]].sort().values


def _share(scores: Tensor, ids: Tensor) -> float:
    """The share of all reads that the rows `ids` serve, where reads fall on rows as their scores say."""
    positive = torch.where(scores > 0, scores, 0).double()
    return float(positive[ids].sum() / positive.sum().clamp(min=1e-300))


def _hottest(scores: Tensor, most: int) -> Tensor:
    """The numbers of the `most` rows with the highest scores above 0, sorted."""
    scores = torch.where(scores > 0, scores, 0)  # NaN would come first
    most = min(most, int((scores > 0).sum()))
    return torch.topk(scores, most, sorted=False).indices.sort().values


def _scores(hot: Hotness, n_rows: int) -> Tensor:
    if isinstance(hot, Tensor) or hasattr(hot, "__array__"):
        scores = torch.as_tensor(hot)
        if scores.shape != (n_rows,):
            raise ArgumentError(f"hot must have one score for each of the {n_rows:,} rows; got {tuple(scores.shape)}.")
        return scores.double() if not scores.is_floating_point() else scores
    if not isinstance(hot, Iterable):
        raise ArgumentTypeError(f"hot must be scores of shape ({n_rows},) or a loader; got {hot!r}.")
    counts = torch.zeros(n_rows, dtype=torch.float64)
    for batch in hot:
        ids = _checked_ids(_asked_by(batch), n_rows, "what the loader for hot= asks for")
        counts.index_add_(0, ids, torch.ones(len(ids), dtype=torch.float64))
    return counts


def _asked_by(batch: Any) -> Tensor:
    """The row numbers that a loader's batch asks for: the batch itself, or its `n_id`."""
    ids = batch if isinstance(batch, Tensor) else getattr(batch, "n_id", None)
    if not isinstance(ids, Tensor):
        raise ArgumentTypeError(f"a loader for hot= must give row numbers, or batches with `n_id`; got {type(batch)}.")
    return ids.cpu()
