"""Arrays in files: read straight into place, whatever is odd or wrong with the file, and with one copy in memory."""

import errno
import io
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows_on_cpu import WHOLE, random_rows
from torch import Tensor

import freight
from freight import UnifiedTensor, memory
from freight._units import MiB
from freight.errors import ArgumentError, DiskError, FreightError, MissingError
from freight.kernels._tolerance import assert_same_bits
from freight.rows import _files

TYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16"]
EIGHT_BIT = [torch.float8_e4m3fn, torch.float8_e5m2]


def from_file(path: Path, name: str | None = None) -> UnifiedTensor:
    return UnifiedTensor.from_file(path, name, device="cpu")


def npy(path: Path, array: Any, version: tuple[int, int] = (1, 0)) -> Path:
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.asanyarray(array), version=version)
    return path


# ---- .npy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", TYPES)
def test_npy(dtype: str, version: tuple[int, int], tmp_path: Path) -> None:
    for shape in ((6, 4), (5,), (2, 3, 4), (0, 4), (4, 0), (1, 1, 1, 1)):
        array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        x = from_file(npy(tmp_path / "array.npy", array, version))
        assert x.is_unified
        assert x.numpy().dtype == array.dtype
        assert np.array_equal(x.numpy(), array)


def test_npy_as_numpy_saves_it(tmp_path: Path) -> None:
    for array in (np.eye(3)[:, ::2], np.asfortranarray(np.arange(4)), np.arange(6).reshape(2, 3)[::-1]):
        np.save(tmp_path / "array.npy", array)
        assert np.array_equal(from_file(tmp_path / "array.npy").numpy(), array)
    assert np.array_equal(UnifiedTensor.from_file(str(tmp_path / "array.npy"), device="cpu").numpy(), array)


def test_bytes_behind_the_array_are_let_be(tmp_path: Path) -> None:
    path = npy(tmp_path / "array.npy", np.arange(6.0).reshape(3, 2))
    with path.open("ab") as file:
        file.write(b"more")
    assert from_file(path).tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("threads", [1, 3])
