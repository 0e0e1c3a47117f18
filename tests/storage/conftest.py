"""A place on the real disk for each test, and small file systems of its own where the test may mount."""

import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import freight
from freight import _cuda
from freight._direct import default_directory
from freight._units import MiB


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This lane is about the disk: it forks, which a GPU in the process would forbid; tests/gpu/memory has the GPU."""
    monkeypatch.setattr(_cuda, "available", lambda: False)
    monkeypatch.setattr(_cuda, "in_forked_child", lambda: False)


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory on the disk, where freight's files are made; nothing may be left in it."""
    directory = Path(tempfile.mkdtemp(prefix="freight-test-", dir=default_directory()))
    try:
        with freight.config(disk_dir=directory, direct_io=True, checksum=True):
            yield directory
        assert list(directory.iterdir()) == []
    finally:
        shutil.rmtree(directory, ignore_errors=True)


Mount = Callable[..., Path]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """`mount("ext4")`, `mount("tmpfs", "size=1m")`, `mount("overlay", upper=...)`: a directory that is all its own."""
    if os.geteuid() != 0:
        pytest.skip("needs the right to mount: this user is not root")
    with ExitStack() as unmounting:
        base = Path(unmounting.enter_context(tempfile.TemporaryDirectory(prefix="freight-mounts-")))

        def make(kind: str, options: str = "", *, upper: Path | None = None) -> Path:
            where = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=base))
            if kind == "ext4":
                options = f"loop,{options}".rstrip(",")
                source = image(base / f"{where.name}.img")
            else:
                source = kind
            if upper is not None:
                folders = {name: upper / name for name in ("lowerdir", "upperdir", "workdir")}
                for folder in folders.values():
                    folder.mkdir()
                options = ",".join(f"{name}={folder}" for name, folder in folders.items())
            arguments = ["-o", options] if options else []
            run("mount", "-t", kind, *arguments, str(source), str(where))
            unmounting.callback(subprocess.run, ["umount", "--lazy", str(where)], check=True, timeout=60)
            return where

        yield make


def image(path: Path) -> Path:
    """A file that holds an empty ext4 of 64 MiB."""
    with path.open("wb") as file:
        file.truncate(64 * MiB)
    run("mkfs.ext4", "-q", "-F", str(path))
    run("debugfs", "-w", "-R", "rmdir lost+found", str(path))
    return path


def run(*command: str) -> None:
    """Run a program of the system, or skip the test with what it said."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": path}, check=False
        )
    except OSError as error:
        pytest.skip(f"needs {command[0]}: {error.strerror}")
    if done.returncode:
        pytest.skip(f"needs the right to mount: {' '.join(command)} says {done.stderr.strip()}")


@pytest.fixture
def cached_pages() -> Callable[[int], int]:
    """How many pages of a file, by its descriptor, the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def count(fd: int) -> int:
        size = os.fstat(fd).st_size
        resident = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        with mmap.mmap(fd, size) as view:
            start = ctypes.c_ubyte.from_buffer(view)
            failed = libc.mincore(ctypes.addressof(start), size, resident)
            del start
        assert not failed
        return sum(page & 1 for page in resident)

    return count
