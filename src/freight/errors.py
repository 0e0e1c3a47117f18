"""Everything freight raises, in one tree.

    FreightError
    ├── ArgumentError          (ValueError)           an argument has an impossible value
    ├── ArgumentTypeError      (TypeError)            an argument has the wrong type or dtype
    ├── OutOfRangeError        (IndexError)           an index lies outside its table or block
    ├── UnsupportedError       (NotImplementedError)  the request is understood and not offered
    ├── ClosedError            (RuntimeError)         something was used after `close()`
    ├── ForkedError            (RuntimeError)         GPU memory or streams were used in a forked child
    ├── MissingError           (ImportError)          an optional package is needed and absent
    ├── RecordError            (ValueError)           a stored record or table cannot be read
    ├── HostMemoryError        (MemoryError, RuntimeError)  host memory: a budget, a limit or the machine is exhausted
    │   └── PinError                                  the driver refused to page-lock memory
    ├── OverlapError           (ValueError)           memory to register overlaps a registered range in part
    └── DiskError              (OSError)              the disk refused, with errno and file name
        ├── DiskFullError                             no room, found before anything was written
        ├── DirectIOError                             direct I/O was asked for and is not in force
        └── ChecksumError                             bytes read back are not the bytes written

Each class also is the builtin error that a PyTorch user would catch, so `except ValueError` and friends keep
working. `except freight.errors.FreightError` catches all of them.
"""

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ChecksumError",
    "ClosedError",
    "DirectIOError",
    "DiskError",
    "DiskFullError",
    "ForkedError",
    "FreightError",
    "HostMemoryError",
    "MissingError",
    "OutOfRangeError",
    "OverlapError",
    "PinError",
    "RecordError",
    "UnsupportedError",
]


class FreightError(Exception):
    """The root: anything that freight raises on purpose."""


class ArgumentError(FreightError, ValueError):
    """An argument has an impossible value."""


class ArgumentTypeError(FreightError, TypeError):
    """An argument has the wrong type or dtype."""


class OutOfRangeError(FreightError, IndexError):
    """An index lies outside its table or block."""


class UnsupportedError(FreightError, NotImplementedError):
    """The request is understood and not offered; the message says what to do instead."""


class ClosedError(FreightError, RuntimeError):
    """Something was used after `close()`."""


class ForkedError(FreightError, RuntimeError):
    """GPU memory or streams were used in a forked child, where CUDA does not work."""


class MissingError(FreightError, ImportError):
    """An optional package is needed and absent; the message names the extra that brings it."""


class RecordError(FreightError, ValueError):
    """A stored record or table cannot be read, or does not follow its schema."""


class HostMemoryError(FreightError, MemoryError, RuntimeError):
    """A budget, a limit or the machine's memory is exhausted; the message says what is left."""


class PinError(HostMemoryError):
    """The driver refused to page-lock memory."""


class OverlapError(FreightError, ValueError):
    """Memory to register overlaps a range that is registered already, in part."""


class DiskError(FreightError, OSError):
    """The disk refused; `errno` and `filename` are set as in any `OSError`."""


class DiskFullError(DiskError):
    """There is no room; raised when the space is reserved, before anything is written."""


class DirectIOError(DiskError):
    """Direct I/O was asked for and is not in force on this file system."""


class ChecksumError(DiskError):
    """Bytes read back are not the bytes that were written."""
