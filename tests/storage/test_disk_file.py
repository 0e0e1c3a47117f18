"""The disk file with direct I/O: every byte of every kind of tensor comes back, whatever lies and runs beside it."""

import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import freight
from freight import memory
from freight._direct import ALIGN
from freight._units import KiB, MiB
from freight.errors import ChecksumError, DiskFullError
from freight.memory import Content, CopyStreams, DiskFile, ModelDevice, State

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
BLOCK = 16 * KiB


@pytest.fixture(autouse=True)
def _on_the_disk(place: Path) -> None:
    """Every test has a directory of its own, in which nothing may be left."""


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    with DiskFile(MiB, threads=2, block_bytes=BLOCK) as disk:
        tensor = random_bytes(48 * KiB).view(dtype)[3:-5].reshape(2, -1)
        extent, back = disk.allocate(tensor.nbytes), torch.zeros(tensor.nbytes, dtype=torch.uint8)
        disk.write(extent, tensor)
        disk.read(extent, back.view(dtype).view(tensor.shape)).wait()
        assert torch.equal(back, bits(tensor))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    nbytes=st.one_of(st.integers(0, 5 * BLOCK), st.integers(0, 5).map(lambda n: n * BLOCK)),
    start=st.sampled_from([0, 1, 64, ALIGN]),
    in_block=st.booleans(),
    checksum=st.booleans(),
)
def test_every_size_from_every_address(nbytes: int, start: int, in_block: bool, checksum: bool) -> None:
    """Aligned memory goes straight to the disk, the rest through a slot."""
    with DiskFile(MiB, threads=2, block_bytes=BLOCK, checksum=checksum) as disk, memory.allocate(MiB) as block:
        whole = block.tensor() if in_block else torch.empty(MiB, dtype=torch.uint8)
        whole.random_(0, 256)
        tensor = whole[start : start + nbytes]
        beside = whole.clone()
        extent, back = disk.allocate(nbytes), whole[start : start + nbytes].clone()
        disk.write(extent, tensor).wait()
        tensor.zero_()
        disk.read(extent, tensor).wait()
        assert torch.equal(tensor, back)
        assert torch.equal(whole, beside)  # and not one byte more


def test_a_long_run_of_everything_at_once() -> None:
    """Extents of all sizes are written, read and freed in any order, by two files, many transfers under way."""
    chance = random.Random(0)
    with DiskFile(8 * MiB, threads=4, block_bytes=BLOCK) as one, DiskFile(8 * MiB, threads=3) as two:
        holds: list = []
        under_way: list = []
        for _ in range(600):
            disk = chance.choice((one, two))
            step = chance.random()
            if step < 0.4:
                tensor = random_bytes(chance.choice((1, 511, ALIGN, BLOCK, BLOCK + 1, 7 * BLOCK - 3)))
                try:
                    extent = disk.allocate(tensor.nbytes)
                except DiskFullError:
                    assert disk.stats().free < 4 * MiB
                    continue
                under_way.append((disk.write(extent, tensor), tensor, tensor))
                holds.append((disk, extent, tensor))
            elif step < 0.8 and holds:
                disk, extent, tensor = chance.choice(holds)
                back = torch.zeros_like(tensor)
                under_way.append((disk.read(extent, back), back, tensor))
            elif holds:
                disk, extent, tensor = holds.pop(chance.randrange(len(holds)))
                disk.free(extent)
            if len(under_way) > 30:
                for token, got, want in under_way:
                    token.wait()
                    assert torch.equal(got, want)
                under_way.clear()
        for token, got, want in under_way:
            token.wait()
            assert torch.equal(got, want)
        for disk, extent, tensor in holds:
            back = torch.zeros_like(tensor)
            disk.read(extent, back).wait()
            assert torch.equal(back, tensor)
            disk.free(extent)
        assert one.stats().free == two.stats().free == 8 * MiB


def test_many_threads_write_and_read() -> None:
    errors: list[BaseException] = []
    with DiskFile(8 * MiB, threads=4, block_bytes=BLOCK) as disk:

        def work(seed: int) -> None:
            try:
                tensor = torch.full((3 * BLOCK + seed,), seed, dtype=torch.uint8)
                for _ in range(15):
                    extent, back = disk.allocate(tensor.nbytes), torch.zeros_like(tensor)
                    disk.write(extent, tensor)
                    disk.read(extent, back).wait()
                    assert torch.equal(back, tensor)
                    disk.free(extent)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert disk.stats().free == 8 * MiB


def test_device_memory_goes_through_the_slots() -> None:
    device = ModelDevice()
    with DiskFile(MiB, threads=2, block_bytes=BLOCK, streams=CopyStreams(device)) as disk:
        source = device.own(torch.randn(30_001))
        extent, back = disk.allocate(source.nbytes), device.own(torch.zeros(30_001))
        disk.write(extent, source)
        disk.read(extent, back).wait()
        assert torch.equal(back, source)


