"""How the GPU's figures come about, as far as that is seen without one: precision, sizes, clocks, locked memory."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

import freight
from freight import _cuda, _pages
from freight._units import GiB, MiB
from freight.errors import HostMemoryError, PinError
from freight.machine import _budget, _compute, _pinned, _timing

pytestmark = pytest.mark.usefixtures("alone")

TABLES = (256 * MiB, 1 * GiB, 8 * GiB)


# ---- precision ------------------------------------------------------------------------------------------


@pytest.fixture
def _settings_as_they_were() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    above = torch.backends.fp32_precision
    yield
    matmul.fp32_precision = "none"
    torch.backends.fp32_precision = above


@pytest.mark.usefixtures("_settings_as_they_were")
@pytest.mark.parametrize("inside", ["ieee", "tf32"])
@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_precision_is_set_and_put_back(before: str, inside: str) -> None:
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = before

    def work() -> None:
        with _compute.matmul_precision(inside):
            assert matmul.fp32_precision == inside
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert matmul.fp32_precision == before


@pytest.mark.usefixtures("_settings_as_they_were")
def test_what_was_inherited_is_inherited_again() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    with _compute.matmul_precision("ieee"):
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == "tf32"
    torch.backends.fp32_precision = "ieee"
    assert matmul.fp32_precision == "ieee"


# ---- the best of several ----------------------------------------------------------------------------------


class Clock:
    """Time that passes only where a test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(_timing.time, "perf_counter", lambda: self.now)

    def work(self, seconds: list[float]) -> Callable[[], None]:
        """Work whose calls take these times, the last of them for ever."""
        times = iter(seconds)
        last = seconds[-1]

        def call() -> None:
            self.now += next(times, last)

        return call


def test_the_shortest_counts_and_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert _timing.best_seconds(clock.work([0.25, 4.0, 2.0, 8.0]), 0.0) == 2.0  # 0.25 was the warm-up
    assert clock.now == 14.25


def test_it_is_repeated_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert _timing.best_seconds(clock.work([1.0, 2.0, 2.0, 2.0, 2.0, 0.5, 2.0]), 10.0) == 0.5
    assert clock.now == 1.0 + 4 * 2.0 + 0.5 + 2.0


class Event:
    """An event on a GPU whose time is the order of what was submitted to it."""

    queue: list[object]

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.queue.append(self)

    def synchronize(self) -> None:
        assert self.queue[-1] is self

    def elapsed_time(self, end: "Event") -> float:
        between = self.queue[self.queue.index(self) + 1 : self.queue.index(end)]
        self.queue.clear()
        return sum(item for item in between if isinstance(item, float))


