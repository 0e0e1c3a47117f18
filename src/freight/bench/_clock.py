"""Clocks: for what the GPU does by itself, for what the host has a part in, and for what the host spends on a call."""

import time
from collections.abc import Callable
from typing import Any

import torch

from freight import _cuda
from freight._units import MiB

Clock = Callable[[Callable[[], Any]], tuple[float, Any]]  # seconds that a call took, and what it returned

_FLUSH_BYTES = 256 * MiB  # several times the largest L2 there is
_HOLD_CYCLES = 40_000_000  # some 20 ms


def host(call: Callable[[], Any]) -> tuple[float, Any]:
    """Time `call` on the host's clock, from a GPU that has nothing to do until it has nothing to do again."""
    on_gpu = _cuda.available()
    if on_gpu:
        _flush()
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    output = call()
    if on_gpu:
        torch.cuda.synchronize()
    return max(1, time.perf_counter_ns() - start) * 1e-9, output


def gpu(call: Callable[[], Any]) -> tuple[float, Any]:
    """Time what `call` puts on the current stream, by CUDA events.

    The flush runs while the host submits the call, so a short kernel is not timed together with its launch.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    _flush()
    start.record()
    output = call()
    end.record()
    torch.cuda.synchronize()
    return max(1e-9, start.elapsed_time(end) * 1e-3), output


def submit(call: Callable[[], Any]) -> tuple[float, Any]:
    """Time what the host spends on `call` until it returns, while the GPU is kept from being waited for."""
    torch.cuda.synchronize()
    torch.cuda._sleep(_HOLD_CYCLES)  # so that no full queue of short kernels is what is timed
    start = time.perf_counter_ns()
    output = call()
    spent = max(1, time.perf_counter_ns() - start) * 1e-9
    torch.cuda.synchronize()
    return spent, output


CLOCKS: dict[str, Clock] = {"gpu": gpu, "host": host, "submit": submit}


def _flush() -> None:
    """Push everything out of L2 by writing more than it holds; torch's allocator keeps the buffer for the next time."""
    torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()
