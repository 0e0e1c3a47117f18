"""What this computer can do: GPU, links, memory and disk, measured once and cached.

`probe()` measures; everything else in freight reads what it found.
"""

from freight.machine._facts import (
    Compute,
    Disk,
    DiskRate,
    Gpu,
    Host,
    Link,
    Machine,
    RandomRead,
    Reads,
    Software,
)
from freight.machine._probe import probe

__all__ = [
    "Compute",
    "Disk",
    "DiskRate",
    "Gpu",
    "Host",
    "Link",
    "Machine",
    "RandomRead",
    "Reads",
    "Software",
    "probe",
]
