"""Every way that torch has to say how exact float32 products are, alone and mixed, is understood."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from freight.kernels._precision import float32_conv, float32_matmul

BACKENDS = torch.backends


def _state() -> list[str]:
    places = (BACKENDS, BACKENDS.cudnn, BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.mkldnn.matmul)
    return [place.fp32_precision for place in (*places, BACKENDS.mkldnn.conv)] + [torch.get_float32_matmul_precision()]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = _state()
    yield
    BACKENDS.fp32_precision = "none"
    BACKENDS.cudnn.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cuda.matmul.fp32_precision = "none"
    BACKENDS.mkldnn.matmul.fp32_precision = "none"
    BACKENDS.mkldnn.conv.fp32_precision = "none"
    BACKENDS.cudnn.allow_tf32 = True
    assert _state() == before


def _set(place: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(place, name, value)


HIGH = lambda: torch.set_float32_matmul_precision("high")  # noqa: E731
HIGHEST = lambda: torch.set_float32_matmul_precision("highest")  # noqa: E731
MEDIUM = lambda: torch.set_float32_matmul_precision("medium")  # noqa: E731
ALLOW, FORBID = (_set(BACKENDS.cuda.matmul, "allow_tf32", value) for value in (True, False))
CUDNN_FORBID = _set(BACKENDS.cudnn, "allow_tf32", False)


def _new(place: object, value: str) -> Callable[[], None]:
    return _set(place, "fp32_precision", value)


@pytest.mark.parametrize(
    ("steps", "matmul", "conv"),
    [
        ([], "ieee", "tf32"),
        ([HIGH], "tf32", "tf32"),
        ([MEDIUM], "tf32", "tf32"),
        ([MEDIUM, HIGHEST], "ieee", "tf32"),
        ([ALLOW], "tf32", "tf32"),
        ([ALLOW, FORBID], "ieee", "tf32"),
        ([CUDNN_FORBID], "ieee", "ieee"),
        ([_new(BACKENDS.cuda.matmul, "tf32")], "tf32", "tf32"),
        ([_new(BACKENDS.cuda.matmul, "ieee")], "ieee", "tf32"),
        ([_new(BACKENDS.cudnn.conv, "ieee")], "ieee", "ieee"),
        ([_new(BACKENDS.cudnn, "tf32")], "tf32", "tf32"),
        ([_new(BACKENDS.cudnn, "ieee")], "ieee", "ieee"),
        ([_new(BACKENDS, "tf32")], "tf32", "tf32"),
        ([_new(BACKENDS, "ieee")], "ieee", "ieee"),
        ([_new(BACKENDS, "bf16")], "ieee", "ieee"),  # CUDA has no bf16 products, and torch computes in full
        ([_new(BACKENDS, "tf32"), _new(BACKENDS.cuda.matmul, "ieee")], "ieee", "tf32"),
        # old and new mixed: torch refuses to read the old setting after these
        ([HIGH, _new(BACKENDS.cuda.matmul, "ieee")], "ieee", "tf32"),
        ([HIGHEST, _new(BACKENDS.cuda.matmul, "tf32")], "tf32", "tf32"),
        ([_new(BACKENDS.cudnn.conv, "ieee"), ALLOW], "tf32", "ieee"),
        ([_new(BACKENDS, "tf32"), HIGHEST], "ieee", "tf32"),
    ],
)
def test_on_a_gpu(steps: list[Callable[[], None]], matmul: str, conv: str) -> None:
    for step in steps:
        step()
    assert (float32_matmul(), float32_conv()) == (matmul, conv)
    assert (float32_matmul("cuda"), float32_conv(torch.device("cuda", 0))) == (matmul, conv)


@pytest.mark.parametrize(
    ("steps", "matmul", "conv"),
    [
        ([], "ieee", "ieee"),
        ([HIGH], "tf32", "ieee"),
        ([MEDIUM], "tf32", "ieee"),
        ([ALLOW], "ieee", "ieee"),
        ([_new(BACKENDS.mkldnn.conv, "bf16")], "ieee", "tf32"),
        ([_new(BACKENDS.mkldnn.matmul, "tf32")], "tf32", "ieee"),
        ([_new(BACKENDS, "tf32")], "tf32", "tf32"),
    ],
)
def test_on_a_cpu(steps: list[Callable[[], None]], matmul: str, conv: str) -> None:
    for step in steps:
        step()
    assert (float32_matmul("cpu"), float32_conv(torch.device("cpu"))) == (matmul, conv)


def test_the_mixtures_are_such_that_the_old_settings_cannot_be_read() -> None:
    """Why reading `allow_tf32` would not do; once torch mends it, the mixtures above lose their point."""
    _new(BACKENDS.cuda.matmul, "tf32")()
    with pytest.raises(RuntimeError, match="legacy"):
        _ = BACKENDS.cuda.matmul.allow_tf32


def test_environment_variable() -> None:
    code = "from freight.kernels._precision import float32_matmul; print(float32_matmul())"
    environment = {
        **os.environ,
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tf32"
