"""Blocks of host memory: exact size, page-aligned, faulted in, page-locked where there is a GPU, seen by both sides.

    HostBlock            what a caller holds; `close()` gives up its hold
    ├── _Pages           the mapped memory; given back when the block and every tensor over it are gone
    └── Use              the page lock; released when the block, every GPU tensor over it and every copy under way are

So a tensor over a closed block still reads its bytes: memory goes when the last that can reach it goes.
"""

import os
import resource
import weakref
from multiprocessing import reduction
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from freight import _cuda, _pages
from freight._units import parse_bytes, round_up, show_bytes
from freight.errors import ArgumentError, ArgumentTypeError, ClosedError, PinError
from freight.memory._budget import budget
from freight.memory._registry import Use, registry
from freight.memory._views import Shape, fit, over


class HostBlock:
    """Host memory held for one purpose; made by `allocate`, `register` or `attach`."""

    def __init__(self, address: int, nbytes: int, purpose: str, keep: object, fd: int | None = None) -> None:
        self.address = address
        self.nbytes = nbytes
        self.purpose = purpose
        self._keep: object = keep
        self._fd = fd
        self._lock: Use | None = None

    @property
    def pinned(self) -> bool:
        """Whether this process's GPUs can read the block in place and copy from it without a stop."""
        return self._lock is not None and self._lock.range.process == os.getpid()

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._keep is None

    def pin(self, *, pinned_by_others: bool = False) -> None:
        """Page-lock the block for this process's GPUs; nothing where it is locked, or where there is no GPU."""
        self._check_open()
        if self.pinned or self.nbytes == 0 or not _cuda.available():
            return
        try:
            self._lock = registry.acquire(self.address, self.nbytes, self._keep, pinned_by_others=pinned_by_others)
        except PinError as error:
            raise PinError(f"{self.purpose}: {error}. {_lockable()}") from None

    def tensor(self, dtype: torch.dtype = torch.uint8, shape: Shape = None, offset: int = 0) -> Tensor:
        """A CPU tensor over the block's memory, from byte `offset` on; without `shape`, one-dimensional to the end."""
        self._check_open()
        nbytes, sizes = fit(self.purpose, self.nbytes, dtype, shape, offset)
        return over(self.address + offset, nbytes, self._keep, dtype, sizes)

    def alias(
        self,
        dtype: torch.dtype = torch.uint8,
        shape: Shape = None,
        offset: int = 0,
        device: torch.device | int | str | None = None,
    ) -> Tensor:
        """The same bytes as a tensor on the GPU, which reads and writes them in place, across the link."""
        self._check_open()
        _cuda.require("a GPU view of host memory")
        nbytes, sizes = fit(self.purpose, self.nbytes, dtype, shape, offset)
        if nbytes == 0:
            return torch.empty(sizes, dtype=dtype, device=_cuda.compute_device(device))
        self.pin()
        return _cuda.alias(self.address + offset, nbytes, self._lock, device).view(dtype).view(sizes)

    def fileno(self) -> int:
        """The descriptor by which other processes map a shareable block."""
        self._check_open()
        if self._fd is None:
            raise ArgumentError(f"{self.purpose} is not shareable: allocate it with shareable=True.")
        return self._fd

    def close(self) -> None:
        """Give up the block; its memory goes once no tensor over it is left. Calling it again does nothing."""
        self._keep = self._lock = self._fd = None

    def __enter__(self) -> "HostBlock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process on this machine gets the same memory, by its descriptor; it is never copied."""
        if self.nbytes == 0 and not self.closed:
            return _empty, (self.purpose,)
        return _attach_sent, (reduction.DupFd(self.fileno()), self.nbytes, self.purpose)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "pinned" if self.pinned else "pageable"
        return f"HostBlock({show_bytes(self.nbytes)}, {state}, for {self.purpose})"

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.purpose} was closed; make a new one.")


