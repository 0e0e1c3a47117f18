"""The allocator of spans against a model that keeps every unit's owner."""

import threading
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from freight._units import round_up
from freight.memory._spans import Span, Spans

SIZE, ALIGN = 640, 16


class Allocator(RuleBasedStateMachine):
    """`owner[u]` is the span that unit `u` belongs to, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.spans = Spans(SIZE, ALIGN)
        self.owner: list[int | None] = [None] * SIZE
        self.out: dict[int, Span] = {}

    def longest(self) -> int:
        best = run = 0
        for owner in self.owner:
            run = run + 1 if owner is None else 0
            best = max(best, run)
        return best

    @rule(length=st.integers(0, SIZE + ALIGN))
    def take(self, length: int) -> None:
        needed = round_up(max(length, 1), ALIGN)
        fits = needed <= self.longest()
        span = self.spans.take(length)
        assert (span is not None) == fits
        if span is None:
            return
        start, end = span.offset, span.offset + span.length
        assert span.length == needed
        assert start % ALIGN == 0
        assert self.owner[start:end] == [None] * needed
        self.owner[start:end] = [start] * needed
        self.out[start] = span

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if not self.out:
            return
        span = self.out.pop(data.draw(st.sampled_from(sorted(self.out))))
        self.owner[span.offset : span.offset + span.length] = [None] * span.length

    @rule()
    def be_interrupted(self) -> None:
        """The free spans are then found anew, from the taken ones."""
        self.spans._whole = False

    @invariant()
    def counts(self) -> None:
        assert self.spans.free == self.owner.count(None)
        assert self.spans.largest == self.longest()
        assert self.spans.taken == len(self.out)
        changes = sum(a is None and b is not None for a, b in zip(self.owner, [*self.owner[1:], 0], strict=True))
        assert self.spans.pieces == changes


Allocator.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocator = Allocator.TestCase


def test_best_fit_keeps_the_long_span_whole() -> None:
    spans = Spans(100, 1)
    out = [spans.take(n) for n in (10, 5, 20, 5, 60)]
    first, third = out[0].offset, out[2].offset
    out[0] = out[2] = None
    small, exact = spans.take(8), spans.take(20)
    assert (small.offset, exact.offset) == (first, third)


def test_a_span_dropped_in_another_thread_comes_back() -> None:
    spans = Spans(64, 16)
    held = [spans.take(64)]
    dropping = threading.Thread(target=held.clear)
    dropping.start()
    dropping.join()
    assert spans.free == 64


def test_an_interrupt_loses_no_unit(interrupted_everywhere: Callable[..., None]) -> None:
    spans = Spans(SIZE, ALIGN)
    others = [spans.take(ALIGN) for _ in range(7)]
    del others[::2]

    def take_and_drop() -> None:
        held = [spans.take(ALIGN), spans.take(3 * ALIGN), spans.take(2 * ALIGN)]
        del held[1]
        spans.take(ALIGN)

    def check() -> None:
        assert spans.free == SIZE - 3 * ALIGN
        assert (spans.taken, spans.pieces) == (3, 4)
        assert sorted(spans._sizes) == spans._starts

    interrupted_everywhere(take_and_drop, check)


def test_nothing_to_take() -> None:
    assert Spans(0, 16).take(0) is None
    assert Spans(0, 16).largest == 0
