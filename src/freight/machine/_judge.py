"""Judging a machine: each fact passes, is worth a warning, or fails, and what does not pass comes with a remedy.

`judge` is a function of facts alone: it measures nothing and looks at nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from freight._units import GiB, MiB, show_bytes
from freight.machine._facts import REACH_ROW, REACH_SHARE, Compute, Disk, Gpu, Host, Link, Machine, Reads, Software

PASS, WARN, FAIL = "pass", "warn", "fail"

_LANE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one PCIe lane, one way, by generation
_LINK_SHARE = 0.7  # of what the lanes carry; protocol alone costs some 12 %
_USUAL_SHARE = 0.7  # of what freight's defaults have for this GPU
_DUPLEX = 1.5  # both ways at once, of the better way alone
_SLOW_COPY_US = 50.0
_SLOW_DISK_GBS = 0.5
_LITTLE_LOCKABLE = 64 * MiB
_LITTLE_DISK = 10 * GiB
_OLDEST_TORCH = (2, 11)
_OLDEST_GPU = (8, 0)

_RAISE_LIMIT = (
    "Raise it: `ulimit -l unlimited` (for good: `memlock unlimited` in /etc/security/limits.conf), or run the "
    "container with `--ulimit memlock=-1`."
)
_OTHER_DISK = "Choose another directory with FREIGHT_DISK_DIR."


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: what was looked at, what was found, the verdict, and what to do about it."""

    group: str
    name: str
    verdict: str
    value: str
    remedy: str | None = None


def judge(machine: Machine, *, usual: Machine | None = None, cache_problem: str | None = None) -> list[Finding]:
    """The findings on `machine`, in the order in which they are read.

    `usual` is what freight's defaults have for this GPU, `cache_problem` why the cache directory cannot be written.

    >>> from freight.machine import Gpu, Machine, Software
    >>> machine = Machine(Software("3.11.7", "2.13.0"), gpu=Gpu("no NVIDIA driver answers"))
    >>> [(finding.name, finding.verdict) for finding in judge(machine) if finding.group == "GPU and link"]
    [('GPU', 'warn')]
    """
    gpu = machine.gpu.absent is None
    findings = [Finding("Software", *line) for line in _software(machine.software, machine.gpu)]
    findings += [Finding("GPU and link", *line) for line in _gpu(machine.gpu)]
    if gpu:
        findings += [Finding("GPU and link", *line) for line in _link(machine.link)]
        findings += [Finding("GPU and link", *line) for line in _reads(machine.reads, machine.link)]
        findings += [Finding("Compute", *line) for line in _compute(machine.compute, usual and usual.compute)]
    findings += [Finding("Host memory", *line) for line in _host(machine.host, gpu)]
    findings += [Finding("Disk", *line) for line in _disk(machine.disk)]
    findings.append(Finding("Disk", *_cache(cache_problem)))
    return findings


Line = tuple[str, str, str, str | None]  # name, verdict, value, remedy


def _ok(name: str, value: str) -> Line:
    return name, PASS, value, None


def _software(software: Software, gpu: Gpu) -> Iterator[Line]:
    yield _ok("Python", software.python)
    torch = tuple(int(part) for part in software.torch.split("+")[0].split(".")[:2] if part.isdigit())
    if torch < _OLDEST_TORCH:
        yield "torch", WARN, software.torch, "freight is made for torch 2.11 and later; upgrade it."
    else:
        yield _ok("torch", software.torch)
    if software.cuda is None and software.driver is not None:
        remedy = "There is an NVIDIA driver; install a build of torch with CUDA to use its GPU."
        yield "CUDA", WARN, "torch is a build without", remedy
    else:
        yield _ok("CUDA", f"{software.cuda}, as torch was built for" if software.cuda else "torch is a build without")
    if software.triton is None and gpu.absent is None:
        yield "Triton", FAIL, "not installed", "freight's kernels are written in it: `pip install triton`."
    else:
        yield _ok("Triton", software.triton or "not installed, and not needed without a GPU")
    if software.driver is not None:
        yield _ok("driver", software.driver)


def _gpu(gpu: Gpu) -> Iterator[Line]:
    if gpu.absent is not None:
        if gpu.blocked:
            remedy = "Restart the driver or the container (`nvidia-smi` tells more); driver and CUDA must fit together."
            yield "GPU", FAIL, gpu.absent, remedy
        else:
            yield "GPU", WARN, gpu.absent, "freight runs without one, slowly, by its reference implementation."
        return
    capability = gpu.capability or ()
    what = f"{gpu.name}, {gpu.sms} SMs, compute capability {'.'.join(map(str, capability))}"
    if capability < _OLDEST_GPU:
        yield "GPU", WARN, what, "freight's kernels are made for compute capability 8.0 and later and may be slow here."
    else:
        yield _ok("GPU", what)
    total, free = gpu.memory_bytes or 0, gpu.free_bytes or 0
    value = f"{show_bytes(free)} free of {show_bytes(total)}; L2 {show_bytes(gpu.l2_bytes or 0)}"
    if 2 * free < total:
        yield "GPU memory", WARN, value, "Something else uses this GPU: figures and training suffer. See `nvidia-smi`."
    else:
        yield _ok("GPU memory", value)


