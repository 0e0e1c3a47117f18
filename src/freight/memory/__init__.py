"""Where bytes live: page-locked host memory, a file on disk, and the streams that move bytes between the tiers.

allocate, register, attach   host memory as a block: new, the caller's own, or another process's
HostPool                     short-lived host buffers cut from slabs
DiskFile                     bytes on disk, by extents
CopyStreams                  copies between the GPU and host memory, beside the computation
stats                        what is held and locked now
"""

from freight.memory._devices import ModelDevice
from freight.memory._disk import Content, DiskFile, DiskStats, Extent
from freight.memory._host import HostBlock, allocate, attach, register
from freight.memory._pool import HostPool, PoolBlock, PoolStats
from freight.memory._stats import MemoryStats, stats
from freight.memory._streams import CopyStreams
from freight.memory._token import State, Token

__all__ = [
    "Content",
    "CopyStreams",
    "DiskFile",
    "DiskStats",
    "Extent",
    "HostBlock",
    "HostPool",
    "MemoryStats",
    "ModelDevice",
    "PoolBlock",
    "PoolStats",
    "State",
    "Token",
    "allocate",
    "attach",
    "register",
    "stats",
]
