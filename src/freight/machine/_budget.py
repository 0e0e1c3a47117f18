"""How much a probe measures: sizes, repetitions and seconds, in full or quick.

On an H200 with 16 cores and a disk of 3 GB/s the full probe takes some 12 s: 3 s to page-lock 8 GiB and give them
back, 1 s each for kernels to compile, copies, reads and matrix products, 6 s for the disk, which has a limit in
seconds. The quick one takes 2 s.
"""

from dataclasses import dataclass

from freight._units import GiB, KiB, MiB


@dataclass(frozen=True)
class Budget:
    """What one probe may spend; sizes shrink further where memory is short."""

    quick: bool
    table_bytes: tuple[int, ...]
    row_bytes: tuple[int, ...]
    ids: int  # most rows that one gather reads
    gather_bytes: int  # most bytes that one gather reads
    copy_bytes: int
    matmul_size: int
    hbm_bytes: int
    memcpy_bytes: int
    seconds: float  # for one figure, where it is cheap to repeat
    disk_bytes: int
    disk_threads: tuple[int, ...]
    disk_blocks: tuple[int, ...]
    disk_seconds: float  # at most, for one way (write or read) of one point
    cufile: bool


FULL = Budget(
    quick=False,
    table_bytes=(256 * MiB, 1 * GiB, 8 * GiB),
    row_bytes=(64, 128, 256, 512, 1 * KiB, 2 * KiB, 4 * KiB),
    ids=2**19,
    gather_bytes=256 * MiB,
    copy_bytes=256 * MiB,
    matmul_size=8192,
    hbm_bytes=2 * GiB,
    memcpy_bytes=256 * MiB,
    seconds=0.2,
    disk_bytes=1 * GiB,
    disk_threads=(1, 4, 8, 16),
    disk_blocks=(1 * MiB, 8 * MiB),
    disk_seconds=0.3,
    cufile=True,
)

QUICK = Budget(
    quick=True,
    table_bytes=(256 * MiB, 1 * GiB),
    row_bytes=(64, 256, 1 * KiB),
    ids=2**18,
    gather_bytes=64 * MiB,
    copy_bytes=128 * MiB,
    matmul_size=8192,
    hbm_bytes=1 * GiB,
    memcpy_bytes=64 * MiB,
    seconds=0.04,
    disk_bytes=256 * MiB,
    disk_threads=(1, 8),
    disk_blocks=(8 * MiB,),
    disk_seconds=0.1,
    cufile=False,
)
