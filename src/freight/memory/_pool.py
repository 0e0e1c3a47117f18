"""Short-lived host buffers cut from slabs, so that pinning is paid once and not for every buffer.

A slab is one pinned block; a request takes the best-fitting span of any slab, a large one gets a slab of its own, and
the pool grows until its limit or the budget says no. Then slabs with nothing in them are given up and the request is
tried once more; only after that it is refused, and the error says how much is free and in what pieces.
"""

import os
import threading
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from freight._config import current
from freight._pages import PAGE
from freight._units import parse_bytes, round_up, show_bytes
from freight.errors import ClosedError, ForkedError, HostMemoryError
from freight.memory._host import allocate
from freight.memory._spans import Span, Spans
from freight.memory._views import Shape, fit, over


class Completion(Protocol):
    """What a buffer may have to wait for before it is used again: any token of a transfer."""

    def done(self) -> bool:
        """Whether it is over."""
        ...

    def join(self) -> None:
        """Wait until it is over, and leave its error, if it had one, to whoever waits for its result."""
        ...


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment, in bytes; `largest` is the longest buffer that needs no new slab."""

    slabs: int
    held: int
    free: int
    largest: int
    pieces: int
    buffers: int


class _Slab:
    def __init__(self, nbytes: int, purpose: str) -> None:
        self.block = allocate(nbytes, purpose=purpose)
        self.spans = Spans(nbytes, PAGE)


class PoolBlock:
    """One buffer of a pool. It goes back by `release`, or when neither it nor a tensor over it is left."""

    def __init__(self, slab: _Slab, span: Span, nbytes: int, waiting: "deque[tuple[Span, Completion]]") -> None:
        self.nbytes = nbytes
        self.address = slab.block.address + span.offset
        self._span: Span | None = span
        self._slab: _Slab | None = slab
        self._waiting = waiting

    def tensor(self, dtype: torch.dtype = torch.uint8, shape: Shape = None, offset: int = 0) -> Tensor:
        """A CPU tensor over the buffer, from byte `offset` on; after `release` its bytes may be somebody else's."""
        if self._span is None:
            raise ClosedError("this buffer was released; take a new one from the pool.")
        nbytes, sizes = fit("the buffer", self.nbytes, dtype, shape, offset)
        return over(self.address + offset, nbytes, (self, self._slab), dtype, sizes)

    def release(self, after: Completion | None = None) -> None:
        """Give the buffer back, to be used again once `after` is over. Calling it again does nothing."""
        if after is not None and self._span is not None:
            self._waiting.append((self._span, after))
        self._span = self._slab = None


class HostPool:
    """Buffers for one purpose; `most` bytes bound what all slabs hold, beside the budget that all of freight shares.

    >>> with HostPool(purpose="an example", most="1MiB") as pool:
    ...     buffer = pool.take(1000)
    ...     buffer.tensor(torch.int32, (10, 25)).shape
    torch.Size([10, 25])
    """

    def __init__(self, *, purpose: str = "a pool of host buffers", most: int | str | None = None) -> None:
        self.purpose = purpose
        self.most = None if most is None else parse_bytes(most, "most")
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []
        self._waiting: deque[tuple[Span, Completion]] = deque()  # released, and still used by a transfer
        self._closed = False
        self._process = os.getpid()

    def take(self, nbytes: int) -> PoolBlock:
        """A buffer of `nbytes` with undefined content; its address is a multiple of the page size."""
        nbytes = parse_bytes(nbytes, f"{self.purpose}: the size of a buffer")
        self._check_process()
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.purpose} was closed; make a new one.")
            self._settle()
            buffer = self._cut(nbytes) or self._cut_new_slab(nbytes)
            while buffer is None and self._waiting:  # for no more of them than it takes
                self._wait()
                buffer = self._cut(nbytes)
            if buffer is None:
                self._trim()
                buffer = self._cut_new_slab(nbytes, refuse=True)
            assert buffer is not None
            return buffer

    def trim(self) -> int:
        """Give up slabs with nothing in them; the bytes that this freed."""
        self._check_process()
        with self._lock:
            self._settle()
            return self._trim()

    def stats(self) -> PoolStats:
        """What the pool holds now."""
        self._check_process()
        with self._lock:
            self._settle()
            return self._stats()

    def close(self) -> None:
        """Give up all slabs; memory that a tensor still looks at goes with the tensor."""
        if self._process != os.getpid():  # what it waits for, and who holds its lock, is in the parent
            self._slabs = []
            return
        with self._lock:
            while self._waiting:
                self._wait()
            self._closed = True
            self._slabs.clear()

    def __enter__(self) -> "HostPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _check_process(self) -> None:
        """Before the lock is taken, which in a forked child may be held by a thread that is not there."""
        if self._process != os.getpid():
            raise ForkedError(
                f"{self.purpose} belongs to process {self._process}, and process {os.getpid()} was forked from it: "
                "both would cut the same memory. Make a pool of its own in each process."
            )

    def _cut(self, nbytes: int) -> PoolBlock | None:
        """A buffer from the slabs there are, from the one whose longest span is the shortest that fits."""
        for slab in sorted(self._slabs, key=lambda slab: slab.spans.largest):
            span = slab.spans.take(nbytes)
            if span is not None:
                return PoolBlock(slab, span, nbytes, self._waiting)
        return None

    def _cut_new_slab(self, nbytes: int, *, refuse: bool = False) -> PoolBlock | None:
        """A buffer from a new slab: of the usual size, or just large enough where that is too much."""
        least = round_up(max(nbytes, 1), PAGE)
        room = least if self.most is None else self.most - sum(slab.block.nbytes for slab in self._slabs)
        for size in dict.fromkeys((max(least, round_up(current().slab_bytes, PAGE)), least)):
            if self.most is not None and size > room:
                continue
            try:
                self._slabs.append(_Slab(size, self.purpose))
            except HostMemoryError as error:
                if refuse and size == least:
                    raise type(error)(f"{error} {self._told()}") from None
                continue
            return self._cut(nbytes)
        if refuse:
            raise HostMemoryError(
                f"{self.purpose} asked for {show_bytes(nbytes)}, and its limit is {show_bytes(self.most or 0)}. "
                f"{self._told()} Release buffers, or raise the limit."
            )
        return None

    def _settle(self) -> None:
        """Take back the buffers whose transfer is over."""
        for _ in range(len(self._waiting)):
            if self._waiting[0][1].done():
                self._waiting.popleft()
            else:
                self._waiting.rotate(-1)

    def _wait(self) -> None:
        """Until the transfer of the first is over. It stays in the queue so long: a wait may be interrupted."""
        self._waiting[0][1].join()
        self._settle()

    def _trim(self) -> int:
        empty = [slab for slab in self._slabs if not slab.spans.taken]
        self._slabs = [slab for slab in self._slabs if slab.spans.taken]
        return sum(slab.block.nbytes for slab in empty)

    def _stats(self) -> PoolStats:
        spans = [slab.spans for slab in self._slabs]
        return PoolStats(
            slabs=len(spans),
            held=sum(s.size for s in spans),
            free=sum(s.free for s in spans),
            largest=max((s.largest for s in spans), default=0),
            pieces=sum(s.pieces for s in spans),
            buffers=sum(s.taken for s in spans),
        )

    def _told(self) -> str:
        now = self._stats()
        return (
            f"The pool holds {show_bytes(now.held)}, of which {show_bytes(now.free)} are free in {now.pieces} pieces, "
            f"the longest {show_bytes(now.largest)}."
        )
