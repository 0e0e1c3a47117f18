"""What only the NVIDIA driver can say: its version, the GPUs it sees, the state of the PCIe link.

Its library comes with the driver and is asked through ctypes, so that no package is needed and no context is started.
Where there is no driver, or it does not answer, everything here is None.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Pcie:
    """The link as it is now, and the most that GPU and slot can do together."""

    generation: int | None
    width: int | None
    most_generation: int | None
    most_width: int | None


@functools.cache
def driver_version() -> str | None:
    """The driver's version, such as `"580.95.05"`; None without a driver."""
    with _session() as library:
        if library is None:
            return None
        text = ctypes.create_string_buffer(96)
        failed = library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        return None if failed else text.value.decode(errors="replace")


def gpu_count() -> int | None:
    """GPUs that the driver sees, whatever torch makes of them; None without a driver."""
    with _session() as library:
        if library is None:
            return None
        count = ctypes.c_uint()
        return None if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value


def pcie(uuid: str) -> Pcie:
    """The PCIe link of the GPU with `uuid`; an idle link may be at a lower generation than under load."""
    with _session() as library:
        device = ctypes.c_void_p()
        if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
            return Pcie(None, None, None, None)

        def ask(function: str) -> int | None:
            value = ctypes.c_uint()
            failed = getattr(library, function)(device, ctypes.byref(value))
            return None if failed or not value.value else value.value

        return Pcie(
            ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            ask("nvmlDeviceGetCurrPcieLinkWidth"),
            ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            ask("nvmlDeviceGetMaxPcieLinkWidth"),
        )


def energy_joules(uuid: str) -> float | None:
    """What the GPU with `uuid` has used since its driver was loaded; None where it does not count."""
    with _session() as library:
        device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
        if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
            return None
        failed = library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1e3


@contextlib.contextmanager
def _session() -> Iterator[ctypes.CDLL | None]:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        library = None
    if library is None or library.nvmlInit_v2():
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()
