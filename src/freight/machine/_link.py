"""Copies between page-locked host memory and the GPU by the copy engines: each way, both at once, and a small one."""

import statistics
import time

import torch
from torch import Tensor

from freight._units import KiB
from freight.machine import _nvml
from freight.machine._budget import Budget
from freight.machine._facts import Gpu, Link, short
from freight.machine._pinned import host_tensor
from freight.machine._timing import best_seconds_on_gpu

_SMALL = 4 * KiB
_SMALL_COPIES = 100


def measure(address: int, nbytes: int, gpu: Gpu, budget: Budget) -> Link:
    """The link's figures, using the page-locked block at `address`."""
    size = min(budget.copy_bytes, nbytes // 2, (gpu.free_bytes or 0) // 8)
    up, down = host_tensor(address, size), host_tensor(address + size, size)
    to, back = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    back.zero_()

    h2d = best_seconds_on_gpu(lambda: to.copy_(up, non_blocking=True), budget.seconds)
    d2h = best_seconds_on_gpu(lambda: down.copy_(back, non_blocking=True), budget.seconds)
    both = _best_both_ways(to, up, down, back, budget.seconds)
    pcie = _nvml.pcie(gpu.uuid or "")  # now, while the link is awake
    return Link(
        pcie_generation=pcie.generation,
        pcie_width=pcie.width,
        pcie_most_generation=pcie.most_generation,
        pcie_most_width=pcie.most_width,
        h2d_gbs=short(size / h2d / 1e9),
        d2h_gbs=short(size / d2h / 1e9),
        both_gbs=short(2 * size / both / 1e9),
        latency_us=short(_latency(to, up) * 1e6),
    )


def _best_both_ways(to: Tensor, up: Tensor, down: Tensor, back: Tensor, seconds: float) -> float:
    here, sides = torch.cuda.current_stream(), (torch.cuda.Stream(), torch.cuda.Stream())

    def work() -> None:
        for stream, dst, src in ((sides[0], to, up), (sides[1], down, back)):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                dst.copy_(src, non_blocking=True)
        for stream in sides:
            here.wait_stream(stream)

    return best_seconds_on_gpu(work, seconds)


def _latency(to: Tensor, up: Tensor) -> float:
    """From asking for a small copy to knowing that its bytes are there."""
    stream, times = torch.cuda.current_stream(), []
    for _ in range(_SMALL_COPIES):
        start = time.perf_counter()
        to[:_SMALL].copy_(up[:_SMALL], non_blocking=True)
        stream.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
