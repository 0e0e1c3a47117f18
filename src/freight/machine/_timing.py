"""The best of several repetitions: what the hardware does when nothing else is in the way."""

import time
from collections.abc import Callable

import torch

_FEWEST = 3
_HOLD_CYCLES = 1_000_000  # half a millisecond; to submit a piece of work takes a tenth of that


def best_seconds_on_gpu(work: Callable[[], object], seconds: float) -> float:
    """The shortest time that the GPU takes for `work` on the current stream, repeated for about `seconds`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once() -> float:
        torch.cuda._sleep(_HOLD_CYCLES)  # meanwhile all of the work is queued: submitting it is not timed
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return _best(once, seconds)


def best_seconds(work: Callable[[], object], seconds: float) -> float:
    """The shortest time that the processor takes for `work`, repeated for about `seconds`."""

    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return _best(once, seconds)


def _best(once: Callable[[], float], seconds: float) -> float:
    once()  # warm-up: libraries load, kernels compile, clocks rise
    until = time.perf_counter() + seconds
    times = [once() for _ in range(_FEWEST)]
    while time.perf_counter() < until:
        times.append(once())
    return min(times)
