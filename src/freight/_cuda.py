"""As much of the CUDA runtime as freight needs beside torch: page-locking host memory, and seeing it from the GPU.

Everything goes through torch's own binding of the runtime, so there is one runtime and one context in the process.
No function here starts a context unless it says so.
"""

import contextlib
import os
from typing import Any

import torch
from torch import Tensor

from freight.errors import ArgumentError, ForkedError, OverlapError, PinError, UnsupportedError

_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


def available() -> bool:
    """Whether this process can use a GPU: there is one, and this is no forked child of a process that used it."""
    return torch.cuda.is_available() and not in_forked_child()


def in_forked_child() -> bool:
    """Whether CUDA was started in a parent process and then forked, after which it cannot work here."""
    return torch.cuda._is_in_bad_fork()


def refuse_fork(what: str) -> None:
    """Raise in a forked child of a process that used CUDA; `what` names the thing that needs it."""
    if in_forked_child():
        raise ForkedError(
            f"{what} needs CUDA, which does not work in process {os.getpid()}: it was forked after CUDA had started. "
            "Start workers with the 'spawn' method, or keep GPU work in the parent."
        )


def require(what: str) -> None:
    """Raise unless this process can use a GPU; `what` names the thing that needs it."""
    refuse_fork(what)
    if not torch.cuda.is_available():
        raise UnsupportedError(f"{what} needs a GPU and torch sees none; `freight doctor` says why.")


def register(address: int, nbytes: int) -> None:
    """Page-lock `nbytes` at `address` for this process's GPUs (starts the CUDA context).

    One call for one range, however large: a copy that spans two registrations is refused by the runtime, and on the
    machines measured one call is as fast as several in parallel.
    """
    require("page-locking memory")
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("memory cannot be page-locked while a CUDA graph is captured; allocate it before.")
    torch.cuda.init()
    try:
        with torch.cuda.device(_home()):
            torch.cuda.current_stream()  # the context must exist before memory is registered with it
            code = int(_runtime().cudaHostRegister(address, nbytes, 0))
    except BaseException:  # Ctrl-C during the call is raised when it has returned, with the memory locked
        unregister(address)
        raise
    if code == 0:
        return
    _forget_last_error()
    if code == _ALREADY_REGISTERED:
        raise OverlapError(
            f"{nbytes} bytes at {address:#x} are page-locked already, at least in part, and not by freight. "
            "Unpin them first, or pass memory that nobody has pinned."
        )
    raise PinError(f"cudaHostRegister refused {nbytes} bytes at {address:#x}: error {code}, {_error_text(code)}")


def unregister(address: int) -> int:
    """Release what `register` locked, once the GPU has done all it was given; the runtime's error code, 0 where all
    went well.

    The wait is for kernels and copies that still use the memory: the runtime promises none. Never raises: it is called
    from finalizers, some of them after the context has gone.
    """
    if in_forked_child():
        return 0
    try:
        for device in _devices_in_use():
            with contextlib.suppress(RuntimeError):  # an error of that work belongs to whoever waits for its result
                torch.cuda.synchronize(device)
        with torch.cuda.device(_home()):
            code = int(_runtime().cudaHostUnregister(address))
    except RuntimeError:  # the context is gone: so is the registration
        return -1
    if code:
        _forget_last_error()
    return code


def alias(address: int, nbytes: int, owner: object, device: torch.device | int | str | None = None) -> Tensor:
    """Page-locked host memory seen as a uint8 tensor on the GPU: same bytes, no copy; `owner` lives as long as it."""
    require("a GPU view of host memory")
    where = compute_device(device)
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=where)
    with torch.cuda.device(where):
        return torch.as_tensor(_ArrayInterface(address, nbytes, owner), device=where)


def compute_device(device: torch.device | int | str | None = None) -> torch.device:
    """`device` with its index filled in; None and `"cuda"` are the current device."""
    asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if asked.type != "cuda":
        raise ArgumentError(f"the device must be a GPU, such as 'cuda' or 'cuda:0'; got '{asked}'.")
    return torch.device("cuda", torch.cuda.current_device()) if asked.index is None else asked


class _ArrayInterface:
    """What torch asks of a foreign CUDA array."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _devices_in_use() -> list[int]:
    """The GPUs on which this process has a context."""
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return [device for device in range(torch.cuda.device_count()) if has_context(device)]


def _home() -> int:
    """The current device, or one in use where that is another: a thread's device is the first until it is told.

    A context on a device that the process does not use would take some of its memory.
    """
    current, in_use = torch.cuda.current_device(), _devices_in_use()
    return in_use[0] if in_use and current not in in_use else current


def _runtime() -> Any:
    return torch.cuda.cudart()


def _error_text(code: int) -> str:
    runtime = _runtime()
    return runtime.cudaGetErrorString(runtime.cudaError(code))


def _forget_last_error() -> None:
    """Clear the runtime's last error, which torch would otherwise raise out of the next kernel launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=torch.device("cuda", _home()))
