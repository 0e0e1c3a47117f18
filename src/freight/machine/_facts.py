"""What was measured of one computer, as frozen dataclasses.

    Machine
    ├── Software   versions: Python, torch, Triton, CUDA, driver
    ├── Gpu        what the GPU is
    ├── Link       copies between host and GPU
    ├── Reads      the GPU's own reads of page-locked host memory; by table and row size in RandomRead
    ├── Compute    matrix products and GPU memory bandwidth
    ├── Host       processor, memory, how much of it can be locked
    └── Disk       direct reads and writes of one directory; by threads and block size in DiskRate

What was not measured is None, and `absent` of its part says why. Rates are in GB/s, 10**9 bytes a second; sizes are in
bytes.
"""

import dataclasses
from dataclasses import dataclass, field

from freight._units import KiB
from freight.machine import _json

SCHEMA = 1
PAGE_LIKE = 64 * KiB  # host pages behave so under a GPU's address translation
REACH_ROW = 256
REACH_SHARE = 0.8


@dataclass(frozen=True)
class Software:
    """Versions; `cuda` is the one that torch was built for, None in a build without."""

    python: str
    torch: str
    triton: str | None = None
    cuda: str | None = None
    driver: str | None = None


@dataclass(frozen=True)
class Gpu:
    """The GPU; `blocked` means that there is one, with a driver, and torch cannot use it."""

    absent: str | None = None
    blocked: bool = False
    name: str | None = None
    slug: str | None = None
    uuid: str | None = None
    capability: tuple[int, ...] | None = None
    sms: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True)
class Link:
    """Copies between page-locked host memory and the GPU by the copy engines; `both_gbs` is the sum of both ways."""

    absent: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_most_generation: int | None = None
    pcie_most_width: int | None = None
    h2d_gbs: float | None = None
    d2h_gbs: float | None = None
    both_gbs: float | None = None
    latency_us: float | None = None


@dataclass(frozen=True)
class RandomRead:
    """Useful bytes a second of random rows of `row_bytes` out of a table of `table_bytes`."""

    table_bytes: int
    row_bytes: int
    gbs: float


@dataclass(frozen=True)
class Reads:
    """Reads of page-locked host memory by the GPU's own cores, in place."""

    absent: str | None = None
    sequential_gbs: float | None = None
    random: tuple[RandomRead, ...] = ()

    @property
    def reach_bytes(self) -> int | None:
        """The translation reach: the largest table of which random 256-byte rows still come at 80 % of the full rate.

        The full rate is that of the smallest table measured. Beyond the reach, address translation is the limit.
        """
        rates = {read.table_bytes: read.gbs for read in self.random if read.row_bytes == REACH_ROW}
        if not rates:
            return None
        enough = REACH_SHARE * rates[min(rates)]
        reached = min(rates)
        for table in sorted(rates):
            if rates[table] < enough:
                break
            reached = table
        return reached

    @property
    def pages_per_second(self) -> float | None:
        """Host pages that the GPU can look up in a second, from the largest table; None where that is within reach.

        Rows far smaller than a page, drawn at random from a table past the reach, each need a look-up of their own.
        """
        reach = self.reach_bytes
        if reach is None:
            return None
        table = max(read.table_bytes for read in self.random)
        if table <= reach:
            return None
        narrow = [read for read in self.random if read.table_bytes == table and read.row_bytes < PAGE_LIKE]
        return max(read.gbs * 1e9 / read.row_bytes for read in narrow) if narrow else None


@dataclass(frozen=True)
class Compute:
    """Large matrix products on random data, and copies inside GPU memory (bytes read and written)."""

    absent: str | None = None
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    bf16_tflops: float | None = None
    hbm_gbs: float | None = None


@dataclass(frozen=True)
class Host:
    """The processor and its memory; `absent` says why `memcpy_gbs` was not measured.

    `lockable_bytes` is the limit on locked memory, None for none. `lock_exempt` means that this process may pass it,
    `limit_ignored` that the driver was seen to page-lock more than it.
    """

    absent: str | None = None
    cpu: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    available_bytes: int | None = None
    lockable_bytes: int | None = None
    lock_exempt: bool = False
    limit_ignored: bool = False
    memcpy_gbs: float | None = None


@dataclass(frozen=True)
class DiskRate:
    """Direct writes and reads by `threads` threads in blocks of `block_bytes`."""

    threads: int
    block_bytes: int
    write_gbs: float
    read_gbs: float


@dataclass(frozen=True)
class Disk:
    """The disk under `directory`; `direct` is whether direct I/O is in force, None where the directory is unusable.

    `cufile` is `"direct"` where cuFile moves bytes between this disk and the GPU without the host, `"compatible"`
    where it works through host memory, else None, and `cufile_absent` says why.
    """

    absent: str | None = None
    quick: bool = False
    directory: str | None = None
    kind: str | None = None
    name: str | None = None
    free_bytes: int | None = None
    direct: bool | None = None
    rates: tuple[DiskRate, ...] = ()
    cufile: str | None = None
    cufile_absent: str | None = None

    @property
    def write_gbs(self) -> float | None:
        """The best write rate."""
        return max((rate.write_gbs for rate in self.rates), default=None)

    @property
    def read_gbs(self) -> float | None:
        """The best read rate."""
        return max((rate.read_gbs for rate in self.rates), default=None)


@dataclass(frozen=True)
class Machine:
    """All facts of one computer; `source` is `"measured"` or, for the defaults that come with freight, `"shipped"`.

    >>> machine = Machine.from_json('{"schema": 1, "software": {"python": "3.11.7", "torch": "2.13.0"}}')
    >>> machine.software.torch, machine.link.h2d_gbs
    ('2.13.0', None)
    """

    software: Software
    source: str = "measured"
    quick: bool = False
    date: str | None = None
    seconds: float | None = None
    gpu: Gpu = field(default_factory=Gpu)
    link: Link = field(default_factory=Link)
    reads: Reads = field(default_factory=Reads)
    compute: Compute = field(default_factory=Compute)
    host: Host = field(default_factory=Host)
    disk: Disk = field(default_factory=Disk)

    @property
    def complete(self) -> bool:
        """Whether everything that this computer has was measured, the disk aside."""
        of_gpu = () if self.gpu.absent else (self.link.absent, self.reads.absent, self.compute.absent)
        return not any(of_gpu) and self.host.absent is None

    def json(self) -> str:
        """The facts as JSON text.

        >>> machine = Machine(Software("3.11.7", "2.13.0"))
        >>> Machine.from_json(machine.json()) == machine
        True
        """
        return _json.dump(dataclasses.asdict(self), SCHEMA)

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """The facts in JSON text; a RecordError names the field where it is not what `json()` writes.

        >>> Machine.from_json('{"schema": 1, "software": {"python": "3.11.7", "torch": 2}}')
        Traceback (most recent call last):
        freight.errors.RecordError: machine facts: software.torch must be text; got 2. Measure again: ...
        """
        return _json.load(cls, text, SCHEMA)


def short(value: float) -> float:
    """`value` with four digits: what lies below is noise."""
    return float(f"{value:.4g}")
