"""Host memory that the GPU sees in place: the same bytes on both sides, page-locked for as long as anybody needs it."""

import gc
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import freight
from freight import memory
from freight._pages import PAGE
from freight._units import MiB
from freight.errors import ClosedError, ForkedError, OverlapError
from freight.memory import CopyStreams, HostPool

QUANTIZED = {"quint8", "qint8", "qint32", "quint4x2", "quint2x4"}
DTYPES = sorted(
    {value for name, value in vars(torch).items() if isinstance(value, torch.dtype) and name not in QUANTIZED}, key=str
)
LONG_SLEEP = 200_000_000  # GPU cycles, about a tenth of a second


def random_bytes(nbytes: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# ---- aliases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_both_ways(dtype: torch.dtype) -> None:
    with memory.allocate(PAGE) as block:
        host, pattern = block.tensor(), random_bytes(PAGE)
        host.copy_(pattern)
        start, nbytes = dtype.itemsize, 6 * dtype.itemsize
        seen = block.alias(dtype, (2, 3), offset=start)
        assert (seen.dtype, seen.shape, seen.device.type) == (dtype, (2, 3), "cuda")
        assert seen.data_ptr() == block.address + start
        assert torch.equal(bits(seen).cpu(), pattern[start : start + nbytes])
        pattern[start : start + nbytes] = random_bytes(nbytes)
        bits(seen).copy_(pattern[start : start + nbytes])  # a view of contiguous memory: it writes in place
        torch.cuda.synchronize()
        assert torch.equal(host, pattern)  # and not one byte beside


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_the_gpu_computes_on_it(dtype: torch.dtype) -> None:
    with memory.allocate(1000 * dtype.itemsize) as block:
        host, pattern = block.tensor(dtype), torch.randint(0, 100, (1000,)).to(dtype)
        host.copy_(pattern)
        there = block.alias(dtype)
        there.copy_(there.flip(0))
        torch.cuda.synchronize()
        assert torch.equal(host, pattern.flip(0))


def test_one_memory() -> None:
    with memory.allocate(4 * MiB) as block:
        host, there = block.tensor(torch.int64), block.alias(torch.int64)
        host.copy_(torch.arange(host.numel()))
        there.mul_(2)
        torch.cuda.synchronize()
        assert torch.equal(host, 2 * torch.arange(host.numel()))
        host[17] = -1
        assert there[17].item() == -1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7, 11)], ids=str)
def test_every_shape(shape: tuple[int, ...]) -> None:
    with memory.allocate(1000) as block:
        host = block.tensor(torch.float32, shape)
        host.fill_(3)
        there = block.alias(torch.float32, shape, device="cuda:0")
        assert there.shape == shape
        assert torch.equal(there.cpu(), host)


def test_an_empty_block() -> None:
    with memory.allocate(0) as block:
        assert block.alias(torch.float32, (0, 5)).shape == (0, 5)
        assert not block.pinned


def test_an_alias_takes_no_gpu_memory() -> None:
    before = torch.cuda.memory_allocated()
    with memory.allocate(64 * MiB) as block:
        there = block.alias()
        assert there.numel() == 64 * MiB
        assert torch.cuda.memory_allocated() == before


