"""What the tests on a GPU share."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def compilations() -> Callable[[Any], int]:
    """How often a kernel has been compiled or loaded by this process: each is an entry in Triton's cache of it."""
    return lambda kernel: sum(len(caches[0]) for caches in kernel.device_caches.values())
