"""Copies on the model device: what a GPU may do in any order, done in any order."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fake_runtime import FakeRuntime
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch import Tensor

from freight import memory
from freight.errors import ArgumentError, ArgumentTypeError, ForkedError
from freight.memory import CopyStreams, ModelDevice, State
from freight.memory import _streams as streams_module


def lazy() -> tuple[ModelDevice, CopyStreams]:
    device = ModelDevice(eager=False)
    return device, CopyStreams(device)


def test_a_copy_waits_for_the_computation_before_it() -> None:
    device, streams = lazy()
    source, to = device.own(torch.zeros(4)), torch.full((4,), -1.0)
    device.launch(lambda: source.fill_(5))
    token = streams.copy(to, source)
    assert not device.step("to_host")  # the computation is still to come
    assert token.state is State.RUNNING
    while device.step("compute"):
        pass
    assert device.step("to_host")
    assert token.done()
    assert to.tolist() == [5.0] * 4


def test_the_computation_waits_for_a_copy_when_told() -> None:
    device, streams = lazy()
    host, to, seen = torch.ones(3), device.own(torch.zeros(3)), []
    streams.copy(to, host).wait_on()
    last = device.launch(lambda: seen.append(to.tolist()))
    while device.step("compute"):
        pass
    assert seen == []
    device.synchronize(last)
    assert seen == [[1.0, 1.0, 1.0]]


def test_waiting_does_just_what_is_needed() -> None:
    device, streams = lazy()
    one, two = device.own(torch.ones(2)), torch.full((2,), 2.0)
    out, back = torch.zeros(2), device.own(torch.zeros(2))
    away, towards = streams.copy(out, one), streams.copy(back, two)
    away.wait()
    assert out.tolist() == [1.0, 1.0]
    assert not towards.done()
    streams.join()
    assert towards.state is State.DONE
    assert streams.reap() == 0


def test_both_ends_live_until_the_copy_is_over_and_no_longer() -> None:
    device, streams = lazy()
    source, to = device.own(torch.ones(1000)), torch.zeros(1000)
    alive = [weakref.ref(source.untyped_storage()), weakref.ref(to.untyped_storage())]
    token = streams.copy(to, source)
    del source, to
    gc.collect()
    assert all(ref() is not None for ref in alive)
    device.synchronize(token._event)
    assert streams.reap() == 0
    device._owned.clear()
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_an_event_given_replaces_the_wait_for_the_stream() -> None:
    device, streams = lazy()
    source, to = device.own(torch.ones(2)), torch.zeros(2)
    ready = streams.now()
    device.step("compute")
    device.launch(lambda: None)  # later work, which the copy need not wait for
    token = streams.copy(to, source, after=ready)
    assert device.step("to_host")
    assert token.done()


def test_large_copies_go_in_chunks_that_cover_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "_CHUNK", 64)
    streams = CopyStreams()
    source, to = torch.randn(1001, dtype=torch.float64), torch.zeros(1001, dtype=torch.float64)
    streams.copy(to, source).wait()
    assert torch.equal(to, source)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3), (2, 0, 5)], ids=str)
def test_shapes_and_dtypes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randint(0, 2, shape).to(dtype)
    to = torch.zeros(shape, dtype=dtype)
    CopyStreams().copy(to, source).wait()
    assert torch.equal(to.contiguous().view(-1).view(torch.uint8), source.contiguous().view(-1).view(torch.uint8))


def test_what_cannot_be_copied() -> None:
    streams = CopyStreams()
    with pytest.raises(ArgumentError, match=r"src must be contiguous.*strides \(1, 3\) for \(3, 3\)"):
        streams.copy(torch.zeros(3, 3), torch.zeros(3, 3).T)
    with pytest.raises(ArgumentError, match="not lazily conjugated"):
        streams.copy(torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64).conj())
    with pytest.raises(ArgumentError, match="dst has 8 bytes and src has 12"):
        streams.copy(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ArgumentTypeError, match="src must be a tensor"):
        streams.copy(torch.zeros(2), [1, 2])  # type: ignore[arg-type]


def test_overwriting_what_autograd_saved_is_seen() -> None:
    weight = torch.ones(2, requires_grad=True)
    saved = torch.ones(2)
    loss = (weight * saved).sum()
    CopyStreams().copy(saved, torch.zeros(2)).wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- faults ------------------------------------------------------------------------------------------


class BreaksOff(ModelDevice):
    """Queues the first chunk of a copy and then fails, as a GPU may in the middle of a large one."""

    def copy(self, lane: str, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Any]) -> Any:
        super().copy(lane, pairs[:1], after)
        raise RuntimeError("the link broke")


def test_a_copy_that_breaks_off_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "_CHUNK", 16)
    device = BreaksOff(eager=False)
    streams = CopyStreams(device)
    source, to = device.own(torch.ones(8)), torch.zeros(8)
    device.launch(lambda: source.fill_(2))
    with pytest.raises(RuntimeError, match="the link broke"):
        streams.copy(to, source)
    assert to.tolist() == [2.0] * 4 + [0.0] * 4  # the chunk that was queued is over, and the memory may go
    assert not device.step("to_host")
    assert streams.reap() == 0


def test_an_interrupt_anywhere_leaves_no_copy_without_its_memory(interrupted_everywhere: Callable[..., None]) -> None:
    device, streams = lazy()
    gpu = [device.own(torch.full((4,), float(n))) for n in range(3)]
    alive: list[weakref.ref] = []

    def copy_out() -> None:
        for source in gpu:
            to = torch.zeros(4)
            alive.append(weakref.ref(to.untyped_storage()))
            streams.copy(to, source)

    def check() -> None:
        queued = len(device._lanes["to_host"])
        assert sum(ref() is not None for ref in alive) >= queued == streams.reap()
        while device.step("compute"):
            pass
        while device.step("to_host"):
            pass
        streams.join()
        assert streams.reap() == 0
        assert not any(ref() for ref in alive)
        alive.clear()

    interrupted_everywhere(copy_out, check)


def test_the_page_lock_is_kept_until_the_copy_is_over(runtime: FakeRuntime) -> None:
    device, streams = lazy()
    block = memory.allocate(64)
    source = device.own(torch.ones(64, dtype=torch.uint8))
    token = streams.copy(block.tensor(), source)
    block.close()
    gc.collect()
    assert list(runtime.locked.values()) == [64]
    token.wait()
    assert not runtime.locked


def test_no_page_lock_is_needed_for_nothing(runtime: FakeRuntime) -> None:
    device, streams = lazy()
    with memory.allocate(64) as block:
        streams.copy(block.tensor(shape=0), device.own(torch.empty(0, dtype=torch.uint8))).wait()


def test_a_child_of_a_process_that_used_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = CopyStreams()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(ForkedError, match=r"a copy stream needs CUDA.*'spawn'"):
        streams.copy(torch.zeros(1), torch.ones(1))
    with pytest.raises(ForkedError):
        CopyStreams()


class AnyOrder(RuleBasedStateMachine):
    """Copies, computation and steps of the lanes in any order give what doing all at once, in program order, gives."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.streams = lazy()
        self.gpu = [self.device.own(torch.full((4,), float(n))) for n in range(3)]
        self.host = [torch.full((4,), float(-n - 1)) for n in range(3)]
        self.want_gpu = [t.clone() for t in self.gpu]
        self.want_host = [t.clone() for t in self.host]
        self.tokens: dict[int, list] = {n: [] for n in range(3)}  # by host tensor: a host tensor is used once at a time

    @rule(g=st.integers(0, 2), value=st.integers(0, 99))
    def compute(self, g: int, value: int) -> None:
        self.device.launch(lambda: self.gpu[g].mul_(0.5).add_(value))
        self.want_gpu[g].mul_(0.5).add_(value)

    @rule(g=st.integers(0, 2), h=st.integers(0, 2))
    def to_host(self, g: int, h: int) -> None:
        self.settle(h)
        token = self.streams.copy(self.host[h], self.gpu[g])
        token.wait_on()  # what is computed later may overwrite the source
        self.tokens[h].append(token)
        self.want_host[h].copy_(self.want_gpu[g])

    @rule(g=st.integers(0, 2), h=st.integers(0, 2))
    def to_device(self, g: int, h: int) -> None:
        self.settle(h)
        token = self.streams.copy(self.gpu[g], self.host[h])
        token.wait_on()
        self.tokens[h].append(token)
        self.want_gpu[g].copy_(self.want_host[h])

    @rule(lane=st.sampled_from(["compute", "to_host", "to_device"]))
    def step(self, lane: str) -> None:
        self.device.step(lane)

    @rule(h=st.integers(0, 2))
    def look(self, h: int) -> None:
        self.settle(h)
        assert torch.equal(self.host[h], self.want_host[h])

    def settle(self, h: int) -> None:
        for token in self.tokens[h]:
            token.wait()
        self.tokens[h].clear()

    def teardown(self) -> None:
        self.device.synchronize(self.streams.now())
        self.streams.join()
        assert all(torch.equal(a, b) for a, b in zip(self.gpu, self.want_gpu, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(self.host, self.want_host, strict=True))


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase
