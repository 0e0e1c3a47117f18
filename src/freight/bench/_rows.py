"""What the benchmarks of rows share: a large table whose every word is known, and other ways to get its rows.

The word at index w of the memory is w * STEP modulo 2**64, whatever the width of the rows that it is cut into, so any
row can be checked without a second table.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

import freight
from freight._units import MiB, show_bytes
from freight.bench._run import Skip
from freight.machine import _nvml
from freight.memory import allocate

STEP = -0x61C8864680B583EB
_FILL_AT_ONCE = 2**27  # words
_STAGE_BYTES = 16 * MiB
_COST_SECONDS = 0.6  # the energy counter moves ten times a second

_held: dict[int, "Memory"] = {}


class Memory:
    """One large unified table of words, and a copy of it in GPU memory where somebody asks for one."""

    def __init__(self, nbytes: int) -> None:
        self.words = freight.UnifiedTensor.empty((nbytes // 8,), torch.int64)
        for start in range(0, nbytes // 8, _FILL_AT_ONCE):
            end = min(start + _FILL_AT_ONCE, nbytes // 8)
            self.words[start:end] = torch.arange(start, end, device="cuda") * STEP
        self._on_gpu: Tensor | None = None

    def table(self, row_bytes: int) -> freight.UnifiedTensor:
        """The memory cut into rows."""
        return freight.unified(_cut(self.words.host(), row_bytes), in_place=True)

    def on_gpu(self, row_bytes: int) -> Tensor:
        """The same rows in GPU memory."""
        if self._on_gpu is None:
            self._on_gpu = self.words.to("cuda")
        return _cut(self._on_gpu, row_bytes)


def memory(nbytes: int) -> Memory:
    """The table of `nbytes`; the cells of a run share one, and another size takes its place."""
    if nbytes not in _held:
        for other in _held.values():
            other.words.close()
        _held.clear()
        available = psutil.virtual_memory().available
        if available < 1.3 * nbytes:
            raise Skip(f"it takes {show_bytes(1.3 * nbytes)} of host memory and {show_bytes(available)} are available")
        _held[nbytes] = Memory(nbytes)
    return _held[nbytes]


def _cut(words: Tensor, row_bytes: int) -> Tensor:
    width = row_bytes // 8
    rows = len(words) // width
    return words[: rows * width].view(rows, width)


def is_right(ids: Tensor, rows: Tensor) -> bool:
    """Whether every word of `rows` is what the table holds there."""
    width = rows.shape[1]
    column = torch.arange(width, device=rows.device)
    parts = zip(ids.split(2**17), rows.split(2**17), strict=True)
    return all(torch.equal(got, (some[:, None] * width + column) * STEP) for some, got in parts)


# ---- other ways to get rows ------------------------------------------------------------------------


class Staging:
    """Rows by the CPU: `index_select` into pinned buffers by `threads`, each copied while the next one is filled."""

    def __init__(self, table: Tensor, threads: int, buffers: int = 3) -> None:
        self._table, self._threads = table, threads
        self._rows = max(1, _STAGE_BYTES // (table.shape[1] * 8))
        blocks = [allocate(self._rows * table.shape[1] * 8, purpose="a rival's staging") for _ in range(buffers)]
        self._buffers = [block.tensor(torch.int64, (self._rows, table.shape[1])) for block in blocks]
        self._copied = [torch.cuda.Event(blocking=True) for _ in blocks]

    def __call__(self, ids: Tensor, out: Tensor) -> Tensor:
        """The rows on the GPU; `ids` are on the CPU already."""
        with _threads(self._threads):
            for at, part in zip(itertools.cycle(range(len(self._buffers))), range(0, len(ids), self._rows)):
                some = ids[part : part + self._rows]
                buffer, copied = self._buffers[at][: len(some)], self._copied[at]
                copied.synchronize()
                torch.index_select(self._table, 0, some, out=buffer)
                out[part : part + len(some)].copy_(buffer, non_blocking=True)
                copied.record()
        return out


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def all_threads() -> int:
    """As many as there are cores to use."""
    return len(os.sched_getaffinity(0))


# ---- what a call costs beside time -----------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What was spent on a gigabyte of rows."""

    cpu_seconds: float
    joules: float | None


def cost(call: Callable[[], object], nbytes: int) -> Cost:
    """CPU seconds and GPU energy for each gigabyte, of calls one after the other; the host sleeps while it waits."""
    done = torch.cuda.Event(blocking=True)
    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
    call()
    torch.cuda.synchronize()
    calls, start, cpu, energy = 0, time.perf_counter(), time.process_time(), _nvml.energy_joules(uuid)
    while time.perf_counter() - start < _COST_SECONDS:
        call()
        done.record()
        done.synchronize()
        calls += 1
    spent, after = time.process_time() - cpu, _nvml.energy_joules(uuid)
    gigabytes = calls * nbytes / 1e9
    return Cost(spent / gigabytes, None if energy is None or after is None else (after - energy) / gigabytes)
