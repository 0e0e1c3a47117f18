"""One table: rows in host memory, what the GPU needs to read them in place, and what it has to say of bad ids.

open -> closed     every unified tensor over a table, views too, holds it
"""

import atexit
import ctypes
import functools
import itertools
import logging
import math
import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from freight import _cuda
from freight._units import show_bytes
from freight.errors import ClosedError, OutOfRangeError, UnsupportedError
from freight.memory import HostBlock, allocate
from freight.rows._gather import Reader
from freight.rows._hot import HotRows
from freight.rows._order import Ordering, ordering

_log = logging.getLogger(__name__)
_NO_FAULT = -(2**63)
_LEAST_MISSING = 1 / 16


@dataclass(frozen=True)
class RowStats:
    """What a table has served so far, and where its rows lie."""

    rows: int  # asked for
    hot_rows: int  # of them, from GPU memory
    host_bytes: int  # that were read from host memory
    hot_bytes: int  # that were read from GPU memory
    table_bytes: int
    cached_rows: int
    cached_bytes: int


class Fault:
    """Two words that a kernel writes, in place, when it meets an id outside the table: the id and the table's size."""

    def __init__(self, device: torch.device) -> None:
        self._block = allocate(16, purpose="a table's fault flag")
        self._words = (ctypes.c_int64 * 2).from_address(self._block.address)
        self._words[:] = (_NO_FAULT, _NO_FAULT)
        self.on_gpu = self._block.alias(torch.int64, 2, device=device)

    def check(self) -> None:
        """Raise what was met since the last look; never waits."""
        said = self.take()
        if said is not None:
            raise OutOfRangeError(said)

    def take(self) -> str | None:
        """What was met since the last look, in words; None for nothing."""
        bad, rows = self._words
        if bad == _NO_FAULT and rows == _NO_FAULT:  # an id that is no number, cast to int64, looks like no fault
            return None
        self._words[:] = (_NO_FAULT, _NO_FAULT)
        return out_of_range(bad, rows)


@functools.cache
def fault_of(device: torch.device) -> Fault:
    """Where gathers from plain tensors on a GPU say of an id outside them."""
    return Fault(device)


def out_of_range(bad: int, rows: int, *, wrap: bool = True) -> str:
    """What to say of an id that is none; `wrap` where negative ones count from the end."""
    if not rows:
        return f"id {bad} lies outside the table, which has 0 rows and so no ids."
    from_the_end = f", or from {-rows:,} to -1" if wrap else ", and negative ones are none here"
    return f"id {bad} lies outside the table of {rows:,} rows; ids go from 0 to {rows - 1:,}{from_the_end}."


