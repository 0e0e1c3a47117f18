"""freight makes PyTorch training data-efficient on GPUs: it moves fewer bytes and hides the moves that remain.

This is the front door: every public name, and nothing else. Importing it touches no GPU and reads no environment.
"""

import importlib
from typing import TYPE_CHECKING, Any

from freight._config import config

if TYPE_CHECKING:
    from freight import errors, machine
    from freight.rows import UnifiedTensor, gather_rows, unified

__version__ = "0.1.0"
__all__ = ["UnifiedTensor", "__version__", "config", "errors", "gather_rows", "machine", "unified"]

_namespaces = ("errors", "machine")
_from_rooms = {"UnifiedTensor": "rows", "gather_rows": "rows", "unified": "rows"}


def __getattr__(name: str) -> Any:
    if name in _namespaces:
        return importlib.import_module(f"freight.{name}")
    if name in _from_rooms:
        return getattr(importlib.import_module(f"freight.{_from_rooms[name]}"), name)
    raise AttributeError(f"module 'freight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
