"""What the GPU is, or why there is none that torch can use."""

import os

import torch

from freight import _cuda
from freight._gpuname import slug
from freight.machine import _nvml
from freight.machine._facts import Gpu


def facts() -> Gpu:
    """The current device, which starts its CUDA context; without a GPU the reason."""
    if not _cuda.available():
        return _why_none()
    device = torch.cuda.current_device()
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(
        name=found.name,
        slug=slug(found.name),
        uuid=f"GPU-{found.uuid}",
        capability=(found.major, found.minor),
        sms=found.multi_processor_count,
        l2_bytes=found.L2_cache_size,
        memory_bytes=total,
        free_bytes=free,
    )


def _why_none() -> Gpu:
    if _cuda.in_forked_child():
        return Gpu("this process was forked after CUDA had started, and CUDA does not work in it")
    driver, seen = _nvml.driver_version(), _nvml.gpu_count()
    there = f"the NVIDIA driver ({driver}) sees {seen or 'no'} GPU{'s' * (seen != 1)}"
    if torch.version.cuda is None:
        return Gpu(f"torch {torch.__version__} is a build without CUDA" + (f", and {there}" if seen else ""))
    if driver is None:
        return Gpu("no NVIDIA driver answers")
    if not seen:
        return Gpu(there)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return Gpu(f"{there}, and CUDA_VISIBLE_DEVICES={hidden!r} hides them")
    return Gpu(f"{there}, and CUDA does not start: {_cuda_error()}", blocked=True)


def _cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0]
    return "torch gives no reason"
