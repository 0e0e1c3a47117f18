from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _poison(poisoned_memory: None) -> None:
    """What a kernel leaves unwritten is NaN or the largest integer, never a lucky zero."""


@pytest.fixture
def compilations() -> Callable[[Any], int]:
    """How often a kernel has been compiled or loaded by this process: each is an entry in Triton's cache of it."""
    return lambda kernel: sum(len(caches[0]) for caches in kernel.device_caches.values())