def _link(link: Link) -> Iterator[Line]:
    if link.absent is not None:
        yield (
            "copies",
            FAIL,
            f"not measured: {link.absent}",
            "Without page-locked memory nothing moves at speed. " + (_RAISE_LIMIT),
        )
        return
    generation, width = link.pcie_generation, link.pcie_width
    most = (link.pcie_most_generation or generation, link.pcie_most_width or width)
    if generation is None or width is None:
        yield _ok("PCIe", "the driver does not say")
    elif (generation, width) != most:
        remedy = "The link is slower than GPU and slot allow: check the slot, risers and firmware settings."
        yield "PCIe", WARN, f"generation {generation} x{width}, of generation {most[0]} x{most[1]}", remedy
    else:
        yield _ok("PCIe", f"generation {generation} x{width}")
    carried = _LANE_GBS.get(most[0] or 0, 0.0) * (most[1] or 0)
    for name, gbs in (("copy to the GPU", link.h2d_gbs or 0.0), ("copy from the GPU", link.d2h_gbs or 0.0)):
        value = f"{gbs:.4g} GB/s"
        if gbs < _LINK_SHARE * carried:
            remedy = (
                "Bind the process to the GPU's own NUMA node (`numactl`, `nvidia-smi topo -m`), and see that nothing "
                "else uses the link."
            )
            yield name, WARN, f"{value}, of {carried:.3g} that the link carries", remedy
        else:
            yield _ok(name, value)
    both, one = link.both_gbs or 0.0, max(link.h2d_gbs or 0.0, link.d2h_gbs or 0.0)
    if both < _DUPLEX * one:
        remedy = "Copies to and from the GPU slow each other down here; offloading hides less than elsewhere."
        yield "both ways at once", WARN, f"{both:.4g} GB/s together", remedy
    else:
        yield _ok("both ways at once", f"{both:.4g} GB/s together")
    latency = link.latency_us or 0.0
    if latency > _SLOW_COPY_US:
        yield (
            "small copy",
            WARN,
            f"{latency:.3g} µs",
            "The processor is slow to submit work: check its load and clocks.",
        )
    else:
        yield _ok("small copy", f"{latency:.3g} µs")


def _reads(reads: Reads, link: Link) -> Iterator[Line]:
    if reads.absent is not None:
        if link.absent is None:
            remedy = "Triton must be able to compile: it needs a C compiler and a cache directory that it can write."
            yield "reads in place", FAIL, f"not measured: {reads.absent}", remedy
        return
    sequential = reads.sequential_gbs or 0.0
    if sequential < _LINK_SHARE * (link.h2d_gbs or 0.0):
        remedy = "The GPU's own reads of host memory are far below its copies; close what else uses the GPU."
        yield "reads in place", WARN, f"{sequential:.4g} GB/s in order", remedy
    else:
        yield _ok("reads in place", f"{sequential:.4g} GB/s in order")
    for table in sorted({read.table_bytes for read in reads.random}):
        rates = [f"{show_bytes(read.row_bytes)}: {read.gbs:.3g}" for read in reads.random if read.table_bytes == table]
        yield _ok(f"random rows of {show_bytes(table)}", f"{', '.join(rates)} GB/s")
    yield _reach(reads, sequential)


def _reach(reads: Reads, sequential: float) -> Line:
    name, reach = "translation reach", reads.reach_bytes
    if reach is None:
        return _ok(name, f"not measured at rows of {REACH_ROW} bytes")
    smallest = min(read.table_bytes for read in reads.random)
    best = max((read.gbs for read in reads.random if read.table_bytes == smallest), default=0.0)
    if best < sequential / 2:
        remedy = "Even rows of a small table come slowly, however wide; close what else uses the GPU and probe again."
        return name, WARN, f"{best:.3g} GB/s at best from {show_bytes(smallest)}", remedy
    pages = reads.pages_per_second
    if pages is None:
        return _ok(name, f"beyond {show_bytes(reach)}: random rows stay within {REACH_SHARE:.0%} of the full rate")
    return _ok(
        name,
        f"{show_bytes(reach)}; from larger tables {pages / 1e6:.3g} million page look-ups a second are the limit, "
        "which is usual: wide rows, rows ordered by address and cached rows need fewer",
    )