def allocate(nbytes: int | str, *, purpose: str = "a host block", shareable: bool = False) -> HostBlock:
    """New zeroed memory of `nbytes`, on the account of freight's budget, every page there; pinned where there is a GPU.

    A `shareable` block can be pickled to, and mapped by, other processes of this machine.

    >>> with allocate(1000) as block:
    ...     block.tensor(torch.float32, (10, 25)).sum().item()
    0.0
    """
    nbytes = parse_bytes(nbytes, f"{purpose}: the size")
    if nbytes == 0:
        return _empty(purpose)
    registry.settle()  # what was closed while a graph was captured may have waited until now
    pages = _Pages(nbytes, purpose, fd=_pages.create_file(round_up(nbytes, _pages.PAGE)) if shareable else None)
    block = HostBlock(pages.address, nbytes, purpose, pages, pages.fd)
    try:
        _pages.fault_in(pages.address, pages.nbytes)
        block.pin()
    except BaseException:  # or the traceback keeps all of it for as long as somebody looks at it
        block.close()
        pages.give_back()
        raise
    return block


def attach(fd: int, nbytes: int, *, purpose: str = "a shared host block", pin: bool = False) -> HostBlock:
    """The shareable block behind descriptor `fd`, of this or another process; the descriptor is closed with its memory.

    It is not put on this process's account, because the memory is there already.
    """
    size = os.fstat(fd).st_size
    if not 0 < nbytes <= size:
        raise ArgumentError(f"{purpose}: {nbytes} bytes cannot be mapped from a shared block of {size}.")
    pages = _Pages(nbytes, purpose, fd=fd, counted=False)
    block = HostBlock(pages.address, nbytes, purpose, pages, fd)
    if pin:
        block.pin()
    return block


def register(tensor: Tensor, *, purpose: str = "a registered tensor") -> HostBlock:
    """Page-lock the caller's own memory in place, without a copy; the block is all of the tensor's storage.

    Views of one storage, and the same tensor twice, share one registration. The storage lives as long as the block.
    """
    if not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ArgumentTypeError(f"{purpose} must be a dense CPU tensor; got {_described(tensor)}.")
    storage = tensor.untyped_storage()
    block = HostBlock(storage.data_ptr(), storage.nbytes(), purpose, keep=storage)
    registry.settle()  # or what is about to be unlocked would be taken for somebody else's
    block.pin(pinned_by_others=_cuda.available() and tensor.is_pinned())
    return block


class _Pages:
    """Mapped memory; unmapped and taken off the account when nothing refers to it."""

    def __init__(self, nbytes: int, purpose: str, *, fd: int | None, counted: bool = True) -> None:
        self.nbytes = round_up(nbytes, _pages.PAGE)
        self.fd = fd
        counted_bytes = self.nbytes if counted else 0
        try:
            budget.take(counted_bytes, purpose)
            try:
                self.address = _pages.map_segments(self.nbytes) if fd is None else _pages.map_file(fd, self.nbytes)
            except BaseException:
                budget.give_back(counted_bytes)
                raise
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        self.give_back = weakref.finalize(self, _give_back, self.address, self.nbytes, fd, counted_bytes, os.getpid())
        self.give_back.atexit = False  # at exit the system takes it all, and tensors may still be looked at


def _give_back(address: int, nbytes: int, fd: int | None, counted: int, process: int) -> None:
    _pages.unmap(address, nbytes)
    if fd is not None:
        os.close(fd)
    if process == os.getpid():
        budget.give_back(counted)


def _attach_sent(sent: Any, nbytes: int, purpose: str) -> HostBlock:
    return attach(sent.detach(), nbytes, purpose=purpose)


def _empty(purpose: str) -> HostBlock:
    return HostBlock(0, 0, purpose, keep=purpose)


def _lockable() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return f"Lockable memory is not limited; freight has {show_bytes(registry.held_bytes())} locked."
    return (
        f"Lockable memory is {show_bytes(limit)} (`ulimit -l`), and freight has {show_bytes(registry.held_bytes())} "
        "locked: raise it with `ulimit -l unlimited`, or start the container with `--ulimit memlock=-1`."
    )


def _described(value: object) -> str:
    return f"a {value.layout} tensor on {value.device}" if isinstance(value, Tensor) else repr(value)
