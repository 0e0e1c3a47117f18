"""What the GPU is, against a torch that has one; and every reason for which there may be none."""

from types import SimpleNamespace

import pytest
import torch

from freight._units import GiB, MiB
from freight.machine import Gpu, _gpu, _nvml

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    uuid="3f1c0a2e-0000-1111-2222-333344445555",
    major=9,
    minor=0,
    multi_processor_count=132,
    L2_cache_size=60 * MiB,
)

pytestmark = pytest.mark.usefixtures("alone")


def test_what_torch_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the current device, and of no other."""
    asked = []

    def tell(answer: object, device: int) -> object:
        asked.append(device)
        return answer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: tell(PROPERTIES, device))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: tell((100 * GiB, 140 * GiB), device))
    assert _gpu.facts() == Gpu(
        name="NVIDIA H200",
        slug="h200",
        uuid="GPU-3f1c0a2e-0000-1111-2222-333344445555",
        capability=(9, 0),
        sms=132,
        l2_bytes=60 * MiB,
        memory_bytes=140 * GiB,
        free_bytes=100 * GiB,
    )
    assert asked == [3, 3]


def broken_start() -> None:
    raise RuntimeError("CUDA driver initialization failed\nmore that nobody reads")


@pytest.mark.parametrize(
    ("cuda", "driver", "seen", "visible", "reason", "blocked"),
    [
        (None, None, None, None, "torch {torch} is a build without CUDA", False),
        (
            *(None, "580.95", 1, None),
            "torch {torch} is a build without CUDA, and the NVIDIA driver (580.95) sees 1 GPU",
            False,
        ),
        (None, "580.95", 0, None, "torch {torch} is a build without CUDA", False),
        ("13.0", None, None, None, "no NVIDIA driver answers", False),
        ("13.0", "580.95", 0, None, "the NVIDIA driver (580.95) sees no GPUs", False),
        ("13.0", "580.95", None, None, "the NVIDIA driver (580.95) sees no GPUs", False),
        (
            "13.0",
            "580.95",
            2,
            "",
            "the NVIDIA driver (580.95) sees 2 GPUs, and CUDA_VISIBLE_DEVICES='' hides them",
            False,
        ),
        (
            "13.0",
            "580.95",
            1,
            " -1",
            "the NVIDIA driver (580.95) sees 1 GPU, and CUDA_VISIBLE_DEVICES=' -1' hides them",
            False,
        ),
        *(
            (
                *("13.0", "580.95", 1, visible),
                "the NVIDIA driver (580.95) sees 1 GPU, and CUDA does not start: CUDA driver initialization failed",
                True,
            )
            for visible in (None, "0")
        ),
    ],
)
def test_why_there_is_none(
    cuda: str | None,
    driver: str | None,
    seen: int | None,
    visible: str | None,
    reason: str,
    blocked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", broken_start)
    monkeypatch.setattr(_nvml, "driver_version", lambda: driver)
    monkeypatch.setattr(_nvml, "gpu_count", lambda: seen)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _gpu.facts() == Gpu(reason.format(torch=torch.__version__), blocked=blocked)


def test_a_torch_that_gives_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(_nvml, "driver_version", lambda: "580.95")
    monkeypatch.setattr(_nvml, "gpu_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = _gpu.facts()
    assert found.blocked
    assert (found.absent or "").endswith("CUDA does not start: torch gives no reason")


def test_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    found = _gpu.facts()
    assert "was forked after CUDA had started" in (found.absent or "")
    assert not found.blocked
