"""CUDA graphs: what is closed while one is captured does not spoil it, and a graph reads host memory in place."""

import gc

import pytest
import torch

import freight
from freight import memory
from freight._units import KiB, MiB
from freight.errors import UnsupportedError
from freight.memory import CopyStreams, HostPool

SLEEP = 100_000_000  # GPU cycles, about a twentieth of a second


@pytest.fixture
def warm() -> torch.Tensor:
    """A tensor that a captured graph may use, on which its kernels ran before."""
    x = torch.arange(1000.0, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (x * 2 + 1).sum()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return x


def test_blocks_closed_during_a_capture_are_unlocked_after_it(warm: torch.Tensor, locked_before: int) -> None:
    block, other = memory.allocate(MiB), memory.allocate(2 * MiB)
    held, there = memory.stats().held, other.alias()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warm * 2
        block.close()
        del there, other
        gc.collect()
        out = out + 1
        locked = memory.stats().locked
    assert locked == locked_before  # no longer freight's, and yet with the driver until the capture is over
    assert memory.stats().held == held - 3 * MiB  # which is here
    warm.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 11).all().item()


def test_the_memory_is_to_be_had_again_after_the_capture(warm: torch.Tensor) -> None:
    block = memory.allocate(MiB)
    tensor = block.tensor()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warm * 2
        block.close()
    again = memory.register(tensor)  # was the driver's until now
    assert again.pinned
    again.close()
    assert not tensor.is_pinned()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, warm * 2)


def test_a_pool_works_during_a_capture(warm: torch.Tensor) -> None:
    streams, source = CopyStreams(), torch.ones(64 * KiB, dtype=torch.uint8, device="cuda")
    with freight.config(slab_bytes=MiB), HostPool() as pool:
        buffer = pool.take(64 * KiB)
        torch.cuda._sleep(SLEEP)  # or the copy may be seen to be over before the capture begins
        buffer.release(after=streams.copy(buffer.tensor(), source))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = warm * 2
            assert pool.stats().buffers == 1  # whether the copy is over is not asked now
            pool.take(64 * KiB).release()  # from the slab there is: a new one could not be locked now
            out = out + 1
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, warm * 2 + 1)
        streams.join()
        assert pool.stats().buffers == 0


def test_copy_streams_cannot_be_captured_and_say_so(warm: torch.Tensor) -> None:
    streams, block = CopyStreams(), memory.allocate(4000)
    host = block.tensor(torch.float32)
    host.fill_(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warm * 2
        with pytest.raises(UnsupportedError, match="cannot be captured in a CUDA graph; copy outside of it"):
            streams.copy(warm, host)
        out = out + 1
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, warm * 2 + 1)


def test_nothing_can_be_locked_during_a_capture(warm: torch.Tensor, locked_before: int) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warm * 2
        with pytest.raises(UnsupportedError, match="cannot be page-locked while a CUDA graph is captured"):
            memory.allocate(MiB)
        out = out + 1
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, warm * 2 + 1)
    assert memory.stats().locked == locked_before


def test_a_captured_graph_reads_host_memory_in_place(warm: torch.Tensor) -> None:
    with memory.allocate(4000) as block:
        host, there = block.tensor(torch.float32), block.alias(torch.float32)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = warm + there
        for value in (1.0, 2.0):
            host.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, warm + value)
        del graph, there
