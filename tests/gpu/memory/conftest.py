"""What the tests of memory on a GPU share."""

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch

from freight import memory


@pytest.fixture(autouse=True)
def _nothing_left_on_the_gpu() -> Iterator[None]:
    """An error of the GPU fails the test that caused it, and what a test held is gone before the next."""
    yield
    torch.cuda.synchronize()
    gc.collect()


@pytest.fixture
def locked_before() -> int:
    """Bytes that are page-locked before the test, once what earlier tests left behind is collected."""
    gc.collect()
    return memory.stats().locked


@pytest.fixture
def in_new_process() -> Callable[..., str]:
    """Run a script in a Python of its own, to its very end, and give what it printed; it may not complain."""

    def run(script: str) -> str:
        command = [sys.executable, "-c", textwrap.dedent(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        assert "Exception ignored" not in done.stderr, done.stderr
        return done.stdout

    return run
