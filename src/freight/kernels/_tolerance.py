"""How near a result must be: bit for bit where bytes only move, and nowhere much worse than torch's own operator.

The tolerance comes from the problem. Against a float64 result, freight may err `factor` times as much as torch errs in
the same dtype, plus one eps of the sum of the magnitudes of the terms that made the element. Both functions raise
AssertionError themselves, so they hold under `python -O` too, and say how many elements are off and where.
"""

import torch
from torch import Tensor


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Raise unless both have one dtype, one shape and the same bytes, NaN payloads and signs of zero included.

    >>> assert_same_bits(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    Traceback (most recent call last):
    AssertionError: 1 of 2 elements (50 %) differ in their bits; first at (0,): got 0.0, want -0.0
    """
    _assert_alike(got, want)
    mine, theirs = _host(got), _host(want)
    differ = (_bytes(mine) != _bytes(theirs)).any(dim=1).view(mine.shape)
    if differ.any():
        at = _first(differ)
        shown = f"got {_show(mine[at])}, want {_show(theirs[at])}"
        raise AssertionError(f"{_share(differ)} differ in their bits; first at {at}: {shown}")


def assert_no_worse(
    got: Tensor,
    torch_result: Tensor,
    exact: Tensor,
    magnitude: Tensor | None = None,
    factor: float = 2.0,
) -> None:
    """Raise where `got` errs more against `exact` than `factor` times torch's own error, plus one eps of `magnitude`.

    `torch_result` is what torch computes in the dtype of `got`, `exact` the same in float64 (complex128), `magnitude`
    the sum of the absolute terms of each element (the absolute value of `exact` where it is one term). Where torch
    itself gives infinity or NaN, that is right too, and nowhere else.

    >>> third = torch.tensor([1.0], dtype=torch.float64) / 3
    >>> assert_no_worse(third.float(), third.float(), third)
    """
    _assert_alike(got, torch_result)
    if exact.dtype not in (torch.float64, torch.complex128) or exact.shape != got.shape:
        raise AssertionError(
            f"exact must be float64 (or complex128) of shape {tuple(got.shape)}; "
            f"got {exact.dtype} of shape {tuple(exact.shape)}"
        )
    eps = torch.finfo(got.dtype).eps
    mine, theirs, true = _host(got).to(exact.dtype), _host(torch_result).to(exact.dtype), _host(exact)
    terms = true.abs() if magnitude is None else _host(magnitude).double().abs()
    own = (theirs - true).abs()
    own = own[torch.isfinite(own)]
    torch_error = own.max().item() if own.numel() else 0.0
    allowed = factor * torch_error + eps * terms
    error = (mine - true).abs()
    bad = ~(error <= allowed) & ~_same_nonfinite(mine, theirs)  # a NaN is within no bound
    if bad.any():
        at = _first(bad & (error.nan_to_num(nan=torch.inf) == error[bad].nan_to_num(nan=torch.inf).max()))
        bound = torch.broadcast_to(allowed, error.shape)[at].item()
        raise AssertionError(
            f"{_share(bad)} err more than {factor:g} times torch's own error of {torch_error:.3g} and one eps of the "
            f"terms; worst at {at}: got {_show(mine[at])}, exact {_show(true[at])}, torch {_show(theirs[at])}, "
            f"error {error[at].item():.3g}, allowed {bound:.3g}; first at {_first(bad)}"
        )


def _assert_alike(got: Tensor, want: Tensor) -> None:
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(
            f"got {got.dtype} of shape {tuple(got.shape)}, want {want.dtype} of shape {tuple(want.shape)}"
        )


def _host(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _bytes(x: Tensor) -> Tensor:
    """The bytes of contiguous `x`, one row for each element."""
    return x.view(-1).view(torch.uint8).view(-1, x.element_size())


def _same_nonfinite(a: Tensor, b: Tensor) -> Tensor:
    return ~torch.isfinite(b) & ((a == b) | (torch.isnan(a) & torch.isnan(b)))


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())


def _share(where: Tensor) -> str:
    count = int(where.sum())
    return f"{count:,} of {where.numel():,} elements ({100 * count / where.numel():.3g} %)"


def _show(value: Tensor) -> str:
    return str(value.item())
