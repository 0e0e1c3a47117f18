"""freight makes PyTorch training data-efficient on GPUs: it moves fewer bytes and hides the moves that remain.

This is the front door: every public name, and nothing else. Importing it touches no GPU and reads no environment.
"""

import importlib
from typing import TYPE_CHECKING, Any

from freight._config import config

if TYPE_CHECKING:
    from freight import errors, machine

__version__ = "0.1.0"
__all__ = ["__version__", "config", "errors", "machine"]

_namespaces = ("errors", "machine")


def __getattr__(name: str) -> Any:
    if name in _namespaces:
        return importlib.import_module(f"freight.{name}")
    raise AttributeError(f"module 'freight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