class Table:
    """Host memory of rows. `base` is all of it as a plain CPU tensor; `device` is where its rows are computed with."""

    def __init__(self, block: HostBlock, base: Tensor, device: torch.device, *, in_place: bool = False) -> None:
        self.block = block
        self.in_place = in_place  # over memory of the caller's
        self.base = base
        self.address = base.data_ptr()
        self.nbytes = base.untyped_storage().nbytes()
        self._device = self.traced_device = device  # the second one is read while torch.compile traces
        self._alias: Tensor | None = None
        self._whole_on_gpu: Tensor | None = None
        self._lock = threading.Lock()
        self._orderings: dict[int, Ordering] = {}
        self._readers: dict[tuple[torch.dtype, bool], Reader] = {}
        self._process = os.getpid()
        self.hot: HotRows | None = None
        self.rows_asked = 0
        self.bytes_asked = 0
        self.written: torch.cuda.Event | None = None  # behind the last write by the GPU
        self._faults: list[Fault] = []
        self._end = weakref.finalize(self, _end, block, device, self._faults)
        self.token = next(_tokens)
        _open[self.token] = self

    @functools.cached_property
    def row_bytes(self) -> int:
        """From the beginning of one row to the beginning of the next."""
        return self.base.stride(0) * self.base.element_size() if len(self.base) > 1 else 0

    @functools.cached_property
    def rows_in_one_piece(self) -> bool:
        """Whether every row is contiguous."""
        return len(self.base) > 0 and self.base[0].is_contiguous() and (len(self.base) == 1 or self.base.stride(0) > 0)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return not self._end.alive

    @property
    def device(self) -> torch.device:
        """Where rows are computed with: the GPU, or the CPU where there is none and in a forked worker."""
        if self._device.type == "cuda" and _cuda.in_forked_child():
            return torch.device("cpu")
        return self._device

    @property
    def alias(self) -> Tensor:
        """All bytes of the table as the GPU sees them, in place."""
        if self._alias is None:
            with self._lock:
                if self._alias is None:
                    self._alias = self.block.alias(device=self._device)
        return self._alias

    @property
    def fault(self) -> Fault:
        """Where the GPU writes an id outside the table."""
        if not self._faults:
            with self._lock:
                if not self._faults:
                    self._faults.append(Fault(self._device))
        return self._faults[0]

    def on_gpu(self, view: Tensor) -> Tensor:
        """A plain CPU tensor inside the table, as a CUDA tensor over the same memory."""
        if self._whole_on_gpu is not None and self.is_whole(view):
            return self._whole_on_gpu
        start = view.data_ptr() - self.block.address
        flat = self.alias[start:]
        if view.numel() == 0:
            return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=self._device)
        nbytes = _extent(view) * view.element_size()
        seen = _like(view, flat[:nbytes].view(view.dtype).as_strided(view.shape, view.stride()))
        if self.is_whole(view):
            self._whole_on_gpu = seen
        return seen

    def on_cpu(self, view: Tensor) -> Tensor | None:
        """A tensor over the table's memory, on either side, as a plain CPU tensor; None for any other tensor."""
        start = view.data_ptr() or view.untyped_storage().data_ptr()  # tensors of no elements say 0
        if view.device.type == "cpu":
            inside = self.block.address <= start < self.block.address + self.block.nbytes
            empty = not self.nbytes and view.untyped_storage()._cdata == self.base.untyped_storage()._cdata
            return view if inside or empty else None
        if self._alias is None or view.untyped_storage().data_ptr() != self._alias.untyped_storage().data_ptr():
            return None
        return self.lent(view)

    def lent(self, view: Tensor) -> Tensor:
        """A tensor over the table's memory as a plain CPU tensor with a storage of its own.

        Torch moves the storage of a tensor that it sends to another process; it must not be the table's.
        """
        if view.numel() == 0:
            return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype)
        flat = self.block.tensor(view.dtype, _extent(view), view.data_ptr() - self.block.address)
        return _like(view, flat.as_strided(view.shape, view.stride()))

    def is_whole(self, view: Tensor) -> bool:
        """Whether a tensor is the table itself, and not a part of it or another look at it."""
        base = self.base
        same = (view.shape, view.stride(), view.dtype) == (base.shape, base.stride(), base.dtype)
        return same and view.data_ptr() == self.address and not view.is_conj() and not view.is_neg()

    def copiers(self, row_bytes: int, n: int) -> int | None:
        """By how many programs the rows of `n` ids are copied in the order of their addresses; None: as they come."""
        known = self._orderings.get(row_bytes)
        if known is None:
            known = self._orderings[row_bytes] = ordering(self.nbytes, row_bytes)
        if self.hot is None:
            return known.copiers(n)
        missing = max(1 - self.hot.share, _LEAST_MISSING)
        copiers = known.copiers(int(n * missing))
        return None if copiers is None else int(copiers / missing)  # as many reads of the host under way as without

    def reader(self, dtype: torch.dtype, *, wrap: bool) -> Reader:
        """Gathers from all of the table, hot rows included, into rows of `dtype`."""
        reader = self._readers.get((dtype, wrap))
        if reader is None:
            source, fault = self.on_gpu(self.base), self.fault.on_gpu
            reader = Reader(source, dtype, self._device, hot=self.hot, fault=fault, wrap=wrap)
            self._readers[dtype, wrap] = reader
        return reader

    def keep_hot(self, hot: HotRows | None) -> None:
        """Have these rows served from GPU memory from now on."""
        self.hot = hot
        self._readers.clear()

    def count(self, ids: Tensor, rows: Tensor) -> None:
        """Note that these rows were asked for."""
        n = ids.numel()
        self.rows_asked += n
        self.bytes_asked += n * self.row_bytes if rows is self.base else n * math.prod(rows.shape[1:]) * rows.itemsize

    def check_open(self) -> None:
        """Raise where the table was closed."""
        if self.closed:
            raise ClosedError(f"this table of {show_bytes(self.nbytes)} was closed; make a new one.")

    def check_shareable(self) -> None:
        """Raise where other processes cannot have the table's memory."""
        self.check_open()
        if self.in_place:
            raise UnsupportedError(
                "a table over the caller's own memory (in_place=True) cannot go to other processes; leave in_place "
                "out, or send x.host()."
            )

    def check_fault(self) -> None:
        """Raise for an id outside the table that a gather has met, if one has by now; never waits."""
        if self._faults:
            self._faults[0].check()

    def wait(self) -> None:
        """Wait for everything that the GPU was given so far, and raise for an id outside the table."""
        if self._alias is not None and not _cuda.in_forked_child():
            torch.cuda.synchronize(self._device)
        self.check_fault()

    def wait_for_writes(self) -> None:
        """Wait until the CPU sees what the GPU was told to write here."""
        if self.written is not None and not _cuda.in_forked_child():
            self.written.synchronize()
            self.written = None

    def mark_written(self) -> None:
        """Note that the GPU was just told to write here."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self.written = event

    def stats(self) -> RowStats:
        """What was served so far; waits for gathers under way."""
        self.wait()
        hot = 0 if self.hot is None else int(self.hot.served.item())
        width = self.bytes_asked // self.rows_asked if self.rows_asked else 0
        return RowStats(
            rows=self.rows_asked,
            hot_rows=hot,
            host_bytes=self.bytes_asked - hot * width,
            hot_bytes=hot * width,
            table_bytes=self.nbytes,
            cached_rows=0 if self.hot is None else len(self.hot.rows),
            cached_bytes=0 if self.hot is None else self.hot.nbytes,
        )

    def close(self) -> None:
        """Wait for the GPU, unlock the memory and give up this table's hold on it. Again does nothing."""
        if self.closed:
            return
        try:
            if self._process == os.getpid():
                self.wait()
        finally:
            _open.pop(self.token, None)
            self._alias = self._whole_on_gpu = self.hot = None
            self._readers.clear()
            self._end()


