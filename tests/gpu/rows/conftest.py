"""After every test: nothing on the GPU failed, and no table met an id that its test did not speak of."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `rows_on_gpu`, which spawned workers import by name as well


@pytest.fixture(autouse=True)
def _all_said() -> Iterator[None]:
    yield
    from freight.rows import _table

    torch.cuda.synchronize()
    for table in list(_table._open.values()):
        table.check_fault()
