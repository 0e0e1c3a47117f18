"""The judges are judged: what is as good as torch passes, and every way to be worse or other is caught."""

import pytest
import torch

from freight.kernels._tolerance import assert_no_worse, assert_same_bits

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EIGHT_BITS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
OTHERS = [torch.bool, torch.uint8, torch.int16, torch.uint32, torch.int64, torch.complex32, torch.complex128]


def _raw(dtype: torch.dtype, elements: int = 12) -> torch.Tensor:
    nbytes = elements * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8).view(dtype).view(3, 4)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT_BITS, *OTHERS], ids=str)
def test_same_bits_sees_one_flipped_bit(dtype: torch.dtype) -> None:
    want = _raw(dtype)
    assert_same_bits(want.clone(), want)
    changed = want.clone()
    changed.view(-1).view(torch.uint8)[5 * want.element_size()] ^= 1  # of element (1, 1)
    with pytest.raises(AssertionError, match=r"1 of 12 elements \(8\.33 %\) differ in their bits; first at \(1, 1\)"):
        assert_same_bits(changed, want)


def test_same_bits_takes_nan_payloads_and_signs_of_zero_as_they_are() -> None:
    payloads = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    assert_same_bits(payloads.clone(), payloads)
    with pytest.raises(AssertionError, match="2 of 2"):
        assert_same_bits(payloads.flip(0), payloads)
    with pytest.raises(AssertionError, match=r"got 0\.0, want -0\.0"):
        assert_same_bits(torch.tensor(0.0), torch.tensor(-0.0))


@pytest.mark.parametrize("judge", [assert_same_bits, lambda got, want: assert_no_worse(got, want, want.double())])
def test_other_dtype_or_shape_is_an_error(judge) -> None:
    with pytest.raises(AssertionError, match=r"got torch\.float16 of shape \(2,\), want torch\.float32 of shape"):
        judge(torch.ones(2, dtype=torch.float16), torch.ones(2))
    with pytest.raises(AssertionError, match=r"shape \(2, 1\), want .* of shape \(2,\)"):
        judge(torch.ones(2, 1), torch.ones(2))


def test_same_bits_of_strided_empty_and_lazy_tensors() -> None:
    x = torch.randn(4, 6)
    assert_same_bits(x.T, x.T.contiguous())
    assert_same_bits(torch.empty(0, 3), torch.empty(0, 3))
    z = torch.randn(3, dtype=torch.complex64)
    assert_same_bits(z.conj(), z.conj().resolve_conj())


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_no_worse_allows_twice_torchs_error_and_one_eps_of_the_terms(dtype: torch.dtype) -> None:
    exact = torch.full((3,), 1.0, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    torch_result = torch.tensor([1.0, 1.0, 1 + 4 * eps], dtype=dtype)
    within = torch.tensor([1.0, 1 + 9 * eps, 1.0], dtype=dtype)  # 2 * 4 of torch's own, 1 of the terms
    beyond = torch.tensor([1.0, 1 + 10 * eps, 1.0], dtype=dtype)
    assert_no_worse(within, torch_result, exact)
    with pytest.raises(AssertionError, match=r"1 of 3 elements \(33\.3 %\) err more than 2 times.*worst at \(1,\)"):
        assert_no_worse(beyond, torch_result, exact)
    assert_no_worse(beyond, torch_result, exact, factor=3)
    assert_no_worse(beyond, torch_result, exact, magnitude=torch.full((3,), 2.0))


def test_no_worse_names_the_worst_and_the_first() -> None:
    exact = torch.zeros(2, 3, dtype=torch.float64)
    got = torch.tensor([[0.0, 1e-3, 0.0], [0.0, 0.0, -5.0]])
    with pytest.raises(AssertionError, match=r"worst at \(1, 2\): got -5\.0, exact 0\.0.*first at \(0, 1\)"):
        assert_no_worse(got, exact.float(), exact)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_no_worse_has_no_room_for_what_is_not_finite(broken: float) -> None:
    exact = torch.ones(3, dtype=torch.float64)
    got = torch.tensor([1.0, broken, 1.0])
    with pytest.raises(AssertionError, match=r"worst at \(1,\)"):
        assert_no_worse(got, torch.ones(3), exact)
    with pytest.raises(AssertionError, match=r"worst at \(1,\)"):  # not even where torch's own is wrong elsewhere
        assert_no_worse(got, torch.tensor([float("nan"), 1.0, float("inf")]), exact)


def test_no_worse_where_torch_overflows() -> None:
    exact = torch.tensor([1e5, 1.0], dtype=torch.float64)
    torch_result = exact.half()
    assert_no_worse(torch.tensor([torch.inf, 1.0]).half(), torch_result, exact)
    with pytest.raises(AssertionError, match=r"worst at \(0,\)"):
        assert_no_worse(torch.tensor([-torch.inf, 1.0]).half(), torch_result, exact)
    with pytest.raises(AssertionError, match=r"worst at \(1,\)"):  # torch's infinity allows nothing elsewhere
        assert_no_worse(torch.tensor([torch.inf, 3.0]).half(), torch_result, exact)


def test_no_worse_where_nan_is_right() -> None:
    exact = torch.tensor([torch.nan], dtype=torch.float64)
    assert_no_worse(exact.float(), exact.float(), exact)
    with pytest.raises(AssertionError, match=r"got 0\.0, exact nan"):
        assert_no_worse(torch.zeros(1), exact.float(), exact)


def test_no_worse_of_complex_and_empty_tensors() -> None:
    z = torch.randn(5, dtype=torch.complex128)
    assert_no_worse(z.to(torch.complex64), z.to(torch.complex64), z)
    with pytest.raises(AssertionError, match="worst at"):
        assert_no_worse(z.to(torch.complex64) * 1.001, z.to(torch.complex64), z)
    assert_no_worse(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.float64))


def test_no_worse_wants_an_exact_result() -> None:
    with pytest.raises(AssertionError, match=r"exact must be float64 .* got torch\.float32"):
        assert_no_worse(torch.ones(2), torch.ones(2), torch.ones(2))
