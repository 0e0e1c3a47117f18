"""How exact float32 products must be: torch's own settings, old and new, read in one place.

torch has had four ways to say it: `set_float32_matmul_precision`, `allow_tf32`, the newer `fp32_precision` of an
operator, a backend or everything, and the variable TORCH_ALLOW_TF32_CUBLAS_OVERRIDE. All of them end in the operator's
`fp32_precision`, inherited where it is unset, and that is what torch's own kernels look at. Reading an old setting
after a new one was written raises; reading this one never does.

"medium" is bf16 products for those who offer them; freight's least exact float32 is tf32.
"""

from typing import Any, Literal

import torch

Float32 = Literal["ieee", "tf32"]

_backends: Any = torch.backends  # as types, these settings do not exist


def float32_matmul(device: torch.device | str | None = None) -> Float32:
    """Whether float32 matrix products on `device` (a GPU unless given) may round their operands to tf32.

    >>> float32_matmul()
    'ieee'
    """
    return _least(_backends.mkldnn.matmul.fp32_precision if _is_cpu(device) else _backends.cuda.matmul.fp32_precision)


def float32_conv(device: torch.device | str | None = None) -> Float32:
    """Whether float32 convolutions on `device` (a GPU unless given) may round their operands to tf32, torch's default.

    >>> float32_conv(), float32_conv("cpu")
    ('tf32', 'ieee')
    """
    return _least(_backends.mkldnn.conv.fp32_precision if _is_cpu(device) else _backends.cudnn.conv.fp32_precision)


def _is_cpu(device: torch.device | str | None) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _least(precision: str) -> Float32:
    return "tf32" if precision in ("tf32", "bf16") else "ieee"  # "none": nothing was set, which torch takes as ieee
