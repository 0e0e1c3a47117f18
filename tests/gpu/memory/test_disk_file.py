"""GPU memory to the disk and back, beside the computation, bit for bit."""

import errno
import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import freight
from freight import _direct, memory
from freight._direct import default_directory
from freight._units import KiB, MiB
from freight.errors import DirectIOError, DiskError
from freight.memory import DiskFile, HostPool, State

SLEEP = 100_000_000  # GPU cycles, about a twentieth of a second
BLOCK = 256 * KiB
SMALL = {"threads": 4, "block_bytes": BLOCK}


@pytest.fixture(autouse=True)
def place() -> Iterator[Path]:
    """A directory on the disk; with direct I/O where it is to be had, for what is tested here is the way to the GPU."""
    directory = Path(tempfile.mkdtemp(prefix="freight-test-", dir=default_directory()))
    try:
        with freight.config(disk_dir=directory, checksum=True):
            try:
                DiskFile(MiB, **SMALL).close()
                direct = True
            except DirectIOError:
                direct = False
        with freight.config(disk_dir=directory, checksum=True, direct_io=direct):
            yield directory
        assert list(directory.iterdir()) == []
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def pattern(nbytes: int) -> Tensor:
    """Random bytes on the GPU, which are there."""
    made = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return made


@pytest.mark.parametrize("nbytes", [0, 1, 4096, BLOCK - 1, BLOCK, 5 * BLOCK + 17, 40 * MiB + 3])
@pytest.mark.parametrize("checksum", [False, True], ids=["", "checksum"])
def test_there_and_back_while_the_producer_runs(nbytes: int, checksum: bool) -> None:
    want = pattern(nbytes)
    with DiskFile(48 * MiB, checksum=checksum, **SMALL) as disk, torch.cuda.stream(torch.cuda.Stream()):
        source = torch.zeros_like(want)
        back = torch.zeros_like(want)
        torch.cuda._sleep(SLEEP)
        source.copy_(want)
        extent = disk.allocate(nbytes)
        token = disk.write(extent, source)
        torch.cuda._sleep(SLEEP)
        seen = back.clone()
        back.fill_(7)  # overwritten by the read, and not the other way round
        disk.read(extent, back).wait()
        assert token.state is State.DONE
        result = back.clone()
        torch.cuda.current_stream().synchronize()
        assert not seen.any().item()
    assert torch.equal(result, want)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64], ids=str
)
def test_dtypes_and_views(dtype: torch.dtype) -> None:
    whole = torch.randint(0, 2, (500, 333), device="cuda").to(dtype)
    part, back = whole[17:401], torch.zeros(384, 333, dtype=dtype, device="cuda")
    with DiskFile(4 * MiB, **SMALL) as disk:
        extent = disk.allocate(part.nbytes)
        disk.write(extent, part)
        disk.read(extent, back).wait()
    assert torch.equal(back.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8))


def test_from_the_gpu_to_host_memory_and_back() -> None:
    want = pattern(3 * MiB + 5)
    with DiskFile(8 * MiB, **SMALL) as disk, memory.allocate(want.nbytes) as block:
        extent = disk.allocate(want.nbytes)
        disk.write(extent, want)
        disk.read(extent, block.tensor()).wait()
        assert torch.equal(block.tensor(), want.cpu())
        block.tensor().bitwise_not_()
        other, back = disk.allocate(want.nbytes), torch.zeros_like(want)
        disk.write(other, block.tensor())
        disk.read(other, back).wait()
        assert torch.equal(back, want.bitwise_not())


def test_beside_the_computation_neither_disturbs_the_other() -> None:
    a, b = torch.randn(2048, 2048, device="cuda"), torch.randn(2048, 2048, device="cuda")
    alone = [a @ b + n for n in range(50)]
    tensors = [pattern(2 * MiB + n) for n in range(16)]
    with DiskFile(64 * MiB, **SMALL) as disk:
        extents = [disk.allocate(tensor.nbytes) for tensor in tensors]
        backs = [torch.zeros_like(tensor) for tensor in tensors]
        for extent, tensor in zip(extents, tensors, strict=True):
            disk.write(extent, tensor)
        tokens = [disk.read(extent, back) for extent, back in zip(extents, backs, strict=True)]
        beside = [a @ b + n for n in range(50)]
        for token in tokens:
            token.wait()
    assert all(torch.equal(one, two) for one, two in zip(alone, beside, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(tensors, backs, strict=True))


def test_a_tensor_dropped_at_once_is_not_given_to_others() -> None:
    want = pattern(10 * MiB)
    with DiskFile(16 * MiB, **SMALL) as disk:
        torch.cuda._sleep(SLEEP)
        source, extent = want.clone(), disk.allocate(want.nbytes)
        disk.write(extent, source)
        del source
        junk = [torch.full((10 * MiB,), 255, dtype=torch.uint8, device="cuda") for _ in range(3)]
        back = torch.zeros_like(want)
        disk.read(extent, back).wait()
        assert torch.equal(back, want)
        del junk


def test_an_event_given_stands_for_the_stream() -> None:
    want = pattern(MiB)
    producer = torch.cuda.Stream()
    with DiskFile(2 * MiB, **SMALL) as disk:
        with torch.cuda.stream(producer):
            torch.cuda._sleep(SLEEP)
            source = want.bitwise_not()
            ready = producer.record_event()
        extent, back = disk.allocate(MiB), torch.zeros_like(want)
        disk.write(extent, source, after=ready)  # asked for on another stream, which knows nothing of the producer
        disk.read(extent, back).wait()
        assert torch.equal(back, want.bitwise_not())


def test_an_error_of_the_disk_reaches_the_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    want = pattern(10 * BLOCK)
    with DiskFile(8 * MiB, **SMALL) as disk:
        extent, back = disk.allocate(want.nbytes), torch.zeros_like(want)
        disk.write(extent, want).wait()
        read, calls = _direct.read_into, iter(range(1000))

        def fail_at_the_fourth(fd: int, address: int, nbytes: int, offset: int) -> None:
            if next(calls) == 3:
                raise DiskError(errno.EIO, "the disk broke", "file")
            read(fd, address, nbytes, offset)

        with monkeypatch.context() as patch:
            patch.setattr(_direct, "read_into", fail_at_the_fourth)
            with pytest.raises(DiskError, match="the disk broke"):
                disk.read(extent, back).wait()
        disk.read(extent, back).wait()
        assert torch.equal(back, want)


def test_nothing_is_left_locked(locked_before: int) -> None:
    with freight.config(slab_bytes=MiB), DiskFile(8 * MiB, **SMALL) as disk, HostPool() as pool:
        buffer = pool.take(BLOCK).tensor()
        buffer.fill_(3)
        extent = disk.allocate(BLOCK)
        disk.write(extent, buffer).wait()
        del buffer
        assert memory.stats().locked > locked_before
    gc.collect()
    assert memory.stats().locked == locked_before
