"""Copies beside the computation: every byte, in the right order, and no memory that goes too early."""

import gc
import threading

import pytest
import torch
from torch import Tensor

from freight import memory
from freight._units import MiB
from freight.errors import ArgumentError
from freight.memory import CopyStreams, HostBlock, State
from freight.memory import _streams as streams_module
from freight.memory._devices import CudaDevice

SLEEP = 100_000_000  # GPU cycles, about a twentieth of a second: the producer is still at work when a copy is asked for
SIZES = [0, 1, 4097, MiB + 3, 150 * MiB + 1]  # the last goes in several chunks


@pytest.fixture(params=["default stream", "other stream"])
def stream(request: pytest.FixtureRequest) -> torch.cuda.Stream:
    return torch.cuda.default_stream() if request.param == "default stream" else torch.cuda.Stream()


def pattern(nbytes: int) -> Tensor:
    """Random bytes on the GPU, which are there."""
    made = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return made


def host_block(nbytes: int, value: int = 0) -> tuple[HostBlock, Tensor]:
    block = memory.allocate(nbytes)
    return block, block.tensor().fill_(value)


@pytest.mark.parametrize("nbytes", SIZES)
def test_to_the_host_while_the_producer_runs(nbytes: int, stream: torch.cuda.Stream) -> None:
    streams, want = CopyStreams(), pattern(nbytes)
    _block, host = host_block(nbytes)
    with torch.cuda.stream(stream):
        source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(SLEEP)
        source.copy_(want)
        token = streams.copy(host, source)
        token.wait_on()
        source.zero_()  # comes after the copy, because the stream waits for it
    token.wait()
    assert token.state is State.DONE
    assert torch.equal(host, want.cpu())


@pytest.mark.parametrize("nbytes", SIZES)
def test_to_the_gpu_while_it_is_still_in_use(nbytes: int, stream: torch.cuda.Stream) -> None:
    streams, want = CopyStreams(), pattern(nbytes)
    _block, host = host_block(nbytes)
    host.copy_(want)
    with torch.cuda.stream(stream):
        to = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(SLEEP)
        before = to.clone()
        to.fill_(7)  # overwritten by the copy, and not the other way round
        streams.copy(to, host).wait_on()
        after = to.clone()
    torch.cuda.synchronize()
    assert not before.any()
    assert torch.equal(after, want)


def test_there_and_back_on_streams_of_their_own() -> None:
    streams, want = CopyStreams(), pattern(8 * MiB)
    _block, host = host_block(8 * MiB)
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(SLEEP)
        source = want.bitwise_not()
        out = streams.copy(host, source)
    with torch.cuda.stream(consumer):
        to = torch.zeros_like(want)
        out.wait_on(consumer)
        streams.copy(to, host, after=streams.now()).wait_on(consumer)
        result = to.bitwise_not()
    consumer.synchronize()
    assert torch.equal(result, want)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64, torch.int64], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3), (2, 0, 5)], ids=str)
def test_dtypes_and_shapes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    streams, source = CopyStreams(), torch.randint(0, 2, shape, device="cuda").to(dtype)
    block = memory.allocate(source.nbytes)
    host = block.tensor(dtype, shape)
    back = torch.zeros(shape, dtype=dtype, device="cuda")
    streams.copy(host, source).wait()
    streams.copy(back, host).wait()
    assert torch.equal(back.contiguous().view(-1).view(torch.uint8), source.contiguous().view(-1).view(torch.uint8))


def test_both_directions_at_once() -> None:
    streams, out, into = CopyStreams(), pattern(100 * MiB), torch.zeros(100 * MiB, dtype=torch.uint8, device="cuda")
    (_first, landing), (_second, leaving) = host_block(100 * MiB), host_block(100 * MiB, 9)
    torch.cuda._sleep(SLEEP)
    tokens = [streams.copy(landing, out), streams.copy(into, leaving)]
    for token in tokens:
        token.wait()
    assert torch.equal(landing, out.cpu())
    assert (into == 9).all().item()


def test_many_small_copies() -> None:
    streams, sizes = CopyStreams(), [1 + 37 * n % 5000 for n in range(1000)]
    sources = [torch.full((size,), n % 251, dtype=torch.uint8, device="cuda") for n, size in enumerate(sizes)]
    block = memory.allocate(sum(sizes))
    hosts = block.tensor().split(sizes)
    back = [torch.empty_like(source) for source in sources]
    out = [streams.copy(host, source) for host, source in zip(hosts, sources, strict=True)]
    for token, to, host in zip(out, back, hosts, strict=True):
        token.wait_on()
        streams.copy(to, host)
    streams.join()
    assert streams.reap() == 0
    assert all(torch.equal(a, b) for a, b in zip(back, sources, strict=True))


