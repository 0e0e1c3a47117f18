"""Pools of short-lived buffers: never two owners of a byte, never a refusal without a reason."""

import gc
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator

import pytest
from fake_runtime import FakeRuntime
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import freight
from freight import memory
from freight._pages import PAGE
from freight._units import MiB
from freight.errors import ArgumentError, ArgumentTypeError, ClosedError, ForkedError, HostMemoryError, PinError
from freight.memory import HostPool, PoolBlock, Token


@pytest.fixture(autouse=True)
def _small_slabs() -> Iterator[None]:
    with freight.config(slab_bytes=MiB):
        yield


def in_pages(nbytes: int) -> int:
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


class Pool(RuleBasedStateMachine):
    """Every buffer is filled with a number of its own; each still holds it when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = freight.config(slab_bytes=16 * PAGE)
        self.settings.__enter__()
        self.pool = HostPool(most=64 * PAGE)
        self.held: dict[int, PoolBlock] = {}
        self.pending: list[tuple[Token, int]] = []  # what still reads a released buffer, and the buffer's size
        self.next = 1

    def teardown(self) -> None:
        self.finish_all()
        self.pool.close()
        self.settings.__exit__(None, None, None)

    @rule(nbytes=st.integers(0, 24 * PAGE))
    def take(self, nbytes: int) -> None:
        needed = sum(in_pages(b.nbytes) for b in self.held.values())
        if needed + sum(size for _, size in self.pending) + nbytes > 16 * PAGE:  # it may have to wait for them
            self.finish_all()
        try:
            buffer = self.pool.take(nbytes)
        except HostMemoryError as error:
            told = str(error)
        else:
            told = ""
        if told:
            assert re.search(r"are free in \d+ pieces, the longest", told)
            assert needed + nbytes > 16 * PAGE  # a pool of four slabs with less than that in it has room
            return
        assert buffer.address % PAGE == 0
        buffer.tensor().fill_(self.next % 251)
        self.held[self.next] = buffer
        self.next += 1

    @rule()
    def finish_all(self) -> None:
        for token, _ in self.pending:
            token._finish()
        self.pending.clear()

    @rule(data=st.data())
    def finish_one(self, data: st.DataObject) -> None:
        """In any order: the one released first need not be over first."""
        if self.pending:
            self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))[0]._finish()

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        stats = self.pool.stats()
        assert stats.slabs <= stats.buffers

    @rule(data=st.data(), how=st.sampled_from(["release", "release later", "forget"]))
    def give_back(self, data: st.DataObject, how: str) -> None:
        if not self.held:
            return
        number = data.draw(st.sampled_from(sorted(self.held)))
        buffer = self.held.pop(number)
        assert (buffer.tensor() == number % 251).all()
        if how == "release later":
            token = Token("a copy")
            self.pending.append((token, in_pages(buffer.nbytes)))
            buffer.release(after=token)
        elif how == "release":
            buffer.release()

    @invariant()
    def the_account_is_right(self) -> None:
        stats = self.pool.stats()
        assert stats.held <= 64 * PAGE
        assert stats.buffers == len(self.held) + len(self.pending)
        used = sum(in_pages(b.nbytes) for b in self.held.values()) + sum(size for _, size in self.pending)
        assert stats.free == stats.held - used
        assert stats.free >= stats.largest >= stats.free / max(1, stats.pieces)
        spans = sorted((b.address, b.address + b.nbytes) for b in self.held.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


Pool.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase


class Reading:
    """A transfer that is over when somebody waits for it, which `interrupts` may break off."""

    def __init__(self, interrupts: int = 0) -> None:
        self.over = False
        self.waited = 0
        self.interrupts = interrupts

    def done(self) -> bool:
        return self.over

    def join(self) -> None:
        self.waited += 1
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.over = True


def test_a_buffer_waits_for_what_still_reads_it() -> None:
    with freight.config(slab_bytes=PAGE), HostPool(most=PAGE) as pool:
        buffer, reading = pool.take(PAGE), Reading()
        address = buffer.address
        buffer.release(after=reading)
        assert pool.stats().free == 0
        again = pool.take(PAGE)  # there is no other room
        assert reading.waited == 1
        assert again.address == address


def test_it_waits_for_no_more_than_it_needs() -> None:
    with freight.config(slab_bytes=PAGE), HostPool(most=3 * PAGE) as pool:
        readings = [Reading() for _ in range(3)]
        buffers = [pool.take(PAGE) for _ in readings]
        for buffer, reading in zip(buffers, readings, strict=True):
            buffer.release(after=reading)
        again = pool.take(PAGE)
        assert [reading.waited for reading in readings] == [1, 0, 0]
        assert again.address == buffers[0].address
        readings[2].over = True
        assert pool.take(PAGE).address == buffers[2].address
        assert readings[1].waited == 0


def test_an_interrupted_wait_loses_no_buffer() -> None:
    with freight.config(slab_bytes=2 * PAGE), HostPool(most=2 * PAGE) as pool:
        first, second = pool.take(PAGE), pool.take(PAGE)
        first.release(after=Reading(interrupts=1))
        second.release(after=Reading(interrupts=1))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                pool.take(2 * PAGE)
            assert pool.stats().buffers in (1, 2)
        assert pool.take(2 * PAGE).nbytes == 2 * PAGE


def test_an_interrupt_anywhere_loses_no_buffer(interrupted_everywhere: Callable[..., None]) -> None:
    with freight.config(slab_bytes=8 * PAGE), HostPool(most=8 * PAGE) as pool:
        kept = pool.take(PAGE)

        def take_and_release() -> None:
            one, two, three = pool.take(PAGE), pool.take(2 * PAGE), pool.take(1)
            one.release(after=Reading())
            two.release()
            view = three.tensor()
            del three, view
            pool.take(3 * PAGE)

        def check() -> None:
            for after in [after for _, after in pool._waiting]:
                after.join()
            stats = pool.stats()
            assert (stats.buffers, stats.free) == (1, 7 * PAGE)

        interrupted_everywhere(take_and_release, check)
        assert kept.tensor().numel() == PAGE


def test_a_failed_copy_still_gives_its_buffer_back() -> None:
    with HostPool() as pool:
        buffer, copy = pool.take(100), Token("a copy")
        buffer.release(after=copy)
        copy._finish(OSError("broken"))
        assert pool.stats().buffers == 0
        with pytest.raises(OSError, match="broken"):
            copy.wait()


def test_tensors_keep_a_forgotten_buffer() -> None:
    with HostPool() as pool:
        view = pool.take(100).tensor()[10:20]
        gc.collect()
        assert pool.stats().buffers == 1
        del view
        gc.collect()
        assert pool.stats().buffers == 0


def test_a_tensor_over_a_released_buffer_keeps_the_memory_if_not_the_bytes(held_before: int) -> None:
    with freight.config(slab_bytes=PAGE), HostPool() as pool:
        buffer = pool.take(PAGE)
        view = buffer.tensor()[10:20]
        buffer.release()
        assert pool.trim() == PAGE
    assert memory.stats().held == held_before + PAGE
    view.fill_(3)
    del view
    assert memory.stats().held == held_before


def test_a_large_buffer_gets_a_slab_of_its_own_and_trim_gives_it_up(held_before: int) -> None:
    with freight.config(slab_bytes=MiB), HostPool() as pool:
        small, large = pool.take(10), pool.take(5 * MiB)
        assert pool.stats().slabs == 2
        large.release()
        assert pool.trim() == 5 * MiB
        assert pool.stats().held == MiB
        small.release()
    gc.collect()
    assert memory.stats().held == held_before


def test_fragmentation_is_said() -> None:
    with freight.config(slab_bytes=4 * PAGE), HostPool(purpose="staging", most=4 * PAGE) as pool:
        buffers = [pool.take(PAGE) for _ in range(4)]
        for buffer in buffers[::2]:
            buffer.release()
        with pytest.raises(HostMemoryError, match=r"staging asked for 8 KiB.* 8 KiB are free in 2 pieces, the l"):
            pool.take(2 * PAGE)


def test_the_budget_bounds_a_pool_too() -> None:
    with freight.config(host_bytes=memory.stats().held + 4 * PAGE), HostPool(purpose="staging") as pool:
        assert pool.take(PAGE).nbytes == PAGE  # a whole slab is too much: one that is just large enough
        assert pool.stats().held == PAGE
        with pytest.raises(HostMemoryError, match=r"FREIGHT_HOST_BYTES.*The pool holds"):
            pool.take(MiB)


def test_a_limit_below_a_slab_gets_a_slab_that_is_just_large_enough() -> None:
    with HostPool(purpose="staging", most=3 * PAGE) as pool:
        assert pool.take(2 * PAGE).nbytes == 2 * PAGE
        assert pool.stats().held == 2 * PAGE
        with pytest.raises(HostMemoryError, match=r"staging asked for 16 KiB, and its limit is 12 KiB"):
            pool.take(4 * PAGE)


def test_a_refused_page_lock_stays_one(runtime: FakeRuntime) -> None:
    with HostPool(purpose="staging") as pool:
        runtime.refuse = True
        with pytest.raises(PinError, match=r"staging: no.*Lockable memory.*The pool holds 0 B"):
            pool.take(PAGE)
        runtime.refuse = False
        assert pool.take(PAGE).nbytes == PAGE
    gc.collect()
    assert not runtime.locked


def test_a_slab_that_fails_leaves_the_pool_as_it_was(monkeypatch: pytest.MonkeyPatch, held_before: int) -> None:
    def fail(nbytes: int, *, purpose: str) -> memory.HostBlock:
        raise OSError("no descriptors left")

    with HostPool() as pool:
        with monkeypatch.context() as patch:
            patch.setattr("freight.memory._pool.allocate", fail)
            with pytest.raises(OSError, match="no descriptors"):
                pool.take(10)
        assert pool.stats().slabs == 0
        assert memory.stats().held == held_before
        assert pool.take(10).nbytes == 10


@pytest.mark.parametrize("nbytes", [-1, 2.5, "many", None])
def test_sizes_that_are_none(nbytes: object) -> None:
    with (
        HostPool(purpose="staging") as pool,
        pytest.raises((ArgumentError, ArgumentTypeError), match="staging: the size of a buffer must"),
    ):
        pool.take(nbytes)  # type: ignore[arg-type]


def test_a_forked_child_is_refused_and_closes_without_waiting() -> None:
    with HostPool() as pool:
        buffer = pool.take(100)
        buffer.tensor().fill_(7)
        pool.take(100).release(after=Token("a copy that only the parent ends"))
        pid = os.fork()
        if pid == 0:
            refused = 0
            try:
                for use in (lambda: pool.take(10), pool.stats, pool.trim):
                    try:
                        use()
                    except ForkedError:
                        refused += 1
                readable = bool((buffer.tensor() == 7).all())
                pool.close()
            finally:
                os._exit(refused if readable else 9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        pool._waiting.clear()


def test_an_empty_slab_makes_way_for_a_larger_one() -> None:
    with freight.config(slab_bytes=2 * PAGE), HostPool(most=4 * PAGE) as pool:
        pool.take(2 * PAGE).release()
        assert pool.take(4 * PAGE).nbytes == 4 * PAGE


def test_released_and_closed_say_so() -> None:
    pool = HostPool(purpose="staging")
    buffer = pool.take(10)
    buffer.release()
    buffer.release()
    with pytest.raises(ClosedError, match="was released"):
        buffer.tensor()
    with pytest.raises(ArgumentError, match="the buffer holds 10 bytes"):
        pool.take(10).tensor(shape=11)
    pool.close()
    with pytest.raises(ClosedError, match="staging was closed"):
        pool.take(1)


def test_buffers_from_many_threads() -> None:
    errors: list[BaseException] = []
    with freight.config(slab_bytes=64 * PAGE), HostPool() as pool:

        def work(seed: int) -> None:
            try:
                for turn in range(50):
                    buffer = pool.take(PAGE * (1 + (seed * turn) % 7))
                    buffer.tensor().fill_(seed)
                    assert (buffer.tensor() == seed).all()
                    if turn % 2:
                        buffer.release()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        assert not errors
        assert pool.stats().buffers == 0
