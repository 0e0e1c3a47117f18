"""Copies on the model device: what a GPU may do in any order, done in any order."""

import gc
import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from freight.errors import ArgumentError, ArgumentTypeError
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