def test_read_in_pieces_by_threads(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by a system that gives less than it is asked for."""
    array = np.random.default_rng(0).integers(0, 256, (1003, 7), np.uint8)
    path, read = npy(tmp_path / "array.npy", array), os.preadv
    seen: set[str] = set()

    def little(fd: int, buffers: Any, offset: int) -> int:
        seen.add(threading.current_thread().name)
        return read(fd, [buffers[0][:97]], offset)

    monkeypatch.setattr(_files, "_PIECE", 1000)
    monkeypatch.setattr(os, "preadv", little)
    with freight.config(disk_threads=threads):
        assert np.array_equal(from_file(path).numpy(), array)
    assert 1 <= len(seen) <= threads
    assert all(name.startswith("freight-read") for name in seen)


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "column-major": (
        lambda path: np.save(path, np.asfortranarray(np.eye(3))),
        "is column-major; freight reads rows: save it with numpy.ascontiguousarray",
    ),
    "a number": (lambda path: np.save(path, 5.0), "is a single number; freight reads rows"),
    "structured": (lambda path: np.save(path, np.zeros(2, [("a", "f4"), ("b", "i8")])), "for which torch has no dtype"),
    "objects": (lambda path: np.save(path, np.array([{}]), allow_pickle=True), "holds object, for which torch has no"),
    "text": (lambda path: np.save(path, np.array(["a"])), "for which torch has no dtype; convert the array first"),
    "the other way round": (lambda path: np.save(path, np.ones(2, ">f4")), "holds >f4, for which torch has no dtype"),
    "a later version": (lambda path: npy(path, np.eye(3), (3, 0)), r"version \(3, 0\); freight reads 1\.0 and 2\.0"),
    "another file": (lambda path: path.write_bytes(b"PK\x03\x04 and so on and on"), "is no .npy file: .*magic"),
    "nothing": (lambda path: path.write_bytes(b""), "is no .npy file"),
    "half a header": (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00\x76\x00{'descr"), "is no .npy file"),
    "less than nothing": (
        lambda path: path.write_bytes(header("{'descr': '<f4', 'fortran_order': False, 'shape': (-3, 2)}")),
        r"none negative; got \(-3, 2\)",
    ),
    "cut short": (
        lambda path: path.write_bytes(header("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2)}") + bytes(23)),
        r"is cut short: its header promises 24 B of torch.float32 of shape \(3, 2\), and 23 B are there\. Write",
    ),
    "far too much": (
        lambda path: path.write_bytes(header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30}, 2)}}")),
        "is cut short: its header promises",
    ),
}


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"


@pytest.mark.parametrize("name", STRANGE)
def test_strange_npy(name: str, tmp_path: Path, held_before: int) -> None:
    make, message = STRANGE[name]
    make(tmp_path / "array.npy")
    with pytest.raises(ArgumentError, match=message) as caught:
        from_file(tmp_path / "array.npy")
    if name != "less than nothing":
        assert str(tmp_path / "array.npy") in str(caught.value)
    assert memory.stats().held == held_before


def test_pickles_in_files_are_never_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "boom"),)

    np.save(tmp_path / "array.npy", np.array([Bomb()]), allow_pickle=True)
    with pytest.raises(ArgumentError):
        from_file(tmp_path / "array.npy")
    assert not (tmp_path / "boom").exists()


GOOD = header("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }    ")


@given(at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), keep=st.integers(0, len(GOOD) + 24))
@pytest.mark.filterwarnings("ignore:Reading `.npy` or `.npz` file required additional header parsing")
def test_a_corrupted_header_is_an_error_of_ours_or_an_array(
    at: int, byte: int, keep: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "corrupted.npy"
    before = memory.stats().held
    path.write_bytes((GOOD[:at] + bytes([byte]) + GOOD[at + 1 :] + bytes(24))[: max(keep, at + 1)])
    try:
        x = from_file(path)
    except FreightError:
        assert memory.stats().held == before
    else:
        assert x.nbytes <= 24


# ---- .safetensors --------------------------------------------------------------------------------------


def save_tensors(path: Path, **tensors: Tensor) -> Path:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors, of the extra `dev`")
    safetensors.save_file(tensors, path)
    return path


@pytest.mark.parametrize("dtype", [*WHOLE[:-2], *EIGHT_BIT], ids=str)
def test_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    for shape in ((6, 4), (5,), (2, 3, 4), (0, 4), (4, 0)):
        data = random_rows(torch.Size(shape).numel(), dtype=dtype).view(shape)
        x = from_file(save_tensors(tmp_path / "a.safetensors", rows=data, other=torch.ones(2)), "rows")
        assert x.is_unified
        assert_same_bits(x.host(), data)


def test_safetensors_by_name(tmp_path: Path) -> None:
    path = save_tensors(tmp_path / "a.safetensors", rows=torch.ones(3, 2), number=torch.tensor(1.0))
    assert from_file(path, "rows").sum() == 6
    with pytest.raises(ArgumentError, match="has the tensors number, rows; got name=None"):
        from_file(path)
    with pytest.raises(ArgumentError, match="has the tensors number, rows; got name='columns'"):
        from_file(path, "columns")
    with pytest.raises(ArgumentError, match=r"number in .* is a single number; freight reads rows"):
        from_file(path, "number")
    assert from_file(save_tensors(tmp_path / "one.safetensors", only=torch.ones(3))).tolist() == [1, 1, 1]


def test_safetensors_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(1003, 5)
    path = save_tensors(tmp_path / "a.safetensors", rows=data)
    for piece in (1, 20, 1000, 10**9):
        monkeypatch.setattr(_files, "_PIECE", piece)
        assert torch.equal(from_file(path).host(), data)


@pytest.mark.parametrize("content", [b"", b"junk", struct.pack("<Q", 10**9) + b"{}", struct.pack("<Q", 4) + b"{{{{"])
def test_corrupted_safetensors(content: bytes, tmp_path: Path, held_before: int) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors, of the extra `dev`")
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"a\.safetensors is no safetensors file: "):
        from_file(tmp_path / "a.safetensors")
    assert memory.stats().held == held_before


def test_safetensors_cut_short(tmp_path: Path) -> None:
    path = save_tensors(tmp_path / "a.safetensors", rows=torch.ones(30, 2))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ArgumentError, match="is no safetensors file"):
        from_file(path)


def test_safetensors_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingError, match=r"reading a\.safetensors needs safetensors .*pip install safetensors"):
        from_file(tmp_path / "a.safetensors")


# ---- files that cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_files_that_are_not_there(suffix: str, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors", reason="needs safetensors, of the extra `dev`")
    path = tmp_path / f"rows{suffix}"
    with pytest.raises(DiskError, match=r"the array cannot be read \(No such file or directory\)") as caught:
        from_file(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(path))
    path.mkdir()
    with pytest.raises(DiskError, match="cannot be read") as caught:
        from_file(path)
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("name", ["rows.npz", "rows.pt", "rows", "rows.csv"])
def test_other_kinds_of_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"is neither \.npy nor \.safetensors; load it and pass it to freight\.unified"
    ):
        from_file(tmp_path / name)


def test_a_name_for_what_has_none(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="holds one array without a name; got name='x'"):
        from_file(npy(tmp_path / "a.npy", np.eye(2)), "x")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_in_the_middle_leaves_nothing_held(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_before: int
) -> None:
    """Not even while the error is still looked at, as a notebook does."""
    path, read, left = npy(tmp_path / "a.npy", np.ones((1000, 100))), os.preadv, [5]
    descriptors = len(os.listdir("/proc/self/fd"))

    def break_down(fd: int, buffers: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise error(errno.EIO, "the disk broke")
        return read(fd, buffers, offset)

    monkeypatch.setattr(_files, "_PIECE", 4096)
    monkeypatch.setattr(os, "preadv", break_down)
    with freight.config(disk_threads=2), pytest.raises(DiskError if error is OSError else error) as caught:
        from_file(path)
    if isinstance(caught.value, DiskError):
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert caught.value.__traceback__ is not None
    assert memory.stats().held == held_before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_no_thread_reads_on_when_the_memory_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = npy(tmp_path / "a.npy", np.ones(10_000)), os.preadv
    slow, done = threading.Event(), threading.Event()

    def fail_beside_a_slow_one(fd: int, buffers: Any, offset: int) -> int:
        if offset < 40_000:
            slow.wait(60)
            raise OSError(errno.EIO, "the disk broke")
        slow.set()
        done.wait(0.3)  # a slow disk: nobody sets it before
        done.set()
        return read(fd, buffers, offset)

    monkeypatch.setattr(_files, "_PIECE", 40_000)
    monkeypatch.setattr(os, "preadv", fail_beside_a_slow_one)
    with freight.config(disk_threads=2), pytest.raises(DiskError):
        from_file(path)
    assert done.is_set()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = npy(tmp_path / "a.npy", np.ones((1000, 10)))

    def read() -> None:
        with _files.open_array(path) as array:
            os.truncate(path, 5000)
            array.read_into(torch.empty(array.shape, dtype=array.dtype))

    with pytest.raises(DiskError, match=r"the file ended .* early") as caught:
        read()
    assert caught.value.filename == str(path)


# ---- one copy in memory, and progress ------------------------------------------------------------------

MEASURE = """
import resource, sys
from pathlib import Path
import freight, torch
from freight.rows import _files

def of_status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

path, size = Path(sys.argv[1]), int(sys.argv[2])
freight.UnifiedTensor.empty((2, 2), device="cpu").sum()
before, private = of_status("VmRSS:"), of_status("RssAnon:")
"""
READ_NPY = """
room = 120 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (of_status("VmData:") + room,) * 2)  # of private memory, such as a copy
with freight.config(disk_threads=2):
    x = freight.UnifiedTensor.from_file(path, device="cpu")