def _compute(compute: Compute, usual: Compute | None) -> Iterator[Line]:
    if compute.absent is not None:
        yield "compute", WARN, f"not measured: {compute.absent}", "Free GPU memory and probe again with `--refresh`."
        return
    for name, field, unit in (
        ("fp32 matrix product", "fp32_tflops", "TFLOP/s"),
        ("tf32 matrix product", "tf32_tflops", "TFLOP/s"),
        ("bf16 matrix product", "bf16_tflops", "TFLOP/s"),
        ("GPU memory copy", "hbm_gbs", "GB/s read and written"),
    ):
        found, expected = getattr(compute, field) or 0.0, getattr(usual, field, None) or 0.0
        if found < _USUAL_SHARE * expected:
            remedy = "Others use the GPU, or its power or clocks are capped: see `nvidia-smi -q -d PERFORMANCE`."
            yield name, WARN, f"{found:.4g} {unit}, where this GPU usually has {expected:.4g}", remedy
        else:
            yield _ok(name, f"{found:.4g} {unit}")


def _host(host: Host, gpu: bool) -> Iterator[Line]:
    yield _ok("processor", f"{host.cpu}, {host.cores} usable cores")
    total, available = host.memory_bytes or 0, host.available_bytes or 0
    value = f"{show_bytes(available)} available of {show_bytes(total)}"
    if available < total / 10:
        yield "memory", WARN, value, "Little is left for tables and offloaded tensors; stop what else uses memory."
    else:
        yield _ok("memory", value)
    yield _lockable(host, gpu)
    if host.memcpy_gbs is None:
        yield "memory copy", WARN, f"not measured: {host.absent}", "Free some memory and probe again with `--refresh`."
    else:
        yield _ok("memory copy", f"{host.memcpy_gbs:.4g} GB/s, pageable, all threads")


def _lockable(host: Host, gpu: bool) -> Line:
    """The limit on locked memory. Drivers of today do not all heed it, so what was seen outweighs what is set."""
    name, limit = "lockable memory", host.lockable_bytes
    if limit is None:
        return _ok(name, "unlimited")
    what = f"lockable memory is {show_bytes(limit)}"
    if host.lock_exempt:
        return _ok(name, f"{show_bytes(limit)}, which does not bind this process (CAP_IPC_LOCK)")
    if limit >= (host.memory_bytes or 0) / 2:
        return _ok(name, show_bytes(limit))
    if host.limit_ignored:
        return name, WARN, f"{what}; this driver page-locked more, others refuse", _RAISE_LIMIT
    if gpu and limit <= _LITTLE_LOCKABLE:
        return name, FAIL, what, _RAISE_LIMIT
    return name, WARN, what, _RAISE_LIMIT


def _disk(disk: Disk) -> Iterator[Line]:
    place = f"{disk.directory} ({disk.name})" if disk.name else f"{disk.directory}"
    if disk.direct is None and disk.absent is not None:
        yield "directory", FAIL, f"{place}: {disk.absent}", _OTHER_DISK
        return
    if disk.kind not in (None, "disk"):
        where = {"memory": "memory, and no disk", "overlay": "a container's overlay", "network": "a network share"}
        yield "directory", WARN, f"{place} is {where.get(disk.kind, disk.kind)}", _OTHER_DISK
    else:
        yield _ok("directory", place)
    if disk.direct is False:
        yield "direct I/O", WARN, f"{disk.absent}", _OTHER_DISK
    else:
        yield _ok("direct I/O", "in force")
    if disk.free_bytes is not None and disk.free_bytes < _LITTLE_DISK:
        yield (
            "free",
            WARN,
            show_bytes(disk.free_bytes),
            f"Little is left for offloaded tensors; free some. {_OTHER_DISK}",
        )
    else:
        yield _ok("free", "unknown" if disk.free_bytes is None else show_bytes(disk.free_bytes))
    for way in ("write", "read"):
        if disk.rates:
            yield _disk_rate(disk, way)
    if disk.cufile is not None:
        through = {"direct": "works, from disk to GPU without the host", "compatible": "works, through host memory"}
        yield _ok("cuFile", through.get(disk.cufile, disk.cufile))
    else:
        yield _ok("cuFile", f"not in use: {disk.cufile_absent}; freight goes through host memory")


def _disk_rate(disk: Disk, way: str) -> Line:
    best = max(disk.rates, key=lambda rate: getattr(rate, f"{way}_gbs"))
    gbs = getattr(best, f"{way}_gbs")
    threads = f"{best.threads} thread{'s' * (best.threads > 1)}"
    value = f"{gbs:.3g} GB/s at best ({threads}, {show_bytes(best.block_bytes)} blocks)"
    if gbs < _SLOW_DISK_GBS:
        return way, WARN, value, f"Training would wait for this disk. {_OTHER_DISK}"
    return _ok(way, value)


def _cache(problem: str | None) -> Line:
    if problem is None:
        return _ok("cache", "writable")
    return "cache", WARN, f"what is measured is not kept: {problem}", "Set FREIGHT_CACHE_DIR to a directory of yours."