def test_on_a_gpu_only_the_work_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is kept waiting first, so that it finds all of the work submitted when it begins; that is not timed."""
    queue: list[object] = []
    submitted = []
    monkeypatch.setattr(Event, "queue", queue, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: queue.append(1e9 * cycles))
    times = iter([9.0, 40.0, 30.0, 50.0])

    def work() -> None:
        assert len(queue) == 2
        assert isinstance(queue[0], float)
        submitted.append(len(queue))
        queue.append(next(times))

    assert _timing.best_seconds_on_gpu(work, 0.0) == pytest.approx(30e-3)  # events tell milliseconds
    assert len(submitted) == 4


# ---- page-locked memory for the time of a measurement -------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "limit", "sizes"),
    [
        (120 * GiB, None, TABLES),
        (32 * GiB, None, TABLES),
        (31 * GiB, None, TABLES[:2]),
        (2 * GiB, None, TABLES[:1]),
        (500 * MiB, None, (125 * MiB,)),  # none of them, but enough for copies
        (255 * MiB, None, ()),
        (0, None, ()),
        (120 * GiB, 1 * GiB, TABLES[:2]),
        (120 * GiB, 100 * MiB, (100 * MiB,)),
        (120 * GiB, 10 * MiB, ()),
    ],
)
def test_what_is_affordable(available: int, limit: int | None, sizes: tuple[int, ...]) -> None:
    with freight.config(host_bytes=limit):
        assert _pinned.affordable(_budget.FULL.table_bytes, available) == sizes


class Locks:
    """A CUDA runtime that keeps a list of what is locked and mapped, in the order of events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusal: Exception | None = None) -> None:
        self.events: list[str] = []
        self.refusal = refusal
        real_map, real_unmap = _pages.map_segments, _pages.unmap

        def map_segments(nbytes: int) -> int:
            self.events.append("map")
            return real_map(nbytes)

        def unmap(address: int, nbytes: int) -> None:
            self.events.append("unmap")
            real_unmap(address, nbytes)

        monkeypatch.setattr(_pages, "map_segments", map_segments)
        monkeypatch.setattr(_pages, "unmap", unmap)
        monkeypatch.setattr(_cuda, "register", self.register)
        monkeypatch.setattr(_cuda, "unregister", lambda address: self.events.append("unlock"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.events.append("wait"))

    def register(self, address: int, nbytes: int) -> None:
        if self.refusal:
            raise self.refusal
        self.events.append("lock")


def test_memory_is_locked_and_given_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks(monkeypatch)

    def work() -> None:
        with _pinned.page_locked(3 * MiB) as address:
            block = _pinned.host_tensor(address, 3 * MiB)
            assert block.shape == (3 * MiB,)
            assert not block.any()
            block.fill_(7)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert locks.events == ["map", "lock", "wait", "unlock", "unmap"]


def test_memory_that_is_refused_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks(monkeypatch, PinError("refused"))
    with pytest.raises(PinError, match="refused"), _pinned.page_locked(MiB):
        raise AssertionError("this must not be reached")
    assert (locks.events[0], locks.events[-1]) == ("map", "unmap")


def test_no_memory_says_what_is_needed() -> None:
    with (
        pytest.raises(HostMemoryError, match=r"needs 64 MiB of page-locked memory, four times .* FREIGHT_HOST_BYTES"),
        _pinned.page_locked(0),
    ):
        raise AssertionError("this must not be reached")


# ---- sizes on the GPU ---------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the measurement of matrix products on the CPU, at sizes that it can do."""
    real_randn, real_empty = torch.randn, torch.empty
    monkeypatch.setattr(torch, "randn", lambda *size, **rest: real_randn(*size, dtype=rest["dtype"]))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: real_empty(size, dtype=dtype))
    monkeypatch.setattr(torch, "Generator", lambda device: torch.random.default_generator)


@pytest.mark.usefixtures("on_cpu")
def test_rates_are_operations_and_bytes_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operations for each of n**3, eight products at a time for the quick ones, a copy both read and written."""
    sizes, calls, real = [], [], torch.mm

    def product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        sizes.append((len(a), a.dtype, torch.backends.cuda.matmul.fp32_precision))
        assert a.std() > 0.5  # not zeros, which draw less power
        return real(a, b, out=out)

    def measured(work: Callable[[], object], seconds: float) -> float:
        before = len(sizes)
        work()
        calls.append(len(sizes) - before)
        return 0.5

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(_compute, "best_seconds_on_gpu", measured)
    budget = dataclasses.replace(_budget.QUICK, matmul_size=64, hbm_bytes=8 * MiB)
    found = _compute.measure(GiB, budget)
    assert calls == [1, 8, 8, 0]
    assert [sizes[0], sizes[1], sizes[-1]] == [
        (64, torch.float32, "ieee"),
        (64, torch.float32, "tf32"),
        (64, torch.bfloat16, "ieee"),
    ]
    assert found.fp32_tflops == pytest.approx(2 * 64**3 / 0.5 / 1e12, rel=1e-3)
    assert found.tf32_tflops == found.bf16_tflops == pytest.approx(8 * 2 * 64**3 / 0.5 / 1e12, rel=1e-3)
    assert found.hbm_gbs == pytest.approx(2 * 8 * MiB / 0.5 / 1e9, rel=1e-3)


@pytest.mark.usefixtures("on_cpu")
def test_little_gpu_memory_means_smaller_products(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def measured(work: Callable[[], object], seconds: float) -> float:
        work()
        return 1.0

    monkeypatch.setattr(torch, "mm", lambda a, b, *, out: sizes.append(len(a)))
    monkeypatch.setattr(_compute, "best_seconds_on_gpu", measured)
    _compute.measure(100 * MiB, _budget.QUICK)
    assert sizes[0] == 2048  # three of 4096 in fp32 would be 192 MiB
    assert sizes[-1] == 2048
    with pytest.raises(HostMemoryError, match="GPU memory is full"):
        _compute.measure(3 * MiB, _budget.QUICK)
