"""Bytes on disk: one nameless file reserved in full, cut into extents, read and written by a few threads.

    Extent       EMPTY -> WRITING -> WRITTEN (or FAILED)   and FREED at any time: its place once nothing moves on it

A transfer is cut into stages, and a stage into blocks. A stage crosses the link in one copy, through a page-locked slot
of its own; its blocks are written or read by as many threads as there are, which the disk likes small and many. While
one stage is at the disk the next one is on the link, so the copy is hidden. Memory that is aligned as direct I/O needs
it goes without a slot.

    write    a stager takes a slot and copies the stage into it     threads write its blocks     the last frees the slot
    read     a stager takes a slot                                  threads read its blocks      the last copies it out

Threads never wait for a slot, so slots always come free again. What fails is raised to whoever waits; what was not
written whole is never read.
"""

import contextlib
import ctypes
import enum
import errno
import os
import queue
import threading
import traceback
import weakref
import zlib
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from freight import _direct
from freight._config import current
from freight._direct import ALIGN
from freight._units import parse_bytes, round_up, show_bytes
from freight.errors import ArgumentError, ChecksumError, ClosedError, DiskFullError, ForkedError, FreightError
from freight.memory._host import HostBlock, allocate
from freight.memory._spans import Span, Spans
from freight.memory._streams import CopyStreams, as_bytes
from freight.memory._token import Token
from freight.memory._workers import Workers

_STAGE_BLOCKS = 8  # that cross the link together
_STAGERS = 2  # one copies while the other hands out


class Content(enum.Enum):
    """What an extent holds."""

    EMPTY = "empty"
    WRITING = "being written"
    WRITTEN = "written"
    FAILED = "failed to be written"
    FREED = "freed"


class Extent:
    """A place in the file for `nbytes` bytes; made by `DiskFile.allocate`, gone by `free` or when nobody holds it."""

    def __init__(self, span: Span, nbytes: int, file: "DiskFile") -> None:
        self.offset = span.offset
        self.nbytes = nbytes
        self._span: Span | None = span
        self._file = file
        self._content = Content.EMPTY
        self._writing: Token | None = None
        self._sums: dict[int, int] = {}

    @property
    def content(self) -> Content:
        """What it holds now."""
        return self._content

    def __repr__(self) -> str:
        return f"Extent({show_bytes(self.nbytes)} at {self.offset}, {self._content.value})"


@dataclass(frozen=True)
class DiskStats:
    """A disk file at one moment; `largest` is the longest extent that could be allocated."""

    directory: str
    file_system: str
    direct: bool
    nbytes: int
    free: int
    largest: int
    extents: int
    under_way: int
    bytes_written: int
    bytes_read: int


