"""Whether cuFile moves bytes between GPU memory and a directory's disk: a round trip, in a process of its own.

cuFile writes a log where it is started and may take its process down, so this file also is the little program that
tries it: `python _cufile.py LIBRARY FILE`. It uses nothing but the standard library and says `ok` or what failed.
"""

import ctypes
import mmap
import os
import re
import subprocess
import sys
import tempfile
from ctypes import byref, c_int, c_longlong, c_size_t, c_ubyte, c_void_p
from pathlib import Path

_SIZE = 2**20
_PATTERN = 0xA5
_SECONDS = 10


def check(directory: Path, *, gpu: bool) -> tuple[str | None, str | None]:
    """`"direct"` or `"compatible"`, or None and why not."""
    if not gpu:
        return None, "there is no GPU"
    library = _loaded_library()
    if library is None:
        return None, "torch has not loaded libcufile"
    try:
        with tempfile.TemporaryDirectory(prefix=".freight-", dir=directory, ignore_cleanup_errors=True) as place:
            command = [sys.executable, "-P", __file__, library, str(Path(place) / "file")]
            tried = subprocess.run(
                command, cwd=place, capture_output=True, text=True, timeout=_SECONDS, errors="replace", check=False
            )
    except subprocess.TimeoutExpired:
        return None, f"a round trip did not end within {_SECONDS} s"
    except OSError as error:
        return None, f"it could not be tried: {error}"
    said = tried.stdout.strip().splitlines()
    if tried.returncode or said[-1:] != ["ok"]:
        return None, said[-1] if said else f"the trial ended with status {tried.returncode}"
    return "direct" if os.path.exists("/proc/driver/nvidia-fs") else "compatible", None


def _loaded_library() -> str | None:
    """The cuFile library that torch brought into this process."""
    match = re.search(r"\s(/\S*libcufile\.so\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return match[1] if match else None


# ---- the little program ----------------------------------------------------------------------------


class _Descriptor(ctypes.Structure):
    """CUfileDescr_t: the kind of handle, the handle, and file system calls of one's own (none)."""

    _fields_ = (("type", c_int), ("handle", c_void_p), ("calls", c_void_p))


class _Error(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = (("code", c_int), ("cuda", c_int))


def _round_trip(library: str, path: str) -> str:
    cuda, cufile = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(library)
    context, memory = c_void_p(), c_void_p()
    for what, code in (
        ("cuInit", lambda: cuda.cuInit(0)),
        ("cuDevicePrimaryCtxRetain", lambda: cuda.cuDevicePrimaryCtxRetain(byref(context), 0)),
        ("cuCtxSetCurrent", lambda: cuda.cuCtxSetCurrent(context)),
        ("cuMemAlloc", lambda: cuda.cuMemAlloc_v2(byref(memory), c_size_t(_SIZE))),
        ("cuMemsetD8", lambda: cuda.cuMemsetD8_v2(memory, c_ubyte(_PATTERN), c_size_t(_SIZE))),
    ):
        if failed := code():
            return f"{what} failed with CUDA error {failed}"

    cufile.cuFileDriverOpen.restype = cufile.cuFileHandleRegister.restype = _Error
    for move in (cufile.cuFileWrite, cufile.cuFileRead):
        move.restype, move.argtypes = ctypes.c_ssize_t, [c_void_p, c_void_p, c_size_t, c_longlong, c_longlong]
    if failed := cufile.cuFileDriverOpen().code:
        return f"cuFileDriverOpen failed with error {failed}"
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    handle = c_void_p()
    if failed := cufile.cuFileHandleRegister(byref(handle), byref(_Descriptor(1, fd, None))).code:
        return f"cuFileHandleRegister failed with error {failed}"

    if (count := cufile.cuFileWrite(handle, memory, _SIZE, 0, 0)) != _SIZE:
        return f"cuFileWrite gave {count} for {_SIZE} bytes"
    with mmap.mmap(-1, _SIZE) as block:
        os.preadv(fd, [block], 0)
        if block[:] != bytes([_PATTERN]) * _SIZE:
            return "cuFileWrite left other bytes in the file than were in GPU memory"
    cuda.cuMemsetD8_v2(memory, c_ubyte(0), c_size_t(_SIZE))
    if (count := cufile.cuFileRead(handle, memory, _SIZE, 0, 0)) != _SIZE:
        return f"cuFileRead gave {count} for {_SIZE} bytes"
    back = (c_ubyte * _SIZE)()
    cuda.cuMemcpyDtoH_v2(back, memory, c_size_t(_SIZE))
    return "ok" if bytes(back) == bytes([_PATTERN]) * _SIZE else "cuFileRead gave other bytes than the file has"


if __name__ == "__main__":
    print(_round_trip(*sys.argv[1:]), flush=True)
    os._exit(0)  # nothing of cuFile's own clean-up may change the verdict
