"""The kernel on a GPU, against the reference on the CPU: any size and address, any stream, captured and compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from freight import _cuda
from freight._units import MiB, show_bytes
from freight.kernels._tolerance import assert_same_bits
from freight.kernels.fingerprint import _fingerprint_kernel, fingerprint, fingerprint_op, reference

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 16383, 16384, 16385, 1_000_003, 4 * MiB + 5]
# those whose elements torch can compare on a GPU, which opcheck's test of the schema needs
COMPARABLE = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
OTHERS = [
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
LONG = 1_000_000_000  # GPU cycles, about half a second


def draw(nbytes: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """The same bytes on the CPU and on the GPU, there `offset` bytes behind an aligned address."""
    host = torch.randint(256, (offset + nbytes,), dtype=torch.uint8)
    return host[offset:], host.cuda()[offset:]


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 6, 8, 16])
def test_kernel_against_the_reference_on_the_cpu(offset: int) -> None:
    wrong = []
    for nbytes in SIZES:
        host, x = draw(nbytes, offset)
        if not torch.equal(fingerprint(x).cpu(), reference(host)):
            wrong.append(nbytes)
    assert wrong == []


@pytest.mark.parametrize(
    ("nbytes", "offset"),
    [(2**31 + 12_345, 1), (2**34 + 4_099, 0)],
    ids=["past 2**31 bytes, one at a time", "past 2**31 words"],
)
def test_more_than_31_bits(nbytes: int, offset: int, compilations: Callable[[Any], int]) -> None:
    """Against the reference on the GPU, which is plain torch; the last bytes are seen too."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < nbytes + 2**30:
        pytest.skip(f"needs {show_bytes(nbytes + 2**30)} of free GPU memory; there are {show_bytes(free)}")
    words = torch.empty((offset + nbytes) // 8 + 1, dtype=torch.int64, device="cuda").random_()
    x = words.view(torch.uint8)[offset : offset + nbytes]
    fingerprint(x[:1000])
    before = compilations(_fingerprint_kernel)
    whole = fingerprint(x)
    assert compilations(_fingerprint_kernel) == before
    assert torch.equal(whole, reference(x))
    for at in (-1, 2**31 + 5, -4096):
        x[at] ^= 1
        assert not torch.equal(fingerprint(x), whole)
        x[at] ^= 1
    del words, x
    torch.cuda.empty_cache()  # for the tests that follow


def test_runs_on_the_current_stream_and_waits_for_nothing() -> None:
    """The bytes arrive late, on a stream of their own: a kernel on any other stream would see the old ones."""
    host, x = draw(MiB + 3)
    late = host.flip(0)
    new = late.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fingerprint(x)  # so that the kernel is compiled, and the stream has memory of its own
        stream.synchronize()
        torch.cuda._sleep(LONG)
        x.copy_(new)
        got = fingerprint(x)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(got.cpu(), reference(late))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_the_data() -> None:
    host, _ = draw(MiB + 3)
    with torch.cuda.device(0):
        got = fingerprint(host.to("cuda:1"))
    assert got.device == torch.device("cuda", 1)
    assert torch.equal(got.cpu(), reference(host))


def test_page_locked_host_memory_is_read_in_place() -> None:
    host = draw(MiB + 3)[0].pin_memory()
    x = _cuda.alias(host.data_ptr(), host.numel(), host)
    assert x.is_cuda
    assert torch.equal(fingerprint(x).cpu(), reference(host))


def test_captured_in_a_graph() -> None:
    x = draw(MiB + 3)[1]
    fingerprint(x)  # compiled and looked up before, as anything that is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fingerprint(x)
    for _ in range(3):
        host, new = draw(MiB + 3)
        x.copy_(new)
        for _ in range(2):  # nothing is left over from the replay before
            graph.replay()
            assert torch.equal(got.cpu(), reference(host))


# The first backend only traces. What the tools of the second warn of is not freight's.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole(backend: str) -> None:
    compiled = torch.compile(lambda x: fingerprint(x * 2) + 1, fullgraph=True, backend=backend, dynamic=True)
    for n in (3, 5, 1000):
        x = torch.randn(n, device="cuda", requires_grad=True)
        assert torch.equal(compiled(x), fingerprint(x * 2) + 1)


def raw(dtype: torch.dtype) -> Tensor:
    """Elements of every kind: a row of bytes, or of zeros and ones, seen as `dtype`."""
    data = torch.arange(21 * dtype.itemsize, device="cuda").to(torch.uint8)
    return (data % 2 if dtype == torch.bool else data).view(dtype).view(3, 7)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*COMPARABLE, *OTHERS], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    x = raw(dtype)
    torch.library.opcheck(fingerprint_op, (x,), test_utils=["test_schema", *tests] if dtype in COMPARABLE else tests)
    got = fingerprint(x)
    assert_same_bits(x, raw(dtype))  # what opcheck's test of the schema says, where it can
    assert torch.equal(got.cpu(), reference(x.cpu()))