# ---- page locks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, PAGE, 3 * MiB + 5, 200 * MiB + 1])
@pytest.mark.parametrize("shareable", [False, True])
def test_pinned_and_exact(nbytes: int, shareable: bool, locked_before: int) -> None:
    held = memory.stats().held
    with memory.allocate(nbytes, shareable=shareable) as block:
        assert block.pinned
        assert block.tensor().is_pinned()
        assert block.tensor()[nbytes // 2 :].is_pinned()
        assert memory.stats().locked - locked_before == nbytes
        assert memory.stats().held - held == -(-nbytes // PAGE) * PAGE  # never the next power of two
    assert memory.stats().locked == locked_before
    assert memory.stats().held == held


@pytest.mark.parametrize("how", ["close", "forget", "cycle"])
def test_unlocked_at_the_end(how: str, locked_before: int) -> None:
    block = memory.allocate(MiB)
    host = block.tensor()
    host.fill_(5)
    assert host.is_pinned()
    if how == "close":
        block.close()
    elif how == "cycle":
        block.self = block  # type: ignore[attr-defined]
    del block
    gc.collect()
    assert not host.is_pinned()
    assert (host == 5).all()
    assert memory.stats().locked == locked_before
    again = memory.register(host)  # the driver has no part of it left
    assert host.is_pinned()
    again.close()


def test_an_alias_keeps_it_locked(locked_before: int) -> None:
    block = memory.allocate(MiB)
    host, there = block.tensor(), block.alias()[100:200]
    host.fill_(5)
    block.close()
    gc.collect()
    assert host.is_pinned()
    assert there.sum().item() == 500
    with pytest.raises(ClosedError):
        block.alias()
    del there
    gc.collect()
    assert not host.is_pinned()
    assert memory.stats().locked == locked_before


def test_closing_waits_for_the_kernels_that_still_read(locked_before: int) -> None:
    """The memory goes at once: a kernel that reads it later would fail, and the process with it."""
    for _ in range(3):
        block = memory.allocate(64 * MiB)
        block.tensor(torch.int64).fill_(3)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG_SLEEP)
            total = block.alias(torch.int64).sum()
        block.close()
        del block
        gc.collect()
        assert total.item() == 3 * 8 * MiB
    assert memory.stats().locked == locked_before


def test_blocks_of_a_pool_are_pinned(locked_before: int) -> None:
    with freight.config(slab_bytes=MiB), HostPool() as pool:
        tensor = pool.take(5000).tensor(torch.float32)
        tensor.copy_(torch.arange(1250.0))
        assert tensor.is_pinned()
        assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), torch.arange(1250.0))
        del tensor
    gc.collect()
    assert memory.stats().locked == locked_before


# ---- the caller's own memory -------------------------------------------------------------------------


def test_the_same_memory_twice_and_views_share_one_lock(locked_before: int) -> None:
    table = torch.randn(1000, 50)
    whole, again, part = memory.register(table), memory.register(table), memory.register(table[10:20, 5:])
    assert whole.address == again.address == part.address == table.data_ptr()
    assert memory.stats().locked - locked_before == table.nbytes
    assert torch.equal(whole.alias(torch.float32, (1000, 50)).cpu(), table)
    for block in (whole, part):
        block.close()
        assert table.is_pinned()
    again.close()
    assert not table.is_pinned()
    assert memory.stats().locked == locked_before


def test_writing_through_the_alias_is_seen_by_the_caller() -> None:
    array = np.zeros((100, 7), dtype=np.float64)
    with memory.register(torch.from_numpy(array)) as block:
        block.alias(torch.float64, (100, 7))[3] = 5
        torch.cuda.synchronize()
        assert array.sum() == 35


def test_overlaps_in_part_are_refused_with_both_ranges(locked_before: int) -> None:
    array = np.zeros(MiB, dtype=np.uint8)
    first, second = torch.from_numpy(array[: 600 * 1024]), torch.from_numpy(array[400 * 1024 :])
    with memory.register(first):
        for other in (second, torch.from_numpy(array)):
            with pytest.raises(OverlapError, match="overlaps memory that freight has registered, only in part"):
                memory.register(other)
        with memory.register(torch.from_numpy(array[5000:6000])) as inside:
            assert inside.pinned
            assert memory.stats().locked - locked_before == first.nbytes
    with memory.register(second) as block:
        assert block.pinned
    assert memory.stats().locked == locked_before


def test_memory_that_torch_pinned_is_used_as_it_is() -> None:
    tensor = torch.arange(5000.0).pin_memory()
    with memory.register(tensor) as block, memory.register(tensor[100:]) as view:
        assert block.pinned
        assert view.pinned
        assert torch.equal(block.alias(torch.float32, 5000).cpu(), tensor)
    assert tensor.is_pinned()
    assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), torch.arange(5000.0))


