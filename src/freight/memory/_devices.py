"""What copies run on: a GPU with a stream for each direction, or a model of one that does the same steps on the CPU.

Both offer the same few calls. A lane is a queue of work done in order; an event marks a place in a lane. The model
executes nothing until it is told to or somebody waits, in whatever order the lanes allow, so a test can hold a copy
back for as long as it likes; made `eager`, it works at once, which is what computers without a GPU use.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from freight import _cuda
from freight.errors import UnsupportedError

LANES = ("to_host", "to_device")


class Device(Protocol):
    """The calls that `CopyStreams` makes."""

    def now(self) -> Any:
        """An event behind everything that the caller's stream was given so far."""
        ...

    def copy(self, lane: str, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Any]) -> Any:
        """Queue copies (to, from) on a lane, to start after the events `after`; the event behind them."""
        ...

    def done(self, event: Any) -> bool:
        """Whether everything before `event` is done."""
        ...

    def synchronize(self, event: Any) -> None:
        """Wait on the host for `event`."""
        ...

    def drain(self, lane: str) -> None:
        """Wait on the host until nothing is left to do on a lane."""
        ...

    def hold(self, stream: Any, event: Any) -> None:
        """Have `stream`, or the caller's own, wait for `event`."""
        ...

    def is_mine(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies on this device, not in host memory."""
        ...


class CudaDevice:
    """A GPU; its lanes are streams of their own, so copies run beside the computation and beside each other."""

    def __init__(self, device: torch.device | int | str | None = None) -> None:
        _cuda.require("a copy stream")
        self.device = _cuda.compute_device(device)
        self._streams = {lane: torch.cuda.Stream(self.device) for lane in LANES}

    def now(self) -> torch.cuda.Event:
        """An event on the caller's current stream."""
        stream = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("freight's copy streams cannot be captured in a CUDA graph; copy outside of it.")
        return self._recorded(stream)

    def copy(self, lane: str, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Any]) -> torch.cuda.Event:
        """Queue copies on the lane's stream."""
        stream = self._streams[lane]
        with torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(event)
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            return self._recorded(stream)

    def done(self, event: torch.cuda.Event) -> bool:
        """Whether the GPU has passed `event`; not known while a CUDA graph is captured, which asking would spoil."""
        return not torch.cuda.is_current_stream_capturing() and event.query()

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Wait without using a core."""
        event.synchronize()

    def drain(self, lane: str) -> None:
        """Wait for all that the lane's stream was given."""
        self._streams[lane].synchronize()

    def hold(self, stream: torch.cuda.Stream | None, event: torch.cuda.Event) -> None:
        """Have a stream wait for `event`."""
        (stream or torch.cuda.current_stream(self.device)).wait_event(event)

    def is_mine(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on this GPU."""
        return tensor.device == self.device

    @staticmethod
    def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event


@dataclass(eq=False)
class _Event:
    lane: str
    passed: bool = False


@dataclass(eq=False)
class _Work:
    event: _Event
    after: list[_Event] = field(default_factory=list)
    call: Callable[[], object] = lambda: None


class ModelDevice:
    """A device with lanes and events on the CPU. Tensors given to `own` count as its memory.

    >>> device = ModelDevice(eager=False)
    >>> source, to = device.own(torch.ones(2)), torch.zeros(2)
    >>> event = device.copy("to_host", [(to, source)], [device.now()])
    >>> to.tolist(), device.step("compute"), device.step("to_host"), to.tolist()
    ([0.0, 0.0], True, True, [1.0, 1.0])
    """

    def __init__(self, *, eager: bool = True) -> None:
        self._eager = eager
        self._lock = threading.RLock()
        self._lanes: dict[str, deque[_Work]] = {lane: deque() for lane in (*LANES, "compute")}
        self._owned: set[int] = set()

    def own(self, tensor: Tensor) -> Tensor:
        """Count this tensor's storage as the device's memory."""
        self._owned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def launch(self, call: Callable[[], object]) -> _Event:
        """Queue `call` as computation, which the caller's stream does in order."""
        return self._queue("compute", [], call)

    def now(self) -> _Event:
        """An event in the lane of the computation."""
        return self._queue("compute", [])

    def copy(self, lane: str, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[_Event]) -> _Event:
        """Queue copies on a lane."""
        pairs = list(pairs)
        return self._queue(lane, after, lambda: [to.copy_(source) for to, source in pairs])

    def done(self, event: _Event) -> bool:
        """Whether the work before `event` was done."""
        return event.passed

    def synchronize(self, event: _Event) -> None:
        """Do all work up to `event`, and what that waits for."""
        with self._lock:
            while not event.passed:
                work = self._lanes[event.lane][0]
                for earlier in work.after:
                    self.synchronize(earlier)
                self.step(event.lane)

    def drain(self, lane: str) -> None:
        """Do all the work of a lane, and what that waits for."""
        with self._lock:
            while self._lanes[lane]:
                self.synchronize(self._lanes[lane][-1].event)

    def hold(self, stream: Any, event: _Event) -> None:
        """Have the computation wait for `event`."""
        self._queue("compute", [event])

    def is_mine(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage was given to `own`."""
        return tensor.untyped_storage().data_ptr() in self._owned

    def step(self, lane: str) -> bool:
        """Do the next work of a lane, if there is any and nothing holds it; whether it was done."""
        with self._lock:
            queue = self._lanes[lane]
            if not queue or not all(event.passed for event in queue[0].after):
                return False
            work = queue.popleft()
            work.call()
            work.event.passed = True
            return True

    def _queue(self, lane: str, after: Sequence[_Event], call: Callable[[], object] = lambda: None) -> _Event:
        with self._lock:
            work = _Work(_Event(lane), list(after), call)
            self._lanes[lane].append(work)
            if self._eager:
                self.synchronize(work.event)
            return work.event
