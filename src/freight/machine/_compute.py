"""What the GPU computes and moves on its own: large matrix products at three precisions, copies inside its memory."""

import contextlib
from collections.abc import Iterator

import torch

from freight._units import MiB
from freight.errors import HostMemoryError
from freight.machine._budget import Budget
from freight.machine._facts import Compute, short
from freight.machine._timing import best_seconds_on_gpu

_SEED = 20261118
_SMALLEST = 1024


def measure(free_bytes: int, budget: Budget) -> Compute:
    """The GPU's own figures, with buffers that leave most of `free_bytes` free."""
    return Compute(
        fp32_tflops=_matmul(torch.float32, "ieee", 1, free_bytes, budget),
        tf32_tflops=_matmul(torch.float32, "tf32", 8, free_bytes, budget),
        bf16_tflops=_matmul(torch.bfloat16, "ieee", 8, free_bytes, budget),
        hbm_gbs=_copy(free_bytes, budget),
    )


def _matmul(dtype: torch.dtype, precision: str, calls: int, free_bytes: int, budget: Budget) -> float:
    n = budget.matmul_size
    while n > _SMALLEST and 3 * n * n * dtype.itemsize > free_bytes // 2:
        n //= 2
    generator = torch.Generator("cuda").manual_seed(_SEED)  # random data: zeros would draw less power and run faster
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.float32, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        for _ in range(calls):
            torch.mm(a, b, out=out)

    with matmul_precision(precision):
        seconds = best_seconds_on_gpu(work, budget.seconds)
    return short(calls * 2 * n**3 / seconds / 1e12)


def _copy(free_bytes: int, budget: Budget) -> float:
    size = min(budget.hbm_bytes, free_bytes // 4) // MiB * MiB
    if not size:
        raise HostMemoryError("GPU memory is full; end what else uses it.")
    src, dst = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    src.zero_()
    seconds = best_seconds_on_gpu(lambda: dst.copy_(src), budget.seconds)
    return short(2 * size / seconds / 1e9)


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Have float32 products on the GPU use `precision`, `"ieee"` or `"tf32"`; afterwards all is as it was.

    What was inherited from a setting above is inherited again, not pinned to the value it had.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = "none"
        if matmul.fp32_precision != before:
            matmul.fp32_precision = before
