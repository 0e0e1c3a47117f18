"""A 64-bit fingerprint of a tensor's bytes, computed where they lie: moved bytes are verified without moving them back.

    words w[0], w[1], ...   the bytes as little-endian 64-bit words, the last one filled up with zeros
    fingerprint           = mix(nbytes) + sum_i mix(w[i] ^ (i + 1) * STEP)        modulo 2**64
    mix(z)                = fold(fold(fold(z) * FIRST) * SECOND),  fold(z) = z ^ (z >> 32)

`mix` is a bijection, so any change within one word changes the sum; changes of several words, swapped words and other
lengths are missed once in 2**64. Integer sums commute: the value is the same on every device and in every order. It
tells accidents apart, not adversaries.
"""

# pyright: reportInvalidTypeForm=false, reportCallIssue=false
# Triton's annotations are values, and its launches take more than the kernel's parameters.

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight._units import MiB
from freight.errors import ArgumentError
from freight.kernels._launch import cdiv, launching_on, multiprocessors, vector_bytes
from freight.kernels._table import Config, Tunable, register

# Odd, so that multiplying by them loses nothing; written as the signed 64-bit numbers that torch and Triton compute in.
STEP = -0x61C8864680B583EB
FIRST = -0x00AE502812AA7333
SECOND = -0x3B314601E57A13AD
LOW = 0xFFFFFFFF

# ---- reference: obviously right, and what runs on a CPU ----------------------------------------

_CHUNK = 32 * MiB  # the arithmetic below needs several copies of what it works on


def reference(x: Tensor) -> Tensor:
    """The fingerprint of a contiguous tensor in plain integer arithmetic, on any device."""
    data = as_bytes(x)
    total = _mix(torch.tensor([data.numel()], dtype=torch.int64, device=x.device))
    for start in range(0, data.numel(), _CHUNK):
        part = data[start : start + _CHUNK]
        whole = torch.zeros(cdiv(part.numel(), 8) * 8, dtype=torch.uint8, device=x.device)
        whole[: part.numel()] = part
        words = whole.view(torch.int64)
        number = torch.arange(start // 8 + 1, start // 8 + 1 + words.numel(), device=x.device)
        total += _mix(words ^ number * STEP).sum()
    return total


def _mix(z: Tensor) -> Tensor:
    return _fold(_fold(_fold(z) * FIRST) * SECOND)


def _fold(z: Tensor) -> Tensor:
    return z ^ ((z >> 32) & LOW)


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a flat uint8 view of it."""
    return x.detach().view(-1).view(torch.uint8)


# ---- kernel ------------------------------------------------------------------------------------

_STEP, _FIRST, _SECOND, _LOW = tl.constexpr(STEP), tl.constexpr(FIRST), tl.constexpr(SECOND), tl.constexpr(LOW)


@triton.jit
def _mix_words(z):
    z = z ^ ((z >> 32) & _LOW)
    z = z * _FIRST
    z = z ^ ((z >> 32) & _LOW)
    z = z * _SECOND
    return z ^ ((z >> 32) & _LOW)


@triton.jit
def _mixed_block(data, i, inside, PIECES: tl.constexpr):
    """The mixed words `i` of `data`, zero where not `inside`; PIECES loads make a word, where it is not aligned."""
    if PIECES == 1:
        word = tl.load(data + i, mask=inside, other=0).to(tl.int64)
    else:
        piece = tl.arange(0, PIECES).to(tl.int64)[None, :]
        part = tl.load(data + i[:, None] * PIECES + piece, mask=inside[:, None], other=0).to(tl.int64)
        word = tl.sum(part << (piece * (64 // PIECES)), axis=1)  # unsigned and sharing no bit: a sum joins them
    return tl.where(inside, _mix_words(word ^ ((i + 1) * _STEP)), 0)


@triton.jit(do_not_specialize=["words", "tail_bytes"])
def _fingerprint_kernel(
    raw, data, out, words: tl.int64, tail_bytes: tl.int64, PIECES: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the mixed words to `out`. `raw` and `data` are one address: as bytes, and as the pieces of words."""
    words = words.to(tl.int64)  # the interpreter knows nothing of annotations
    lane = tl.arange(0, BLOCK).to(tl.int64)
    everywhere = tl.full((BLOCK,), 1, tl.int1)  # folds away, and with it what keeps loads from being 16 bytes wide
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    whole = words // BLOCK
    for block in range(tl.program_id(0).to(tl.int64), whole, tl.num_programs(0).to(tl.int64)):
        total += _mixed_block(data, block * BLOCK + lane, everywhere, PIECES)

    if tl.program_id(0) == 0:  # the words behind the last whole block, the bytes behind the last whole word, the length
        i = whole * BLOCK + lane
        total += _mixed_block(data, i, i < words, PIECES)
        at = tl.arange(0, 8).to(tl.int64)
        byte = tl.load(raw + words * 8 + at, mask=at < tail_bytes, other=0).to(tl.int64)
        last = _mix_words(tl.sum(byte << (at * 8), axis=0) ^ ((words + 1) * _STEP))
        length = _mix_words(words * 8 + tail_bytes)
        total += tl.where(lane == 0, length, 0) + tl.where((lane == 0) & (tail_bytes > 0), last, 0)
    tl.atomic_add(out, tl.sum(total, axis=0), sem="relaxed")


_PIECES = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.int64}  # by the bytes that the alignment allows


