"""Short-lived host buffers cut from slabs, so that pinning is paid once and not for every buffer.

A slab is one pinned block; a request takes the best-fitting span of any slab, a large one gets a slab of its own, and
the pool grows until its limit or the budget says no. Then slabs with nothing in them are given up and the request is
tried once more; only after that it is refused, and the error says how much is free and in what pieces.
"""

import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from freight._config import current
from freight._pages import PAGE
from freight._units import parse_bytes, round_up, show_bytes
from freight.errors import ClosedError, ForkedError, HostMemoryError
from freight.memory._host import allocate
from freight.memory._spans import Spans
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

    def __init__(self, slab: _Slab, offset: int, nbytes: int, ended: "deque[_Ended]") -> None:
        self.nbytes = nbytes
        self.address = slab.block.address + offset
        self._ended = ended
        self._end = weakref.finalize(self, ended.append, _Ended(slab, offset, None))
        self._end.atexit = False

    def tensor(self, dtype: torch.dtype = torch.uint8, shape: Shape = None, offset: int = 0) -> Tensor:
        """A CPU tensor over the buffer, from byte `offset` on; after `release` its bytes may be somebody else's."""
        if not self._end.alive:
            raise ClosedError("this buffer was released; take a new one from the pool.")
        nbytes, sizes = fit("the buffer", self.nbytes, dtype, shape, offset)
        return over(self.address + offset, nbytes, self, dtype, sizes)

    def release(self, after: Completion | None = None) -> None:
        """Give the buffer back, to be used again once `after` is over. Calling it again does nothing."""
        at_end = self._end.detach()
        if at_end is not None:
            self._ended.append(replace(at_end[2][0], after=after))


@dataclass
class _Ended:
    slab: _Slab
    offset: int
    after: Completion | None


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
        self._ended: deque[_Ended] = deque()  # by finalizers, which may run while this thread holds the lock
        self._closed = False
        self._process = os.getpid()

    def take(self, nbytes: int) -> PoolBlock:
        """A buffer of `nbytes` with undefined content; its address is a multiple of the page size."""
        if self._process != os.getpid():
            raise ForkedError(
                f"{self.purpose} belongs to process {self._process}, and process {os.getpid()} was forked from it: "
                "both would cut the same memory. Make a pool of its own in each process."
            )
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.purpose} was closed; make a new one.")
            self._settle()
            buffer = self._cut(nbytes) or self._cut_new_slab(nbytes)
            if buffer is None and self._settle(wait=True):
                buffer = self._cut(nbytes) or self._cut_new_slab(nbytes)
            if buffer is None:
                self._trim()
                buffer = self._cut_new_slab(nbytes, refuse=True)
            assert buffer is not None
            return buffer

    def trim(self) -> int:
        """Give up slabs with nothing in them; the bytes that this freed."""
        with self._lock:
            self._settle()
            return self._trim()

    def stats(self) -> PoolStats:
        """What the pool holds now."""
        with self._lock:
            self._settle()
            return self._stats()

    def close(self) -> None:
        """Give up all slabs; memory that a tensor still looks at goes with the tensor."""
        with self._lock:
            self._settle(wait=True)
            self._closed = True
            self._slabs.clear()

    def __enter__(self) -> "HostPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _cut(self, nbytes: int) -> PoolBlock | None:
        """A buffer from the slabs there are, from the one whose longest span is the shortest that fits."""
        for slab in sorted(self._slabs, key=lambda slab: slab.spans.largest):
            offset = slab.spans.take(nbytes)
            if offset is not None:
                return PoolBlock(slab, offset, nbytes, self._ended)
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
                    raise HostMemoryError(f"{error} {self._told()}") from None
                continue
            return self._cut(nbytes)
        if refuse:
            raise HostMemoryError(
                f"{self.purpose} asked for {show_bytes(nbytes)}, and its limit is {show_bytes(self.most or 0)}. "
                f"{self._told()} Release buffers, or raise the limit."
            )
        return None

    def _settle(self, *, wait: bool = False) -> bool:
        """Take back the buffers that ended, and with `wait` those whose completion is still to come; whether any."""
        unfinished: list[_Ended] = []
        any_came = False
        while self._ended:
            ended = self._ended.popleft()
            if ended.after is not None and not ended.after.done():
                if not wait:
                    unfinished.append(ended)
                    continue
                ended.after.join()
            ended.slab.spans.give_back(ended.offset)
            any_came = True
        self._ended.extend(unfinished)
        return any_came

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
