"""The registry of page-locked ranges against a model, with the CUDA runtime replaced by a record of its calls."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from freight import _cuda
from freight.errors import OverlapError, PinError
from freight.memory._registry import Range, Registry


class FakeRuntime:
    """Locks ranges as the CUDA runtime does: no overlap, and only what is locked can be unlocked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuse = False

    def register(self, address: int, nbytes: int) -> None:
        if self.refuse:
            raise PinError("no")
        assert all(address + nbytes <= start or start + size <= address for start, size in self.locked.items())
        self.locked[address] = nbytes

    def unregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    use(fake, monkeypatch)
    return fake


def use(fake: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "available", lambda: True)
    monkeypatch.setattr(_cuda, "register", fake.register)
    monkeypatch.setattr(_cuda, "unregister", fake.unregister)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)


class Ranges(RuleBasedStateMachine):
    """Uses of ranges among 64 addresses; the model is the list of uses by the range they share."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.fake = FakeRuntime()
        use(self.fake, self.patch)
        self.registry = Registry()
        self.uses: list[Range] = []

    def teardown(self) -> None:
        self.registry.release_all()
        assert not self.fake.locked
        self.patch.undo()

    @rule(start=st.integers(0, 63), size=st.integers(1, 20))
    def acquire(self, start: int, size: int) -> None:
        end = start + size
        touching = {id(u): u for u in self.uses if u.start < end and start < u.end}.values()
        inside = [u for u in touching if u.start <= start and end <= u.end]
        if touching and not inside:
            with pytest.raises(OverlapError, match="overlaps memory that freight has registered"):
                self.registry.acquire(start, size, object())
            return
        got = self.registry.acquire(start, size, object())
        assert got is inside[0] if inside else (got.start, got.end) == (start, end)
        self.uses.append(got)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.uses:
            self.registry.release(self.uses.pop(data.draw(st.integers(0, len(self.uses) - 1))))

    @invariant()
    def what_is_used_is_locked(self) -> None:
        used = {u.start: u.end - u.start for u in self.uses}
        assert self.fake.locked == used
        assert self.registry.held_bytes() == sum(used.values())
        assert all(self.registry.covers(start, size) for start, size in used.items())


Ranges.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRanges = Ranges.TestCase


def test_the_owner_is_kept_until_the_last_use_ends(runtime: FakeRuntime) -> None:
    registry, owner = Registry(), object()
    first = registry.acquire(0, 100, owner)
    second = registry.acquire(10, 20, object())
    registry.release(first)
    assert second.keep is owner
    registry.release(second)
    assert second.keep is None


def test_what_others_pinned_is_not_locked_again(runtime: FakeRuntime) -> None:
    registry = Registry()
    used = registry.acquire(0, 100, None, pinned_by_others=True)
    assert not runtime.locked
    registry.release(used)
    assert registry.held_bytes() == 0


def test_a_refusal_leaves_nothing(runtime: FakeRuntime) -> None:
    registry = Registry()
    runtime.refuse = True
    with pytest.raises(PinError):
        registry.acquire(0, 100, None)
    runtime.refuse = False
    registry.acquire(50, 100, None)


def test_a_finalizer_inside_the_registry_is_queued_and_not_a_deadlock(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()
    old = registry.acquire(0, 10, None)

    def register_and_collect(address: int, nbytes: int) -> None:
        registry.release(old)  # as the garbage collector would, in this very thread
        assert 0 in runtime.locked
        runtime.register(address, nbytes)

    monkeypatch.setattr(_cuda, "register", register_and_collect)
    registry.acquire(20, 10, None)
    assert set(runtime.locked) == {20}


def test_releases_from_other_threads(runtime: FakeRuntime) -> None:
    registry = Registry()
    uses = [registry.acquire(1000 * n, 10, None) for n in range(200)]
    threads = [threading.Thread(target=lambda part=uses[n::8]: [registry.release(u) for u in part]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.held_bytes() == 0
    assert not runtime.locked


def test_nothing_is_unlocked_while_a_graph_is_captured(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, owner = Registry(), object()
    used = registry.acquire(0, 10, owner)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    registry.release(used)
    assert 0 in runtime.locked
    assert used.keep is owner
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    registry.acquire(100, 10, None)
    assert set(runtime.locked) == {100}
    assert used.keep is None


def test_a_forked_child_starts_with_nothing(runtime: FakeRuntime) -> None:
    registry = Registry()
    used = registry.acquire(0, 10, None)
    registry.forget()
    assert registry.held_bytes() == 0
    used.process = -1
    registry.release(used)
    assert runtime.locked == {0: 10}