def test_copies_are_dropped_as_they_end() -> None:
    streams, source = CopyStreams(), pattern(MiB)
    _block, host = host_block(MiB)
    for _ in range(100):
        streams.copy(host, source).wait()
        assert streams.reap() == 0


def test_from_many_threads() -> None:
    streams, errors = CopyStreams(), []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                block = memory.allocate(100_000)
                for turn in range(20):
                    source = torch.full((100_000,), seed + turn, dtype=torch.uint8, device="cuda")
                    streams.copy(block.tensor(), source).wait()
                    assert (block.tensor() == seed + turn).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(0, 160, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# ---- what goes too early -------------------------------------------------------------------------------


def test_a_source_dropped_at_once_is_not_given_to_others() -> None:
    streams, want = CopyStreams(), pattern(20 * MiB)
    _block, host = host_block(20 * MiB)
    torch.cuda._sleep(SLEEP)
    source = want.clone()
    token = streams.copy(host, source)
    del source
    junk = [torch.full((20 * MiB,), 255, dtype=torch.uint8, device="cuda") for _ in range(3)]
    token.wait()
    assert torch.equal(host, want.cpu())
    del junk


def test_a_block_closed_at_once_stays_locked_and_mapped_until_the_copy_is_over(locked_before: int) -> None:
    streams = CopyStreams()
    for _ in range(3):
        to = torch.zeros(20 * MiB, dtype=torch.uint8, device="cuda")
        block, host = host_block(20 * MiB, 5)
        torch.cuda._sleep(SLEEP)
        token = streams.copy(to, host)
        block.close()
        del block, host
        gc.collect()
        assert token.done() or memory.stats().locked - locked_before == 20 * MiB
        junk, _ = host_block(20 * MiB, 255)  # would get the same place
        token.wait()
        assert (to == 5).all().item()
        junk.close()
    assert streams.reap() == 0
    gc.collect()
    assert memory.stats().locked == locked_before


def test_a_copy_that_breaks_off_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks that were queued before the error still use the memory, which may go after it."""
    monkeypatch.setattr(streams_module, "_CHUNK", MiB)
    real = CudaDevice.copy

    def break_off(self: CudaDevice, lane: str, pairs: list, after: list) -> object:
        real(self, lane, pairs[:2], after)
        raise RuntimeError("the link broke")

    streams, want = CopyStreams(), pattern(4 * MiB)
    _block, host = host_block(4 * MiB)
    torch.cuda._sleep(SLEEP)
    with monkeypatch.context() as patch:
        patch.setattr(CudaDevice, "copy", break_off)
        with pytest.raises(RuntimeError, match="the link broke"):
            streams.copy(host, want)
    assert torch.equal(host[: 2 * MiB], want[: 2 * MiB].cpu())
    assert not host[2 * MiB :].any()
    assert streams.reap() == 0
    streams.copy(host, want).wait()
    assert torch.equal(host, want.cpu())


# ---- what is refused -----------------------------------------------------------------------------------


def test_pageable_memory_is_refused() -> None:
    streams, gpu = CopyStreams(), torch.zeros(10, device="cuda")
    for dst, src in ((gpu, torch.zeros(10)), (torch.zeros(10), gpu)):
        with pytest.raises(ArgumentError, match=r"must be page-locked.*freight\.memory\.allocate"):
            streams.copy(dst, src)
    streams.copy(torch.zeros(0), gpu[:0]).wait()  # nothing needs no lock


def test_memory_that_torch_pinned_is_taken() -> None:
    streams, host = CopyStreams(), torch.arange(1000.0).pin_memory()
    gpu = torch.zeros(1000, device="cuda")
    streams.copy(gpu, host).wait()
    assert torch.equal(gpu.cpu(), torch.arange(1000.0))


def test_two_ends_on_one_side_are_refused() -> None:
    streams, gpu, host = CopyStreams("cuda"), torch.zeros(10, device="cuda"), torch.zeros(10)
    for dst, src in ((gpu, gpu.clone()), (host, host.clone())):
        with pytest.raises(ArgumentError, match="a copy goes between cuda:0 and host memory; got src on"):
            streams.copy(dst, src)


def test_a_device_that_is_no_gpu_is_refused() -> None:
    with pytest.raises(ArgumentError, match="the device must be a GPU, such as 'cuda' or 'cuda:0'; got 'cpu'"):
        CopyStreams("cpu")