def test_the_page_cache_holds_none_of_it(cached_pages: Callable[[int], int]) -> None:
    with DiskFile(MiB, threads=2, block_bytes=BLOCK) as disk:
        tensor = random_bytes(MiB)
        extent = disk.allocate(MiB)
        disk.write(extent, tensor).wait()
        disk.read(extent, tensor).wait()
        stats = disk.stats()
        assert stats.direct
        assert cached_pages(disk._fd) == 0
        assert (stats.bytes_written, stats.bytes_read) == (MiB, MiB)
    with freight.config(direct_io=False), DiskFile(MiB) as disk:
        disk.write(disk.allocate(MiB), tensor).wait()
        assert not disk.stats().direct
        assert cached_pages(disk._fd) > 0


def test_bytes_that_changed_on_disk_are_found() -> None:
    with DiskFile(MiB, threads=2, block_bytes=BLOCK, checksum=True) as disk:
        tensor = random_bytes(5 * BLOCK + 3)
        extent, back = disk.allocate(tensor.nbytes), torch.empty_like(tensor)
        disk.write(extent, tensor).wait()
        change(disk, extent.offset + 3 * BLOCK + 77)
        with pytest.raises(ChecksumError, match=rf"16 KiB read back at offset {extent.offset + 3 * BLOCK} are not"):
            disk.read(extent, back).wait()
        assert extent.content is Content.WRITTEN
        disk.write(extent, tensor)
        disk.read(extent, back).wait()
        assert torch.equal(back, tensor)


def test_without_checksums_they_are_not() -> None:
    """So the test above changes what is read."""
    with DiskFile(MiB, threads=2, block_bytes=BLOCK, checksum=False) as disk:
        tensor = random_bytes(BLOCK)
        extent, back = disk.allocate(BLOCK), torch.empty_like(tensor)
        disk.write(extent, tensor).wait()
        change(disk, extent.offset + 77)
        disk.read(extent, back).wait()
        assert (back != tensor).nonzero().tolist() == [[77]]


def change(disk: DiskFile, offset: int) -> None:
    """Flip the bits of one byte of the file, behind its back."""
    other = os.open(f"/proc/self/fd/{disk._fd}", os.O_RDWR)
    try:
        [byte] = os.pread(other, 1, offset)
        os.pwrite(other, bytes([byte ^ 255]), offset)
        os.fsync(other)
    finally:
        os.close(other)


def test_what_padding_writes_stays_in_its_own_extent() -> None:
    """The disk takes whole blocks, so the last of an extent is padded; its neighbours must not see that."""
    with DiskFile(MiB, threads=2, block_bytes=BLOCK) as disk:
        tensors = [random_bytes(n) for n in (1, ALIGN - 1, ALIGN + 1, BLOCK + 1, 5)]
        extents = [disk.allocate(tensor.nbytes) for tensor in tensors]
        assert [extent.offset for extent in extents] == [0, ALIGN, 2 * ALIGN, 4 * ALIGN, 9 * ALIGN]
        for extent, tensor in reversed(list(zip(extents, tensors, strict=True))):
            disk.write(extent, tensor).wait()
        for extent, tensor in zip(extents, tensors, strict=True):
            back = torch.empty_like(tensor)
            disk.read(extent, back).wait()
            assert torch.equal(back, tensor)
        whole = Path(f"/proc/self/fd/{disk._fd}").read_bytes()
        for extent, after in zip(extents, [ALIGN, 2 * ALIGN, 4 * ALIGN, 9 * ALIGN, 10 * ALIGN], strict=True):
            assert not any(whole[extent.offset + extent.nbytes : after])  # and never what was in memory before


def test_more_transfers_than_threads_and_slots() -> None:
    with DiskFile(4 * MiB, threads=1, block_bytes=ALIGN) as disk:
        tensors = [random_bytes(3 * ALIGN + n) for n in range(40)]
        extents = [disk.allocate(tensor.nbytes) for tensor in tensors]
        backs = [torch.zeros_like(tensor) for tensor in tensors]
        for extent, tensor in zip(extents, tensors, strict=True):
            disk.write(extent, tensor)
        tokens = [disk.read(extent, back) for extent, back in zip(extents, backs, strict=True)]
        for token in tokens:
            token.wait()
        assert all(torch.equal(a, b) for a, b in zip(tensors, backs, strict=True))
        assert all(token.state is State.DONE for token in tokens)


def test_the_staging_memory_is_exact_and_goes_with_the_file() -> None:
    gc.collect()
    before = memory.stats().held
    with DiskFile(MiB, threads=3, block_bytes=5 * ALIGN):
        assert memory.stats().held - before == 2 * 8 * 5 * ALIGN  # two stages of eight blocks each
    assert memory.stats().held == before
