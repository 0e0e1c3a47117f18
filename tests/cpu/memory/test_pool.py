"""Pools of short-lived buffers: never two owners of a byte, never a refusal without a reason."""

import gc
import itertools
import re
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import freight
from freight import memory
from freight._pages import PAGE
from freight._units import MiB
from freight.errors import ArgumentError, ClosedError, HostMemoryError
from freight.memory import HostPool, PoolBlock, Token


class Pool(RuleBasedStateMachine):
    """Every buffer is filled with a number of its own; each still holds it when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = freight.config(slab_bytes=16 * PAGE)
        self.settings.__enter__()
        self.pool = HostPool(most=64 * PAGE)
        self.held: dict[int, PoolBlock] = {}
        self.pending: list[Token] = []
        self.next = 1

    def teardown(self) -> None:
        for token in self.pending:
            token._finish()
        self.pool.close()
        self.settings.__exit__(None, None, None)

    @rule(nbytes=st.integers(0, 24 * PAGE))
    def take(self, nbytes: int) -> None:
        for token in self.pending:  # a full pool waits for them
            token._finish()
        self.pending.clear()
        needed = sum(max(PAGE, -(-b.nbytes // PAGE) * PAGE) for b in self.held.values())
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

    @rule(data=st.data(), how=st.sampled_from(["release", "release later", "forget"]))
    def give_back(self, data: st.DataObject, how: str) -> None:
        if not self.held:
            return
        number = data.draw(st.sampled_from(sorted(self.held)))
        buffer = self.held.pop(number)
        assert (buffer.tensor() == number % 251).all()
        if how == "release later":
            self.pending.append(Token("a copy"))
            buffer.release(after=self.pending[-1])
        elif how == "release":
            buffer.release()

    @invariant()
    def the_account_is_right(self) -> None:
        stats = self.pool.stats()
        assert stats.held <= 64 * PAGE
        assert stats.buffers == len(self.held) + len(self.pending)
        spans = sorted((b.address, b.address + b.nbytes) for b in self.held.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


Pool.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase


def test_a_buffer_waits_for_what_still_reads_it() -> None:
    with freight.config(slab_bytes=PAGE), HostPool(most=PAGE) as pool:
        buffer, copy = pool.take(PAGE), Token("a copy")
        address = buffer.address
        buffer.release(after=copy)
        assert pool.stats().free == 0
        end = threading.Timer(0.05, copy._finish)
        end.start()
        again = pool.take(PAGE)  # waits: there is no other room
        assert copy.done()
        assert again.address == address


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


def test_a_large_buffer_gets_a_slab_of_its_own_and_trim_gives_it_up() -> None:
    before = memory.stats().held
    with freight.config(slab_bytes=MiB), HostPool() as pool:
        small, large = pool.take(10), pool.take(5 * MiB)
        assert pool.stats().slabs == 2
        large.release()
        assert pool.trim() == 5 * MiB
        assert pool.stats().held == MiB
        small.release()
    gc.collect()
    assert memory.stats().held == before


def test_fragmentation_is_said() -> None:
    with freight.config(slab_bytes=4 * PAGE), HostPool(purpose="staging", most=4 * PAGE) as pool:
        buffers = [pool.take(PAGE) for _ in range(4)]
        for buffer in buffers[::2]:
            buffer.release()
        with pytest.raises(HostMemoryError, match=r"staging asked for 8 KiB.* 8 KiB are free in 2 pieces, the l"):
            pool.take(2 * PAGE)


def test_the_budget_bounds_a_pool_too() -> None:
    with freight.config(host_bytes=memory.stats().held + MiB), HostPool(purpose="staging") as pool:
        assert pool.take(PAGE).nbytes == PAGE  # a whole slab is too much: one that is just large enough
        with pytest.raises(HostMemoryError, match=r"FREIGHT_HOST_BYTES.*The pool holds"):
            pool.take(2 * MiB)


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
