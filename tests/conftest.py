"""What every test stands on: the interpreter without a GPU, settings of its own, lanes that say why they skip."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton, whose own library is compiled or not at import
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings

from freight import _config

_HERE = Path(__file__).parent

# One profile for every machine: CI is never looser than a laptop. The first draw of a shape may compile: no deadline.
settings.register_profile("freight", deadline=None, max_examples=50, print_blob=True)
settings.load_profile("freight")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, the lanes whose means are absent."""
    reasons = {_HERE / "gpu": _why_no_gpu, _HERE / "storage": _why_no_disk}
    for lane, why_not in reasons.items():
        inside = [item for item in items if lane in item.path.parents]
        reason = why_not() if inside else None
        for item in inside if reason else ():
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "needs a GPU: torch sees none"


def _why_no_disk() -> str | None:
    """Asked of the system itself, so that a fault of freight's fails these tests and does not skip them."""
    from freight._direct import default_directory

    directory = default_directory()
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError as error:
        return f"needs a disk with O_DIRECT: {directory} says {error.strerror}; set FREIGHT_DISK_DIR to another"
    return None


@pytest.fixture(autouse=True)
def _own_settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache directory of the test's own, and settings read anew from the environment."""
    monkeypatch.setenv("FREIGHT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    _config.reset()
    yield
    _config.reset()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and its kin give NaN or the largest integer, so that what was never written is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with warnings.catch_warnings():  # the poison is wanted here, not the verdict on torch's own operators
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
