"""The reference against Python's own integers, and the kernel (interpreted without a GPU) against the reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from freight.errors import ArgumentError
from freight.kernels import fingerprint as module
from freight.kernels.fingerprint import FIRST, SECOND, STEP, fingerprint, fingerprint_op, launch, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UGLY = st.sampled_from([0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 1021, 4095, 4096, 4097, 16391])
SMALL = {"BLOCK": 256, "num_warps": 4, "programs_per_sm": 1}  # two programs when interpreted: they share the blocks
GOLDEN = 224342031033057312  # of the bytes 0 to 99
DTYPES = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    - {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4, torch.float4_e2m1fn_x2}
    - {getattr(torch, f"{sign}int{bits}", None) for sign in ("", "u") for bits in range(1, 8)}
    - {getattr(torch, f"bits{shape}", None) for shape in ("1x8", "2x4", "4x2", "8", "16")},
    key=str,
)


def draw(nbytes: int, offset: int = 0, device: str = "cpu") -> Tensor:
    return torch.randint(256, (offset + nbytes,), dtype=torch.uint8, device=device)[offset:]


def by_python(data: bytes) -> int:
    """The formula of the module's docstring, in integers without end."""

    def mix(z: int) -> int:
        for factor in (FIRST, SECOND, 1):
            z = (z ^ z >> 32) * factor % 2**64
        return z

    total = mix(len(data))
    for i in range(0, len(data), 8):
        total += mix(int.from_bytes(data[i : i + 8], "little") ^ (i // 8 + 1) * STEP % 2**64)
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


@given(data=st.binary(max_size=100))
def test_reference_is_the_formula(data: bytes) -> None:
    x = torch.tensor(list(data), dtype=torch.uint8)
    assert reference(x).tolist() == [by_python(data)]


def test_reference_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(1000)
    whole = reference(x)
    monkeypatch.setattr(module, "_CHUNK", 64)
    assert torch.equal(reference(x), whole)


def test_value_is_for_ever() -> None:
    """Stored fingerprints stay valid: this value never changes."""
    assert fingerprint(torch.arange(100, dtype=torch.uint8)).tolist() == [by_python(bytes(range(100)))]
    assert by_python(bytes(range(100))) == GOLDEN


@given(nbytes=UGLY, offset=st.sampled_from([0, 1, 2, 4, 6, 8]))
def test_kernel_against_reference(nbytes: int, offset: int) -> None:
    x = draw(nbytes, offset, DEVICE)
    assert torch.equal(launch(x, SMALL), reference(x))


def test_kernel_with_the_configuration_of_its_own() -> None:
    x = draw(70_001, device=DEVICE)
    assert torch.equal(launch(x), reference(x))


def test_kernel_where_offset_and_address_disagree() -> None:
    """A view can be aligned in memory and not within its storage."""
    odd = torch.frombuffer(bytearray(draw(1001).tolist()), dtype=torch.uint8, offset=1)
    x = odd[7:]
    assert torch.equal(launch(x, SMALL), reference(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    x = draw(16 * 15, device=DEVICE).view(dtype)
    want = reference(x.view(torch.uint8))
    assert torch.equal(fingerprint(x), want)
    assert torch.equal(launch(x.view(5, -1), SMALL), want)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 5)], ids=str)
def test_every_shape(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=DEVICE)
    assert fingerprint(x).shape == (1,)
    assert torch.equal(fingerprint(x), fingerprint(x.view(-1).clone()))


def test_every_byte_counts() -> None:
    x = draw(203)
    seen = {fingerprint(x).item()}
    for at in range(x.numel()):
        changed = x.clone()
        changed[at] ^= 1 << at % 8
        seen.add(fingerprint(changed).item())
    assert len(seen) == 1 + x.numel()


@given(one=st.integers(0, 24), other=st.integers(0, 24), high=st.sampled_from([2, 2**8, 2**62]))
def test_swapped_words_count(one: int, other: int, high: int) -> None:
    words = torch.randint(high, (25,), generator=torch.Generator().manual_seed(one * 25 + other))
    swapped = words.clone()
    swapped[one], swapped[other] = words[other], words[one]
    assert torch.equal(fingerprint(words), fingerprint(swapped)) == torch.equal(words, swapped)


def test_length_counts() -> None:
    """Zeros cut off or added are seen, though they add nothing that a sum of words alone would see."""
    lengths = range(70)
    assert len({fingerprint(torch.zeros(n, dtype=torch.uint8)).item() for n in lengths}) == len(lengths)


def test_lazy_views_are_what_they_show() -> None:
    x = torch.randn(5, dtype=torch.complex64)
    assert torch.equal(fingerprint(x.conj()), fingerprint(x.conj().resolve_conj()))
    assert torch.equal(fingerprint(x.conj().imag.contiguous()), fingerprint(-x.imag.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    x = torch.ones(3, 7, device=DEVICE).to(dtype)
    torch.library.opcheck(fingerprint_op, (x,))


def test_compiles_whole() -> None:
    compiled = torch.compile(lambda x: fingerprint(x * 2) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (3, 5, 8):
        x = torch.randn(n, device=DEVICE, requires_grad=True)
        assert torch.equal(compiled(x), fingerprint(x * 2) + 1)


def test_error_says_what_to_do() -> None:
    with pytest.raises(ArgumentError, match=r"got shape \(3, 2\) with strides \(1, 3\).*x\.contiguous\(\)"):
        fingerprint(torch.ones(2, 3).T)
