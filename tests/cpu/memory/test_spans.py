"""The allocator of spans against a model that keeps every unit's owner."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from freight._units import round_up
from freight.errors import ArgumentError
from freight.memory._spans import Spans

SIZE, ALIGN = 640, 16


class Allocator(RuleBasedStateMachine):
    """`owner[u]` is the span that unit `u` belongs to, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.spans = Spans(SIZE, ALIGN)
        self.owner: list[int | None] = [None] * SIZE
        self.lengths: dict[int, int] = {}

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
        offset = self.spans.take(length)
        assert (offset is not None) == fits
        if offset is None:
            return
        assert offset % ALIGN == 0
        assert self.owner[offset : offset + needed] == [None] * needed
        self.owner[offset : offset + needed] = [offset] * needed
        self.lengths[offset] = needed

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if not self.lengths:
            return
        offset = data.draw(st.sampled_from(sorted(self.lengths)))
        self.spans.give_back(offset)
        length = self.lengths.pop(offset)
        self.owner[offset : offset + length] = [None] * length

    @rule(offset=st.integers(-ALIGN, SIZE))
    def refuse_what_is_not_out(self, offset: int) -> None:
        if offset not in self.lengths:
            with pytest.raises(ArgumentError, match="no span starts at"):
                self.spans.give_back(offset)

    @invariant()
    def counts(self) -> None:
        assert self.spans.free == self.owner.count(None)
        assert self.spans.largest == self.longest()
        assert self.spans.taken == len(self.lengths)
        changes = sum(a is None and b is not None for a, b in zip(self.owner, [*self.owner[1:], 0], strict=True))
        assert self.spans.pieces == changes


Allocator.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocator = Allocator.TestCase


def test_best_fit_keeps_the_long_span_whole() -> None:
    spans = Spans(100, 1)
    offsets = [spans.take(n) for n in (10, 5, 20, 5, 60)]
    spans.give_back(offsets[0])
    spans.give_back(offsets[2])
    assert spans.take(8) == offsets[0]
    assert spans.take(20) == offsets[2]


def test_nothing_to_take() -> None:
    assert Spans(0, 16).take(0) is None
    assert Spans(0, 16).largest == 0
