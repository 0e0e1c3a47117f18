"""The registry of page-locked ranges against a model, with the CUDA runtime replaced by a record of its calls."""

import bisect
import threading
import weakref
from collections.abc import Callable

import pytest
from fake_runtime import FakeRuntime
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from freight import _cuda
from freight.errors import OverlapError, PinError
from freight.memory._registry import Registry, Use


class Owner:
    """Something that can be seen to go."""


class Ranges(RuleBasedStateMachine):
    """Uses of ranges among 64 addresses; the model is the list of uses by the range they share."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.fake = FakeRuntime()
        self.fake.use(self.patch)
        self.registry = Registry()
        self.uses: list[Use] = []

    def teardown(self) -> None:
        self.fake.capturing = False
        self.registry.release_all()
        assert not self.fake.locked
        self.uses.clear()
        self.patch.undo()

    @rule(start=st.integers(0, 63), size=st.integers(1, 20))
    def acquire(self, start: int, size: int) -> None:
        end = start + size
        if self.fake.capturing:
            return
        touching = {id(u.range): u.range for u in self.uses if u.range.start < end and start < u.range.end}.values()
        inside = [r for r in touching if r.start <= start and end <= r.end]
        if touching and not inside:
            with pytest.raises(OverlapError, match="overlaps memory that freight has registered"):
                self.registry.acquire(start, size, object())
            return
        got = self.registry.acquire(start, size, object())
        assert got.range is inside[0] if inside else (got.range.start, got.range.end) == (start, end)
        self.uses.append(got)

    @rule(start=st.integers(0, 63), size=st.integers(1, 20))
    def use_what_is_there(self, start: int, size: int) -> None:
        inside = [u.range for u in self.uses if u.range.start <= start and start + size <= u.range.end]
        got = self.registry.use(start, size)
        assert (got is not None) == bool(inside)
        if got is not None:
            assert got.range is inside[0]
            self.uses.append(got)

    @rule(data=st.data(), how=st.sampled_from(["end", "drop"]))
    def release(self, data: st.DataObject, how: str) -> None:
        if self.uses:
            use = self.uses.pop(data.draw(st.integers(0, len(self.uses) - 1)))
            if how == "end":
                use.end()
                use.end()

    @rule()
    def capture(self) -> None:
        self.fake.capturing = not self.fake.capturing

    @invariant()
    def what_is_used_is_locked(self) -> None:
        used = {u.range.start: u.range.end - u.range.start for u in self.uses}
        assert self.registry.held_bytes() == sum(used.values())
        assert self.fake.locked.items() >= used.items()
        if not self.fake.capturing:
            assert self.fake.locked == used


Ranges.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRanges = Ranges.TestCase


def test_the_owner_is_kept_until_the_last_use_ends(runtime: FakeRuntime) -> None:
    registry, owner = Registry(), object()
    first = registry.acquire(0, 100, owner)
    second = registry.acquire(10, 20, object())
    used = second.range
    del first
    assert used.keep is owner
    del second
    assert used.keep is None
    assert not runtime.locked


def test_what_others_pinned_is_not_locked_again(runtime: FakeRuntime) -> None:
    registry = Registry()
    use = registry.acquire(0, 100, None, pinned_by_others=True)
    assert not runtime.locked
    use.end()
    assert registry.held_bytes() == 0


def test_a_refusal_leaves_nothing(runtime: FakeRuntime) -> None:
    registry, owner = Registry(), Owner()
    gone = weakref.ref(owner)
    runtime.refuse = True
    with pytest.raises(PinError):
        registry.acquire(0, 100, owner)
    del owner
    assert gone() is None
    runtime.refuse = False
    use = registry.acquire(50, 100, None)
    assert runtime.locked == {50: 100}
    del use


def test_a_failed_registration_is_undone_while_its_error_is_still_looked_at(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()

    def interrupt(ranges: list, new: object, key: object) -> None:
        ranges.append(new)
        raise KeyboardInterrupt

    monkeypatch.setattr(bisect, "insort", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        registry.acquire(0, 100, object())
    assert caught.value.__traceback__ is not None
    assert not runtime.locked
    assert registry.held_bytes() == 0


def test_an_interrupt_leaves_nothing_locked(runtime: FakeRuntime, interrupted_everywhere: Callable[..., None]) -> None:
    registry = Registry()
    there = registry.acquire(0, 10, None)

    def acquire_and_drop() -> None:
        uses = [registry.acquire(100, 10, None), registry.acquire(102, 3, None), registry.acquire(5, 1, None)]
        uses.append(registry.use(0, 10))

    def check() -> None:
        assert registry.held_bytes() == 10
        assert runtime.locked == {0: 10}
        assert len(there.range.uses) == 1

    interrupted_everywhere(acquire_and_drop, check)


def test_a_finalizer_inside_the_registry_is_queued_and_not_a_deadlock(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()
    old = [registry.acquire(0, 10, None)]

    def register_and_collect(address: int, nbytes: int) -> None:
        old.clear()  # as the garbage collector would, in this very thread
        assert 0 in runtime.locked
        runtime.register(address, nbytes)

    monkeypatch.setattr(_cuda, "register", register_and_collect)
    new = registry.acquire(20, 10, None)
    assert set(runtime.locked) == {20}
    new.end()


def test_releases_from_other_threads(runtime: FakeRuntime) -> None:
    registry = Registry()
    parts = [[registry.acquire(1000 * n + part, 1, None) for n in range(25)] for part in range(8)]
    threads = [threading.Thread(target=part.clear) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.held_bytes() == 0
    assert not runtime.locked


@pytest.mark.parametrize("then", ["settle", "acquire", "held_bytes", "release_all"])
def test_nothing_is_unlocked_while_a_graph_is_captured(runtime: FakeRuntime, then: str) -> None:
    registry, owner = Registry(), object()
    use = registry.acquire(0, 10, owner)
    used = use.range
    runtime.capturing = True
    use.end()
    registry.held_bytes()
    assert 0 in runtime.locked
    assert used.keep is owner
    runtime.capturing = False
    if then == "acquire":
        registry.acquire(5, 10, None).end()  # would overlap what is still locked
    else:
        getattr(registry, then)()
    assert not runtime.locked
    if then != "release_all":
        assert used.keep is None


def test_a_forked_child_starts_with_nothing(runtime: FakeRuntime) -> None:
    registry = Registry()
    use = registry.acquire(0, 10, None)
    registry.forget()
    assert registry.held_bytes() == 0
    use.range.process = -1
    use.end()
    assert runtime.locked == {0: 10}


def test_at_exit_all_is_unlocked_and_stays_readable(runtime: FakeRuntime) -> None:
    registry, owner = Registry(), object()
    uses = [registry.acquire(0, 10, owner), registry.acquire(3, 4, None), registry.acquire(20, 10, owner)]
    registry.release_all()
    assert not runtime.locked
    assert uses[2].range.keep is owner
    uses.clear()  # unlocks nothing twice
    assert registry.held_bytes() == 0
