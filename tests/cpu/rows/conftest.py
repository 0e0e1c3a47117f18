"""What is never written is seen, and what the tests of rows share can be imported, by spawned workers too."""

import gc
import sys
from pathlib import Path

import pytest

from freight import memory

sys.path.insert(0, str(Path(__file__).parent))  # for `rows_on_cpu`


@pytest.fixture(autouse=True)
def _poison(poisoned_memory: None) -> None:
    """What a kernel leaves unwritten is NaN or the largest integer, never a lucky zero."""


@pytest.fixture
def held_before() -> int:
    """What freight holds before the test, once what earlier tests left behind is collected."""
    gc.collect()
    return memory.stats().held