def test_memory_that_others_registered_in_part_says_so() -> None:
    array = np.zeros(MiB, dtype=np.uint8)
    address = array.ctypes.data
    middle = -(-address // PAGE) * PAGE + 16 * PAGE
    assert int(torch.cuda.cudart().cudaHostRegister(middle, 16 * PAGE, 0)) == 0
    try:
        with pytest.raises(OverlapError, match="page-locked already, at least in part, and not by freight"):
            memory.register(torch.from_numpy(array))
        torch.ones(1, device="cuda").add_(1)  # the runtime's error was not left for the next launch
        torch.cuda.synchronize()
    finally:
        assert int(torch.cuda.cudart().cudaHostUnregister(middle)) == 0


# ---- other processes, exits and limits -----------------------------------------------------------------


def test_a_forked_child_reads_the_bytes_and_is_refused_the_gpu() -> None:
    block = memory.allocate(MiB)
    host, there, streams = block.tensor(), block.alias(), CopyStreams()
    ends = host[:5], there[:5]  # even a view of a GPU tensor may not be made in a forked child
    host.fill_(7)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            refused = 0
            for use in (
                block.alias,
                CopyStreams,
                lambda: streams.copy(*ends),
                lambda: memory.allocate(100).alias(),
            ):
                try:
                    use()
                except ForkedError:
                    refused += 1
            fine = host[3].item() == 7 and not block.pinned and not memory.allocate(100).pinned
            host[0] = 9
            block.close()  # unlocks nothing, here or in the parent
            gc.collect()
            status = 0 if fine and refused == 4 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert there[:5].tolist() == [9, 7, 7, 7, 7]
    host.fill_(3)  # pages are shared and not copied at a write, so the GPU reads what is written after a fork
    assert (there == 3).all().item()
    block.close()


IN_EVERY_ORDER = {
    "block and alias": "keep = block, there",
    "alias alone": "del block",
    "block alone": "del there",
    "tensor alone": "tensor = block.tensor(); del block, there",
    "a cycle": "block.self = block; there.block = block; del block, there",
    "closed before": "block.close()",
    "deleted by the exit": "import builtins; builtins.kept = [there, block]; del block, there",
}


def test_the_process_ends_well_whatever_is_left(in_new_process: Callable[[str], str]) -> None:
    """With kernels under way that read each of the blocks; one process, for each start of CUDA takes seconds."""
    steps = "\n".join(
        f"""
block = memory.allocate(8 * 2**20)
block.tensor().fill_({number})
there = block.alias()
torch.cuda._sleep({LONG_SLEEP // 4})
total = there.sum(dtype=torch.int64)
holder = dict(block=block, there=there, torch=torch)
del block, there
exec({step!r}, holder)
left.append((holder, total))
del holder
"""
        for number, step in enumerate(IN_EVERY_ORDER.values())
    )
    said = in_new_process(f"import torch\nfrom freight import memory\nleft = []\n{steps}\nprint(len(left))")
    assert said == f"{len(IN_EVERY_ORDER)}\n"


def test_the_process_ends_well_with_the_callers_memory_registered(in_new_process: Callable[[str], str]) -> None:
    said = in_new_process(f"""
        import numpy, torch
        from freight import memory
        array = numpy.ones(2**22)
        block = memory.register(torch.from_numpy(array))
        there = block.alias(torch.float64)
        streams = memory.CopyStreams()
        landing = memory.allocate(2**25)
        host = landing.tensor()
        torch.cuda._sleep({LONG_SLEEP})
        total = there.sum()
        streams.copy(host, there.view(torch.uint8).clone())
        print("begun")
    """)
    assert said == "begun\n"


def test_a_small_lockable_limit_is_no_obstacle_or_is_named(in_new_process: Callable[[str], str]) -> None:
    """Some drivers lock past the limit, and root may; where one does not, the error says what the limit is."""
    said = in_new_process("""
        import resource, torch
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        from freight import memory
        from freight.errors import PinError
        try:
            block = memory.allocate(64 * 2**20, purpose="the table")
            print(block.pinned, block.alias()[5].item())
        except PinError as error:
            print(memory.stats().held, memory.stats().locked, error)
            torch.ones(1, device="cuda").add_(1)
            torch.cuda.synchronize()
    """)
    assert said == "True 0\n" or (said.startswith("0 0 the table: ") and "Lockable memory is 64 KiB" in said)