assert x.nbytes == size and x.host()[-1].sum() == 3
grown = of_status("VmHWM:") - before
assert 0.9 < grown / size < 1.3, grown
"""
READ_SAFETENSORS = """
most = 0
def told(nbytes):
    global most
    most = max(most, of_status("RssAnon:") - private)
with _files.open_array(path) as array:
    x = freight.UnifiedTensor.empty(array.shape, array.dtype, device="cpu")
    array.read(x._plain, told)
assert x.nbytes == size and x.host()[-1].sum() == 3
assert 0 < most < 0.6 * size, most
"""


def sparse(path: Path, head: bytes, size: int) -> Path:
    """A file of zeros but for its head and the float32 at its end."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size - 4)
        file.seek(0, os.SEEK_END)
        file.write(struct.pack("<f", 3.0))
    return path


def run(code: str, path: Path, size: int) -> None:
    command = [sys.executable, "-c", MEASURE + code, str(path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_no_second_copy_of_npy(tmp_path: Path) -> None:
    """A process that may have less memory of its own than the array has reads it all the same."""
    size = 256 * MiB
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': (256, {size // 1024})}}"
    run(READ_NPY, sparse(tmp_path / "rows.npy", header(text), size), size)


def test_no_second_copy_of_safetensors(tmp_path: Path) -> None:
    """The library maps the file, whose pages are the cache's; of its own, the process has a piece at a time."""
    pytest.importorskip("safetensors", reason="needs safetensors, of the extra `dev`")
    size = 256 * MiB
    text = json.dumps({"rows": {"dtype": "F32", "shape": [256, size // 1024], "data_offsets": [0, size]}})
    head = struct.pack("<Q", len(text)) + text.encode()
    run(READ_SAFETENSORS, sparse(tmp_path / "rows.safetensors", head, size), size)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_terminal(terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(_files, "_WORTH_SHOWING", 100)
    path = npy(tmp_path / "rows.npy", np.ones((100, 10)))
    assert from_file(path).sum() == 1000
    assert ("reading rows.npy" in screen.getvalue()) == terminal == bool(screen.getvalue())
    shown = len(screen.getvalue())
    npy(path, np.ones(5))
    from_file(path)
    assert len(screen.getvalue()) == shown  # nothing for what is read at once