def _extent(view: Tensor) -> int:
    """Elements from the first of `view`, which has some, to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))


def _like(view: Tensor, seen: Tensor) -> Tensor:
    """`seen`, over the same memory, lazily conjugated or negated as `view` is."""
    seen = seen.conj() if view.is_conj() else seen
    return torch._neg_view(seen) if view.is_neg() else seen


def _end(block: HostBlock, device: torch.device, faults: list[Fault]) -> None:
    """Nothing on the GPU may still read the memory when it goes; and what it met is not lost with the table."""
    if device.type == "cuda" and torch.cuda.is_initialized() and not _cuda.in_forked_child():
        with suppress(RuntimeError):  # a broken context reads nothing any more
            torch.cuda.synchronize(device)
        for said in filter(None, (fault.take() for fault in faults)):
            _log.error("a table was dropped before anybody asked: %s", said)
    block.close()


_tokens = itertools.count(1)
_open: "weakref.WeakValueDictionary[int, Table]" = weakref.WeakValueDictionary()


def table_of(token: int) -> Table | None:
    """The open table that goes by `token`, 0 for none: an operator is given numbers, not objects."""
    if not token:
        return None
    table = _open.get(token)
    if table is None:
        raise ClosedError("this table was closed; make a new one.")
    return table


def _last_look() -> None:
    """At exit, ids outside their tables that nobody has heard of yet are said: one raised, the others in the log."""
    said: list[OutOfRangeError] = []
    for table in list(_open.values()):
        if table._process == os.getpid():
            try:
                table.wait()
            except OutOfRangeError as error:
                said.append(error)
            except RuntimeError:  # a broken context has been told by what broke it
                return
    for error in said[1:]:
        _log.error("%s", error)
    if said:
        raise said[0]


atexit.register(_last_look)