class DiskFile:
    """A nameless file of `nbytes`, reserved when it is made and gone when it is closed or the process ends.

    >>> import freight
    >>> with freight.config(direct_io=False), DiskFile("1MiB") as disk:
    ...     extent = disk.allocate(12)
    ...     disk.write(extent, torch.tensor([1.0, 2.0, 3.0])).wait()
    ...     back = torch.empty(3)
    ...     disk.read(extent, back).wait()
    ...     back.tolist()
    [1.0, 2.0, 3.0]
    """

    def __init__(
        self,
        nbytes: int | str,
        *,
        directory: str | os.PathLike[str] | None = None,
        checksum: bool | None = None,
        threads: int | None = None,
        block_bytes: int | str | None = None,
        streams: CopyStreams | None = None,
    ) -> None:
        settings = current()
        self.nbytes = round_up(parse_bytes(nbytes, "nbytes"), ALIGN)
        self.directory = Path(directory) if directory is not None else _direct.default_directory()
        self.direct = settings.direct_io
        self._checksum = settings.checksum if checksum is None else checksum
        self._threads = settings.disk_threads if threads is None else threads
        block = settings.disk_block_bytes if block_bytes is None else parse_bytes(block_bytes, "block_bytes")
        self._block = round_up(max(block, 1), ALIGN)
        self._stage = _STAGE_BLOCKS * self._block
        if self._threads < 1:
            raise ArgumentError(f"threads must be at least 1; got {self._threads}.")
        self._streams = streams or CopyStreams()
        self._lock = threading.RLock()
        self._spans = Spans(self.nbytes, ALIGN)
        self._under_way: set[_Transfer] = set()
        self._written = self._read = 0
        self._closed = False
        self._process = os.getpid()
        held = contextlib.ExitStack()  # the file, its staging memory and its threads
        self._end = weakref.finalize(self, held.close)
        try:
            self._fd = _direct.open_nameless(self.directory, self.nbytes, direct=self.direct)
            held.callback(os.close, self._fd)
            staging = allocate(max(2, self._threads // 2) * self._stage, purpose="staging for the disk")
            held.callback(staging.close)
            self._slots = _slots(staging, self._stage)
            held.callback(_empty, self._slots)
            self._workers = Workers(self._threads, "freight-disk")
            held.callback(self._workers.close)
            self._stagers = Workers(_STAGERS, "freight-stage")
            held.callback(self._stagers.close)
        except BaseException:  # or the traceback keeps what there was already
            self._end()
            raise

    def allocate(self, nbytes: int | str) -> Extent:
        """A place for `nbytes`; a DiskFullError says how much is free and in what pieces."""
        nbytes = parse_bytes(nbytes, "the size of an extent")
        self._check_process()
        with self._lock:
            self._check_open()
            span = self._spans.take(nbytes)
            if span is None:
                free, pieces, largest = self._spans.free, self._spans.pieces, self._spans.largest
                raise DiskFullError(
                    errno.ENOSPC,
                    f"freight's disk file has no place for {show_bytes(nbytes)}: of {show_bytes(self.nbytes)}, "
                    f"{show_bytes(free)} are free in {pieces} pieces, the longest {show_bytes(largest)}. "
                    "Free extents, or make the file larger",
                    str(self.directory),
                )
            return Extent(span, nbytes, self)

    def free(self, extent: Extent) -> None:
        """Give the extent's place back, once transfers under way on it are over."""
        self._check_process()
        with self._lock:
            self._check_open()
            self._check_mine(extent)
            extent._content = Content.FREED
            if not self._moves_on(extent):
                extent._span = None

    def write(self, extent: Extent, tensor: Tensor, *, after: Any = None) -> Token:
        """Start writing `tensor`, on the CPU or the GPU, to `extent`; it must have as many bytes.

        A GPU tensor is read once the current stream has done what it was given so far, or at the event `after`.
        The tensor is kept alive, and must not be changed, until the token is done.
        """
        self._check_process()
        source = as_bytes(tensor, "tensor")
        with self._lock:
            self._check_open()
            self._check_transfer(extent, source)
            if self._moves_on(extent):
                raise FreightError(f"{extent} is in use by another transfer; wait for its token before writing anew.")
            return self._start(_Transfer("write", extent, source, self._stage, self._ready(source, after), None))

    def read(self, extent: Extent, tensor: Tensor, *, after: Any = None) -> Token:
        """Start reading `extent` into `tensor`, on the CPU or the GPU; it must have as many bytes.

        A read of an extent that is still being written comes after the write. A GPU tensor is written once the
        current stream has done what it was given so far, or at the event `after`.
        """
        self._check_process()
        to = as_bytes(tensor, "tensor")
        with self._lock:
            self._check_open()
            self._check_transfer(extent, to)
            if extent._content not in (Content.WRITING, Content.WRITTEN):
                raise FreightError(f"{extent} cannot be read: write it first.")
            torch.autograd.graph.increment_version(to)  # so that autograd sees it where it saved the tensor
            return self._start(_Transfer("read", extent, to, self._stage, self._ready(to, after), extent._writing))

    def stats(self) -> DiskStats:
        """What the file holds and has moved."""
        self._check_process()
        with self._lock:
            return DiskStats(
                directory=str(self.directory),
                file_system=_direct.file_system(self.directory).name,
                direct=self.direct,
                nbytes=self.nbytes,
                free=self._spans.free,
                largest=self._spans.largest,
                extents=self._spans.taken,
                under_way=len(self._under_way),
                bytes_written=self._written,
                bytes_read=self._read,
            )

    def join(self) -> None:
        """Wait until no transfer is under way, without raising their errors."""
        self._check_process()
        while True:
            with self._lock:
                tokens = [transfer.token for transfer in self._under_way]
            if not tokens:
                return
            for token in tokens:
                token.join()

    def close(self) -> None:
        """Wait for transfers under way, then free the file and the staging memory. Again does nothing."""
        if self._process == os.getpid():
            with self._lock:
                self._closed = True  # first, so that no other thread begins a transfer that nobody would end
            self.join()
        self._end()

    def __enter__(self) -> "DiskFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DiskFile({show_bytes(self.nbytes)} in {self.directory}{', closed' if self._closed else ''})"

    def _start(self, transfer: "_Transfer") -> Token:
        """Hand the stages to the stagers; where Ctrl-C comes in between, fail the rest, so that nobody waits for it."""
        extent = transfer.extent
        try:
            self._under_way.add(transfer)
            if transfer.what == "write":
                extent._content, extent._sums, extent._writing = Content.WRITING, {}, transfer.token
            for _ in range(transfer.left):
                self._stagers.do(partial(self._begin_stage, transfer))
        except BaseException as error:
            transfer.error = transfer.error or FreightError(f"{transfer.token.what}: not all was begun: {error!r}")
            while transfer.todo:
                transfer.todo.popleft()
                self._finish_stage(transfer)
            raise
        return transfer.token

    def _begin_stage(self, transfer: "_Transfer") -> None:
        """The next stage of a transfer, on a stager: its bytes into place, and its blocks to the threads."""
        with self._lock:
            if not transfer.todo:  # it could not be begun whole
                return
            start = transfer.todo.popleft()
        stage = _Stage(transfer, start, min(self._stage, transfer.bytes.numel() - start))
        try:
            if transfer.error is None:
                transfer.token._run()
                if transfer.behind is not None:  # it was queued earlier, so all of it is with the threads by now
                    transfer.behind.wait()
                self._place(stage)
        except BaseException as error:
            transfer.error = transfer.error or _without_frames(error)
        blocks = range(0, 0 if transfer.error else stage.padded, self._block)
        stage.left = len(blocks)
        for at in blocks:
            self._workers.do(partial(self._move_block, stage, at))
        if not blocks:
            self._end_stage(stage)

    def _place(self, stage: "_Stage") -> None:
        """Find the memory that the disk reads from or writes to: the tensor's own, or a slot, filled for a write."""
        transfer, nbytes = stage.transfer, stage.nbytes
        piece = stage.piece
        if transfer.ready is None and self._can_go_as_it_is(piece):
            stage.address, stage.padded = piece.data_ptr(), nbytes
        else:
            slot = stage.slot = self._slots.get()
            stage.address, stage.padded = slot.data_ptr(), round_up(nbytes, ALIGN)
            if transfer.what == "write":
                self._copy(slot[:nbytes], piece, transfer.ready)
                slot[nbytes : stage.padded].zero_()

    def _move_block(self, stage: "_Stage", at: int) -> None:
        """One block, on a thread; the last one of a stage ends it."""
        transfer = stage.transfer
        try:
            if transfer.error is None:
                self._to_or_from_disk(transfer, stage, at)
        except BaseException as error:
            transfer.error = transfer.error or _without_frames(error)
        with self._lock:
            stage.left -= 1
            last = stage.left == 0
        if last:
            self._end_stage(stage)

    def _to_or_from_disk(self, transfer: "_Transfer", stage: "_Stage", at: int) -> None:
        extent, address, offset = transfer.extent, stage.address + at, transfer.extent.offset + stage.start + at
        padded, nbytes = min(self._block, stage.padded - at), min(self._block, stage.nbytes - at)
        if transfer.what == "write":
            if self._checksum:
                extent._sums[stage.start + at] = _sum(address, nbytes)
            _direct.write_from(self._fd, address, padded, offset)
            return
        _direct.read_into(self._fd, address, padded, offset)
        if self._checksum and _sum(address, nbytes) != extent._sums[stage.start + at]:
            reason = f"{show_bytes(nbytes)} read back at offset {offset} are not what was written"
            raise ChecksumError(errno.EIO, reason, str(self.directory))

    def _end_stage(self, stage: "_Stage") -> None:
        """What was read goes where it belongs, and the slot to the next."""
        transfer = stage.transfer
        try:
            if transfer.what == "read" and transfer.error is None and stage.slot is not None:
                self._copy(stage.piece, stage.slot[: stage.nbytes], transfer.ready)
        except BaseException as error:
            transfer.error = transfer.error or _without_frames(error)
        finally:
            slot, stage.slot = stage.slot, None
            if slot is not None:
                self._slots.put(slot)
            self._finish_stage(transfer)

    def _copy(self, to: Tensor, source: Tensor, ready: Any) -> None:
        if ready is not None:
            self._streams.copy(to, source, after=ready).wait()
        else:
            ctypes.memmove(to.data_ptr(), source.data_ptr(), to.numel())  # torch's own copy would start more threads

    def _finish_stage(self, transfer: "_Transfer") -> None:
        with self._lock:
            transfer.left -= 1
            if transfer.left:
                return
            extent, moved = transfer.extent, transfer.bytes.numel() if transfer.error is None else 0
            if transfer.what == "write":
                self._written += moved
                if extent._content is Content.WRITING:
                    extent._content = Content.WRITTEN if transfer.error is None else Content.FAILED
            else:
                self._read += moved
            self._under_way.discard(transfer)
            if extent._content is Content.FREED and not self._moves_on(extent):
                extent._span = None
            del transfer.bytes, transfer.extent, extent  # they may go now
            transfer.token._finish(transfer.error)

    def _moves_on(self, extent: Extent) -> bool:
        """Whether a transfer on the extent is under way."""
        return any(transfer.extent is extent for transfer in self._under_way)

    def _can_go_as_it_is(self, piece: Tensor) -> bool:
        return not self.direct or (piece.data_ptr() % ALIGN == 0 and piece.numel() % ALIGN == 0)

    def _ready(self, tensor: Tensor, after: Any) -> Any:
        """The event that a transfer of GPU memory starts behind; None for host memory."""
        if not self._streams.is_device(tensor):
            if tensor.device.type != "cpu":
                raise ArgumentError(
                    f"the tensor is on {tensor.device}, which is not the device of this file's streams."
                )
            return None
        return self._streams.now() if after is None else after

    def _check_transfer(self, extent: Extent, tensor: Tensor) -> None:
        self._check_mine(extent)
        if tensor.numel() != extent.nbytes:
            raise ArgumentError(f"{extent} is for {extent.nbytes} bytes; the tensor has {tensor.numel()}.")

    def _check_mine(self, extent: Extent) -> None:
        if extent._file is not self:
            raise ArgumentError(f"{extent} belongs to another file, {extent._file}.")
        if extent._content is Content.FREED:
            raise FreightError(f"{extent} was freed; allocate a new one.")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"freight's disk file in {self.directory} was closed; make a new one.")

    def _check_process(self) -> None:
        """Before the lock is taken, which in a forked child may be held by a thread that is not there."""
        if self._process != os.getpid():
            raise ForkedError(
                f"this disk file belongs to process {self._process}, and process {os.getpid()} was forked from it. "
                "Make a file of its own in each process."
            )


class _Transfer:
    """A read or write under way; `ready` is the event it starts behind, None where it stays in host memory."""

    def __init__(self, what: str, extent: Extent, data: Tensor, stage: int, ready: Any, behind: Token | None) -> None:
        self.what = what
        self.extent = extent
        self.bytes = data
        self.ready = ready
        self.behind = behind
        self.todo = deque(range(0, data.numel(), stage) or (0,))  # where the stages start that nobody has begun
        self.left = len(self.todo)
        self.error: BaseException | None = None
        self.token = Token(f"{what} of {show_bytes(data.numel())}, disk")


class _Stage:
    """A part of a transfer that crosses the link together; `left` blocks of it are not done."""

    def __init__(self, transfer: _Transfer, start: int, nbytes: int) -> None:
        self.transfer = transfer
        self.start = start
        self.nbytes = nbytes
        self.slot: Tensor | None = None
        self.address = 0
        self.padded = 0
        self.left = 0

    @property
    def piece(self) -> Tensor:
        """The part of the transfer's bytes."""
        return self.transfer.bytes[self.start : self.start + self.nbytes]


def _without_frames(error: BaseException) -> BaseException:
    """The error with what its traceback says and without what it holds: the token keeps it, and it the tensor."""
    traceback.clear_frames(error.__traceback__)
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # the first is still at work


def _slots(memory: HostBlock, stage: int) -> "queue.SimpleQueue[Tensor]":
    slots: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for slot in memory.tensor().split(stage):
        slots.put(slot)
    return slots


def _sum(address: int, nbytes: int) -> int:
    return zlib.crc32((ctypes.c_ubyte * nbytes).from_address(address))


def _empty(slots: "queue.SimpleQueue[Tensor]") -> None:
    """Each slot keeps all of the staging memory."""
    while not slots.empty():
        slots.get()
