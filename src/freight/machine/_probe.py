"""`probe()`: measure what is not known yet, keep it, and give it with what can be read afresh."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from freight import _cuda, _direct
from freight.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from freight.machine import _budget, _cache, _compute, _disk, _gpu, _host, _known, _link, _nvml, _pinned, _tables
from freight.machine._budget import Budget
from freight.machine._cache import Entry, Identity, log
from freight.machine._facts import Compute, Disk, Host, Link, Machine, Reads, Software

Part = TypeVar("Part", Link, Reads, Compute, Host)


def probe(*, quick: bool = False, refresh: bool = False, directory: str | os.PathLike[str] | None = None) -> Machine:
    """Measure this computer, once, and return the facts; later calls and processes read them from the cache.

    `quick` measures fewer sizes, in under 3 s instead of some 12. `refresh` measures again. `directory` is the one
    whose disk is measured, by default the one that freight would use. A figure that cannot be had is None, and
    `absent` of its part says why.

    >>> import freight
    >>> machine = freight.machine.probe(quick=True)
    >>> machine.host.cores >= 1
    True
    """
    where = _place(directory)
    _require_quiet()
    budget = _budget.QUICK if quick else _budget.FULL
    now = facts()
    identity = Identity.of(now.software, now.gpu, now.host)
    stored = _cache.load(identity)
    usable = None if refresh else stored

    machine = usable.machine if usable and usable.machine.complete and (quick or not usable.machine.quick) else None
    disk = usable.disk(where) if usable and where.is_dir() else None  # what was there may have been unmounted
    disk = None if disk and disk.quick and not quick else disk
    if machine is None or disk is None:
        machine = machine or _measure(now, budget)
        disk = disk or _measure_disk(where, budget, now)
        machine = dataclasses.replace(machine, disk=disk)
        _cache.store((stored or Entry(identity, machine)).having(machine))
        _known.forget()
    return afresh(dataclasses.replace(machine, disk=disk), now)


def facts() -> Machine:
    """What can be read without measuring; starts the CUDA context where there is a GPU."""
    return Machine(_software(), gpu=_gpu.facts(), host=_host.facts())


def afresh(machine: Machine, now: Machine) -> Machine:
    """`machine` with what changes from hour to hour as it is `now`."""
    measured = machine.host
    return dataclasses.replace(
        machine,
        software=now.software,
        gpu=now.gpu,
        host=dataclasses.replace(
            now.host,
            absent=measured.absent,
            limit_ignored=measured.limit_ignored,
            memcpy_gbs=measured.memcpy_gbs,
        ),
        disk=dataclasses.replace(machine.disk, free_bytes=_disk.free_bytes(machine.disk.directory)),
    )


def _place(directory: str | os.PathLike[str] | None) -> Path:
    if directory is None:
        return Path(os.path.abspath(_direct.default_directory()))
    if not isinstance(directory, str | os.PathLike):
        raise ArgumentTypeError(f"directory must be a path; got {directory!r}.")
    if not str(directory) or "\0" in str(directory):
        raise ArgumentError(f"directory must name a directory; got {directory!r}.")
    return Path(os.path.abspath(os.path.expanduser(directory)))


def _require_quiet() -> None:
    if _cuda.in_forked_child():
        _cuda.require("freight.machine.probe()")
    if _cuda.available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("freight.machine.probe() measures, which a CUDA graph cannot capture; call it before.")


def _measure(now: Machine, budget: Budget) -> Machine:
    start = time.perf_counter()
    host = _attempt(now.host, lambda: dataclasses.replace(now.host, memcpy_gbs=_memcpy(now.host, budget)))
    if now.gpu.absent:
        why = f"there is no GPU: {now.gpu.absent}"
        link, reads, compute = Link(absent=why), Reads(absent=why), Compute(absent=why)
    else:
        with _undisturbed():
            compute = _attempt(Compute(), lambda: _compute.measure(now.gpu.free_bytes or 0, budget))
            host, link, reads = _measure_host_memory(host, now, budget)
    return Machine(
        software=now.software,
        quick=budget.quick,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - start, 2),
        gpu=now.gpu,
        link=link,
        reads=reads,
        compute=compute,
        host=host,
    )


def _memcpy(host: Host, budget: Budget) -> float:
    return _host.memcpy_gbs(host.available_bytes or 0, budget)


def _measure_host_memory(host: Host, now: Machine, budget: Budget) -> tuple[Host, Link, Reads]:
    """What needs page-locked memory, all of it on one block."""
    tables = _pinned.affordable(budget.table_bytes, now.host.available_bytes or 0)
    nbytes, free = max(tables, default=0), now.gpu.free_bytes or 0
    try:
        with _pinned.page_locked(nbytes) as address:
            limit = host.lockable_bytes
            host = dataclasses.replace(
                host, limit_ignored=limit is not None and nbytes > limit and not host.lock_exempt
            )
            link = _attempt(Link(), lambda: _link.measure(address, nbytes, now.gpu, budget))
            reads = _attempt(Reads(), lambda: _tables.measure(address, tables, free, budget))
            return host, link, reads
    except (MemoryError, RuntimeError) as error:
        why = _reason(error)
        log.warning("no memory could be page-locked: %s", why)
        return host, Link(absent=why), Reads(absent=why)


def _measure_disk(directory: Path, budget: Budget, now: Machine) -> Disk:
    disk = _disk.measure(directory, budget, gpu=now.gpu.absent is None)
    if disk.absent:
        log.warning("the disk under %s was not measured: %s", directory, disk.absent)
    return disk


def _attempt(part: Part, measure: Callable[[], Part]) -> Part:
    """What `measure` finds; or `part` with the reason: one figure that cannot be had must not cost the others."""
    try:
        return measure()
    except Exception as error:
        log.warning("%s was not measured: %s", type(part).__name__.lower(), _reason(error))
        return dataclasses.replace(part, absent=_reason(error))


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A GPU at rest and plain arithmetic; afterwards settings are as they were and memory is free.

    On the current stream: for any other, torch would set a workspace for matrix products aside and keep it.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.cuda.synchronize()
    try:
        torch.use_deterministic_algorithms(False)
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        with contextlib.suppress(RuntimeError):  # an error of the measurement itself is on its way already
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _software() -> Software:
    return Software(
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        cuda=torch.version.cuda,
        driver=_nvml.driver_version(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
