"""What the driver's library is asked, against a library that keeps its side of the interface, and without any."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from freight.machine import _nvml
from freight.machine._nvml import Pcie

pytestmark = pytest.mark.usefixtures("alone")

NOTHING = Pcie(None, None, None, None)
UUID = "GPU-3f1c"


class Library:
    """As much of libnvidia-ml as is asked here; pointers are written through, and every session is counted."""

    def __init__(self, **answers: int) -> None:
        self.answers = answers
        self.sessions = 0
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        if self.answers.get("init", 0):
            return self.answers["init"]
        self.sessions += 1
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: ctypes.c_uint) -> int:  # noqa: N802
        assert self.open
        assert size.value == len(text)
        text.value = b"580.95.05"
        return self.answers.get("version", 0)

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        assert self.open
        count._obj.value = 8
        return self.answers.get("count", 0)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:  # noqa: N802
        assert self.open
        if uuid != UUID.encode():
            return 6  # not found
        device._obj.value = 0xBEEF
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: ctypes.c_void_p, millijoules: Any) -> int:  # noqa: N802
        assert self.open
        assert device.value == 0xBEEF
        assert isinstance(millijoules._obj, ctypes.c_ulonglong)
        millijoules._obj.value = 2**40
        return self.answers.get("energy", 0)

    def __getattr__(self, name: str) -> Callable[[Any, Any], int]:
        field = {
            "nvmlDeviceGetCurrPcieLinkGeneration": "generation",
            "nvmlDeviceGetCurrPcieLinkWidth": "width",
            "nvmlDeviceGetMaxPcieLinkGeneration": "most_generation",
            "nvmlDeviceGetMaxPcieLinkWidth": "most_width",
        }[name]

        def ask(device: ctypes.c_void_p, value: Any) -> int:
            assert self.open
            assert device.value == 0xBEEF
            if field not in self.answers:
                return 3  # not supported
            value._obj.value = self.answers[field]
            return 0

        return ask


Driver = Callable[..., Library]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    def install(**answers: int) -> Library:
        library = Library(**answers)
        monkeypatch.setattr(ctypes, "CDLL", {"libnvidia-ml.so.1": library}.__getitem__)
        return library

    return install


def test_a_driver_answers(driver: Driver) -> None:
    library = driver(generation=4, width=8, most_generation=5, most_width=16)
    assert _nvml.driver_version() == "580.95.05"
    assert _nvml.gpu_count() == 8
    assert _nvml.pcie(UUID) == Pcie(4, 8, 5, 16)
    assert _nvml.energy_joules(UUID) == 2**40 / 1000
    assert (library.sessions, library.open) == (4, 0)


def test_the_version_is_asked_once(driver: Driver) -> None:
    library = driver()
    assert _nvml.driver_version() == _nvml.driver_version()
    assert library.sessions == 1


def test_what_a_driver_does_not_say_is_none(driver: Driver) -> None:
    library = driver(version=3, count=999, generation=5, width=0, energy=3)
    assert _nvml.driver_version() is None
    assert _nvml.gpu_count() is None
    assert _nvml.pcie(UUID) == Pcie(5, None, None, None)
    assert _nvml.pcie("GPU-other") == _nvml.pcie("") == NOTHING
    assert _nvml.energy_joules(UUID) is _nvml.energy_joules("GPU-other") is None
    assert library.open == 0


def test_a_driver_that_does_not_start(driver: Driver) -> None:
    library = driver(init=9)
    assert (_nvml.driver_version(), _nvml.gpu_count(), _nvml.pcie(UUID)) == (None, None, NOTHING)
    assert _nvml.energy_joules(UUID) is None
    assert library.open == 0


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert (_nvml.driver_version(), _nvml.gpu_count(), _nvml.pcie(UUID)) == (None, None, NOTHING)
    assert _nvml.energy_joules(UUID) is None
