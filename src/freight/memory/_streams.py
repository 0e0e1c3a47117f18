"""Moving bytes between the GPU and host memory beside the computation, one stream for each direction.

A copy starts when the work that the caller's stream has been given so far is done: what it reads is then written, and
what it overwrites is then read. The memory at both ends is kept alive, and page-locked, until the copy is over and is
dropped only after that, by the host, so the allocator can give it out again at once and no stream has to be recorded
on it. Large copies go in chunks, so that other copies in the same direction get in between.
"""

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from freight import _cuda
from freight._units import MiB, show_bytes
from freight.errors import ArgumentError, ArgumentTypeError
from freight.memory._devices import LANES, CudaDevice, Device, ModelDevice
from freight.memory._registry import Use, registry
from freight.memory._token import State, Token

_CHUNK = 64 * MiB


class CopyToken(Token):
    """A copy on a stream: over when the GPU has passed its event, which a stream can wait for too."""

    def __init__(self, what: str, device: Device, event: Any, keep: object) -> None:
        super().__init__(what)
        self._device = device
        self._event = event
        self._keep: object = keep
        self._run()

    def join(self) -> None:
        """Wait on the host until the copy is over."""
        if self._state is State.RUNNING:
            self._device.synchronize(self._event)
            self._finish()

    def wait_on(self, stream: Any = None) -> None:
        """Have `stream`, or the current one, wait for the copy; the host goes on."""
        if not self.done():
            self._device.hold(stream, self._event)

    def _poll(self) -> None:
        if self._state is State.RUNNING and self._device.done(self._event):
            self._finish()

    def _finish(self, error: BaseException | None = None) -> None:
        self._keep = None
        super()._finish(error)


class CopyStreams:
    """Copies between one GPU and host memory; on a computer without one, or with a `ModelDevice`, the same in steps.

    >>> streams = CopyStreams()
    >>> host = torch.zeros(3)
    >>> streams.copy(host, torch.ones(3)).wait()
    >>> host.tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, device: torch.device | int | str | ModelDevice | None = None) -> None:
        self._device: Device
        if isinstance(device, ModelDevice):
            self._device = device
        elif device is None and not _cuda.available():
            _cuda.refuse_fork("a copy stream")
            self._device = ModelDevice()
        else:
            self._device = CudaDevice(device)
        self._lock = threading.Lock()
        self._under_way: dict[str, deque[CopyToken]] = {lane: deque() for lane in LANES}

    def copy(self, dst: Tensor, src: Tensor, *, after: Any = None) -> CopyToken:
        """Start copying `src` to `dst`, one of them host memory; same number of bytes, both contiguous.

        The copy waits for the event `after`, or without one for what the current stream was given so far.
        """
        _cuda.refuse_fork("a copy stream")
        to, source = as_bytes(dst, "dst"), as_bytes(src, "src")
        if to.numel() != source.numel():
            raise ArgumentError(f"dst has {to.numel()} bytes and src has {source.numel()}; they must be as many.")
        lane, page_lock = self._lane(dst, src)
        pairs = list(zip(to.split(_CHUNK), source.split(_CHUNK), strict=True))
        ready = self.now() if after is None else after
        try:
            event = self._device.copy(lane, pairs, [ready])
            what = f"copy of {show_bytes(to.numel())} {lane}"
            token = CopyToken(what, self._device, event, keep=(to, source, page_lock))
            with self._lock:
                self._under_way[lane].append(token)
        except BaseException:  # what was queued before the error still uses the memory at both ends
            self._device.drain(lane)
            raise
        self.reap()
        return token

    def now(self) -> Any:
        """An event behind what the current stream was given so far, to pass as `after`."""
        return self._device.now()

    def reap(self) -> int:
        """Drop the memory of copies that are over; how many are still under way. Every `copy` does this too."""
        with self._lock:
            for queue in self._under_way.values():
                while queue and queue[0].done():  # a lane works in order
                    queue.popleft()
            return sum(map(len, self._under_way.values()))

    def join(self) -> None:
        """Wait until every copy is over."""
        with self._lock:
            waiting = [token for queue in self._under_way.values() for token in queue]
        for token in waiting:
            token.join()
        self.reap()

    def is_device(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies on the GPU of these streams."""
        return self._device.is_mine(tensor)

    def _lane(self, dst: Tensor, src: Tensor) -> tuple[str, Use | None]:
        """The direction of a copy, and a use of the page lock of its end in host memory, where that is freight's."""
        to_host = self._device.is_mine(src)
        host, other = (dst, src) if to_host else (src, dst)
        nbytes = host.numel() * host.element_size()
        page_lock = registry.use(host.data_ptr(), nbytes) if nbytes else None
        if isinstance(self._device, CudaDevice):
            if host.device.type != "cpu" or not self._device.is_mine(other):
                raise ArgumentError(
                    f"a copy goes between {self._device.device} and host memory; got src on {src.device}, dst on "
                    f"{dst.device}."
                )
            if nbytes and page_lock is None and not host.is_pinned():
                raise ArgumentError(
                    "host memory must be page-locked, or the copy would stop the host; make it with "
                    "freight.memory.allocate or page-lock it in place with freight.memory.register."
                )
        return "to_host" if to_host else "to_device", page_lock


def as_bytes(tensor: Tensor, name: str) -> Tensor:
    """The bytes of a contiguous tensor, in place."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"{name} must be a tensor; got {tensor!r}.")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            f"{name} must be contiguous and not lazily conjugated, because bytes are moved as they lie; got strides "
            f"{tensor.stride()} for {tuple(tensor.shape)}. Move its storage, or a contiguous copy."
        )
    return tensor.detach().view(-1).view(torch.uint8)