def launch(x: Tensor, config: Config | None = None) -> Tensor:
    """Run the kernel, on a GPU or interpreted, with the tuned configuration unless one is given."""
    data = as_bytes(x)
    config = config or tunable.config((data.numel(),), "uint8", x.device)
    words, tail_bytes = divmod(data.numel(), 8)
    piece_bytes = min(8, vector_bytes(data.data_ptr()))
    pieces = 8 // piece_bytes
    block = config["BLOCK"] // pieces
    out = torch.zeros(1, dtype=torch.int64, device=x.device)
    most = multiprocessors(x.device) * config["programs_per_sm"]  # each goes on to the blocks behind its first
    grid = (max(1, min(words // block, most)),)
    with launching_on(x):
        _fingerprint_kernel[grid](
            data,
            triton.reinterpret(data, _PIECES[piece_bytes]),
            out,
            words,
            tail_bytes,
            PIECES=pieces,
            BLOCK=block,
            num_warps=config["num_warps"],
        )
    return out


COMPILE = {
    "_mix_words": "inlined",
    "_mixed_block": "inlined",
    "_fingerprint_kernel": [
        {
            "args": {"raw": "*u8", "data": f"*{piece}", "out": "*i64", "words": "i64", "tail_bytes": "i64"},
            "constants": {"PIECES": pieces, "BLOCK": 2048 // pieces},
            "aligned": ["raw", "data", "out"] if pieces == 1 else ["out"],
            "options": {"num_warps": 8},
        }
        for piece, pieces in (("i64", 1), ("u32", 2), ("u16", 4), ("u8", 8))
    ],
}

# ---- tuning ------------------------------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: str, device: torch.device) -> tuple[Tensor]:
    return (torch.randint(256, shape, dtype=torch.uint8, device=device),)


def _check(inputs: tuple[Tensor], got: Tensor) -> None:
    want = reference(*inputs)
    assert torch.equal(got, want), f"fingerprint is {got.item()}; the reference says {want.item()}"


# One cell, far larger than any L2: a configuration of its own for each size would be a compilation in a steady loop.
tunable = register(
    Tunable(
        op="fingerprint",
        dims=("bytes",),
        default={"BLOCK": 2048, "num_warps": 8, "programs_per_sm": 4},
        space={"BLOCK": (1024, 2048, 4096), "num_warps": (4, 8), "programs_per_sm": (2, 4, 8, 16)},
        cells=(((256 * MiB,), "uint8"),),
        inputs=_inputs,
        launch=launch,
        check=_check,
    )
)

# ---- operator: dispatch, shape -------------------------------------------------------------------


@torch.library.custom_op("freight::fingerprint", mutates_args=(), device_types="cuda")
def fingerprint_op(x: Tensor) -> Tensor:
    """The registered operator: a contiguous tensor to one int64 on its device."""
    return launch(x)


fingerprint_op.register_kernel("cpu")(reference)


@fingerprint_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=x.device)


# ---- public function -----------------------------------------------------------------------------


def fingerprint(x: Tensor) -> Tensor:
    """The 64-bit fingerprint of the bytes of contiguous `x`: an int64 tensor of one element, on the device of `x`.

    Equal bytes have equal fingerprints on every device, whatever their dtype and shape. Nothing waits for the GPU
    until the value is looked at.

    >>> a = torch.arange(1000.0)
    >>> torch.equal(fingerprint(a), fingerprint(a.clone())), torch.equal(fingerprint(a), fingerprint(a + 1))
    (True, False)
    """
    if not x.is_contiguous():
        raise ArgumentError(
            f"fingerprint reads the bytes of contiguous memory; got shape {tuple(x.shape)} with strides {x.stride()}. "
            "Pass x.contiguous(), or the tensor that x is a view of."
        )
    return fingerprint_op(x.detach().resolve_conj().resolve_neg())
